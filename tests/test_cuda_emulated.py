"""The CUDA kernels' own sources and launchers, run on the CPU: bits, bounds and indices without a GPU.

`corekern.cuda.emulate` compiles the sources with g++. The contract tests of the codec and of the caches run
over it as over any backend, and tests of what only these kernels have follow.
"""

import ctypes
import inspect
import mmap
import os

import numpy as np
import pytest
import test_cache
import test_codec
from helpers import CPU, DTYPES, FP8, assert_same_bits
from hypothesis import given
from hypothesis import strategies as st

import corekern.cuda
from corekern import FORMATS, PagedKVCache, reference, routing
from corekern.cuda import cache, codec, emulate, loader, sources, walk

if emulate.compiler() is None:
    pytest.skip("emulating CUDA kernels needs g++", allow_module_level=True)

# Without and with FP8 conversion instructions. The cache kernels convert with the same header as the codec's
# and differ in nothing else between architectures, so one is enough for their tests.
ARCHITECTURES = {"sm_70": 700, "sm_90": 900}
ONE_ARCHITECTURE = {"test_cache"}

# These are about the CPU backend's own threads.
NOT_OURS = {"test_the_number_of_threads_changes_no_bit"}


def _contract_tests(*modules) -> dict:
    return {
        name: function
        for module in modules
        for name, function in vars(module).items()
        if name.startswith("test_") and "backend" in inspect.signature(function).parameters
    }


globals().update({n: f for n, f in _contract_tests(test_codec, test_cache).items() if n not in NOT_OURS})


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        names = ["sm_70"] if metafunc.function.__module__ in ONE_ARCHITECTURE else list(ARCHITECTURES)
        metafunc.parametrize("backend", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def backend(request):
    """NumPy arrays, stored by emulated kernels of one architecture."""
    arch = ARCHITECTURES[request.param]
    launched = []

    def kernel(source, entry, **choices):
        launched.append(entry)
        return emulate.kernel(source, entry, arch=arch, **choices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "address", lambda array: array.ctypes.data)
        patch.setattr(loader, "kernel", kernel)
        patch.setattr(routing, "storage_backend", lambda device: corekern.cuda)
        yield CPU
    assert launched, "no test of this module launched an emulated kernel"


# Division by reciprocal


def _boundaries(fmt: str) -> np.ndarray:
    """Every finite value, every tie, and values around the end of the range, as float64."""
    values = test_codec.finite_values(fmt)
    return np.concatenate([values, test_codec.ties(fmt), 2.0 ** np.arange(15, 23)])


HARD_SCALES = {
    "smallest subnormal": 2.0**-149,
    "subnormal": 3e-42,
    "smallest normal": 2.0**-126,
    "below the reciprocal's range": float(np.nextafter(np.float32(2.0**-85), np.float32(0))),
    "start of the reciprocal's range": 2.0**-85,
    "end of the reciprocal's range": 2.0**126,
    "above the reciprocal's range": float(np.nextafter(np.float32(2.0**126), np.float32(np.inf))),
    "largest": float(np.finfo(np.float32).max),
    "just below 1": 1 - 2.0**-24,
    "just above 1": 1 + 2.0**-23,
    "mantissa of all ones": 2 - 2.0**-23,
    "a third": 1 / 3,
}


def _check_around_boundaries(fmt: str, scale: np.float32, as_array: bool) -> None:
    """Codes of the seven floats around scale x boundary, which is where a wrong last bit changes a code."""
    with np.errstate(all="ignore"):
        near = (_boundaries(fmt) * np.float64(scale)).astype(np.float32)
        around = near.view(np.uint32).astype(np.int64)[:, None] + np.arange(-3, 4)
        x = around.clip(0, 0x7F800000).astype(np.uint32).view(np.float32).reshape(-1)
        x = np.concatenate([x, -x])
        expected = reference.encode(x / scale, fmt, "nan")
    codes = np.empty(x.shape, np.uint8)
    given_scale = np.broadcast_to(scale, x.shape) if as_array else float(scale)
    corekern.cuda.encode(x, codes, FORMATS[fmt], given_scale, False)
    assert_same_bits(codes, expected, f"scale {scale!r}")


@pytest.mark.parametrize("as_array", [False, True], ids=["number", "array"])
@pytest.mark.parametrize("scale", HARD_SCALES)
@pytest.mark.parametrize("fmt", FP8)
def test_quotients_for_hard_scales(backend, fmt, scale, as_array):
    _check_around_boundaries(fmt, np.float32(HARD_SCALES[scale]), as_array)


@pytest.mark.parametrize("fmt", FP8)
def test_quotients_for_any_scale(backend, fmt):
    # Every exponent and a random mantissa: the positive floats' bit patterns, uniformly.
    patterns = np.random.default_rng(1).integers(1, 0x7F800000, 1000, np.uint32)
    for scale in patterns.view(np.float32):
        _check_around_boundaries(fmt, scale, as_array=False)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0137, 1 / 3, 2 - 2.0**-23, 1 + 2.0**-23], ids=str)
