"""Launching attention of a few query rows on Hopper: `grouped_sm90.cu`.

Called from here alone for now: `routing.ROUTES` does not know it. A plan holds everything a launch needs,
checked and packed, so that a call is one kernel launch: the kernel reads row_lengths, query_start_loc, the
block table and the caches on the device, and combines its own splits.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from corekern.cuda import loader, sources
from corekern.cuda.nvrtc import OPTIONS
from corekern.cuda.tensor_map import can_map, tensor_map

SOURCE = "grouped_sm90.cu"
ENTRY = "grouped_attention"
ARCH = "sm_90a"
SHARED_LIMIT = 232448  # what one block may have on sm_90

# As in grouped_sm90.cu.
FOLD = 8
TILE = 64
SUB = 16
LANES = (8, 16, 24, 32, 48)
HEAD_DIMS = (64, 128, 256)
GROUPS = tuple(range(1, 17))
MAX_ROWS_PER_REQUEST = 16
MAX_REQUESTS = 65535

PARAMS = np.dtype(
    [
        *((name, np.uint64, 16) for name in ("k_tile", "v_tile", "k_sub", "v_sub")),
        *(
            (name, np.uint64)
            for name in ("k", "v", "q", "block_table", "row_lengths", "query_start_loc", "out")
        ),
        *((name, np.uint64) for name in ("state_numerator", "state_maximum", "state_sum")),
        *((name, np.uint64) for name in ("numerators", "maxima", "sums", "arrivals")),
        *((name, np.int64) for name in ("k_page", "k_token", "k_head", "v_page", "v_token", "v_head")),
        *(
            (name, np.int64)
            for name in ("q_row", "q_head", "out_row", "out_head", "table_row", "table_column")
        ),
        *((name, np.int64) for name in ("length_stride", "start_stride", "num_pages")),
        *((name, np.int32) for name in ("page_size", "table_width", "rows", "requests", "group", "q_heads")),
        ("page_magic", np.uint32),
        ("page_shift", np.uint32),
        *(
            (name, np.int32)
            for name in ("granule", "together", "q_aligned", "out_type", "zero_q", "negate_q")
        ),
        ("scale", np.float32),
        ("v_scale", np.float32),
        ("padding", np.uint8, 24),
    ]
)
_OUT_TYPES = {"float16": 0, "bfloat16": 1, "float32": 2}

_modules: dict[tuple, Any] = {}


def supports(problem: Any, compute_capability: str = "90") -> str | None:
    """Why this kernel cannot take an `AttentionProblem`, or None when it can."""
    if problem.device != "cuda":
        return f"arrays are on {problem.device}"
    if compute_capability != "90":
        return f"written for compute capability 9.0, not {compute_capability[:-1]}.{compute_capability[-1]}"
    if problem.head_dim not in HEAD_DIMS:
        return f"head_dim {problem.head_dim} is not one of {HEAD_DIMS}"
    if problem.kv_dtype not in ("fp8_e4m3", "fp8_e5m2"):
        return f"the cache is {problem.kv_dtype}, not FP8"
    if problem.q_dtype not in ("float16", "bfloat16"):
        return f"q is {problem.q_dtype}, not float16 or bfloat16"
    if problem.q_heads // problem.kv_heads not in GROUPS:
        return f"{problem.q_heads // problem.kv_heads} query heads a KV head are more than {GROUPS[-1]}"
    if problem.requests > MAX_REQUESTS:
        return f"{problem.requests} requests are more than {MAX_REQUESTS}"
    if problem.requests == 1 and problem.rows > MAX_ROWS_PER_REQUEST:
        return f"{problem.rows} rows of one request are more than {MAX_ROWS_PER_REQUEST}"
    return None


def lane_blocks(max_rows_per_request: int, group: int) -> tuple[int, int]:
    """(lanes a block, blocks) for the (row, query head) pairs of one request and KV head.

    >>> lane_blocks(8, 6), lane_blocks(1, 6), lane_blocks(16, 4), lane_blocks(16, 16)
    ((48, 1), (8, 1), (32, 2), (48, 6))
    """
    pairs = max_rows_per_request * group
    blocks = -(-pairs // LANES[-1])
    lanes = next(n for n in LANES if n * blocks >= pairs)
    return lanes, blocks


def segments_for(kv_heads: int) -> int:
    """The most segments a row group is cut into: the KV heads of one request share the card's SMs.

    A constant of the model, so that a row's bits depend on its own length alone.

    >>> [segments_for(n) for n in (1, 2, 3, 8, 64)]
    [128, 64, 32, 16, 8]
    """
    return max(FOLD, 1 << (128 // kv_heads).bit_length() - 1)


def workspace_bytes(
    requests: int, kv_heads: int, group: int, head_dim: int, max_rows_per_request: int
) -> tuple[int, int]:
    """Bytes of (partials, arrivals) that a plan needs. Arrivals must be zero, and are zero again after a launch.

    A partial is a float32 numerator, maximum and sum of each lane; there is one for each segment and each eight of them.
    """
    lanes, blocks = lane_blocks(max_rows_per_request, group)
    row_groups = requests * kv_heads * blocks
    segments = segments_for(kv_heads)
    folds = segments // FOLD
    return row_groups * (segments + folds) * lanes * (head_dim + 2) * 4, row_groups * (1 + folds) * 4


@dataclass(frozen=True)
class Plan:
    """One attention call, ready to be launched any number of times; see `plan`."""

    start: Any
    """The driver's launch function."""
    configuration: tuple[int, ...]
    """Its arguments up to the stream: function, grid, block, bytes of shared memory."""
    parameters: tuple[int, ...]
    """Its arguments after the stream: where the kernel's parameters are."""
    current_stream: Any
    out: Any
    kept: tuple
    """What the addresses in the parameters point to."""

    def launch(self) -> Any:
        """Launches on the current stream and returns `out`. Allocates nothing; may be captured.

        Straight to the driver: CuPy's RawKernel takes tens of microseconds to look at the arguments again.
        """
        self.start(*self.configuration, self.current_stream().ptr, *self.parameters)
        return self.out


