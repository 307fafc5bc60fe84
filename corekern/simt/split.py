"""The kernel that computes the FP32 partial state of one split.

A block of 128 threads owns `lanes` (4, 8 or 16) pairs of one request's (row, query head) that share a KV
head, and one split of 512 tokens, in tiles of 32:

    load     K of 32 tokens x 64 dims -> float32 in shared memory, decoded once for all lanes
    scores   warp w takes dims [16w, 16w + 16) of the 64; a thread has (lanes / 4) tokens x 4 lanes in
             registers: two chains of 8 FMAs, added, then one Kahan step into the running sum
    softmax  the four warps' sums are joined by Kahan steps; base 2; every thread keeps its lane's maximum
    PV       a thread owns dims (tid, tid + 128) of all lanes; V goes straight from memory to registers;
             each tile starts from fresh accumulators, then numerator = alpha * numerator + tile by one FMA

Barriers: one before a tile's addresses (the last tile's probabilities are read till then), one on each side
of a K chunk, one before the warps' sums take the place of K, and one each after the sums, the scores and the
probabilities.

The sum over head_dim is off by at most 6.5 units of 2^-24 of sum |q k|: 4.5 from a chain of 8, 1 from adding
two chains, and 0.5 from each level of Kahan sums.

A pair's bits depend on its own query, tokens and length: every lane does the same arithmetic in the same
order whatever `lanes` is, and what a lane does not see leaves it untouched. Where a product and a sum must
not be fused into one FMA (the maximum's own probability must be exactly 1), the product is an FMA with +0,
which no compiler may simplify.

Expected on an H200 (132 SMs, 4.5 TB/s) for q8/H6/Hkv1/D256 over 131,072 E4M3 tokens: 48 pairs are three blocks
a split, so 12,288 block-tiles or 93 an SM. Each is 8192 warp FMAs, 4700 shared loads and some 3000 other
instructions; at two instructions a clock 8000 clocks, in all 0.42 ms at 1.75 GHz, and 0.4 to 0.8 ms with stalls.
Memory (67 MB, three times through the L2) would allow 0.04 ms: it is bound by FP32 arithmetic.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, int64

from corekern.simt.convert import STORAGE, decoder
from corekern.simt.device import array_type, integers_type

THREADS = 128
SPLIT = 512  # tokens a split
TILE = 32  # tokens from one set of fresh accumulators
CHUNK = 64  # head_dim elements staged at a time: a chain pair for each of the four warps
HALF_CHAIN = 8
RUN = 4  # tokens whose V is in flight at a time

MAX_HEAD_DIM = 256
LANES = (4, 8, 16)

# Array subscripts in inner loops: numba checks signed ones for a wrap-around from the end.
_at = np.uint64

_MINUS_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_UNSEEN = np.float32(-1.0)  # in place of a probability
_SMALLEST_EXPONENT = np.float32(-126.0)
# 2^f on |f| <= 1/2 by the series of exp(f ln 2): ln(2)^k / k! for k = 7 ... 0. The eighth term is below 2^-27.
_C7, _C6, _C5, _C4, _C3, _C2, _C1, _C0 = (
    np.float32(c)
    for c in (
        1.525273380405984e-05, 1.540353039338161e-04, 1.3333558146428441e-03, 9.618129107628477e-03,
        5.5504108664821576e-02, 2.402265069591007e-01, 6.931471805599453e-01, 1.0,
    )
)  # fmt: skip
_TO_INTEGER = np.float32(1.5 * 2.0**23)  # after adding it, the last bits are round(x)


@cuda.jit(device=True)
def exp2(x):
    """2^x for x <= 0: exactly 1 at 0, 0 below -126, NaN for NaN; relative error under 2^-23."""
    if x < _SMALLEST_EXPONENT:
        return _ZERO
    shifted = x + _TO_INTEGER
    f = x - (shifted - _TO_INTEGER)
    p = cuda.fma(_C7, f, _C6)
    p = cuda.fma(p, f, _C5)
    p = cuda.fma(p, f, _C4)
    p = cuda.fma(p, f, _C3)
    p = cuda.fma(p, f, _C2)
    p = cuda.fma(p, f, _C1)
    p = cuda.fma(p, f, _C0)
    if x != x:
        return x
    exponent = np.int64(shifted.view(np.uint32)) << 23  # its upper bits fall off below
    return np.uint32((np.int64(p.view(np.uint32)) + exponent) & 0xFFFFFFFF).view(np.float32)


@cuda.jit(device=True)
def find_pairs(tile, lane_block, starts, starts_layout, shape, tiling):
    """(request, first row, first pair, pairs) of a block; no pairs where there is nothing to do.

    Request r's tiles of `tile_rows` rows begin at tile starts[r] // tile_rows + gap * r: gaps leave room for
    each request's last, partial tile, without reading any length on the host. One more "request" stands for
    the rows past the last, which belong to nobody.
    """
    requests, rows, group, lanes = shape
    tile_rows, gap = tiling
    origin, step = starts_layout
    low, high = 0, requests  # the last request that begins at or before `tile`
    while low < high:
        middle = (low + high + 1) >> 1
        if np.int64(starts[origin + middle * step]) // tile_rows + gap * middle <= tile:
            low = middle
        else:
            high = middle - 1
    begin = min(max(np.int64(starts[origin + low * step]), 0), rows)
    past = rows
    if low < requests:
        past = min(max(np.int64(starts[origin + (low + 1) * step]), 0), rows)
    row = begin + (tile - begin // tile_rows - gap * low) * tile_rows
    first_pair = np.int64(lane_block) * lanes
    count = min(min(tile_rows, past - row) * group - first_pair, np.int64(lanes))
    if row < 0 or count < 0:
        count = np.int64(0)
    return low, np.int64(row), first_pair, np.int64(count)


@cuda.jit(device=True)
def locate(layout, i, j, k):
    """Where element [i, j, k] of a flattened array is: layout is (origin, *strides)."""
    return layout[0] + i * layout[1] + j * layout[2] + k * layout[3]


@cuda.jit(device=True)
def kahan(total, lost, i, value):
    """total[i] += value, with its running error in lost[i]."""
    y = value - lost[i]
    new = total[i] + y
    lost[i] = (new - total[i]) - y
    total[i] = new


def split_types(q_format: str, kv_format: str) -> tuple:
    """The argument types of `split_kernel`."""
    q, pages, ints = array_type(STORAGE[q_format]), array_type(STORAGE[kv_format]), array_type(np.int32)
    floats = array_type(np.float32)
    n = integers_type
    inputs = (q, n(4), pages, n(4), pages, n(4), ints, n(4), ints, n(2), ints, n(2))
    return (*inputs, n(7), n(3), n(2), float32, floats, floats, floats)


def unrolled(step, count, lanes):
    """`step` over `count` (a power of two) dims in a row: written out, since compilers leave the loop a loop."""
    if count == 1:
        return step
    half = unrolled(step, count // 2, lanes)
    key_step, query_step = count // 2, count // 2 * lanes

    @cuda.jit(device=True)
    def twice(keys, key_at, queries, query_at, chain):
        half(keys, key_at, queries, query_at, chain)
        half(keys, key_at + key_step, queries, query_at + query_step, chain)

    return twice


@cache
def split_kernel(q_format: str, kv_format: str, lanes: int, dims: int):
    """The kernel for `lanes` pairs a block and head_dim up to 128 * dims."""
    query_to_float, to_float = decoder(q_format), decoder(kv_format)
    across = lanes // 4  # threads of a warp across the lanes; also the tokens of a thread
    between = TILE // across  # tokens between a thread's own
    tile_size = TILE * lanes
    query_size = THREADS * dims * lanes
    chunk_row = CHUNK + 1  # an odd stride keeps a column of K off one bank
    keys_size = max(TILE * chunk_row, 4 * tile_size)
    key_step = between * chunk_row
    score_count = 4 * across
    element_count = lanes * dims
    raw_count = RUN * dims
    load_count = TILE * CHUNK // THREADS
    stored = STORAGE[kv_format]

    @cuda.jit(device=True)
    def multiply_one(keys, key_at, queries, query_at, chain):
        for t in range(across):
            key = keys[_at(key_at + t * key_step)]
            for i in range(4):
                chain[4 * t + i] = cuda.fma(key, queries[_at(query_at + i)], chain[4 * t + i])

    # chain += the products over HALF_CHAIN dims, in order.
    multiply = unrolled(multiply_one, HALF_CHAIN, lanes)

    @cuda.jit
    def split_state(
        q, q_layout, k, k_layout, v, v_layout, table, table_layout, row_lengths, lengths_layout, starts, starts_layout,
        extents, tiling, wave, scale, numerators, maxima, sums,
    ):  # fmt: skip
        requests, rows, group, head_dim, page_size, pages, table_width = extents
        tile_rows, gap, lane_blocks = tiling
        first_tile, tiles = wave
        thread = cuda.threadIdx.x & (THREADS - 1)
        kv_head = np.int64(cuda.blockIdx.y)
        lane_blocks_in_wave = tiles * lane_blocks
        split = np.int64(cuda.blockIdx.x) // lane_blocks_in_wave
        block = np.int64(cuda.blockIdx.x) - split * lane_blocks_in_wave
        request, row, first_pair, count = find_pairs(
            first_tile + block // lane_blocks, block % lane_blocks, starts, starts_layout,
            (requests, rows, group, lanes), (tile_rows, gap),
        )  # fmt: skip
        if count == 0 or request == requests:
            return

        lengths = cuda.shared.array(lanes, int32)
        queries = cuda.shared.array(query_size, float32)
        keys = cuda.shared.array(keys_size, float32)
        scores = cuda.shared.array(tile_size, float32)
        alphas = cuda.shared.array(lanes, float32)
        key_at = cuda.shared.array(TILE, int64)
        value_at = cuda.shared.array(TILE, int64)

        if thread < lanes:
            length = np.int64(0)
            if thread < count:
                at = lengths_layout[0] + (row + (first_pair + thread) // group) * lengths_layout[1]
                length = min(max(np.int64(row_lengths[at]), 0), table_width * page_size)
            lengths[thread] = length
        cuda.syncthreads()
        longest = np.int64(0)
        shortest = np.int64(0x7FFFFFFF)  # of those that see anything
        for i in range(lanes):
            length = np.int64(lengths[i])
            longest = max(longest, length)
            if length > 0:
                shortest = min(shortest, length)
        begin = split * SPLIT
        end = min(begin + SPLIT, longest)
        if begin >= end:
            return
        cuda.syncthreads()
        # Idle lanes, whose state nobody reads, see as much as the longest so that they mask nothing more.
        if thread < lanes and lengths[thread] == 0:
            lengths[thread] = longest

        padded = (head_dim + CHUNK - 1) // CHUNK * CHUNK
        for i in range(thread, lanes * padded, THREADS):
            lane = i // padded
            d = i - lane * padded
            query = _ZERO
            if lane < count and d < head_dim:
                pair = first_pair + lane
                own_row = row + pair // group
                head = kv_head * group + pair % group
                query = query_to_float(q[locate(q_layout, own_row, head, d)])
            queries[d * lanes + lane] = query
        cuda.syncthreads()

        warp = (thread >> 5) & 3
        micro_lane = 4 * (thread & (across - 1))
        micro_token = (thread & 31) // across
        own_lane = thread & (lanes - 1)
        own_token = thread // lanes * across
        own_length = np.int64(lengths[own_lane])

        numerator = cuda.local.array(element_count, float32)
        tile_numerator = cuda.local.array(element_count, float32)
        staged = cuda.local.array(load_count, stored)
        raw = cuda.local.array(raw_count, stored)
        value = cuda.local.array(dims, float32)
        total = cuda.local.array(score_count, float32)
        lost = cuda.local.array(score_count, float32)
        chain = cuda.local.array(score_count, float32)
        held = cuda.local.array(score_count, float32)
        joined = cuda.local.array(1, float32)
        joined_lost = cuda.local.array(1, float32)
        for i in range(element_count):
            numerator[i] = _ZERO
        maximum = _MINUS_INFINITY
        probability_sum = _ZERO

        for first in range(begin, end, TILE):
            cuda.syncthreads()
            found = 1
            if thread < TILE:
                key, value_address = np.int64(-1), np.int64(-1)
                position = first + thread
                if position < end:
                    slot = position // page_size
                    offset = position - slot * page_size
                    page = np.int64(table[locate(table_layout, request, slot, 0)])
                    if page >= 0 and page < pages:
                        key = locate(k_layout, page, offset, kv_head)
                        value_address = locate(v_layout, page, offset, kv_head)
                if key < 0:
                    found = 0
                key_at[thread] = key
                value_at[thread] = value_address
            every_token = cuda.syncthreads_and(found)

            for i in range(score_count):
                total[i] = _ZERO
                lost[i] = _ZERO
            for chunk in range(0, head_dim, CHUNK):
                if chunk > 0:
                    cuda.syncthreads()
                column, row_parity = thread & (CHUNK - 1), (thread >> 6) & 1
                # All loads are issued before the first is used, and without a branch: what is not there
                # is read from where something is, and dropped.
                d = min(chunk + column, head_dim - 1)
                for i in range(load_count):
                    staged[i] = k[_at(max(key_at[_at(2 * i + row_parity)], 0) + d)]
                for i in range(load_count):
                    token = 2 * i + row_parity
                    key_value = to_float(staged[i])
                    if key_at[_at(token)] < 0 or chunk + column >= head_dim:
                        key_value = _ZERO
                    keys[_at(token * chunk_row + column)] = key_value
                cuda.syncthreads()
                depth = warp * (2 * HALF_CHAIN)
                if chunk + depth < head_dim:
                    at = micro_token * chunk_row + depth
                    query_at = (chunk + depth) * lanes + micro_lane
                    for i in range(score_count):
                        held[i] = _ZERO
                        chain[i] = _ZERO
                    multiply(keys, at, queries, query_at, held)
                    multiply(keys, at + HALF_CHAIN, queries, query_at + HALF_CHAIN * lanes, chain)
                    for i in range(score_count):
                        kahan(total, lost, i, held[i] + chain[i])
            parts = keys  # the warps' sums, then the probabilities, once nobody needs the keys
            cuda.syncthreads()
            for t in range(across):
                for lane in range(4):
                    at = (micro_token + t * between) * lanes + micro_lane + lane
                    parts[_at(warp * tile_size + at)] = total[4 * t + lane]
            cuda.syncthreads()

            for t in range(across):
                token = own_token + t
                at = token * lanes + own_lane
                joined[0] = parts[_at(at)]
                joined_lost[0] = _ZERO
                for other in range(1, 4):
                    kahan(joined, joined_lost, 0, parts[_at(other * tile_size + at)])
                seen = key_at[_at(token)] >= 0 and first + token < own_length
                scores[_at(at)] = cuda.fma(joined[0], scale, _ZERO) if seen else _MINUS_INFINITY
            cuda.syncthreads()

            largest = maximum
            for token in range(TILE):
                score = scores[_at(token * lanes + own_lane)]
                if score > largest:  # never a NaN, which then reaches every probability
                    largest = score
            # Nothing seen yet: any finite reference makes exp2(-inf - reference) the 0 it should be.
            reference = largest if largest > _MINUS_INFINITY else _ZERO
            alpha = exp2(maximum - reference)
            maximum = largest
            if thread < lanes:
                alphas[thread] = alpha
            for t in range(across):
                token = own_token + t
                at = token * lanes + own_lane
                seen = key_at[_at(token)] >= 0 and first + token < own_length
                parts[_at(at)] = exp2(scores[_at(at)] - reference) if seen else _UNSEEN
            cuda.syncthreads()

            if thread < lanes:
                tile_sum = _ZERO
                for token in range(TILE):
                    p = parts[_at(token * lanes + thread)]
                    if p != _UNSEEN:
                        tile_sum += p
                probability_sum = cuda.fma(alpha, probability_sum, tile_sum)
            whole = every_token != 0 and first + TILE <= shortest
            for i in range(element_count):
                tile_numerator[i] = _ZERO
            for run in range(0, TILE if thread < head_dim else 0, RUN):
                for t in range(RUN):
                    address = max(value_at[_at(run + t)], 0)
                    for i in range(dims):
                        raw[t * dims + i] = v[_at(address + min(thread + i * THREADS, head_dim - 1))]
                if whole:
                    for t in range(RUN):
                        for i in range(dims):
                            value[i] = to_float(raw[t * dims + i])
                        for lane in range(lanes):
                            p = parts[_at((run + t) * lanes + lane)]
                            for i in range(dims):
                                e = lane * dims + i
                                tile_numerator[e] = cuda.fma(p, value[i], tile_numerator[e])
                else:
                    # A lane must not even multiply by what it does not see: 0 * NaN is NaN.
                    for t in range(RUN):
                        for i in range(dims):
                            value[i] = to_float(raw[t * dims + i])
                        for lane in range(lanes):
                            p = parts[_at((run + t) * lanes + lane)]
                            if p != _UNSEEN:
                                for i in range(dims):
                                    e = lane * dims + i
                                    tile_numerator[e] = cuda.fma(p, value[i], tile_numerator[e])
            for lane in range(lanes):
                # A tile past the lane's end must leave even the sign of a zero.
                if whole or first < lengths[lane]:
                    factor = alphas[lane]
                    for i in range(dims):
                        e = lane * dims + i
                        numerator[e] = cuda.fma(factor, numerator[e], tile_numerator[e])

        place = ((split * lane_blocks_in_wave + block) * cuda.gridDim.y + kv_head) * lanes
        for lane in range(lanes):
            for i in range(dims):
                d = thread + i * THREADS
                if lane < count and d < head_dim:
                    numerators[_at((place + lane) * head_dim + d)] = numerator[lane * dims + i]
        if thread < count:
            maxima[place + thread] = maximum
            sums[place + thread] = probability_sum

    return split_state
