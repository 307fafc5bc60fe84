"""Dense verify and decode on one card in under a minute: correctness first, then cold-cache times.

    python -m bench.grouped_quick                 errors, then graph times of the four contexts
    python -m bench.grouped_quick --profile 65536 one warm-up and one launch, for ncu

Times rotate over block tables into one pool of pages, so that every launch finds its cache cold in the L2.
"""

from __future__ import annotations

import argparse
import time

import cupy as cp
import ml_dtypes
import numpy as np

from corekern import PagedKVCache, reference
from corekern.cuda import grouped
from corekern.formats import get_format

HEAD_DIM, PAGE = 256, 3296
CONTEXTS = (8192, 65536, 131072, 262144)
LIMIT_US = {8192: 0.9, 65536: 7.4, 131072: 14.7, 262144: 29.5}
COLD_BYTES = 300 << 20
SCALE = 5.0 / 448


def make_pool(
    pages: int, seed: int = 0, kv_heads: int = 1, page_size: int = PAGE, head_dim: int = HEAD_DIM, bias=None
):
    """A cache of normal data in E4M3; values repeat after four million elements."""
    rng = np.random.default_rng(seed)
    sample = rng.standard_normal(1 << 22, dtype=np.float32)
    codes = cp.asarray(
        (sample / np.float32(SCALE)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    )
    shape = (pages, page_size, kv_heads, head_dim)
    k, v = (
        codes[cp.random.RandomState(seed + i).randint(0, 1 << 22, shape, dtype=np.int32)] for i in range(2)
    )
    if bias is not None:
        values = (
            cp.asarray(sample)[cp.random.RandomState(9).randint(0, 1 << 22, shape, dtype=np.int32)]
            + cp.asarray(bias)
        ) / SCALE
        lut = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
        table = cp.asarray(
            np.nan_to_num(lut, posinf=448, neginf=-448)
            .clip(-448, 448)
            .astype(ml_dtypes.float8_e4m3fn)
            .view(np.uint8)
        )
        v = table[values.astype(np.float16).view(np.uint16)]
    return PagedKVCache(k, v, get_format("fp8_e4m3"), SCALE, SCALE)


LUT = reference.decode(np.arange(256, dtype=np.uint8), "fp8_e4m3")


def oracle(q, cache, pages, lengths, softmax_scale):
    """float64 numerator, maximum and sum for one request, KV head 0, in chunks of pages."""
    lut = cp.asarray(LUT)
    rows, heads, dim = q.shape
    q64 = q.astype(np.float64).reshape(-1, dim) * (softmax_scale * np.log2(np.e) * cache.k_scale)
    lens = cp.repeat(cp.asarray(lengths), heads)
    n, m, total = cp.zeros((rows * heads, dim)), cp.full(rows * heads, -np.inf), cp.zeros(rows * heads)
    size = cache.page_size
    for i, page in enumerate(pages):
        if i * size >= max(lengths):
            break
        k, v = lut[cache.k[page, :, 0]], lut[cache.v[page, :, 0]]
        visible = i * size + cp.arange(size) < lens[:, None]
        s = cp.where(visible, q64 @ k.T, -np.inf)
        new = cp.maximum(m, s.max(1))
        old = cp.where(m > -np.inf, cp.exp2(m - cp.where(new > -np.inf, new, 0)), 0)
        p = cp.where(visible, cp.exp2(s - cp.where(new > -np.inf, new, 0)[:, None]), 0)
        n, total, m = n * old[:, None] + p @ cp.where(cp.isnan(v), 0, v), total * old + p.sum(1), new
    shape = (rows, heads)
    return n.reshape(*shape, dim) * cache.v_scale, m.reshape(shape), total.reshape(shape)


def rel(a, b):
    return float(cp.linalg.norm(a.astype(np.float64) - b) / cp.linalg.norm(b))


def problem(cache, length, rows=8, heads=6, first_page=0, seed=1, dtype=np.float16, dim=HEAD_DIM):
    count = -(-length // cache.page_size)
    pages = [(first_page + 7 * i) % cache.num_pages for i in range(count)]
    q = cp.asarray(np.random.default_rng(seed).standard_normal((rows, heads, dim), dtype=np.float32)).astype(
        dtype
    )
    lengths = np.arange(length - rows + 1, length + 1, dtype=np.int32)
    return {
        "q": q, "block_table": cp.asarray(np.array([pages], np.int32)), "row_lengths": cp.asarray(lengths),
        "query_start_loc": cp.asarray(np.array([0, rows], np.int32)),
    }, pages, lengths  # fmt: skip


def check(cache, length, label="", **kw):
    args, pages, lengths = problem(cache, length, **kw)
    q = args["q"]
    state = (
        cp.full(q.shape, np.nan, np.float32),
        cp.empty(q.shape[:2], np.float32),
        cp.empty(q.shape[:2], np.float32),
    )
    scale = q.shape[2] ** -0.5
    plan = grouped.plan(cache=cache, softmax_scale=scale, state=state, **args)
    out = plan.launch().copy()
    again = plan.launch().copy()
    n, m, total = oracle(q, cache, pages, lengths, scale)
    expected = n / total[..., None]
    floor = rel(expected.astype(q.dtype), expected)
    # The state is compared at the reference's maximum.
    shift = cp.exp2(state[1].astype(np.float64) - m)
    print(
        f"{label or length}: out {rel(out, expected):.3e} floor {floor:.3e} ratio {rel(out, expected) / floor:.4f} | "
        f"max {float(cp.abs(state[1] - m).max()):.1e} sum {rel(state[2] * shift, total):.1e} "
        f"num {rel(state[0] * shift[..., None], n):.1e} | repeat {bool((out.view(np.uint16) == again.view(np.uint16)).all())}",
        flush=True,
    )
    return rel(out, expected) / floor


def cold_time(cache, length, rows, heads=6, calls=20, replays=15):
    pages_each = -(-length // cache.page_size)
    wanted = -(-COLD_BYTES // (length * 2 * HEAD_DIM))
    tables = min(max(wanted, 2), max(2, cache.num_pages // pages_each))
    calls = max(calls, tables)
    plans = []
    workspace = None
    for i in range(tables):
        args, _, _ = problem(cache, length, rows, heads)
        ids = (np.arange(pages_each) + i * pages_each) % cache.num_pages
        args["block_table"] = cp.asarray(ids[None].astype(np.int32))
        plans.append(grouped.plan(cache=cache, softmax_scale=1 / 16, workspace=workspace, **args))
        workspace = plans[0].kept[2]
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.runtime.deviceSynchronize()
    with stream:
        plans[0].launch()
        stream.begin_capture()
        for i in range(calls):
            plans[i % tables].launch()
        graph = stream.end_capture()
        times = []
        for _ in range(replays + 3):
            begin, end = cp.cuda.Event(), cp.cuda.Event()
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cp.cuda.get_elapsed_time(begin, end) * 1e3 / calls)
    times = np.array(times[3:])
    host = time.perf_counter()
    for _ in range(200):
        plans[0].launch()
    host = (time.perf_counter() - host) / 200 * 1e6
    cp.cuda.runtime.deviceSynchronize()
    return (
        float(np.median(times)),
        float(np.percentile(times, 10)),
        float(np.percentile(times, 90)),
        tables,
        host,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", type=int)
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args()
    cache = make_pool(320)
    if options.profile:
        args, _, _ = problem(cache, options.profile)
        plan = grouped.plan(cache=cache, softmax_scale=1 / 16, **args)
        for _ in range(2):
            plan.launch()
        cp.cuda.runtime.deviceSynchronize()
        return
    for length in (64, 100, 200, 1000, 3300, 8192, 65536, 131072, 262144):
        check(cache, length)
    check(cache, 8192, "q1 8192", rows=1)
    check(cache, 131072, "q5 131072", rows=5)
    if options.no_times:
        return
    for rows in (8, 1):
        for length in CONTEXTS:
            median, low, high, tables, host = cold_time(cache, length, rows)
            print(
                f"q{rows} {length}: {median:.2f} us (p10 {low:.2f}, p90 {high:.2f}), limit {LIMIT_US[length]}, "
                f"{tables} tables, python {host:.1f} us",
                flush=True,
            )


if __name__ == "__main__":
    main()
