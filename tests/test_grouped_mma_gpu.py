"""The portable schedule of grouped attention on a GPU: as its architecture has it, and as older ones do (see grouped_cases.py)."""

import functools
import os

import numpy as np
import pytest
from grouped_cases import CASES, FOREIGN, MORE, ptx_path
from helpers import (
    STATE,
    assert_at_floor,
    assert_same_bits,
    cuda_backend,
    make_problem,
    rel_l2,
    rounding_floor,
    state_errors,
    why_no_gpu,
)

import corekern
from corekern.cuda import grouped, loader

if reason := why_no_gpu():
    pytest.skip(reason, allow_module_level=True)

import cupy

pytestmark = pytest.mark.gpu
CUDA = cuda_backend()
PTX = os.environ.get("COREKERN_TEST_PTX")


@pytest.fixture(params=["native", *FOREIGN])
def arch(request, monkeypatch):
    """The portable schedule, where Hopper's would be taken too; compiled here, or loaded as PTX."""
    monkeypatch.setattr(grouped, "HOPPER", "none")
    if request.param == "native":
        return request.param
    if PTX is None:
        pytest.skip(f"COREKERN_TEST_PTX names no folder with the PTX of {request.param}")
    schedule = grouped.schedule
    monkeypatch.setattr(
        grouped, "schedule", lambda problem, _, **options: schedule(problem, request.param, **options)
    )
    monkeypatch.setattr(loader, "kernel", functools.partial(_from_ptx, request.param))
    return request.param


@functools.cache
def _load(path):
    return cupy.RawModule(path=str(path))


def _from_ptx(arch, source, entry, **choices):
    path = ptx_path(PTX, source, arch, choices)
    if not path.exists():
        pytest.skip(f"{path.name} was not written: {choices}")
    return _load(path).get_function(entry)


def case_of(name, arch):
    case = CASES.get(name) or MORE[name]
    if arch in ("sm_70", "sm_75") and case.get("kv_dtype") == "bfloat16":
        pytest.skip(f"{arch} has no bfloat16 products")
    return case


def run(problem, layout="separate", route="grouped_fp32"):
    """Output and state, on the host."""
    arguments = problem.arguments(CUDA, layout) | {"route": route}
    out = corekern.paged_attention(**arguments)
    assert_same_bits(corekern.paged_attention(**arguments).get(), out.get(), "second launch")
    state = corekern.partial_attention(**arguments)
    return out.get(), tuple(getattr(state, field).get() for field in ("numerator", "maximum", "sum"))


def check(problem, layout="separate"):
    out, state = run(problem, layout)
    numerator, total = state_errors(problem, state)
    assert total <= STATE
    assert numerator <= STATE
    assert_at_floor(out, problem.expected())
    return out


@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(arch, name):
    check(make_problem(3, **case_of(name, arch)))


@pytest.mark.parametrize("arch", ["native"], indirect=True)
@pytest.mark.parametrize("name", MORE)
def test_more_match_the_reference(arch, name):
    check(make_problem(3, **MORE[name]))


@pytest.mark.parametrize("arch", ["native"], indirect=True)
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "float16"])
@pytest.mark.parametrize(
    "layout", ["interleaved", "token+8", "interleaved-token+8-block+8", "offset-2", "offset-8", "interleaved-offset-14", "heads-first"]
)  # fmt: skip
def test_layouts_give_the_same_bits(arch, layout, kv_dtype):
    problem = make_problem(
        4, rows=(4,), seq_lens=(900,), q_heads=12, kv_heads=2, head_dim=256, page_size=48, kv_dtype=kv_dtype
    )
    assert_same_bits(run(problem, layout)[0], run(problem)[0], layout)


def test_lengths_of_zero_and_a_short_row(arch):
    problem = make_problem(5, **CASES["q8-page-16"])
    lengths = problem.row_lengths.copy()
    lengths[[0, 3]] = 0
    lengths[5] = 450
    out = check(problem.but(row_lengths=lengths))
    assert not out[[0, 3]].any()


def test_missing_pages_are_unseen(arch):
    problem = make_problem(7, **CASES["q8-page-16"])
    table = problem.block_table.copy()
    table[0, [0, 3, 14]] = [-1, 1 << 30, -5]
    check(problem.but(block_table=table))
    table[0] = -1
    assert not run(problem.but(block_table=table))[0].any()


INFINITY = {"fp8_e5m2": 0x7C, "float16": 0x7C00, "bfloat16": 0x7F80}
NAN = {"fp8_e4m3": 0x7F, "fp8_e5m2": 0x7F, "float16": 0x7E00, "bfloat16": 0x7FC0}


