"""Problems for the tests of sparse attention: selections like a model's, in scattered pages, on any backend."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from helpers import CPU, DTYPES, FP8, LAYOUTS, Backend, place_pages, poison_pages, quantize

import corekern
from corekern import qsa
from corekern.qsa import reference

RATIO = 4


@dataclass(frozen=True)
class Sparse:
    """The arguments of a `qsa.attention` call, on the host. Slots that no row selects may hold anything."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    packed: np.ndarray
    block_table: np.ndarray
    token_to_request: np.ndarray
    gate: np.ndarray | None
    kv_dtype: str
    k_scale: float = 1.0
    v_scale: float = 1.0

    def but(self, **changes) -> Sparse:
        return dataclasses.replace(self, **changes)

    def cache(self, backend: Backend = CPU, layout: str = "interleaved") -> corekern.PagedKVCache:
        k, v, _, _ = place_pages(backend, self.k, self.v, LAYOUTS[layout])
        return corekern.PagedKVCache.from_arrays(
            k, v, dtype=self.kv_dtype, k_scale=self.k_scale, v_scale=self.v_scale
        )

    def arguments(self, backend: Backend, layout: str = "interleaved") -> dict[str, Any]:
        names = ("q", "packed", "block_table", "token_to_request", "gate")
        arrays = {name: getattr(self, name) for name in names}
        return {"cache": self.cache(backend, layout)} | {
            name: None if a is None else backend.asarray(a) for name, a in arrays.items()
        }

    def run(self, backend: Backend, layout: str = "interleaved", **changes) -> np.ndarray:
        return backend.asnumpy(qsa.attention(**(self.arguments(backend, layout) | changes)))

    def rows(self, rows) -> Sparse:
        """The same call for some of its rows, in this order."""
        gate = None if self.gate is None else self.gate[rows]
        return self.but(
            q=self.q[rows], packed=self.packed[rows], token_to_request=self.token_to_request[rows], gate=gate
        )

    def expected(self, **modes) -> np.ndarray:
        return reference.attention(
            self.q, self.cache(), self.packed, self.block_table, self.token_to_request, self.gate, **modes
        )


def make_sparse(
    seed: int,
    *,
    rows: int = 4,
    requests: int = 1,
    q_heads: int = 4,
    kv_heads: int = 1,
    head_dim: int = 64,
    page_size: int = 16,
    pages_per_request: int = 5,
    budget: int = 64,
    q_dtype: str = "bfloat16",
    kv_dtype: str = "fp8_e4m3",
    gated: bool = True,
    unit_scales: bool = False,
    padding: int = 0,
    spare_pages: int = 2,
) -> Sparse:
    """Normal data. Every third request is short, and sees all it has; `padding` rows at the end are nobody's.

    Rows of one request are at consecutive positions, and neighbours share most of their blocks.
    """
    rng = np.random.default_rng(seed)
    num_pages = requests * pages_per_request + spare_pages
    shape = (num_pages, page_size, kv_heads, head_dim)
    stored = []
    for x in (rng.standard_normal(shape, np.float32) for _ in range(2)):
        if kv_dtype in FP8 and not unit_scales:
            stored.append(quantize(x * np.float32(1 + len(stored)), kv_dtype))
        elif kv_dtype in FP8:
            stored.append((x.astype(FP8[kv_dtype]).view(np.uint8), 1.0))
        else:
            stored.append((x.astype(DTYPES[kv_dtype]), 1.0))
    table = rng.permutation(num_pages)[: requests * pages_per_request]
    table = table.reshape(requests, pages_per_request).astype(np.int32)
    starts = np.linspace(0, rows, requests + 1).astype(np.int32)
    lens = np.full(requests, pages_per_request * page_size - 1, np.int32)
    short = np.arange(requests) % 3 == 1
    lens[short] = np.minimum(lens[short], np.diff(starts)[short] + 8)
    request, positions = qsa.row_positions(lens, starts, rows + padding)
    visible = qsa.visible_blocks(positions, RATIO)
    total = pages_per_request * page_size // RATIO
    logits = np.repeat(rng.standard_normal((requests, total), np.float32), np.diff(starts), axis=0)
    logits = np.vstack([logits, np.zeros((padding, total), np.float32)])
    logits += np.float32(0.2) * rng.standard_normal(logits.shape, np.float32)
    blocks = reference.topk(logits, np.minimum(visible, total), budget // RATIO)
    q, gate = rng.standard_normal((2, rows + padding, q_heads, head_dim), np.float32).astype(DTYPES[q_dtype])
    return Sparse(
        q=q,
        k=stored[0][0],
        v=stored[1][0],
        packed=reference.expand(blocks, positions, visible, compress_ratio=RATIO),
        block_table=table,
        token_to_request=request,
        gate=gate if gated else None,
        kv_dtype=kv_dtype,
        k_scale=stored[0][1],
        v_scale=stored[1][1],
    )


def poisoned(problem: Sparse) -> Sparse:
    """NaN in every slot that no row selects."""
    seen = np.zeros(problem.k.shape[:2], bool)
    for row, request in enumerate(problem.token_to_request):
        tokens = problem.packed[row, : problem.packed[row, -1]]
        if request >= 0:
            page_size = problem.k.shape[1]
            seen[problem.block_table[request, tokens // page_size], tokens % page_size] = True
    k, v = (
        np.where(seen[..., None, None], x, poison_pages(x.shape, problem.kv_dtype))
        for x in (problem.k, problem.v)
    )
    return problem.but(k=k, v=v)
