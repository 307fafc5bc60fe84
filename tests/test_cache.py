"""Paged caches: what is written where, and what is read back, in every layout.

Nothing here has a tolerance: stored elements are compared as bits, with ml_dtypes as the judge.
"""

import ml_dtypes
import numpy as np
import pytest
from helpers import (
    DTYPES,
    FP8,
    LAYOUTS,
    PAGE_SIZES,
    assert_same_bits,
    bits,
    make_problem,
    place,
    place_pages,
    poison_pages,
    quantize,
)
from hypothesis import given
from hypothesis import strategies as st

import corekern
from corekern import FORMATS, PagedKVCache, reference

KV_DTYPES = (*FP8, *DTYPES)

each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_kv_dtype = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


def stored(x: np.ndarray, kv_dtype: str, scale: float = 1.0) -> np.ndarray:
    """What a cache must hold for x: x / scale in float32, then one rounding by ml_dtypes."""
    with np.errstate(over="ignore", invalid="ignore"):
        quotient = x.astype(np.float32) / np.float32(scale)
        if kv_dtype not in FP8:
            return quotient.astype(DTYPES[kv_dtype])
        largest = np.float32(FORMATS[kv_dtype].max)
        return np.clip(quotient, -largest, largest).astype(FP8[kv_dtype]).view(np.uint8)


def values(elements: np.ndarray, kv_dtype: str, scale: float, out_dtype: str) -> np.ndarray:
    """Values of stored elements: the product in float32, then one rounding."""
    if kv_dtype in FP8:
        elements = elements.view(FP8[kv_dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        return (elements.astype(np.float32) * np.float32(scale)).astype(DTYPES[out_dtype])


def write(backend, cache, k, v, slots) -> None:
    cache.write(backend.asarray(k), backend.asarray(v), backend.asarray(slots))


def gather(backend, cache, table, length, **options):
    return tuple(backend.asnumpy(a) for a in cache.gather(backend.asarray(table), length, **options))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def as_int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


# Making caches


@each_kv_dtype
@pytest.mark.parametrize("layout", ["separate", "interleaved"])
def test_empty(layout, kv_dtype):
    cache = PagedKVCache.empty(5, 3, 2, 8, dtype=kv_dtype, layout=layout, k_scale=0.5, v_scale=2.0)
    assert (cache.num_pages, cache.page_size, cache.kv_heads, cache.head_dim) == (5, 3, 2, 8)
    assert cache.k.shape == cache.v.shape == (5, 3, 2, 8)
    assert cache.k.dtype == cache.v.dtype == FORMATS[kv_dtype].storage
    assert (cache.format.name, cache.k_scale, cache.v_scale) == (kv_dtype, 0.5, 2.0)
    assert cache.bytes_per_token == 2 * 2 * 8 * FORMATS[kv_dtype].itemsize
    block = 3 * 2 * 8 * FORMATS[kv_dtype].itemsize
    assert cache.k.strides[0] == (2 * block if layout == "interleaved" else block)
    if layout == "interleaved":  # each page's K is just before its V
        assert cache.v.ctypes.data - cache.k.ctypes.data == block


def test_empty_pages_do_not_share_memory():
    for layout in ("separate", "interleaved"):
        cache = PagedKVCache.empty(2, 3, 1, 4, layout=layout)
        cache.k[...] = 1
        cache.v[...] = 2
        assert (cache.k == 1).all()


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"num_pages": 0}, "num_pages"),
        ({"page_size": -1}, "page_size"),
        ({"kv_heads": 1.0}, "kv_heads"),
        ({"head_dim": "64"}, "head_dim"),
        ({"dtype": "fp4"}, "dtype"),
        ({"layout": "paged"}, "layout"),
        ({"k_scale": 0.0}, "k_scale"),
        ({"v_scale": float("nan")}, "v_scale"),
    ],
    ids=lambda a: next(iter(a)) if isinstance(a, dict) else a,
)
def test_empty_errors(arguments, argument):
    good = {"num_pages": 2, "page_size": 3, "kv_heads": 1, "head_dim": 4}
    with pytest.raises(ValueError, match=f"^{argument}: ") as error:
        PagedKVCache.empty(**(good | arguments))
    assert "\n" not in str(error.value)


