"""FP8 encode and decode on the CPU: one rounding, vectorised by LLVM, threaded over flat ranges."""

from __future__ import annotations

import numpy as np
from numba import njit

from corekern.cpu.convert import quotient, storage, to_e4m3, to_e5m2, to_float32
from corekern.cpu.threads import for_ranges, num_threads
from corekern.formats import Format

# Elements a piece of work, at most: a piece must hide the few microseconds that a hand-over costs.
GRAIN = 1 << 20
# Elements at a time where strides ask for a buffer, which should stay in the L2.
BUFFER = 1 << 16


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_e4m3(x, scale, past, codes):
    for i in range(len(codes)):
        codes[i] = to_e4m3(quotient(x[i], scale), past)


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_e5m2(x, scale, past, codes):
    for i in range(len(codes)):
        codes[i] = to_e5m2(quotient(x[i], scale), past)


# Each with the codes of a value past the largest finite one: saturated, or as the format has it.
_ENCODERS = {"fp8_e4m3": (_encode_e4m3, 0x7E, 0x7F), "fp8_e5m2": (_encode_e5m2, 0x7B, 0x7C)}


@njit(nogil=True, cache=True, error_model="numpy")
def _decode(codes, scale, out):
    for i in range(len(codes)):
        out[i] = to_float32(codes[i]) * scale


def encode(x: np.ndarray, codes: np.ndarray, fmt: Format, scale, saturate: bool) -> None:
    """codes[...] = FP8(x / scale). `scale` is a number, or an array broadcast to x's shape."""
    kernel, largest, overflow = _ENCODERS[fmt.name]
    past = np.int32(largest if saturate else overflow)
    number = np.float64 if x.dtype == np.float64 else np.float32
    if np.ndim(scale) == 0 and x.flags.c_contiguous and codes.flags.c_contiguous:
        flat, flat_codes, scale = storage(x).reshape(-1), codes.reshape(-1), number(scale)
        for_ranges(lambda b, e: kernel(flat[b:e], scale, past, flat_codes[b:e]), x.size, _grain(x.size))
        return
    operands = [x, codes] if np.ndim(scale) == 0 else [x, codes, scale]
    with _chunks(*operands) as chunks:
        for chunk, out, *scales in chunks:
            if scales:
                # One division in the working precision, as the kernel's own.
                chunk = np.divide(chunk.astype(number), scales[0].astype(number), dtype=number)
            divisor = number(1.0) if scales else number(scale)
            kernel(storage(chunk), divisor, past, out)


def decode(codes: np.ndarray, out: np.ndarray, fmt: Format, scale) -> None:
    """out[...] = value(codes) * scale, the product in float32 and rounded once to out's dtype."""
    if np.ndim(scale) == 0 and codes.flags.c_contiguous and out.flags.c_contiguous:
        flat, flat_out, scale = storage(codes, fmt).reshape(-1), out.reshape(-1), np.float32(scale)
        for_ranges(
            lambda b, e: _decode_range(flat[b:e], scale, flat_out[b:e]), codes.size, _grain(codes.size)
        )
        return
    operands = [codes, out] if np.ndim(scale) == 0 else [codes, out, scale]
    with _chunks(*operands) as chunks:
        for chunk, part, *scales in chunks:
            values = np.empty(len(part), np.float32)
            factor = np.float32(1.0) if scales else np.float32(scale)
            _decode(storage(chunk, fmt), factor, values)
            with np.errstate(over="ignore"):  # float16 has its infinity
                part[...] = values * scales[0].astype(np.float32) if scales else values


def _grain(size: int) -> int:
    return min(GRAIN, max(BUFFER, size // (4 * num_threads())))


def _decode_range(codes, scale, out):
    if out.dtype == np.float32:
        _decode(codes, scale, out)
        return
    values = np.empty(len(codes), np.float32)
    _decode(codes, scale, values)
    with np.errstate(over="ignore"):  # float16 has its infinity
        out[...] = values.astype(out.dtype)


def _chunks(source, target, *scales):
    """Walks arrays of any strides in contiguous pieces that fit the cache."""
    return np.nditer(  # type: ignore[call-overload]
        [source, target, *scales],
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_flags=[["readonly", "contig"], ["writeonly", "contig"], *[["readonly", "contig"]] * len(scales)],
        buffersize=BUFFER,
        order="C",
    )
