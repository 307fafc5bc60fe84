"""Tensor maps: what Hopper's bulk copies know of an array in global memory.

Encoded on the host by the driver (cuTensorMapEncodeTiled, called through ctypes: CuPy has no binding) and passed to a
kernel by value.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np

MAP_BYTES = 128
_UINT8, _NO_INTERLEAVE, _ZERO_FILL = 0, 0, 0
_SWIZZLE = {64: 2, 128: 3}
_PROMOTE_TO_256_BYTES = 3


@functools.cache
def _encode():
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    function.restype = ctypes.c_int
    return function


def can_map(address: int, strides: tuple[int, ...]) -> bool:
    """Whether an array of bytes at `address`, with these outer strides in bytes, can have a tensor map."""
    return address % 16 == 0 and all(0 < stride < 1 << 40 and stride % 16 == 0 for stride in strides)


@functools.lru_cache(maxsize=256)
def tensor_map(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> np.ndarray:
    """A map of a byte array, innermost axis first.

    Args:
        address: of the first byte, a multiple of 16.
        shape: extents; the innermost axis is contiguous.
        strides: in bytes, of all axes but the innermost; multiples of 16.
        box: extents of one copy. box[0] is 64 or 128 bytes and is also the swizzle.

    Returns:
        (16,) uint64.

    Raises:
        RuntimeError: the driver refused; with its error number.
    """
    raw = np.zeros(32, np.uint64)
    skip = -raw.ctypes.data % 64 // 8
    result = raw[skip : skip + 16]
    rank = len(shape)
    status = _encode()(
        ctypes.c_void_p(result.ctypes.data),
        ctypes.c_int(_UINT8),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        ctypes.c_int(_NO_INTERLEAVE),
        ctypes.c_int(_SWIZZLE[box[0]]),
        ctypes.c_int(_PROMOTE_TO_256_BYTES),
        ctypes.c_int(_ZERO_FILL),
    )
    if status != 0:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: error {status} for {shape}, strides {strides}, box {box}"
        )
    return result.copy()
