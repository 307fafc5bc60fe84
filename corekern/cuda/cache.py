"""Launching paged-cache writes and gathers: `cache_write.cu` and `cache_gather.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from corekern.cuda import loader
from corekern.cuda.codec import DIVISOR, pack_divisor, vector_of
from corekern.cuda.kernels import THREADS

# The same structs as in cache_write.cu and cache_gather.cu; strides in elements.
_WRITE_SIDE = [
    ("source", np.uint64),
    ("cache", np.uint64),
    ("token_stride", np.int64),
    ("head_stride", np.int64),
    ("page_stride", np.int64),
    ("slot_stride", np.int64),
    ("cache_head_stride", np.int64),
    ("divisor", DIVISOR),
]
WRITE = np.dtype(
    [
        ("sides", _WRITE_SIDE, 2),
        ("slot_mapping", np.uint64),
        ("slot_mapping_stride", np.int64),
        ("slots", np.int64),
        ("page_size", np.int64),
        ("tokens", np.int64),
        ("slots_are_int64", np.int32),
        ("used_sides", np.int32),
        ("heads", np.int32),
        ("head_dim", np.int32),
        ("tokens_per_block", np.int32),
        ("unused", np.int32),
    ]
)
_GATHER_SIDE = [
    ("cache", np.uint64),
    ("out", np.uint64),
    ("page_stride", np.int64),
    ("slot_stride", np.int64),
    ("head_stride", np.int64),
    ("token_stride", np.int64),
    ("out_head_stride", np.int64),
    ("scale", np.float32),
    ("unused", np.int32),
]
GATHER = np.dtype(
    [
        ("sides", _GATHER_SIDE, 2),
        ("block_table", np.uint64),
        ("table_stride", np.int64),
        ("table_width", np.int64),
        ("pages", np.int64),
        ("page_size", np.int32),
        ("length", np.int32),
        ("rows", np.int32),
        ("heads", np.int32),
        ("head_dim", np.int32),
        ("tokens_per_block", np.int32),
    ]
)

# Blocks that a long write is cut into, about: eight of 256 threads fill an SM, and the largest cards have
# up to 150 SMs. Each block reads the slot mapping once, so more blocks would only read it more often.
WRITE_BLOCKS = 1024


def write_cache(cache: Any, k: Any, v: Any, slot_mapping: Any) -> None:
    """cache[slot] = round(x / scale) for each token, K and V; FP8 saturates.

    Negative slots and slots beyond the cache are skipped, without an access. Of several tokens with one
    slot the last is kept, in every run. Launches on the current stream, allocates nothing, and can be
    captured in a graph once it has run with the same dtypes.

    Args:
        cache: a PagedKVCache of CuPy arrays.
        k, v: (tokens, kv_heads, head_dim) float16, bfloat16 or float32, last axis contiguous.
        slot_mapping: (tokens,) int32 or int64, any stride.
    """
    sides = [(k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)]
    for part in [sides] if k.dtype == v.dtype else [sides[:1], sides[1:]]:
        _launch_write(cache, part, slot_mapping)


def _launch_write(cache: Any, sides: list[tuple[Any, Any, float]], slot_mapping: Any) -> None:
    """Write K, V or both: (tokens, their cache, its scale) each, of one dtype."""
    source = sides[0][0]
    tokens, heads, head_dim = source.shape
    if source.size == 0:
        return
    pages, page_size = cache.k.shape[:2]
    vector = vector_of(source.itemsize)
    vectors = head_dim % vector == 0 and all(_aligned(a, vector) for x, to, _ in sides for a in (x, to))
    items_in_token = len(sides) * heads * head_dim // (vector if vectors else 1)
    tokens_per_block = min(THREADS, max(-(-THREADS // items_in_token), -(-tokens // WRITE_BLOCKS)))

    packed = [
        (
            loader.address(x),
            loader.address(to),
            *_strides(x)[:2],
            *_strides(to)[:3],
            pack_divisor(scale).item(),
        )
        for x, to, scale in sides
    ]
    arguments = (
        [packed[0], packed[-1]],
        loader.address(slot_mapping),
        *_strides(slot_mapping),
        pages * page_size,
        page_size,
        tokens,
        slot_mapping.itemsize == 8,
        len(sides),
        heads,
        head_dim,
        tokens_per_block,
        0,
    )
    entry = "cache_write_vector" if vectors else "cache_write_any"
    function = loader.kernel("cache_write.cu", entry, VALUE=source.dtype.name, FORMAT=cache.format.name)
    function((-(-tokens // tokens_per_block),), (THREADS,), (np.array([arguments], WRITE),))


def gather_cache(cache: Any, block_table_row: Any, length: int, k_out: Any, v_out: Any) -> None:
    """out[token] = round(code * scale), K and V, for the first `length` tokens of one request; zero after.

    Rows whose page id is outside [0, pages), or beyond the block table, are zero too. Launches on the
    current stream, allocates nothing, and can be captured in a graph once it has run with the same dtypes.

    Args:
        cache: a PagedKVCache of CuPy arrays.
        block_table_row: (max_pages,) int32, any stride.
        length: tokens to gather.
        k_out, v_out: (padded length, kv_heads, head_dim) float16, bfloat16 or float32, last axis contiguous.
    """
    rows, heads, head_dim = k_out.shape
    if k_out.size == 0:
        return
    pages, page_size = cache.k.shape[:2]
    vector = vector_of(k_out.itemsize)
    vectors = head_dim % vector == 0 and all(_aligned(a, vector) for a in (k_out, v_out, cache.k, cache.v))
    items_in_row = 2 * heads * head_dim // (vector if vectors else 1)
    tokens_per_block = max(1, THREADS // items_in_row)

    def side(source, out, scale):
        strides = (*_strides(source)[:3], *_strides(out)[:2])
        return (loader.address(source), loader.address(out), *strides, scale, 0)

    arguments = (
        [side(cache.k, k_out, cache.k_scale), side(cache.v, v_out, cache.v_scale)],
        loader.address(block_table_row),
        *_strides(block_table_row),
        block_table_row.shape[0],
        pages,
        page_size,
        length,
        rows,
        heads,
        head_dim,
        tokens_per_block,
    )
    entry = "cache_gather_vector" if vectors else "cache_gather_any"
    function = loader.kernel("cache_gather.cu", entry, VALUE=k_out.dtype.name, FORMAT=cache.format.name)
    function((-(-rows // tokens_per_block),), (THREADS,), (np.array([arguments], GATHER),))


def _strides(array: Any) -> tuple[int, ...]:
    return tuple(stride // array.itemsize for stride in array.strides)


def _aligned(array: Any, vector: int) -> bool:
    """Whether every run of `vector` elements along the last axis, from its start, is aligned for one access."""
    access = min(16, vector * array.itemsize)
    outer = zip(array.shape[:-1], array.strides[:-1], strict=True)
    return loader.address(array) % access == 0 and all(stride % access == 0 for n, stride in outer if n > 1)
