"""The kernels after the splits: combine, merge, finalize.

combine   one block of 128 threads a (row, query head); weights of 128 splits at a time in shared memory, then
          each thread sums its dims over the splits in index order
merge     one element a thread
finalize  one element a thread: one division, one rounding

Sums run in one order, whatever the launch, so two runs give the same bits.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int64

from corekern.simt.convert import STORAGE, rounder
from corekern.simt.device import array_type, integers_type
from corekern.simt.split import SPLIT, exp2, find_pairs, locate

THREADS = 128
ELEMENT_THREADS = 256

_MINUS_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)


@cuda.jit(device=True)
def reference_of(maximum):
    """What exponents are taken against: any finite number does where nothing was seen."""
    return maximum if maximum > _MINUS_INFINITY else _ZERO


@cuda.jit(device=True)
def divide(numerator, total):
    """An empty state has sum 0 and is exactly 0; a NaN sum stays NaN."""
    return _ZERO if total == _ZERO else numerator / total


@cache
def combine_kernel(lanes: int, dims: int, out_format: str | None):
    """Workspace -> `out` in a format, or the arrays of a PartialState when it is None.

    Rows of nobody and rows that see nothing have no splits, and come out as zeros with maximum -inf.
    """
    state = out_format is None
    round_out = rounder(out_format or "float32")

    @cuda.jit
    def combine(
        numerators, maxima, sums, row_lengths, lengths_layout, starts, starts_layout, extents, tiling, wave, v_scale,
        out, out_layout, out_maximum, out_sum,
    ):  # fmt: skip
        requests, rows, group, head_dim, capacity = extents
        tile_rows, gap, lane_blocks = tiling
        first_tile, tiles = wave
        thread = cuda.threadIdx.x & (THREADS - 1)
        kv_head, kv_heads = np.int64(cuda.blockIdx.y), np.int64(cuda.gridDim.y)
        block = np.int64(cuda.blockIdx.x) // lanes
        lane = np.int64(cuda.blockIdx.x) - block * lanes
        request, row, first_pair, count = find_pairs(
            first_tile + block // lane_blocks, block % lane_blocks, starts, starts_layout,
            (requests, rows, group, lanes), (tile_rows, gap),
        )  # fmt: skip
        if lane >= count:
            return
        pair = first_pair + lane
        row = row + pair // group
        head = kv_head * group + pair % group
        length = np.int64(0)
        if request < requests:
            at = lengths_layout[0] + row * lengths_layout[1]
            length = min(max(np.int64(row_lengths[at]), 0), capacity)
        splits = (length + SPLIT - 1) // SPLIT
        place = (block * kv_heads + kv_head) * lanes + lane
        step = tiles * lane_blocks * kv_heads * lanes

        maxima_seen = cuda.shared.array(THREADS, float32)
        weights = cuda.shared.array(THREADS, float32)
        split_sums = cuda.shared.array(THREADS, float32)
        numerator = cuda.local.array(dims, float32)

        largest = _MINUS_INFINITY
        for split in range(thread, splits, THREADS):
            largest = max(largest, maxima[place + split * step])
        maxima_seen[thread] = largest
        cuda.syncthreads()
        for i in range(min(THREADS, splits)):
            largest = max(largest, maxima_seen[i])
        reference = reference_of(largest)

        total = _ZERO
        for i in range(dims):
            numerator[i] = _ZERO
        for first in range(0, splits, THREADS):
            cuda.syncthreads()
            if first + thread < splits:
                at = place + (first + thread) * step
                weights[thread] = exp2(maxima[at] - reference)
                split_sums[thread] = sums[at]
            cuda.syncthreads()
            for i in range(min(THREADS, splits - first)):
                weight = weights[i]
                total = cuda.fma(weight, split_sums[i], total)
                at = (place + (first + i) * step) * head_dim
                for j in range(dims):
                    element = numerators[at + min(thread + j * THREADS, head_dim - 1)]
                    numerator[j] = cuda.fma(weight, element, numerator[j])

        for j in range(dims):
            d = thread + j * THREADS
            if d < head_dim:
                value = numerator[j] * v_scale
                if not state:
                    value = divide(value, total)
                out[locate(out_layout, row, head, d)] = round_out(value)
        if state and thread == 0:
            out_maximum[row * kv_heads * group + head] = largest
            out_sum[row * kv_heads * group + head] = total

    return combine


def combine_types(out_format: str | None) -> tuple:
    """The argument types of `combine_kernel`."""
    ints, floats, n = array_type(np.int32), array_type(np.float32), integers_type
    inputs = (floats, floats, floats, ints, n(2), ints, n(2), n(5), n(3), n(2), float32)
    return (*inputs, array_type(STORAGE[out_format or "float32"]), n(4), floats, floats)


@cuda.jit
def merge_kernel(
    numerator_a, maximum_a, sum_a, numerator_b, maximum_b, sum_b, head_dim, numerator, maximum, total
):  # fmt: skip
    """The state of a, then b. Not in place: every thread of a row reads its maxima."""
    i = np.int64(cuda.blockIdx.x) * ELEMENT_THREADS + cuda.threadIdx.x
    if i < numerator.shape[0]:
        row = i // head_dim
        largest = max(maximum_a[row], maximum_b[row])
        reference = reference_of(largest)
        old, new = exp2(maximum_a[row] - reference), exp2(maximum_b[row] - reference)
        numerator[i] = cuda.fma(new, numerator_b[i], old * numerator_a[i])
        if i == row * head_dim:
            maximum[row] = largest
            total[row] = cuda.fma(new, sum_b[row], old * sum_a[row])


def merge_types() -> tuple:
    """The argument types of `merge_kernel`."""
    floats = array_type(np.float32)
    return (*[floats] * 6, int64, *[floats] * 3)


@cache
def finalize_kernel(out_format: str):
    """numerator / sum -> `out`."""
    round_out = rounder(out_format)

    @cuda.jit
    def finalize(numerator, total, extents, out, out_layout):
        heads, head_dim = extents
        i = np.int64(cuda.blockIdx.x) * ELEMENT_THREADS + cuda.threadIdx.x
        if i < numerator.shape[0]:
            pair = i // head_dim
            row = pair // heads
            at = locate(out_layout, row, pair - row * heads, i - pair * head_dim)
            out[at] = round_out(divide(numerator[i], total[pair]))

    return finalize


def finalize_types(out_format: str) -> tuple:
    """The argument types of `finalize_kernel`."""
    floats, n = array_type(np.float32), integers_type
    return (floats, floats, n(2), array_type(STORAGE[out_format]), n(4))
