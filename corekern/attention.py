"""Dense attention over a paged KV cache."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from corekern import arrays, routing
from corekern.cache import PagedKVCache
from corekern.formats import FORMATS
from corekern.routing import AttentionProblem
from corekern.state import PartialState

_INT32 = (np.dtype(np.int32),)
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """A `paged_attention` call that has passed its checks: what a backend is given."""

    problem: AttentionProblem
    q: Any
    cache: PagedKVCache
    block_table: Any
    row_lengths: Any
    query_start_loc: Any
    softmax_scale: float


def paged_attention(
    q: Any,
    cache: PagedKVCache,
    block_table: Any,
    row_lengths: Any,
    query_start_loc: Any,
    *,
    softmax_scale: float | None = None,
    max_query_len: int | None = None,
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
        max_query_len: a promise that no request has more rows at any launch, which lets batches of few rows each take
            `grouped_fp32` without a look at query_start_loc; rows beyond it may come out as NaN there. None promises
            nothing.
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
    2^(s - max) over splits, one division, one rounding. A row's bits depend on its own query, tokens and
    length alone, and on `grouped_fp32` on its request's greatest length, which is what the splits follow.

    >>> cache = PagedKVCache.empty(2, 16, 1, 64, v_scale=0.5)
    >>> ones = np.ones((3, 1, 64), np.float32)
    >>> cache.write(ones, ones, np.arange(3, dtype=np.int32))
    >>> q, table = np.ones((1, 4, 64), np.float16), np.int32([[0, 1]])
    >>> out = paged_attention(q, cache, table, np.int32([3]), np.int32([0, 1]))
    >>> out.shape, float(out.min()), float(out.max())
    ((1, 4, 64), 1.0, 1.0)
    """
    call = _check(q, cache, block_table, row_lengths, query_start_loc, softmax_scale, max_query_len, validate)
    target = _output(call, out)
    chosen = routing.select(call.problem, route)
    backend = routing.backend(chosen.backend)
    routing.record(chosen, call.problem)
    result = arrays.give_back(target, q) if out is None else out
    if return_state:
        state = backend.attention_state(call)
        routing.state_backend(call.problem.device).finalize(state, target)
        return result, _give_back_state(state, q)
    backend.attention(call, target)
    return result


def partial_attention(
    q: Any,
    cache: PagedKVCache,
    block_table: Any,
    row_lengths: Any,
    query_start_loc: Any,
    *,
    softmax_scale: float | None = None,
    max_query_len: int | None = None,
    route: str | None = None,
    validate: bool | None = None,
) -> PartialState:
    """Attention before its division: what to merge when a row's tokens lie in several places.

    Arguments and errors are those of `paged_attention`. `finalize(partial_attention(...))` has the bits
    of `paged_attention(...)`.
    """
    call = _check(q, cache, block_table, row_lengths, query_start_loc, softmax_scale, max_query_len, validate)
    chosen = routing.select(call.problem, route)
    routing.record(chosen, call.problem)
    return _give_back_state(routing.backend(chosen.backend).attention_state(call), q)


class AttentionPlan:
    """A `paged_attention` call with everything decided: made by `plan_attention`, called with new queries."""

    def __init__(self, call: AttentionCall, route: routing.Route) -> None:
        self.problem = call.problem
        self.route = route.name
        self._route = route
        self._like = (call.q.shape, call.q.strides, call.q.dtype, call.problem.device)
        size = call.q.dtype.itemsize
        _, q_heads, head_dim = call.q.shape
        self._out_strides = (q_heads * head_dim * size, head_dim * size, size)
        self._run = routing.backend(route.backend).plan_attention(call)

    def __call__(self, q: Any, *, out: Any) -> Any:
        """Attention of `q` over what the planned arrays now hold, into `out`; returns `out`.

        Args:
            q: an array like the planned one: the same shape, strides, dtype and device.
            out: (rows, q_heads, head_dim), contiguous, of q's dtype and device; must not overlap q or the
                cache.

        Raises:
            ValueError: q or out is not as above.
        """
        shape, strides, dtype, device = self._like
        queries, target = arrays.adopt(q, "q"), arrays.adopt(out, "out")
        if (queries.shape, queries.strides, queries.dtype, arrays.device_of(queries)) != self._like:
            raise ValueError(
                f"q: shape {queries.shape}, strides {queries.strides}, {queries.dtype} on "
                f"{arrays.device_of(queries)} is not the planned {shape}, {strides}, {dtype} on {device}"
            )
        if (
            target.shape != shape
            or target.dtype != dtype
            or (target.strides != self._out_strides and not target.flags.c_contiguous)
            or not getattr(target.flags, "writeable", True)
            or arrays.device_of(target) != device
        ):
            raise ValueError(f"out: is not a writeable, contiguous {shape} array of {dtype} on {device}")
        routing.record(self._route, self.problem)
        self._run(queries, target)
        return out


