"""FP8 encode and decode, bit for bit: against ml_dtypes and against a search in float64.

Nothing here has a tolerance: every result is one rounding of an exactly known value.
"""

import ml_dtypes
import numpy as np
import pytest
from helpers import BFLOAT16, DTYPES, FP8, assert_same_bits, place
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import corekern
from corekern import FORMATS, reference

ALL_CODES = np.arange(256, dtype=np.uint8)
FORMAT_NAMES = ("fp8_e4m3", "fp8_e5m2")
OVERFLOWS = ("saturate", "nan")

each_format = pytest.mark.parametrize("fmt", FORMAT_NAMES)
each_overflow = pytest.mark.parametrize("overflow", OVERFLOWS)
each_dtype = pytest.mark.parametrize("dtype", [*DTYPES, "float64"])


def np_dtype(name):
    return DTYPES.get(name, np.dtype(np.float64))


def expected_codes(x: np.ndarray, fmt: str, overflow: str) -> np.ndarray:
    """ml_dtypes' codes, after clamping (which keeps NaN) where we saturate."""
    if overflow == "saturate":
        largest = x.dtype.type(FORMATS[fmt].max)
        with np.errstate(invalid="ignore"):
            x = np.where(x > largest, largest, np.where(x < -largest, -largest, x)).astype(x.dtype)
    with np.errstate(all="ignore"):
        return x.astype(FP8[fmt]).view(np.uint8)


def finite_values(fmt: str) -> np.ndarray:
    """The finite values that are not negative, in order, as float64."""
    values = ALL_CODES[:128].view(FP8[fmt]).astype(np.float64)
    return values[np.isfinite(values)]


def ties(fmt: str) -> np.ndarray:
    """Halfway between neighbours, and between the largest value and the one that would follow it."""
    values = finite_values(fmt)
    values = np.append(values, 2 * values[-1] - values[-2])
    return (values[1:] + values[:-1]) / 2


def encode(backend, x, *args, **kwargs) -> np.ndarray:
    return backend.asnumpy(corekern.encode(backend.asarray(x), *args, **kwargs))


def decode(backend, codes, *args, **kwargs) -> np.ndarray:
    return backend.asnumpy(corekern.decode(backend.asarray(codes), *args, **kwargs))


# Every value


@each_format
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_all_codes_decode_as_ml_dtypes_does(backend, fmt, out_dtype):
    values = decode(backend, ALL_CODES, fmt, out_dtype=out_dtype)
    assert_same_bits(values, ALL_CODES.view(FP8[fmt]).astype(DTYPES[out_dtype]), fmt)


@each_format
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_all_codes_decode_to_the_definition(backend, fmt, out_dtype):
    values = decode(backend, ALL_CODES, fmt, out_dtype=out_dtype).astype(np.float64)
    np.testing.assert_array_equal(values, reference.decode(ALL_CODES, fmt))
    np.testing.assert_array_equal(np.signbit(values), ALL_CODES >= 128)  # of zeros and NaN too


@each_format
@each_overflow
def test_every_code_survives_a_round_trip(backend, fmt, overflow):
    values = ALL_CODES.view(FP8[fmt]).astype(np.float32)
    expected = np.where(
        np.isnan(values), {"fp8_e4m3": 0x7F, "fp8_e5m2": 0x7E}[fmt] | (ALL_CODES & 0x80), ALL_CODES
    )
    if overflow == "saturate":
        expected = np.where(np.isinf(values), expected - 1, expected)  # infinity becomes the largest finite
    assert_same_bits(encode(backend, values, fmt, overflow=overflow), expected.astype(np.uint8))


@each_format
@each_overflow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_value_encodes_as_ml_dtypes_does(backend, fmt, overflow, dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
    assert_same_bits(encode(backend, x, fmt, overflow=overflow), expected_codes(x, fmt, overflow))


@each_format
@each_overflow
def test_float32_around_every_boundary_encodes_as_ml_dtypes_does(backend, fmt, overflow):
    exact = np.concatenate([ties(fmt), finite_values(fmt)]).astype(np.float32)
    extremes = np.float32([0, 2.0**-149, 2.0**-126, 3.4028235e38, np.inf, np.nan])
    x = np.concatenate(
        [exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf)), extremes]
    )
    x = np.concatenate([x, -x])
    codes = encode(backend, x, fmt, overflow=overflow)
    assert_same_bits(codes, expected_codes(x, fmt, overflow))
    assert_same_bits(codes, reference.encode(x, fmt, overflow))


