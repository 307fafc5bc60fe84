"""Paged attention with FP32 state on any GPU: the plan of a launch, and what runs it.

Two kernels: `split` computes the state of every 512-token split of every row into a workspace, `combine` folds
a row's splits in index order. What each row sees, and whose it is, is read on the device: the grids follow
from shapes alone, and blocks past a row's length return at once. So a plan's launch allocates nothing, waits for
nothing, and can be captured in a graph whose lengths change between replays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from corekern.routing import AttentionProblem
from corekern.simt import device
from corekern.simt.combine import (
    ELEMENT_THREADS,
    combine_kernel,
    combine_types,
    finalize_kernel,
    merge_kernel,
)
from corekern.simt.combine import THREADS as COMBINE_THREADS
from corekern.simt.convert import storage
from corekern.simt.split import LANES, SPLIT, THREADS, split_kernel, split_types
from corekern.state import PartialState

# Problems with more partial states than this run in several waves over one workspace.
WORKSPACE_BYTES = 256 << 20

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class LaunchPlan:
    """A launch worked out from shapes alone. Make one with `plan_launch`."""

    problem: AttentionProblem
    max_pages: int
    """Width of the block table."""
    out_dtype: str | None
    """"float16", "bfloat16" or "float32", or None for a `PartialState`."""
    workspace_limit: int = WORKSPACE_BYTES

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.problem.q_heads // self.problem.kv_heads

    @property
    def rows_per_request(self) -> int:
        """About how many rows a request has; whatever they really have, the bits are the same."""
        return -(-self.problem.rows // self.problem.requests)

    @property
    def lanes(self) -> int:
        """(row, query head) pairs that a block takes."""
        pairs = self.rows_per_request * self.group
        return next((n for n in LANES if n >= pairs), LANES[-1])

    @property
    def tile_rows(self) -> int:
        """Rows of one request that are packed into whole blocks together."""
        if self.rows_per_request == 1:
            return 1
        packed = self.lanes // math.gcd(self.lanes, self.group)
        return min(packed, 1 << (self.rows_per_request - 1).bit_length())

    @property
    def gap(self) -> int:
        """Tiles set aside for each request's last, partial tile; single rows leave none."""
        return 0 if self.tile_rows == 1 else 1

    @property
    def tiles(self) -> int:
        """Row tiles, at most: see `find_pairs`."""
        return self.problem.rows // self.tile_rows + self.gap * (self.problem.requests + 1)

    @property
    def lane_blocks(self) -> int:
        """Blocks that a full tile's pairs take."""
        return -(-self.tile_rows * self.group // self.lanes)

    @property
    def splits(self) -> int:
        """Splits that the block table has room for."""
        return max(1, -(-self.max_pages * self.problem.page_size // SPLIT))

    @property
    def pairs_per_tile(self) -> int:
        """Places for partial states that one tile takes in each split."""
        return self.lane_blocks * self.problem.kv_heads * self.lanes

    @cached_property
    def tiles_per_wave(self) -> int:
        state_bytes = 4 * (self.problem.head_dim + 2)
        tile_bytes = max(1, self.splits * self.pairs_per_tile * state_bytes)
        return max(1, min(self.tiles, self.workspace_limit // tile_bytes))

    @property
    def states(self) -> int:
        """Partial states in the workspace."""
        return self.splits * self.tiles_per_wave * self.pairs_per_tile

    @property
    def workspace_bytes(self) -> int:
        """Bytes that `launch` needs: states * (head_dim + 2) float32."""
        return 4 * self.states * (self.problem.head_dim + 2)

    @cached_property
    def split_kernel(self) -> Any:
        """Computes the states of a wave's splits."""
        dims = -(-self.problem.head_dim // THREADS)
        return split_kernel(self.problem.q_dtype, self.problem.kv_dtype, self.lanes, dims)

    @cached_property
    def combine_kernel(self) -> Any:
        """Folds the splits of each of a wave's rows."""
        return combine_kernel(self.lanes, -(-self.problem.head_dim // THREADS), self.out_dtype)

    def launch(
        self,
        q: Any,
        cache: Any,
        block_table: Any,
        row_lengths: Any,
        query_start_loc: Any,
        softmax_scale: float,
        workspace: Any,
        out: Any,
        stream: Any = None,
    ) -> None:
        """Runs the plan on arrays of its shapes and dtypes; checks nothing, allocates nothing, waits for nothing.

        Args:
            q, cache, block_table, row_lengths, query_start_loc: as in `corekern.paged_attention`.
            softmax_scale: a number.
            workspace: a contiguous uint8 array of at least `workspace_bytes`, aligned to 4 bytes; nothing
                need be in it, and nothing of use is left in it.
            out: an array of `out_dtype`, or where that is None a `PartialState` of contiguous arrays.
            stream: a CuPy stream or a stream's address; CuPy's current stream when None.
        """
        problem = self.problem
        scratch = workspace[: self.workspace_bytes].view(np.float32)
        ends = (self.states * problem.head_dim, self.states * (problem.head_dim + 1))
        partial = [
            device.flatten(a)[0] for a in (scratch[: ends[0]], scratch[ends[0] : ends[1]], scratch[ends[1] :])
        ]
        k, k_layout = device.flatten(storage(cache.k, cache.format)[0])
        v, v_layout = device.flatten(storage(cache.v, cache.format)[0])
        table, table_layout = device.flatten(block_table)
        rows_seen = (*device.flatten(row_lengths), *device.flatten(query_start_loc))
        tiling = (self.tile_rows, self.gap, self.lane_blocks)
        if self.out_dtype is None:
            target, total, maximum = out.numerator, device.flatten(out.sum)[0], device.flatten(out.maximum)[0]
        else:
            target, total, maximum = storage(out)[0], partial[2], partial[1]  # the last two are not touched
        first = (
            *device.flatten(storage(q)[0]),
            k,
            k_layout[:4],
            v,
            v_layout[:4],
            table,
            (*table_layout, 0),
            *rows_seen,
        )
        extents = (problem.requests, problem.rows, self.group, problem.head_dim)
        pages = (cache.page_size, cache.num_pages, self.max_pages)
        scale = np.float32(softmax_scale * cache.k_scale * _LOG2_E)
        for begin in range(0, self.tiles, self.tiles_per_wave):
            wave = (begin, min(self.tiles_per_wave, self.tiles - begin))
            blocks = wave[1] * self.lane_blocks
            device.launch(
                self.split_kernel, (self.splits * blocks, problem.kv_heads), THREADS, stream,
                *first, (*extents, *pages), tiling, wave, scale, *partial,
            )  # fmt: skip
            device.launch(
                self.combine_kernel, (blocks * self.lanes, problem.kv_heads), COMBINE_THREADS, stream,
                *partial, *rows_seen, (*extents, self.max_pages * cache.page_size), tiling, wave,
                np.float32(cache.v_scale), *device.flatten(target), maximum, total,
            )  # fmt: skip


@lru_cache(maxsize=256)
def plan_launch(
    problem: AttentionProblem,
    max_pages: int,
    out_dtype: str | None = None,
    *,
    workspace_limit: int = WORKSPACE_BYTES,
) -> LaunchPlan:
    """The plan of every call with these shapes, its kernels compiled for the current device.

    Args:
        problem: the shapes and dtypes.
        max_pages: width of the block table.
        out_dtype: "float16", "bfloat16" or "float32" for attention outputs, None for a `PartialState`.
        workspace_limit: bytes of partial states at a time. One tile of rows is the least there can be; bits
            do not depend on it.
    """
    plan = LaunchPlan(problem, max_pages, out_dtype, workspace_limit)
    device.compile(plan.split_kernel, split_types(problem.q_dtype, problem.kv_dtype))
    device.compile(plan.combine_kernel, combine_types(out_dtype))
    return plan


def attention(call: Any, out: Any) -> None:
    """out = the attention of a checked call; see `corekern.paged_attention`."""
    _bound(call, out.dtype.name)(call.q, out)


def attention_state(call: Any) -> PartialState:
    """The FP32 state of every row over its tokens; see `corekern.partial_attention`."""
    state = _empty_state(*call.q.shape)
    _bound(call, None)(call.q, state)
    return state


def plan_attention(call: Any) -> Callable[[Any, Any], None]:
    """A function (q, out) that runs the call with other queries; see `corekern.plan_attention`."""
    run = _bound(call, call.q.dtype.name)
    device.workspace(run.keywords["plan"].workspace_bytes)  # so that a capture finds it large enough
    return run


def _bound(call: Any, out_dtype: str | None) -> functools.partial[None]:
    plan = plan_launch(call.problem, call.block_table.shape[1], out_dtype)
    arrays = (call.cache, call.block_table, call.row_lengths, call.query_start_loc, call.softmax_scale)
    return functools.partial(_run, plan=plan, arrays=arrays)


def _run(q: Any, out: Any, *, plan: LaunchPlan, arrays: tuple) -> None:
    plan.launch(q, *arrays, device.workspace(plan.workspace_bytes), out)


def merge(states) -> PartialState:
    """Folds states in the order given; see `corekern.merge_states`."""
    rows, q_heads, head_dim = states[0].numerator.shape
    merged, *others = (_contiguous(state) for state in states)
    if not others:
        merged = PartialState(*(a.copy() for a in (merged.numerator, merged.maximum, merged.sum)))
    for other in others:
        folded = _empty_state(rows, q_heads, head_dim)
        a, b, target = (
            [device.flatten(x.reshape(-1))[0] for x in (s.numerator, s.maximum, s.sum)]
            for s in (merged, other, folded)
        )
        grid = (-(-folded.numerator.size // ELEMENT_THREADS),)
        device.launch(merge_kernel, grid, ELEMENT_THREADS, None, *a, *b, head_dim, *target)
        merged = folded
    return merged


def finalize(state: PartialState, out: Any) -> None:
    """out = numerator / sum in float32, rounded once to out's dtype; an empty state gives 0."""
    _, q_heads, head_dim = out.shape
    state = _contiguous(state)
    out, name = storage(out)
    numerator, total = (device.flatten(a.reshape(-1))[0] for a in (state.numerator, state.sum))
    grid = (-(-out.size // ELEMENT_THREADS),)
    device.launch(
        finalize_kernel(name), grid, ELEMENT_THREADS, None,
        numerator, total, (q_heads, head_dim), *device.flatten(out),
    )  # fmt: skip


def _empty_state(rows: int, q_heads: int, head_dim: int) -> PartialState:
    xp = device.namespace()
    shapes = ((rows, q_heads, head_dim), (rows, q_heads), (rows, q_heads))
    return PartialState(*(xp.empty(shape, np.float32) for shape in shapes))


def _contiguous(state: PartialState) -> PartialState:
    xp = device.namespace()
    return PartialState(*(xp.ascontiguousarray(a) for a in (state.numerator, state.maximum, state.sum)))