def plan_attention(
    q: Any,
    cache: PagedKVCache,
    block_table: Any,
    row_lengths: Any,
    query_start_loc: Any,
    *,
    softmax_scale: float | None = None,
    max_query_len: int | None = None,
    route: str | None = None,
    validate: bool | None = None,
) -> AttentionPlan:
    """Checks a call, chooses its route, compiles its kernels and takes its workspace, once for many calls.

    Arguments and errors are those of `paged_attention`; q's values are not looked at. The plan keeps the
    cache, block_table, row_lengths and query_start_loc given: their contents may change between calls, also
    between replays of a captured graph, but the arrays may not be replaced. On a GPU a plan belongs to the
    stream that is current when it is made.

    Returns:
        A plan: `plan(q, out=out)`.

    >>> cache = PagedKVCache.empty(1, 16, 1, 64)
    >>> cache.write(np.ones((2, 1, 64), np.float32), np.ones((2, 1, 64), np.float32), np.int32([0, 1]))
    >>> q = np.ones((1, 4, 64), np.float16)
    >>> lengths = np.int32([1])
    >>> plan = plan_attention(q, cache, np.int32([[0]]), lengths, np.int32([0, 1]))
    >>> lengths[:] = 0
    >>> float(plan(q, out=np.empty_like(q)).max())
    0.0
    """
    call = _check(q, cache, block_table, row_lengths, query_start_loc, softmax_scale, max_query_len, validate)
    return AttentionPlan(call, routing.select(call.problem, route))


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
    adopted = [_adopt_state(state, f"states[{i}]") for i, state in enumerate(states)]
    device = arrays.check_same_device(
        **{f"states[{i}].{field}": a for i, s in enumerate(adopted) for field, a in vars(s).items()}
    )
    for i, state in enumerate(adopted):
        _check_state(state, f"states[{i}]", adopted[0].numerator.shape)
    return _give_back_state(routing.state_backend(device).merge(adopted), states[0].numerator)


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
    adopted = _adopt_state(state, "state")
    inputs = {f"state.{field}": a for field, a in vars(adopted).items()}
    target = None if out is None else arrays.adopt(out, "out")
    device = arrays.check_same_device(**inputs, out=target)
    shape = adopted.numerator.shape
    _check_state(adopted, "state", shape)
    if target is None:
        target = arrays.namespace(device).empty(shape, arrays.float_dtype(dtype, "dtype"))
    else:
        arrays.check_output(target, "out", shape=shape, dtypes=arrays.FLOATS, inputs=inputs)
    routing.state_backend(device).finalize(adopted, target)
    return arrays.give_back(target, state.numerator) if out is None else out


