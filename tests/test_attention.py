"""Dense paged attention against float64 on the same codes: the bounds of the FP32-state contract.

Tolerances are the contract's, stated once in helpers.py: an output may miss the float64 reference by 1.02 times
the rounding of its own dtype, which nobody can avoid, plus 2e-6; a state before it is rounded by 3e-6.
"""

import functools
import math

import ml_dtypes
import numpy as np
import pytest
from helpers import (
    ARITHMETIC,
    DTYPES,
    FLOOR_FACTOR,
    FP8,
    STATE,
    Problem,
    assert_at_floor,
    assert_same_bits,
    bits,
    long_context_state,
    make_problem,
    rel_l2,
    rounding_floor,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import corekern

LOG2_E = math.log2(math.e)
KV_DTYPES = (*FP8, *DTYPES)


def one_request(q, k, v, lengths, *, page_size=16, kv_dtype="fp8_e4m3", softmax_scale=None) -> Problem:
    """A problem of one request whose tokens are given in order: (tokens, kv_heads, head_dim)."""
    pages = -(-len(k) // page_size)
    pad = ((0, pages * page_size - len(k)), (0, 0), (0, 0))
    k, v = (np.pad(x, pad).reshape(pages, page_size, *x.shape[1:]) for x in (k, v))
    return Problem(
        q=q,
        k=k,
        v=v,
        block_table=np.arange(pages, dtype=np.int32)[None],
        row_lengths=np.array(lengths, np.int32),
        query_start_loc=np.array([0, len(q)], np.int32),
        kv_dtype=kv_dtype,
        softmax_scale=softmax_scale,
    )


def e4m3(x) -> np.ndarray:
    """Codes of values that E4M3 holds exactly."""
    codes = np.asarray(x, np.float32).astype(ml_dtypes.float8_e4m3fn)
    assert (codes.astype(np.float32) == x).all()
    return codes.view(np.uint8)


# Normal data at q2-8 / H6 / Hkv1 / D256


@functools.lru_cache(maxsize=2)
def _eight_rows(tokens: int, q_dtype: str, kv_dtype: str):
    """Eight rows over one context and their float64 output. Fewer rows are the last of them."""
    problem = make_problem(
        tokens, rows=(8,), seq_lens=(tokens,), q_heads=6, head_dim=256, page_size=3296, q_dtype=q_dtype,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    numerator, _, total = long_context_state(problem)
    return problem, numerator / total[..., None]


def _last_rows(problem: Problem, rows: int) -> Problem:
    return problem.but(
        q=problem.q[-rows:],
        row_lengths=problem.row_lengths[-rows:],
        query_start_loc=np.array([0, rows], np.int32),
    )


def check_normal_data(backend, tokens, rows, q_dtype, kv_dtype):
    backend.require(tokens=tokens, q_dtype=q_dtype)
    problem, expected = _eight_rows(tokens, q_dtype, kv_dtype)
    out = _last_rows(problem, rows).run(backend)
    assert out.dtype == DTYPES[q_dtype]
    assert_at_floor(out, expected[-rows:])


@pytest.mark.parametrize("rows", range(2, 9))
def test_normal_data_8k(backend, rows):
    check_normal_data(backend, 8192, rows, "float16", "fp8_e4m3")


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"),
    [("bfloat16", "fp8_e4m3"), ("float32", "fp8_e4m3"), ("float16", "fp8_e5m2"), ("bfloat16", "fp8_e5m2")],
)
def test_normal_data_8k_in_other_formats(backend, q_dtype, kv_dtype, rows):
    check_normal_data(backend, 8192, rows, q_dtype, kv_dtype)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("tokens", [131_072, 262_144], ids=["128K", "256K"])
def test_normal_data_in_long_contexts(backend, tokens, rows):
    check_normal_data(backend, tokens, rows, "float16", "fp8_e4m3")


def test_the_long_reference_is_the_reference():
    problem = make_problem(7, rows=(3,), seq_lens=(600,), q_heads=6, kv_heads=2, head_dim=16, page_size=7)
    pieces = long_context_state(problem, chunk=100)
    # float64 sums in another order: 600 terms of 2^-53 each, far below any bound here.
    for piece, whole in zip(pieces, problem.expected_state(), strict=True):
        np.testing.assert_allclose(piece, whole, rtol=1e-12, atol=1e-12)


# The state before it is rounded


def check_biased_state(backend, tokens):
    """V biased linearly from -4 to 4 over head_dim: sums grow with the context, and nothing cancels."""
    backend.require(tokens=tokens)
    bias = np.linspace(-4, 4, 256, dtype=np.float32)
    problem = make_problem(
        tokens + 1, rows=(2,), seq_lens=(tokens,), q_heads=6, head_dim=256, page_size=3296, v_bias=bias
    )
    state = problem.state(backend)
    numerator, maximum, total = long_context_state(problem)
    # A score is off by a few roundings of float32, and so is the maximum that the sums are relative to.
    scale = np.exp2(maximum - state.maximum)
    assert rel_l2(state.numerator, numerator * scale[..., None]) <= STATE
    assert rel_l2(state.sum, total * scale) <= STATE
    mean = state.numerator.astype(np.float64) / state.sum[..., None]
    assert rel_l2(mean, numerator / total[..., None]) <= STATE


def test_biased_state_8k(backend):
    check_biased_state(backend, 8192)


@pytest.mark.slow
def test_biased_state_256k(backend):
    check_biased_state(backend, 262_144)


@pytest.mark.parametrize("share", [2, 64, 1024], ids="score-0-once-in-{}".format)
def test_probabilities_of_1_and_e_to_the_minus_8(backend, share):
    """Small probabilities must keep their bits, whatever V they meet: nothing here cancels."""
    tokens = 4096
    backend.require(tokens=tokens)
    high = np.arange(tokens) % share == 0
    k = np.zeros((tokens, 1, 64), np.float32)
    k[~high, :, 0] = -8
    q = np.zeros((1, 1, 64), np.float16)
    q[..., 0] = 1
    sizes = [2.0**-9, 1.0, 448.0]
    # Three carriers of V: all tokens, those of score 0, those of score -8; each with both signs.
    columns = [
        np.where(who, sign * size, 0)
        for size in sizes
        for sign in (1, -1)
        for who in (high | True, high, ~high)
    ]
    v = np.zeros((tokens, 1, 64), np.float32)
    v[:, 0, : len(columns)] = np.stack(columns, -1)
    problem = one_request(q, e4m3(k), e4m3(v), [tokens], softmax_scale=1.0)
    state = problem.state(backend)
    numerator, maximum, total = problem.expected_state()
    assert state.maximum == maximum == 0
    np.testing.assert_allclose(state.sum, total, rtol=STATE)
    np.testing.assert_allclose(state.numerator, numerator, rtol=STATE)
    assert (numerator[..., : len(columns)] != 0).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("order", ["halves", "alternating"])
@pytest.mark.parametrize("difference", [0.0, 2.0**-7, 0.5, 3.0], ids="d={}".format)
def test_scores_that_cancel(backend, difference, order, head_dim):
    """Half of head_dim sums to about +64 and the rest to -64 + d; d must come out of the state."""
    backend.require(head_dim=head_dim)
    rng = np.random.default_rng(head_dim)
    half = head_dim // 2
    q_half = rng.uniform(1, 2, half).astype(np.float16)  # 11 bits each: every partial sum has to round
    k_half = np.full(half, 64 / half / 1.5, np.float32).astype(ml_dtypes.float8_e4m3fn)
    k_half[::2] = (1.25 * k_half[::2].astype(np.float32)).astype(k_half.dtype)
    q = np.concatenate([q_half, q_half[::-1]])
    cancelling = np.concatenate([k_half, -k_half[::-1]])
    k = np.stack([cancelling, cancelling])
    # One more product makes the second token's score d.
    q[-1], k[0, -1], k[1, -1] = 1, 0, difference
    q[0], k[0, 0], k[1, 0] = 1, 0, 0
    if order == "alternating":
        mix = np.arange(head_dim).reshape(2, half).T.reshape(-1)
        q, k = q[mix], k[:, mix]
    products = q.astype(np.float64) * k.astype(np.float64)
    np.testing.assert_allclose(products.sum(-1), [0, difference], atol=1e-12)
    magnitude = np.abs(products).sum(-1).max()
    assert 80 < magnitude < 160
    scale = head_dim**-0.5
    tolerance = 2.0**-21 * magnitude * scale

    problem = one_request(q[None, None], k[:, None].view(np.uint8), k[:, None].view(np.uint8), [2])
    state = problem.state(backend)
    # maximum = the larger score in base 2, and sum = 1 + 2^-(difference in base 2).
    recovered = -math.log2(state.sum.item() - 1) / LOG2_E
    assert abs(recovered - difference * scale) <= tolerance
    assert abs(state.maximum.item() / LOG2_E - difference * scale) <= tolerance
    first = problem.but(row_lengths=np.int32([1])).state(backend)
    assert abs(first.maximum.item()) / LOG2_E <= tolerance


@pytest.mark.parametrize("keys", ["zero-queries", "equal-keys"])
@pytest.mark.parametrize(
    "tokens",
    [4096, *(pytest.param(n, marks=pytest.mark.slow) for n in (131_072, 262_144))],
    ids=["4K", "128K", "256K"],
)
def test_uniform_attention_is_exact(backend, tokens, keys):
    """V is 1 but 1.125 once in 256: the mean is 1 + 2^-11, a tie of float16 that goes to the even 1.0."""
    backend.require(tokens=tokens)
    head_dim = 64
    v = np.ones((tokens, 1, head_dim), np.float32)
    v[np.arange(tokens) % 256 == 101] = 1.125
    k = np.ones((tokens, 1, head_dim), np.float32)
    q = np.full((4, 2, head_dim), 0 if keys == "zero-queries" else 0.5, np.float16)
    problem = one_request(q, e4m3(k), e4m3(v), [tokens] * 4, page_size=3456)
    out, state = corekern.paged_attention(**problem.arguments(backend), return_state=True)
    assert (backend.asnumpy(state.sum) == tokens).all()
    assert (backend.asnumpy(state.numerator) == tokens + tokens / 2048).all()
    assert_same_bits(backend.asnumpy(out), np.ones(q.shape, np.float16))


# Shapes


def check_against_reference(backend, problem: Problem, **options) -> None:
    group = problem.q.shape[1] // problem.k.shape[2]
    q_dtype = next(name for name, dtype in DTYPES.items() if dtype == problem.q.dtype)
    backend.require(
        head_dim=problem.q.shape[2], group=group, q_dtype=q_dtype, tokens=int(problem.row_lengths.max())
    )
    assert_at_floor(problem.run(backend, **options), problem.expected())


@pytest.mark.parametrize(
    "head_dim",
    [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 72, 80, 96, 100, 127, 128, 129, 191, 192, 193, 255, 256],
)
def test_head_dims(backend, head_dim):
    check_against_reference(
        backend,
        make_problem(
            head_dim, rows=(3,), seq_lens=(333,), q_heads=4, kv_heads=2, head_dim=head_dim, page_size=50
        ),
    )


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"),
    [(1, 1), (8, 8), (3, 3), (6, 1), (16, 1), (17, 1), (24, 2), (15, 5), (32, 2), (49, 1), (64, 1)],
    ids="{}".format,
)
@pytest.mark.parametrize("rows", [1, 5, 16], ids="q{}".format)
def test_head_groups(backend, q_heads, kv_heads, rows):
    check_against_reference(
        backend,
        make_problem(
            q_heads * rows,
            rows=(rows,),
            seq_lens=(150,),
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=40,
            page_size=16,
        ),
    )


@pytest.mark.parametrize("q_dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_dtypes(backend, q_dtype, kv_dtype):
    check_against_reference(
        backend,
        make_problem(
            5, rows=(4,), seq_lens=(700,), q_heads=4, kv_heads=2, head_dim=64, page_size=48, q_dtype=q_dtype,
            kv_dtype=kv_dtype,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("q_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_output_dtypes(backend, q_dtype, out_dtype):
    backend.require(q_dtype=q_dtype)
    problem = make_problem(6, rows=(2,), seq_lens=(90,), q_heads=2, q_dtype=q_dtype)
    out = backend.asarray(np.full(problem.q.shape, np.nan, DTYPES[out_dtype]))
    assert corekern.paged_attention(**problem.arguments(backend), out=out) is out
    assert_at_floor(backend.asnumpy(out), problem.expected())


@pytest.mark.parametrize(
    "page_size", [1, 2, 16, 31, 32, 33, 64, 784, 800, 848, 1568, 1600, 1616, 1648, 1728, 2048, 3296, 3456]
)
def test_page_sizes(backend, page_size):
    check_against_reference(
        backend,
        make_problem(page_size, rows=(2,), seq_lens=(4000,), q_heads=2, head_dim=16, page_size=page_size),
    )


@pytest.mark.parametrize(
    "tokens", [1, 2, 31, 32, 33, 63, 64, 65, 2047, 2048, 2049, 2080, 4095, 4096, 4097, 6200], ids="{}".format
)
def test_lengths_around_tiles_and_splits(backend, tokens):
    rows = min(tokens, 3)
    check_against_reference(
        backend, make_problem(tokens, rows=(rows,), seq_lens=(tokens,), q_heads=3, head_dim=32, page_size=64)
    )


def test_requests_of_mixed_rows_and_lengths(backend):
    check_against_reference(
        backend,
        make_problem(
            8, rows=(1, 4, 0, 16, 1, 2), seq_lens=(1, 2100, 50, 16, 333, 2), q_heads=6, kv_heads=2, head_dim=48,
            page_size=16,
        ),
    )  # fmt: skip


def test_row_lengths_need_not_be_causal(backend):
    problem = make_problem(9, rows=(5,), seq_lens=(300,), q_heads=2, head_dim=32)
    check_against_reference(backend, problem.but(row_lengths=np.int32([300, 1, 150, 0, 33])))


@pytest.mark.parametrize("softmax_scale", [0.0, 1e-3, 0.0625, 1.0, 5.0, -0.3], ids="{}".format)
def test_softmax_scales(backend, softmax_scale):
    problem = make_problem(10, rows=(2,), seq_lens=(400,), q_heads=2).but(softmax_scale=softmax_scale)
    backend.require(q_dtype="float16")
    # A score is rounded to float32, so its error in nats is 2^-24 of its size, a few times over:
    # at scale 5 scores reach 5 x 8 x 4 = 160, whose probabilities carry 160 x 2^-23 = 2e-5.
    slack = 2e-5 if softmax_scale == 5.0 else ARITHMETIC
    out, expected = problem.run(backend), problem.expected()
    assert rel_l2(out, expected) <= FLOOR_FACTOR * rounding_floor(expected, out.dtype) + slack


def test_the_default_scale_is_head_dim_to_the_minus_half(backend):
    problem = make_problem(11, rows=(2,), seq_lens=(50,), head_dim=64)
    assert_same_bits(problem.run(backend), problem.but(softmax_scale=0.125).run(backend))


@pytest.mark.parametrize(("k_scale", "v_scale"), [(1.0, 1.0), (0.25, 8.0), (0.0137, 0.731), (3e-5, 40.0)])
def test_cache_scales(backend, k_scale, v_scale):
    problem = make_problem(12, rows=(2,), seq_lens=(400,), q_heads=2).but(k_scale=k_scale, v_scale=v_scale)
    # Scores of codes up to 448 would leave one token; the softmax scale brings them back to normal data.
    check_against_reference(backend, problem.but(softmax_scale=0.125 * problem.k_scale / k_scale / 60))


@st.composite
def problems(draw) -> Problem:
    rows = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(sum))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    problem = make_problem(
        draw(st.integers(0, 2**32)),
        rows=tuple(rows),
        seq_lens=tuple(draw(st.integers(max(n, 1), 150)) for n in rows),
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 70)),
        page_size=draw(st.integers(1, 50)),
        q_dtype=draw(st.sampled_from(["float16", "bfloat16"])),
        kv_dtype=draw(st.sampled_from(sorted(FP8))),
        extra_rows=draw(st.integers(0, 2)),
    )
    inactive = draw(st.lists(st.booleans(), min_size=len(problem.q), max_size=len(problem.q)))
    return problem.but(row_lengths=np.where(inactive, 0, problem.row_lengths).astype(np.int32))


@settings(max_examples=60)
@given(problem=problems())
def test_any_problem(backend, problem):
    backend.require(head_dim=problem.q.shape[2], group=problem.q.shape[1] // problem.k.shape[2])
    out, expected = problem.run(backend), problem.expected()
    # So few values may cancel: an error is relative to the sum of p |v|, which is what is added up.
    size = problem.but(v=problem.v & 0x7F).expected()
    error = np.linalg.norm(out.astype(np.float64) - expected)
    floor = np.linalg.norm(expected.astype(out.dtype).astype(np.float64) - expected)
    assert error <= FLOOR_FACTOR * floor + ARITHMETIC * np.linalg.norm(size)


# Rows that see nothing


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_inactive_rows_and_rows_of_nobody_are_exactly_zero(backend, out_dtype):
    problem = make_problem(13, rows=(3, 2, 1), seq_lens=(40, 2100, 7), q_heads=6, kv_heads=2, extra_rows=3)
    lengths = problem.row_lengths.copy()
    lengths[[1, 5]] = 0  # within a request, and a whole request
    problem = problem.but(row_lengths=lengths)
    empty = [1, 5, 6, 7, 8]  # and the three past the last request, whatever length they name
    out = backend.asarray(np.full(problem.q.shape, np.nan, DTYPES[out_dtype]))
    _, state = corekern.paged_attention(**problem.arguments(backend), out=out, return_state=True)
    assert not bits(backend.asnumpy(out)[empty]).any()  # not even a sign
    assert backend.asnumpy(out)[[0, 2, 3, 4]].all()
    assert not bits(backend.asnumpy(state.sum)[empty]).any()
    assert not bits(backend.asnumpy(state.numerator)[empty]).any()
    assert (backend.asnumpy(state.maximum)[empty] == -np.inf).all()
    assert_same_bits(backend.asnumpy(corekern.finalize(state, out_dtype)), backend.asnumpy(out))


def test_a_batch_of_inactive_rows(backend):
    problem = make_problem(14, rows=(2, 2), seq_lens=(30, 30)).but(row_lengths=np.zeros(4, np.int32))
    assert not bits(problem.run(backend)).any()


def test_a_block_table_without_columns(backend):
    problem = make_problem(15, rows=(2,), seq_lens=(30,)).but(block_table=np.zeros((1, 0), np.int32))
    assert not bits(problem.run(backend)).any()


# States


def test_the_state_is_what_its_definition_says(backend):
    problem = make_problem(16, rows=(3, 1), seq_lens=(2500, 60), q_heads=6, kv_heads=2, head_dim=64)
    state = problem.state(backend)
    numerator, maximum, total = problem.expected_state()
    for name, shape in (("numerator", (4, 6, 64)), ("maximum", (4, 6)), ("sum", (4, 6))):
        assert getattr(state, name).shape == shape
        assert getattr(state, name).dtype == np.float32
    # Scores in base 2 are below 8 here and are rounded a few times: 8 x 2^-22.
    np.testing.assert_allclose(state.maximum, maximum, rtol=0, atol=2.0**-19)
    scale = np.exp2(maximum - state.maximum)
    assert rel_l2(state.sum, total * scale) <= STATE
    assert rel_l2(state.numerator, numerator * scale[..., None]) <= STATE


def test_an_attention_plan_follows_its_arrays(backend):
    problem = make_problem(17, rows=(2, 3), seq_lens=(300, 90), q_heads=4, kv_heads=2)
    arguments = problem.arguments(backend)
    plan = corekern.plan_attention(**arguments, route=backend.route if backend.forced else None)
    out = backend.asarray(np.zeros_like(problem.q))
    assert plan(arguments["q"], out=out) is out
    assert_same_bits(backend.asnumpy(out), problem.run(backend))
    changed = problem.but(
        q=problem.q[::-1].copy(), row_lengths=np.int32([0, 17, 90, 0, 1]), query_start_loc=np.int32([0, 1, 4])
    )
    for name in ("row_lengths", "query_start_loc"):
        arguments[name][...] = backend.asarray(getattr(changed, name))
    plan(backend.asarray(changed.q), out=out)
    assert_same_bits(backend.asnumpy(out), changed.run(backend))


@pytest.mark.parametrize(
    "starts", [[0, 2, 9], [0, 5, 2], [0, 900_000_000, 5], [3, 2, 1], [0, -7, 5]], ids=str
)
def test_a_plan_reads_nothing_outside_its_arrays(backend, starts):
    """Values that change after the plan's checks are not looked at again, but must stay harmless."""
    problem = make_problem(18, rows=(2, 3), seq_lens=(300, 90), q_heads=4, kv_heads=2)
    arguments = problem.arguments(backend)
    plan = corekern.plan_attention(**arguments)
    out = backend.asarray(np.zeros_like(problem.q))
    arguments["query_start_loc"][...] = backend.asarray(np.array(starts, np.int32))
    arguments["row_lengths"][...] = backend.asarray(np.int32([2**31 - 1, -5, 90, -(2**31), 300]))
    plan(arguments["q"], out=out)
    backend.asnumpy(out)  # rows are somebody's or nobody's: what they hold is not promised


# Row lengths of causal attention


def _naive_causal_lengths(seq_lens, starts):
    lengths = []
    for request, length in enumerate(seq_lens):
        rows = starts[request + 1] - starts[request]
        lengths += [length - rows + i + 1 if length else 0 for i in range(rows)]
    return lengths


@given(data=st.data())
def test_causal_row_lengths(backend, data):
    rows = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    seq_lens = [data.draw(st.one_of(st.just(0), st.integers(max(n, 1), 40))) for n in rows]
    starts = np.cumsum([0, *rows]).astype(np.int32)
    arguments = backend.asarray(np.array(seq_lens, np.int32)), backend.asarray(starts)
    lengths = backend.asnumpy(corekern.causal_row_lengths(*arguments))
    assert lengths.dtype == np.int32
    assert lengths.tolist() == _naive_causal_lengths(seq_lens, starts.tolist())
    padded = backend.asnumpy(corekern.causal_row_lengths(*arguments, rows=sum(rows) + 3))
    assert padded.tolist() == [*lengths.tolist(), 0, 0, 0]
