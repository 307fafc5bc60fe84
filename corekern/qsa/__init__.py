"""Sparse attention over selected tokens of a paged KV cache: QSA, from raw index keys to gated output.

One decoding step of a layer, in order:

    compress    the mean of every group of 4 raw index keys that this step completes
    select      the blocks (groups) whose compressed keys score highest for a query row
    expand      those blocks' tokens, and the open group's, as packed indices with a count
    attention   softmax attention over these tokens alone, and the output gate

The design is that of Qwen3.8-Flash-Next: compress ratio 4, a budget of 2048 tokens, 4 index heads of 128.
"""

from corekern.qsa.attention import attention, explain_route
from corekern.qsa.indexer import compress, expand, index_logits, select, topk
from corekern.qsa.side_cache import (
    compressed_slots,
    ring_size,
    ring_slots,
    row_positions,
    store,
    visible_blocks,
)
from corekern.qsa.tuning import Plan, choose_plan
from corekern.qsa.warmup import warmup

__all__ = [
    "Plan",
    "attention",
    "choose_plan",
    "compress",
    "compressed_slots",
    "expand",
    "explain_route",
    "index_logits",
    "ring_size",
    "ring_slots",
    "row_positions",
    "select",
    "store",
    "topk",
    "visible_blocks",
    "warmup",
]
