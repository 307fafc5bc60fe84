"""What FP32 logits cost against a float16 result, and how much nearer they are.

python -m bench.logits [--device cpu|cuda] [--rows 1 8 64] [--output FILE]

On a GPU: CUDA graphs in alternating order over as many copies of the head as exceed four times the L2 cache; the peer
is the library's own product with a float16 result (cupy.matmul, which is cuBLAS with float32 accumulation). Errors
are of 64 selected columns a row, against float64.
"""

from __future__ import annotations

import argparse

import numpy as np

import corekern
from bench.common import card_name, relative_l2, results_name, summary, time_together, write_results
from bench.dense import alternate, graph_of

VOCAB, HIDDEN, CANDIDATES = 62_080, 5_120, 64


def operands(rows: int, vocab: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """hidden, lm_head and candidate_ids: logits of a model's usual spread, about 1."""
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((rows, size), np.float32).astype(np.float16)
    head = np.empty((vocab, size), np.float16)
    for begin in range(0, vocab, 4096):
        part = head[begin : begin + 4096]
        part[...] = rng.standard_normal(part.shape, np.float32) / np.sqrt(np.float32(size))
    return hidden, head, rng.integers(0, vocab, (rows, CANDIDATES)).astype(np.int32)


def errors(found: np.ndarray, hidden: np.ndarray, head: np.ndarray, ids: np.ndarray) -> dict[str, float]:
    """rel-L2 of candidates' logits, and of the exact ones rounded to float16: the least that float16 results have."""
    exact = np.einsum("rk,rck->rc", hidden.astype(np.float64), head[ids].astype(np.float64))
    mine, half = relative_l2(found, exact), relative_l2(exact.astype(np.float16), exact)
    return {"rel_l2": mine, "float16_rel_l2": half, "times_nearer": half / mine}


def cpu_case(rows: int, repeats: int, vocab: int = VOCAB, size: int = HIDDEN) -> list[dict]:
    """On the CPU: candidates and all columns; no library there has a float16 product to compare with."""
    hidden, head, ids = operands(rows, vocab, size)
    dense = corekern.dense_logits(hidden, head)
    few = corekern.candidate_logits(hidden, head, ids)
    calls = {
        "dense": lambda: corekern.dense_logits(hidden, head, out=dense),
        "candidates": lambda: corekern.candidate_logits(hidden, head, ids, out=few),
    }
    times = time_together(calls, repeats, warm_up=1)
    found = {"dense": np.take_along_axis(dense, ids.astype(np.int64), 1), "candidates": few}
    return [_case(name, rows, times[name], {}, errors(found[name], hidden, head, ids)) for name in calls]


def cuda_case(rows: int, repeats: int) -> list[dict]:
    """On a GPU, beside the float16 product."""
    import cupy

    hidden, head, ids = operands(rows, VOCAB, HIDDEN)
    states, candidates = cupy.asarray(hidden), cupy.asarray(ids)
    l2 = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["l2CacheSize"]
    heads = [cupy.asarray(head) for _ in range(max(2, -(-4 * l2 // head.nbytes)))]
    dense = [cupy.empty((rows, VOCAB), np.float32) for _ in heads]
    half = [cupy.empty((rows, VOCAB), np.float16) for _ in heads]
    few = cupy.empty((rows, CANDIDATES), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()

    def product(i: int):
        return lambda: cupy.matmul(states, heads[i].T, out=half[i])

    def ours(i: int):
        return lambda: corekern.dense_logits(states, heads[i], out=dense[i])

    def ours_few(i: int):
        return lambda: corekern.candidate_logits(states, heads[i], candidates, out=few)

    turns = [i % len(heads) for i in range(10)]
    samplers = {
        name: graph_of([make(i) for i in turns], stream)
        for name, make in (("dense", ours), ("float16_product", product), ("candidates", ours_few))
    }
    times = {name: summary(values) for name, values in alternate(samplers, repeats, 2).items()}
    peer = {"float16_product": times["float16_product"]}
    found = {"dense": np.take_along_axis(dense[0].get(), ids.astype(np.int64), 1), "candidates": few.get()}
    return [_case(name, rows, times[name], peer, errors(found[name], hidden, head, ids)) for name in found]


def _case(name: str, rows: int, ours: dict, peers: dict, error: dict) -> dict:
    case = {"name": f"logits/{name}/r{rows}", "ours": ours, "peers": peers, "error": error}
    return case | {f"over_{peer}": ours["median_us"] / time["median_us"] for peer, time in peers.items()}


def report(cases: list[dict]) -> None:
    for case in cases:
        line = f"{case['name']:26} {case['ours']['median_us']:10.1f} us"
        for peer, time in case["peers"].items():
            line += f"   {case['ours']['median_us'] / time['median_us']:.3f} of {peer}"
        error = case["error"]
        print(
            f"{line}   rel-L2 {error['rel_l2']:.2e}, float16 {error['float16_rel_l2']:.2e}: {error['times_nearer']:.0f}x nearer"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", help="results file (default bench/results/logits-<card>.json)")
    options = parser.parse_args()
    measure = cuda_case if options.device == "cuda" else cpu_case
    cases = [case for rows in options.rows for case in measure(rows, options.repeats)]
    report(cases)
    card, more = "cpu", {}
    if options.device == "cuda":
        import cupy

        card = card_name(cupy)
        more = {
            "driver": cupy.cuda.runtime.driverGetVersion(),
            "cuda": cupy.cuda.runtime.runtimeGetVersion(),
        }
    print("wrote", write_results(results_name("logits", card), cases, options.output, card=card, **more))


if __name__ == "__main__":
    main()