@pytest.mark.slow
@each_format
@each_overflow
def test_ten_million_float32_patterns_encode_as_ml_dtypes_does(backend, fmt, overflow):
    backend.require(elements=10**7)
    x = np.random.default_rng(20220912).integers(0, 1 << 32, 10**7, np.uint32).view(np.float32)
    assert_same_bits(encode(backend, x, fmt, overflow=overflow), expected_codes(x, fmt, overflow))


@each_format
@each_overflow
@each_dtype
def test_overflow_infinity_and_nan(backend, fmt, overflow, dtype):
    largest = FORMATS[fmt].max
    top = {"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B}[fmt]
    nan = {"fp8_e4m3": 0x7F, "fp8_e5m2": 0x7E}[fmt]
    past = top if overflow == "saturate" else top + 1
    # 1.25 x the largest is past the last tie in both formats, and every dtype holds it.
    x = np.array([largest, largest * 1.125 if dtype == "float16" and fmt == "fp8_e5m2" else largest * 1.25])
    x = np.array([*x, np.inf, np.nan, 0.0]).astype(np_dtype(dtype))
    codes = encode(backend, np.concatenate([x, -x]), fmt, overflow=overflow)
    assert codes.tolist() == [top, past, past, nan, 0, *(0x80 | c for c in (top, past, past, nan, 0))]


# float64 is rounded once


@each_format
@pytest.mark.parametrize("side", [-1, 0, 1], ids=["below", "tie", "above"])
@pytest.mark.parametrize("offset", [2.0**-52, 2.0**-40, 2.0**-26], ids=["2^-52", "2^-40", "2^-26"])
@pytest.mark.parametrize("scale", [1.0, 0.25], ids=["scale-1", "scale-1/4"])
def test_float64_beside_a_tie_is_not_rounded_onto_it_first(backend, fmt, side, offset, scale):
    tie = ties(fmt)[:-1]
    x = tie * (1 + side * offset)
    assert (x.astype(np.float32) == tie).all()  # what rounding twice would see
    below = np.arange(len(tie))
    expected = below + (below % 2 if side == 0 else side > 0)
    assert_same_bits(encode(backend, x * scale, fmt, scale), expected.astype(np.uint8))
    assert_same_bits(encode(backend, -x * scale, fmt, scale), (expected | 0x80).astype(np.uint8))


@each_format
def test_float64_beside_the_overflow_tie(backend, fmt):
    tie = ties(fmt)[-1]
    codes = encode(backend, np.array([tie * (1 - 2.0**-50), tie, tie * (1 + 2.0**-50)]), fmt, overflow="nan")
    # The largest code of E4M3 is even, so the tie stays; that of E5M2 is odd, so it overflows.
    assert codes.tolist() == {"fp8_e4m3": [0x7E, 0x7E, 0x7F], "fp8_e5m2": [0x7B, 0x7C, 0x7C]}[fmt]


@each_format
@each_overflow
def test_float64_beyond_float32(backend, fmt, overflow):
    x = np.array([1e300, -1e300, 1e-300, -1e-300, 5e-324, 1.7976931348623157e308])
    assert_same_bits(encode(backend, x, fmt, overflow=overflow), reference.encode(x, fmt, overflow))


# Property tests: the oracle is a search among the values of the format, in float64

shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6)


@each_format
@each_overflow
@each_dtype
@settings(max_examples=30)
@given(data=st.data())
def test_encode_finds_the_nearest_value(backend, fmt, overflow, dtype, data):
    width = {"float16": 16, "float64": 64}.get(dtype, 32)
    x = data.draw(hnp.arrays(f"float{width}", shapes, elements=st.floats(width=width)))
    with np.errstate(over="ignore"):
        x = np.asarray(x.astype(np_dtype(dtype)))
    codes = encode(backend, x, fmt, overflow=overflow)
    assert codes.shape == x.shape
    assert_same_bits(codes, reference.encode(x.astype(np.float64), fmt, overflow))


