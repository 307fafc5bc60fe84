"""FP32 logits on the CPU: the head widened to float32 block by block, the products BLAS's."""

from __future__ import annotations

import numpy as np

from corekern.cpu.codec import decode
from corekern.formats import get_format

# Bytes of float32 head at a time: it should stay in the caches from widening to product, and bounds the memory.
BLOCK_BYTES = 8 << 20


def dense(hidden: np.ndarray, lm_head: np.ndarray, out: np.ndarray) -> None:
    """out[...] = hidden @ lm_head.T in float32."""
    # The head as the left operand streams through once. A product into a slice of out would not be BLAS's at all.
    states = np.ascontiguousarray(hidden.T.astype(np.float32))
    block = _rows(lm_head)
    wide = np.empty((min(block, len(lm_head)), lm_head.shape[1]), np.float32)
    for begin in range(0, len(lm_head), block):
        part = lm_head[begin : begin + block]
        out[:, begin : begin + block] = (_widen(part, wide[: len(part)]) @ states).T


def candidates(hidden: np.ndarray, lm_head: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
    """out[row, i] = hidden[row] . lm_head[ids[row, i]] in float32; -inf where there is no such id."""
    states = hidden.astype(np.float32)
    block = _rows(lm_head)
    wide = np.empty((min(block, ids.shape[1]), lm_head.shape[1]), np.float32)
    known = (ids >= 0) & (ids < len(lm_head))
    safe = np.where(known, ids, 0)
    for row, state in enumerate(states):
        for begin in range(0, ids.shape[1], block):
            part = lm_head[safe[row, begin : begin + block]]
            out[row, begin : begin + block] = _widen(part, wide[: len(part)]) @ state
    out[~known] = -np.inf


def _rows(lm_head: np.ndarray) -> int:
    """Rows of the head in a block."""
    return max(1, BLOCK_BYTES // (4 * lm_head.shape[1]))


def _widen(part: np.ndarray, wide: np.ndarray) -> np.ndarray:
    """`part` in float32, exactly, in `wide`."""
    decode(part, wide, get_format(part.dtype), 1.0)
    return wide
