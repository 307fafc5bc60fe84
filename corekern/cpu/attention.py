"""Paged attention with FP32 state on the CPU.

Work is cut into tasks: one request, one KV head, up to 48 of the (row, query head) pairs that share the
head, and one split of 2048 tokens. A task walks its split in tiles of 32 tokens:

    load     K and V of 32 tokens -> float32 scratch (64 KiB at head_dim 256, stays in the L2)
    scores   S^T[token, lane], float32 chains of 64 over head_dim, joined by a compensated sum
    softmax  base 2, lane by lane: max, exp2, sum of the tile
    PV       O^T[dim, lane] of the tile from fresh accumulators, numerator = alpha * numerator + tile

Splits start at multiples of 2048 whatever the request, and each is folded into its rows' state in order,
so a row's bits depend on nothing but its own query, its own tokens and its own length. Scratch is the
only memory taken: a few hundred KiB a thread, plus the partial states of the tasks in flight.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
from numba import njit

from corekern.cpu.convert import storage, to_float32
from corekern.cpu.threads import for_ranges, num_threads
from corekern.cpu.tile import (
    LANES,
    MAX_VECTORS,
    ROWS,
    compensated_product,
    decode_vectors,
    exp2,
    fma,
    probabilities,
    rescaled_product,
    scale_and_maximum,
)
from corekern.state import PartialState

SPLIT = 2048  # tokens a split
TILE = 32  # tokens from one set of fresh accumulators
CHAIN = 64  # head_dim elements in one uncompensated float32 chain
MAX_LANES = LANES * MAX_VECTORS

# Partial states in flight are bounded by this much memory, or by two tasks a thread where that is more.
WORKSPACE_BYTES = 8 << 20

_MINUS_INFINITY = np.float32(-np.inf)
_LOG2_E = 1.4426950408889634

jit = njit(nogil=True, cache=True, error_model="numpy")


@jit
def _aligned(rows, columns):
    """A zeroed float32 matrix on a cache line: a vector that straddles two costs twice."""
    raw = np.zeros(rows * columns + 16, np.float32)
    skip = (-raw.ctypes.data % 64) // 4
    return raw[skip : skip + rows * columns].reshape(rows, columns)


@jit
def _load_tile(flat, layout, pages, page_size, table, begin, count, head_dim, out, seen):
    """Decodes tokens [begin, begin + count) to out[:count]; a token without a page is zero and not seen."""
    origin, page_stride, token_stride = layout
    slot = begin // page_size
    offset = begin - slot * page_size
    vectorised = head_dim // LANES * LANES
    address = out.ctypes.data
    for t in range(count):
        page = np.int64(table[slot])
        seen[t] = 0 <= page < pages
        if seen[t]:
            start = origin + page * page_stride + offset * token_stride
            decode_vectors(flat, start, vectorised, address + 4 * t * out.shape[1])
            for d in range(vectorised, head_dim):
                out[t, d] = to_float32(flat[start + d])
        else:
            out[t] = np.float32(0.0)
        offset += 1
        if offset == page_size:
            offset = 0
            slot += 1
    out[count:] = np.float32(0.0)
    seen[count:] = False


@jit
def _scores(keys, queries, vectors, scores, lost):
    """scores[token, lane] = sum over head_dim: float32 chains of CHAIN, joined by a Kahan sum."""
    head_dim, lanes = queries.shape
    scores[:] = np.float32(0.0)
    lost[:] = np.float32(0.0)
    k, q, total, error = keys.ctypes.data, queries.ctypes.data, scores.ctypes.data, lost.ctypes.data
    for d in range(0, head_dim, CHAIN):
        count = min(CHAIN, head_dim - d)
        for t in range(0, TILE, ROWS):
            compensated_product(
                vectors, k + 4 * (t * head_dim + d), head_dim, 1, q + 4 * d * lanes, lanes, count,
                total + 4 * t * lanes, error + 4 * t * lanes,
            )  # fmt: skip


@jit
def _softmax_tile(scores, scale, begin, seen, lengths, masked, maximum, total, alpha, reference):
    """Scores -> probabilities in place; updates the running maximum and sum; alpha rescales the past."""
    lanes = maximum.shape[1]
    if masked:
        for t in range(TILE):
            for lane in range(lanes):
                visible = seen[t] and begin + t < lengths[lane]
                scores[t, lane] = scores[t, lane] * scale if visible else _MINUS_INFINITY
        scale = np.float32(1.0)
    largest = reference[0]
    largest[:] = maximum[0]
    scale_and_maximum(scores.ctypes.data, TILE, lanes, scale, largest.ctypes.data)
    for lane in range(lanes):
        old = maximum[0, lane]
        maximum[0, lane] = largest[lane]
        # Nothing seen yet: any finite reference makes exp2(-inf - reference) the 0 it should be.
        largest[lane] = largest[lane] if largest[lane] > _MINUS_INFINITY else np.float32(0.0)
        alpha[0, lane] = exp2(old - largest[lane])
    sums = reference[1]
    probabilities(scores.ctypes.data, TILE, lanes, largest.ctypes.data, sums.ctypes.data)
    for lane in range(lanes):
        total[0, lane] = fma(alpha[0, lane], total[0, lane], sums[lane])


@jit
def _accumulate(values, scores, vectors, alpha, numerator):
    """numerator[dim, lane] = alpha * numerator + sum over the tile's tokens, from fresh accumulators."""
    head_dim, lanes = numerator.shape
    v, p, n = values.ctypes.data, scores.ctypes.data, numerator.ctypes.data
    for d in range(0, head_dim, ROWS):
        rescaled_product(
            vectors, v + 4 * d, 1, head_dim, p, lanes, TILE, alpha.ctypes.data, n + 4 * d * lanes
        )  # fmt: skip


