"""Dense verification on the CPU: 8 rows, 6 query heads, 1 KV head, head_dim 256 over an E4M3 cache.

    python -m bench.cpu_attention [--contexts 8192 65536 131072 262144] [--repeats 9] [--output FILE]

Against NumPy (decode the cache with ml_dtypes' values by table, then BLAS) and, where it is installed,
torch: decode + SDPA, and SDPA alone on K and V already in float32, which no cache of this size would hold.
All sides take turns. Memory is the growth of the process's peak during one call.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np

import corekern
from bench.common import relative_l2, time_together, write_results
from corekern import reference

ROWS, Q_HEADS, HEAD_DIM, PAGE = 8, 6, 256, 3296
K_SCALE, V_SCALE = 0.5, 1.25


def problem(context: int) -> dict:
    """A request whose pages lie in random order, and its codes in token order for the peers."""
    rng = np.random.default_rng(20260908)
    pages = -(-context // PAGE)
    order = rng.permutation(pages).astype(np.int32)
    cache = corekern.PagedKVCache.empty(
        pages, PAGE, 1, HEAD_DIM, dtype="fp8_e4m3", layout="interleaved", k_scale=K_SCALE, v_scale=V_SCALE
    )
    for page in order:
        k, v = rng.standard_normal((2, PAGE, 1, HEAD_DIM), np.float32)
        cache.write(k, v, np.arange(page * PAGE, (page + 1) * PAGE))
    q = rng.standard_normal((ROWS, Q_HEADS, HEAD_DIM), np.float32).astype(np.float16)
    starts = np.int32([0, ROWS])
    lengths = corekern.causal_row_lengths(np.int32([context]), starts)
    k_codes, v_codes = (np.concatenate(list(c[order, :, 0]))[:context] for c in (cache.k, cache.v))
    return {
        "arguments": (q, cache, order[None], lengths, starts),
        "codes": (k_codes, v_codes),
        "lengths": lengths,
    }


def numpy_attention(q, codes, lengths, table):
    """Dequantize and BLAS: what a NumPy user writes, with the mask on the causal tail alone."""
    k, v = (np.take(table, c, mode="clip") for c in codes)  # the fastest of NumPy's look-ups
    queries = q.astype(np.float32).reshape(-1, HEAD_DIM) * np.float32(K_SCALE * HEAD_DIM**-0.5)
    scores = queries @ k.T
    tail = int(lengths.min())
    unseen = np.arange(tail, len(k)) >= np.repeat(lengths, Q_HEADS)[:, None]
    scores[:, tail:][unseen] = -np.inf
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    out = (scores @ v) * np.float32(V_SCALE) / scores.sum(axis=1, keepdims=True)
    return out.reshape(q.shape).astype(q.dtype)


def torch_calls(q, codes, table) -> dict:
    try:
        import torch
    except ImportError:
        return {}
    queries = torch.from_numpy(q.astype(np.float32)).transpose(0, 1).reshape(1, 1, -1, HEAD_DIM)
    fp8 = [torch.from_numpy(c).view(torch.float8_e4m3fn)[None, None] for c in codes]
    floats = [t.to(torch.float32) for t in fp8]
    attend = torch.nn.functional.scaled_dot_product_attention
    return {
        "torch_dequantize_sdpa": lambda: attend(queries, *(t.to(torch.float32) for t in fp8)),
        "torch_sdpa_on_float32": lambda: attend(queries, *floats),
    }


def peak_growth(call: Callable[[], object]) -> int:
    """Bytes by which the process's peak of resident memory rises during a call (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)  # or memory freed earlier would be taken again unseen
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident now
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def run(context: int, repeats: int) -> dict:
    p = problem(context)
    q = p["arguments"][0]
    table = reference.decode(np.arange(256, dtype=np.uint8), "fp8_e4m3").astype(np.float32)
    out = np.empty_like(q)
    corekern.paged_attention(*p["arguments"], out=out)  # compiled before memory is looked at
    grown = peak_growth(lambda: corekern.paged_attention(*p["arguments"], out=out))
    calls = {
        "ours": lambda: corekern.paged_attention(*p["arguments"], out=out),
        "numpy_dequantize_blas": lambda: numpy_attention(q, p["codes"], p["lengths"], table),
        **torch_calls(q, p["codes"], table),
    }
    times = time_together(calls, repeats)
    expected = reference.paged_attention(*p["arguments"])
    return {
        "name": f"cpu/dense/q{ROWS}/L{context}/page{PAGE}",
        "ours": times.pop("ours"),
        "peers": times,
        "memory_growth_MiB": round(grown / 2**20, 1),
        "error": {
            "rel_l2": relative_l2(out, expected),
            "floor": relative_l2(expected.astype(q.dtype), expected),
            "numpy_rel_l2": relative_l2(numpy_attention(q, p["codes"], p["lengths"], table), expected),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 65536, 131072, 262144])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", help="results file (default bench/results/cpu_attention-cpu.json)")
    options = parser.parse_args()
    cases = []
    for context in options.contexts:
        case = run(context, options.repeats)
        ratios = {n: round(t["median_us"] / case["ours"]["median_us"], 2) for n, t in case["peers"].items()}
        print(
            f"{case['name']:30} {case['ours']['median_us'] / 1e3:8.1f} ms, "
            f"error/floor {case['error']['rel_l2'] / case['error']['floor']:.4f}, "
            f"+{case['memory_growth_MiB']} MiB, slower: {ratios}",
            flush=True,
        )
        cases.append(case)
    print("wrote", write_results("cpu_attention-cpu", cases, options.output, card="cpu"))


if __name__ == "__main__":
    main()