@each_layout
@each_kv_dtype
def test_from_arrays_copies_nothing(backend, layout, kv_dtype):
    k, v, buffer, used = place_pages(
        backend, *(poison_pages((3, 5, 2, 8), kv_dtype) for _ in range(2)), LAYOUTS[layout]
    )
    cache = PagedKVCache.from_arrays(k, v, dtype=kv_dtype)
    assert cache.k.strides == k.strides
    slots = np.arange(15, dtype=np.int32)
    x, y = normal(1, 15, 2, 8), normal(2, 15, 2, 8)
    write(backend, cache, x, y, slots)
    # The arrays that were given hold the tokens, and no other byte of their memory has changed.
    assert_same_bits(backend.asnumpy(k).reshape(15, 2, 8), stored(x, kv_dtype))
    assert_same_bits(backend.asnumpy(v).reshape(15, 2, 8), stored(y, kv_dtype))
    assert (backend.asnumpy(buffer)[~used] == 0xFF).all()


@pytest.mark.parametrize("kv_dtype", FP8)
def test_from_arrays_of_the_ml_dtypes_dtype(backend, kv_dtype):
    k, v = (backend.asarray(np.zeros((2, 3, 1, 4), FP8[kv_dtype])) for _ in range(2))
    cache = PagedKVCache.from_arrays(k, v)
    assert cache.format.name == kv_dtype
    assert cache.k.dtype == np.uint8
    write(backend, cache, *(np.ones((1, 1, 4), np.float32),) * 2, as_int32(4))
    assert_same_bits(backend.asnumpy(k)[1, 1], np.ones((1, 4), FP8[kv_dtype]))


def _error_cases():
    pages = np.zeros((2, 3, 1, 4), np.uint8)
    return {
        "uint8 without a format": (ValueError, "dtype", {"dtype": None}),
        "3-D": (ValueError, "k", {"k": pages[0]}),
        "shapes that differ": (ValueError, "v", {"v": pages[:1]}),
        "dtypes that differ": (TypeError, "v", {"v": pages.astype(np.float16)}),
        "wrong dtype": (TypeError, "k", {"k": pages.astype(np.int32)}),
        "wrong FP8": (TypeError, "k", {"k": pages.view(ml_dtypes.float8_e5m2)}),
        "strided head_dim": (ValueError, "v", {"v": np.zeros((2, 3, 1, 8), np.uint8)[..., ::2]}),
        "no pages": (ValueError, "k", {"k": pages[:0], "v": pages[:0]}),
        "zero scale": (ValueError, "k_scale", {"k_scale": 0}),
        "scale of another type": (TypeError, "v_scale", {"v_scale": "big"}),
        "infinite scale": (ValueError, "v_scale", {"v_scale": np.inf}),
        "scale past float32": (ValueError, "v_scale", {"v_scale": 1e39}),
    }


@pytest.mark.parametrize("case", _error_cases())
def test_from_arrays_errors(backend, case):
    kind, argument, changes = _error_cases()[case]
    pages = np.zeros((2, 3, 1, 4), np.uint8)
    arguments = {"k": pages, "v": pages.copy(), "dtype": "fp8"} | changes
    for name in ("k", "v"):
        array = arguments[name]
        strided = array.strides[-1] != array.itemsize
        arguments[name] = (
            place(backend, array.copy(), strides=array.strides) if strided else backend.asarray(array)
        )
    with pytest.raises(kind, match=f"^{argument}: ") as error:
        PagedKVCache.from_arrays(**arguments)
    assert "\n" not in str(error.value)


# Round trips


