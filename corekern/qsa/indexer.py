"""The indexer: compressing raw index keys, scoring and selecting blocks, and expanding them to tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from corekern import arrays, routing
from corekern.qsa.calls import CompressCall, ExpandCall, SelectCall, TopkCall
from corekern.qsa.side_cache import INTEGERS, check_count, check_ratio, check_requests

_INT32 = (np.dtype(np.int32),)
_INT64 = (np.dtype(np.int64),)
_HALF = arrays.FLOATS[:2]
_CODES = (np.dtype(np.uint8), arrays.FP8[0])
MAX_LOGITS_BYTES = 256 << 20


def compress(
    keys: Any,
    ring: Any,
    ring_table: Any,
    token_to_request: Any,
    query_start_loc: Any,
    positions: Any,
    compressed_slots: Any,
    *,
    compress_ratio: int = 4,
    rope_positions: Any = None,
    rope_ring: Any = None,
    out: Any = None,
    first_positions: Any = None,
) -> tuple[Any, Any]:
    """The mean of each group of raw index keys that a row completes, from the ring and this step's rows.

    Call it before this step's keys are stored in the ring: `store` may overwrite members of an earlier group.

    Args:
        keys: (rows, head_dim) float16 or bfloat16, this step's raw index keys, before RoPE.
        ring: (rings, ring_size, head_dim) of keys' dtype, ring_size a multiple of compress_ratio.
        ring_table: (requests,) int32, each request's ring; one outside [0, rings) reads as zeros.
        token_to_request: (rows,) int32; a request outside [0, requests) makes a row padding.
        query_start_loc: (requests + 1,) int32; request r owns rows [query_start_loc[r],
            query_start_loc[r + 1]), at consecutive positions.
        positions: (rows,) int32 or int64, each row's position in its request.
        compressed_slots: (rows,) int32 or int64; rows with a negative one complete no group.
        compress_ratio: tokens a group.
        rope_positions: (rows, 3) int64, this step's RoPE positions (time, height, width), with rope_ring.
        rope_ring: (rings, ring_size, 3) int64, the RoPE positions of the ring's keys.
        out, first_positions: where to put the results; made when None.

    Returns:
        out: (rows, head_dim) of keys' dtype: the sum in float32, in order, divided and rounded once.
        first_positions: (rows, 3) int64: the RoPE positions of the group's first token, or its plain position
            three times. Both are exactly 0 for a row that completes no group.

    Raises:
        TypeError, ValueError: an argument that is not as above.

    >>> keys, ring = np.ones((2, 8), np.float16), np.full((1, 4, 8), 3, np.float16)
    >>> pooled, first = compress(keys, ring, np.int32([0]), np.int32([0, 0]), np.int32([0, 2]),
    ...                          np.int64([6, 7]), np.int64([-1, 1]))
    >>> pooled[:, 0].tolist(), first[:, 0].tolist()  # positions 4 and 5 are in the ring
    ([0.0, 2.0], [0, 4])
    """
    given = {
        "keys": keys, "ring": ring, "ring_table": ring_table, "token_to_request": token_to_request,
        "query_start_loc": query_start_loc, "positions": positions, "compressed_slots": compressed_slots,
        "rope_positions": rope_positions, "rope_ring": rope_ring,
    }  # fmt: skip
    a: dict[str, Any] = {n: None if x is None else arrays.adopt(x, n) for n, x in given.items()}
    device = arrays.check_same_device(**a)
    ratio = check_ratio(compress_ratio)
    arrays.check_array(a["keys"], "keys", shape=("rows", "head_dim"), dtypes=_HALF, contiguous_last=True)
    rows, head_dim = a["keys"].shape
    shape = ("rings", "ring_size", head_dim)
    arrays.check_array(a["ring"], "ring", shape=shape, dtypes=(a["keys"].dtype,), contiguous_last=True)
    if 0 in a["ring"].shape or a["ring"].shape[1] % ratio:
        raise ValueError(f"ring: its size {a['ring'].shape[1]} is not a multiple of compress_ratio {ratio}")
    arrays.check_array(a["ring_table"], "ring_table", shape=("requests",), dtypes=_INT32)
    check_requests(a["ring_table"], "ring_table")
    starts = (len(a["ring_table"]) + 1,)
    arrays.check_array(a["query_start_loc"], "query_start_loc", shape=starts, dtypes=_INT32)
    arrays.check_array(a["token_to_request"], "token_to_request", shape=(rows,), dtypes=_INT32)
    arrays.check_array(a["positions"], "positions", shape=(rows,), dtypes=INTEGERS)
    arrays.check_array(a["compressed_slots"], "compressed_slots", shape=(rows,), dtypes=INTEGERS)
    if (rope_positions is None) != (rope_ring is None):
        raise ValueError("rope_ring: rope_positions and rope_ring go together, but one of them is None")
    if rope_positions is not None:
        arrays.check_array(a["rope_positions"], "rope_positions", shape=(rows, 3), dtypes=_INT64)
        arrays.check_array(a["rope_ring"], "rope_ring", shape=(*a["ring"].shape[:2], 3), dtypes=_INT64)
    call = CompressCall(**a, compress_ratio=ratio)
    inputs = {name: x for name, x in a.items() if x is not None}
    pooled = _output(device, out, "out", a["keys"].shape, a["keys"].dtype, inputs)
    first = _output(device, first_positions, "first_positions", (rows, 3), np.dtype(np.int64), inputs)
    if rows:
        routing.qsa_backend(device).compress(call, pooled, first)
    return (
        arrays.give_back(pooled, keys) if out is None else out,
        arrays.give_back(first, keys) if first_positions is None else first_positions,
    )


def index_logits(
    q: Any,
    keys: Any,
    block_table: Any,
    token_to_request: Any,
    visible_blocks: Any,
    *,
    scale: float | None = None,
    out: Any = None,
) -> Any:
    """scale * sum over heads of relu(q . k) for every visible block, in float32: what `select` compares.

    Args: as `select`.

    Returns:
        (rows, max_pages * page_size) float32; -inf for blocks that the row does not see.
    """
    call = _check_select(q, keys, block_table, token_to_request, visible_blocks, 1, scale, MAX_LOGITS_BYTES)
    device = arrays.device_of(call.q)
    shape = (len(call.q), call.columns)
    target = _output(device, out, "out", shape, np.dtype(np.float32), {"q": call.q, "keys": call.keys})
    target.fill(-np.inf)
    if len(call.q):
        routing.qsa_backend(device).index_logits(call, target)
    return arrays.give_back(target, q) if out is None else out


def topk(logits: Any, visible_blocks: Any, block_topk: int, *, out: Any = None) -> Any:
    """The block_topk largest of each row's visible logits, exactly; of equal ones, those of the lowest blocks.

    Args:
        logits: (rows, columns) float32, last axis contiguous. A block of -inf is never selected.
        visible_blocks: (rows,) int32, how many of a row's columns count.
        block_topk: how many to select.
        out: (rows, block_topk) int32, contiguous; made when None.

    Returns:
        (rows, block_topk) int32: block ids in ascending order, then -1. The set is a stable sort's for every
        finite logits.

    Raises:
        TypeError, ValueError: an argument that is not as above.

    >>> topk(np.float32([[1, 3, 3, 0, 3]]), np.int32([4]), 3).tolist()
    [[0, 1, 2]]
    """
    x, visible = arrays.adopt(logits, "logits"), arrays.adopt(visible_blocks, "visible_blocks")
    device = arrays.check_same_device(logits=x, visible_blocks=visible)
    float32 = (np.dtype(np.float32),)
    arrays.check_array(x, "logits", shape=("rows", "columns"), dtypes=float32, contiguous_last=True)
    arrays.check_array(visible, "visible_blocks", shape=x.shape[:1], dtypes=_INT32)
    call = TopkCall(x, visible, check_count(block_topk, "block_topk"))
    target = _blocks_out(device, out, len(x), call.block_topk, {"logits": x, "visible_blocks": visible})
    if len(x):
        routing.qsa_backend(device).topk(call, target)
    return arrays.give_back(target, logits) if out is None else out


def select(
    q: Any,
    keys: Any,
    block_table: Any,
    token_to_request: Any,
    visible_blocks: Any,
    *,
    token_budget: int = 2048,
    compress_ratio: int = 4,
    scale: float | None = None,
    max_logits_bytes: int = MAX_LOGITS_BYTES,
    out: Any = None,
) -> Any:
    """The token_budget / compress_ratio visible blocks of each row with the largest logits.

    Args:
        q: (rows, index_heads, head_dim) float16 or bfloat16, last axis contiguous.
        keys: (pages, page_size, head_dim), the compressed keys: q's dtype, or uint8 codes of E4M3 (value =
            code); last axis contiguous.
        block_table: (requests, max_pages) int32, pages of `keys`. A block on a page outside [0, pages) is
            never selected.
        token_to_request: (rows,) int32; a request outside [0, requests) makes a row padding.
        visible_blocks: (rows,) int32, how many blocks each row may select from.
        token_budget: tokens to select, a multiple of compress_ratio.
        compress_ratio: tokens a block.
        scale: a positive number; head_dim ** -0.5 when None.
        max_logits_bytes: memory that the rows' logits may take at a time; one row's are always held.
        out: (rows, token_budget / compress_ratio) int32, contiguous; made when None.

    Returns:
        (rows, token_budget / compress_ratio) int32: block ids in ascending order, then -1; the same in every
        run. See `topk` for ties and `index_logits` for what is compared.

    Raises:
        TypeError, ValueError: an argument that is not as above.

    >>> q = np.ones((1, 4, 128), np.float16)
    >>> keys = np.arange(16, dtype=np.float16)[None, :, None].repeat(128, axis=2) / 128
    >>> select(q, keys, np.int32([[0]]), np.int32([0]), np.int32([10]), token_budget=12).tolist()
    [[7, 8, 9]]
    """
    ratio = check_ratio(compress_ratio)
    budget = check_count(token_budget, "token_budget")
    if budget % ratio:
        raise ValueError(f"token_budget: {budget} is not a multiple of compress_ratio {ratio}")
    call = _check_select(
        q, keys, block_table, token_to_request, visible_blocks, budget // ratio, scale,
        check_count(max_logits_bytes, "max_logits_bytes"),
    )  # fmt: skip
    device = arrays.device_of(call.q)
    inputs = {"q": call.q, "keys": call.keys, "visible_blocks": call.visible_blocks}
    target = _blocks_out(device, out, len(call.q), call.block_topk, inputs)
    if len(call.q):
        routing.qsa_backend(device).select(call, target)
    return arrays.give_back(target, q) if out is None else out


def expand(
    blocks: Any, positions: Any, visible_blocks: Any, *, compress_ratio: int = 4, out: Any = None
) -> Any:
    """Token indices of the selected blocks and of the open group, packed, with their count behind.

    Args:
        blocks: (rows, block_topk) int32 from `select`: ids, then -1.
        positions: (rows,) int32 or int64; -1 for padding.
        visible_blocks: (rows,) int32, as given to `select`.
        compress_ratio: tokens a block.
        out: (rows, block_topk * ratio + ratio - 1 + 1) int32; made when None.

    Returns:
        (rows, block_topk * ratio + ratio - 1 + 1) int32: the blocks' tokens, then those after the last
        complete group up to the row's own, then -1; the last column is how many there are.

    Raises:
        TypeError, ValueError: an argument that is not as above.

    >>> expand(np.int32([[0, 2]]), np.int64([13]), np.int32([3])).tolist()
    [[0, 1, 2, 3, 8, 9, 10, 11, 12, 13, -1, 10]]
    """
    ids, at = arrays.adopt(blocks, "blocks"), arrays.adopt(positions, "positions")
    visible = arrays.adopt(visible_blocks, "visible_blocks")
    device = arrays.check_same_device(blocks=ids, positions=at, visible_blocks=visible)
    arrays.check_array(ids, "blocks", shape=("rows", "block_topk"), dtypes=_INT32)
    arrays.check_array(at, "positions", shape=ids.shape[:1], dtypes=INTEGERS)
    arrays.check_array(visible, "visible_blocks", shape=ids.shape[:1], dtypes=_INT32)
    ratio = check_ratio(compress_ratio)
    inputs = {"blocks": ids, "positions": at, "visible_blocks": visible}
    shape = (len(ids), ids.shape[1] * ratio + ratio)
    target = _output(device, out, "out", shape, np.dtype(np.int32), inputs)
    if len(ids):
        routing.qsa_backend(device).expand(ExpandCall(ids, at, visible, ratio), target)
    return arrays.give_back(target, blocks) if out is None else out


def _check_select(q, keys, block_table, token_to_request, visible_blocks, topk, scale, limit) -> SelectCall:
    names = ("q", "keys", "block_table", "token_to_request", "visible_blocks")
    given = (q, keys, block_table, token_to_request, visible_blocks)
    a = {name: arrays.adopt(x, name) for name, x in zip(names, given, strict=True)}
    arrays.check_same_device(**a)
    shape = ("rows", "index_heads", "head_dim")
    arrays.check_array(a["q"], "q", shape=shape, dtypes=_HALF, contiguous_last=True)
    rows, heads, head_dim = a["q"].shape
    if not (0 < heads <= 64 and 0 < head_dim <= 256):
        raise ValueError(f"q: {heads} index heads of head_dim {head_dim} are not 1 to 64 of 1 to 256")
    shape = ("pages", "page_size", head_dim)
    dtypes = (a["q"].dtype, *_CODES)
    arrays.check_array(a["keys"], "keys", shape=shape, dtypes=dtypes, contiguous_last=True)
    arrays.check_array(a["block_table"], "block_table", shape=("requests", "max_pages"), dtypes=_INT32)
    for name in ("keys", "block_table"):
        check_requests(a[name], name)
    arrays.check_array(a["token_to_request"], "token_to_request", shape=(rows,), dtypes=_INT32)
    arrays.check_array(a["visible_blocks"], "visible_blocks", shape=(rows,), dtypes=_INT32)
    value = head_dim**-0.5 if scale is None else arrays.check_scale(scale, "scale")
    if a["keys"].dtype in _CODES:
        a["keys"] = a["keys"].view(np.uint8)
    return SelectCall(**a, block_topk=topk, scale=value, max_logits_bytes=limit)


def _blocks_out(device, out, rows: int, topk: int, inputs: dict[str, Any]) -> Any:
    target = _output(device, out, "out", (rows, topk), np.dtype(np.int32), inputs)
    if not target.flags.c_contiguous:
        raise ValueError(f"out: its strides {target.strides} are not contiguous")
    return target


def _output(device: str, out: Any, name: str, shape: tuple, dtype: np.dtype, inputs: dict[str, Any]) -> Any:
    """The array to write: `out`, checked, or a new one."""
    if out is None:
        return arrays.new_output(device, shape, dtype, name)
    target = arrays.adopt(out, name)
    arrays.check_same_device(**inputs, **{name: target})
    arrays.check_output(target, name, shape=shape, dtypes=(dtype,), inputs=inputs)
    if len(shape) and target.size and shape[-1] > 1 and target.strides[-1] != target.itemsize:
        raise ValueError(f"{name}: its last axis must be contiguous")
    return target
