"""Finding one token in 125,000 and in 768,938: its block is selected, and attention returns its value."""

import numpy as np
import pytest
from helpers import BFLOAT16, quantize

from corekern import PagedKVCache, qsa

RATIO, PAGE, HEADS, HEAD_DIM = 4, 1600, 6, 256
FILLER_PAGES = 3
# The needle's weight is 1 to float32's precision, so what is left is its value's own rounding: half a unit in the
# last place of the cache's format on each element, and of the output's.
TOLERANCE = {"fp8_e4m3": 2.0**-4 + 2.0**-9, "bfloat16": 2.0**-8}


def haystack(tokens, depths, seed=0):
    """Index queries and keys, queries, and pages: one needle a row, at these depths of `tokens`.

    The index keys are all different. Pages of K and V without a needle share a few physical ones.
    """
    rng = np.random.default_rng(seed)
    rows, groups = len(depths), tokens // RATIO
    needles = [int(depth * (tokens - 3 * PAGE)) for depth in depths]
    index_q = rng.standard_normal((rows, 4, 128), np.float32).astype(BFLOAT16)
    keys = rng.standard_normal((-(-groups // PAGE), PAGE, 128), np.float32)
    keys *= np.float32(0.5)  # the mean of four
    keys = keys.astype(BFLOAT16)
    q = rng.standard_normal((rows, 1, HEAD_DIM), np.float32)
    q = (q + np.float32(0.1) * rng.standard_normal((rows, HEADS, HEAD_DIM), np.float32)).astype(BFLOAT16)
    pages = FILLER_PAGES + rows
    k, v = rng.standard_normal((2, pages, PAGE, 1, HEAD_DIM), np.float32)
    table = rng.integers(0, FILLER_PAGES, -(-tokens // PAGE)).astype(np.int32)
    values = []
    for row, token in enumerate(needles):
        page = FILLER_PAGES + row
        table[token // PAGE] = page
        k[page, token % PAGE, 0] = 1.5 * q[row].astype(np.float32).mean(0)
        values.append(v[page, token % PAGE, 0])
    return index_q, keys, q, k, v, table[None], needles, np.stack(values)


def raw_needle(index_q, rng):
    """Four raw index keys of which one answers all four index heads of a query."""
    raw = rng.standard_normal((RATIO, 128), np.float32)
    raw[rng.integers(RATIO)] += 2 * index_q.astype(np.float32).sum(0)
    return raw.astype(BFLOAT16)


@pytest.mark.parametrize(("tokens", "count"), [(125_000, 5), (768_938, 12)], ids=["125000", "768938"])
def test_a_needle_is_found(backend, tokens, count):
    depths = np.linspace(0.0, 1.0, count)
    index_q, keys, q, k, v, table, needles, values = haystack(tokens, depths)
    rng = np.random.default_rng(1)
    keys, index_q = backend.asarray(keys), backend.asarray(index_q)
    index_table = backend.asarray(np.arange(len(keys), dtype=np.int32)[None])
    one, start = backend.asarray(np.int32([0])), backend.asarray(np.int32([0, RATIO]))
    ring = backend.asarray(np.zeros((1, RATIO, 128), BFLOAT16))
    owner = backend.asarray(np.zeros(RATIO, np.int32))
    for row, token in enumerate(needles):  # the needle's group goes through compression as any other
        group = token // RATIO
        positions = backend.asarray(np.arange(group * RATIO, group * RATIO + RATIO))
        slots = qsa.compressed_slots(positions, owner, index_table, PAGE, RATIO)
        raw = backend.asarray(raw_needle(backend.asnumpy(index_q)[row], rng))
        pooled, _ = qsa.compress(raw, ring, one, owner, start, positions, slots)
        qsa.store(keys, pooled, slots)
    lens, starts = backend.asarray(np.int32([tokens])), backend.asarray(np.int32([0, count]))
    request, positions = qsa.row_positions(lens, starts, count)
    visible = qsa.visible_blocks(positions, RATIO)
    blocks = qsa.select(index_q, keys, index_table, request, visible)
    packed = qsa.expand(blocks, positions, visible)
    selected = backend.asnumpy(packed)
    for row, token in enumerate(needles):
        assert token in selected[row, :-1], f"depth {depths[row]:.2f}"
    assert (selected[:, -1] >= 2048).all()
    for kv_dtype, tolerance in TOLERANCE.items():
        (k_stored, k_scale), (v_stored, v_scale) = quantize(k, kv_dtype), quantize(v, kv_dtype)
        cache = PagedKVCache.from_arrays(
            backend.asarray(k_stored),
            backend.asarray(v_stored),
            dtype=kv_dtype,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        out = qsa.attention(backend.asarray(q), cache, packed, backend.asarray(table), request)
        out = backend.asnumpy(out).astype(np.float32)
        # Below E4M3's normal range its steps no longer shrink with the value.
        floor = v_scale * 2.0**-10 if kv_dtype == "fp8_e4m3" else 1e-3
        wrong = np.abs(out - values[:, None]) > tolerance * np.abs(values[:, None]) + floor
        assert not wrong.any(), f"{kv_dtype}: {wrong.any((1, 2))}"