@each_layout
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_round_trip_of_each_page_size(backend, page_size, layout):
    kv_dtype, head_dim, pages = "fp8_e4m3", 8, 4
    k, v, buffer, used = place_pages(
        backend, *(poison_pages((pages, page_size, 1, head_dim), kv_dtype) for _ in range(2)), LAYOUTS[layout]
    )
    cache = PagedKVCache.from_arrays(k, v, dtype=kv_dtype, k_scale=0.03, v_scale=1.7)
    table = as_int32(2, 0, 3)
    length = 2 * page_size + -(-page_size // 2)  # the third page is part full
    position = np.arange(length)
    slots = table[position // page_size] * page_size + position % page_size
    x, y = normal(page_size, length, 1, head_dim), normal(page_size + 1, length, 1, head_dim)
    order = np.random.default_rng(page_size).permutation(length)
    write(backend, cache, x[order], y[order], slots[order].astype(np.int64))

    for out_dtype in DTYPES:
        got_k, got_v = gather(backend, cache, table, length, out_dtype=out_dtype)
        assert_same_bits(got_k, values(stored(x, kv_dtype, 0.03), kv_dtype, 0.03, out_dtype))
        assert_same_bits(got_v, values(stored(y, kv_dtype, 1.7), kv_dtype, 1.7, out_dtype))
    # Page 1, the rest of page 3 and the gaps are as they were.
    assert (backend.asnumpy(k)[1] == 0xFF).all()
    assert (backend.asnumpy(v)[3, length - 2 * page_size :] == 0xFF).all()
    assert (backend.asnumpy(buffer)[~used] == 0xFF).all()


@each_layout
@each_kv_dtype
@pytest.mark.parametrize("token_dtype", DTYPES)
def test_round_trip_of_each_format(backend, kv_dtype, token_dtype, layout):
    shape = (3, 7, 2, 16)
    k, v, _, _ = place_pages(backend, *(poison_pages(shape, kv_dtype) for _ in range(2)), LAYOUTS[layout])
    cache = PagedKVCache.from_arrays(k, v, dtype=kv_dtype, k_scale=0.3, v_scale=1.0)
    x, y = (normal(seed, 21, 2, 16).astype(DTYPES[token_dtype]) for seed in (3, 4))
    write(backend, cache, x, y, np.arange(21, dtype=np.int32))
    assert_same_bits(backend.asnumpy(cache.k).reshape(21, 2, 16), stored(x, kv_dtype, 0.3))
    assert_same_bits(backend.asnumpy(cache.v).reshape(21, 2, 16), stored(y, kv_dtype))
    got_k, got_v = gather(backend, cache, as_int32(0, 1, 2), 21)
    assert_same_bits(got_k, values(stored(x, kv_dtype, 0.3), kv_dtype, 0.3, "float32"))
    assert_same_bits(got_v, values(stored(y, kv_dtype), kv_dtype, 1.0, "float32"))


def test_token_stride_of_264_bytes(backend):
    # One KV head of 256 in tokens padded to 264 bytes, as caches with a per-token trailer have them.
    k, v, _, _ = place_pages(
        backend, *(poison_pages((2, 800, 1, 256), "fp8_e4m3") for _ in range(2)), LAYOUTS["token+8"]
    )
    assert k.strides == (800 * 264, 264, 256, 1)
    cache = PagedKVCache.from_arrays(k, v, dtype="fp8")
    x = normal(5, 1600, 1, 256)
    write(backend, cache, x, -x, np.arange(1600, dtype=np.int32))
    got_k, got_v = gather(backend, cache, as_int32(1, 0), 1600)
    expected = values(stored(x, "fp8_e4m3"), "fp8_e4m3", 1.0, "float32")
    assert_same_bits(got_k, np.concatenate([expected[800:], expected[:800]]))
    assert_same_bits(got_v, -got_k)


@pytest.mark.parametrize("kv_dtype", FP8)
def test_fp8_saturates_and_keeps_nan(backend, kv_dtype):
    cache = make_problem(1, head_dim=8, kv_dtype=kv_dtype).but(k_scale=1.0).cache(backend)
    x = np.float32([[[1e9, -1e9, np.inf, -np.inf, np.nan, -np.nan, -0.0, 0.0]]])
    write(backend, cache, x, x, as_int32(3))
    got, _ = gather(backend, cache, as_int32(0), 4)
    largest = np.float32(FORMATS[kv_dtype].max)
    expected = np.float32([largest, -largest, largest, -largest, np.nan, -np.nan, -0.0, 0.0])
    assert_same_bits(got[3, 0], expected)


# Slots


def _three_tokens(backend, slots):
    pages = np.zeros((2, 4, 1, 8), np.uint8)
    k, v = backend.asarray(pages), backend.asarray(pages)
    cache = PagedKVCache.from_arrays(k, v, dtype="fp8")
    x = np.float32([1, 2, 3]).repeat(8).reshape(3, 1, 8)
    write(backend, cache, x, x, slots)
    return backend.asnumpy(k).reshape(8, 8)[:, 0].view(FP8["fp8_e4m3"]).astype(float).tolist()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([0, 4, 7], [1, 0, 0, 0, 2, 0, 0, 3]),
        ([-1, 4, -1], [0, 0, 0, 0, 2, 0, 0, 0]),
        ([-1, -1, -(2**31)], [0] * 8),
        ([5, 5, 2], [0, 0, 3, 0, 0, 2, 0, 0]),
        ([5, 1, 5], [0, 2, 0, 0, 0, 3, 0, 0]),
        ([6, 6, 6], [0, 0, 0, 0, 0, 0, 3, 0]),
        ([6, 6, -1], [0, 0, 0, 0, 0, 0, 2, 0]),
    ],
    ids=str,
)
def test_slots(backend, slots, expected, dtype):
    assert _three_tokens(backend, np.array(slots, dtype)) == expected


