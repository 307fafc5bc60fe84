"""The judge of QSA: every step and mode in float64 NumPy, row by row, slow and obvious.

Each function takes what its public counterpart takes.
"""

from __future__ import annotations

import numpy as np

from corekern import reference
from corekern.cache import PagedKVCache


def compress(
    keys, ring, ring_table, token_to_request, query_start_loc, positions, compressed_slots, *,
    compress_ratio=4, rope_positions=None, rope_ring=None,
):  # fmt: skip
    """(means in float64, first positions)."""
    pooled, first = np.zeros(keys.shape), np.zeros((len(keys), 3), np.int64)
    for row, request in enumerate(token_to_request):
        position = int(positions[row])
        if not 0 <= request < len(ring_table) or position < compress_ratio - 1 or compressed_slots[row] < 0:
            continue
        begin, end = query_start_loc[request], query_start_loc[request + 1]
        if not begin <= row < end:
            continue
        page = ring_table[request]

        def member(at, step, kept, row=row, position=position, begin=begin, page=page):
            source = row - (position - at)
            if source >= begin:
                return step[source]
            return kept[page, at % len(kept[page])] if 0 <= page < len(kept) else np.zeros_like(step[0])

        group = range(position - compress_ratio + 1, position + 1)
        pooled[row] = sum(member(at, keys, ring).astype(np.float64) for at in group) / compress_ratio
        first[row] = group[0] if rope_ring is None else member(group[0], rope_positions, rope_ring)
    return pooled, first


def index_logits(q, keys, block_table, token_to_request, visible_blocks, *, scale=None):
    """(rows, columns) float64; -inf for what a row does not see."""
    rows, _, head_dim = q.shape
    pages, page_size, _ = keys.shape
    columns = block_table.shape[1] * page_size
    values = reference.decode(keys, "fp8_e4m3") if keys.dtype == np.uint8 else keys.astype(np.float64)
    logits = np.full((rows, columns), -np.inf)
    for row, request in enumerate(token_to_request):
        if not 0 <= request < len(block_table):
            continue
        block = np.arange(min(max(int(visible_blocks[row]), 0), columns))
        page = block_table[request, block // page_size]
        block, page = block[(page >= 0) & (page < pages)], page[(page >= 0) & (page < pages)]
        products = values[page, block % page_size] @ q[row].astype(np.float64).T
        logits[row, block] = np.maximum(products, 0).sum(1) * (head_dim**-0.5 if scale is None else scale)
    return logits


def topk(logits, visible_blocks, block_topk):
    """The first block_topk of a stable descending sort, in block order, then -1."""
    out = np.full((len(logits), block_topk), -1, np.int32)
    for row, x in enumerate(logits):
        x = x[: max(int(visible_blocks[row]), 0)]
        best = np.argsort(-x, kind="stable")[:block_topk]
        best = np.sort(best[x[best] > -np.inf])
        out[row, : len(best)] = best
    return out


def expand(blocks, positions, visible_blocks, *, compress_ratio=4):
    """Packed token indices and their count."""
    out = np.full((len(blocks), (blocks.shape[1] + 1) * compress_ratio), -1, np.int32)
    for row, ids in enumerate(blocks):
        tokens = [int(b) * compress_ratio + o for b in ids[: max(int(visible_blocks[row]), 0)] if b >= 0
                  for o in range(compress_ratio)]  # fmt: skip
        past = int(positions[row]) + 1
        tokens += range(past // compress_ratio * compress_ratio, past)
        out[row, : len(tokens)] = tokens
        out[row, -1] = len(tokens)
    return out


def attention(
    q, cache: PagedKVCache, packed, block_table, token_to_request, gate=None, *, softmax_scale=None,
    round_before_gate=False,
):  # fmt: skip
    """(rows, q_heads, head_dim) float64; rounded to q's dtype before the gate where that is asked for."""
    rows, q_heads, head_dim = q.shape
    kv_heads, width = cache.kv_heads, packed.shape[1] - 1
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = np.zeros((rows, q_heads, head_dim))
    for row, request in enumerate(token_to_request):
        if not 0 <= request < len(block_table):
            continue
        token = packed[row, : np.clip(packed[row, width], 0, width)].astype(np.int64)
        token = token[(token >= 0) & (token < block_table.shape[1] * cache.page_size)]
        page, offset = block_table[request, token // cache.page_size], token % cache.page_size
        seen = (page >= 0) & (page < cache.num_pages)
        if not seen.any():
            continue
        page, offset = page[seen], offset[seen]
        k, v = (_values(x[page, offset], cache) for x in (cache.k, cache.v))
        query = q[row].astype(np.float64).reshape(kv_heads, -1, head_dim)
        s = np.einsum("hgd,thd->hgt", query, k) * (scale * cache.k_scale)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out[row] = np.einsum("hgt,thd->hgd", p, v).reshape(q_heads, head_dim) * cache.v_scale
    if gate is None:
        return out
    if round_before_gate:
        out = out.astype(q.dtype).astype(np.float64)
    sigmoid = 1 / (1 + np.exp(-gate.reshape(q.shape).astype(np.float64)))
    return np.where(out == 0, 0, out * sigmoid)


def _values(stored, cache: PagedKVCache):
    return reference.decode(stored, cache.format) if cache.format.is_fp8 else stored.astype(np.float64)
