"""Compiling ahead: what a deployment's first requests would otherwise wait for."""

from __future__ import annotations

import numpy as np

from corekern import routing
from corekern.cache import PagedKVCache
from corekern.formats import FORMATS
from corekern.qsa.attention import attention
from corekern.qsa.indexer import select
from corekern.qsa.side_cache import check_count


def warmup(
    *,
    kv_dtype: str = "fp8_e4m3",
    q_dtype: str = "bfloat16",
    q_heads: int = 24,
    kv_heads: int = 2,
    head_dim: int = 256,
    index_dtype: str = "bfloat16",
    index_heads: int = 4,
    index_head_dim: int = 128,
    token_budget: int = 2048,
    compress_ratio: int = 4,
    device: str = "cuda",
) -> int:
    """Compiles every kernel that a deployment can reach, so that no request waits for one.

    Args:
        kv_dtype, q_dtype, index_dtype: formats of the KV cache, of q, and of the compressed keys.
        q_heads, kv_heads, head_dim: heads of this device, after tensor parallelism.
        index_heads, index_head_dim, token_budget, compress_ratio: as `select` takes them.
        device: "cuda" for the current device, or "cpu".

    Returns:
        How many specialisations are now compiled.

    Raises:
        ValueError: a format, an extent or a device that is not allowed.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: {device!r} is not one of cpu, cuda")
    for name, value in (("kv_dtype", kv_dtype), ("q_dtype", q_dtype), ("index_dtype", index_dtype)):
        if value not in FORMATS:
            raise ValueError(f"{name}: {value!r} is not one of {', '.join(FORMATS)}")
    group, left = divmod(check_count(q_heads, "q_heads"), check_count(kv_heads, "kv_heads"))
    if left:
        raise ValueError(f"q_heads: {q_heads} is not a multiple of kv_heads {kv_heads}")
    budget, ratio = check_count(token_budget, "token_budget"), check_count(compress_ratio, "compress_ratio")
    head_dim, index_head_dim = (
        check_count(head_dim, "head_dim"),
        check_count(index_head_dim, "index_head_dim"),
    )
    if device == "cpu":
        return _warm_cpu(kv_dtype, q_dtype, index_dtype, head_dim, index_head_dim)
    return routing.qsa_backend(device).warmup(
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        head_dim=head_dim,
        group=group,
        index_dtype=index_dtype,
        index_heads=check_count(index_heads, "index_heads"),
        index_head_dim=index_head_dim,
        block_topk=budget // ratio,
        compress_ratio=ratio,
    )


def _warm_cpu(kv_dtype: str, q_dtype: str, index_dtype: str, head_dim: int, index_head_dim: int) -> int:
    """numba's kernels depend on formats alone, so that one token's call compiles them (or reads them from disk)."""
    q_value, index_value = FORMATS[q_dtype].value, FORMATS[index_dtype]
    cache = PagedKVCache.empty(1, 1, 1, head_dim, dtype=kv_dtype)
    table, owner, one = np.zeros((1, 1), np.int32), np.zeros(1, np.int32), np.ones(1, np.int32)
    # The count is 0: nothing of the uninitialised page is read.
    attention(np.zeros((1, 1, head_dim), q_value), cache, np.zeros((1, 2), np.int32), table, owner)
    index_q = np.zeros(
        (1, 1, index_head_dim), FORMATS["bfloat16"].value if index_value.is_fp8 else index_value.value
    )
    keys = np.zeros((1, 1, index_head_dim), index_value.storage)
    select(index_q, keys, table, owner, one, token_budget=1, compress_ratio=1)
    return 3  # attention, logits, top k
