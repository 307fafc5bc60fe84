"""The grouped Hopper kernel on a GPU: errors against float64, poison, and bits that must not change."""

import math

import numpy as np
import pytest
from helpers import (
    FLOOR_FACTOR,
    STATE,
    assert_at_floor,
    assert_same_bits,
    cuda_backend,
    long_context_state,
    make_problem,
    rel_l2,
    state_errors,
    why_no_gpu,
)

import corekern

if reason := why_no_gpu():
    pytest.skip(reason, allow_module_level=True)

import cupy

pytestmark = pytest.mark.gpu


CUDA = cuda_backend()


def run(problem, layout="separate", **options):
    """Output and state, on the host."""
    arguments = problem.arguments(CUDA, layout) | {"route": "grouped_fp32"} | options
    out = corekern.paged_attention(**arguments)
    assert_same_bits(corekern.paged_attention(**arguments).get(), out.get(), "second launch")
    rounded, state = corekern.paged_attention(**arguments, return_state=True)
    np.testing.assert_array_equal(rounded.get(), out.get(), "by way of the state")  # NaN may be any NaN
    return out.get(), tuple(getattr(state, field).get() for field in ("numerator", "maximum", "sum"))


def check(problem, layout="separate", **options):
    out, state = run(problem, layout, **options)
    assert_at_floor(out, problem.expected())
    numerator, total = state_errors(problem, state)
    assert total <= STATE
    assert numerator <= STATE
    return out