def plan(
    q: Any,
    cache: Any,
    block_table: Any,
    row_lengths: Any,
    query_start_loc: Any,
    softmax_scale: float,
    *,
    out: Any = None,
    state: tuple[Any, Any, Any] | None = None,
    workspace: tuple[Any, Any] | None = None,
    max_rows_per_request: int | None = None,
) -> Plan:
    """A plan for softmax(q K^T * softmax_scale) V of CuPy arrays that `supports` accepts.

    Args:
        q: (rows, q_heads, head_dim) float16 or bfloat16, last axis contiguous.
        cache: a PagedKVCache in FP8.
        block_table: (requests, max_pages) int32.
        row_lengths: (rows,) int32, read at every launch.
        query_start_loc: (requests + 1,) int32, read at every launch.
        softmax_scale: a finite number.
        out: (rows, q_heads, head_dim) float16, bfloat16 or float32, last axis contiguous; made when None.
        state: float32 C-contiguous (numerator, maximum, sum) to write as well.
        workspace: (partials, arrivals) CuPy arrays of at least `workspace_bytes`; arrivals zero. Made when None.
            Launches that share one must not overlap.
        max_rows_per_request: the most rows any request has at any launch. Rows beyond it come out as NaN. All rows
            when there is one request, else at most 16.

    Raises:
        ValueError: a workspace that is too small.
    """
    cp = loader.cupy()
    rows, q_heads, head_dim = q.shape
    requests = query_start_loc.shape[0] - 1
    num_pages, page_size, kv_heads, _ = cache.k.shape
    group = q_heads // kv_heads
    if max_rows_per_request is None:
        max_rows_per_request = rows if requests == 1 else min(rows, MAX_ROWS_PER_REQUEST)
    lanes, blocks = lane_blocks(max_rows_per_request, group)
    if out is None:
        out = cp.empty(q.shape, q.dtype)
    needed = workspace_bytes(requests, kv_heads, group, head_dim, max_rows_per_request)
    if workspace is None:
        workspace = cp.empty(needed[0], np.uint8), cp.zeros(needed[1], np.uint8)
    for array, need, name in zip(workspace, needed, ("partials", "arrivals"), strict=True):
        if array.nbytes < need:
            raise ValueError(f"workspace: {array.nbytes} bytes of {name} where {need} are needed")

    row_groups = requests * kv_heads * blocks
    partials = loader.address(workspace[0])
    segments = segments_for(kv_heads)
    states = row_groups * (segments + segments // FOLD) * lanes
    grid = (segments, kv_heads * blocks, requests)
    together = math.prod(grid) <= cp.cuda.Device().attributes["MultiProcessorCount"]
    params = np.zeros(1, PARAMS)
    one = params[0]
    maps = page_size % SUB == 0 and num_pages < 2**31
    for side, array in (("k", cache.k), ("v", cache.v)):
        address, strides = loader.address(array), array.strides
        one[side] = address
        one[f"{side}_page"], one[f"{side}_token"], one[f"{side}_head"] = strides[:3]
        # Where an axis has one element its stride is never taken, and may be anything.
        outer = tuple(s if n > 1 else head_dim for n, s in zip(array.shape[:3], strides[:3], strict=True))
        maps = maps and can_map(address, outer)
    if maps:
        row = min(head_dim, 128)
        for side, array in (("k", cache.k), ("v", cache.v)):
            page, token, head = (
                s if n > 1 else head_dim for n, s in zip(array.shape[:3], array.strides[:3], strict=True)
            )
            for name, tokens in (("tile", min(TILE, page_size)), ("sub", SUB)):
                one[f"{side}_{name}"] = tensor_map(
                    loader.address(array),
                    (head_dim, page_size, num_pages, kv_heads),
                    (token, page, head),
                    (row, tokens, 1, 1),
                )
    one["page_magic"], one["page_shift"] = division(page_size)
    one["granule"] = _granule(cache)
    for name, array in (
        ("q", q),
        ("block_table", block_table),
        ("row_lengths", row_lengths),
        ("query_start_loc", query_start_loc),
        ("out", out),
        ("arrivals", workspace[1]),
    ):
        one[name] = loader.address(array)
    if state is not None:
        one["state_numerator"], one["state_maximum"], one["state_sum"] = map(loader.address, state)
    one["numerators"] = partials
    one["maxima"] = partials + states * head_dim * 4
    one["sums"] = partials + states * (head_dim + 1) * 4
    one["together"] = together
    one["q_row"], one["q_head"] = (s // q.itemsize for s in q.strides[:2])
    one["out_row"], one["out_head"] = (s // out.itemsize for s in out.strides[:2])
    one["table_row"], one["table_column"] = (s // 4 for s in block_table.strides)
    one["length_stride"] = row_lengths.strides[0] // 4
    one["start_stride"] = query_start_loc.strides[0] // 4
    one["num_pages"], one["page_size"], one["table_width"] = num_pages, page_size, block_table.shape[1]
    one["rows"], one["requests"], one["group"], one["q_heads"] = rows, requests, group, q_heads
    one["q_aligned"] = loader.address(q) % 16 == 0 and all(
        s % 16 == 0 for n, s in zip(q.shape[:2], q.strides[:2], strict=True) if n > 1
    )
    one["out_type"] = _OUT_TYPES[out.dtype.name]
    scale = np.float32(softmax_scale * cache.k_scale * math.log2(math.e))
    # The kernel takes maxima before it scales, so the sign goes to q; and 0 x infinity must not be NaN.
    one["scale"], one["negate_q"], one["zero_q"] = abs(scale), scale < 0, scale == 0
    one["v_scale"] = cache.v_scale

    choices = {
        "HEAD_DIM": str(head_dim),
        "LANES": str(lanes),
        "FORMAT": cache.format.name,
        "VALUE": q.dtype.name,
        "MAPS": str(int(maps)),
        "SEGMENTS": str(segments),
    }
    from cupy_backends.cuda.api import driver

    pointers = (ctypes.c_void_p * 1)(params.ctypes.data)
    where = ctypes.addressof(pointers)
    function = _kernel(choices).kernel.ptr
    return Plan(
        start=driver.launchCooperativeKernel if together else driver.launchKernel,
        configuration=(function, *grid, threads_of(head_dim), 1, 1, SHARED_LIMIT),
        parameters=(where,) if together else (where, 0),
        current_stream=cp.cuda.get_current_stream,
        out=out,
        kept=(params, pointers, workspace, q, cache, block_table, row_lengths, query_start_loc, state),
    )


def division(divisor: int) -> tuple[int, int]:
    """(magic, shift) such that n // divisor == (2 * n * magic >> 32) >> shift for every n below 2^31.

    With shift = ceil(log2(divisor)), magic * divisor exceeds 2^(31 + shift) by at most divisor (Granlund and Montgomery).
    """
    shift = (divisor - 1).bit_length()
    return (1 << (31 + shift)) // divisor + 1, shift


def threads_of(head_dim: int) -> int:
    """Two warpgroups for the scores, and one for each 128 dims of the values."""
    return 512 if head_dim >= 128 else 384


def defines(choices: dict[str, str]) -> dict[str, str]:
    """The `-D` constants of one specialisation."""
    return {**choices, "SHARED_LIMIT": str(SHARED_LIMIT)}


def _granule(cache: Any) -> int:
    """The largest power of two up to 16 that divides every address a token's bytes start at."""
    granule = 16
    for array in (cache.k, cache.v):
        for n, stride in zip((2, *array.shape[:3]), (loader.address(array), *array.strides[:3]), strict=True):
            while n > 1 and stride % granule:
                granule //= 2
    return granule if granule >= 4 else 1


def _kernel(choices: dict[str, str]) -> Any:
    cp = loader.cupy()
    key = (cp.cuda.runtime.getDevice(), *choices.values())
    found = _modules.get(key)
    if found is None:
        options = (*OPTIONS, f"-arch={ARCH}", *(f"-D{k}={v}" for k, v in defines(choices).items()))
        found = cp.RawModule(code=sources.expand(SOURCE), options=options).get_function(ENTRY)
        found.max_dynamic_shared_size_bytes = SHARED_LIMIT
        _modules[key] = found
    return found
