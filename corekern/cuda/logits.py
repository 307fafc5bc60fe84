"""FP32 logits on a GPU: cuBLAS with float16 or bfloat16 operands, float32 accumulation and float32 results.

cuBLAS counts matrices column by column, so a row-major array is its own transpose there: out.T (vocab, rows) is
lm_head's transpose, transposed back, times hidden's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from corekern.cuda.loader import address, cupy

# Bytes of gathered candidates at a time: they should stay in the L2 from the gather to the product.
GATHER_BYTES = 32 << 20

# cudaDataType, cublasComputeType_t, cublasGemmAlgo_t
_FLOAT32, _COMPUTE_FLOAT32, _DEFAULT = 0, 68, -1
_HALF = {"float16": 2, "bfloat16": 14}
_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


def dense(hidden: Any, lm_head: Any, out: Any) -> None:
    """out[...] = hidden @ lm_head.T."""
    cublas, handle = _cublas()
    kind = _HALF[hidden.dtype.name]
    shape = len(lm_head), len(hidden), hidden.shape[1]
    head = address(lm_head), kind, _leading(lm_head)
    states = address(hidden), kind, _leading(hidden)
    transposed, plain = cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N
    into = address(out), _FLOAT32, _leading(out)
    one, zero = _ONE.ctypes.data, _ZERO.ctypes.data
    cublas.gemmEx(
        handle, transposed, plain, *shape, one, *head, *states, zero, *into, _COMPUTE_FLOAT32, _DEFAULT
    )


def candidates(hidden: Any, lm_head: Any, ids: Any, out: Any) -> None:
    """out[row, i] = hidden[row] . lm_head[ids[row, i]]; -inf where there is no such id."""
    known = (ids >= 0) & (ids < len(lm_head))
    safe = cupy().where(known, ids, 0)
    rows = max(1, GATHER_BYTES // (ids.shape[1] * lm_head.shape[1] * lm_head.itemsize))
    bits = lm_head.view(np.uint16)  # a gather needs no arithmetic on bfloat16
    for begin in range(0, len(hidden), rows):
        some = slice(begin, begin + rows)
        _multiply_rows(hidden[some], bits[safe[some]], out[some])
    out[...] = cupy().where(known, out, np.float32(-np.inf))


def _multiply_rows(hidden: Any, columns: Any, out: Any) -> None:
    """out (rows, n) = columns (rows, n, k) @ hidden (rows, k), a product a row."""
    cublas, handle = _cublas()
    kind = _HALF[hidden.dtype.name]
    rows, n, k = columns.shape
    gathered = address(columns), kind, k, n * k
    states = address(hidden), kind, k, _leading(hidden)
    into = address(out), _FLOAT32, n, n
    transposed, plain = cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N
    one, zero = _ONE.ctypes.data, _ZERO.ctypes.data
    cublas.gemmStridedBatchedEx(
        handle, transposed, plain, n, 1, k, one, *gathered, *states, zero, *into, rows, _COMPUTE_FLOAT32, _DEFAULT
    )  # fmt: skip


def _leading(matrix: Any) -> int:
    """The elements from one row to the next; cuBLAS wants at least a row's, and one row alone may have any stride."""
    return max(matrix.strides[0] // matrix.itemsize, matrix.shape[1])


def _cublas() -> tuple[Any, int]:
    """cuBLAS, and its handle for the current device, on CuPy's current stream."""
    from cupy.cuda import device
    from cupy_backends.cuda.libs import cublas

    return cublas, device.get_cublas_handle()
