"""FP8 encode and decode: a block takes 2048 elements, each thread every 256th of them.

The same bits as the CPU backend for every input. A GPU gives each arithmetic NaN one pattern, so NaNs keep
their sign by going around the arithmetic.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32

from corekern.formats import Format
from corekern.simt import device
from corekern.simt.convert import STORAGE, decoder, is_nan, round_to_odd, rounder, storage

THREADS = 256
PER_THREAD = 8


@cache
def encode_kernel(source: str, target: str, saturate: bool):
    """(x, scale, scales, scaled, codes): codes[i] = FP8(x[i] / scale), or x[i] / scales[i] where `scaled`."""
    round_fp8 = rounder(target, saturate)
    if source == "float64":

        @cuda.jit(device=True)
        def quotient(x, scale):
            if is_nan(x):
                return np.uint32(0xFFC00000 if x.view(np.int64) < 0 else 0x7FC00000).view(np.float32)
            return round_to_odd(x / np.float64(scale))

        to_float = decoder("float32")
    else:

        @cuda.jit(device=True)
        def quotient(x, scale):
            return x if is_nan(x) else x / scale

        to_float = decoder(source)

    @cuda.jit
    def encode(x, scale, scales, scaled, codes):
        first = np.int64(cuda.blockIdx.x) * (THREADS * PER_THREAD) + cuda.threadIdx.x
        for i in range(first, min(first + THREADS * PER_THREAD, codes.shape[0]), THREADS):
            divisor = scales[i] if scaled else scale
            codes[i] = round_fp8(quotient(to_float(x[i]), divisor))

    return encode


@cache
def decode_kernel(source: str, target: str):
    """(codes, scale, scales, scaled, out): out[i] = value(codes[i]) * scale, or * scales[i] where `scaled`."""
    to_float, round_out = decoder(source), rounder(target)

    @cuda.jit
    def decode(codes, scale, scales, scaled, out):
        first = np.int64(cuda.blockIdx.x) * (THREADS * PER_THREAD) + cuda.threadIdx.x
        for i in range(first, min(first + THREADS * PER_THREAD, out.shape[0]), THREADS):
            value = to_float(codes[i])
            if not is_nan(value):
                value = value * (scales[i] if scaled else scale)
            out[i] = round_out(value)

    return decode


def encode_types(source: str) -> tuple:
    """The argument types of `encode_kernel`."""
    floats = device.array_type(np.float32)
    return (device.array_type(STORAGE[source]), float32, floats, int32, device.array_type(np.uint8))


def decode_types(target: str) -> tuple:
    """The argument types of `decode_kernel`."""
    floats = device.array_type(np.float32)
    return (device.array_type(np.uint8), float32, floats, int32, device.array_type(STORAGE[target]))


def encode(x: Any, codes: Any, fmt: Format, scale: Any, saturate: bool) -> None:
    """codes[...] = FP8(x / scale). `scale` is a number, or an array broadcast to x's shape."""
    x, name = storage(x)
    _launch(encode_kernel(name, fmt.name, bool(saturate)), x, scale, codes)


def decode(codes: Any, out: Any, fmt: Format, scale: Any) -> None:
    """out[...] = value(codes) * scale, the product in float32 and rounded once to out's dtype."""
    out, name = storage(out)
    _launch(decode_kernel(fmt.name, name), codes, scale, out)


def _launch(kernel: Any, source: Any, scale: Any, target: Any) -> None:
    """Strided arrays and arrays of scales go through contiguous copies."""
    if target.size == 0:
        return
    xp = device.namespace()
    scaled = np.ndim(scale) > 0
    written = target if target.flags.c_contiguous else xp.empty(target.shape, target.dtype)
    x, scales, out = (
        device.flatten(xp.ascontiguousarray(a).reshape(-1))[0]
        for a in (source, scale if scaled else xp.empty(1, np.float32), written)
    )
    number = np.float32(1.0 if scaled else scale)
    blocks = -(-target.size // (THREADS * PER_THREAD))
    device.launch(kernel, (blocks,), THREADS, None, x, number, scales, np.int32(scaled), out)
    if written is not target:
        target[...] = written
