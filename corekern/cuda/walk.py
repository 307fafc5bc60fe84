"""How a kernel of `encode.cu` or `decode.cu` walks its arrays: axes merged, and vectors where they fit.

The same struct as `Walk` in `walk.cuh`. Everything here is in elements, not bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

MAX_OUTER_AXES = 4
MAX_ITEMS = 2**31 - 1

WALK = np.dtype(
    [
        ("items", np.uint32),
        ("items_in_row", np.uint32),
        ("row", np.int64),
        ("shape", np.int64, MAX_OUTER_AXES),
        ("source", np.int64, MAX_OUTER_AXES + 1),
        ("target", np.int64, MAX_OUTER_AXES + 1),
        ("scale", np.int64, MAX_OUTER_AXES + 1),
    ]
)


@dataclass(frozen=True)
class Axes:
    """A shape, with the strides and the first elements' positions of the three arrays walked over it."""

    shape: tuple[int, ...]
    strides: tuple[tuple[int, int, int], ...]
    """For each axis, the strides of source, target and scale."""
    start: tuple[int, int, int] = (0, 0, 0)


def merge_axes(shape: tuple[int, ...], *strides: tuple[int, ...]) -> Axes:
    """The fewest axes that visit every element: none of length 1, and neighbours merged.

    Axes are first put in the target's memory order, so that two Fortran-ordered arrays are one long row.
    Elementwise work does not mind the order.

    >>> merge_axes((4, 8, 16), (128, 16, 1), (160, 16, 1), (0, 0, 0))
    Axes(shape=(4, 128), strides=((128, 160, 0), (1, 1, 0)), start=(0, 0, 0))
    """
    axes = [(n, s) for n, *s in zip(shape, *strides, strict=True) if n != 1]
    axes.sort(key=lambda axis: -abs(axis[1][1]))
    merged: list[tuple[int, list[int]]] = []
    for length, steps in axes:
        if merged and all(outer == step * length for outer, step in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = (merged[-1][0] * length, steps)
        else:
            merged.append((length, steps))
    if not merged:
        merged = [(1, [1, 1, 0])]
    return Axes(tuple(n for n, _ in merged), tuple((x, y, scale) for _, (x, y, scale) in merged))


def pieces(axes: Axes, vector: int) -> Iterator[Axes]:
    """`axes` in pieces that a kernel can walk: at most 5 axes, and fewer than 2^31 items of `vector` elements."""
    *outer, row = axes.shape
    items = -(-row // vector)
    for length in outer:
        items *= length
    if len(outer) <= MAX_OUTER_AXES and items <= MAX_ITEMS:
        yield axes
        return
    if len(outer) > MAX_OUTER_AXES:
        for i in range(axes.shape[0]):
            start = _moved(axes, i)
            yield from pieces(Axes(axes.shape[1:], axes.strides[1:], start), vector)
        return
    # Halve the longest axis. A row is cut between vectors, which keeps each half aligned.
    longest = max(range(len(axes.shape)), key=lambda i: axes.shape[i])
    length = axes.shape[longest]
    first = length // 2 // vector * vector if longest == len(outer) else length // 2
    for begin, end in ((0, first), (first, length)):
        shape = tuple(end - begin if i == longest else n for i, n in enumerate(axes.shape))
        yield from pieces(Axes(shape, axes.strides, _moved(axes, begin, longest)), vector)


def _moved(axes: Axes, index: int, axis: int = 0) -> tuple[int, int, int]:
    source, target, scale = (s + index * step for s, step in zip(axes.start, axes.strides[axis], strict=True))
    return source, target, scale


def takes_vectors(axes: Axes, vector: int, *arrays: tuple[int, int]) -> bool:
    """Whether every access of `vector` elements is contiguous and aligned, in source and in target.

    Args:
        axes: what is walked.
        vector: elements an access.
        arrays: for source and target, (address, bytes an element).
    """
    *outer, row = axes.strides
    if row[0] != 1 or row[1] != 1 or row[2] != 0:
        return False
    for which, (address, itemsize) in enumerate(arrays):
        access = min(16, vector * itemsize)
        if (address + axes.start[which] * itemsize) % access:
            return False
        if any(steps[which] * itemsize % access for steps in outer):
            return False
    return True


def pack_walk(axes: Axes, vector: int) -> np.ndarray:
    """`axes` as the kernels' `Walk`, in items of `vector` elements."""
    *outer, row = axes.shape
    items_in_row = -(-row // vector)
    unused = MAX_OUTER_AXES - len(outer)
    walk = np.zeros(1, WALK)
    items = items_in_row
    for length in outer:
        items *= length
    walk["items"], walk["items_in_row"], walk["row"] = items, items_in_row, row
    walk["shape"] = (1,) * unused + tuple(outer)
    for which, name in enumerate(("source", "target", "scale")):
        steps = tuple(s[which] for s in axes.strides)
        walk[name] = (0,) * unused + steps
    return walk
