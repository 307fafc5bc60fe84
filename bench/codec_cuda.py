"""How close FP8 encode and decode on a GPU come to a copy, and to torch's conversions where it is installed.

python -m bench.codec --device cuda [--quick] [--output FILE]

Every figure is of a CUDA graph of calls that take turns over enough arrays to exceed four times the L2 cache,
timed with events; all sides replay in turn. Bandwidth counts the bytes read and written. The copy to compare
with is the card's own, of 4 GiB, in the same run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import ml_dtypes
import numpy as np

import corekern
from bench.common import results_name, show_progress, summary, write_results

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
MOVED = (64 << 20, 1 << 30)
"""Bytes read and written by a call, about."""
COPY_MOVED = 4 << 30
CALLS = 10
"""A graph holds at least as many, so that the events' own microsecond does not count."""


def run(quick: bool = False) -> list[dict]:
    """Cases as in a results file: encode and decode E4M3, each dtype and size."""
    import cupy

    repeats = 5 if quick else 30
    copy = _copy_bandwidth(cupy, repeats)
    wanted = list(itertools.product(("encode", "decode"), DTYPES, MOVED))
    cases = []
    for done, (what, dtype, moved) in enumerate(wanted):
        show_progress(done, len(wanted))
        cases.append(_case(cupy, what, dtype, moved, copy, repeats))
    show_progress(len(wanted), len(wanted))
    return cases


def _case(cupy, what: str, dtype: str, moved: int, copy: float, repeats: int) -> dict:
    name = f"codec/{what}/fp8_e4m3/{dtype}/{moved >> 20}MiB"
    elements = moved // (1 + DTYPES[dtype].itemsize)
    elements -= elements % 64  # arrays start where the allocator puts them; their ends are as aligned
    moved = elements * (1 + DTYPES[dtype].itemsize)
    sets = _sets(cupy, moved)
    host = np.random.default_rng(0).standard_normal(elements, np.float32).astype(DTYPES[dtype])
    values = [cupy.asarray(host) for _ in range(sets)]
    codes = [corekern.encode(x) for x in values]
    _check(host, codes[0])

    def ours(i):
        if what == "encode":
            corekern.encode(values[i], out=codes[i])
        else:
            corekern.decode(codes[i], out=values[i])

    sides = {"ours": _cupy_graph(cupy, ours, sets)}
    torch_graph = _torch_graph(what, dtype, elements, sets)
    if torch_graph:
        sides["torch"] = torch_graph
    times = _replay_in_turn(cupy, sides, repeats)
    mine = times.pop("ours")
    bandwidth = moved / mine["median_us"] / 1e3
    return {
        "name": name,
        "elements": elements,
        "bytes": moved,
        "ours": mine,
        "peers": times,
        "limit_us": round(moved / copy / 1e3, 3),
        "GBps": round(bandwidth, 1),
        "copy_GBps": round(copy, 1),
        "of_copy": round(bandwidth / copy, 4),
    }


def _sets(cupy, moved: int) -> int:
    """How many sets of arrays take turns: together more than four times the L2 cache."""
    l2 = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["l2CacheSize"]
    return max(1, -(-4 * l2 // moved))


def _check(x: np.ndarray, codes) -> None:
    """A fast wrong kernel is worth nothing: the first and last million are ml_dtypes' own, there and back."""
    for part in (slice(0, 1 << 20), slice(-(1 << 20), None)):
        expected = x[part].astype(ml_dtypes.float8_e4m3fn)
        back = corekern.decode(codes[part], out_dtype=x.dtype).get()
        if not np.array_equal(codes[part].get(), expected.view(np.uint8)):
            raise AssertionError("encode: the codes differ from those of ml_dtypes")
        if not np.array_equal(back, expected.astype(x.dtype)):
            raise AssertionError("decode: the values differ from those of ml_dtypes")


def _copy_bandwidth(cupy, repeats: int) -> float:
    """GB/s that the card copies at, counting reads and writes: the better of a kernel and the driver's memcpy."""
    source = cupy.zeros(COPY_MOVED // 2 // 16, np.complex128)  # 16 bytes an access
    target = cupy.empty_like(source)
    kernel = cupy.ElementwiseKernel("T x", "T y", "y = x", "copy_elements")
    graphs = {
        "kernel": _cupy_graph(cupy, lambda i: kernel(source, target), 1),
        "memcpy": _cupy_graph(cupy, lambda i: cupy.copyto(target, source), 1),
    }
    times = _replay_in_turn(cupy, graphs, repeats)
    return COPY_MOVED / min(t["median_us"] for t in times.values()) / 1e3


# Graphs: (replay, calls in it)


def _cupy_graph(cupy, call: Callable[[int], None], sets: int) -> tuple[Callable, int]:
    for i in range(sets):
        call(i)  # compiles, and touches the memory
    calls = -(-CALLS // sets) * sets
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for i in range(calls):
            call(i % sets)
        graph = stream.end_capture()
    return lambda on: graph.launch(on), calls


def _torch_graph(what: str, dtype: str, elements: int, sets: int) -> tuple[Callable, int] | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    value_dtype = getattr(torch, dtype)
    values = [torch.randn(elements, device="cuda").to(value_dtype) for _ in range(sets)]
    codes = [x.to(torch.float8_e4m3fn) for x in values]
    calls = -(-CALLS // sets) * sets
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            source, target = (values, codes) if what == "encode" else (codes, values)
            target[i % sets].copy_(source[i % sets])

    def replay(on):
        with torch.cuda.stream(torch.cuda.ExternalStream(on.ptr)):
            graph.replay()

    replay.arrays = values, codes  # a graph keeps no tensor alive
    return replay, calls


def _replay_in_turn(cupy, graphs: dict[str, tuple[Callable, int]], repeats: int) -> dict[str, dict]:
    """Times of one call of each graph, in microseconds; the graphs take turns."""
    stream = cupy.cuda.Stream(non_blocking=True)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for repeat in range(repeats + 2):
        for name, (replay, calls) in graphs.items():
            begin.record(stream)
            replay(stream)
            end.record(stream)
            end.synchronize()
            if repeat >= 2:  # the first two warm up clocks and memory
                samples[name].append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / calls)
    return {name: summary(s) for name, s in samples.items()}


def report(cases: list[dict]) -> None:
    for case in cases:
        line = f"{case['name']:40} {case['GBps']:7.0f} GB/s, "
        line += f"{100 * case['of_copy']:5.1f}% of a copy"
        for peer, time in case["peers"].items():
            line += f"   {time['median_us'] / case['ours']['median_us']:5.2f}x {peer}"
        print(line)


def measure(quick: bool = False, output: str | None = None) -> None:
    """Runs, reports, and writes a results file."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    card = properties["name"].decode()
    cases = run(quick)
    report(cases)
    name = results_name("codec", card)
    versions = {
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cuda": cupy.cuda.runtime.runtimeGetVersion(),
    }
    print("wrote", write_results(name, cases, output, card=card, **versions))
