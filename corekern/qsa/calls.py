"""What the QSA backends are given: calls whose arguments have passed their checks.

Arrays are NumPy's or CuPy's, of any strides that the fields allow; nothing here may be a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corekern.cache import PagedKVCache
from corekern.qsa.tuning import Plan
from corekern.routing import AttentionProblem


@dataclass(frozen=True, eq=False)
class CompressCall:
    """Means of complete groups; see `corekern.qsa.compress`."""

    keys: Any
    """(rows, head_dim), last axis contiguous."""
    ring: Any
    """(ring_pages, ring_size, head_dim) of keys' dtype, last axis contiguous."""
    ring_table: Any
    """(requests,) int32, any stride."""
    token_to_request: Any
    """(rows,) int32, any stride; and so below."""
    query_start_loc: Any
    """(requests + 1,) int32."""
    positions: Any
    """(rows,) int32 or int64."""
    compressed_slots: Any
    """(rows,) int32 or int64."""
    compress_ratio: int
    rope_positions: Any = None
    """None, or (rows, 3) int64, any strides."""
    rope_ring: Any = None
    """None, or (ring_pages, ring_size, 3) int64, any strides."""


@dataclass(frozen=True, eq=False)
class SelectCall:
    """Logits of the visible blocks and their top k; see `corekern.qsa.select`."""

    q: Any
    """(rows, index_heads, head_dim) float16 or bfloat16, last axis contiguous."""
    keys: Any
    """(pages, page_size, head_dim) bfloat16, float16, or uint8 that holds E4M3; last axis contiguous."""
    block_table: Any
    """(requests, max_pages) int32, any strides."""
    token_to_request: Any
    """(rows,) int32, any stride."""
    visible_blocks: Any
    """(rows,) int32, any stride."""
    block_topk: int
    scale: float
    """What the sum over heads of relu(q . k) is multiplied by, once, in float32."""
    max_logits_bytes: int

    @property
    def columns(self) -> int:
        """Blocks that the block table has room for."""
        return self.block_table.shape[1] * self.keys.shape[1]


@dataclass(frozen=True, eq=False)
class TopkCall:
    """Exact top k of given logits; see `corekern.qsa.topk`."""

    logits: Any
    """(rows, columns) float32, last axis contiguous."""
    visible_blocks: Any
    """(rows,) int32, any stride."""
    block_topk: int


@dataclass(frozen=True, eq=False)
class ExpandCall:
    """Blocks to packed token indices; see `corekern.qsa.expand`."""

    blocks: Any
    """(rows, block_topk) int32, any strides."""
    positions: Any
    """(rows,) int32 or int64, any stride."""
    visible_blocks: Any
    """(rows,) int32, any stride."""
    compress_ratio: int


@dataclass(frozen=True, eq=False)
class SparseCall:
    """Attention over packed selections; see `corekern.qsa.attention`."""

    problem: AttentionProblem
    """Its `requests` are block_table's rows."""
    q: Any
    """(rows, q_heads, head_dim), last axis contiguous."""
    cache: PagedKVCache
    packed: Any
    """(rows, width + 1) int32, any strides; the last column is the count."""
    block_table: Any
    """(requests, max_pages) int32, any strides."""
    token_to_request: Any
    """(rows,) int32, any stride."""
    gate: Any
    """None, or q's shape and dtype, last axis contiguous."""
    softmax_scale: float
    round_before_gate: bool
    plan: Plan | None
    """None: the backend takes the tuning table's."""