@each_format
@given(
    x=hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32)),
    scale=st.floats(2.0**-126, 2.0**120, width=32),
)
def test_the_quotient_is_float32_and_rounded_once(backend, fmt, x, scale):
    with np.errstate(all="ignore"):
        quotient = x / np.float32(scale)
    for overflow in OVERFLOWS:
        codes = encode(backend, x, fmt, scale, overflow=overflow)
        assert_same_bits(codes, reference.encode(quotient, fmt, overflow))


@each_format
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_input_is_divided_in_float32(backend, fmt, dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
    scale = np.float32(0.0137)
    with np.errstate(all="ignore"):
        quotient = x.astype(np.float32) / scale
        in_16_bits = quotient.astype(x.dtype).astype(np.float32)
    expected = reference.encode(quotient, fmt)
    assert (expected != reference.encode(in_16_bits, fmt)).any()  # or the test could not tell
    assert_same_bits(encode(backend, x, fmt, scale), expected)


@each_format
@pytest.mark.parametrize("out_dtype", DTYPES)
@given(scale=st.floats(2.0**-126, 2.0**100, width=32))
def test_decode_multiplies_in_float32_and_rounds_once(backend, fmt, out_dtype, scale):
    values = decode(backend, ALL_CODES, fmt, scale, out_dtype=out_dtype)
    with np.errstate(over="ignore"):
        expected = (ALL_CODES.view(FP8[fmt]).astype(np.float32) * np.float32(scale)).astype(DTYPES[out_dtype])
    assert_same_bits(values, expected)


def test_the_scale_is_the_float32_that_kernels_use(backend):
    x = np.linspace(-400, 400, 1001, dtype=np.float32)
    assert_same_bits(encode(backend, x, "fp8", 0.1), encode(backend, x, "fp8", np.float32(0.1)))
    assert_same_bits(
        decode(backend, ALL_CODES, "fp8", 0.1), decode(backend, ALL_CODES, "fp8", np.float32(0.1))
    )


# Arrays of scales

SCALE_SHAPES = [(1, 1, 1), (7, 1, 1), (1, 3, 1), (5,), (3, 5), (7, 3, 5), (3, 1)]


@each_format
@each_dtype
@pytest.mark.parametrize("shape", SCALE_SHAPES, ids=str)
def test_encode_with_an_array_of_scales(backend, fmt, dtype, shape):
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((7, 3, 5)) * 100).astype(np_dtype(dtype))
    scale = rng.uniform(0.1, 3, shape).astype(np.float32)
    codes = backend.asnumpy(corekern.encode(backend.asarray(x), fmt, backend.asarray(scale)))
    wide = x.astype(np.float64 if dtype == "float64" else np.float32)
    assert_same_bits(codes, reference.encode(wide / scale.astype(wide.dtype), fmt))


@each_format
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("shape", SCALE_SHAPES, ids=str)
def test_decode_with_an_array_of_scales(backend, fmt, out_dtype, shape):
    rng = np.random.default_rng(6)
    codes = rng.integers(0, 256, (7, 3, 5), np.uint8)
    scale = rng.uniform(0.1, 3, shape).astype(np.float32)
    values = corekern.decode(backend.asarray(codes), fmt, backend.asarray(scale), out_dtype=out_dtype)
    with np.errstate(over="ignore"):
        expected = (codes.view(FP8[fmt]).astype(np.float32) * scale).astype(DTYPES[out_dtype])
    assert_same_bits(backend.asnumpy(values), expected)


def test_scales_of_one_value_act_as_the_number(backend):
    x = np.random.default_rng(7).standard_normal((4, 6), dtype=np.float32)
    expected = encode(backend, x, "fp8", 0.03)
    for scale in (np.full((4, 6), 0.03, np.float32), np.full(6, 0.03), np.array(0.03)):
        assert_same_bits(
            backend.asnumpy(corekern.encode(backend.asarray(x), "fp8", backend.asarray(scale))), expected
        )


# Layouts


def _strided_views(shape, itemsize):
    """Strides in bytes of views that legal callers have."""
    rows, columns = shape
    return {
        "every-second": (columns * 2 * itemsize, 2 * itemsize),
        "padded-rows": (columns * itemsize + 3 * itemsize, itemsize),
        "transposed": (itemsize, rows * itemsize),
    }


