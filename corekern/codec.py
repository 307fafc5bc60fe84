"""FP8 encode and decode, and the choice of a scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from corekern import arrays, routing
from corekern.formats import Format, get_format

OVERFLOWS = ("saturate", "nan")
_LARGEST_SCALE = float(np.finfo(np.float32).max)


def encode(
    x: Any,
    dtype: str | Format | np.dtype | type = "fp8_e4m3",
    scale: float | np.ndarray = 1.0,
    *,
    out: Any = None,
    overflow: str = "saturate",
) -> Any:
    """FP8 codes of x / scale, rounded once to nearest, ties to even.

    Args:
        x: any shape and strides, float16, bfloat16, float32 or float64.
        dtype: "fp8_e4m3" (or "fp8") or "fp8_e5m2".
        scale: what a code's value is multiplied by to give x back: one number, or an array that
            broadcasts to x's shape. x / scale is float32 (float64 for float64 input).
        out: uint8, or the format's ml_dtypes dtype, of x's shape.
        overflow: "saturate" gives the largest finite value for anything beyond it, infinities
            included, as CUDA's satfinite; "nan" gives what ml_dtypes gives: NaN in E4M3, which has no
            infinity, and infinity in E5M2. NaN stays NaN with its sign either way.

    Returns:
        `out`, or a new uint8 array of x's shape.

    Raises:
        TypeError: x or out is no array of an allowed dtype.
        ValueError: an unknown format or overflow; a scale that is not finite and above 0; a shape
            that does not fit; an `out` that is read-only or overlaps x.

    Source: "FP8 Formats for Deep Learning" (Micikevicius et al., 2022); bits as in ml_dtypes.

    >>> encode(np.float32([1.0, -0.0, 448.0, 1e9])).tolist()
    [56, 128, 126, 126]
    """
    fmt = _fp8_format(dtype)
    source = arrays.check_array(arrays.adopt(x, "x"), "x", dtypes=arrays.FLOATS_AND_DOUBLE)
    scale = arrays.check_scales(scale, "scale", source.shape)
    if overflow not in OVERFLOWS:
        raise ValueError(f"overflow: {overflow!r} is not one of {', '.join(OVERFLOWS)}")
    target, device = _output(out, source, scale, "x", (fmt.storage, fmt.value), np.dtype(np.uint8))
    routing.storage_backend(device).encode(source, target.view(np.uint8), fmt, scale, overflow == "saturate")
    return arrays.give_back(target, x) if out is None else out


def decode(
    codes: Any,
    dtype: str | Format | np.dtype | type | None = None,
    scale: float | np.ndarray = 1.0,
    *,
    out_dtype: Any = np.float32,
    out: Any = None,
) -> Any:
    """Values of FP8 codes times scale; exact for all 256 codes when the scale is 1.

    Args:
        codes: any shape and strides, uint8 or an ml_dtypes FP8 dtype.
        dtype: the codes' format; "fp8_e4m3" where neither this nor the array says otherwise.
        scale: one number, or an array that broadcasts to the codes' shape. The product is float32,
            rounded once to the output dtype.
        out_dtype: float16, bfloat16 or float32; ignored when `out` is given.
        out: an array of the codes' shape and one of those dtypes.

    Returns:
        `out`, or a new array.

    Raises:
        TypeError, ValueError: as `encode`.

    >>> decode(np.uint8([56, 128, 126]), "fp8_e4m3", scale=0.5).tolist()
    [0.5, -0.0, 224.0]
    """
    source = arrays.adopt(codes, "codes")
    arrays.check_array(source, "codes", dtypes=(np.dtype(np.uint8), *arrays.FP8))
    named = source.dtype != np.uint8
    fmt = _fp8_format(source.dtype if named and dtype is None else dtype or "fp8_e4m3")
    if named and fmt.value != source.dtype:
        raise TypeError(f"codes: dtype {source.dtype} is not {fmt.name}")
    scale = arrays.check_scales(scale, "scale", source.shape)
    out_dtype = arrays.float_dtype(out_dtype, "out_dtype")
    target, device = _output(out, source, scale, "codes", arrays.FLOATS, out_dtype)
    routing.storage_backend(device).decode(source.view(np.uint8), target, fmt, scale)
    return arrays.give_back(target, codes) if out is None else out


def calibrate_scale(x: Any, dtype: str | Format = "fp8_e4m3", margin: float = 1.0) -> float:
    """The per-tensor scale that puts the largest |x| at the format's largest value.

    Args:
        x: float16, bfloat16, float32 or float64, any shape. Must be finite.
        dtype: the FP8 format.
        margin: headroom for values yet unseen: 2.0 leaves a factor of two unused.

    Returns:
        margin * max|x| / largest, as a float that float32 holds exactly; 1.0 when x is all zero.

    Raises:
        ValueError: x is empty or not finite or needs a scale past float32, or margin is not a finite number
            above 0.

    >>> calibrate_scale(np.float32([-3.5, 1.0]))
    0.0078125
    """
    fmt = _fp8_format(dtype)
    x = arrays.check_array(arrays.adopt(x, "x"), "x", dtypes=arrays.FLOATS_AND_DOUBLE)
    margin = arrays.check_scale(margin, "margin")
    if x.size == 0:
        raise ValueError("x: is empty")
    largest = max(abs(float(x.max())), abs(float(x.min())))
    if not np.isfinite(largest):
        raise ValueError("x: holds values that are not finite")
    if not largest:
        return 1.0
    scale = margin * largest / fmt.max
    if scale > _LARGEST_SCALE:
        raise ValueError(f"x: holds {largest:g}, whose scale is past float32")
    # A subnormal scale loses bits, and below about 1e-45 there is none at all.
    return float(np.float32(max(scale, 2.0**-126)))


def _fp8_format(dtype) -> Format:
    fmt = get_format(dtype)
    if not fmt.is_fp8:
        raise ValueError(f"dtype: {fmt.name} is not an FP8 format; use fp8_e4m3 or fp8_e5m2")
    return fmt


def _output(out, source, scale, name, dtypes, dtype) -> tuple[Any, str]:
    """The array to write, and the device that everything is on."""
    inputs = {name: source} if isinstance(scale, float) else {name: source, "scale": scale}
    adopted = None if out is None else arrays.adopt(out, "out")
    device = arrays.check_same_device(**inputs, out=adopted)
    if adopted is None:
        return arrays.namespace(device).empty(source.shape, dtype), device
    return arrays.check_output(adopted, "out", shape=source.shape, dtypes=dtypes, inputs=inputs), device