def test_the_last_of_many_duplicates_is_kept(backend):
    # Enough tokens for any parallel writer to race.
    pages = np.zeros((2, 4, 1, 16), np.uint8)
    cache = PagedKVCache.from_arrays(backend.asarray(pages), backend.asarray(pages), dtype="fp8")
    tokens = 5000
    slots = np.random.default_rng(6).integers(0, 8, tokens, np.int32)
    x = normal(7, tokens, 1, 16)
    write(backend, cache, x, -x, slots)
    last = [np.flatnonzero(slots == slot)[-1] for slot in range(8)]
    assert_same_bits(backend.asnumpy(cache.k).reshape(8, 1, 16), stored(x[last], "fp8_e4m3"))
    assert_same_bits(backend.asnumpy(cache.v).reshape(8, 1, 16), stored(-x[last], "fp8_e4m3"))


@pytest.mark.parametrize("past", [8, 9, 2**31 - 1, 2**40])
def test_a_slot_past_the_end_writes_nothing(backend, past):
    pages = np.full((2, 4, 1, 8), 0xAA, np.uint8)
    k, v = backend.asarray(pages), backend.asarray(pages)
    cache = PagedKVCache.from_arrays(k, v, dtype="fp8")
    x = np.ones((3, 1, 8), np.float32)
    with pytest.raises(
        ValueError, match=rf"^slot_mapping: slot {past} of token 1 is past the cache's 8 slots$"
    ):
        write(backend, cache, x, x, np.array([0, past, 1], np.int64))
    assert (backend.asnumpy(k) == 0xAA).all()
    assert (backend.asnumpy(v) == 0xAA).all()


def test_no_tokens(backend):
    pages = np.full((2, 4, 1, 8), 0xAA, np.uint8)
    cache = PagedKVCache.from_arrays(backend.asarray(pages), backend.asarray(pages), dtype="fp8")
    nothing = np.zeros((0, 1, 8), np.float16)
    write(backend, cache, nothing, nothing, np.zeros(0, np.int32))
    assert (backend.asnumpy(cache.k) == 0xAA).all()