def causal_row_lengths(seq_lens: Any, query_start_loc: Any, rows: int | None = None) -> Any:
    """How many tokens each query row sees when the rows are a request's last tokens.

    Args:
        seq_lens: (requests,) int32, tokens in the cache, this step's included; 0 for a dummy request,
            whose rows are inactive.
        query_start_loc: (requests + 1,) int32 from 0, non-decreasing.
        rows: how many rows to give; those past query_start_loc[-1] are 0. None gives query_start_loc[-1],
            for which a GPU is waited for.

    Returns:
        (rows,) int32 in the library of seq_lens.

    Raises:
        TypeError, ValueError: an argument that is not as above; on the CPU also fewer tokens than rows.

    >>> causal_row_lengths(np.int32([7, 0, 9]), np.int32([0, 3, 4, 5])).tolist()
    [5, 6, 7, 0, 9]
    """
    lens, starts = arrays.adopt(seq_lens, "seq_lens"), arrays.adopt(query_start_loc, "query_start_loc")
    device = arrays.check_same_device(seq_lens=lens, query_start_loc=starts)
    _check_query_start_loc(starts, rows, look=device == "cpu")
    requests = len(starts) - 1
    arrays.check_array(lens, "seq_lens", shape=(requests,), dtypes=_INT32)
    if device == "cpu":
        counts = np.diff(starts)
        bad = np.flatnonzero((lens < counts) & (lens != 0))
        if len(bad):
            r = bad[0]
            raise ValueError(f"seq_lens: request {r} has {lens[r]} tokens but {counts[r]} query rows")
    xp = arrays.namespace(device)
    row = xp.arange(int(starts[-1]) if rows is None else rows, dtype=np.int32)
    request = xp.minimum(xp.searchsorted(starts, row, side="right") - 1, requests - 1)
    length = lens[request] - (starts[request + 1] - 1 - row)
    seen = (lens[request] != 0) & (row < starts[-1])
    return arrays.give_back(xp.where(seen, length, 0).astype(np.int32), seq_lens)


def explain_route(
    q: Any,
    cache: PagedKVCache,
    block_table: Any,
    row_lengths: Any,
    query_start_loc: Any,
    *,
    max_query_len: int | None = None,
    route: str | None = None,
) -> dict[str, str]:
    """For each route, "taken" or why it is not, for the `paged_attention` call with these arguments."""
    call = _check(q, cache, block_table, row_lengths, query_start_loc, None, max_query_len, None)
    return routing.explain(call.problem, route)


def _check(
    q, cache, block_table, row_lengths, query_start_loc, softmax_scale, max_query_len, validate
) -> AttentionCall:
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"cache: expected a PagedKVCache, got {type(cache).__name__}")
    q, block_table = arrays.adopt(q, "q"), arrays.adopt(block_table, "block_table")
    row_lengths = arrays.adopt(row_lengths, "row_lengths")
    query_start_loc = arrays.adopt(query_start_loc, "query_start_loc")
    device = arrays.check_same_device(
        cache=cache.k, q=q, block_table=block_table, row_lengths=row_lengths, query_start_loc=query_start_loc
    )
    check_queries(q, cache)
    rows = len(q)
    if rows == 0:
        raise ValueError("q: has no rows (an empty batch)")
    # Looking at values means waiting for a GPU, where it is done only when asked for.
    validating = arrays.should_validate(validate)
    look = device == "cpu" or validating
    _check_query_start_loc(query_start_loc, rows, look)
    requests = len(query_start_loc) - 1
    arrays.check_array(block_table, "block_table", shape=(requests, "max_pages"), dtypes=_INT32)
    arrays.check_array(row_lengths, "row_lengths", shape=(rows,), dtypes=_INT32)
    if look:
        lengths = arrays.to_host(row_lengths)
        if (lengths < 0).any():
            row = int(np.flatnonzero(lengths < 0)[0])
            raise ValueError(f"row_lengths: row {row} has the negative length {lengths[row]}")
    softmax_scale = check_softmax_scale(softmax_scale, cache)
    if max_query_len is None:
        max_query_len = rows
    elif not isinstance(max_query_len, (int, np.integer)) or max_query_len < 1:
        raise ValueError(f"max_query_len: {max_query_len!r} is not an integer of at least 1")
    elif look and (counts := np.diff(arrays.to_host(query_start_loc))).max() > max_query_len:
        raise ValueError(f"max_query_len: request {counts.argmax()} has more rows than {max_query_len}")
    if validating:
        _check_pages(cache, *(arrays.to_host(a) for a in (block_table, row_lengths, query_start_loc)))
    problem = describe(q, cache, requests, min(int(max_query_len), rows))
    return AttentionCall(
        problem, q, cache, block_table, row_lengths, query_start_loc, softmax_scale=softmax_scale
    )


