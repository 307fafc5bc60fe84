"""The judge: float64 oracles in NumPy, slow and obvious.

Each function takes what its public counterpart takes and returns float64.
"""

from __future__ import annotations

import numpy as np

from corekern.cache import PagedKVCache
from corekern.formats import Format, get_format


def decode(codes: np.ndarray, dtype: str | Format, scale: float = 1.0) -> np.ndarray:
    """Values of FP8 codes from the definition of the format: sign, exponent, mantissa."""
    fmt = get_format(dtype)
    mantissa_bits, bias = (3, 7) if fmt.name == "fp8_e4m3" else (2, 15)
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = (code & ((1 << mantissa_bits) - 1)) / 2.0**mantissa_bits
    value = np.where(
        exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent.astype(float) - bias)
    )
    value = sign * value
    if fmt.has_infinity:
        value[(code & 0x7F) == 0x7C] *= np.inf
        value[(code & 0x7F) > 0x7C] = np.nan
    else:
        value[(code & 0x7F) == 0x7F] = np.nan
    return value[codes.view(np.uint8)] * scale


def encode(x: np.ndarray, dtype: str | Format, overflow: str = "saturate") -> np.ndarray:
    """Codes of the values nearest to x in float64, ties to the even code: a search, not bit arithmetic."""
    fmt = get_format(dtype)
    values = decode(np.arange(0x80, dtype=np.uint8), fmt)
    largest = int(np.flatnonzero(values == fmt.max)[0])
    finite = values[: largest + 1]
    x = np.asarray(x, np.float64)
    magnitude = np.abs(x)
    above = np.clip(np.searchsorted(finite, magnitude), 1, largest)
    below = above - 1
    to_below, to_above = magnitude - finite[below], finite[above] - magnitude
    code = np.where((to_below < to_above) | ((to_below == to_above) & (below % 2 == 0)), below, above)
    # What would come after the largest finite value if the exponent went on, and the tie before it.
    tie = fmt.max + (finite[-1] - finite[-2]) / 2
    past = magnitude > tie if largest % 2 == 0 else magnitude >= tie
    code = np.where(past, largest if overflow == "saturate" else largest + 1, code)
    code = np.where(np.isnan(x), 0x7F if fmt.name == "fp8_e4m3" else 0x7E, code)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def gather(cache: PagedKVCache, block_table: np.ndarray, length: int):
    """A request's K and V, (tokens, kv_heads, head_dim), and which of the tokens have a page."""
    position = np.arange(length)
    page = block_table[position // cache.page_size].astype(np.int64)
    seen = (page >= 0) & (page < cache.num_pages)
    page = np.where(seen, page, 0)
    k, v = (pages[page, position % cache.page_size] for pages in (cache.k, cache.v))
    if cache.format.is_fp8:
        return decode(k, cache.format, cache.k_scale), decode(v, cache.format, cache.v_scale), seen
    return k.astype(np.float64) * cache.k_scale, v.astype(np.float64) * cache.v_scale, seen


def paged_attention(
    q: np.ndarray,
    cache: PagedKVCache,
    block_table: np.ndarray,
    row_lengths: np.ndarray,
    query_start_loc: np.ndarray,
    *,
    softmax_scale: float | None = None,
) -> np.ndarray:
    """As `corekern.paged_attention`, in float64 on the same codes."""
    numerator, _, total = partial_attention(
        q, cache, block_table, row_lengths, query_start_loc, softmax_scale=softmax_scale
    )
    return np.divide(numerator, total[..., None], out=np.zeros_like(numerator), where=total[..., None] != 0)


def partial_attention(
    q: np.ndarray,
    cache: PagedKVCache,
    block_table: np.ndarray,
    row_lengths: np.ndarray,
    query_start_loc: np.ndarray,
    *,
    softmax_scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numerator, maximum (base 2) and sum of each row, as in `corekern.PartialState`, in float64."""
    rows, q_heads, head_dim = q.shape
    group = q_heads // cache.kv_heads
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    numerator = np.zeros((rows, q_heads, head_dim))
    maximum = np.full((rows, q_heads), -np.inf)
    total = np.zeros((rows, q_heads))
    for request in range(len(query_start_loc) - 1):
        begin, end = query_start_loc[request], query_start_loc[request + 1]
        if begin == end:
            continue
        capacity = block_table.shape[1] * cache.page_size
        lengths = np.clip(row_lengths[begin:end], 0, capacity)
        k, v, seen = gather(cache, block_table[request], int(lengths.max()))
        for row, length in zip(range(begin, end), lengths, strict=True):
            tokens = np.flatnonzero(seen[:length])
            if not len(tokens):
                continue
            for head in range(q_heads):
                s = k[tokens, head // group] @ q[row, head].astype(np.float64) * scale * np.log2(np.e)
                p = np.exp2(s - s.max())
                maximum[row, head] = s.max()
                total[row, head] = p.sum()
                numerator[row, head] = p @ v[tokens, head // group]
    return numerator, maximum, total
