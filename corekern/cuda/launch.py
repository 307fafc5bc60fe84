"""Launching a kernel with one struct of parameters, prepared once.

Straight to the driver (cuLaunchKernelEx through ctypes): CuPy's RawKernel looks at its arguments again at every call,
and cannot say that a kernel may start while the one before it ends.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

# CUlaunchAttributeID
_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Configuration(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class Launch:
    """A kernel with its grid and its parameters, which are read anew at every call."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        params: np.ndarray,
        *,
        cooperative: bool = False,
        overlapping: bool = True,
    ) -> None:
        """
        Args:
            kernel: a CuPy RawKernel whose one parameter is a struct by value.
            grid, threads, shared_bytes: blocks, threads a block, dynamic shared memory a block.
            params: the struct; what it holds at the time of a call is what the kernel sees.
            cooperative: launch only when all blocks fit on the card at once.
            overlapping: let the kernel start before the one ahead of it in its stream is done. It has to wait for that
                one itself (griddepcontrol.wait), so this is for kernels of sm_90 and later that do.
        """
        wanted = [_COOPERATIVE] * cooperative + [_PROGRAMMATIC_STREAM_SERIALIZATION] * overlapping
        attributes = (_Attribute * 2)()
        for attribute, what in zip(attributes, wanted, strict=False):
            attribute.id, attribute.value[0] = what, 1
        self._configuration = _Configuration(
            grid, (threads, 1, 1), shared_bytes, None, ctypes.addressof(attributes), len(wanted)
        )
        pointers = (ctypes.c_void_p * 1)(params.ctypes.data)
        self._arguments = (
            ctypes.byref(self._configuration), ctypes.c_void_p(kernel.kernel.ptr), pointers, None,
        )  # fmt: skip
        self._kept = (kernel, attributes, params)
        self._start = _driver().cuLaunchKernelEx

    def __call__(self, stream: int) -> None:
        """Launches on the stream at this address.

        Raises:
            RuntimeError: the driver refused, with its error number.
        """
        self._configuration.stream = stream
        status = self._start(*self._arguments)
        if status != 0:
            raise RuntimeError(f"cuLaunchKernelEx: error {status}")