@pytest.mark.parametrize("view", ["every-second", "padded-rows", "transposed"])
@each_dtype
def test_strided_input_and_output(backend, view, dtype):
    x = (np.random.default_rng(8).standard_normal((37, 50)) * 200).astype(np_dtype(dtype))
    placed = place(backend, x, strides=_strided_views(x.shape, x.itemsize)[view])
    expected = reference.encode(x, "fp8_e4m3")
    assert_same_bits(backend.asnumpy(corekern.encode(placed)), expected)

    out = place(backend, np.zeros(x.shape, np.uint8), strides=_strided_views(x.shape, 1)[view])
    assert corekern.encode(backend.asarray(x), out=out) is out
    assert_same_bits(backend.asnumpy(out), expected)

    if dtype != "float64":
        values = place(backend, np.zeros_like(x), strides=_strided_views(x.shape, x.itemsize)[view])
        assert corekern.decode(out, "fp8_e4m3", out=values) is values
        assert_same_bits(backend.asnumpy(values), expected.view(FP8["fp8_e4m3"]).astype(x.dtype))


def test_strided_output_leaves_its_gaps_alone(backend):
    buffer = backend.asarray(np.full(60, 0xAB, np.uint8))
    out = buffer[1::3]
    corekern.encode(backend.asarray(np.ones(20, np.float32)), out=out)
    after = backend.asnumpy(buffer).copy()
    assert (after[1::3] == 0x38).all()
    after[1::3] = 0xAB
    assert (after == 0xAB).all()


@each_format
def test_negative_strides(backend, fmt):
    x = np.random.default_rng(9).standard_normal((11, 13), dtype=np.float32)
    placed = backend.asarray(x)
    codes = reference.encode(x, fmt)
    assert_same_bits(backend.asnumpy(corekern.encode(placed[::-1, ::-2], fmt)), codes[::-1, ::-2].copy())
    out = backend.asarray(np.zeros(x.shape, np.uint8))
    corekern.encode(placed, fmt, out=out[:, ::-1])
    assert_same_bits(backend.asnumpy(out), codes[:, ::-1].copy())
    assert_same_bits(decode(backend, codes[::-1], fmt), codes.view(FP8[fmt]).astype(np.float32)[::-1].copy())


@pytest.mark.parametrize("offset", [2, 8, 14])
@each_dtype
def test_views_that_start_at_any_byte_an_element_can(backend, offset, dtype):
    x = (np.random.default_rng(10).standard_normal(300) * 50).astype(np_dtype(dtype))
    placed = place(backend, x, offset=offset)
    assert_same_bits(backend.asnumpy(corekern.encode(placed)), reference.encode(x, "fp8_e4m3"))


@each_dtype
def test_zero_dimensions(backend, dtype):
    codes = encode(backend, np.array(1.5, np_dtype(dtype)))
    assert codes.shape == ()
    assert codes == 0x3C
    values = decode(backend, np.array(0x3C, np.uint8), "fp8_e4m3", 2.0)
    assert values.shape == ()
    assert values == 3.0


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 2)], ids=str)
def test_empty_arrays(backend, shape):
    assert encode(backend, np.zeros(shape, np.float16)).shape == shape
    assert decode(backend, np.zeros(shape, np.uint8)).shape == shape
    scales = backend.asarray(np.ones(shape, np.float32))
    assert corekern.encode(backend.asarray(np.zeros(shape, np.float32)), "fp8", scales).shape == shape


@each_format
def test_arrays_of_the_ml_dtypes_dtype(backend, fmt):
    x = np.random.default_rng(11).standard_normal((5, 9), dtype=np.float32)
    out = backend.asarray(np.zeros(x.shape, FP8[fmt]))
    assert corekern.encode(backend.asarray(x), fmt, out=out) is out
    assert_same_bits(backend.asnumpy(out), x.astype(FP8[fmt]))
    # The array says what its format is.
    assert_same_bits(backend.asnumpy(corekern.decode(out)), x.astype(FP8[fmt]).astype(np.float32))
    assert_same_bits(
        backend.asnumpy(corekern.decode(out[::2], fmt)), x.astype(FP8[fmt]).astype(np.float32)[::2]
    )


