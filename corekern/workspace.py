"""Device memory for partial states: one buffer for each device, stream and partial dtype.

Two streams never share a buffer, and partials of different dtypes never alias. A buffer grows when a call
needs more; inside a graph capture nothing is allocated, and a buffer that a captured graph uses is kept
for as long as the process lives, since the graph will be replayed on it.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np

from corekern import arrays

PARTIAL_DTYPES = ("float32", "float16")


class Buffers(NamedTuple):
    """A stream's workspace, CuPy arrays."""

    partials: Any
    """(nbytes,) uint8."""
    counters: Any
    """int32, one for each KiB of partials and 1024 more. Zero, and left zero by every launch that counts in it."""
    gatherings: Any
    """(512, 2) uint32, equal in pairs, and left so by every launch: see grouped_combine.cuh."""


_buffers: dict[tuple[int, int, str], Buffers] = {}
_captured: list[Buffers] = []
_lock = threading.Lock()


def reserve(nbytes: int, *, partial_dtype: str = "float32") -> None:
    """Makes the workspace of the current device and stream at least `nbytes` large.

    Needed before a graph capture on that stream; elsewhere calls grow it themselves.

    Args:
        nbytes: bytes of partial states, as the error of a capture names them.
        partial_dtype: "float32", or "float16" for `grouped_fp16_legacy`.

    Raises:
        ValueError: a size below 0 or another dtype, or the stream is being captured.
        ImportError: CuPy is not installed.
    """
    if not isinstance(nbytes, (int, np.integer)) or nbytes < 0:
        raise ValueError(f"nbytes: {nbytes!r} is not an integer of at least 0")
    if partial_dtype not in PARTIAL_DTYPES:
        raise ValueError(f"partial_dtype: {partial_dtype!r} is not one of {', '.join(PARTIAL_DTYPES)}")
    cupy = arrays.namespace("cuda")
    if cupy.cuda.get_current_stream().is_capturing():
        raise ValueError("nbytes: cannot be reserved while the stream is being captured")
    take(int(nbytes), partial_dtype)


def take(nbytes: int, partial_dtype: str = "float32") -> Any:
    """The current stream's buffer, a CuPy uint8 array of at least `nbytes`.

    Its contents last until the next call on the same stream.

    Raises:
        RuntimeError: a capture needs more than was reserved; the message names the call to make.
    """
    return take_counted(nbytes, 0, partial_dtype)[1].partials


def take_counted(nbytes: int, counters: int, partial_dtype: str = "float32") -> tuple[int, Buffers]:
    """As `take`, with at least `counters` counters (more than one a KiB asks for more partials), and the stream's address."""
    nbytes = max(nbytes, (counters - 1024) << 10)
    cupy = arrays.namespace("cuda")
    stream = cupy.cuda.get_current_stream()
    pointer = stream.ptr
    key = (cupy.cuda.runtime.getDevice(), pointer, partial_dtype)
    buffers = _buffers.get(key)
    if buffers is not None and buffers.partials.nbytes < nbytes:
        buffers = None
    if stream.is_capturing():
        if buffers is None:
            option = "" if partial_dtype == "float32" else f", partial_dtype={partial_dtype!r}"
            raise RuntimeError(
                f"workspace: a graph capture may not allocate, and this call needs {nbytes} bytes; "
                f"call corekern.reserve({nbytes}{option}) on this stream before the capture"
            )
        with _lock:
            if not any(kept is buffers for kept in _captured):
                _captured.append(buffers)
    elif buffers is None:
        buffers = _buffers[key] = Buffers(
            cupy.empty(nbytes, cupy.uint8),
            cupy.zeros((nbytes >> 10) + 1024, cupy.int32),
            cupy.zeros((512, 2), cupy.uint32),
        )
    return pointer, buffers
