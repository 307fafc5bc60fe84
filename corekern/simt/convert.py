"""Conversions between the KV formats and float32, as device functions.

numba-cuda has no FP8 or bfloat16 arrays, so kernels read and write bit patterns: uint8 for FP8, uint16 for
float16 and bfloat16, float32 as itself. Every small format is then one idea with other numbers: a pattern
of `mantissa` bits and a bias, whose exponent and mantissa, moved under float32's, are the value times a
power of two, subnormals included.

The only reinterpretation of bits is the scalar `x.view(dtype)`, which NumPy scalars have as well: the same
source runs in numba-cuda's simulator. There, integers stay of the width they were given, while numba widens
them; expressions below are right either way.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda

from corekern.formats import Format

# name: bits, mantissa bits, exponent bias, pattern of the largest finite value, pattern of a NaN
_LAYOUTS = {
    "fp8_e4m3": (8, 3, 7, 0x7E, 0x7F),
    "fp8_e5m2": (8, 2, 15, 0x7B, 0x7E),
    "float16": (16, 10, 15, 0x7BFF, 0x7E00),
    "bfloat16": (16, 7, 127, 0x7F7F, 0x7FC0),
}

STORAGE = {
    "fp8_e4m3": np.uint8,
    "fp8_e5m2": np.uint8,
    "float16": np.uint16,
    "bfloat16": np.uint16,
    "float32": np.float32,
    "float64": np.float64,
}


@cuda.jit(device=True)
def is_nan(x):
    return x != x


@cache
def decoder(name: str):
    """A device function: the float32 value of one stored element. NaN is quiet and keeps its sign."""
    if name == "float32":

        @cuda.jit(device=True)
        def as_is(x):
            return x

        return as_is

    bits, mantissa, bias, largest, _ = _LAYOUTS[name]
    shift = 23 - mantissa
    factor = np.float32(2.0 ** (127 - bias))
    # The patterns past the largest finite one: a NaN in E4M3, an infinity and then NaNs in the others.
    first_nan = largest + 1 if name == "fp8_e4m3" else largest + 2
    magnitude_bits = (1 << (bits - 1)) - 1
    sign_shift = 32 - bits

    @cuda.jit(device=True)
    def to_float32(stored):
        pattern = np.uint32(stored)
        magnitude = pattern & np.uint32(magnitude_bits)
        sign = np.uint32((pattern & np.uint32(magnitude_bits + 1)) << np.uint32(sign_shift))
        value = np.uint32(magnitude << np.uint32(shift)).view(np.float32) * factor
        wide = value.view(np.uint32)
        if magnitude > np.uint32(largest):
            wide = np.uint32(0x7F800000)
            if magnitude >= np.uint32(first_nan):
                wide = np.uint32(0x7FC00000)
        return np.uint32(wide | sign).view(np.float32)

    return to_float32


@cache
def rounder(name: str, saturate: bool = False):
    """A device function: the stored element nearest to a float32, ties to even; NaN keeps its sign.

    Finite overflow and infinities give the largest finite value where `saturate`, else what comes after
    it: NaN in E4M3, infinity in the others.
    """
    if name == "float32":

        @cuda.jit(device=True)
        def as_is(x):
            return x

        return as_is

    bits, mantissa, bias, largest, nan = _LAYOUTS[name]
    past = largest if saturate else largest + 1
    shift = 23 - mantissa
    rebias = (127 - bias) << mantissa
    smallest_normal = (128 - bias) << 23  # as a float32 pattern
    # The float32 whose unit in the last place is the smallest subnormal: adding it rounds there.
    magic = np.float32(2.0 ** (24 - bias - mantissa))
    magic_pattern = int(magic.view(np.int32))
    half = (1 << (shift - 1)) - 1
    sign_shift = 32 - bits
    sign_bit = 1 << (bits - 1)
    storage = STORAGE[name]

    @cuda.jit(device=True)
    def to_stored(x):
        pattern = np.int64(x.view(np.uint32))
        magnitude = pattern & 0x7FFFFFFF
        if magnitude > 0x7F800000:
            code = np.int64(nan)
        elif magnitude < smallest_normal:
            rounded = np.uint32(magnitude).view(np.float32) + magic
            code = np.int64(rounded.view(np.uint32)) - magic_pattern
        else:
            code = ((magnitude + half + ((magnitude >> shift) & 1)) >> shift) - rebias
            if code > past:
                code = np.int64(past)
        return storage(code | ((pattern >> sign_shift) & sign_bit))

    return to_stored


@cuda.jit(device=True)
def round_to_odd(x):
    """float64, no NaN -> float32 so that a second rounding to FP8 is exact.

    Truncates towards zero and sets the last bit when anything was lost: with 13 or more bits to spare, the
    lost part still decides every later tie the way the float64 value would.
    """
    y = np.float32(x)
    wide = np.float64(y)
    pattern = np.int64(y.view(np.uint32))
    if wide != x:
        if abs(wide) > abs(x):
            pattern -= 1
        pattern |= 1
    return np.uint32(pattern).view(np.float32)


def storage(array, fmt: Format | None = None):
    """`array` seen as the bit patterns that kernels read and write, and its format's name."""
    name = fmt.name if fmt is not None else array.dtype.name
    return array.view(STORAGE[name]), name
