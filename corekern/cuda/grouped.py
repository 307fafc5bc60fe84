"""Grouped attention: a few query rows of each request, all the query heads of a KV head, on tensor cores.

One kernel launch a call: the kernel reads row_lengths, query_start_loc, the block table and the caches on the
device, and combines its own splits. What it needs is packed once, into the struct that `grouped.cuh` reads; a
call then sets the addresses that changed and goes straight to the driver: see `launch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from corekern import workspace
from corekern.cuda import grouped_mma, loader
from corekern.cuda.kernels import grouped_sm90_block
from corekern.cuda.launch import Launch
from corekern.cuda.tensor_map import can_map, tensor_map
from corekern.routing import AttentionProblem
from corekern.state import PartialState

ENTRY = "grouped_attention"
HOPPER = "sm_90"  # where grouped_sm90.cu runs

# As in grouped.cuh.
FOLD = 8
TILE = 64
SUB = 16
LANES = (8, 16, 24, 32, 48)

PARAMS = np.dtype(
    [
        *((name, np.uint64, 16) for name in ("k_tile", "v_tile", "k_sub", "v_sub")),
        *(
            (name, np.uint64)
            for name in ("k", "v", "q", "block_table", "row_lengths", "query_start_loc", "out")
        ),
        *((name, np.uint64) for name in ("state_numerator", "state_maximum", "state_sum")),
        *((name, np.uint64) for name in ("numerators", "totals", "arrivals", "gatherings")),
        *((name, np.int64) for name in ("k_page", "k_token", "k_head", "v_page", "v_token", "v_head")),
        *((name, np.int64) for name in ("q_row", "q_head", "out_row", "out_head", "out_dim")),
        *((name, np.int64) for name in ("table_row", "table_column", "length_stride", "start_stride")),
        ("num_pages", np.int64),
        *((name, np.int32) for name in ("page_size", "table_width", "rows", "requests", "group", "q_heads")),
        ("page_magic", np.uint32),
        ("page_shift", np.uint32),
        *(
            (name, np.int32)
            for name in (
                "kv_heads",
                "group_magic",
                "covered",
                "granule",
                "together",
                "q_aligned",
                "out_type",
                "zero_q",
                "negate_q",
            )
        ),
        ("scale", np.float32),
        ("v_scale", np.float32),
        ("padding", np.uint8, 4),
    ]
)
_WORD = {name: PARAMS.fields[name][1] // 8 for name in ("q", "out")}  # type: ignore[index]
_OUT_TYPES = {"float16": 0, "bfloat16": 1, "float32": 2}


@dataclass(frozen=True)
class Schedule:
    """The kernel that runs a problem, and its share of the (row, query head) pairs."""

    source: str
    lanes: int
    """Pairs a block."""
    lane_blocks: int
    """Blocks for the pairs of one request and KV head."""
    choices: dict[str, str]
    """Of `kernels.KERNELS[source]`."""
    threads: int
    shared_bytes: int
    overlapping: bool
    """Waits by itself for the kernel before it: see `launch.Launch`."""


def refuse(problem: AttentionProblem) -> str | None:
    """Why no schedule of this kernel runs on the problem's GPU, or None."""
    capability = problem.compute_capability
    if capability < 70:
        return f"tensor cores come with compute capability 7.0, not {capability / 10}"
    if problem.kv_dtype == "float32":
        return "the cache is float32, which tensor cores would round"
    if problem.kv_dtype == "bfloat16" and capability < 80:
        return f"bfloat16 products come with compute capability 8.0, not {capability / 10}"
    return None


def schedule(problem: AttentionProblem, arch: str, *, maps: bool, legacy: bool) -> Schedule:
    """The schedule for a problem: Hopper's own for FP8 there, else the one of every architecture.

    Args:
        problem: one that `refuse` does not.
        arch: what to compile for, such as "sm_90".
        maps: tensor maps describe the cache.
        legacy: without FP32 state, for `grouped_fp16_legacy`.
    """
    group = problem.q_heads // problem.kv_heads
    choices = {
        "HEAD_DIM": str(problem.head_dim),
        "FORMAT": problem.kv_dtype,
        "VALUE": problem.q_dtype,
        "SEGMENTS": str(segments_for(problem.kv_heads)),
        "LEGACY": str(int(legacy)),
    }
    if arch == HOPPER and problem.kv_dtype.startswith("fp8"):
        lanes, blocks = lane_blocks(problem.max_query_len, group)
        choices |= {"LANES": str(lanes), "MAPS": str(int(maps))}
        block = grouped_sm90_block(arch, choices)
        return Schedule("grouped_sm90.cu", lanes, blocks, choices, block.threads, block.shared_bytes, True)
    shapes = {
        lanes: shape
        for lanes in grouped_mma.lanes_on(arch)
        if (shape := grouped_mma.shape(arch, choices | {"LANES": str(lanes)}))
    }
    lanes, blocks = lane_blocks(problem.max_query_len, group, tuple(shapes))
    shape = shapes[lanes]
    choices["LANES"] = str(lanes)
    overlapping = grouped_mma.number_of(arch) >= 90
    return Schedule(
        grouped_mma.SOURCE, lanes, blocks, choices, shape.threads, shape.shared_bytes, overlapping
    )


