"""What the FP32 state promises, on the tensor-core route: errors against float64 at every size that users run."""

import numpy as np
import pytest
from helpers import FLOOR_FACTOR, STATE, why_no_gpu

if reason := why_no_gpu():
    pytest.skip(reason, allow_module_level=True)

import cupy

import corekern
from bench import dense

pytestmark = pytest.mark.gpu

PAGES = (800, 848, 1616, 1648, 1728, 3296, 3456)
ROWS = tuple(range(2, 9))
CASES = [
    *((rows, page, 8192) for rows in ROWS for page in PAGES),
    *((rows, page, 65536) for rows, page in zip(ROWS, PAGES, strict=True)),
    *((8, page, 262144) for page in PAGES),
    *((rows, 3296, 262144) for rows in ROWS[:-1]),
]


def measured(rows, page, length, **options):
    """(output error, its rounding floor, numerator's error, sum's error), relative L2 against float64."""
    problem = dense.make_problem(dense.parse(f"dense/q{rows}/L{length}/page{page}"), cupy, 0, **options)
    out, state = corekern.paged_attention(**problem.arguments(), route="grouped_fp32", return_state=True)
    n, m, total = dense.exact(problem, cupy, 1)
    expected = n / total[..., None]
    shift = cupy.exp2(state.maximum.astype(np.float64) - m)
    return (
        dense.relative(out, expected, cupy),
        dense.rounding_floor(expected, out.dtype, cupy),
        dense.relative(state.numerator * shift[..., None], n, cupy),
        dense.relative(state.sum * shift, total, cupy),
    )


def check(*case, **options):
    error, floor, numerator, total = measured(*case, **options)
    assert error <= FLOOR_FACTOR * floor + 2e-6
    assert numerator <= STATE
    assert total <= STATE


@pytest.mark.parametrize(("rows", "page", "length"), CASES)
def test_output_and_state(rows, page, length):
    check(rows, page, length)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "page", "length"), [(8, 3296, 262144), (2, 1616, 65536), (5, 848, 8192), (8, 1728, 8192)]
)
def test_other_dtypes_have_their_own_floor(rows, page, length, q_dtype, kv_dtype):
    check(rows, page, length, q_dtype=q_dtype, kv_dtype=kv_dtype)


@pytest.mark.parametrize("rows", [2, 8])
def test_biased_values(rows):
    check(rows, 3296, 262144, v_bias=cupy.linspace(-4, 4, 256, dtype=np.float32))


@pytest.mark.parametrize("length", [8192, 262144])
def test_two_scores_and_values_of_every_magnitude(length):
    """Scores 0 and -8, V = +-2^-9, +-1, +-448: a probability of e^-8 keeps its digits beside one of 1."""
    problem = dense.make_problem(dense.parse(f"dense/q8/L{length}/page3296"), cupy, 0)
    cache = corekern.PagedKVCache.from_arrays(problem.cache.k, problem.cache.v, dtype="fp8_e4m3")
    problem.q[...] = 1
    rng = cupy.random.default_rng(3)
    tokens = cache.k.shape[:3]
    # 256 products of 1 and -0.5, times 1/16, are -8.
    cache.k[...] = cupy.where(rng.random(tokens) < 0.5, 0xB0, 0).astype(np.uint8)[..., None]
    codes = cupy.asarray(np.uint8([0x01, 0x38, 0x7E]))[cupy.arange(256) % 3]
    cache.v[...] = codes | (rng.random((*tokens, 256)) < 0.5).astype(np.uint8) << 7
    problem = dense.Problem(**vars(problem) | {"cache": cache})
    state = corekern.partial_attention(**problem.arguments(), route="grouped_fp32")
    n, m, total = dense.exact(problem, cupy, 1)
    assert float(abs(state.maximum - m).max()) == 0
    assert dense.relative(state.sum, total, cupy) <= STATE
    for kind in range(3):  # each magnitude by itself, or the largest would hide the others
        assert dense.relative(state.numerator[..., kind::3], n[..., kind::3], cupy) <= STATE


@pytest.mark.parametrize("length", [131072, 262144])
def test_uniform_attention_rounds_ties_to_even(length):
    """V = 1 but 1.125 once in 256: the mean is 1 + 2^-11, and float16's nearest even is 1."""
    problem = dense.make_problem(dense.parse(f"dense/q8/L{length}/page3296"), cupy, 0)
    problem.q[...] = 0
    problem.row_lengths[...] = length
    v = problem.cache.v
    v[...] = 0x38
    token = cupy.arange(3296)
    for i, page in enumerate(problem.tables[0][0].tolist()):
        v[page, (i * 3296 + token) % 256 == 0] = 0x39
    cache = corekern.PagedKVCache.from_arrays(problem.cache.k, v, dtype="fp8_e4m3")
    out = corekern.paged_attention(**problem.arguments() | {"cache": cache}, route="grouped_fp32")
    assert bool((out == 1).all())


def test_the_bounds_can_fail():
    """Rounded once more on the way, the same output is over the bound."""
    problem = dense.make_problem(dense.parse("dense/q8/L8192/page848"), cupy, 0)
    expected = dense.exact(problem, cupy, 1)
    expected = expected[0] / expected[2][..., None]
    out = corekern.paged_attention(**problem.arguments(), route="grouped_fp32")
    spoiled = (out.astype(np.float32) * np.float32(1 + 2**-11)).astype(np.float16)
    floor = dense.rounding_floor(expected, np.float16, cupy)
    assert dense.relative(out, expected, cupy) <= FLOOR_FACTOR * floor + 2e-6
    assert dense.relative(spoiled, expected, cupy) > FLOOR_FACTOR * floor + 2e-6
