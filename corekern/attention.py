"""Dense attention over a paged KV cache."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from corekern import arrays, routing
from corekern.cache import PagedKVCache
from corekern.formats import FORMATS
from corekern.routing import AttentionProblem
from corekern.state import PartialState

_INT32 = (np.dtype(np.int32),)


def paged_attention(
    q: Any,
    cache: PagedKVCache,
    block_table: Any,
    row_lengths: Any,
    query_start_loc: Any,
    *,
    softmax_scale: float | None = None,
    out: Any = None,
    return_state: bool = False,
    route: str | None = None,
    validate: bool | None = None,
) -> Any:
    """softmax(q K^T * softmax_scale) V over each row's first tokens, with FP32 state, rounded once.

    Args:
        q: (rows, q_heads, head_dim) float16, bfloat16 or float32, last axis contiguous. q_heads is a
            multiple of the cache's kv_heads; query head h reads KV head h // (q_heads / kv_heads).
        cache: the layer's pages, this step's tokens already written.
        block_table: (requests, max_pages) int32, each request's pages in token order.
        row_lengths: (rows,) int32, how many tokens row i sees; 0 for an inactive row. See
            `causal_row_lengths`.
        query_start_loc: (requests + 1,) int32 from 0, non-decreasing; request r owns rows
            [query_start_loc[r], query_start_loc[r + 1]). Rows past the last belong to nobody.
        softmax_scale: a finite number; head_dim ** -0.5 when None.
        out: (rows, q_heads, head_dim) of any of q's dtypes; made in q's dtype when None.
        return_state: also return the `PartialState` from which the result was rounded.
        route: the name of a route to take; see `explain_route`.
        validate: raise for page ids outside [0, num_pages) and for lengths past the block table. Such
            tokens are otherwise unseen. None reads COREKERN_VALIDATE.

    Returns:
        `out`, or (out, state). An inactive row, or one of nobody, is exactly 0.

    Raises:
        TypeError: an argument of another type or dtype.
        ValueError: a shape, layout or value that is not as above; one line that names the argument.

    The arithmetic: scores and sums in FP32, head_dim summed with compensation, probabilities
    2^(s - max) over splits of a fixed size, one division, one rounding. A row's bits depend on its own
    query, tokens and length alone.

    >>> cache = PagedKVCache.empty(2, 16, 1, 64, v_scale=0.5)
    >>> ones = np.ones((3, 1, 64), np.float32)
    >>> cache.write(ones, ones, np.arange(3, dtype=np.int32))
    >>> q, table = np.ones((1, 4, 64), np.float16), np.int32([[0, 1]])
    >>> out = paged_attention(q, cache, table, np.int32([3]), np.int32([0, 1]))
    >>> out.shape, float(out.min()), float(out.max())
    ((1, 4, 64), 1.0, 1.0)
    """
    problem, scale = _check(q, cache, block_table, row_lengths, query_start_loc, softmax_scale, validate)
    if out is None:
        out = np.empty(q.shape, q.dtype)
    inputs = {"q": q, "cache.k": cache.k, "cache.v": cache.v, "block_table": block_table}
    inputs |= {"row_lengths": row_lengths, "query_start_loc": query_start_loc}
    arrays.check_output(out, "out", shape=q.shape, dtypes=arrays.FLOATS, inputs=inputs)
    state = _state(problem, route, q, cache, block_table, row_lengths, query_start_loc, scale)
    _backend().finalize(state, out)
    return (out, state) if return_state else out


def partial_attention(
    q: Any,
    cache: PagedKVCache,
    block_table: Any,
    row_lengths: Any,
    query_start_loc: Any,
    *,
    softmax_scale: float | None = None,
    route: str | None = None,
    validate: bool | None = None,
) -> PartialState:
    """Attention before its division: what to merge when a row's tokens lie in several places.

    Arguments and errors are those of `paged_attention`. `finalize(partial_attention(...))` has the bits
    of `paged_attention(...)`.
    """
    problem, scale = _check(q, cache, block_table, row_lengths, query_start_loc, softmax_scale, validate)
    return _state(problem, route, q, cache, block_table, row_lengths, query_start_loc, scale)


def merge_states(*states: PartialState) -> PartialState:
    """The state over all the tokens of the states given, folded in that order.

    Args:
        states: one or more, of the same shape, over different tokens.

    Raises:
        TypeError: something that is no `PartialState`, or whose arrays are not float32.
        ValueError: none given, or shapes that differ.

    Source: the online softmax of Milakov and Gimelshein (2018), kept unnormalised.
    """
    if not states:
        raise ValueError("states: none were given")
    for i, state in enumerate(states):
        _check_state(state, f"states[{i}]", states[0])
    return _backend().merge(states)


def finalize(state: PartialState, dtype: Any = np.float32, *, out: Any = None) -> Any:
    """The attention output of a state: one division in FP32, one rounding.

    Args:
        state: of shape (rows, q_heads, head_dim).
        dtype: float16, bfloat16 or float32; ignored when `out` is given.
        out: an array of the numerator's shape and one of those dtypes.

    Returns:
        `out`, or a new array; exactly 0 where the state saw nothing.

    Raises:
        TypeError, ValueError: an argument that is not as above.
    """
    _check_state(state, "state", state)
    if out is None:
        out = np.empty(state.numerator.shape, arrays.float_dtype(dtype, "dtype"))
    inputs = {"state.numerator": state.numerator, "state.maximum": state.maximum, "state.sum": state.sum}
    arrays.check_output(out, "out", shape=state.numerator.shape, dtypes=arrays.FLOATS, inputs=inputs)
    _backend().finalize(state, out)
    return out


def causal_row_lengths(seq_lens: Any, query_start_loc: Any) -> Any:
    """How many tokens each query row sees when the rows are a request's last tokens.

    Args:
        seq_lens: (requests,) int32, tokens in the cache, this step's included; 0 for a dummy request,
            whose rows are inactive.
        query_start_loc: (requests + 1,) int32 from 0, non-decreasing.

    Returns:
        (query_start_loc[-1],) int32.

    Raises:
        TypeError, ValueError: an argument that is not as above, or fewer tokens than rows.

    >>> causal_row_lengths(np.int32([7, 0, 9]), np.int32([0, 3, 4, 5])).tolist()
    [5, 6, 7, 0, 9]
    """
    _check_query_start_loc(query_start_loc, None)
    requests = len(query_start_loc) - 1
    arrays.check_array(seq_lens, "seq_lens", shape=(requests,), dtypes=_INT32)
    counts = np.diff(query_start_loc)
    bad = np.flatnonzero((seq_lens < counts) & (seq_lens != 0))
    if len(bad):
        r = bad[0]
        raise ValueError(f"seq_lens: request {r} has {seq_lens[r]} tokens but {counts[r]} query rows")
    request = np.repeat(np.arange(requests), counts)
    rows_after = query_start_loc[1:][request] - 1 - np.arange(len(request))
    return np.where(seq_lens[request] == 0, 0, seq_lens[request] - rows_after).astype(np.int32)


def explain_route(
    q: Any,
    cache: PagedKVCache,
    block_table: Any,
    row_lengths: Any,
    query_start_loc: Any,
    *,
    route: str | None = None,
) -> dict[str, str]:
    """For each route, "taken" or why it is not, for the `paged_attention` call with these arguments."""
    problem, _ = _check(q, cache, block_table, row_lengths, query_start_loc, None, None)
    return routing.explain(problem, route)


def _state(problem, route, q, cache, block_table, row_lengths, query_start_loc, scale) -> PartialState:
    routing.record(routing.select(problem, route), problem)
    return _backend().attention_state(q, cache, block_table, row_lengths, query_start_loc, scale)


def _check(
    q, cache, block_table, row_lengths, query_start_loc, softmax_scale, validate
) -> tuple[AttentionProblem, float]:
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"cache: expected a PagedKVCache, got {type(cache).__name__}")
    arrays.check_array(
        q, "q", shape=("rows", "q_heads", cache.head_dim), dtypes=arrays.FLOATS, contiguous_last=True
    )
    rows, q_heads, head_dim = q.shape
    if rows == 0:
        raise ValueError("q: has no rows (an empty batch)")
    if q_heads == 0 or q_heads % cache.kv_heads:
        raise ValueError(
            f"q: {q_heads} query heads are not a multiple of the cache's {cache.kv_heads} KV heads"
        )
    if head_dim > 256:
        raise ValueError(f"q: head_dim {head_dim} is over 256")
    _check_query_start_loc(query_start_loc, rows)
    requests = len(query_start_loc) - 1
    arrays.check_array(block_table, "block_table", shape=(requests, "max_pages"), dtypes=_INT32)
    arrays.check_array(row_lengths, "row_lengths", shape=(rows,), dtypes=_INT32)
    if (row_lengths < 0).any():
        row = int(np.flatnonzero(row_lengths < 0)[0])
        raise ValueError(f"row_lengths: row {row} has the negative length {row_lengths[row]}")
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    elif not np.isfinite(float(softmax_scale)):
        raise ValueError(f"softmax_scale: {softmax_scale} is not finite")
    if arrays.should_validate(validate):
        _check_pages(cache, block_table, row_lengths, query_start_loc)
    problem = AttentionProblem(
        device="cpu",
        rows=rows,
        requests=requests,
        q_heads=q_heads,
        kv_heads=cache.kv_heads,
        head_dim=head_dim,
        page_size=cache.page_size,
        q_dtype=next(f.name for f in FORMATS.values() if f.value == q.dtype),
        kv_dtype=cache.format.name,
    )
    return problem, float(softmax_scale)


def _check_query_start_loc(query_start_loc, rows: int | None) -> None:
    arrays.check_array(query_start_loc, "query_start_loc", shape=("requests + 1",), dtypes=_INT32)
    if len(query_start_loc) < 2:
        raise ValueError("query_start_loc: has no requests (an empty batch)")
    if query_start_loc[0] != 0:
        raise ValueError(f"query_start_loc: starts at {query_start_loc[0]}, not at 0")
    falls = np.flatnonzero(np.diff(query_start_loc) < 0)
    if len(falls):
        i = falls[0]
        raise ValueError(
            f"query_start_loc: falls from {query_start_loc[i]} to {query_start_loc[i + 1]} at request {i}"
        )
    if rows is not None and query_start_loc[-1] > rows:
        raise ValueError(f"query_start_loc: ends at {query_start_loc[-1]}, past q's {rows} rows")


def _check_pages(cache, block_table, row_lengths, query_start_loc) -> None:
    """The checks that `validate` asks for: every token that a row sees has a page that exists."""
    capacity = block_table.shape[1] * cache.page_size
    for request, (row, past) in enumerate(itertools.pairwise(query_start_loc)):
        if row == past:
            continue
        longest = int(row + row_lengths[row:past].argmax())
        length = int(row_lengths[longest])
        if length > capacity:
            raise ValueError(
                f"row_lengths: row {longest} of request {request} sees {length} tokens, "
                f"past the block table's {capacity}"
            )
        used = block_table[request, : -(-length // cache.page_size)]
        bad = np.flatnonzero((used < 0) | (used >= cache.num_pages))
        if len(bad):
            raise ValueError(
                f"block_table: row {longest} of request {request} sees page {used[bad[0]]} (entry {bad[0]}), "
                f"outside [0, {cache.num_pages})"
            )


def _check_state(state, name: str, like: PartialState) -> None:
    if not isinstance(state, PartialState):
        raise TypeError(f"{name}: expected a PartialState, got {type(state).__name__}")
    shape = like.numerator.shape
    float32 = (np.dtype(np.float32),)
    arrays.check_array(state.numerator, f"{name}.numerator", shape=shape, dtypes=float32)
    arrays.check_array(state.maximum, f"{name}.maximum", shape=shape[:-1], dtypes=float32)
    arrays.check_array(state.sum, f"{name}.sum", shape=shape[:-1], dtypes=float32)


def _backend():
    from corekern import cpu

    return cpu
