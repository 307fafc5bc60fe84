"""Attention over FP8 (E4M3) paged KV caches, with FP32 state."""

from corekern.attention import (
    AttentionPlan,
    causal_row_lengths,
    explain_route,
    finalize,
    merge_states,
    paged_attention,
    partial_attention,
    plan_attention,
)
from corekern.cache import PagedKVCache
from corekern.codec import calibrate_scale, decode, encode
from corekern.evidence import RouteSummary, route_summary
from corekern.formats import FORMATS, Format, get_format, resolve_kv_dtype
from corekern.logits import candidate_logits, dense_logits, model_defaults, resolve_fp32_logits
from corekern.routing import route_counts
from corekern.state import PartialState
from corekern.workspace import reserve

__version__ = "0.1.0"

# What the arithmetic promises. A compiled bundle of an older revision is refused.
PRECISION_REVISION = 4

__all__ = [
    "FORMATS",
    "PRECISION_REVISION",
    "AttentionPlan",
    "Format",
    "PagedKVCache",
    "PartialState",
    "RouteSummary",
    "__version__",
    "calibrate_scale",
    "candidate_logits",
    "causal_row_lengths",
    "decode",
    "dense_logits",
    "encode",
    "explain_route",
    "finalize",
    "get_format",
    "merge_states",
    "model_defaults",
    "paged_attention",
    "partial_attention",
    "plan_attention",
    "reserve",
    "resolve_fp32_logits",
    "resolve_kv_dtype",
    "route_counts",
    "route_summary",
]
