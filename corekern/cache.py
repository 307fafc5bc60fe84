"""The paged KV cache: K and V pages as strided views, their format, and one scale each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from corekern import arrays, routing
from corekern.formats import Format, get_format

LAYOUTS = ("separate", "interleaved")


@dataclass(frozen=True, eq=False)
class PagedKVCache:
    """K and V pages of one layer. Make one with `empty` or `from_arrays`.

    A token's slot is page * page_size + offset. A stored element stands for code * scale.
    """

    k: Any
    """(num_pages, page_size, kv_heads, head_dim) in the format's storage dtype (uint8 for FP8); last axis
    contiguous, every other stride arbitrary."""
    v: Any
    """Like k; may interleave with it in memory."""
    format: Format
    k_scale: float = 1.0
    v_scale: float = 1.0

    @classmethod
    def empty(
        cls,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: str | Format = "fp8_e4m3",
        layout: str = "separate",
        device: str = "cpu",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> PagedKVCache:
        """A cache of uninitialised pages.

        Args:
            num_pages, page_size, kv_heads, head_dim: extents, each at least 1; page_size is in tokens.
            dtype: "fp8_e4m3", "fp8_e5m2", "float16", "bfloat16" or "float32".
            layout: "separate" puts K and V in two arrays, "interleaved" each page's K before its V in one.
            device: "cpu" for NumPy arrays, "cuda" for CuPy arrays on the current device.
            k_scale, v_scale: finite numbers above 0.

        Raises:
            ValueError: an extent, format, layout, device or scale that is not allowed.

        >>> PagedKVCache.empty(4, 16, 1, 256).bytes_per_token
        512
        """
        fmt = get_format(dtype)
        for name, extent in (
            ("num_pages", num_pages),
            ("page_size", page_size),
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
        ):
            if not isinstance(extent, (int, np.integer)) or extent < 1:
                raise ValueError(f"{name}: {extent!r} is not an integer of at least 1")
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device: {device!r} is not one of cpu, cuda")
        xp = arrays.namespace(device)
        if layout == "separate":
            k, v = (xp.empty((num_pages, page_size, kv_heads, head_dim), fmt.storage) for _ in range(2))
        elif layout == "interleaved":
            both = xp.empty((num_pages, 2, page_size, kv_heads, head_dim), fmt.storage)
            k, v = both[:, 0], both[:, 1]
        else:
            raise ValueError(f"layout: {layout!r} is not one of {', '.join(LAYOUTS)}")
        return cls.from_arrays(k, v, dtype=fmt, k_scale=k_scale, v_scale=v_scale)

    @classmethod
    def from_arrays(
        cls,
        k: Any,
        v: Any,
        *,
        dtype: str | Format | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> PagedKVCache:
        """A cache over pages that exist already; nothing is copied.

        Args:
            k, v: (num_pages, page_size, kv_heads, head_dim), the same shape and dtype, last axis
                contiguous, every other stride arbitrary. FP8 as uint8 or as its ml_dtypes dtype.
            dtype: the format. May be left out unless the arrays are uint8.
            k_scale, v_scale: finite numbers above 0.

        Raises:
            TypeError: k or v is no array of the format's dtype.
            ValueError: shapes differ or are not 4-D, the last axis is not contiguous, a bad scale.
        """
        k, v = arrays.adopt(k, "k"), arrays.adopt(v, "v")
        arrays.check_same_device(k=k, v=v)
        arrays.check_array(k, "k", shape=("pages", "page_size", "kv_heads", "head_dim"), contiguous_last=True)
        if dtype is None and k.dtype == np.uint8:
            raise ValueError("dtype: uint8 pages need it; use fp8_e4m3 or fp8_e5m2")
        fmt = get_format(k.dtype if dtype is None else dtype)
        allowed = tuple({fmt.storage, fmt.value})
        arrays.check_array(k, "k", dtypes=allowed)
        arrays.check_array(v, "v", shape=k.shape, dtypes=allowed, contiguous_last=True)
        if 0 in k.shape:
            raise ValueError(f"k: shape {k.shape} has an empty axis")
        return cls(
            k=k.view(fmt.storage),
            v=v.view(fmt.storage),
            format=fmt,
            k_scale=arrays.check_scale(k_scale, "k_scale"),
            v_scale=arrays.check_scale(v_scale, "v_scale"),
        )

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:<index>"."""
        return arrays.device_of(self.k)

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.k.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's K and V take in this layer, padding between tokens not counted."""
        return 2 * self.kv_heads * self.head_dim * self.format.itemsize

    def write(self, k: Any, v: Any, slot_mapping: Any, *, validate: bool | None = None) -> None:
        """Stores tokens: element = x / scale, rounded once to the format; FP8 saturates.

        Args:
            k, v: (tokens, kv_heads, head_dim) float16, bfloat16 or float32, last axis contiguous.
            slot_mapping: (tokens,) int32 or int64. A negative slot skips its token, as for padded rows;
                of tokens with the same slot, the last is kept.
            validate: on a GPU, wait for the slots and raise for one past the end, which is otherwise
                skipped. On the CPU that is always checked. None reads COREKERN_VALIDATE.

        Raises:
            TypeError: a dtype that is not allowed.
            ValueError: a shape that does not fit, read-only pages, or a slot past the end; nothing is
                written then.
        """
        shape = (self.kv_heads, self.head_dim)
        k, v = arrays.adopt(k, "k"), arrays.adopt(v, "v")
        slot_mapping = arrays.adopt(slot_mapping, "slot_mapping")
        device = arrays.check_same_device(cache=self.k, k=k, v=v, slot_mapping=slot_mapping)
        arrays.check_array(k, "k", shape=("tokens", *shape), dtypes=arrays.FLOATS, contiguous_last=True)
        arrays.check_array(v, "v", shape=k.shape, dtypes=arrays.FLOATS, contiguous_last=True)
        integers = (np.dtype(np.int32), np.dtype(np.int64))
        arrays.check_array(slot_mapping, "slot_mapping", shape=k.shape[:1], dtypes=integers)
        arrays.check_array(self.k, "cache.k", writeable=True)
        arrays.check_array(self.v, "cache.v", writeable=True)
        if device == "cpu" or arrays.should_validate(validate):
            self._check_slots(arrays.to_host(slot_mapping))
        routing.storage_backend(device).write_cache(self, k, v, slot_mapping)

    def gather(
        self,
        block_table: Any,
        length: int,
        *,
        pad_to: int = 1,
        out_dtype: Any = np.float32,
        validate: bool | None = None,
    ) -> tuple[Any, Any]:
        """The values of a request's tokens, contiguous: the bridge from pages to ordinary arrays.

        Args:
            block_table: (max_pages,) int32, the request's pages in order.
            length: tokens to gather, at most max_pages * page_size.
            pad_to: the first axis is padded with zeros to a multiple of this (16 for tensor cores).
            out_dtype: float16, bfloat16 or float32; value = code * scale in float32, rounded once.
            validate: raise for a page id outside [0, num_pages), whose tokens are otherwise zero.

        Returns:
            k and v, each (padded length, kv_heads, head_dim).

        Raises:
            TypeError, ValueError: an argument that is not as above.
        """
        table = arrays.adopt(block_table, "block_table")
        device = arrays.check_same_device(cache=self.k, block_table=table)
        arrays.check_array(table, "block_table", shape=("max_pages",), dtypes=(np.dtype(np.int32),))
        capacity = table.shape[0] * self.page_size
        if not isinstance(length, (int, np.integer)) or not 0 <= length <= capacity:
            raise ValueError(
                f"length: {length!r} is not an integer in [0, {capacity}], the block table's tokens"
            )
        if not isinstance(pad_to, (int, np.integer)) or pad_to < 1:
            raise ValueError(f"pad_to: {pad_to!r} is not an integer of at least 1")
        if arrays.should_validate(validate):
            used = arrays.to_host(table)[: -(-length // self.page_size)]
            bad = np.flatnonzero((used < 0) | (used >= self.num_pages))
            if len(bad):
                raise ValueError(
                    f"block_table: entry {bad[0]} is page {used[bad[0]]}, outside [0, {self.num_pages})"
                )
        shape = (-(-length // pad_to) * pad_to, self.kv_heads, self.head_dim)
        dtype = arrays.float_dtype(out_dtype, "out_dtype")
        k, v = (arrays.namespace(device).empty(shape, dtype) for _ in range(2))
        routing.storage_backend(device).gather_cache(self, table, int(length), k, v)
        return arrays.give_back(k, block_table), arrays.give_back(v, block_table)

    def _check_slots(self, slot_mapping: np.ndarray) -> None:
        slots = self.num_pages * self.page_size
        if len(slot_mapping) and (last := int(slot_mapping.max())) >= slots:
            token = int(slot_mapping.argmax())
            raise ValueError(f"slot_mapping: slot {last} of token {token} is past the cache's {slots} slots")
