"""Routes of dense attention against each other: the same codes, queries, lengths, scales and pages for all.

    python -m bench.operator --output operator.json
    python -m bench.operator --routes grouped_fp32 scalar_fp32 --cases dense/q8/L8192/page3296 --plot operator.png

On a GPU, CUDA graphs that rotate over more than four times the L2 cache; else host calls of the CPU's routes. Errors are
against float64 on the same codes, apart from what quantization and the output's rounding cost.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

import corekern
from bench import dense
from bench.common import card_name, cpu_name, results_name, show_progress, summary, write_results

GPU_CASES = (
    *(f"dense/q8/L{length}/page3296" for length in (8192, 65536, 131072, 262144)),
    "dense/q1/L131072/page848",
    "dense/q5/L131072/page848",
    "dense/64xq4/L8192/page1600/h24-2",
)
CPU_CASES = ("dense/q8/L8192/page3296", "dense/q8/L65536/page3296")
GPU_ROUTES = ("grouped_fp16_legacy", "grouped_fp32")


def measure(name: str, routes: tuple[str, ...], xp: Any, blocks: int, warm_up: int) -> dict:
    """One case: samples and errors of every route that takes it, the last in `routes` as ours."""
    case = dense.parse(name)
    gpu = xp is not np
    problem = dense.make_problem(case, xp, dense.COLD_BYTES if gpu else 0)
    oracle = dense.Oracle(problem, xp)
    reasons = {route: corekern.explain_route(**problem.arguments(), route=route)[route] for route in routes}
    taken = [route for route, why in reasons.items() if why == "taken"]
    samplers, errors, host = {}, {}, {}
    stream = xp.cuda.Stream(non_blocking=True) if gpu else None
    out = xp.empty_like(problem.q)
    for route in taken:
        state = corekern.partial_attention(**problem.arguments(), route=route)
        errors[route] = oracle.errors(corekern.paged_attention(**problem.arguments(), route=route), state)
        if gpu:
            with stream:
                plans = [
                    corekern.plan_attention(**problem.arguments(i), route=route)
                    for i in range(len(problem.tables))
                ]
            calls = [lambda plan=plan: plan(problem.q, out=out) for plan in plans]
            calls *= max(1, 8 // len(calls)) if case.requests == 1 else 1
            samplers[route] = dense.graph_of(calls, stream)
            host[route] = host_overhead(plans[0], problem.q, out, stream)
        else:
            plan = corekern.plan_attention(**problem.arguments(), route=route)
            samplers[route] = lambda plan=plan: host_time(lambda: plan(problem.q, out=out))
    samples = dense.alternate(samplers, blocks, warm_up)
    variants = {route: summary(samples[route]) | {"error": errors[route]} for route in taken}
    for route, microseconds in host.items():
        variants[route]["host_us"] = microseconds
    found = {
        "name": name,
        "ours": {k: v for k, v in variants[taken[-1]].items() if k != "error"} | {"route": taken[-1]},
        "peers": {route: variants[route] for route in taken[:-1]},
        "error": variants[taken[-1]]["error"],
        "kv_bytes": case.kv_bytes,
        "not_taken": {route: why for route, why in reasons.items() if why != "taken"},
    }
    if limit := case.limit_us(card_name(xp)):
        found["limit_us"] = limit
        found["of_read_bandwidth"] = round(found["limit_us"] / found["ours"]["median_us"], 3)
    return found


def host_time(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def host_overhead(plan: Any, q: Any, out: Any, stream: Any) -> float:
    """Microseconds that a planned call keeps Python busy: the least of 20 runs of 20 calls, so few that the card's queue takes
    all of them at once."""
    with stream:
        runs = []
        for _ in range(20):
            stream.synchronize()
            runs.append(host_time(lambda: [plan(q, out=out) for _ in range(20)]) / 20)
    return round(min(runs), 2)


def plot(cases: list[dict], path: str) -> None:
    """Latency and error by context, a line a route."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (time_axis, error_axis) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    lines: dict[tuple[int, str], list[tuple[int, float, float]]] = {}
    for case in cases:
        shape = dense.parse(case["name"])
        if shape.requests > 1:
            continue
        variants = {case["ours"]["route"]: case["ours"] | {"error": case["error"]}, **case["peers"]}
        for route, found in variants.items():
            lines.setdefault((shape.rows, route), []).append(
                (shape.length, found["median_us"], found["error"]["over_floor"])
            )
    for (rows, route), points in sorted(lines.items()):
        lengths, times, errors = zip(*sorted(points), strict=True)
        time_axis.plot(lengths, times, "o-", label=f"{route}, {rows} rows")
        error_axis.plot(lengths, errors, "o-", label=f"{route}, {rows} rows")
    time_axis.set(
        xlabel="tokens", ylabel="µs a call", title="Latency, cold cache", xscale="log", yscale="log"
    )
    error_axis.set(
        xlabel="tokens", ylabel="error / rounding floor", title="Error against float64", xscale="log"
    )
    for axis in (time_axis, error_axis):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="such as dense/q8/L8192/page3296")
    parser.add_argument(
        "--routes", nargs="+", metavar="ROUTE", help="the last one is compared with the others"
    )
    parser.add_argument("--blocks", type=int, default=25, help="of two samples a route (25)")
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--output", help="a JSON file; bench/results/operator-CARD.json when left out")
    parser.add_argument("--plot", metavar="FILE", help="latency and error by context")
    options = parser.parse_args(arguments)
    xp = namespace(options.device)
    card = card_name(xp)
    routes = tuple(options.routes or (("cpu_fp32",) if xp is np else GPU_ROUTES))
    names = options.cases or (CPU_CASES if xp is np else GPU_CASES)
    cases = []
    for i, name in enumerate(names):
        show_progress(i, len(names))
        cases.append(measure(name, routes, xp, options.blocks, options.warm_up))
        print(line(cases[-1]), flush=True)
        if xp is not np:
            xp.get_default_memory_pool().free_all_blocks()
    where = {"card": card} | ({"cpu": cpu_name()} if xp is np else {})
    print("wrote", write_results(results_name("operator", card), cases, options.output, **where))
    if options.plot:
        plot(cases, options.plot)
        print("wrote", Path(options.plot))


def line(case: dict) -> str:
    parts = [f"{case['name']}: {case['ours']['route']} {case['ours']['median_us']:.2f} us"]
    parts += [f"{route} {found['median_us']:.2f} us" for route, found in case["peers"].items()]
    if "limit_us" in case:
        parts.append(f"{100 * case['of_read_bandwidth']:.0f} % of read bandwidth")
    if "host_us" in case["ours"]:
        parts.append(f"Python {case['ours']['host_us']:.1f} us")
    error = case["error"]
    parts.append(f"error {error['over_floor']:.4f} x floor, state {error['state_rel_l2']:.1e}")
    return ", ".join(parts)


def namespace(device: str | None) -> Any:
    if device == "cpu":
        return np
    try:
        import cupy

        cupy.zeros(1)
        return cupy
    except Exception as error:  # CuPy's own types, or ImportError
        if device == "cuda":
            raise SystemExit(f"--device cuda: no usable GPU: {error}") from None
        return np


if __name__ == "__main__":
    main()