def _write_error_cases():
    tokens = np.ones((3, 1, 8), np.float32)
    return {
        "tokens of another head_dim": (ValueError, "k", {"k": tokens[..., :4]}),
        "tokens of another count": (ValueError, "v", {"v": tokens[:2]}),
        "float64 tokens": (TypeError, "k", {"k": tokens.astype(np.float64)}),
        "uint8 tokens": (TypeError, "v", {"v": tokens.astype(np.uint8)}),
        "too few slots": (ValueError, "slot_mapping", {"slot_mapping": as_int32(0, 1)}),
        "uint32 slots": (TypeError, "slot_mapping", {"slot_mapping": np.zeros(3, np.uint32)}),
        "2-D slots": (ValueError, "slot_mapping", {"slot_mapping": np.zeros((3, 1), np.int32)}),
    }


@pytest.mark.parametrize("case", _write_error_cases())
def test_write_errors(backend, case):
    kind, argument, changes = _write_error_cases()[case]
    pages = np.full((2, 4, 1, 8), 0xAA, np.uint8)
    cache = PagedKVCache.from_arrays(backend.asarray(pages), backend.asarray(pages), dtype="fp8")
    good = np.ones((3, 1, 8), np.float32)
    arguments = {"k": good, "v": good, "slot_mapping": as_int32(0, 1, 2)} | changes
    with pytest.raises(kind, match=f"^{argument}: ") as error:
        cache.write(**{name: backend.asarray(a) for name, a in arguments.items()})
    assert "\n" not in str(error.value)
    assert (backend.asnumpy(cache.k) == 0xAA).all()
    assert (backend.asnumpy(cache.v) == 0xAA).all()


@pytest.mark.parametrize("which", ["k", "v"])
def test_read_only_pages_are_refused_before_either_is_written(which):
    arrays = {name: np.zeros((2, 4, 1, 8), np.uint8) for name in ("k", "v")}
    arrays[which].flags.writeable = False
    cache = PagedKVCache.from_arrays(**arrays, dtype="fp8")
    ones = np.ones((1, 1, 8), np.float32)
    with pytest.raises(ValueError, match=rf"^cache\.{which}: is read-only$"):
        cache.write(ones, ones, as_int32(0))
    assert not arrays["k"].any()
    assert not arrays["v"].any()