@jit
def _zero_non_finite(values, saved):
    """Moves rows that hold NaN or infinity aside, since 0 * NaN is NaN for the lanes that do not see them."""
    found = False
    for t in range(TILE):
        saved[t] = values[t]
        for d in range(values.shape[1]):
            if not np.isfinite(values[t, d]):
                values[t, d] = np.float32(0.0)
                found = True
    return found


@jit
def _add_non_finite(saved, probabilities, begin, seen, lengths, numerator):
    for t in range(TILE):
        for d in range(numerator.shape[0]):
            if not np.isfinite(saved[t, d]):
                for lane in range(numerator.shape[1]):
                    if seen[t] and begin + t < lengths[lane]:
                        numerator[d, lane] += probabilities[t, lane] * saved[t, d]


@jit
def _split_state(
    k_flat, k_layout, v_flat, v_layout, pages, page_size, table, begin, queries, lengths, head_dim, scale,
    numerator, maximum, total,
):  # fmt: skip
    """The state of one split: tokens [begin, begin + SPLIT) for the lanes of `queries` (head_dim, lanes)."""
    padded_dim, lanes = queries.shape
    vectors = lanes // LANES
    keys = _aligned(TILE, padded_dim)
    values = _aligned(TILE, padded_dim)
    set_aside = _aligned(TILE, padded_dim)
    scores = _aligned(TILE, lanes)
    lost = _aligned(TILE, lanes)
    alpha = _aligned(1, lanes)
    reference = _aligned(2, lanes)
    seen = np.empty(TILE, np.bool_)
    numerator[:] = np.float32(0.0)
    maximum[:] = _MINUS_INFINITY
    total[:] = np.float32(0.0)
    shortest = lengths.min()
    end = min(begin + SPLIT, lengths.max())
    for first in range(begin, end, TILE):
        count = min(TILE, end - first)
        _load_tile(k_flat, k_layout, pages, page_size, table, first, count, head_dim, keys, seen)
        _load_tile(v_flat, v_layout, pages, page_size, table, first, count, head_dim, values, seen)
        masked = first + TILE > shortest or not seen.all()
        _scores(keys, queries, vectors, scores, lost)
        _softmax_tile(scores, scale, first, seen, lengths, masked, maximum, total, alpha, reference)
        non_finite = masked and _zero_non_finite(values, set_aside)
        _accumulate(values, scores, vectors, alpha, numerator)
        if non_finite:
            _add_non_finite(set_aside, scores, first, seen, lengths, numerator)


@njit(inline="always")
def _weights(maximum_a, maximum_b):
    """What two states' numbers are multiplied by when they are merged, and the merged maximum."""
    largest = maximum_b if maximum_b > maximum_a else maximum_a
    reference = largest if largest > _MINUS_INFINITY else np.float32(0.0)
    return exp2(maximum_a - reference), exp2(maximum_b - reference), largest


