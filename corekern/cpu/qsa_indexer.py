"""The indexer on the CPU: side caches, means of groups, logits, exact top k, and packed indices.

Logits use the dense kernel's product with up to 48 (row, index head) pairs of one request along the lanes: a
lane's sum runs over head_dim alone, so a row's logits do not depend on the rows beside it. Top k is a radix select
over the floats' bits, three passes of 11, 11 and 10 bits, then one pass in block order that takes what is above the
threshold and the first of those at it.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np

from corekern.cpu.attention import MAX_LANES, TILE, _aligned, _flatten, _load_tile, _scores, jit
from corekern.cpu.convert import float_bits, storage, to_float32
from corekern.cpu.threads import for_ranges, num_threads
from corekern.cpu.tile import LANES, ROWS
from corekern.formats import get_format

BLOCKS = 2048  # blocks of one task


def store_rows(cache: np.ndarray, rows: np.ndarray, slots: np.ndarray) -> None:
    """cache[slot] = row for slots inside the cache."""
    pages, page_size, _ = cache.shape
    kept = np.flatnonzero((slots >= 0) & (slots < pages * page_size))
    page, offset = np.divmod(slots[kept], page_size)
    cache[page, offset] = rows[kept]


def compress(call, pooled: np.ndarray, first_positions: np.ndarray) -> None:
    """The means of complete groups; see `corekern.qsa.compress`."""
    rings, ring_size, _ = call.ring.shape
    requests, ratio = len(call.ring_table), call.compress_ratio
    row = np.arange(len(call.keys))
    request = call.token_to_request.astype(np.int64)
    safe = np.clip(request, 0, requests - 1)
    begin, end = call.query_start_loc[safe], call.query_start_loc[safe + 1]
    live = (request == safe) & (row >= begin) & (row < end)
    live &= (call.positions >= ratio - 1) & (call.compressed_slots >= 0)
    row, begin, position = row[live], begin[live], call.positions[live].astype(np.int64)
    ring = call.ring_table[safe[live]].astype(np.int64)
    has_ring = (ring >= 0) & (ring < rings)
    ring = np.where(has_ring, ring, 0)

    def member(m, step, kept):
        """Member m of each group: from this step's rows where it is among them, else from the ring."""
        back = ratio - 1 - m
        of_step = row - back >= begin
        found = np.where(has_ring[:, None], kept[ring, (position - back) % ring_size], 0)
        return np.where(of_step[:, None], step[np.maximum(row - back, 0)], found)

    total = member(0, call.keys, call.ring).astype(np.float32)
    for m in range(1, ratio):
        total += member(m, call.keys, call.ring).astype(np.float32)
    pooled[...] = 0
    pooled[live] = (total / np.float32(ratio)).astype(pooled.dtype)
    first_positions[...] = 0
    if call.rope_positions is None:
        first_positions[live] = (position - (ratio - 1))[:, None]
    else:
        first_positions[live] = member(0, call.rope_positions, call.rope_ring)


