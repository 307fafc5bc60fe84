"""Launching FP8 encode and decode: `encode.cu` and `decode.cu`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from corekern.cuda import loader
from corekern.cuda.kernels import DECODE_UNROLL, ENCODE_UNROLL, THREADS
from corekern.cuda.walk import merge_axes, pack_walk, pieces, takes_vectors
from corekern.formats import Format

# The same struct as `Divisor` in division.cuh.
DIVISOR = np.dtype([(name, np.float32) for name in ("scale", "reciprocal", "factor", "given")])


def encode(x: Any, codes: Any, fmt: Format, scale: Any, saturate: bool) -> None:
    """codes[...] = FP8(x / scale), the quotient in float32 (float64 for float64 x) and rounded once.

    Launches on the current stream, allocates nothing, and can be captured in a graph once it has run with
    the same dtypes (the first call compiles).

    Args:
        x: float16, bfloat16, float32 or float64, any strides.
        codes: uint8, x's shape, any strides.
        fmt: an FP8 format.
        scale: a float, or a float32 array broadcast to x's shape.
        saturate: whether overflow gives the largest finite value; else NaN (E4M3) or infinity (E5M2).
    """
    nan_on_overflow = np.int32(not saturate)
    divisor = pack_divisor(scale if isinstance(scale, float) else 1.0)

    def launch(entry, grid, *arguments):
        function = loader.kernel("encode.cu", entry, VALUE=x.dtype.name, FORMAT=fmt.name)
        function(grid, (THREADS,), (*arguments, divisor, nan_on_overflow))

    vector = vector_of(x.itemsize)
    _launch_walk("encode", launch, x, codes, scale, vector, THREADS * ENCODE_UNROLL * vector)


def decode(codes: Any, out: Any, fmt: Format, scale: Any) -> None:
    """out[...] = value(codes) * scale, the product in float32 and rounded once to out's dtype.

    Launches on the current stream, allocates nothing, and can be captured in a graph, as `encode`.

    Args:
        codes: uint8, any strides.
        out: float16, bfloat16 or float32, the codes' shape, any strides.
        fmt: the codes' FP8 format.
        scale: a float, or a float32 array broadcast to the codes' shape.
    """
    factor = np.float32(scale if isinstance(scale, float) else 1.0)

    def launch(entry, grid, *arguments):
        function = loader.kernel("decode.cu", entry, VALUE=out.dtype.name, FORMAT=fmt.name)
        function(grid, (THREADS,), (*arguments, factor))

    vector = vector_of(out.itemsize)
    _launch_walk("decode", launch, codes, out, scale, vector, THREADS * DECODE_UNROLL * vector)


def vector_of(itemsize: int) -> int:
    """Elements a vector: 16 bytes of the wide side (32 for float64)."""
    return 8 if itemsize == 2 else 4


@functools.lru_cache(maxsize=1024)
def pack_divisor(scale: float) -> np.ndarray:
    """The `Divisor` of a host scale: the scale inside [2^-85, 2^126], and its reciprocal: see division.cuh.

    Kept by scale, since a cache writes with the same two scales for ever.
    """
    given = np.float32(scale)
    factor = np.float32(2.0**64 if given < 2.0**-85 else 2.0**-8 if given > 2.0**126 else 1.0)
    inside = given * factor
    return np.array([(inside, np.float32(1) / inside, factor, given)], DIVISOR)


def _launch_walk(name, launch, source, target, scale, vector, elements_in_block) -> None:
    """Launch `<name>_flat`, `_rows` or `_any` over all of two arrays of one shape.

    `launch(entry, grid, *arguments)` adds the arguments that do not depend on the walk.
    """
    if source.size == 0:
        return
    scales = None if isinstance(scale, float) else scale
    addresses = loader.address(source), loader.address(target)
    itemsizes = source.itemsize, target.itemsize
    contiguous = scales is None and source.flags.c_contiguous and target.flags.c_contiguous
    if contiguous and all(a % min(16, vector * n) == 0 for a, n in zip(addresses, itemsizes, strict=True)):
        grid = (-(-source.size // elements_in_block),)
        launch(f"{name}_flat", grid, *(np.uint64(a) for a in addresses), np.int64(source.size))
        return

    axes = merge_axes(
        source.shape,
        tuple(s // source.itemsize for s in source.strides),
        tuple(s // target.itemsize for s in target.strides),
        (0,) * source.ndim if scales is None else tuple(s // 4 for s in scales.strides),
    )
    sides = tuple(zip(addresses, itemsizes, strict=True))
    vectors = takes_vectors(axes, vector, *sides)
    width = vector if vectors else 1
    for piece in pieces(axes, width):
        walk = pack_walk(piece, width)
        pointers = [np.uint64(a + at * n) for (a, n), at in zip(sides, piece.start, strict=False)]
        at_scale = np.uint64(0 if scales is None else loader.address(scales) + piece.start[2] * 4)
        grid = (-(-int(walk["items"][0]) // THREADS),)
        launch(f"{name}_{'rows' if vectors else 'any'}", grid, *pointers, at_scale, walk)