# Gathering


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 40])
@pytest.mark.parametrize("pad_to", [1, 16, 64])
def test_padding_is_zero(backend, length, pad_to):
    # Slots that no token has are NaN here, so a zero is a written one.
    problem = make_problem(8, seq_lens=(40,), page_size=10, head_dim=8, kv_heads=2, q_heads=2)
    cache = problem.cache(backend)
    for got, pages, scale in zip(
        gather(backend, cache, problem.block_table[0], length, pad_to=pad_to),
        (problem.k, problem.v),
        (problem.k_scale, problem.v_scale),
        strict=True,
    ):
        assert got.shape == (-(-length // pad_to) * pad_to, 2, 8)
        tokens = pages[problem.block_table[0, :4]].reshape(40, 2, 8)[:length]
        assert_same_bits(got[:length], values(tokens, "fp8_e4m3", scale, "float32"))
        assert not bits(got[length:]).any()


@pytest.mark.parametrize("page", [-1, -7, 4, 65536, 2**31 - 1, -(2**31)])
def test_page_ids_outside_the_cache(backend, page, monkeypatch):
    pages = np.full((4, 4, 1, 8), 0x38, np.uint8)  # 1.0
    cache = PagedKVCache.from_arrays(backend.asarray(pages), backend.asarray(pages), dtype="fp8")
    table = as_int32(1, page, 2)
    for got in gather(backend, cache, table, 10, validate=False):
        assert (got[:4] == 1).all()
        assert not bits(got[4:8]).any()
        assert (got[8:] == 1).all()
    message = rf"^block_table: entry 1 is page {page}, outside \[0, 4\)$"
    with pytest.raises(ValueError, match=message):
        gather(backend, cache, table, 10, validate=True)
    gather(backend, cache, table, 4, validate=True)  # the entry is not used
    monkeypatch.setenv("COREKERN_VALIDATE", "1")
    with pytest.raises(ValueError, match=message):
        gather(backend, cache, table, 10)
    monkeypatch.setenv("COREKERN_VALIDATE", "0")
    gather(backend, cache, table, 10)


@pytest.mark.parametrize(
    ("changes", "kind", "argument"),
    [
        ({"length": 9}, ValueError, "length"),
        ({"length": -1}, ValueError, "length"),
        ({"length": 2.0}, ValueError, "length"),
        ({"pad_to": 0}, ValueError, "pad_to"),
        ({"out_dtype": "float64"}, ValueError, "out_dtype"),
        ({"out_dtype": "fp8_e4m3"}, ValueError, "out_dtype"),
        ({"block_table": np.zeros((1, 2), np.int32)}, ValueError, "block_table"),
        ({"block_table": np.zeros(2, np.int64)}, TypeError, "block_table"),
    ],
    ids=lambda a: "-".join(str(v) for v in a) if isinstance(a, dict) else None,
)
def test_gather_errors(backend, changes, kind, argument):
    pages = backend.asarray(np.zeros((2, 4, 1, 8), np.uint8))
    cache = PagedKVCache.from_arrays(pages, pages, dtype="fp8")
    arguments = {"block_table": as_int32(0, 1), "length": 3} | changes
    arguments["block_table"] = backend.asarray(arguments["block_table"])
    with pytest.raises(kind, match=f"^{argument}: ") as error:
        cache.gather(**arguments)
    assert "\n" not in str(error.value)


# Properties


@st.composite
def cache_shapes(draw):
    extent = lambda most: draw(st.integers(1, most))  # noqa: E731
    return extent(4), extent(20), extent(3), extent(40)


@given(data=st.data(), shape=cache_shapes(), layout=st.sampled_from(sorted(LAYOUTS)))
def test_writing_follows_a_list_of_slots(backend, data, shape, layout):
    pages, page_size, heads, head_dim = shape
    slots = data.draw(st.lists(st.integers(-3, pages * page_size - 1), max_size=30))
    x, y = normal(9, len(slots), heads, head_dim), normal(10, len(slots), heads, head_dim)
    k, v, buffer, used = place_pages(
        backend, *(poison_pages(shape, "fp8_e4m3") for _ in range(2)), LAYOUTS[layout]
    )
    cache = PagedKVCache.from_arrays(k, v, dtype="fp8", k_scale=0.01, v_scale=0.02)
    write(backend, cache, x, y, np.array(slots, np.int64))
    for placed, tokens, scale in ((k, x, 0.01), (v, y, 0.02)):
        expected = np.full((pages * page_size, heads, head_dim), 0xFF, np.uint8)
        for slot, token in zip(slots, stored(tokens, "fp8_e4m3", scale), strict=True):
            if slot >= 0:
                expected[slot] = token
        assert_same_bits(backend.asnumpy(placed).reshape(expected.shape), expected)
    assert (backend.asnumpy(buffer)[~used] == 0xFF).all()


@given(data=st.data(), shape=cache_shapes(), layout=st.sampled_from(sorted(LAYOUTS)))
def test_gathering_follows_a_list_of_pages(backend, data, shape, layout):
    pages, page_size, heads, head_dim = shape
    table = data.draw(st.lists(st.integers(-2, pages + 1), min_size=1, max_size=6))
    length = data.draw(st.integers(0, len(table) * page_size))
    pad_to = data.draw(st.sampled_from([1, 3, 16]))
    codes = np.random.default_rng(11).integers(0, 256, (2, *shape), np.uint8)
    k, v, _, _ = place_pages(backend, *codes, LAYOUTS[layout])
    cache = PagedKVCache.from_arrays(k, v, dtype="fp8", k_scale=0.01, v_scale=0.02)
    for got, elements, scale in zip(
        gather(backend, cache, np.array(table, np.int32), length, pad_to=pad_to),
        codes,
        (0.01, 0.02),
        strict=True,
    ):
        expected = np.zeros((-(-length // pad_to) * pad_to, heads, head_dim), np.float32)
        decoded = values(elements, "fp8_e4m3", scale, "float32")
        for token in range(length):
            page = table[token // page_size]
            if 0 <= page < pages:
                expected[token] = decoded[page, token % page_size]
        assert_same_bits(got, expected)


# Caches past 32 bits


@pytest.mark.slow
def test_a_cache_of_more_than_2_to_the_31_elements(backend):
    # 16 x 8 x 256 elements a page: page 65,536 begins at element 2^31. Memory is committed as it is touched.
    shape = (70_000, 16, 8, 256)
    assert np.prod(shape, dtype=np.int64) > 2**31
    backend.require(cache_bytes=2 * 70_000 * 16 * 8 * 256)
    k, v = (backend.zeros(shape, np.uint8) for _ in range(2))
    cache = PagedKVCache.from_arrays(k, v, dtype="fp8", k_scale=0.01, v_scale=0.01)
    table = as_int32(69_999, 3, 65_536, 65_535, 4463)  # 65,536 + 4463 = 69,999: ids cut to 16 bits collide
    length = 16 * len(table) - 5
    position = np.arange(length)
    slots = table[position // 16].astype(np.int64) * 16 + position % 16
    x, y = normal(12, length, 8, 256), normal(13, length, 8, 256)
    write(backend, cache, x, y, slots)
    for placed, tokens in ((k, x), (v, y)):
        expected = stored(tokens, "fp8_e4m3", 0.01)
        for i, page in enumerate(table.tolist()):
            part = expected[16 * i : 16 * (i + 1)]
            assert_same_bits(backend.asnumpy(placed[page])[: len(part)], part)
        assert not backend.asnumpy(placed[:2]).any()  # where offsets that wrap around would land
        assert not backend.asnumpy(placed[65_537:65_539]).any()
    got_k, got_v = gather(backend, cache, table, length)
    assert_same_bits(got_k, values(stored(x, "fp8_e4m3", 0.01), "fp8_e4m3", 0.01, "float32"))
    assert_same_bits(got_v, values(stored(y, "fp8_e4m3", 0.01), "fp8_e4m3", 0.01, "float32"))

    # Attention reads the same tokens there as from a cache of five pages.
    small = PagedKVCache.from_arrays(
        *(backend.asarray(np.stack([backend.asnumpy(a[page]) for page in table.tolist()])) for a in (k, v)),
        dtype="fp8",
        k_scale=0.01,
        v_scale=0.01,
    )
    q = backend.asarray(normal(14, 2, 16, 256).astype(np.float16))
    rest = (backend.asarray(as_int32(length - 1, length)), backend.asarray(as_int32(0, 2)))
    large_out = corekern.paged_attention(q, cache, backend.asarray(table[None]), *rest)
    small_table = backend.asarray(np.arange(5, dtype=np.int32)[None])
    small_out = corekern.paged_attention(q, small, small_table, *rest)
    assert backend.asnumpy(small_out).any()
    assert_same_bits(backend.asnumpy(large_out), backend.asnumpy(small_out))


def test_the_quantizer_of_the_tests_agrees_with_the_cache(backend):
    # `quantize` makes the pages of the attention tests; it must be what `write` would have stored.
    for kv_dtype in FP8:
        x = normal(15, 20, 1, 8)
        codes, scale = quantize(x, kv_dtype)
        pages = np.zeros((1, 20, 1, 8), np.uint8)
        cache = PagedKVCache.from_arrays(
            backend.asarray(pages), backend.asarray(pages), dtype=kv_dtype, k_scale=scale
        )
        write(backend, cache, x, x, np.arange(20, dtype=np.int32))
        assert_same_bits(backend.asnumpy(cache.k)[0], codes)
        np.testing.assert_array_equal(
            reference.gather(cache, as_int32(0), 20)[0], reference.decode(codes, kv_dtype, scale)
        )
