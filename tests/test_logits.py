"""FP32 logits: against float64, against float16 results, and what cuBLAS is told."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import DTYPES

import corekern
from corekern import logits

HALF = ("float16", "bfloat16")


def operands(rows=3, vocab=50, size=96, dtype="float16", seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((rows, size)).astype(DTYPES[dtype])
    head = (rng.standard_normal((vocab, size)) / np.sqrt(size)).astype(DTYPES[dtype])
    return hidden, head


def exact(hidden, head):
    return hidden.astype(np.float64) @ head.astype(np.float64).T


def bound(hidden, head):
    """The module's bound on the error of a sum in float32, with its second-order term."""
    k = hidden.shape[1]
    sums = np.abs(hidden.astype(np.float64)) @ np.abs(head.astype(np.float64)).T
    return k * 2.0**-24 / (1 - k * 2.0**-24) * sums


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("rows", "vocab", "size"), [(1, 1, 1), (3, 50, 96), (8, 1000, 257), (17, 700, 4096)], ids=str
)
def test_dense_logits_are_within_the_bound(backend, dtype, rows, vocab, size):
    hidden, head = operands(rows, vocab, size, dtype)
    found = corekern.dense_logits(backend.asarray(hidden), backend.asarray(head))
    assert found.dtype == np.float32
    assert (np.abs(backend.asnumpy(found) - exact(hidden, head)) <= bound(hidden, head)).all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
def test_candidates_are_the_dense_columns(backend, dtype, ids_dtype):
    hidden, head = operands(rows=5, vocab=400, size=320, dtype=dtype)
    ids = np.random.default_rng(1).integers(0, 400, (5, 33)).astype(ids_dtype)
    found = corekern.candidate_logits(*map(backend.asarray, (hidden, head, ids)))
    expected = np.take_along_axis(exact(hidden, head), ids.astype(np.int64), 1)
    limit = np.take_along_axis(bound(hidden, head), ids.astype(np.int64), 1)
    assert (np.abs(backend.asnumpy(found) - expected) <= limit).all()


def test_fp32_results_are_at_least_50_times_nearer_than_float16_ones(backend):
    # The width of a large model's head; logits of its usual size, some 10, where float16 steps by 2^-7.
    hidden, head = operands(rows=8, vocab=2048, size=5120)
    reference = exact(hidden, head)
    ids = np.random.default_rng(2).integers(0, len(head), (8, 64)).astype(np.int32)
    selected = np.take_along_axis(reference, ids.astype(np.int64), 1)
    found = backend.asnumpy(corekern.candidate_logits(*map(backend.asarray, (hidden, head, ids))))

    def error(values):
        return np.linalg.norm(values - selected) / np.linalg.norm(selected)

    assert error(found) * 50 <= error(selected.astype(np.float16))


def test_what_float16_cannot_tell_apart(backend):
    # Two logits of 20 and 20 + 2^-8, half of float16's step there: the smaller one must not win.
    hidden = np.zeros((1, 16), np.float16)
    hidden[0, :2] = 1
    head = np.zeros((2, 16), np.float16)
    head[:, 0] = 20
    head[1, 1] = 2.0**-8
    found = backend.asnumpy(corekern.dense_logits(backend.asarray(hidden), backend.asarray(head)))
    assert found.astype(np.float16)[0, 0] == found.astype(np.float16)[0, 1]
    assert found.argmax() == 1


@pytest.mark.parametrize("ids", [[[0, -1, 3], [7, 8, 2]], [[-5, 9, 100], [2**31 - 1, -(2**31), 0]]], ids=str)
def test_ids_outside_the_vocabulary_are_no_candidates(backend, ids):
    hidden, head = operands(rows=2, vocab=8)
    ids = np.int32(ids)
    found = backend.asnumpy(corekern.candidate_logits(*map(backend.asarray, (hidden, head, ids))))
    known = (ids >= 0) & (ids < 8)
    assert np.isneginf(found[~known]).all()
    assert np.isfinite(found[known]).all()
    with pytest.raises(ValueError, match=r"^candidate_ids: row \d, candidate \d is -?\d+, outside \[0, 8\)$"):
        corekern.candidate_logits(*map(backend.asarray, (hidden, head, ids)), validate=True)


