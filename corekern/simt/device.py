"""What differs between a GPU and numba-cuda's simulator: arrays, streams and launches. Nothing else does.

On a GPU, arguments are CuPy arrays and work goes to CuPy's current stream unless another is named. Under
NUMBA_ENABLE_CUDASIM=1 they are NumPy arrays, and kernels run as Python threads before a launch returns.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.core import config
from numba.cuda.core.errors import NumbaPerformanceWarning
from numba.cuda.np.numpy_support import from_dtype

SIMULATED = bool(config.ENABLE_CUDASIM)


def namespace() -> Any:
    """The library whose arrays kernels take."""
    if SIMULATED:
        return np
    import cupy

    return cupy


def flatten(array: Any) -> tuple[Any, tuple[int, ...]]:
    """The memory that a strided array spans as one flat array, and (origin, *strides) in its elements.

    Kernels then do their own addressing, in 64-bit integers, and one compiled kernel serves every layout.
    """
    item = array.itemsize
    strides = tuple(s // item for s in array.strides)
    if array.size == 0:
        return _argument(array.reshape(-1)), (0, *strides)
    steps = [(n - 1) * s for n, s in zip(array.shape, strides, strict=True)]
    low, high = sum(min(0, s) for s in steps), sum(max(0, s) for s in steps)
    corner = tuple(
        slice(n - 1, n) if s < 0 else slice(0, 1) for n, s in zip(array.shape, strides, strict=True)
    )
    span = namespace().lib.stride_tricks.as_strided(array[corner], (high - low + 1,), (item,))
    return _argument(span), (-low, *strides)


def _argument(array: Any) -> Any:
    """A flat array as kernels take it: without a copy, and without waiting for the stream it was made on."""
    if SIMULATED:
        from numba.cuda.cudadrv.devicearray import FakeCUDAArray

        return FakeCUDAArray(array)
    return cuda.as_cuda_array(array, sync=False)


def array_type(dtype: Any) -> types.Type:
    """The type of a flat array as `flatten` gives it."""
    return types.Array(from_dtype(np.dtype(dtype)), 1, "C")


def integers_type(count: int) -> types.Type:
    """The type of a tuple of Python integers."""
    return types.UniTuple(types.int64, count)


def compile(kernel: Any, argument_types: tuple[types.Type, ...]) -> None:
    """Compiles a kernel for the current device, so that no launch has to."""
    if not SIMULATED:
        kernel.compile(argument_types)


def workspace(nbytes: int) -> Any:
    """Device memory that lasts until the next call on the same stream."""
    if SIMULATED:
        return np.empty(nbytes, np.uint8)
    from corekern import workspace as pool

    return pool.take(nbytes)


def launch(kernel: Any, grid: tuple[int, ...], threads: int, stream: Any, *arguments: Any) -> None:
    """Launches on `stream`: a CuPy stream, a stream's address, or None for CuPy's current stream."""
    if 0 in grid:
        return
    _configured(kernel, grid, threads, _address(stream))(*arguments)


def _address(stream: Any) -> int:
    if SIMULATED:
        return 0
    ours, theirs = namespace().cuda.runtime.getDevice(), cuda.current_context().device.id
    if ours != theirs:  # numba-cuda stays on a thread's first device
        raise RuntimeError(
            f"device: arrays are on cuda:{ours}, but this thread has used numba-cuda on cuda:{theirs}; "
            f"use another thread"
        )
    if stream is None:
        return namespace().cuda.get_current_stream().ptr
    return int(getattr(stream, "ptr", stream))


def _configure(kernel: Any, grid: tuple[int, ...], threads: int, stream: int) -> Any:
    with warnings.catch_warnings():  # small grids are what small problems have
        warnings.simplefilter("ignore", NumbaPerformanceWarning)
        return kernel[grid, threads, cuda.external_stream(stream) if stream else 0]


# The simulator keeps the last configuration in the kernel itself, so there it cannot be kept.
_configured = _configure if SIMULATED else lru_cache(maxsize=256)(_configure)
