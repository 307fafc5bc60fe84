"""FP32 logits on the CPU: the head widened to float32 block by block, the products BLAS's."""

from __future__ import annotations

import numpy as np

# Bytes of float32 head at a time: it should stay in the L2 and L3 from widening to product, and bounds the memory.
BLOCK_BYTES = 8 << 20


def dense(hidden: np.ndarray, lm_head: np.ndarray, out: np.ndarray) -> None:
    """out[...] = hidden @ lm_head.T in float32."""
    states = hidden.astype(np.float32)
    block = max(1, BLOCK_BYTES // (4 * lm_head.shape[1]))
    wide = np.empty((min(block, len(lm_head)), lm_head.shape[1]), np.float32)
    for begin in range(0, len(lm_head), block):
        part = lm_head[begin : begin + block]
        columns = wide[: len(part)]
        columns[...] = part
        np.matmul(states, columns.T, out=out[:, begin : begin + len(part)])


def candidates(hidden: np.ndarray, lm_head: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
    """out[row, i] = hidden[row] . lm_head[ids[row, i]] in float32; -inf where there is no such id."""
    states = hidden.astype(np.float32)
    block = max(1, BLOCK_BYTES // (4 * lm_head.shape[1]))
    known = (ids >= 0) & (ids < len(lm_head))
    safe = np.where(known, ids, 0)
    for row, state in enumerate(states):
        for begin in range(0, ids.shape[1], block):
            some = slice(begin, begin + block)
            out[row, some] = lm_head[safe[row, some]].astype(np.float32) @ state
    out[~known] = -np.inf
