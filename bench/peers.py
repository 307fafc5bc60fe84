"""Dense attention beside other libraries' kernels, in one run: the same codes, pages, queries and lengths, cold caches.

    python -m bench.peers --path FOLDER

FOLDER, put first on the import path, holds vLLM's `triton_unified_attention`; FlashInfer is used when it imports. Needs a GPU
and torch. What does not import, or refuses a case, is left out with its reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from bench import dense
from bench.common import card_name, results_name, show_progress, summary, write_results
from bench.operator import GPU_CASES, namespace

SEGMENTS = (16, 64, 128)


def ours(problem: dense.Problem, out: Any) -> list[Callable[[], object]]:
    import corekern

    plans = [corekern.plan_attention(**problem.arguments(i)) for i in range(len(problem.tables))]
    return [lambda plan=plan: plan(problem.q, out=out) for plan in plans]


class Tensors:
    """A problem's arrays as torch tensors over the same memory."""

    def __init__(self, problem: dense.Problem) -> None:
        import torch

        self.case = problem.case
        self.q = torch.from_dlpack(problem.q)
        self.k, self.v = (
            torch.from_dlpack(a).view(torch.float8_e4m3fn) for a in (problem.cache.k, problem.cache.v)
        )
        self.scales = problem.cache.k_scale, problem.cache.v_scale
        self.tables = [torch.from_dlpack(t) for t in problem.tables]
        self.query_start_loc = torch.from_dlpack(problem.query_start_loc)
        self.seq_lens = torch.full((self.case.requests,), self.case.length, dtype=torch.int32, device="cuda")
        self.out = torch.empty_like(self.q)


def vllm_unified(tensors: Tensors, segments: int) -> list[Callable[[], object]]:
    import torch
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    t, case = tensors, tensors.case
    rows, heads = t.q.shape[:2]
    scales = [torch.tensor(s, device="cuda") for s in t.scales]
    accumulated = torch.empty(rows, heads, segments, dense.HEAD_DIM, device="cuda")
    maxima, sums = (torch.empty(rows, heads, segments, device="cuda") for _ in range(2))

    def call(table: Any) -> object:
        return unified_attention(
            t.q, t.k, t.v, t.out, t.query_start_loc, case.rows, t.seq_lens, case.length, dense.HEAD_DIM**-0.5,
            True, (-1, -1), table, 0, None, *scales, seq_threshold_3D=64, num_par_softmax_segments=segments,
            softmax_segm_output=accumulated, softmax_segm_max=maxima, softmax_segm_expsum=sums,
            kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
        )  # fmt: skip

    return [lambda table=table: call(table) for table in t.tables]


def flashinfer_prefill(tensors: Tensors) -> list[Callable[[], object]]:
    import flashinfer
    import torch

    t, case = tensors, tensors.case
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    calls = []
    for table in t.tables:
        each = table.shape[1]
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(
            t.query_start_loc,
            torch.arange(case.requests + 1, dtype=torch.int32, device="cuda") * each,
            table.reshape(-1),
            torch.full((case.requests,), case.length - (each - 1) * case.page, dtype=torch.int32, device="cuda"),
            case.q_heads, case.kv_heads, dense.HEAD_DIM, case.page, causal=True, sm_scale=dense.HEAD_DIM**-0.5,
            q_data_type=torch.float16, kv_data_type=torch.float8_e4m3fn,
        )  # fmt: skip
        calls.append(
            lambda w=wrapper: w.run(t.q, (t.k, t.v), out=t.out, k_scale=t.scales[0], v_scale=t.scales[1])
        )
    return calls


def torch_graph_of(calls: list[Callable[[], object]]) -> Callable[[], float]:
    """As `dense.graph_of`, in torch: a sampler of microseconds a call."""
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / len(calls)

    return sample


def measure(name: str, xp: Any, blocks: int, warm_up: int) -> dict:
    case = dense.parse(name)
    problem = dense.make_problem(case, xp)
    oracle = dense.Oracle(problem, xp)
    tensors = Tensors(problem)
    stream = xp.cuda.Stream(non_blocking=True)
    out = xp.empty_like(problem.q)
    repeats = max(1, 8 // len(problem.tables)) if case.requests == 1 else 1
    with stream:
        calls = ours(problem, out)
    samplers = {"ours": dense.graph_of(calls * repeats, stream)}
    stream.synchronize()
    calls[0]()
    errors = {"ours": oracle.errors(out, None)}
    refused = {}
    peers = {f"vllm_unified_{n}": lambda n=n: vllm_unified(tensors, n) for n in SEGMENTS}
    peers["flashinfer_fa2"] = lambda: flashinfer_prefill(tensors)
    for peer, make in peers.items():
        try:
            calls = make()
            calls[0]()
            errors[peer] = oracle.errors(xp.from_dlpack(tensors.out), None)
            samplers[peer] = torch_graph_of(calls * repeats)
        except Exception as error:  # whatever a peer raises for what it does not take
            refused[peer] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[
                :200
            ]
    samples = dense.alternate(samplers, blocks, warm_up)
    variants = {who: summary(s) | {"error": errors[who]} for who, s in samples.items()}
    found = {
        "name": name,
        "ours": {k: v for k, v in variants["ours"].items() if k != "error"},
        "peers": {who: v for who, v in variants.items() if who != "ours"},
        "error": errors["ours"],
        "kv_bytes": case.kv_bytes,
        "refused": refused,
    }
    if limit := case.limit_us(card_name(xp)):
        found["limit_us"] = limit
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", help="a folder to import the peers from")
    parser.add_argument("--cases", nargs="+", metavar="NAME", default=GPU_CASES)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--output")
    options = parser.parse_args(arguments)
    if options.path:
        sys.path.insert(0, options.path)
    xp = namespace("cuda")
    cases = []
    for i, name in enumerate(options.cases):
        show_progress(i, len(options.cases))
        case = measure(name, xp, options.blocks, options.warm_up)
        cases.append(case)
        others = ", ".join(f"{who} {found['median_us']:.1f} us" for who, found in case["peers"].items())
        print(
            f"{name}: ours {case['ours']['median_us']:.2f} us; {others or 'no peer'} {case['refused'] or ''}",
            flush=True,
        )
        xp.get_default_memory_pool().free_all_blocks()
    card = card_name(xp)
    print("wrote", write_results(results_name("peers", card), cases, options.output, card=card))


if __name__ == "__main__":
    main()
