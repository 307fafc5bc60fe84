"""FP8 encode and decode and paged caches on a GPU: what only a device has, and what only it is asked.

The contract tests of test_codec.py and test_cache.py run over every backend; here are streams, graphs, sizes
past 32 bits, and more patterns than a CPU cares to go through. Everything goes through the public functions
and is compared bit for bit with the CPU backend.
"""

import numpy as np
import pytest
import test_codec
from helpers import CPU, DTYPES, FP8, PAGE_SIZES, assert_same_bits, place

import corekern
from corekern import PagedKVCache

pytestmark = pytest.mark.gpu


def _why_not() -> str | None:
    """Why there is no GPU to test on, or None."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not installed ({error})"
    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "there is no CUDA device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device can be used ({error})"


if reason := _why_not():
    pytest.skip(reason, allow_module_level=True)

import cupy  # noqa: E402
from helpers import cuda_backend  # noqa: E402

CUDA = cuda_backend()


def same_as_cpu(x, *arguments, **options) -> None:
    """The codes of a device array are the CPU's for the same values."""
    codes = corekern.encode(x, *arguments, **options)
    assert_same_bits(codes.get(), corekern.encode(x.get(), *arguments, **options))


# Every pattern


@pytest.mark.parametrize("scale", [1.0, 0.0137, 2.0**-130, 3e38], ids=str)
@pytest.mark.parametrize("overflow", ["saturate", "nan"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fmt", FP8)
def test_every_16_bit_pattern_as_the_cpu(fmt, dtype, overflow, scale):
    x = cupy.arange(1 << 16, dtype=cupy.uint16).view(DTYPES[dtype])
    same_as_cpu(x, fmt, scale, overflow=overflow)


@pytest.mark.slow
@pytest.mark.parametrize("overflow", ["saturate", "nan"])
@pytest.mark.parametrize("fmt", FP8)
def test_a_hundred_million_float32_patterns_as_the_cpu(fmt, overflow):
    for seed in range(4):
        patterns = np.random.default_rng(seed).integers(0, 1 << 32, 25_000_000, np.uint32)
        same_as_cpu(cupy.asarray(patterns).view(np.float32), fmt, overflow=overflow)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0137, 1 / 3, 2 - 2.0**-23, 1e-40, 3e38], ids=str)
@pytest.mark.parametrize("fmt", FP8)
def test_random_float32_patterns_with_a_scale_as_the_cpu(fmt, scale):
    rng = np.random.default_rng(5)
    patterns = rng.integers(0, 1 << 32, 10_000_000, np.uint32).view(np.float32)
    with np.errstate(over="ignore"):
        ordinary = (rng.standard_normal(10_000_000) * 30 * scale).astype(np.float32)
    same_as_cpu(cupy.asarray(np.concatenate([patterns, ordinary])), fmt, scale)


@pytest.mark.parametrize("fmt", FP8)
def test_float64_patterns_as_the_cpu(fmt):
    rng = np.random.default_rng(6)
    patterns = rng.integers(0, 1 << 64, 1_000_000, np.uint64).view(np.float64)
    ordinary = rng.standard_normal(1_000_000) * 10.0 ** rng.integers(-8, 5, 1_000_000)
    for scale in (1.0, 0.0137, 1e-40):
        same_as_cpu(cupy.asarray(np.concatenate([patterns, ordinary])), fmt, scale)


