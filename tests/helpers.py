"""What the tests share: array backends, caches in every layout, random problems, and error measures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import corekern
from corekern import reference

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16, "float32": np.dtype(np.float32)}
FP8 = {"fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2)}

PAGE_SIZES = (1, 16, 784, 800, 848, 1568, 1600, 1616, 1648, 1728, 3296, 3456)


# Backends


@dataclass(frozen=True)
class Limits:
    """What a backend is asked to do in tests: more is skipped, with a reason."""

    tokens: int
    """The longest context."""
    elements: int
    """The most elements in one encode or decode."""
    cache_bytes: int
    """The most memory that a cache may take."""
    head_dim: tuple[int, ...]
    group: int
    q_dtype: tuple[str, ...] = ("float16", "bfloat16")


@dataclass(frozen=True)
class Backend:
    """An array library on a device, and how tests move arrays there and back."""

    name: str
    route: str
    """The route that takes an ordinary dense problem here."""
    asarray: Callable[[np.ndarray], Any] = field(repr=False)
    """A copy of a NumPy array on the device."""
    asnumpy: Callable[[Any], np.ndarray] = field(repr=False)
    zeros: Callable[..., Any] = field(repr=False)
    """(shape, dtype) -> zeros, without a pass over them where memory is committed lazily."""
    view: Callable[..., Any] = field(repr=False)
    """(bytes, shape, dtype, strides, offset) -> a view of a device byte array, nothing copied."""
    limits: Limits = field(repr=False)
    forced: bool = False
    """`Problem.run` and `Problem.state` ask for the route by name."""

    def require(self, **needs) -> None:
        """Skips the test if it needs more than the backend's limits."""
        for what, need in needs.items():
            limit = getattr(self.limits, what)
            if not (need in limit if isinstance(limit, tuple) else need <= limit):
                pytest.skip(f"{self.name}: {what} {need} is outside its limit for tests")


CPU = Backend(
    name="cpu",
    route="cpu_fp32",
    asarray=np.array,
    asnumpy=np.asarray,
    zeros=np.zeros,
    view=lambda buffer, shape, dtype, strides, offset: np.ndarray(shape, dtype, buffer, offset, strides),
    limits=Limits(
        tokens=1 << 18,
        elements=10**7,
        cache_bytes=1 << 33,
        head_dim=tuple(range(1, 257)),
        group=64,
        q_dtype=("float16", "bfloat16", "float32"),
    ),
)


def why_no_gpu() -> str | None:
    """Why CUDA tests cannot run here, or None."""
    try:
        import cupy
        import numba.cuda

        cupy.cuda.runtime.getDeviceCount()
        cupy.zeros(1)
    except Exception as error:  # CuPy's own types, or ImportError
        return f"no usable CUDA device: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return None if numba.cuda.is_available() else "numba-cuda finds no CUDA device"


def cuda_backend(forced: str | None = None) -> Backend:
    """CuPy arrays, on the route that takes them or on one asked for by name."""
    import cupy

    def view(buffer, shape, dtype, strides, offset):
        if (buffer.data.ptr + offset) % np.dtype(dtype).itemsize:
            pytest.skip("cuda: refuses elements that are not aligned to their size")
        return cupy.ndarray(shape, dtype, buffer.data + offset, strides)

    def asarray(array):
        if getattr(array, "dtype", None) in FP8.values():
            pytest.skip("cuda: CuPy has no FP8 dtype; codes are uint8 there")
        # CuPy would fill a 0-d array, and a fill with -0 gives +0.
        return cupy.array(np.atleast_1d(array)).reshape(np.shape(array))

    return Backend(
        name="cuda",
        route=forced or "grouped_fp32",
        forced=forced is not None,
        asarray=asarray,
        asnumpy=cupy.asnumpy,
        zeros=cupy.zeros,
        view=view,
        limits=dataclasses.replace(CPU.limits, elements=10**8),
    )


# Bits