@jit
def _run_tasks(
    tasks, q, row_lengths, tables, k_flat, k_layouts, v_flat, v_layouts, pages, page_size, scale,
    numerators, maxima, sums, first, last,
):  # fmt: skip
    """tasks[i] = (request, kv_head, first pair, past the last pair, first row, split)."""
    head_dim, group = q.shape[2], q.shape[1] // len(k_layouts)
    padded_dim = -(-head_dim // ROWS) * ROWS
    for i in range(first, last):
        request, kv_head, pair, past, row, split = tasks[i]
        lanes = -(-(past - pair) // LANES) * LANES
        queries = _aligned(padded_dim, lanes)
        lengths = np.zeros(lanes, np.int64)
        for p in range(pair, past):
            lengths[p - pair] = row_lengths[row + p // group]
            query = q[row + p // group, kv_head * group + p % group]
            for d in range(head_dim):
                queries[d, p - pair] = to_float32(query[d])
        # Idle lanes see as much as the first so that they mask nothing more.
        lengths[past - pair :] = lengths[0]
        _split_state(
            k_flat, k_layouts[kv_head], v_flat, v_layouts[kv_head], pages, page_size, tables[request],
            split * SPLIT, queries, lengths, head_dim, scale,
            numerators[i].reshape(-1)[: padded_dim * lanes].reshape(padded_dim, lanes),
            maxima[i : i + 1, :lanes], sums[i : i + 1, :lanes],
        )  # fmt: skip


@jit
def _fold_tasks(tasks, blocks, first, last, group, numerators, maxima, sums, numerator, maximum, total):
    """Folds splits, in order, into the state of their rows. blocks[i] = (first task, past the last)."""
    head_dim = numerator.shape[2]
    padded_dim = -(-head_dim // ROWS) * ROWS
    for b in range(first, last):
        for i in range(blocks[b, 0], blocks[b, 1]):
            _request, kv_head, pair, past, row, _split = tasks[i]
            lanes = -(-(past - pair) // LANES) * LANES
            part = numerators[i].reshape(-1)[: padded_dim * lanes].reshape(padded_dim, lanes)
            for p in range(pair, past):
                r, h, lane = row + p // group, kv_head * group + p % group, p - pair
                old, new, largest = _weights(maximum[r, h], maxima[i, lane])
                maximum[r, h] = largest
                total[r, h] = fma(new, sums[i, lane], old * total[r, h])
                n = numerator[r, h]
                for d in range(head_dim):
                    n[d] = fma(new, part[d, lane], old * n[d])


@jit
def _merge_rows(numerator_a, maximum_a, sum_a, numerator_b, maximum_b, sum_b, first, last):
    for i in range(first, last):
        old, new, largest = _weights(maximum_a[i], maximum_b[i])
        maximum_a[i] = largest
        sum_a[i] = fma(new, sum_b[i], old * sum_a[i])
        for d in range(numerator_a.shape[1]):
            numerator_a[i, d] = fma(new, numerator_b[i, d], old * numerator_a[i, d])


@jit
def _divide_rows(numerator, total, out, first, last):
    for i in range(first, last):
        # An empty state has sum 0 and is exactly 0; a NaN sum stays NaN.
        empty = total[i] == np.float32(0.0)
        divisor = np.float32(1.0) if empty else total[i]
        for d in range(numerator.shape[1]):
            out[i, d] = np.float32(0.0) if empty else numerator[i, d] / divisor


def attention(call, out: np.ndarray) -> None:
    """out = the attention of a checked call; see `corekern.paged_attention`."""
    finalize(attention_state(call), out)


def plan_attention(call):
    """A function (q, out) that runs the call with other queries; see `corekern.plan_attention`."""
    return lambda q, out: attention(replace(call, q=q), out)


def attention_state(call) -> PartialState:
    """The FP32 state of every row over its tokens; see `corekern.partial_attention`."""
    cache = call.cache
    # Copies in one memory order, beside K and V a trifle, so that one compiled kernel serves every view.
    q, block_table = np.array(call.q, order="C"), np.array(call.block_table, order="C")
    rows, q_heads, head_dim = q.shape
    kv_heads = cache.kv_heads
    group = q_heads // kv_heads
    capacity = block_table.shape[1] * cache.page_size
    lengths = np.minimum(np.maximum(call.row_lengths, 0), capacity).astype(np.int64)
    state = PartialState(
        numerator=np.zeros((rows, q_heads, head_dim), np.float32),
        maximum=np.full((rows, q_heads), -np.inf, np.float32),
        sum=np.zeros((rows, q_heads), np.float32),
    )
    k_flat, k_layouts = _flatten(cache.k, cache.format)
    v_flat, v_layouts = _flatten(cache.v, cache.format)
    scale = np.float32(call.softmax_scale * cache.k_scale * _LOG2_E)
    padded_dim = -(-head_dim // ROWS) * ROWS
    task_bytes = 4 * MAX_LANES * (padded_dim + 2)
    wave = max(2 * num_threads(), WORKSPACE_BYTES // task_bytes)
    workspace = None
    # A plan's arrays may have changed since they were checked; what they say must not lead outside of q.
    starts = np.clip(call.query_start_loc, 0, rows)
    for tasks, blocks in _waves(starts, lengths, kv_heads, group, wave):
        if workspace is None:
            workspace = (
                np.empty((len(tasks), padded_dim, MAX_LANES), np.float32),
                np.empty((len(tasks), MAX_LANES), np.float32),
                np.empty((len(tasks), MAX_LANES), np.float32),
            )
        arguments = (
            storage(q), lengths, block_table, k_flat, k_layouts, v_flat, v_layouts, cache.num_pages,
            cache.page_size, scale, *workspace,
        )  # fmt: skip
        # Hand-overs between threads must not cost more than the work: one task when splits are long.
        grain = max(1, len(tasks) // (8 * num_threads()))
        for_ranges(functools.partial(_run_tasks, tasks, *arguments), len(tasks), grain)
        _fold_tasks(
            tasks, blocks, 0, len(blocks), group, *workspace, state.numerator, state.maximum, state.sum
        )
    if cache.v_scale != 1.0:
        np.multiply(state.numerator, np.float32(cache.v_scale), out=state.numerator)
    return state


def _waves(query_start_loc, lengths, kv_heads, group, wave):
    """Cuts the problem into tasks, at most `wave` at a time, with the task ranges of each lane block."""
    tasks: list[tuple] = []
    blocks: list[tuple] = []
    for request in range(len(query_start_loc) - 1):
        row, past_row = int(query_start_loc[request]), int(query_start_loc[request + 1])
        pairs = (past_row - row) * group
        if pairs <= 0:
            continue
        # As few blocks as possible, and as even as possible.
        vectors = -(-pairs // LANES)
        step = LANES * -(-vectors // -(-vectors // MAX_VECTORS))
        for pair in range(0, pairs, step):
            past = min(pairs, pair + step)
            longest = lengths[row + pair // group : row + (past - 1) // group + 1].max()
            for kv_head in range(kv_heads):
                begin = len(tasks)
                for split in range(-(-int(longest) // SPLIT)):
                    tasks.append((request, kv_head, pair, past, row, split))
                    if len(tasks) == wave:
                        blocks.append((begin, len(tasks)))
                        yield np.array(tasks, np.int64), np.array(blocks, np.int64)
                        tasks, blocks, begin = [], [], 0
                if len(tasks) > begin:
                    blocks.append((begin, len(tasks)))
    if tasks:
        yield np.array(tasks, np.int64), np.array(blocks, np.int64)


def _flatten(pages: np.ndarray, fmt):
    """A strided (pages, page_size, kv_heads, head_dim) array as one flat span, and how to find a row in it.

    Returns the span and, for each KV head, int64 (origin, page stride, token stride) in elements: 64-bit
    arithmetic, whatever the size of the cache, and a last axis that LLVM knows to be contiguous.
    """
    low = sum(min(0, (n - 1) * s) for n, s in zip(pages.shape, pages.strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(pages.shape, pages.strides, strict=True))
    item = pages.itemsize
    corner = tuple(
        slice(n - 1, n) if s < 0 else slice(0, 1) for n, s in zip(pages.shape, pages.strides, strict=True)
    )
    span = np.lib.stride_tricks.as_strided(
        pages[corner], ((high - low) // item + 1,), (item,), writeable=False
    )
    page, token, head, _ = (s // item for s in pages.strides)
    layouts = [(-low // item + h * head, page, token) for h in range(pages.shape[2])]
    return storage(span, fmt), np.array(layouts, np.int64)


def merge(states) -> PartialState:
    """Folds states in the order given; see `corekern.merge_states`."""
    first, *others = states
    merged = PartialState(first.numerator.copy(), first.maximum.copy(), first.sum.copy())
    head_dim = merged.numerator.shape[-1]
    for other in others:
        arguments = [
            np.ascontiguousarray(a).reshape(-1, *shape)
            for state in (merged, other)
            for a, shape in ((state.numerator, (head_dim,)), (state.maximum, ()), (state.sum, ()))
        ]
        count = len(arguments[1])
        for_ranges(functools.partial(_merge_rows, *arguments), count, max(64, count // 8))
    return merged


def finalize(state: PartialState, out: np.ndarray) -> None:
    """out = numerator / sum in float32, rounded once to out's dtype; an empty state gives 0."""
    head_dim = state.numerator.shape[-1]
    numerator = np.ascontiguousarray(state.numerator).reshape(-1, head_dim)
    total = np.ascontiguousarray(state.sum).reshape(-1)
    result = np.empty(numerator.shape, np.float32)
    for_ranges(
        lambda b, e: _divide_rows(numerator, total, result, b, e), len(total), max(64, len(total) // 8)
    )
    with np.errstate(over="ignore"):  # float16 has its infinity
        out[...] = result.reshape(out.shape).astype(out.dtype)
