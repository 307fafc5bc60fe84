"""Bad calls: one line that names the argument, the right exception, and nothing written."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from helpers import LAYOUTS, make_problem, place, place_pages

import corekern
from corekern import PagedKVCache

PROBLEM = make_problem(1, rows=(2, 1), seq_lens=(40, 20), q_heads=6, kv_heads=2, head_dim=64)
CAPACITY = PROBLEM.block_table.shape[1] * 16


def changed(name, edit):
    """A case that changes one host array."""
    return lambda backend, arguments: {name: backend.asarray(edit(getattr(PROBLEM, name).copy()))}


def replaced(**changes):
    return lambda backend, arguments: changes


def strided_head_dim(backend, arguments):
    strides = (6 * 64 * 4, 64 * 4, 4)
    return {"q": place(backend, PROBLEM.q, strides=strides)}


def odd_strides(backend, arguments):
    return {"q": place(backend, PROBLEM.q, strides=(6 * 64 * 2 + 1, 64 * 2, 2))}


CASES = {
    "cache is no PagedKVCache": (TypeError, "cache", replaced(cache="fp8")),
    "q is a list": (TypeError, "q", replaced(q=[1.0, 2.0])),
    "q is None": (TypeError, "q", replaced(q=None)),
    "q is float64": (TypeError, "q", changed("q", lambda q: q.astype(np.float64))),
    "q is int8": (TypeError, "q", changed("q", lambda q: q.astype(np.int8))),
    "q is FP8": (TypeError, "q", changed("q", lambda q: q.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))),
    "q is 2-D": (ValueError, "q", changed("q", lambda q: q[:, 0])),
    "q of another head_dim": (ValueError, "q", changed("q", lambda q: q[..., :32])),
    "q heads no multiple of KV heads": (ValueError, "q", changed("q", lambda q: q[:, :5])),
    "q without heads": (ValueError, "q", changed("q", lambda q: q[:, :0])),
    "q with a strided head_dim": (ValueError, "q", strided_head_dim),
    "q with strides between elements": (ValueError, "q", odd_strides),
    "an empty batch of rows": (ValueError, "q", changed("q", lambda q: q[:0])),
    "an empty batch of requests": (ValueError, "query_start_loc", changed("query_start_loc", lambda s: s[:1])),
    "query_start_loc falls": (ValueError, "query_start_loc", changed("query_start_loc", lambda s: np.int32([0, 2, 1]))),
    "query_start_loc starts above 0": (ValueError, "query_start_loc", changed("query_start_loc", lambda s: s + np.int32(1))),
    "query_start_loc starts below 0": (ValueError, "query_start_loc", changed("query_start_loc", lambda s: s - np.int32(1))),
    "query_start_loc ends past q": (ValueError, "query_start_loc", changed("query_start_loc", lambda s: np.int32([0, 2, 4]))),
    "query_start_loc is int64": (TypeError, "query_start_loc", changed("query_start_loc", lambda s: s.astype(np.int64))),
    "query_start_loc is 2-D": (ValueError, "query_start_loc", changed("query_start_loc", lambda s: s[None])),
    "block_table is int64": (TypeError, "block_table", changed("block_table", lambda t: t.astype(np.int64))),
    "block_table is float": (TypeError, "block_table", changed("block_table", lambda t: t.astype(np.float32))),
    "block_table of another request count": (ValueError, "block_table", changed("block_table", lambda t: t[:1])),
    "block_table is 1-D": (ValueError, "block_table", changed("block_table", lambda t: t[0])),
    "block_table is None": (TypeError, "block_table", replaced(block_table=None)),
    "row_lengths is negative": (ValueError, "row_lengths", changed("row_lengths", lambda n: -n)),
    "row_lengths of another count": (ValueError, "row_lengths", changed("row_lengths", lambda n: n[:2])),
    "row_lengths is int64": (TypeError, "row_lengths", changed("row_lengths", lambda n: n.astype(np.int64))),
    "row_lengths past the block table": (
        ValueError,
        "row_lengths",
        lambda backend, arguments: {"row_lengths": backend.asarray(np.int32([9, CAPACITY + 1, 9])), "validate": True},
    ),
    "a page id past the cache": (
        ValueError,
        "block_table",
        lambda backend, arguments: {"block_table": backend.asarray(PROBLEM.block_table + 1000), "validate": True},
    ),
    "softmax_scale is NaN": (ValueError, "softmax_scale", replaced(softmax_scale=float("nan"))),
    "softmax_scale is infinite": (ValueError, "softmax_scale", replaced(softmax_scale=float("-inf"))),
    "softmax_scale past float32": (ValueError, "softmax_scale", replaced(softmax_scale=1e200)),
    "softmax_scale is a word": (TypeError, "softmax_scale", replaced(softmax_scale="auto")),
    "softmax_scale is a list": (TypeError, "softmax_scale", replaced(softmax_scale=[0.125])),
    "max_query_len below a request's rows": (ValueError, "max_query_len", replaced(max_query_len=1)),
    "max_query_len is 0": (ValueError, "max_query_len", replaced(max_query_len=0)),
    "max_query_len is a word": (ValueError, "max_query_len", replaced(max_query_len="all")),
    "an unknown route": (ValueError, "route", replaced(route="warp_drive")),
}  # fmt: skip


def fails(function, kind, argument) -> None:
    with pytest.raises(kind) as error:
        function()
    message = str(error.value)
    assert message.startswith(f"{argument}: "), message
    assert "\n" not in message
    assert type(error.value) is kind


@pytest.mark.parametrize("case", CASES)
def test_bad_calls(backend, case):
    kind, argument, change = CASES[case]
    arguments = PROBLEM.arguments(backend)
    if backend.name != "cpu":  # where looking at values means waiting for a device, it is asked for
        arguments["validate"] = True
    arguments |= change(backend, arguments)
    q = arguments["q"]
    shape = getattr(q, "shape", PROBLEM.q.shape)
    out = backend.asarray(np.full(shape, 7, np.float16))
    fails(lambda: corekern.paged_attention(**arguments, out=out), kind, argument)
    assert (backend.asnumpy(out) == 7).all()
    fails(lambda: corekern.partial_attention(**arguments), kind, argument)
    fails(lambda: corekern.plan_attention(**arguments), kind, argument)


def test_the_good_call_is_good(backend):
    # Or every case above would pass for the wrong reason.
    assert np.isfinite(PROBLEM.run(backend, validate=True)).all()


def test_head_dims_over_256(backend):
    problem = make_problem(2, seq_lens=(4,), head_dim=257)
    fails(lambda: problem.run(backend), ValueError, "q")


@pytest.mark.parametrize("scale", [0, 0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-60], ids=str)
@pytest.mark.parametrize("argument", ["k_scale", "v_scale"])
def test_cache_scales(backend, argument, scale):
    fails(lambda: PROBLEM.but(**{argument: scale}).cache(backend), ValueError, argument)


# Outputs


def _no_overlap_cases(backend):
    """Outputs that cannot be written, whatever they overlap."""
    shape = PROBLEM.q.shape
    row = 6 * 64 * 2
    return {
        "of another shape": (ValueError, backend.asarray(np.zeros(shape[:2], np.float16))),
        "with fewer rows": (ValueError, backend.asarray(np.zeros((2, 6, 64), np.float16))),
        "of float64": (TypeError, backend.asarray(np.zeros(shape, np.float64))),
        "of uint8": (TypeError, backend.asarray(np.zeros(shape, np.uint8))),
        "a list": (TypeError, [0.0]),
        "with all rows in one": (
            ValueError,
            backend.view(backend.asarray(np.zeros(row, np.uint8)), shape, np.float16, (0, 128, 2), 0),
        ),
        "with rows half a row apart": (
            ValueError,
            backend.view(
                backend.asarray(np.zeros(3 * row, np.uint8)), shape, np.float16, (row // 2, 128, 2), 0
            ),
        ),
    }


@pytest.mark.parametrize(
    "case",
    [
        "of another shape",
        "with fewer rows",
        "of float64",
        "of uint8",
        "a list",
        "with all rows in one",
        "with rows half a row apart",
    ],
)
def test_bad_outputs(backend, case):
    kind, out = _no_overlap_cases(backend)[case]
    fails(lambda: PROBLEM.run(backend, out=out), kind, "out")
    assert not np.any(backend.asnumpy(out) if hasattr(out, "dtype") else out)


def test_read_only_outputs(backend):
    out = backend.asarray(np.full(PROBLEM.q.shape, 7, np.float16))
    if not hasattr(out.flags, "writeable"):
        pytest.skip(f"{backend.name}: has no read-only arrays")
    out.flags.writeable = False
    fails(lambda: PROBLEM.run(backend, out=out), ValueError, "out")
    assert (backend.asnumpy(out) == 7).all()


@pytest.mark.parametrize("shift", [0, 1, 5])
def test_outputs_that_overlap_q(backend, shift):
    row = 6 * 64 * 2
    host = np.zeros(9 * row, np.uint8)
    host[: 3 * row] = PROBLEM.q.view(np.uint8).reshape(-1)
    buffer = backend.asarray(host)
    view = lambda begin: backend.view(buffer, PROBLEM.q.shape, np.float16, (row, 128, 2), begin)  # noqa: E731
    q = view(0)
    if shift == 5:  # beside q, in the same memory, is allowed
        assert np.isfinite(backend.asnumpy(PROBLEM.run(backend, q=q, out=view(shift * row)))).all()
        return
    fails(lambda: PROBLEM.run(backend, q=q, out=view(shift * row)), ValueError, "out")
    assert (backend.asnumpy(buffer) == host).all()


@pytest.mark.parametrize("which", ["k", "v"])
def test_outputs_that_overlap_the_cache(backend, which):
    k, v, buffer, _ = place_pages(backend, PROBLEM.k, PROBLEM.v, LAYOUTS["separate"])
    cache = PagedKVCache.from_arrays(k, v, dtype="fp8", k_scale=PROBLEM.k_scale, v_scale=PROBLEM.v_scale)
    before = backend.asnumpy(buffer).copy()
    out = backend.view(
        buffer, PROBLEM.q.shape, np.float16, (768, 128, 2), 0 if which == "k" else PROBLEM.k.size
    )
    with pytest.raises(ValueError, match=rf"^out: overlaps cache\.{which}$"):
        PROBLEM.run(backend, cache=cache, out=out)
    assert (backend.asnumpy(buffer) == before).all()


def test_plans_refuse_other_arrays(backend):
    arguments = PROBLEM.arguments(backend)
    plan = corekern.plan_attention(**arguments)
    q, out = arguments["q"], backend.asarray(np.full(PROBLEM.q.shape, 7, np.float16))
    fails(lambda: plan(q[:2], out=out), ValueError, "q")
    fails(lambda: plan(backend.asarray(PROBLEM.q.astype(np.float32)), out=out), ValueError, "q")
    fails(lambda: plan([1.0], out=out), TypeError, "q")
    fails(lambda: plan(q, out=out[:2]), ValueError, "out")
    fails(lambda: plan(q, out=out[::-1]), ValueError, "out")
    fails(lambda: plan(q, out=None), TypeError, "out")
    assert (backend.asnumpy(out) == 7).all()


# Other functions


def state(backend, *, rows=3, heads=6, head_dim=8, dtype=np.float32):
    return corekern.PartialState(
        *(backend.asarray(np.ones(s, dtype)) for s in ((rows, heads, head_dim), (rows, heads), (rows, heads)))
    )


def test_merge_errors(backend):
    good = state(backend)
    fails(corekern.merge_states, ValueError, "states")
    fails(lambda: corekern.merge_states(good, None), TypeError, "states[1]")
    fails(lambda: corekern.merge_states("state"), TypeError, "states[0]")
    fails(lambda: corekern.merge_states(good, state(backend, rows=2)), ValueError, "states[1].numerator")
    fails(lambda: corekern.merge_states(state(backend, dtype=np.float16)), TypeError, "states[0].numerator")
    crooked = corekern.PartialState(good.numerator, good.maximum[:, :2], good.sum)
    fails(lambda: corekern.merge_states(good, crooked), ValueError, "states[1].maximum")
    crooked = corekern.PartialState(good.numerator, good.maximum, good.sum[:2])
    fails(lambda: corekern.merge_states(crooked), ValueError, "states[0].sum")


def test_finalize_errors(backend):
    good = state(backend)
    out = backend.asarray(np.full((3, 6, 8), 7, np.float16))
    fails(lambda: corekern.finalize(None), TypeError, "state")
    fails(lambda: corekern.finalize(good, "float64"), ValueError, "dtype")
    fails(lambda: corekern.finalize(good, "fp8"), ValueError, "dtype")
    fails(lambda: corekern.finalize(good, out=out[:2]), ValueError, "out")
    fails(lambda: corekern.finalize(good, out=good.numerator), ValueError, "out")
    fails(lambda: corekern.finalize(state(backend, dtype=np.float64), out=out), TypeError, "state.numerator")
    assert (backend.asnumpy(out) == 7).all()
    assert (backend.asnumpy(good.numerator) == 1).all()


def test_causal_row_lengths_errors(backend):
    def call(seq_lens, starts, dtype=np.int32, **options):
        arguments = backend.asarray(np.array(seq_lens, dtype)), backend.asarray(np.array(starts, np.int32))
        return lambda: corekern.causal_row_lengths(*arguments, **options)

    fails(call([5], [0, 2, 3]), ValueError, "seq_lens")
    fails(call([5, 5], [0, 2, 3], np.int64), TypeError, "seq_lens")
    if backend.name != "cpu":  # values are not waited for
        return
    fails(call([1, 5], [0, 2, 3]), ValueError, "seq_lens")
    fails(call([-1, 5], [0, 2, 3]), ValueError, "seq_lens")
    fails(call([5, 5], [0, 2, 1]), ValueError, "query_start_loc")
    fails(call([5, 5], [1, 2, 3]), ValueError, "query_start_loc")
    fails(call([5, 5], [0, 2, 3], rows=2), ValueError, "query_start_loc")


CODEC_CASES = {
    "x of int32": (TypeError, "x", {"x": np.zeros(4, np.int32)}),
    "x of FP8": (TypeError, "x", {"x": np.zeros(4, np.uint8)}),
    "x is a list": (TypeError, "x", {"x": [1.0]}),
    "unknown format": (ValueError, "dtype", {"dtype": "fp9"}),
    "a format that is not FP8": (ValueError, "dtype", {"dtype": "float16"}),
    "unknown overflow": (ValueError, "overflow", {"overflow": "wrap"}),
    "scale 0": (ValueError, "scale", {"scale": 0.0}),
    "scale NaN": (ValueError, "scale", {"scale": np.nan}),
    "scale below float32": (ValueError, "scale", {"scale": 1e-60}),
    "scale is a word": (TypeError, "scale", {"scale": "max"}),
    "scales of int32": (TypeError, "scale", {"scale": np.ones(4, np.int32)}),
    "scales that do not broadcast": (ValueError, "scale", {"scale": np.ones(3, np.float32)}),
    "scales with more axes": (ValueError, "scale", {"scale": np.ones((2, 4), np.float32)}),
    "one zero among scales": (ValueError, "scale", {"scale": np.float32([1, 1, 0, 1])}),
    "out of another shape": (ValueError, "out", {"out": np.zeros(3, np.uint8)}),
    "out of another dtype": (TypeError, "out", {"out": np.zeros(4, np.int8)}),
    "out of another FP8": (TypeError, "out", {"out": np.zeros(4, ml_dtypes.float8_e5m2)}),
}


@pytest.mark.parametrize("case", CODEC_CASES)
def test_encode_errors(backend, case):
    kind, argument, changes = CODEC_CASES[case]
    if case == "one zero among scales" and backend.name != "cpu":
        pytest.skip(f"{backend.name}: the values of scale arrays are not waited for")
    out = backend.asarray(np.full(4, 7, np.uint8))
    arguments = {"x": np.ones(4, np.float32), "out": out} | changes
    for name, value in arguments.items():
        if isinstance(value, np.ndarray) and value is not out:
            arguments[name] = backend.asarray(value)
    fails(lambda: corekern.encode(**arguments), kind, argument)
    assert (backend.asnumpy(out) == 7).all()


def test_encode_and_decode_refuse_outputs_over_their_inputs(backend):
    buffer = backend.asarray(np.zeros(64, np.uint8))
    x = backend.view(buffer, (8,), np.float32, (4,), 0)
    codes = backend.view(buffer, (8,), np.uint8, (1,), 31)
    fails(lambda: corekern.encode(x, out=codes), ValueError, "out")
    fails(lambda: corekern.decode(codes, out=x), ValueError, "out")
    beside = backend.view(buffer, (8,), np.uint8, (1,), 32)
    assert corekern.encode(x, out=beside) is beside


def test_decode_errors(backend):
    codes = backend.asarray(np.full(4, 0x38, np.uint8))
    out = backend.asarray(np.full(4, 7, np.float32))
    fails(lambda: corekern.decode(backend.asarray(np.zeros(4, np.int8)), out=out), TypeError, "codes")
    fails(lambda: corekern.decode(b"8888", out=out), TypeError, "codes")
    fails(lambda: corekern.decode(codes, "bfloat16", out=out), ValueError, "dtype")
    fails(lambda: corekern.decode(codes, "fp8", -1.0, out=out), ValueError, "scale")
    fails(lambda: corekern.decode(codes, "fp8", out_dtype="float64"), ValueError, "out_dtype")
    fails(lambda: corekern.decode(codes, "fp8", out_dtype="fp8"), ValueError, "out_dtype")
    fails(lambda: corekern.decode(codes, "fp8", out=out[:3]), ValueError, "out")
    named = backend.asarray(np.zeros(4, ml_dtypes.float8_e5m2))
    fails(lambda: corekern.decode(named, "fp8_e4m3", out=out), TypeError, "codes")
    assert (backend.asnumpy(out) == 7).all()


# Importing


def test_importing_the_library_imports_no_compiler_and_no_framework():
    program = (
        "import sys, corekern; "
        "print(*sorted(m for m in ('numba', 'llvmlite', 'cupy', 'torch', 'jax', 'triton') if m in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