def check_queries(q: Any, cache: PagedKVCache) -> None:
    """Queries that a cache's keys can meet: (rows, q_heads, head_dim), q_heads a multiple of its KV heads."""
    shape = ("rows", "q_heads", cache.head_dim)
    arrays.check_array(q, "q", shape=shape, dtypes=arrays.FLOATS, contiguous_last=True)
    _, q_heads, head_dim = q.shape
    if q_heads == 0 or q_heads % cache.kv_heads:
        raise ValueError(
            f"q: {q_heads} query heads are not a multiple of the cache's {cache.kv_heads} KV heads"
        )
    if head_dim > 256:
        raise ValueError(f"q: head_dim {head_dim} is over 256")


def describe(q: Any, cache: PagedKVCache, requests: int, max_query_len: int) -> AttentionProblem:
    """What a route may depend on, of checked arguments."""
    rows, q_heads, head_dim = q.shape
    device = arrays.device_of(q)
    return AttentionProblem(
        device=device,
        rows=rows,
        requests=requests,
        q_heads=q_heads,
        kv_heads=cache.kv_heads,
        head_dim=head_dim,
        page_size=cache.page_size,
        q_dtype=next(f.name for f in FORMATS.values() if f.value == q.dtype),
        kv_dtype=cache.format.name,
        max_query_len=max_query_len,
        compute_capability=arrays.compute_capability(device),
    )


def check_softmax_scale(softmax_scale: Any, cache: PagedKVCache) -> float:
    """The scale as a number whose fold with k_scale, in base 2, float32 can hold."""
    try:
        value = cache.head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    except (TypeError, ValueError):
        raise TypeError(f"softmax_scale: expected a number, got {type(softmax_scale).__name__}") from None
    if not abs(value) * cache.k_scale * math.log2(math.e) <= _LARGEST:
        raise ValueError(f"softmax_scale: {value} times k_scale {cache.k_scale} is not finite in float32")
    return value


def _output(call: AttentionCall, out: Any) -> Any:
    """The array to write: `out`, checked, or a new one like q."""
    if out is None:
        return arrays.new_output(call.problem.device, call.q.shape, call.q.dtype)
    target = arrays.adopt(out, "out")
    arrays.check_same_device(cache=call.cache.k, out=target)
    inputs = {"q": call.q, "cache.k": call.cache.k, "cache.v": call.cache.v, "block_table": call.block_table}
    inputs |= {"row_lengths": call.row_lengths, "query_start_loc": call.query_start_loc}
    return arrays.check_output(target, "out", shape=call.q.shape, dtypes=arrays.FLOATS, inputs=inputs)


def _check_query_start_loc(query_start_loc, rows: int | None, look: bool) -> None:
    arrays.check_array(query_start_loc, "query_start_loc", shape=("requests + 1",), dtypes=_INT32)
    if len(query_start_loc) < 2:
        raise ValueError("query_start_loc: has no requests (an empty batch)")
    if not look:
        return
    query_start_loc = arrays.to_host(query_start_loc)
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


def _adopt_state(state: Any, name: str) -> PartialState:
    if not isinstance(state, PartialState):
        raise TypeError(f"{name}: expected a PartialState, got {type(state).__name__}")
    return PartialState(**{field: arrays.adopt(a, f"{name}.{field}") for field, a in vars(state).items()})


def _give_back_state(state: PartialState, like: Any) -> PartialState:
    return PartialState(**{field: arrays.give_back(a, like) for field, a in vars(state).items()})


def _check_state(state: PartialState, name: str, shape: tuple[int, ...]) -> None:
    float32 = (np.dtype(np.float32),)
    arrays.check_array(state.numerator, f"{name}.numerator", shape=shape, dtypes=float32)
    arrays.check_array(state.maximum, f"{name}.maximum", shape=shape[:-1], dtypes=float32)
    arrays.check_array(state.sum, f"{name}.sum", shape=shape[:-1], dtypes=float32)
