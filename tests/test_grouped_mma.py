"""The portable schedule of grouped attention without a GPU: its operands' layouts, and the shapes it takes.

The layouts are checked by running mma.cuh itself, with the instructions as the PTX manual describes them: see
mma_emulated.cuh.
"""

import ctypes
import subprocess

import ml_dtypes
import numpy as np
import pytest

from corekern.cuda import emulate, grouped_mma, sources
from corekern.cuda.kernels import ARCHITECTURES

COLUMNS = 48
DTYPES = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}

DRIVER = """
using Format = FORMAT;
using Operand = OPERAND;
constexpr int D = HEAD_DIM, N = WIDTH, COUNT = PAIRS;

// S^T of 16 tokens and COUNT * 8 columns from 8 * j.
extern "C" void keys_by_queries(unsigned char* memory, unsigned tile, unsigned queries, int first_token, int j, float* s, int* bad_rows) {
    shared_memory = memory;
    run_warp([&](int lane) {
        unsigned marks[2] = {0, 0};
        float c[4 * COUNT] = {};
        for (int part = 0; part < D / 32; ++part) {
            Left a[2];
            load_keys<Format, D>(a, tile, first_token, part, marks);
            for (int k = 0; k < 2; ++k) {
                Right b[COUNT / UNIT];
                load_queries_right<Format, N>(b, queries + (2 * part + k) * 32 * N, j);
                for (int i = 0; i < COUNT / UNIT; ++i) multiply<Operand, false>(c + 4 * UNIT * i, a[k], b[i]);
            }
        }
        bool bad[2] = {false, false};
        if (MARKS_KEYS && same_type<Format, fp8_e4m3>) marked_rows(marks, bad);
        for (int i = 0; pass && i < 4 * COUNT; ++i) {
            s[row_of(i / 2 % 2) * 8 * COUNT + column_of(i / 4) + i % 2] = c[i];
            bad_rows[row_of(i / 2 % 2)] = bad[i / 2 % 2];
        }
    });
}

// O^T of 16 dims and COUNT * 8 columns over 32 tokens.
extern "C" void values_by_probabilities(unsigned char* memory, unsigned tile, unsigned p, int first_token, int block, int j, float* o, int* bad) {
    shared_memory = memory;
    run_warp([&](int lane) {
        Left a[2];
        bool mine = false;
        load_values<Format, D>(a, tile, first_token, block, true, mine);
        float c[4 * COUNT] = {};
        for (int k = 0; k < 2; ++k) {
            Right b[COUNT / UNIT];
            load_probabilities<N>(b, p, first_token + 16 * k, j);
            for (int i = 0; i < COUNT / UNIT; ++i) multiply<Operand, true>(c + 4 * UNIT * i, a[k], b[i]);
        }
        for (int i = 0; pass && i < 4 * COUNT; ++i) o[value_dim<Format>(i / 2 % 2) * 8 * COUNT + column_of(i / 4) + i % 2] = c[i];
        *bad |= pass && mine;
    });
}

extern "C" unsigned tile_place(int token, int chunk) { return in_tile<Format, D>(token, chunk); }
extern "C" unsigned probability_place(int token, int column) { return in_probabilities<N>(token, column); }
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(arch, format, head_dim, count) -> the driver, compiled once."""
    if emulate.compiler() is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("mma")
    made = {}

    def get(arch, kv_dtype, head_dim, count):
        key = (arch, kv_dtype, head_dim, count)
        if key not in made:
            headers = dict.fromkeys(("ptx", "shared", "mma_ptx"), "mma_emulated.cuh")
            source = folder / ("-".join(map(str, key)) + ".cpp")
            source.write_text(sources.expand("mma.cuh", **headers) + DRIVER)
            operand = "bfloat16" if kv_dtype == "bfloat16" else "float16"
            defines = {"TARGET_ARCH": arch, "THREADS": 32, "FORMAT": kv_dtype, "OPERAND": operand, "HEAD_DIM": head_dim,
                       "WIDTH": COLUMNS, "PAIRS": count}  # fmt: skip
            library = source.with_suffix(".so")
            subprocess.run(
                [emulate.compiler(), "-std=c++17", "-O1", "-shared", "-fPIC", "-w", *(f"-D{k}={v}" for k, v in defines.items()),
                 str(source), "-o", str(library)],
                check=True,
            )  # fmt: skip
            made[key] = ctypes.CDLL(str(library))
        return made[key]

    return get


CASES = [
    pytest.param(arch, kv_dtype, head_dim, count, id=f"sm_{arch // 10}-{kv_dtype}-d{head_dim}-{8 * count}")
    for arch, kv_dtype, head_dim, count in [
        *(
            (arch, kv_dtype, 256, 2)
            for arch in (700, 750, 800)
            for kv_dtype in ("fp8_e4m3", "fp8_e5m2", "float16")
        ),
        (800, "bfloat16", 256, 2),
        (800, "fp8_e4m3", 64, 3),
        (750, "float16", 128, 1),
        (700, "fp8_e4m3", 64, 4),
        (700, "float16", 64, 2),
    ]
]