def test_quotients_of_every_mantissa(backend, scale):
    # All floats of the binade at 32 x scale, against IEEE division in NumPy.
    scale = np.float32(scale)
    first = int((scale * 32).view(np.uint32)) & ~0x7FFFFF
    x = np.arange(first, first + (1 << 23), dtype=np.uint32).view(np.float32)
    codes = np.empty(x.shape, np.uint8)
    corekern.cuda.encode(x, codes, FORMATS["fp8_e4m3"], float(scale), True)
    assert_same_bits(codes, (x / scale).astype(FP8["fp8_e4m3"]).view(np.uint8))


# Walking strided arrays


@given(data=st.data())
def test_merged_axes_visit_the_same_elements(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=7)))
    order = data.draw(st.permutations(range(len(shape))))
    strides = [
        np.empty(shape).strides,
        np.empty([shape[i] for i in order]).transpose(np.argsort(order)).strides,
        tuple(data.draw(st.sampled_from([0, 1])) * s for s in np.empty(shape).strides),
    ]
    strides = [tuple(s // 8 for s in steps) for steps in strides]
    axes = walk.merge_axes(shape, *strides)

    def visited(shape, strides):
        places = np.indices(shape).reshape(len(shape), -1)
        return sorted(zip(*(np.array(s, int) @ places for s in strides), strict=True))

    assert visited(axes.shape, list(zip(*axes.strides, strict=True))) == visited(shape, strides)


@pytest.mark.parametrize("most", [7, 64, 1000])
@pytest.mark.parametrize("layout", ["contiguous", "padded", "scattered", "eight axes"])
def test_long_walks_are_split(backend, monkeypatch, layout, most):
    # As arrays of more than 2^31 vectors would be.
    monkeypatch.setattr(walk, "MAX_ITEMS", most)
    rng = np.random.default_rng(2)
    if layout == "eight axes":
        buffer = rng.standard_normal((3,) * 8, dtype=np.float32)
        x = buffer[::2, :2, ::2, :2, ::2, :2, ::2, :2]
    else:
        buffer = rng.standard_normal((40, 3, 52), dtype=np.float32)
        x = {"contiguous": buffer[:, :, :], "padded": buffer[:, :2, :48], "scattered": buffer[::2, :, ::3]}[
            layout
        ]
    scale = rng.uniform(0.5, 2, x.shape[:1] + (1,) * (x.ndim - 1)).astype(np.float32)
    codes = np.empty(x.shape, np.uint8)
    corekern.cuda.encode(x, codes, FORMATS["fp8_e4m3"], np.broadcast_to(scale, x.shape), True)
    assert_same_bits(codes, reference.encode(x / scale, "fp8_e4m3"))
    values = np.empty_like(x)
    corekern.cuda.decode(codes, values, FORMATS["fp8_e4m3"], np.broadcast_to(scale, x.shape))
    assert_same_bits(values, codes.view(FP8["fp8_e4m3"]).astype(np.float32) * scale)


def test_padded_rows_take_vectors(backend):
    # What the fast paths are for; without this they could rot unnoticed.
    buffer = np.zeros((6, 2, 264), np.float16)
    for x, entry in (
        (buffer, "encode_flat"),
        (buffer[:, :, :256], "encode_rows"),
        (buffer[:, :, 8:], "encode_rows"),
        (buffer[:, :, 1:257], "encode_any"),
        (buffer[:, :, :256:2], "encode_any"),
    ):
        launched = []
        kernel = loader.kernel
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                loader,
                "kernel",
                lambda s, e, seen=launched, make=kernel, **c: (seen.append(e), make(s, e, **c))[1],
            )
            corekern.cuda.encode(x, np.empty(x.shape, np.uint8), FORMATS["fp8_e4m3"], 1.0, True)
        assert launched == [entry]


# Caches


@pytest.mark.parametrize("head_dim", [64, 12], ids=["vectors", "elements"])
def test_keys_and_values_of_different_dtypes(backend, head_dim):
    pages = np.zeros((3, 4, 2, head_dim), np.uint8)
    paged = PagedKVCache.from_arrays(pages, pages.copy(), dtype="fp8", k_scale=0.5, v_scale=0.25)
    rng = np.random.default_rng(3)
    x, y = (rng.standard_normal((5, 2, head_dim), dtype=np.float32) for _ in range(2))
    x = x.astype(DTYPES["bfloat16"])
    slots = np.array([11, 0, 3, 0, -1])
    paged.write(x, y, slots)
    for stored, tokens, scale in ((paged.k, x, 0.5), (paged.v, y, 0.25)):
        stored = stored.reshape(12, 2, head_dim)
        expected = reference.encode(tokens.astype(np.float32) / np.float32(scale), "fp8_e4m3")
        assert_same_bits(stored[[11, 3, 0]], expected[[0, 2, 3]])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_slots_past_the_end_are_skipped(backend, dtype):
    # On a device nobody reads the slots first.
    k, v = (np.full((2, 4, 1, 8), 0xAA, np.uint8) for _ in range(2))
    paged = PagedKVCache.from_arrays(k, v, dtype="fp8")
    ones = np.ones((5, 1, 8), np.float16)
    slots = np.array([8, np.iinfo(dtype).max, 1, np.iinfo(dtype).min, 9], dtype)
    corekern.cuda.write_cache(paged, ones, ones, slots)
    for pages in (k, v):
        rows = pages.reshape(8, 8)
        assert (rows[1] == 0x38).all()
        assert (np.delete(rows, 1, 0) == 0xAA).all()


@pytest.mark.parametrize("tokens", [1, 2, 255, 256, 257, 3000])
def test_duplicates_in_any_number_of_blocks(backend, monkeypatch, tokens):
    monkeypatch.setattr(cache, "WRITE_BLOCKS", 5)  # so that blocks hold up to 256 tokens
    slots = np.random.default_rng(tokens).integers(-2, tokens // 3 + 2, tokens)[::-1]  # a strided mapping
    x = np.random.default_rng(4).standard_normal((tokens, 1, 16), dtype=np.float32)
    k, v = (np.full((tokens // 3 + 2, 1, 1, 16), 0xFF, np.uint8) for _ in range(2))
    corekern.cuda.write_cache(PagedKVCache.from_arrays(k, v, dtype="fp8"), x, -x, slots)
    expected = np.full(k.shape, 0xFF, np.uint8)
    for token, slot in zip(reference.encode(x, "fp8_e4m3"), slots, strict=True):
        if slot >= 0:
            expected[slot, 0] = token
    assert_same_bits(k, expected)
    assert_same_bits(v, np.where(expected == 0xFF, expected, expected ^ 0x80))


# Never an access outside the arrays


def _before_a_forbidden_page(array: np.ndarray, alignment: int) -> np.ndarray:
    """A copy that ends as close before unreadable memory as its alignment allows."""
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    buffer = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    prot_none = 0  # <sys/mman.h>
    forbidden = ctypes.c_void_p(buffer.ctypes.data + size)
    assert ctypes.CDLL(None).mprotect(forbidden, mmap.PAGESIZE, prot_none) == 0
    start = (size - array.nbytes) // alignment * alignment
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _touch_ends_of_arrays() -> None:
    rng = np.random.default_rng(5)
    fmt = FORMATS["fp8_e4m3"]
    for alignment in (16, 4):  # vectors, elements
        for n in (1, 7, 8, 1000, 4096 * 4 + 3):
            x = _before_a_forbidden_page(rng.standard_normal(n, dtype=np.float32), alignment)
            codes = _before_a_forbidden_page(np.zeros(n, np.uint8), alignment)
            corekern.cuda.encode(x, codes, fmt, 0.5, True)
            values = _before_a_forbidden_page(np.zeros(n, np.float16), alignment)
            corekern.cuda.decode(codes, values, fmt, 0.5)
        for rows in (1, 5):
            x = _before_a_forbidden_page(rng.standard_normal((rows, 24), dtype=np.float32), alignment)
            codes = _before_a_forbidden_page(np.zeros((rows, 16), np.uint8), alignment)
            corekern.cuda.encode(x[:, 4:20], codes, fmt, 0.5, True)
        for head_dim in (64, 13):
            pages = np.zeros((3, 5, 2, head_dim), np.uint8)
            k, v = (_before_a_forbidden_page(pages, alignment) for _ in range(2))
            paged = PagedKVCache.from_arrays(k, v, dtype="fp8")
            tokens = rng.standard_normal((15, 2, head_dim), dtype=np.float32)
            tokens = _before_a_forbidden_page(tokens.astype(np.float16), alignment)
            slots = _before_a_forbidden_page(np.arange(15)[::-1].copy(), 8)
            corekern.cuda.write_cache(paged, tokens, tokens, slots)
            table = _before_a_forbidden_page(np.array([2, 0, 1], np.int32), 4)
            for length in (0, 11, 15):
                out = [
                    _before_a_forbidden_page(np.zeros((20, 2, head_dim), np.float16), alignment)
                    for _ in range(2)
                ]
                corekern.cuda.gather_cache(paged, table, length, *out)


def test_no_access_outside_the_arrays(backend):
    # In a child, which a stray access ends.
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _touch_ends_of_arrays()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "an error in the child"


# Structs: NumPy's view of the kernels' arguments

STRUCTS = {
    "Divisor": ("encode.cu", codec.DIVISOR),
    "Walk": ("encode.cu", walk.WALK),
    "Write": ("cache_write.cu", cache.WRITE),
    "Gather": ("cache_gather.cu", cache.GATHER),
}


def _offsets(dtype: np.dtype, prefix: str = "") -> dict[str, int]:
    """The byte offset of every field, those of nested structs and of array elements too."""
    found = {}
    for name, (field, offset, *_) in dtype.fields.items():
        for i in range(field.shape[0] if field.shape else 1):
            path = f"{prefix}{name}{f'[{i}]' if field.shape else ''}"
            found[path] = offset + i * field.base.itemsize
            if field.base.fields:
                inner = _offsets(field.base, f"{path}.")
                found |= {inner_path: found[path] + at for inner_path, at in inner.items()}
    return found


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_agree(name):
    source, dtype = STRUCTS[name]
    text = sources.expand(source, ptx="ptx_emulated.cuh")
    checks = [f"sizeof({name}) == {dtype.itemsize}"]
    checks += [f"__builtin_offsetof({name}, {path}) == {offset}" for path, offset in _offsets(dtype).items()]
    emulate.compile_text("\n".join([text, *(f'static_assert({c}, "");' for c in checks)]), source)
    with pytest.raises(RuntimeError, match="static assertion failed"):
        emulate.compile_text(f'{text}\nstatic_assert(!({checks[-1]}), "");', source)


# The comparison can fail

MUTATIONS = {
    "ties away from even": ("fp8.cuh", "- 1 + odd", ""),
    "no subnormals": ("fp8.cuh", "magnitude < smallest_normal ? subnormal : normal", "normal"),
    "a sign lost": ("fp8.cuh", "| ((bits >> 24) & 0x80)", ""),
    "NaN without its sign": ("quad.cuh", "static_cast<unsigned>(is_negative(source, i))", "0u"),
    "a remainder of the wrong sign": ("division.cuh", "-__fmaf_rn(divisor.scale, q, -x)", "__fmaf_rn(-divisor.scale, q, x)"),
    "no remainders": ("division.cuh", "< 0x1p20f ? q : first", "< 0x1p20f ? first : first"),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_kernel_is_caught(monkeypatch, mutation):
    file, right, wrong = MUTATIONS[mutation]
    assert right in sources.expand(file)
    expand = sources.expand
    monkeypatch.setattr(
        sources, "expand", lambda *names, **instead: expand(*names, **instead).replace(right, wrong)
    )
    monkeypatch.setattr(loader, "address", lambda array: array.ctypes.data)
    monkeypatch.setattr(loader, "kernel", emulate.kernel)
    rng = np.random.default_rng(6)
    x = rng.integers(0, 1 << 32, 1 << 20, np.uint32).view(np.float32)
    scale = np.float32(0.0137)
    x[: 1 << 19] = (_boundaries("fp8_e4m3")[rng.integers(0, 200, 1 << 19)] * float(scale)).astype(np.float32)
    x.view(np.uint32)[::2] ^= 0x80000000
    codes = np.empty(x.shape, np.uint8)
    corekern.cuda.encode(x, codes, FORMATS["fp8_e4m3"], float(scale), True)
    with np.errstate(all="ignore"):
        expected = reference.encode(x / scale, "fp8_e4m3")
    assert (codes != expected).any()
