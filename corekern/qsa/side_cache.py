"""The two caches beside K and V: a ring of raw index keys for each request, and the compressed keys.

Both are plain arrays (pages, page_size, head_dim) that the caller allocates, as NumPy or CuPy memory. A ring is
one page of a request; compressed keys lie in pages through a block table, one entry for each group.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from corekern import arrays, routing

INTEGERS = (np.dtype(np.int32), np.dtype(np.int64))
_INT32 = (np.dtype(np.int32),)
_STORED = (*arrays.FLOATS[:2], np.dtype(np.uint8), np.dtype(np.int64))


def ring_size(compress_ratio: int = 4, step_rows: int = 1) -> int:
    """Raw keys that a request's ring must hold: whole groups, for the open group and one step.

    Args:
        compress_ratio: tokens a group.
        step_rows: rows a request may have in a step that is stored before it is accepted: 1 and the
            speculative ones. A rejected row must not have taken the place of a member of the open group.

    >>> ring_size(4), ring_size(4, step_rows=6)
    (4, 12)
    """
    ratio, step = check_ratio(compress_ratio), check_count(step_rows, "step_rows")
    return -(-(ratio - 1 + step) // ratio) * ratio


def row_positions(seq_lens: Any, query_start_loc: Any, rows: int) -> tuple[Any, Any]:
    """Whose each query row is, and at which position, when the rows are a request's last tokens.

    Args:
        seq_lens: (requests,) int32, tokens of each request, this step's included; 0 for a dummy request.
        query_start_loc: (requests + 1,) int32 from 0, non-decreasing.
        rows: how many rows to give; those past query_start_loc[-1], and a dummy's, are padding.

    Returns:
        token_to_request (rows,) int32 and positions (rows,) int64; both -1 for padding.

    Raises:
        TypeError, ValueError: an argument that is not as above.

    >>> request, position = row_positions(np.int32([7, 0, 9]), np.int32([0, 2, 3, 4]), 5)
    >>> request.tolist(), position.tolist()
    ([0, 0, -1, 2, -1], [5, 6, -1, 8, -1])
    """
    lens, starts = arrays.adopt(seq_lens, "seq_lens"), arrays.adopt(query_start_loc, "query_start_loc")
    device = arrays.check_same_device(seq_lens=lens, query_start_loc=starts)
    arrays.check_array(starts, "query_start_loc", shape=("requests + 1",), dtypes=_INT32)
    if len(starts) < 2:
        raise ValueError("query_start_loc: has no requests (an empty batch)")
    arrays.check_array(lens, "seq_lens", shape=(len(starts) - 1,), dtypes=_INT32)
    xp = arrays.namespace(device)
    row = xp.arange(check_count(rows, "rows", least=0))
    request = xp.clip(xp.searchsorted(starts, row, side="right") - 1, 0, len(lens) - 1)
    position = lens[request].astype(np.int64) - starts[request + 1] + row
    live = (row < starts[-1]) & (lens[request] > 0) & (position >= 0)
    request, position = xp.where(live, request, -1).astype(np.int32), xp.where(live, position, -1)
    return arrays.give_back(request, seq_lens), arrays.give_back(position, seq_lens)


def visible_blocks(positions: Any, compress_ratio: int = 4) -> Any:
    """Complete groups that a row at each position may select from, its own token's included when it ends one.

    Args:
        positions: (rows,) int32 or int64; -1 for padding, which sees none.
        compress_ratio: tokens a group.

    Returns:
        (rows,) int32.

    >>> visible_blocks(np.int64([-1, 2, 3, 8])).tolist()
    [0, 0, 1, 2]
    """
    at = arrays.adopt(positions, "positions")
    arrays.check_array(at, "positions", shape=("rows",), dtypes=INTEGERS)
    xp = arrays.namespace(arrays.device_of(at))
    count = xp.maximum(at + 1, 0) // check_ratio(compress_ratio)
    return arrays.give_back(count.astype(np.int32), positions)


def ring_slots(
    positions: Any, token_to_request: Any, query_start_loc: Any, ring_table: Any, ring_size: int
) -> Any:
    """Where `store` puts each row's raw key: circular, and only a request's last `ring_size` rows.

    Args:
        positions: (rows,) int32 or int64.
        token_to_request: (rows,) int32; a request outside [0, requests) makes a row padding.
        query_start_loc: (requests + 1,) int32.
        ring_table: (requests,) int32, each request's ring; negative for none.
        ring_size: keys a ring.

    Returns:
        (rows,) int64: ring * ring_size + position % ring_size, or -1 for a row that is not kept. No two are
        the same as long as no two requests share a ring.

    >>> positions, owner = np.int64([5, 6, 7, 8, 9]), np.zeros(5, np.int32)
    >>> ring_slots(positions, owner, np.int32([0, 5]), np.int32([3]), 4).tolist()
    [-1, 14, 15, 12, 13]
    """
    at, request, starts, table = (
        arrays.adopt(a, name)
        for a, name in (
            (positions, "positions"),
            (token_to_request, "token_to_request"),
            (query_start_loc, "query_start_loc"),
            (ring_table, "ring_table"),
        )
    )
    device = arrays.check_same_device(
        positions=at, token_to_request=request, query_start_loc=starts, ring_table=table
    )
    arrays.check_array(at, "positions", shape=("rows",), dtypes=INTEGERS)
    arrays.check_array(request, "token_to_request", shape=at.shape, dtypes=_INT32)
    arrays.check_array(table, "ring_table", shape=("requests",), dtypes=_INT32)
    check_requests(table, "ring_table")
    arrays.check_array(starts, "query_start_loc", shape=(len(table) + 1,), dtypes=_INT32)
    size = check_count(ring_size, "ring_size")
    xp = arrays.namespace(device)
    safe = xp.clip(request, 0, len(table) - 1)
    row = xp.arange(len(at))
    kept = (request == safe) & (at >= 0) & (table[safe] >= 0)
    kept &= (row >= starts[safe]) & (row < starts[safe + 1]) & (row >= starts[safe + 1] - size)
    slots = xp.where(kept, table[safe].astype(np.int64) * size + at % size, -1)
    return arrays.give_back(slots, positions)


def compressed_slots(
    positions: Any, token_to_request: Any, block_table: Any, page_size: int, compress_ratio: int = 4
) -> Any:
    """Where `store` puts the compressed key of each row that completes a group; -1 for every other row.

    Args:
        positions: (rows,) int32 or int64.
        token_to_request: (rows,) int32; a request outside [0, requests) makes a row padding.
        block_table: (requests, max_pages) int32, pages of the compressed cache in group order.
        page_size: compressed keys a page.
        compress_ratio: tokens a group.

    Returns:
        (rows,) int64: page * page_size + offset.

    >>> compressed_slots(np.int64([6, 7, 8]), np.int32([0, 0, 0]), np.int32([[4]]), 16).tolist()
    [-1, 65, -1]
    """
    at, request, table = (
        arrays.adopt(positions, "positions"),
        arrays.adopt(token_to_request, "token_to_request"),
        arrays.adopt(block_table, "block_table"),
    )
    device = arrays.check_same_device(positions=at, token_to_request=request, block_table=table)
    arrays.check_array(at, "positions", shape=("rows",), dtypes=INTEGERS)
    arrays.check_array(request, "token_to_request", shape=at.shape, dtypes=_INT32)
    arrays.check_array(table, "block_table", shape=("requests", "max_pages"), dtypes=_INT32)
    check_requests(table, "block_table")
    size, ratio = check_count(page_size, "page_size"), check_ratio(compress_ratio)
    xp = arrays.namespace(device)
    block = at.astype(np.int64) // ratio
    column = block // size
    safe, safe_column = xp.clip(request, 0, len(table) - 1), xp.clip(column, 0, table.shape[1] - 1)
    page = table[safe, safe_column]
    live = (request == safe) & (column == safe_column) & (page >= 0) & (at >= 0) & ((at + 1) % ratio == 0)
    slots = xp.where(live, page.astype(np.int64) * size + block % size, -1)
    return arrays.give_back(slots, positions)


def store(cache: Any, rows: Any, slot_mapping: Any) -> None:
    """cache[slot] = row, bit for bit, for raw keys, compressed keys and RoPE positions alike.

    Args:
        cache: (pages, page_size, width) float16, bfloat16, int64, or uint8 for codes; last axis contiguous.
        rows: (rows, width) of cache's dtype, last axis contiguous.
        slot_mapping: (rows,) int32 or int64, no slot twice; a row whose slot is negative or past the cache
            is skipped.

    Raises:
        TypeError, ValueError: an argument that is not as above.

    >>> cache = np.zeros((2, 4, 3), np.int64)
    >>> store(cache, np.int64([[1, 2, 3], [4, 5, 6]]), np.int64([5, -1]))
    >>> cache[1, 1].tolist(), int(cache.sum())
    ([1, 2, 3], 6)
    """
    cache, rows = arrays.adopt(cache, "cache"), arrays.adopt(rows, "rows")
    slots = arrays.adopt(slot_mapping, "slot_mapping")
    device = arrays.check_same_device(cache=cache, rows=rows, slot_mapping=slots)
    shape = ("pages", "page_size", "width")
    arrays.check_array(cache, "cache", shape=shape, dtypes=_STORED, contiguous_last=True, writeable=True)
    if 0 in cache.shape:
        raise ValueError(f"cache: shape {cache.shape} has an empty axis")
    arrays.check_array(
        rows, "rows", shape=("rows", cache.shape[2]), dtypes=(cache.dtype,), contiguous_last=True
    )
    arrays.check_array(slots, "slot_mapping", shape=rows.shape[:1], dtypes=INTEGERS)
    if len(rows):
        routing.qsa_backend(device).store_rows(cache, rows, slots)


def check_count(value: Any, name: str, least: int = 1) -> int:
    if not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name}: {value!r} is not an integer of at least {least}")
    return int(value)


def check_ratio(compress_ratio: Any) -> int:
    return check_count(compress_ratio, "compress_ratio")


def check_requests(table: Any, name: str) -> None:
    if 0 in table.shape:
        raise ValueError(f"{name}: shape {table.shape} has an empty axis")
