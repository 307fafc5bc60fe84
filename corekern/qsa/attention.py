"""Sparse attention: softmax over the tokens that a packed selection names, and the output gate."""

from __future__ import annotations

from typing import Any

import numpy as np

from corekern import arrays, routing
from corekern.attention import check_queries, check_softmax_scale, describe
from corekern.cache import PagedKVCache
from corekern.qsa.calls import SparseCall
from corekern.qsa.side_cache import check_requests
from corekern.qsa.tuning import Plan

_INT32 = (np.dtype(np.int32),)


def attention(
    q: Any,
    cache: PagedKVCache,
    packed: Any,
    block_table: Any,
    token_to_request: Any,
    gate: Any = None,
    out: Any = None,
    plan: Plan | None = None,
    *,
    softmax_scale: float | None = None,
    round_before_gate: bool = False,
    route: str | None = None,
    validate: bool | None = None,
) -> Any:
    """softmax(q K^T * softmax_scale) V over each row's selected tokens, times sigmoid(gate), rounded once.

    Args:
        q: (rows, q_heads, head_dim) float16 or bfloat16 (float32 too on the CPU), last axis contiguous.
            q_heads is a multiple of the cache's kv_heads.
        cache: the layer's pages, of any format, this step's tokens already written.
        packed: (rows, width + 1) int32 from `expand`. The last column is how many leading columns count; a
            negative token is unseen, a repeated one counts each time.
        block_table: (requests, max_pages) int32. A token beyond it, or on a page outside [0, num_pages), is
            unseen.
        token_to_request: (rows,) int32; a request outside [0, requests) makes a row padding.
        gate: (rows, q_heads, head_dim) or (rows, q_heads * head_dim) of q's dtype; None for no gate.
        out: (rows, q_heads, head_dim) of q's dtype, last axis contiguous; made when None.
        plan: how a GPU cuts the work; None takes the tuning table's. It changes no bit of the result.
        softmax_scale: a finite number; head_dim ** -0.5 when None.
        round_before_gate: round the attention to q's dtype before the gate, and the product again, as vLLM
            does, instead of rounding once.
        route: the name of a route to take; see `explain_route`.
        validate: raise for counts outside [0, width], tokens beyond the block table and pages outside the
            cache, which are otherwise unseen. None reads COREKERN_VALIDATE.

    Returns:
        `out`; exactly 0 for a row that sees nothing.

    Raises:
        TypeError, ValueError: an argument that is not as above.

    Scores and sums in FP32, one division, one rounding. A row's bits depend on its own query, selection and
    tokens alone.

    >>> cache = PagedKVCache.empty(2, 16, 1, 64)
    >>> ones = np.ones((3, 1, 64), np.float32)
    >>> cache.write(ones, ones, np.int32([0, 1, 16]))
    >>> packed = np.int32([[0, 16, -1, 2]])
    >>> q, gate = np.ones((1, 4, 64), np.float16), np.zeros((1, 256), np.float16)
    >>> float(attention(q, cache, packed, np.int32([[0, 1]]), np.int32([0]), gate).max())
    0.5
    """
    call = _check(q, cache, packed, block_table, token_to_request, gate, plan, softmax_scale,
                  round_before_gate, validate)  # fmt: skip
    if out is None:
        target = arrays.new_output(call.problem.device, call.q.shape, call.q.dtype)
    else:
        target = arrays.adopt(out, "out")
        arrays.check_same_device(cache=call.cache.k, out=target)
        inputs = {"q": call.q, "cache.k": cache.k, "cache.v": cache.v, "packed": call.packed}
        inputs |= {"block_table": call.block_table, "token_to_request": call.token_to_request}
        inputs |= {} if call.gate is None else {"gate": call.gate}
        arrays.check_output(target, "out", shape=call.q.shape, dtypes=(call.q.dtype,), inputs=inputs)
        arrays.check_array(target, "out", contiguous_last=True)
    chosen = routing.select(call.problem, route, routing.QSA_ROUTES)
    routing.record(chosen, call.problem)
    if call.problem.rows:
        routing.backend(chosen.backend).attention(call, target)
    return arrays.give_back(target, q) if out is None else out