def bits(array: np.ndarray) -> np.ndarray:
    """The bit patterns of an array, so that NaN equals NaN and -0 is not 0."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, what: str = "") -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    actual, expected = np.atleast_1d(actual, expected)
    different = np.argwhere(bits(actual) != bits(expected))
    if len(different):
        where = tuple(int(i) for i in different[0])
        pytest.fail(
            f"{what}: {len(different)} of {actual.size} elements differ; at {where} "
            f"{actual[where]!r} is not {expected[where]!r}"
        )


# Layouts


@dataclass(frozen=True)
class Layout:
    """How K and V pages lie in one byte buffer. Strides are multiples of 8, as the largest element asks."""

    interleaved: bool = False
    token_padding: int = 0
    page_padding: int = 0
    offset: int = 0
    heads_first: bool = False


LAYOUTS = {
    "separate": Layout(),
    "interleaved": Layout(interleaved=True),
    "token+8": Layout(token_padding=8),
    "block+8": Layout(page_padding=8),
    "interleaved-token+8-block+8": Layout(interleaved=True, token_padding=8, page_padding=8),
    "offset-2": Layout(offset=2),
    "offset-8": Layout(offset=8),
    "interleaved-offset-14": Layout(interleaved=True, offset=14),
    "heads-first": Layout(heads_first=True),
}


def place(backend: Backend, array: np.ndarray, *, strides=None, offset: int = 0) -> Any:
    """`array` on the backend, at these positive strides and this byte offset, among bytes of 0xFF."""
    strides = strides or np.empty(array.shape, array.dtype).strides
    extent = offset + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True)) + array.itemsize
    buffer = np.full(extent + 64, 0xFF, np.uint8)
    np.ndarray(array.shape, array.dtype, buffer, offset, strides)[...] = array
    return backend.view(backend.asarray(buffer), array.shape, array.dtype, strides, offset)


def place_pages(
    backend: Backend, k: np.ndarray, v: np.ndarray, layout: Layout
) -> tuple[Any, Any, Any, np.ndarray]:
    """K and V pages in one byte buffer, whose gaps hold 0xFF (NaN in every format).

    Returns K, V, the buffer, and which of its bytes (on the host) are K or V.
    """
    pages, page_size, heads, head_dim = k.shape
    row = head_dim * k.itemsize
    if layout.heads_first:
        token = row + layout.token_padding
        head = page_size * token
        block = heads * head
    else:
        head = row
        token = heads * head + layout.token_padding
        block = page_size * token
    page = (2 if layout.interleaved else 1) * (block + layout.page_padding)
    v_begin = layout.offset + (block if layout.interleaved else pages * page)
    strides = (page, token, head, k.itemsize)
    buffer = np.full(layout.offset + 2 * pages * (block + layout.page_padding) + 64, 0xFF, np.uint8)
    used = np.zeros(buffer.shape, bool)
    for array, begin in ((k, layout.offset), (v, v_begin)):
        np.ndarray(k.shape, k.dtype, buffer, begin, strides)[...] = array
        for byte in range(k.itemsize):
            np.ndarray(k.shape, bool, used, begin + byte, strides)[...] = True
    placed = backend.asarray(buffer)
    views = [backend.view(placed, k.shape, k.dtype, strides, begin) for begin in (layout.offset, v_begin)]
    return views[0], views[1], placed, used


# Problems


@dataclass(frozen=True)
class Problem:
    """The arguments of an attention call, on the host. Slots that no row sees hold NaN."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    block_table: np.ndarray
    row_lengths: np.ndarray
    query_start_loc: np.ndarray
    kv_dtype: str = "fp8_e4m3"
    k_scale: float = 1.0
    v_scale: float = 1.0
    softmax_scale: float | None = None

    def but(self, **changes) -> Problem:
        return dataclasses.replace(self, **changes)

    def cache(self, backend: Backend = CPU, layout: str = "separate") -> corekern.PagedKVCache:
        k, v, _, _ = place_pages(backend, self.k, self.v, LAYOUTS[layout])
        return corekern.PagedKVCache.from_arrays(
            k, v, dtype=self.kv_dtype, k_scale=self.k_scale, v_scale=self.v_scale
        )

    def arguments(self, backend: Backend, layout: str = "separate") -> dict[str, Any]:
        return {
            "q": backend.asarray(self.q),
            "cache": self.cache(backend, layout),
            "block_table": backend.asarray(self.block_table),
            "row_lengths": backend.asarray(self.row_lengths),
            "query_start_loc": backend.asarray(self.query_start_loc),
            "softmax_scale": self.softmax_scale,
            "max_query_len": max(1, int(np.diff(self.query_start_loc).max())),
        }

    def run(self, backend: Backend, layout: str = "separate", **changes) -> np.ndarray:
        """The attention output, back on the host."""
        if backend.forced:
            changes = {"route": backend.route, **changes}
        out = corekern.paged_attention(**(self.arguments(backend, layout) | changes))
        return backend.asnumpy(out)

    def state(self, backend: Backend, **changes) -> corekern.PartialState:
        """The partial state, back on the host."""
        if backend.forced:
            changes = {"route": backend.route, **changes}
        state = corekern.partial_attention(**(self.arguments(backend) | changes))
        return corekern.PartialState(
            *(backend.asnumpy(getattr(state, f)) for f in ("numerator", "maximum", "sum"))
        )

    def expected(self) -> np.ndarray:
        """The float64 reference on the same codes."""
        return reference.paged_attention(
            self.q, self.cache(), self.block_table, self.row_lengths, self.query_start_loc,
            softmax_scale=self.softmax_scale,
        )  # fmt: skip

    def expected_state(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return reference.partial_attention(
            self.q, self.cache(), self.block_table, self.row_lengths, self.query_start_loc,
            softmax_scale=self.softmax_scale,
        )  # fmt: skip


def quantize(x: np.ndarray, kv_dtype: str) -> tuple[np.ndarray, float]:
    """Stored elements and their scale, by ml_dtypes; the largest |x| is the format's largest value."""
    if kv_dtype not in FP8:
        return x.astype(DTYPES[kv_dtype]), 1.0
    largest = float(ml_dtypes.finfo(FP8[kv_dtype]).max)
    scale = np.float32(np.abs(x).max() / largest)
    return np.clip(x / scale, -largest, largest).astype(FP8[kv_dtype]).view(np.uint8), float(scale)


def poison_pages(shape: tuple[int, ...], kv_dtype: str) -> np.ndarray:
    """Pages of NaN: 0xFF in every byte is NaN in every format."""
    dtype = np.dtype(np.uint8) if kv_dtype in FP8 else DTYPES[kv_dtype]
    return np.full((*shape[:-1], shape[-1] * dtype.itemsize), 0xFF, np.uint8).view(dtype)


def scatter(tokens: np.ndarray, pages: np.ndarray, page_ids: np.ndarray) -> None:
    """Puts a request's tokens into its pages, in place."""
    page_size = pages.shape[1]
    for i, page in enumerate(page_ids):
        part = tokens[i * page_size : (i + 1) * page_size]
        pages[page, : len(part)] = part


def make_problem(
    seed: int,
    *,
    rows: tuple[int, ...] = (1,),
    seq_lens: tuple[int, ...] = (100,),
    q_heads: int = 1,
    kv_heads: int = 1,
    head_dim: int = 64,
    page_size: int = 16,
    q_dtype: str = "float16",
    kv_dtype: str = "fp8_e4m3",
    extra_rows: int = 0,
    v_bias: np.ndarray | float = 0.0,
) -> Problem:
    """Normal data in scattered pages; request i has rows[i] causal rows at the end of seq_lens[i] tokens.

    `extra_rows` rows belong to nobody. Table entries past a request's pages are -1.
    """
    rng = np.random.default_rng(seed)
    counts = [-(-length // page_size) for length in seq_lens]
    num_pages = sum(counts) + 3
    ids = rng.permutation(num_pages)
    shape = (num_pages, page_size, kv_heads, head_dim)
    tokens = [rng.standard_normal((sum(seq_lens), kv_heads, head_dim), dtype=np.float32) for _ in range(2)]
    tokens[1] += np.float32(v_bias)
    pages, scales = [], []
    for x in tokens:
        stored, scale = quantize(x, kv_dtype)
        array = poison_pages(shape, kv_dtype)
        first_token, first_page = 0, 0
        for length, count in zip(seq_lens, counts, strict=True):
            scatter(stored[first_token : first_token + length], array, ids[first_page : first_page + count])
            first_token, first_page = first_token + length, first_page + count
        pages.append(array)
        scales.append(scale)
    table = np.full((len(seq_lens), max([*counts, 1]) + 1), -1, np.int32)
    first_page = 0
    for request, count in enumerate(counts):
        table[request, :count] = ids[first_page : first_page + count]
        first_page += count
    lengths = [length - n + 1 + i for length, n in zip(seq_lens, rows, strict=True) for i in range(n)]
    lengths += [max(seq_lens)] * extra_rows
    q = rng.standard_normal((len(lengths), q_heads, head_dim), dtype=np.float32)
    return Problem(
        q=q.astype(DTYPES[q_dtype]),
        k=pages[0],
        v=pages[1],
        block_table=table,
        row_lengths=np.array(lengths, np.int32).clip(0),
        query_start_loc=np.cumsum([0, *rows]).astype(np.int32),
        kv_dtype=kv_dtype,
        k_scale=scales[0],
        v_scale=scales[1],
    )


# Errors against the float64 reference

# The contract on the output: nobody can avoid the rounding floor; 2% and 2e-6 are left for arithmetic.
FLOOR_FACTOR = 1.02
ARITHMETIC = 2e-6
# The contract on the state before it is rounded.
STATE = 3e-6


def rel_l2(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected))


def rounding_floor(expected: np.ndarray, dtype) -> float:
    return rel_l2(expected.astype(dtype), expected)


def assert_at_floor(actual: np.ndarray, expected: np.ndarray) -> None:
    """The bound of the FP32-state contract on an output, by the output's own dtype."""
    error, floor = rel_l2(actual, expected), rounding_floor(expected, actual.dtype)
    assert error <= FLOOR_FACTOR * floor + ARITHMETIC, f"rel-L2 {error:.3e}, rounding floor {floor:.3e}"


def state_errors(problem: Problem, state: tuple[np.ndarray, np.ndarray, np.ndarray]) -> tuple[float, float]:
    """rel-L2 of a (numerator, maximum, sum)'s numerator and sum, at the reference's maximum."""
    numerator, maximum, total = state
    n, m, s = problem.expected_state()
    shift = np.exp2(np.where(s > 0, maximum.astype(np.float64) - np.where(s > 0, m, 0), 0))
    return rel_l2(numerator * shift[..., None], n), rel_l2(total * shift, s)


def long_context_state(problem: Problem, chunk: int = 1 << 14) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`reference.partial_attention` of one request in pieces, for contexts whose float64 copy is too large."""
    rows, q_heads, head_dim = problem.q.shape
    cache = problem.cache()
    group = q_heads // cache.kv_heads
    scale = (head_dim**-0.5 if problem.softmax_scale is None else problem.softmax_scale) * math.log2(math.e)
    q = problem.q.astype(np.float64) * scale
    length = int(problem.row_lengths.max())
    numerator = np.zeros((rows, q_heads, head_dim))
    maximum = np.full((rows, q_heads), -np.inf)
    total = np.zeros((rows, q_heads))
    step = chunk // cache.page_size * cache.page_size or cache.page_size
    for begin in range(0, length, step):
        count = min(step, length - begin)
        k, v, seen = reference.gather(cache, problem.block_table[0, begin // cache.page_size :], count)
        assert seen.all()
        visible = begin + np.arange(count) < problem.row_lengths[:, None]
        for head in range(cache.kv_heads):
            mine = slice(head * group, (head + 1) * group)
            # One matrix product for the rows and heads that share keys, for speed alone.
            s = (q[:, mine].reshape(-1, head_dim) @ k[:, head].T).reshape(rows, group, count)
            if not visible.all():
                s[~np.broadcast_to(visible[:, None], s.shape)] = -np.inf
            largest = np.maximum(maximum[:, mine], s.max(-1))
            s -= largest[..., None]
            p = np.exp2(s, out=s)
            past = np.exp2(maximum[:, mine] - largest)
            product = (p.reshape(-1, count) @ v[:, head]).reshape(rows, group, head_dim)
            numerator[:, mine] = numerator[:, mine] * past[..., None] + product
            total[:, mine] = total[:, mine] * past + p.sum(-1)
            maximum[:, mine] = largest
    return numerator, maximum, total