def place_tile(library, memory, values):
    size = values.itemsize
    raw = values.view(np.uint8)
    for token in range(len(values)):
        for chunk in range(values.shape[1] * size // 16):
            at = library.tile_place(token, chunk)
            memory[at : at + 16] = raw[token, 16 * chunk : 16 * chunk + 16]


@pytest.mark.parametrize(("arch", "kv_dtype", "head_dim", "count"), CASES)
def test_scores(compiled, arch, kv_dtype, head_dim, count):
    """Integers, so that sums are exact in any order."""
    library = compiled(arch, kv_dtype, head_dim, count)
    rng = np.random.default_rng(0)
    keys = rng.integers(-7, 8, (64, head_dim)).astype(DTYPES[kv_dtype])
    q = rng.integers(-7, 8, (COLUMNS, head_dim)).astype(np.float64)
    memory = np.zeros(200_000, np.uint8)
    place_tile(library, memory, keys)
    # As store_queries: [16 dims][half of k][lane][8 k].
    chunks = q.reshape(COLUMNS, head_dim // 16, 16)
    if kv_dtype.startswith("fp8"):
        chunks = chunks.reshape(COLUMNS, -1, 4, 2, 2).transpose(0, 1, 3, 2, 4).reshape(COLUMNS, -1, 16)
    laid = chunks.reshape(COLUMNS, -1, 2, 8).transpose(1, 2, 0, 3)
    stored = (
        np.ascontiguousarray(laid)
        .astype(DTYPES[kv_dtype] if kv_dtype == "bfloat16" else np.float16)
        .view(np.uint8)
    )
    memory[100_000 : 100_000 + stored.size] = stored.ravel()
    expected = keys.astype(np.float64) @ q.T
    for first_token in (0, 48):
        for pair in (0, COLUMNS // 8 - count if count % 2 == 0 else 1):
            scores, bad = np.full((16, 8 * count), np.nan, np.float32), np.zeros(16, np.int32)
            library.keys_by_queries(
                memory.ctypes, 0, 100_000, first_token, pair,
                scores.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), bad.ctypes.data_as(ctypes.POINTER(ctypes.c_int)),
            )  # fmt: skip
            np.testing.assert_array_equal(
                scores, expected[first_token : first_token + 16, 8 * pair : 8 * (pair + count)]
            )
            assert not bad.any()


@pytest.mark.parametrize("arch", [700, 750, 800])
def test_rows_with_a_nan_key_are_known(compiled, arch):
    library = compiled(arch, "fp8_e4m3", 256, 2)
    for token in range(16):
        keys = np.zeros((64, 256), DTYPES["fp8_e4m3"])
        keys[32 + token, 13 * token] = np.nan
        memory = np.zeros(200_000, np.uint8)
        place_tile(library, memory, keys)
        scores, bad = np.zeros((16, 16), np.float32), np.zeros(16, np.int32)
        library.keys_by_queries(
            memory.ctypes, 0, 100_000, 32, 0,
            scores.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), bad.ctypes.data_as(ctypes.POINTER(ctypes.c_int)),
        )  # fmt: skip
        assert bad.nonzero()[0].tolist() == [token]


@pytest.mark.parametrize(("arch", "kv_dtype", "head_dim", "count"), CASES)
def test_values(compiled, arch, kv_dtype, head_dim, count):
    library = compiled(arch, kv_dtype, head_dim, count)
    rng = np.random.default_rng(1)
    values = rng.integers(-7, 8, (64, head_dim)).astype(DTYPES[kv_dtype])
    probabilities = rng.integers(0, 9, (64, COLUMNS)).astype(
        DTYPES[kv_dtype] if kv_dtype == "bfloat16" else np.float16
    )
    # What is not finite is left out, and said to be.
    values[40, 16] = np.nan
    memory = np.zeros(200_000, np.uint8)
    place_tile(library, memory, values)
    for token in range(64):
        for column in range(0, COLUMNS, 2):
            at = 100_000 + library.probability_place(token, column)
            memory[at : at + 4] = probabilities[token, column : column + 2].view(np.uint8)
    values[40, 16] = 0
    for first_token in (0, 32):
        for block in range(head_dim // 16):
            for pair in (0, COLUMNS // 8 - count if count % 2 == 0 else 1):
                out, bad = np.full((16, 8 * count), np.nan, np.float32), ctypes.c_int(0)
                library.values_by_probabilities(
                    memory.ctypes, 0, 100_000, first_token, block, pair,
                    out.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), ctypes.byref(bad),
                )  # fmt: skip
                tokens, lanes = slice(first_token, first_token + 32), slice(8 * pair, 8 * (pair + count))
                v = values[tokens, 16 * block : 16 * block + 16].astype(np.float64)
                np.testing.assert_array_equal(out, v.T @ probabilities[tokens, lanes].astype(np.float64))
                assert bool(bad.value) == (first_token == 32 and block == 1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_problem_has_a_shape(arch):
    """Of some number of lanes, within what one block may have."""
    limit = {"sm_70": 96, "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_120": 99}.get(
        arch, 227
    ) << 10
    formats = ["fp8_e4m3", "fp8_e5m2", "float16", *(["bfloat16"] if arch >= "sm_80" or len(arch) > 5 else [])]
    for head_dim in ("64", "128", "256"):
        for kv_dtype in formats:
            for q_dtype in ("float16", "bfloat16"):
                for segments in ("8", "128"):
                    for legacy in ("0", "1"):
                        choices = {
                            "HEAD_DIM": head_dim,
                            "FORMAT": kv_dtype,
                            "VALUE": q_dtype,
                            "SEGMENTS": segments,
                            "LEGACY": legacy,
                        }
                        shapes = [
                            grouped_mma.shape(arch, choices | {"LANES": str(lanes)})
                            for lanes in grouped_mma.lanes_on(arch)
                        ]
                        assert shapes[0] is not None
                        assert len({shape.step for shape in shapes if shape}) == 1
                        for shape in shapes:
                            assert shape is None or shape.shared_bytes <= limit