def test_no_candidates_are_no_work(backend):
    hidden, head = operands()
    found = corekern.candidate_logits(*map(backend.asarray, (hidden, head, np.empty((3, 0), np.int32))))
    assert found.shape == (3, 0)


def test_padded_rows_and_an_out_array(backend):
    hidden, head = operands(rows=4, vocab=30, size=64)
    wide_hidden, wide_head = (np.full((len(a), 72), np.nan, np.float16) for a in (hidden, head))
    wide_hidden[:, :64], wide_head[:, :64] = hidden, head
    ids = np.int32([[1, 2]] * 4)
    views = [backend.asarray(wide_hidden)[:, :64], backend.asarray(wide_head)[:, :64]]
    out, few = backend.zeros((4, 30), np.float32), backend.zeros((4, 2), np.float32)
    assert corekern.dense_logits(*views, out=out) is out
    assert corekern.candidate_logits(*views, backend.asarray(ids), out=few) is few
    assert (np.abs(backend.asnumpy(out) - exact(hidden, head)) <= bound(hidden, head)).all()
    assert (np.abs(backend.asnumpy(few) - exact(hidden, head)[:, 1:3]) <= bound(hidden, head)[:, 1:3]).all()


def test_a_head_over_many_blocks(monkeypatch):
    from corekern.cpu import logits as cpu

    hidden, head = operands(rows=3, vocab=101, size=32)
    expected = corekern.dense_logits(hidden, head)
    ids = np.arange(101, dtype=np.int32)[None].repeat(3, 0)
    monkeypatch.setattr(cpu, "BLOCK_BYTES", 32 * 4 * 7)
    assert (np.abs(corekern.dense_logits(hidden, head) - expected) <= 2 * bound(hidden, head)).all()
    assert (np.abs(corekern.candidate_logits(hidden, head, ids) - expected) <= 2 * bound(hidden, head)).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": np.zeros((2, 8), np.float32)}, TypeError, "hidden: dtype float32 is not allowed"),
        ({"hidden": np.zeros(8, np.float16)}, ValueError, r"hidden: shape \(8,\) is not"),
        ({"hidden": np.zeros((0, 8), np.float16)}, ValueError, r"hidden: shape \(0, 8\) is empty"),
        ({"lm_head": np.zeros((5, 9), np.float16)}, ValueError, r"lm_head: shape \(5, 9\) is not \(vocab_size, 8\)"),
        ({"lm_head": np.zeros((5, 8), DTYPES["bfloat16"])}, TypeError, "lm_head: dtype bfloat16"),
        ({"lm_head": np.zeros((8, 5), np.float16).T}, ValueError, "lm_head: its last axis must be contiguous"),
        ({"lm_head": np.zeros((5, 8), np.float16)[::-1]}, ValueError, "lm_head: its rows overlap or run backwards"),
        ({"candidate_ids": np.zeros((3, 1), np.int32)}, ValueError, r"candidate_ids: shape \(3, 1\) is not \(2, "),
        ({"candidate_ids": np.zeros((2, 1), np.float32)}, TypeError, "candidate_ids: dtype float32"),
        ({"candidate_ids": [[1], [2]]}, TypeError, "candidate_ids: expected an array"),
        ({"out": np.zeros((2, 2), np.float16)}, TypeError, "out: dtype float16"),
        ({"out": np.zeros((2, 3), np.float32)}, ValueError, r"out: shape \(2, 3\)"),
        ({"out": np.zeros((2, 2), np.float32).T}, ValueError, "out: is not contiguous"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_arguments(change, error, message):
    arguments = {
        "hidden": np.zeros((2, 8), np.float16),
        "lm_head": np.zeros((5, 8), np.float16),
        "candidate_ids": np.zeros((2, 2), np.int32),
        **change,
    }
    with pytest.raises(error, match=message) as found:
        corekern.candidate_logits(**arguments)
    assert "\n" not in str(found.value)


# Which precision


@pytest.mark.parametrize(
    ("model", "setting", "variable", "fp32", "source"),
    [
        (None, None, "", False, "global default"),
        ("llama", None, "", False, "global default"),
        ("qwen3.8-dflash2", None, "", True, "default of qwen3.8-dflash2"),
        ("Org/Qwen3.8-DFlash2", None, "", True, "default of Org/Qwen3.8-DFlash2"),
        ("qwen3.8-dflash2", None, "0", False, "COREKERN_FP32_LOGITS=0"),
        (None, None, "1", True, "COREKERN_FP32_LOGITS=1"),
        (None, False, "1", False, "explicit setting"),
        ("qwen3.8-dflash2", False, "", False, "explicit setting"),
        (None, True, "0", True, "explicit setting"),
    ],
)
def test_who_decides_the_precision(monkeypatch, model, setting, variable, fp32, source):
    monkeypatch.setenv("COREKERN_FP32_LOGITS", variable)
    assert corekern.resolve_fp32_logits(model, setting) == logits.LogitPrecision(fp32, source)


def test_bad_settings(monkeypatch):
    with pytest.raises(TypeError, match=r"^setting: expected a bool or None, got int$"):
        corekern.resolve_fp32_logits(setting=1)
    monkeypatch.setenv("COREKERN_FP32_LOGITS", "yes")
    with pytest.raises(ValueError, match=r"^COREKERN_FP32_LOGITS: 'yes' is not 0 or 1$"):
        corekern.resolve_fp32_logits()


# What cuBLAS is told, without a GPU


class ColumnMajor:
    """The two cuBLAS calls as its manual defines them, on host memory: matrices column by column, C = op(A) op(B)."""

    CUBLAS_OP_N, CUBLAS_OP_T = 0, 1

    def matrix(self, address, kind, rows, columns, leading):
        assert leading >= rows
        dtype = {0: np.dtype(np.float32), 2: DTYPES["float16"], 14: DTYPES["bfloat16"]}[kind]
        count = (columns - 1) * leading + rows
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return np.ndarray((rows, columns), dtype, memory, strides=(dtype.itemsize, leading * dtype.itemsize))

    def gemmEx(self, handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, compute, algo):
        assert (handle, compute, algo) == (7, 68, -1)
        assert [ctypes.c_float.from_address(x).value for x in (alpha, beta)] == [1, 0]
        left = self.matrix(a, at, *((k, m) if ta else (m, k)), lda)
        right = self.matrix(b, bt, *((n, k) if tb else (k, n)), ldb)
        left, right = (x.T if t else x for x, t in ((left, ta), (right, tb)))
        self.matrix(c, ct, m, n, ldc)[...] = left.astype(np.float32) @ right.astype(np.float32)

    def gemmStridedBatchedEx(
        self, handle, ta, tb, m, n, k, alpha, a, at, lda, sa, b, bt, ldb, sb, beta, c, ct, ldc, sc, batch, compute, algo
    ):  # fmt: skip
        for i in range(batch):
            a_, b_, c_ = a + i * sa * 2, b + i * sb * 2, c + i * sc * 4
            self.gemmEx(
                handle, ta, tb, m, n, k, alpha, a_, at, lda, b_, bt, ldb, beta, c_, ct, ldc, compute, algo
            )


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("padding", [0, 8])
def test_cublas_gets_the_right_matrices(monkeypatch, dtype, padding):
    from corekern.cuda import logits as cuda

    monkeypatch.setattr(cuda, "_cublas", lambda: (ColumnMajor(), 7))
    monkeypatch.setattr(cuda, "address", lambda array: array.ctypes.data)
    monkeypatch.setattr(cuda, "cupy", lambda: SimpleNamespace(where=np.where))
    monkeypatch.setattr(cuda, "GATHER_BYTES", 2 * 6 * 40 * 2)  # two rows of candidates at a time
    hidden, head = operands(rows=5, vocab=23, size=40, dtype=dtype)
    wide = [np.ones((len(a), 40 + padding), a.dtype) for a in (hidden, head)]
    wide[0][:, :40], wide[1][:, :40] = hidden, head
    views = [a[:, :40] for a in wide]
    out = np.full((5, 23), np.nan, np.float32)
    cuda.dense(*views, out)
    assert (np.abs(out - exact(hidden, head)) <= bound(hidden, head)).all()
    ids = np.random.default_rng(3).integers(-2, 25, (5, 6)).astype(np.int32)
    few = np.full((5, 6), np.nan, np.float32)
    cuda.candidates(*views, ids, few)
    expected = np.where((ids >= 0) & (ids < 23), np.take_along_axis(out, ids.clip(0, 22), 1), -np.inf)
    assert np.allclose(few, expected, rtol=0, atol=2 * bound(hidden, head).max())
