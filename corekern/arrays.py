"""Whose arrays arguments are, and whether they are what they should be.

Any array is taken without a copy: NumPy's and CuPy's as they are, others through DLPack or the CUDA array
interface. A check that fails raises one clear line that names the argument, before anything is written or
launched.
"""

from __future__ import annotations

import functools
import math
import os
import sys
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


# DLPack device types that a NumPy or a CuPy array can stand on.
_DLPACK_HOST = (1, 3)  # CPU, CUDA pinned host memory
_DLPACK_CUDA = (2, 13)  # CUDA, CUDA managed memory


def adopt(x: Any, name: str) -> Any:
    """`x` as a NumPy or CuPy array over the same memory.

    Raises:
        TypeError: it is no array, or its library cannot hand it over.
        ImportError: it is on a CUDA device and CuPy is not installed.
    """
    if isinstance(x, np.ndarray) or _is_cupy(x):
        return x
    try:
        if hasattr(x, "__dlpack__"):
            kind = int(x.__dlpack_device__()[0])
            if kind in _DLPACK_CUDA:
                return _cupy().from_dlpack(x)
            if kind in _DLPACK_HOST:
                return np.from_dlpack(x)
            raise TypeError(f"DLPack device type {kind} is neither a CPU nor CUDA")
        if hasattr(x, "__cuda_array_interface__"):
            return _cupy().asarray(x)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        if type(x).__module__.split(".")[0] == "jaxlib" and kind in _DLPACK_HOST:
            return np.asarray(x)  # NumPy's DLPack knows no bfloat16, but JAX's own hand-over does
        raise TypeError(f"{name}: {type(x).__name__} cannot be taken without a copy: {error}") from None
    raise TypeError(f"{name}: expected an array, got {type(x).__name__}")


def give_back(result: Any, like: Any) -> Any:
    """`result` in the array library of the caller's argument `like`, over the same memory."""
    if isinstance(like, np.ndarray) or _is_cupy(like):
        return result
    library = sys.modules.get(type(like).__module__.split(".")[0].replace("jaxlib", "jax.numpy"))
    from_dlpack = getattr(library, "from_dlpack", None)
    return result if from_dlpack is None else from_dlpack(result)


def device_of(array: Any) -> str:
    """ "cpu" or "cuda:<index>" of an adopted array."""
    return f"cuda:{array.data.device_id}" if _is_cupy(array) else "cpu"


def compute_capability(device: str) -> int:
    """90 for a GPU of compute capability 9.0; 0 for "cpu"."""
    return 0 if device == "cpu" else _capability(int(device.removeprefix("cuda:")))


@functools.cache
def _capability(index: int) -> int:
    return int(_cupy().cuda.Device(index).compute_capability)


def check_same_device(**arguments: Any) -> str:
    """The device that all adopted arrays given are on (None is skipped)."""
    devices = {name: device_of(a) for name, a in arguments.items() if a is not None}
    first = next(iter(devices))
    for name, device in devices.items():
        if device != devices[first]:
            raise ValueError(f"{name}: is on {device}, but {first} is on {devices[first]}")
    return devices[first]


def namespace(device: str) -> Any:
    """The library whose arrays live on a device: numpy or cupy."""
    return np if device == "cpu" else _cupy()


def new_output(device: str, shape: tuple[int, ...], dtype: Any, name: str = "out") -> Any:
    """An array for a result that the caller gave none for.

    Raises:
        ValueError: a graph is being captured.
    """
    xp = namespace(device)
    if xp is not np and xp.cuda.get_current_stream().is_capturing():
        raise ValueError(f"{name}: must be given during a graph capture, which may not allocate")
    return xp.empty(shape, dtype)


def to_host(array: Any) -> np.ndarray:
    """A NumPy array of the same values; waits for the device."""
    return array.get() if _is_cupy(array) else array


def _is_cupy(x: Any) -> bool:
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "CUDA arrays need CuPy: pip install 'corekern[cuda12]' or 'corekern[cuda13]'"
        ) from error
    return cupy


def check_array(
    array: Any,
    name: str,
    *,
    shape: tuple[int | str | None, ...] | None = None,
    dtypes: tuple[np.dtype, ...] | None = None,
    contiguous_last: bool = False,
    writeable: bool = False,
) -> Any:
    """An adopted array, if it is of the shape and dtype asked; a str or None in `shape` takes any extent.

    Raises:
        TypeError: it has another dtype.
        ValueError: it has another shape, or a layout or a flag that is not allowed.
    """
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
    if (
        contiguous_last
        and array.size
        and array.ndim
        and array.shape[-1] > 1
        and array.strides[-1] != array.itemsize
    ):
        raise ValueError(
            f"{name}: its last axis must be contiguous, but has a stride of {array.strides[-1]} bytes "
            f"for elements of {array.itemsize}"
        )
    if any(s % array.itemsize for s in array.strides):
        raise ValueError(
            f"{name}: strides {array.strides} are not multiples of its {array.itemsize}-byte elements"
        )
    if _is_cupy(array) and array.data.ptr % array.itemsize:  # the CPU reads such views; a GPU faults
        raise ValueError(f"{name}: its address is not a multiple of its {array.itemsize}-byte elements")
    if writeable and not getattr(array.flags, "writeable", True):  # CuPy's arrays always are
        raise ValueError(f"{name}: is read-only")
    return array


def check_output(
    out: Any, name: str, *, shape: tuple[int, ...], dtypes: tuple, inputs: dict[str, Any]
) -> Any:
    """`out`, if it can be written: right shape and dtype, writeable, and overlapping neither itself nor an input."""
    check_array(out, name, shape=shape, dtypes=dtypes, writeable=True)
    for other, array in inputs.items():
        if device_of(out) == device_of(array) and np.shares_memory(_addresses(out), _addresses(array)):
            raise ValueError(f"{name}: overlaps {other}")
    if not out.size:  # NumPy may give an empty array strides of 0
        return out
    extent = 0  # an array overlaps itself where an axis steps less far than the smaller ones reach
    for stride, n in sorted((abs(s), n) for s, n in zip(out.strides, out.shape, strict=True) if n > 1):
        if stride < extent + out.itemsize:
            raise ValueError(f"{name}: its elements overlap each other (strides {out.strides})")
        extent += stride * (n - 1)
    return out


def _addresses(array: Any) -> np.ndarray:
    """A NumPy array with the addresses of `array`, which may be a device's and must not be read."""
    if isinstance(array, np.ndarray):
        return array

    class Interface:
        __array_interface__ = {  # noqa: RUF012
            "version": 3,
            "data": (array.data.ptr, False),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
        }

    return np.asarray(Interface())


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


def check_scales(scale: Any, name: str, shape: tuple[int, ...]) -> Any:
    """A per-tensor scale, or an array of scales that broadcasts to `shape`."""
    if not hasattr(scale, "shape") or isinstance(scale, np.generic):
        return check_scale(scale, name)
    scale = adopt(scale, name)
    check_array(scale, name, dtypes=FLOATS_AND_DOUBLE)
    if scale.ndim == 0:
        return check_scale(scale, name)
    scale = scale.astype(np.float32)
    xp = namespace(device_of(scale))
    # On a GPU this would wait for the device: its values are the caller's word.
    if xp is np and not (np.isfinite(scale) & (scale > 0)).all():
        raise ValueError(f"{name}: every scale must be a finite number above 0 in float32")
    try:
        return xp.broadcast_to(scale, shape)
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
