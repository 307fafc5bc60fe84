"""CUDA graphs and streams through the public functions: what is captured reads its arrays when it is replayed."""

import numpy as np
import pytest
from helpers import assert_same_bits, cuda_backend, make_problem

import corekern

pytestmark = pytest.mark.gpu

PROBLEM = make_problem(41, rows=(3, 1, 2), seq_lens=(700, 40, 90), q_heads=6, kv_heads=2, head_dim=64)
LENGTHS = {
    "live": PROBLEM.row_lengths,
    "all zero": np.zeros(6, np.int32),
    "tail zero": PROBLEM.row_lengths * np.int32([1, 1, 1, 1, 0, 0]),
    "first zero": PROBLEM.row_lengths * np.int32([0, 1, 1, 1, 1, 1]),
    "shorter": np.maximum(PROBLEM.row_lengths - 33, 1).astype(np.int32),
    "restored": PROBLEM.row_lengths,
}


@pytest.fixture(scope="module")
def cuda():
    return cuda_backend()


@pytest.fixture
def stream(cuda):
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def new_tokens(cuda):
    """Three tokens for the first request's last slots, and a padded one."""
    rng = np.random.default_rng(42)
    k, v = (cuda.asarray(rng.standard_normal((4, 2, 64), np.float32).astype(np.float16)) for _ in range(2))
    last = [PROBLEM.block_table[0, t // 16] * 16 + t % 16 for t in (697, 698, 699)]
    return k, v, cuda.asarray(np.int32([*last, -1]))


def test_a_captured_write_and_attention_gives_the_eager_bits(cuda, stream):
    import cupy

    arguments = PROBLEM.arguments(cuda)
    q, cache, lengths = arguments["q"], arguments["cache"], arguments["row_lengths"]
    tokens = new_tokens(cuda)
    out = cupy.empty_like(q)
    with stream:
        cache.write(*tokens)  # compiles; a capture only records
        plan = corekern.plan_attention(**arguments)
        plan(q, out=out)
        stream.begin_capture()
        cache.write(*tokens)
        plan(q, out=out)
        graph = stream.end_capture()
        for name, values in LENGTHS.items():
            lengths.set(values)
            out.fill(np.nan)
            graph.launch()
            stream.synchronize()
            eager = corekern.paged_attention(**arguments)
            assert_same_bits(out.get(), eager.get(), name)
            assert not out.get()[values == 0].any()


def test_a_capture_without_workspace_names_the_call_to_make(cuda, stream):
    import cupy

    arguments = PROBLEM.arguments(cuda)
    out = cupy.empty_like(arguments["q"])
    eager = corekern.paged_attention(**arguments).get()
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match=r"call corekern\.reserve\((\d+)\)") as error:
                corekern.paged_attention(**arguments, out=out)
            with pytest.raises(ValueError, match="captured"):
                corekern.reserve(1)
        finally:
            stream.end_capture()
        needed = int(str(error.value).split("corekern.reserve(")[1].split(")")[0])
        corekern.reserve(needed)
        stream.begin_capture()
        corekern.paged_attention(**arguments, out=out)
        graph = stream.end_capture()
        # A larger call replaces the stream's workspace; the graph keeps the one that it was made with.
        corekern.reserve(4 * needed)
        graph.launch()
        stream.synchronize()
    assert_same_bits(out.get(), eager)


def test_a_capture_must_be_given_its_output(cuda, stream):
    arguments = PROBLEM.arguments(cuda)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(ValueError, match=r"^out: "):
                corekern.paged_attention(**arguments)
        finally:
            stream.end_capture()


def test_two_streams_at_once(cuda):
    import cupy

    problems = [make_problem(s, rows=(4,), seq_lens=(3000,), q_heads=4, head_dim=128) for s in (43, 44)]
    expected = [p.run(cuda) for p in problems]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in problems]
    calls = []
    for stream, problem in zip(streams, problems, strict=True):
        with stream:
            arguments = problem.arguments(cuda)
            calls.append((stream, corekern.plan_attention(**arguments), arguments["q"]))
    outs = [[cupy.empty_like(q) for _ in range(20)] for _, _, q in calls]
    for turn in range(20):
        for (stream, plan, q), out in zip(calls, outs, strict=True):
            with stream:
                plan(q, out=out[turn])
    for stream in streams:
        stream.synchronize()
    for turns, want in zip(outs, expected, strict=True):
        for out in turns:
            assert_same_bits(out.get(), want)


def test_arrays_on_different_devices_are_an_error(cuda):
    arguments = PROBLEM.arguments(cuda)
    with pytest.raises(ValueError, match=r"^q: is on cpu, but cache is on cuda:0$"):
        corekern.paged_attention(**arguments | {"q": PROBLEM.q})


def test_results_come_back_in_the_callers_library(cuda):
    torch = pytest.importorskip("torch")
    arguments = PROBLEM.arguments(cuda)
    tensors = {name: torch.from_dlpack(a) if hasattr(a, "__dlpack__") else a for name, a in arguments.items()}
    out = corekern.paged_attention(**tensors)
    assert isinstance(out, torch.Tensor)
    assert_same_bits(out.cpu().numpy(), PROBLEM.run(cuda))
    given = torch.empty_like(tensors["q"])
    assert corekern.paged_attention(**tensors, out=given) is given
    assert_same_bits(given.cpu().numpy(), PROBLEM.run(cuda))