CASES = {
    "one-token": {"seq_lens": (1,), "q_heads": 6, "head_dim": 256, "page_size": 3296},
    "q8-page-16": {"rows": (8,), "seq_lens": (500,), "q_heads": 6, "head_dim": 256, "page_size": 16},
    "q8-page-24": {"rows": (8,), "seq_lens": (500,), "q_heads": 6, "head_dim": 256, "page_size": 24},
    "q8-page-1": {"rows": (8,), "seq_lens": (300,), "q_heads": 6, "head_dim": 256, "page_size": 1},
    "q8-page-784": {"rows": (8,), "seq_lens": (20000,), "q_heads": 6, "head_dim": 256, "page_size": 784},
    "q5-page-848": {"rows": (5,), "seq_lens": (9000,), "q_heads": 6, "head_dim": 256, "page_size": 848},
    "q16": {"rows": (16,), "seq_lens": (3000,), "q_heads": 6, "head_dim": 256, "page_size": 800},
    "two-kv-heads": {"rows": (4,), "seq_lens": (5000,), "q_heads": 24, "kv_heads": 2, "head_dim": 256, "page_size": 784},
    "group-16": {"rows": (2,), "seq_lens": (700,), "q_heads": 16, "head_dim": 256, "page_size": 64},
    "d128": {"rows": (8,), "seq_lens": (9000,), "q_heads": 8, "kv_heads": 2, "head_dim": 128, "page_size": 64},
    "d64": {"rows": (4,), "seq_lens": (9000,), "q_heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 64},
    "d64-page-24": {"rows": (4,), "seq_lens": (900,), "q_heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 24},
    "bfloat16": {"rows": (8,), "seq_lens": (4000,), "q_heads": 6, "head_dim": 256, "page_size": 784, "q_dtype": "bfloat16"},
    "e5m2": {"rows": (8,), "seq_lens": (4000,), "q_heads": 6, "head_dim": 256, "page_size": 784, "kv_dtype": "fp8_e5m2"},
    "batch": {"rows": (3, 0, 8, 1), "seq_lens": (700, 50, 9000, 64), "q_heads": 6, "head_dim": 256, "page_size": 784,
              "extra_rows": 2},
    "batch-2-heads": {"rows": (4, 4, 4), "seq_lens": (8192, 300, 8191), "q_heads": 24, "kv_heads": 2, "head_dim": 256,
                      "page_size": 784},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_matches_the_reference(case):
    check(make_problem(3, **CASES[case]))


@pytest.mark.parametrize(
    "layout", ["interleaved", "token+8", "interleaved-token+8-block+8", "offset-2", "offset-8", "interleaved-offset-14", "heads-first"]
)  # fmt: skip
def test_layouts_give_the_same_bits(layout):
    problem = make_problem(4, rows=(4,), seq_lens=(900,), q_heads=12, kv_heads=2, head_dim=256, page_size=48)
    assert_same_bits(run(problem, layout)[0], run(problem)[0], layout)


def test_lengths_zero_and_the_poison_beyond():
    problem = make_problem(5, rows=(8,), seq_lens=(700,), q_heads=6, head_dim=256, page_size=784)
    lengths = problem.row_lengths.copy()
    lengths[[0, 3]] = 0
    lengths[5] = 650
    out = check(problem.but(row_lengths=lengths))
    assert not out[[0, 3]].any()


def test_a_row_is_nan_where_it_sees_nan_and_only_there():
    """A NaN code at a token that the later rows see and the earlier do not."""
    problem = make_problem(6, rows=(8,), seq_lens=(700,), q_heads=6, head_dim=256, page_size=784)
    clean, _ = run(problem)
    v = problem.v.copy()
    page = problem.block_table[0, 0]
    v[page, 696, 0, 100] = 0x7F
    out, _ = run(problem.but(v=v))
    sees = problem.row_lengths > 696
    assert np.isnan(out[sees][..., 100]).all()
    out[sees, :, 100] = clean[sees, :, 100]
    assert_same_bits(out, clean)


def test_missing_pages_are_unseen():
    problem = make_problem(7, rows=(8,), seq_lens=(900,), q_heads=6, head_dim=256, page_size=64)
    table = problem.block_table.copy()
    table[0, [0, 3, 14]] = [-1, 1 << 30, -5]
    check(problem.but(block_table=table))
    table[0] = -1
    assert not run(problem.but(block_table=table))[0].any()


def test_bits_of_a_request_alone_and_in_a_batch():
    batch = make_problem(8, rows=(8, 3, 8), seq_lens=(9000, 64, 500), q_heads=6, head_dim=256, page_size=784)
    together, _ = run(batch)
    for request in range(3):
        begin, end = batch.query_start_loc[request : request + 2]
        alone = batch.but(
            q=batch.q[begin:end],
            block_table=batch.block_table[request : request + 1],
            row_lengths=batch.row_lengths[begin:end],
            query_start_loc=np.array([0, end - begin], np.int32),
        )
        assert_same_bits(run(alone)[0], together[begin:end], f"request {request}")


def test_cancelling_scores():
    """Half of head_dim sums to +64 and the rest to -64 + d: d comes back within 2^-21 x sum |q k| x scale."""
    rng = np.random.default_rng(9)
    problem = make_problem(9, seq_lens=(2,), q_heads=1, head_dim=256, page_size=16)
    codes = np.arange(0x30, 0x40, dtype=np.uint8)  # 0.5 to 1.875
    k = problem.k.copy()
    page = problem.block_table[0, 0]
    k[page, 0, 0] = rng.choice(codes, 256)
    k[page, 1, 0] = rng.choice(codes, 256)
    import corekern.reference as reference

    values = reference.decode(k[page, :2, 0], "fp8_e4m3")
    q = np.abs(rng.standard_normal(256)) + 0.5
    q *= 64 / (q * values[0])[:128].sum()
    q[128:] *= -1
    for part in (slice(128), slice(128, None)):
        q[part] *= 64 / abs((q * values[0])[part].sum())
    problem = problem.but(q=q.astype(np.float16).reshape(1, 1, 256), k=k, k_scale=1.0, softmax_scale=1.0)
    _, (_, maximum, total) = run(problem)
    exact = (values @ problem.q[0, 0].astype(np.float64)) * math.log2(math.e)
    low, high = sorted(exact)
    bound = 2.0**-21 * np.abs(values * problem.q[0, 0].astype(np.float64)).sum(1).max() * math.log2(math.e)
    assert abs(float(maximum[0, 0]) - high) <= bound
    if high - low < 20:
        assert abs(-math.log2(float(total[0, 0]) - 1) - (high - low)) <= 2 * bound


def test_uniform_attention_rounds_ties_to_even():
    """V = 1 but 1.125 once in 256: the mean is 1 + 2^-11 and the output 1."""
    problem = make_problem(10, rows=(8,), seq_lens=(131072,), q_heads=6, head_dim=256, page_size=3296)
    lengths = np.full(8, 131072, np.int32)
    v = np.full_like(problem.v, 0x38)
    for i, page in enumerate(problem.block_table[0, : -(-131072 // 3296)]):
        v[page, -i * 3296 % 256 :: 256] = 0x39
    out, _ = run(problem.but(q=np.zeros_like(problem.q), v=v, v_scale=1.0, row_lengths=lengths))
    assert (out == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("length", [8192, 65536, 262144])
def test_long_contexts(length):
    problem = make_problem(
        11,
        rows=(8,),
        seq_lens=(length,),
        q_heads=6,
        head_dim=256,
        page_size=3296,
        v_bias=np.linspace(-4, 4, 256),
    )
    out, (numerator, maximum, total) = run(problem)
    n, m, s = long_context_state(problem)
    shift = np.exp2(maximum - m)
    assert rel_l2(numerator * shift[..., None], n) <= STATE
    assert rel_l2(total * shift, s) <= STATE
    expected = n / s[..., None]
    floor = rel_l2(expected.astype(np.float16), expected)
    assert rel_l2(out, expected) <= FLOOR_FACTOR * floor + 2e-6


def test_graph_replays_read_new_lengths():
    problem = make_problem(12, rows=(8,), seq_lens=(5000,), q_heads=6, head_dim=256, page_size=784)
    arguments = problem.arguments(CUDA)
    plan = corekern.plan_attention(**arguments, route="grouped_fp32")
    out = cupy.empty_like(arguments["q"])
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        plan(arguments["q"], out=out)
        stream.begin_capture()
        plan(arguments["q"], out=out)
        graph = stream.end_capture()
    for longest in (5000, 64, 0, 3000):
        lengths = np.clip(problem.row_lengths - 5000 + longest, 0, None).astype(np.int32)
        arguments["row_lengths"].set(lengths)
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_same_bits(out.get(), run(problem.but(row_lengths=lengths))[0], str(longest))