@pytest.mark.parametrize("token", [100, 3996])
@pytest.mark.parametrize("name", ["q8-page-784", "e5m2", "kv-float16", "kv-bfloat16"])
def test_rows_that_see_nan_or_infinity_give_it(arch, name, token):
    """Of values: the one dim. Every other element keeps its bits; token 3996 is seen by the later rows alone."""
    case = case_of(name, arch) | {"seq_lens": (4000,)}
    problem = make_problem(6, **case)
    clean, _ = run(problem)
    kv_dtype = case.get("kv_dtype", "fp8_e4m3")
    codes = problem.v.view(f"u{problem.v.itemsize}").copy()
    page, slot = problem.block_table[0, token // 784], token % 784
    sign = 1 << (8 * codes.itemsize - 1)
    codes[page, slot, 0, 100] = NAN[kv_dtype]
    expected = {100: np.nan}
    if kv_dtype in INFINITY:
        codes[page, slot, 0, 33], codes[page, slot, 0, 34] = INFINITY[kv_dtype], INFINITY[kv_dtype] | sign
        expected |= {33: np.inf, 34: -np.inf}
    out, _ = run(problem.but(v=codes.view(problem.v.dtype)))
    sees = problem.row_lengths > token
    assert sees.any()
    assert sees.all() == (token == 100)
    for dim, value in expected.items():
        np.testing.assert_array_equal(out[sees][..., dim], np.full_like(out[sees][..., dim], value))
        out[sees, :, dim] = clean[sees, :, dim]
    assert_same_bits(out, clean)


@pytest.mark.parametrize("name", ["q8-page-784", "kv-float16"])
def test_rows_that_see_a_nan_key_are_nan(arch, name):
    problem = make_problem(8, **case_of(name, arch) | {"seq_lens": (4000,)})
    clean, _ = run(problem)
    codes = problem.k.view(f"u{problem.k.itemsize}").copy()
    codes[problem.block_table[0, 3996 // 784], 3996 % 784, 0, 77] = NAN[
        "fp8_e4m3" if codes.itemsize == 1 else "float16"
    ]
    out, _ = run(problem.but(k=codes.view(problem.k.dtype)))
    sees = problem.row_lengths > 3996
    assert np.isnan(out[sees]).all()
    assert_same_bits(out[~sees], clean[~sees])


@pytest.mark.parametrize("arch", ["native"], indirect=True)
def test_bits_of_a_request_alone_and_in_a_batch(arch):
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
        arguments = alone.arguments(CUDA) | {"route": "grouped_fp32"}
        assert_same_bits(
            corekern.paged_attention(**arguments).get(), together[begin:end], f"request {request}"
        )


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "float16", "bfloat16"])
def test_cancelling_scores(arch, kv_dtype):
    """Half of head_dim sums to +64 and the rest to -64 + d: the scores come back within 2^-21 x sum |q k| x scale."""
    case = {
        "q_heads": 6,
        "rows": (8,),
        "head_dim": 256,
        "page_size": 784,
        "seq_lens": (8,),
        "kv_dtype": kv_dtype,
    }
    name = {"fp8_e4m3": "q8-page-784", "float16": "kv-float16", "bfloat16": "kv-bfloat16"}[kv_dtype]
    case_of(name, arch)
    rng = np.random.default_rng(9)
    problem = make_problem(9, **case)
    page = problem.block_table[0, 0]
    keys = rng.choice(np.arange(0.5, 2, 0.125), (8, 256))
    k = problem.k.copy()
    k[page, :8, 0] = _codes(keys, kv_dtype)
    q = np.abs(rng.standard_normal((8, 6, 256))) + 0.5
    q[..., 128:] *= -1
    for part in (slice(128), slice(128, None)):
        q[..., part] *= 64 / np.abs((q * keys[0])[..., part].sum(-1, keepdims=True))
    # A row sees the first token alone, then the first two, ...
    problem = problem.but(
        q=q.astype(np.float16),
        k=k,
        k_scale=1.0,
        softmax_scale=1.0,
        row_lengths=np.arange(1, 9, dtype=np.int32),
    )
    _, (_, maximum, _) = run(problem)
    products = problem.q.astype(np.float64)[:, :, None] * keys
    scores = products.sum(-1) * np.log2(np.e)
    bound = 2.0**-21 * np.abs(products).sum(-1).max() * np.log2(np.e)
    for row in range(8):
        highest = scores[row, :, : row + 1].max(-1)
        assert np.abs(maximum[row] - highest).max() <= bound


def _codes(values, kv_dtype):
    import ml_dtypes

    if kv_dtype == "fp8_e4m3":
        return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return values.astype(np.float16 if kv_dtype == "float16" else ml_dtypes.bfloat16)


@pytest.mark.parametrize("arch", ["native"], indirect=True)
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "float16", "bfloat16"])
def test_state_of_biased_values(arch, kv_dtype):
    problem = make_problem(11, **VERIFY_LONG, kv_dtype=kv_dtype, v_bias=np.linspace(-4, 4, 256))
    check(problem)


VERIFY_LONG = {"rows": (8,), "seq_lens": (40000,), "q_heads": 6, "head_dim": 256, "page_size": 3296}


@pytest.mark.parametrize("arch", ["native"], indirect=True)
@pytest.mark.parametrize("name", ["q8-page-784", "e5m2", "kv-float16", "kv-bfloat16", "batch", "d64-page-24"])
def test_legacy_is_right_but_for_its_state(arch, name):
    """Its output is within a few roundings to 16 bits, and its state is worse than FP32 state is."""
    problem = make_problem(3, **CASES[name])
    out, state = run(problem, route="grouped_fp16_legacy")
    expected = problem.expected()
    coarse = 2.0**-8 if CASES[name].get("kv_dtype") == "bfloat16" else 2.0**-11
    assert rel_l2(out, expected) <= rounding_floor(expected, out.dtype) + 2 * coarse
    numerator, _ = state_errors(problem, state)
    assert STATE < numerator <= 4 * coarse