def explain_route(
    q: Any, cache: PagedKVCache, packed: Any, block_table: Any, token_to_request: Any, gate: Any = None
) -> dict[str, str]:
    """For each route, "taken" or why it is not, for the `attention` call with these arguments."""
    call = _check(q, cache, packed, block_table, token_to_request, gate, None, None, False, None)
    return routing.explain(call.problem, routes=routing.QSA_ROUTES)


def _check(q, cache, packed, block_table, token_to_request, gate, plan, softmax_scale, round_before_gate,
           validate) -> SparseCall:  # fmt: skip
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"cache: expected a PagedKVCache, got {type(cache).__name__}")
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a qsa.Plan, got {type(plan).__name__}")
    q, packed = arrays.adopt(q, "q"), arrays.adopt(packed, "packed")
    block_table = arrays.adopt(block_table, "block_table")
    token_to_request = arrays.adopt(token_to_request, "token_to_request")
    gate = None if gate is None else arrays.adopt(gate, "gate")
    arrays.check_same_device(
        cache=cache.k, q=q, packed=packed, block_table=block_table, token_to_request=token_to_request,
        gate=gate,
    )  # fmt: skip
    check_queries(q, cache)
    rows, q_heads, head_dim = q.shape
    arrays.check_array(packed, "packed", shape=(rows, "width + 1"), dtypes=_INT32)
    if packed.shape[1] < 2:
        raise ValueError(f"packed: {packed.shape[1]} columns are not at least a token's and the count's")
    arrays.check_array(block_table, "block_table", shape=("requests", "max_pages"), dtypes=_INT32)
    check_requests(block_table, "block_table")
    arrays.check_array(token_to_request, "token_to_request", shape=(rows,), dtypes=_INT32)
    if gate is not None:
        arrays.check_array(gate, "gate", dtypes=(q.dtype,), contiguous_last=True)
        if gate.shape == (rows, q_heads * head_dim):
            gate = gate.reshape(q.shape)
        elif gate.shape != q.shape:
            raise ValueError(
                f"gate: shape {gate.shape} is neither {q.shape} nor ({rows}, {q_heads * head_dim})"
            )
    scale = check_softmax_scale(softmax_scale, cache)
    if arrays.should_validate(validate):
        _check_tokens(cache, *(arrays.to_host(a) for a in (packed, block_table, token_to_request)))
    problem = describe(q, cache, len(block_table), rows)
    return SparseCall(problem, q, cache, packed, block_table, token_to_request, gate, scale,
                      bool(round_before_gate), plan)  # fmt: skip


def _check_tokens(cache, packed, block_table, token_to_request) -> None:
    """The checks that `validate` asks for: every token that counts has a page that exists."""
    width, (requests, max_pages) = packed.shape[1] - 1, block_table.shape
    for row, request in enumerate(token_to_request):
        if not 0 <= request < requests:
            continue
        count = packed[row, width]
        if not 0 <= count <= width:
            raise ValueError(f"packed: row {row} counts {count} tokens, outside [0, {width}]")
        tokens = packed[row, :count]
        column = tokens[tokens >= 0] // cache.page_size
        if (column >= max_pages).any():
            raise ValueError(
                f"packed: row {row} of request {request} has token {tokens.max()}, past the block table's "
                f"{max_pages * cache.page_size}"
            )
        page = block_table[request, column]
        bad = np.flatnonzero((page < 0) | (page >= cache.num_pages))
        if len(bad):
            raise ValueError(
                f"block_table: row {row} of request {request} sees page {page[bad[0]]} "
                f"(entry {column[bad[0]]}), outside [0, {cache.num_pages})"
            )