@jit
def _logits_of_tasks(
    tasks, order, q, tables, visible, flat, layout, pages, page_size, scale, logits, first, last
):
    """tasks[i] = (request, first in order, past the last, first block, past the last): logits of these."""
    _, heads, head_dim = q.shape
    padded_dim = -(-head_dim // ROWS) * ROWS
    step = min(MAX_LANES, -(-heads * (tasks[:, 2] - tasks[:, 1]).max() // LANES) * LANES)
    keys = _aligned(TILE, padded_dim)
    queries = _aligned(padded_dim, step)
    scores, lost = _aligned(TILE, step), _aligned(TILE, step)
    seen = np.empty(TILE, np.bool_)
    for i in range(first, last):
        request, begin_row, past_row, begin, past = tasks[i]
        for head in range(0, heads, step):  # more than one turn only where heads > 48
            count = min(step, heads - head)
            queries[:] = np.float32(0.0)
            for r in range(begin_row, past_row):
                for h in range(count):
                    for d in range(head_dim):
                        queries[d, (r - begin_row) * count + h] = to_float32(q[order[r], head + h, d])
            for block in range(begin, past, TILE):
                n = min(TILE, past - block)
                _load_tile(flat, layout, pages, page_size, tables[request], block, n, head_dim, keys, seen)
                _scores(keys, queries, step // LANES, scores, lost)
                for r in range(begin_row, past_row):
                    row = order[r]
                    for t in range(min(n, visible[row] - block)):
                        total = np.float32(0.0) if head == 0 else logits[row, block + t]
                        for h in range(count):
                            total += max(scores[t, (r - begin_row) * count + h], np.float32(0.0))
                        logits[row, block + t] = total if seen[t] else np.float32(-np.inf)
            if head + count == heads:
                for r in range(begin_row, past_row):
                    row = order[r]
                    for b in range(begin, min(past, visible[row])):
                        logits[row, b] *= scale


def index_logits(call, out: np.ndarray) -> None:
    """The logits of each row's visible blocks; see `corekern.qsa.index_logits`."""
    table = np.array(call.block_table, order="C")
    request = call.token_to_request.astype(np.int64)
    owned = (request >= 0) & (request < len(table))
    visible = np.where(owned, np.clip(call.visible_blocks, 0, out.shape[1]), 0).astype(np.int64)
    order = np.argsort(request, kind="stable")
    order = order[visible[order] > 0]
    step = max(1, MAX_LANES // call.q.shape[1])
    tasks = []
    runs = np.flatnonzero(np.diff(request[order], prepend=-1, append=-1))
    for begin, end in itertools.pairwise(runs):
        for row in range(begin, end, step):
            past = min(row + step, end)
            most = int(visible[order[row:past]].max())
            tasks += [
                (request[order[row]], row, past, b, min(b + BLOCKS, most)) for b in range(0, most, BLOCKS)
            ]
    if not tasks:
        return
    keys = call.keys
    fmt = get_format("fp8_e4m3" if keys.dtype == np.uint8 else keys.dtype)
    flat, layouts = _flatten(keys[:, :, None, :], fmt)
    run = functools.partial(
        _logits_of_tasks, np.array(tasks, np.int64), order, storage(np.array(call.q, order="C")), table,
        visible, flat, layouts[0], len(keys), keys.shape[1], np.float32(call.scale), out,
    )  # fmt: skip
    for_ranges(run, len(tasks), max(1, len(tasks) // (8 * num_threads())))


@jit
def clipped(value, most):
    """`value` as an int64 within [0, most]."""
    value = np.int64(value)
    return np.int64(0) if value < 0 else (np.int64(most) if value > most else value)


@jit
def _ordered(x):
    """A float's bits as an integer in [0, 2^32) that compares as the float does; -0 as 0."""
    bits = np.int64(float_bits(x + np.float32(0.0)))
    return (
        bits + np.int64(1 << 31)
        if bits >= 0
        else np.int64(-1) - (bits & np.int64(0x7FFFFFFF)) + np.int64(1 << 31)
    )


@jit
def _topk_rows(logits, visible, out, first, last):
    histogram = np.empty(1 << 11, np.int64)
    k = out.shape[1]
    for row in range(first, last):
        x = logits[row]
        count = clipped(visible[row], len(x))
        out[row] = -1
        candidates = 0
        for b in range(count):
            candidates += x[b] > -np.inf
        # The largest keys are found digit by digit; `missing` are still to come from those at the threshold.
        missing, threshold, fixed = k, np.int64(0), 32
        if candidates > k:
            for bits in (11, 11, 10):
                shift = fixed - bits
                histogram[:] = 0
                for b in range(count):
                    if x[b] > -np.inf:
                        key = _ordered(x[b])
                        if key >> fixed == threshold >> fixed:
                            histogram[(key >> shift) & ((1 << bits) - 1)] += 1
                digit = (1 << bits) - 1
                while histogram[digit] < missing:
                    missing -= histogram[digit]
                    digit -= 1
                threshold |= np.int64(digit) << shift
                fixed = shift
        taken = 0
        for b in range(count):
            if taken == k:
                break
            if x[b] > -np.inf:
                key = _ordered(x[b])
                at_threshold = key == threshold and missing > 0
                if key > threshold or at_threshold or candidates <= k:
                    missing -= at_threshold
                    out[row, taken] = b
                    taken += 1


def topk(call, out: np.ndarray) -> None:
    """Exact top k of given logits; see `corekern.qsa.topk`."""
    run = functools.partial(_topk_rows, call.logits, np.ascontiguousarray(call.visible_blocks), out)
    for_ranges(run, len(out), max(1, len(out) // (8 * num_threads())))


def select(call, out: np.ndarray) -> None:
    """Logits and their top k, for as many rows at a time as the memory given allows."""
    width = int(np.clip(call.visible_blocks.max(), 1, call.columns))
    step = max(1, min(len(out), call.max_logits_bytes // (4 * width)))
    logits = np.empty((step, width), np.float32)
    requests = len(call.block_table)
    owned = (call.token_to_request >= 0) & (call.token_to_request < requests)
    visible = np.where(owned, call.visible_blocks, 0).astype(np.int32)
    for begin in range(0, len(out), step):
        rows = slice(begin, begin + step)
        part = replace(
            call, q=call.q[rows], token_to_request=call.token_to_request[rows], visible_blocks=visible[rows]
        )
        index_logits(part, logits[: len(part.q)])
        run = functools.partial(_topk_rows, logits[: len(part.q)], visible[rows], out[rows])
        for_ranges(run, len(part.q), max(1, len(part.q) // (8 * num_threads())))


def expand(call, out: np.ndarray) -> None:
    """Packed token indices of blocks and the open group; see `corekern.qsa.expand`."""
    rows, block_topk = call.blocks.shape
    ratio = call.compress_ratio
    rank = np.arange(block_topk)
    live = (rank < call.visible_blocks[:, None]) & (call.blocks >= 0)
    count = live.sum(1) * ratio
    tokens = call.blocks[:, :, None] * ratio + np.arange(ratio, dtype=np.int32)
    out[:, :-1] = -1
    out[:, : block_topk * ratio] = np.where(live[:, :, None], tokens, -1).reshape(rows, -1)
    position = call.positions.astype(np.int64)
    begin = (position + 1) // ratio * ratio
    tail = np.where(position < 0, 0, position + 1 - begin)
    for t in range(ratio - 1):
        row = np.flatnonzero(t < tail)
        out[row, count[row] + t] = begin[row] + t
    out[:, -1] = count + tail