def lane_blocks(max_query_len: int, group: int, choices: tuple[int, ...] = LANES) -> tuple[int, int]:
    """(lanes a block, blocks) for the (row, query head) pairs of one request and KV head.

    >>> lane_blocks(8, 6), lane_blocks(1, 6), lane_blocks(16, 4), lane_blocks(16, 16)
    ((48, 1), (8, 1), (32, 2), (48, 6))
    """
    pairs = max_query_len * group
    blocks = -(-pairs // choices[-1])
    lanes = next(n for n in choices if n * blocks >= pairs)
    return lanes, blocks


def segments_for(kv_heads: int) -> int:
    """The most segments a row group is cut into: the KV heads of one request share the card's SMs.

    A constant of the model, so that a row's bits depend on its own length alone.

    >>> [segments_for(n) for n in (1, 2, 3, 8, 64)]
    [128, 64, 32, 16, 8]
    """
    return max(FOLD, 1 << (128 // kv_heads).bit_length() - 1)


def division(divisor: int) -> tuple[int, int]:
    """(magic, shift) such that n // divisor == (2 * n * magic >> 32) >> shift for every n below 2^31.

    With shift = ceil(log2(divisor)), magic * divisor exceeds 2^(31 + shift) by at most divisor (Granlund and Montgomery).
    """
    shift = (divisor - 1).bit_length()
    return (1 << (31 + shift)) // divisor + 1, shift


def attention(call: Any, out: Any, *, legacy: bool = False) -> None:
    """out = the attention of a checked call; see `corekern.paged_attention`."""
    _Launch(call, out.dtype.name, legacy=legacy)(call.q, out)


def attention_state(call: Any, *, legacy: bool = False) -> PartialState:
    """The FP32 state of every row over its tokens; see `corekern.partial_attention`."""
    cp = loader.cupy()
    shape = call.q.shape
    state = PartialState(*(cp.empty(s, np.float32) for s in (shape, shape[:2], shape[:2])))
    _Launch(call, "float32", state, legacy=legacy)(call.q, None)
    return state


def plan_attention(call: Any, *, legacy: bool = False) -> Callable[[Any, Any], None]:
    """A function (q, out) that runs the call with other queries; see `corekern.plan_attention`."""
    return _Launch(call, call.q.dtype.name, legacy=legacy)


class _Launch:
    """A call's kernel and its packed parameters.

    Calling it allocates nothing but a workspace that its stream does not have yet, waits for nothing, and may be captured.
    """

    def __init__(self, call: Any, out_dtype: str, state: PartialState | None = None, *, legacy: bool) -> None:
        cp = loader.cupy()
        problem = call.problem
        group = problem.q_heads // problem.kv_heads
        self._params = np.zeros(1, PARAMS)
        one = self._one = self._params[0]
        maps = _describe_cache(one, call.cache)
        chosen = schedule(problem, f"sm_{problem.compute_capability}", maps=maps, legacy=legacy)
        lanes, blocks, segments = chosen.lanes, chosen.lane_blocks, segments_for(problem.kv_heads)
        row_groups = problem.requests * problem.kv_heads * blocks
        states = row_groups * (segments + segments // FOLD) * lanes
        self._partial_dtype = "float16" if legacy else "float32"
        self._counters = row_groups * (1 + segments // FOLD)
        self._numerator_bytes = states * problem.head_dim * (2 if legacy else 4)
        self._workspace_bytes = self._numerator_bytes + states * 16
        grid = (segments, problem.kv_heads * blocks, problem.requests)
        together = math.prod(grid) <= cp.cuda.Device().attributes["MultiProcessorCount"]

        one["together"] = together
        for name in ("block_table", "row_lengths", "query_start_loc"):
            one[name] = loader.address(getattr(call, name))
        if state is not None:
            for field, array in vars(state).items():
                one[f"state_{field}"] = loader.address(array)
        one["table_row"], one["table_column"] = (s // 4 for s in call.block_table.strides)
        one["table_width"] = call.block_table.shape[1]
        one["length_stride"] = call.row_lengths.strides[0] // 4
        one["start_stride"] = call.query_start_loc.strides[0] // 4
        one["rows"], one["requests"] = problem.rows, problem.requests
        one["group"], one["q_heads"], one["kv_heads"] = group, problem.q_heads, problem.kv_heads
        one["group_magic"] = (1 << 16) // group + 1
        one["covered"] = blocks * lanes // group
        one["q_row"], one["q_head"] = (s // 2 for s in call.q.strides[:2])
        self._q_aligned = all(
            s % 16 == 0 for n, s in zip(call.q.shape[:2], call.q.strides[:2], strict=True) if n > 1
        )
        one["out_type"] = _OUT_TYPES[out_dtype]
        scale = np.float32(call.softmax_scale * call.cache.k_scale * math.log2(math.e))
        # The kernel takes maxima before it scales, so the sign goes to q; and 0 x infinity must not be NaN.
        one["scale"], one["negate_q"], one["zero_q"] = abs(scale), scale < 0, scale == 0
        one["v_scale"] = call.cache.v_scale

        kernel = loader.kernel(chosen.source, ENTRY, **chosen.choices)
        kernel.max_dynamic_shared_size_bytes = chosen.shared_bytes
        self._launch = Launch(
            kernel,
            grid,
            chosen.threads,
            chosen.shared_bytes,
            self._params,
            cooperative=together,
            overlapping=chosen.overlapping,
        )
        self._buffers: workspace.Buffers | None = None
        self._out_strides: tuple[int, ...] | None = None
        self._q = 0
        self._pointers = self._params.view(np.uint64).data
        # What the addresses in the parameters point to.
        self._kept = (call, state)

    def __call__(self, q: Any, out: Any) -> None:
        one = self._one
        stream, buffers = workspace.take_counted(self._workspace_bytes, self._counters, self._partial_dtype)
        if buffers is not self._buffers:
            self._buffers = buffers
            first = loader.address(buffers.partials)
            one["numerators"] = first
            one["totals"] = first + self._numerator_bytes
            one["arrivals"] = loader.address(buffers.counters)
            one["gatherings"] = loader.address(buffers.gatherings)
        # Through memoryviews: assigning to a field of a NumPy struct takes half a microsecond.
        address = q.data.ptr
        if address != self._q:
            self._q = self._pointers[_WORD["q"]] = address
            one["q_aligned"] = self._q_aligned and address % 16 == 0
        if out is not None:
            self._pointers[_WORD["out"]] = out.data.ptr
            if out.strides != self._out_strides:
                self._out_strides = out.strides
                one["out_row"], one["out_head"], one["out_dim"] = (s // out.itemsize for s in out.strides)
        self._launch(stream)


def _describe_cache(one: Any, cache: Any) -> bool:
    """Fills in all that the kernel knows of the caches; whether tensor maps describe them."""
    num_pages, page_size, kv_heads, head_dim = cache.k.shape
    one["num_pages"], one["page_size"] = num_pages, page_size
    one["page_magic"], one["page_shift"] = division(page_size)
    one["granule"] = _granule(cache)
    maps = page_size % SUB == 0 and num_pages < 2**31
    for side, array in (("k", cache.k), ("v", cache.v)):
        one[side] = loader.address(array)
        one[f"{side}_page"], one[f"{side}_token"], one[f"{side}_head"] = array.strides[:3]
        # Where an axis has one element its stride is never taken, and may be anything.
        page, token, head = strides = tuple(
            s if n > 1 else head_dim for n, s in zip(array.shape[:3], array.strides[:3], strict=True)
        )
        maps = maps and can_map(loader.address(array), strides)
        for name, tokens in (("tile", min(TILE, page_size)), ("sub", SUB)):
            if maps:
                one[f"{side}_{name}"] = tensor_map(
                    loader.address(array),
                    (head_dim, page_size, num_pages, kv_heads),
                    (token, page, head),
                    (min(head_dim, 128), tokens, 1, 1),
                )
    return maps


def _granule(cache: Any) -> int:
    """The largest power of two up to 16 that divides every address a token's bytes start at."""
    granule = 16
    for array in (cache.k, cache.v):
        for n, stride in zip((2, *array.shape[:3]), (loader.address(array), *array.strides[:3]), strict=True):
            while n > 1 and stride % granule:
                granule //= 2
    return granule if granule >= 4 else 1