@pytest.mark.parametrize("scale", [1.0, 0.0137, 1e-40, 1e30], ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("fmt", FP8)
def test_every_code_decodes_as_on_the_cpu(fmt, out_dtype, scale):
    # Twice, so that the codes fill vectors in both phases, and with a tail.
    codes = np.concatenate([np.arange(256), np.arange(256)[::-1], [127]]).astype(np.uint8)
    values = corekern.decode(cupy.asarray(codes), fmt, scale, out_dtype=out_dtype)
    assert_same_bits(values.get(), corekern.decode(codes, fmt, scale, out_dtype=out_dtype))


# Sizes


@pytest.mark.parametrize("size", [1, 3, 8, 255, 2047, 2048, 2049, 4096, 1_000_003])
@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_any_size_leaves_its_neighbours_alone(dtype, size):
    x = cupy.asarray(np.random.default_rng(7).standard_normal(size).astype(test_codec.np_dtype(dtype)))
    for offset in (0, 1, 16):
        buffer = cupy.full(size + 64, 0xAB, cupy.uint8)
        corekern.encode(x, out=buffer[offset : offset + size])
        expected = np.full(size + 64, 0xAB, np.uint8)
        expected[offset : offset + size] = corekern.encode(x.get())
        assert_same_bits(buffer.get(), expected)


@pytest.mark.slow
def test_an_array_of_more_than_2_to_the_32_elements():
    size = (1 << 32) + 5
    if cupy.cuda.runtime.memGetInfo()[0] < 5 * size:
        pytest.skip("needs 20 GiB of free device memory")
    x = cupy.zeros(size, np.float16)
    x[-9:] = cupy.asarray(np.arange(9, dtype=np.float16))
    codes = corekern.encode(x)
    assert_same_bits(codes[-9:].get(), corekern.encode(np.arange(9, dtype=np.float16)))
    assert not codes[:-9].any()
    # The same again by the strided kernels, which cut their walk below 2^31 items.
    codes[...] = 0xFF
    corekern.encode(x[1:], out=codes[1:])
    assert_same_bits(codes[-9:].get(), corekern.encode(np.arange(9, dtype=np.float16)))
    assert not codes[1:-9].any()


# Caches


@pytest.mark.parametrize("kv_dtype", [*FP8, *DTYPES])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_cache_holds_what_the_cpu_would_store(page_size, kv_dtype):
    rng = np.random.default_rng(page_size)
    dtype = np.dtype(np.uint8) if kv_dtype in FP8 else DTYPES[kv_dtype]
    both = np.full((3, 2, page_size, 2, 64 * dtype.itemsize), 0x5A, np.uint8).view(dtype)
    tokens = 2 * page_size
    x, y = (rng.standard_normal((tokens, 2, 64), dtype=np.float32) for _ in range(2))
    slots = rng.permutation(3 * page_size)[:tokens]
    stored = []
    for backend in (CPU, CUDA):
        pages = backend.asarray(both)
        cache = PagedKVCache.from_arrays(pages[:, 0], pages[:, 1], dtype=kv_dtype, k_scale=0.3)
        cache.write(*(backend.asarray(a) for a in (x, y, slots)))
        stored.append(backend.asnumpy(pages))
    assert_same_bits(stored[1], stored[0])


@pytest.mark.parametrize("offset", [2, 8, 14])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_that_start_at_any_byte_an_element_can(dtype, offset):
    x = np.random.default_rng(8).standard_normal((20, 2, 128)).astype(DTYPES[dtype])
    k = place(CUDA, x, offset=offset)
    cache = PagedKVCache.empty(5, 4, 2, 128, device="cuda")
    cache.write(k, k, cupy.arange(20))
    expected = corekern.encode(x)
    assert_same_bits(cache.k.get().reshape(x.shape), expected)
    assert_same_bits(cache.v.get().reshape(x.shape), expected)


def test_slots_past_the_end_are_skipped_on_the_device():
    for dtype in (np.int32, np.int64):
        cache = PagedKVCache.empty(2, 4, 1, 8, device="cuda")
        cache.k[...] = cache.v[...] = 0xAA
        slots = np.array([8, np.iinfo(dtype).max, 1, np.iinfo(dtype).min, 9], dtype)
        ones = cupy.ones((5, 1, 8), np.float16)
        cache.write(ones, ones, cupy.asarray(slots))
        for pages in (cache.k.get(), cache.v.get()):
            rows = pages.reshape(8, 8)
            assert (rows[1] == 0x38).all()
            assert (np.delete(rows, 1, 0) == 0xAA).all()


@pytest.mark.parametrize("tokens", [2, 64, 257, 5000, 100_000])
def test_the_last_duplicate_is_kept_in_every_run(tokens):
    rng = np.random.default_rng(tokens)
    slots = rng.integers(-1, 64, tokens, np.int32)
    x = rng.standard_normal((tokens, 1, 64), dtype=np.float32)
    last = {int(slot): token for token, slot in enumerate(slots) if slot >= 0}
    expected = np.zeros((64, 1, 64), np.uint8)
    for slot, token in last.items():
        expected[slot] = corekern.encode(x[token])
    device = [cupy.asarray(a) for a in (x, slots)]
    for _ in range(20):
        cache = PagedKVCache.from_arrays(
            *(cupy.zeros((4, 16, 1, 64), np.uint8) for _ in range(2)), dtype="fp8"
        )
        cache.write(device[0], device[0], device[1])
        assert_same_bits(cache.k.get().reshape(expected.shape), expected)
        assert_same_bits(cache.v.get().reshape(expected.shape), expected)


@pytest.mark.slow
def test_a_cache_past_32_bits():
    # Page 65,536 begins at element 2^31, and ids cut to 16 bits would collide.
    shape = (70_000, 16, 8, 256)
    if cupy.cuda.runtime.memGetInfo()[0] < 3 * np.prod(shape, dtype=np.int64):
        pytest.skip("needs 7 GiB of free device memory")
    k, v = (cupy.zeros(shape, np.uint8) for _ in range(2))
    cache = PagedKVCache.from_arrays(k, v, dtype="fp8", k_scale=0.01, v_scale=0.02)
    table = np.array([69_999, 3, 65_536, 65_535, 4463], np.int32)
    length = 16 * len(table) - 5
    position = np.arange(length)
    slots = table[position // 16].astype(np.int64) * 16 + position % 16
    x, y = (np.random.default_rng(s).standard_normal((length, 8, 256), dtype=np.float32) for s in (9, 10))
    cache.write(cupy.asarray(x), cupy.asarray(y), cupy.asarray(slots))
    for pages, tokens, scale in ((k, x, 0.01), (v, y, 0.02)):
        expected = corekern.encode(tokens, scale=scale)
        for i, page in enumerate(table):
            part = expected[16 * i : 16 * (i + 1)]
            assert_same_bits(pages[int(page)].get()[: len(part)], part)
        pages[cupy.asarray(table)] = 0
        assert not pages.any()  # where offsets that wrap around would have landed
    cache.write(cupy.asarray(x), cupy.asarray(y), cupy.asarray(slots))
    got = cache.gather(cupy.asarray(table), length)
    for values, tokens, scale in zip(got, (x, y), (0.01, 0.02), strict=True):
        assert_same_bits(values.get(), corekern.decode(corekern.encode(tokens, scale=scale), scale=scale))


# Streams and graphs


def test_a_graph_replays_with_changed_data():
    rng = np.random.default_rng(11)
    cache = PagedKVCache.from_arrays(*(cupy.zeros((8, 16, 2, 64), np.uint8) for _ in range(2)), dtype="fp8")
    x = cupy.zeros((32, 2, 64), np.float16)
    slots = cupy.zeros(32, np.int32)
    codes = cupy.zeros(x.shape, np.uint8)
    values = cupy.zeros(x.shape, np.float16)

    def work():
        corekern.encode(x, out=codes, scale=0.5)
        corekern.decode(codes, out=values, scale=0.5)
        cache.write(x, x, slots)

    work()  # compiles
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        work()
        graph = stream.end_capture()
    for _ in range(3):
        tokens = rng.standard_normal(x.shape).astype(np.float16)
        places = rng.integers(-2, 128, 32).astype(np.int32)
        x.set(tokens)
        slots.set(places)
        cache.k[...] = 0
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expected = corekern.encode(tokens, scale=0.5)
        assert_same_bits(codes.get(), expected)
        assert_same_bits(values.get(), corekern.decode(expected, scale=0.5, out_dtype=np.float16))
        stored = np.zeros((128, 2, 64), np.uint8)
        for slot, code in zip(places, corekern.encode(tokens), strict=True):
            if slot >= 0:
                stored[slot] = code
        assert_same_bits(cache.k.get().reshape(stored.shape), stored)


def test_launches_are_on_the_current_stream():
    # A slow copy on the stream precedes the encode, which must wait for it.
    stream = cupy.cuda.Stream(non_blocking=True)
    source = cupy.ones(1 << 26, np.float32)
    x = cupy.zeros_like(source)
    codes = cupy.zeros(source.shape, np.uint8)
    corekern.encode(x, out=codes)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(20):
            x[...] = source
        corekern.encode(x, out=codes)
        stream.synchronize()
    assert (codes == 0x38).all()


def test_nothing_is_allocated_when_outputs_are_given():
    x = cupy.ones((64, 2, 64), np.float16)
    codes, values = cupy.zeros(x.shape, np.uint8), cupy.zeros(x.shape, np.float32)
    cache = PagedKVCache.empty(4, 16, 2, 64, device="cuda")
    slots = cupy.arange(64)

    def work():
        corekern.encode(x, out=codes)
        corekern.decode(codes, out=values)
        cache.write(x, x, slots)

    work()

    class Refuse(cupy.cuda.MemoryHook):
        name = "refuse"

        def malloc_preprocess(self, **_):
            raise AssertionError("memory was allocated")

    with Refuse():
        work()
