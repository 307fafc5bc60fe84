"""Argument checks: one clear line, naming the argument, before anything is written or launched."""

from __future__ import annotations

import math
import os
from typing import Any

import ml_dtypes
import numpy as np

from corekern.formats import BFLOAT16, FORMATS

FLOATS = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32))
FLOATS_AND_DOUBLE = (*FLOATS, np.dtype(np.float64))
FP8 = tuple(np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))


def should_validate(validate: bool | None) -> bool:
    """Whether values that cost a pass over the data are checked: the argument, else COREKERN_VALIDATE=1."""
    if validate is None:
        return os.environ.get("COREKERN_VALIDATE", "0") not in ("", "0")
    return bool(validate)


def check_array(
    array: Any,
    name: str,
    *,
    shape: tuple[int | str | None, ...] | None = None,
    dtypes: tuple[np.dtype, ...] | None = None,
    contiguous_last: bool = False,
    writeable: bool = False,
) -> Any:
    """`array`, if it is one of the shape and dtype asked; a str or None in `shape` takes any extent.

    Raises:
        TypeError: it is no array, or has another dtype.
        ValueError: it has another shape, or a layout or a flag that is not allowed.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name}: expected a NumPy array, got {type(array).__name__}")
    if dtypes is not None and array.dtype not in dtypes:
        allowed = ", ".join(str(d) for d in dtypes)
        raise TypeError(f"{name}: dtype {array.dtype} is not allowed; use {allowed}")
    if shape is not None:
        fits = array.ndim == len(shape) and all(
            not isinstance(want, int) or want == have for want, have in zip(shape, array.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if s is None else str(s) for s in shape)
            raise ValueError(f"{name}: shape {array.shape} is not ({wanted})")
    if contiguous_last and array.ndim and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        raise ValueError(
            f"{name}: its last axis must be contiguous, but has a stride of {array.strides[-1]} bytes "
            f"for elements of {array.itemsize}"
        )
    if any(s % array.itemsize for s in array.strides):
        raise ValueError(
            f"{name}: strides {array.strides} are not multiples of its {array.itemsize}-byte elements"
        )
    if writeable and not array.flags.writeable:
        raise ValueError(f"{name}: is read-only")
    return array


def check_output(
    out: Any, name: str, *, shape: tuple[int, ...], dtypes: tuple, inputs: dict[str, Any]
) -> Any:
    """`out`, if it can be written: right shape and dtype, writeable, and overlapping neither itself nor an input."""
    check_array(out, name, shape=shape, dtypes=dtypes, writeable=True)
    for other, array in inputs.items():
        if np.shares_memory(out, array):
            raise ValueError(f"{name}: overlaps {other}")
    if not out.size:  # NumPy may give an empty array strides of 0
        return out
    extent = 0  # an array overlaps itself where an axis steps less far than the smaller ones reach
    for stride, n in sorted((abs(s), n) for s, n in zip(out.strides, out.shape, strict=True) if n > 1):
        if stride < extent + out.itemsize:
            raise ValueError(f"{name}: its elements overlap each other (strides {out.strides})")
        extent += stride * (n - 1)
    return out


def check_scale(scale: Any, name: str) -> float:
    """A per-tensor scale: a finite number above 0 that float32 can hold."""
    try:
        value = float(scale)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {type(scale).__name__}") from None
    # The float32 that kernels use, so that host and device agree on the last bit.
    rounded = float(np.float32(value)) if abs(value) < 3.5e38 else math.inf
    if not (math.isfinite(rounded) and rounded > 0):
        raise ValueError(f"{name}: {value} is not a finite number above 0 in float32")
    return rounded


def check_scales(scale: Any, name: str, shape: tuple[int, ...]) -> float | np.ndarray:
    """A per-tensor scale, or an array of scales that broadcasts to `shape`."""
    if np.ndim(scale) == 0 and not isinstance(scale, np.ndarray):
        return check_scale(scale, name)
    check_array(scale, name, dtypes=FLOATS_AND_DOUBLE)
    if scale.ndim == 0:
        return check_scale(scale, name)
    scale = scale.astype(np.float32)
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise ValueError(f"{name}: every scale must be a finite number above 0 in float32")
    try:
        return np.broadcast_to(scale, shape)
    except ValueError:
        raise ValueError(f"{name}: shape {scale.shape} does not broadcast to {shape}") from None


def float_dtype(dtype: Any, name: str) -> np.dtype:
    """One of float16, bfloat16 and float32, by name or dtype."""
    try:
        value = FORMATS[dtype].value if isinstance(dtype, str) and dtype in FORMATS else np.dtype(dtype)
    except TypeError:
        value = None
    if value not in FLOATS:
        raise ValueError(f"{name}: {dtype!r} is not one of {', '.join(str(d) for d in FLOATS)}")
    return value
