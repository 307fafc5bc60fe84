"""Sparse attention on the CPU: a row's selected tokens are gathered, tile by tile, into the dense kernel's scratch.

A task is one row and one KV head, its query heads along the lanes of vectors. It walks the selection in the order
given, in tiles of 32 tokens from fresh accumulators, each folded into the state by one FMA an element, as
`corekern.cpu.attention` does. No row looks at another, so none changes another's bits.
"""

from __future__ import annotations

import functools

import numpy as np

from corekern.cpu.attention import (
    _LOG2_E,
    _MINUS_INFINITY,
    MAX_LANES,
    TILE,
    _accumulate,
    _aligned,
    _flatten,
    _scores,
    _softmax_tile,
    jit,
)
from corekern.cpu.convert import storage, to_float32
from corekern.cpu.qsa_indexer import clipped, compress, expand, index_logits, select, store_rows, topk
from corekern.cpu.threads import for_ranges, num_threads
from corekern.cpu.tile import LANES, ROWS, decode_vectors

__all__ = ["attention", "compress", "expand", "index_logits", "select", "store_rows", "topk"]


@jit
def _gather_tile(flat, layout, page, offset, begin, count, head_dim, out, seen):
    """Decodes `count` selected tokens to out[:count]; one without a page is zero and not seen."""
    origin, page_stride, token_stride = layout
    vectorised = head_dim // LANES * LANES
    address = out.ctypes.data
    for t in range(count):
        seen[t] = page[begin + t] >= 0
        if seen[t]:
            start = origin + page[begin + t] * page_stride + offset[begin + t] * token_stride
            decode_vectors(flat, start, vectorised, address + 4 * t * out.shape[1])
            for d in range(vectorised, head_dim):
                out[t, d] = to_float32(flat[start + d])
        else:
            out[t] = np.float32(0.0)
    out[count:] = np.float32(0.0)
    seen[count:] = False


@jit
def _find_tokens(packed, table, pages, page_size, page, offset):
    """The page (-1 for an unseen token) and the offset in it of each token that counts; returns their number."""
    width = len(packed) - 1
    count = clipped(packed[width], width)
    for i in range(count):
        token = np.int64(packed[i])
        column = token // page_size
        page[i] = -1
        offset[i] = token - column * page_size
        if token >= 0 and column < len(table):
            entry = np.int64(table[column])
            if entry < pages:
                page[i] = max(entry, -1)
    return count


@jit
def _run_rows(
    q, packed, table, token_to_request, k_flat, k_layouts, v_flat, v_layouts, pages, page_size, scale,
    v_scale, out, first, last,
):  # fmt: skip
    """out[row, heads of one KV head] in float32, for tasks row * kv_heads + kv_head in [first, last)."""
    _, q_heads, head_dim = q.shape
    kv_heads = len(k_layouts)
    group = q_heads // kv_heads
    padded_dim = -(-head_dim // ROWS) * ROWS
    page = np.empty(packed.shape[1], np.int64)
    offset = np.empty(packed.shape[1], np.int64)
    keys = _aligned(TILE, padded_dim)
    values = _aligned(TILE, padded_dim)
    seen = np.empty(TILE, np.bool_)
    step = min(MAX_LANES, -(-group // LANES) * LANES)
    lengths = np.full(step, TILE, np.int64)
    queries = _aligned(padded_dim, step)
    scores, lost = _aligned(TILE, step), _aligned(TILE, step)
    numerator = _aligned(padded_dim, step)
    alpha, reference = _aligned(1, step), _aligned(2, step)
    maximum, total = _aligned(1, step), _aligned(1, step)
    for task in range(first, last):
        row, kv_head = task // kv_heads, task % kv_heads
        request = np.int64(token_to_request[row])
        count = np.int64(0)
        if 0 <= request < len(table):
            count = _find_tokens(packed[row], table[request], pages, page_size, page, offset)
        for head in range(0, group, step):
            heads = min(step, group - head)
            base = kv_head * group + head
            queries[:] = np.float32(0.0)
            for lane in range(heads):
                for d in range(head_dim):
                    queries[d, lane] = to_float32(q[row, base + lane, d])
            numerator[:] = np.float32(0.0)
            maximum[:] = _MINUS_INFINITY
            total[:] = np.float32(0.0)
            for begin in range(0, count, TILE):
                n = min(TILE, count - begin)
                _gather_tile(k_flat, k_layouts[kv_head], page, offset, begin, n, head_dim, keys, seen)
                _gather_tile(v_flat, v_layouts[kv_head], page, offset, begin, n, head_dim, values, seen)
                _scores(keys, queries, step // LANES, scores, lost)
                masked = not seen.all()
                _softmax_tile(scores, scale, 0, seen, lengths, masked, maximum, total, alpha, reference)
                _accumulate(values, scores, step // LANES, alpha, numerator)
            for lane in range(heads):
                # Nothing seen: sum 0, and exactly 0. A NaN sum stays NaN.
                empty = total[0, lane] == np.float32(0.0)
                divisor = np.float32(1.0) if empty else total[0, lane]
                for d in range(head_dim):
                    out[row, base + lane, d] = (
                        np.float32(0.0) if empty else numerator[d, lane] * v_scale / divisor
                    )


def attention(call, out: np.ndarray) -> None:
    """out = the attention of a checked call; see `corekern.qsa.attention`."""
    cache = call.cache
    # Copies in one memory order, beside the gathered K and V a trifle, so that one kernel serves every view.
    q, packed, table = (np.array(a, order="C") for a in (call.q, call.packed, call.block_table))
    rows, kv_heads = len(q), cache.kv_heads
    k_flat, k_layouts = _flatten(cache.k, cache.format)
    v_flat, v_layouts = _flatten(cache.v, cache.format)
    scale = np.float32(call.softmax_scale * cache.k_scale * _LOG2_E)
    result = np.empty(q.shape, np.float32)
    run = functools.partial(
        _run_rows, storage(q), packed, table, np.ascontiguousarray(call.token_to_request), k_flat, k_layouts,
        v_flat, v_layouts, cache.num_pages, cache.page_size, scale, np.float32(cache.v_scale), result,
    )  # fmt: skip
    tasks = rows * kv_heads
    for_ranges(run, tasks, max(1, tasks // (8 * num_threads())))
    with np.errstate(over="ignore"):  # float16 has its infinity, and so has exp(-gate)
        if call.gate is not None:
            if call.round_before_gate:
                result = result.astype(out.dtype).astype(np.float32)
            # A row that sees nothing is 0 whatever its gate, which may be NaN in padding.
            gated = result / (np.float32(1.0) + np.exp(-call.gate.astype(np.float32)))
            result = np.where(result == 0, result, gated)
        out[...] = result.astype(out.dtype)