@each_format
def test_large_strided_arrays(backend, fmt):
    # Larger than any buffer that strides may be gathered into, and no multiple of one.
    backend.require(elements=400_000)
    x = np.random.default_rng(12).standard_normal((401, 1003), dtype=np.float32)
    scale = np.random.default_rng(13).uniform(0.5, 2, 1003).astype(np.float32)
    placed = backend.asarray(x.T.copy()).T
    assert_same_bits(backend.asnumpy(corekern.encode(placed, fmt)), x.astype(FP8[fmt]).view(np.uint8))
    codes = corekern.encode(placed, fmt, backend.asarray(scale))
    assert_same_bits(backend.asnumpy(codes), (x / scale).astype(FP8[fmt]).view(np.uint8))
    values = backend.asnumpy(corekern.decode(codes, fmt, backend.asarray(scale)))
    assert_same_bits(values, (x / scale).astype(FP8[fmt]).astype(np.float32) * scale)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_number_of_threads_changes_no_bit(backend, monkeypatch, threads):
    backend.require(elements=3_000_001)
    monkeypatch.setenv("COREKERN_NUM_THREADS", str(threads))
    x = np.random.default_rng(14).integers(0, 1 << 32, 3_000_001, np.uint32).view(np.float32)
    codes = encode(backend, x)
    assert_same_bits(codes, expected_codes(x, "fp8_e4m3", "saturate"))
    assert_same_bits(decode(backend, codes), codes.view(FP8["fp8_e4m3"]).astype(np.float32))


# Scales from data


@each_format
@each_dtype
@pytest.mark.parametrize("largest", [3.5, -1e-3, 6e4], ids=str)
def test_calibrated_scale_puts_the_largest_value_at_the_top(backend, fmt, dtype, largest):
    x = np.array([0.0, largest / 3, largest, largest / 2]).astype(np_dtype(dtype))
    scale = corekern.calibrate_scale(backend.asarray(x), fmt)
    assert isinstance(scale, float)
    assert scale == np.float32(abs(float(x[2])) / FORMATS[fmt].max)
    code = encode(backend, x, fmt, scale, overflow="nan")[2]  # "nan": rounding the scale must not overflow
    assert code & 0x7F == {"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B}[fmt]


@each_format
def test_calibration_margin(backend, fmt):
    x = backend.asarray(np.float32([1.0, -2.0]))
    assert corekern.calibrate_scale(x, fmt, margin=4.0) == 4 * corekern.calibrate_scale(x, fmt)


@pytest.mark.parametrize("shape", [(4,), (2, 3), ()], ids=str)
def test_calibrating_zeros(backend, shape):
    assert corekern.calibrate_scale(backend.asarray(np.zeros(shape, np.float32))) == 1.0


@each_format
@given(x=hnp.arrays(np.float64, st.integers(1, 8), elements=st.floats(-1e40, 1e40)))
def test_a_calibrated_scale_is_one_that_encode_takes(backend, fmt, x):
    scale = corekern.calibrate_scale(backend.asarray(x), fmt)
    assert scale >= 2.0**-126  # a subnormal scale would lose bits
    assert scale == np.float32(scale)
    encode(backend, x, fmt, scale)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_calibration_refuses_what_is_not_finite(backend, value):
    with pytest.raises(ValueError, match=r"^x: holds values that are not finite$"):
        corekern.calibrate_scale(backend.asarray(np.float32([1.0, value, 2.0])))


def test_calibration_refuses_a_scale_that_float32_cannot_hold(backend):
    with pytest.raises(ValueError, match=r"^x: "):
        corekern.calibrate_scale(backend.asarray(np.array([1e300])))


@pytest.mark.parametrize("margin", [0.0, -1.0, np.nan, np.inf], ids=str)
def test_calibration_refuses_margins(backend, margin):
    with pytest.raises(ValueError, match=r"^margin: "):
        corekern.calibrate_scale(backend.asarray(np.ones(3, np.float32)), margin=margin)


# The oracle itself


@each_format
@each_overflow
def test_the_oracle_agrees_with_ml_dtypes(fmt, overflow):
    for dtype in (np.dtype(np.float16), BFLOAT16):
        x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
        with np.errstate(invalid="ignore"):  # signalling NaN
            codes = reference.encode(x, fmt, overflow)
        assert_same_bits(codes, expected_codes(x, fmt, overflow))
    assert ml_dtypes.finfo(FP8[fmt]).max == finite_values(fmt)[-1]
