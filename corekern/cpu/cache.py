"""Writing to and reading from paged caches on the CPU."""

from __future__ import annotations

import numpy as np

from corekern.cpu.codec import decode, encode


def write_cache(cache, k: np.ndarray, v: np.ndarray, slot_mapping: np.ndarray) -> None:
    """Stores k and v at the slots that are not negative; of tokens with one slot, the last wins."""
    tokens = np.flatnonzero(slot_mapping >= 0)
    page, offset = np.divmod(slot_mapping[tokens].astype(np.int64), cache.page_size)
    for source, pages, scale in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        new = source[tokens]
        if cache.format.is_fp8:
            codes = np.empty(new.shape, np.uint8)
            encode(new, codes, cache.format, scale, saturate=True)
            pages[page, offset] = codes
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                pages[page, offset] = (
                    new if scale == 1.0 else new.astype(np.float32) / np.float32(scale)
                ).astype(pages.dtype)


def gather_cache(cache, pages: np.ndarray, length: int, k_out: np.ndarray, v_out: np.ndarray) -> None:
    """k_out, v_out[:length] = the values of the first `length` tokens of a page list; zero beyond."""
    position = np.arange(length)
    page = pages[position // cache.page_size].astype(np.int64)
    seen = (page >= 0) & (page < cache.num_pages)
    offset = position % cache.page_size
    for source, out, scale in ((cache.k, k_out, cache.k_scale), (cache.v, v_out, cache.v_scale)):
        out[...] = 0
        stored = source[page[seen], offset[seen]]
        values = np.empty(stored.shape, out.dtype)
        if cache.format.is_fp8:
            decode(stored, values, cache.format, scale)
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                values[...] = (stored.astype(np.float32) * np.float32(scale)).astype(out.dtype)
        out[np.flatnonzero(seen)] = values
