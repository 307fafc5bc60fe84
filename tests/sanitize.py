"""A small call of every CUDA kernel, to run under a memory or race checker:

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py

API errors are left out because importing CUDA's Python bindings asks the driver for symbols it may not have.
Shapes are small because checkers are slow; strides and offsets choose both the vector and the scalar kernels.
"""

import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from helpers import cuda_backend, make_problem  # noqa: E402

import corekern  # noqa: E402


def codec(cuda) -> None:
    x = np.random.default_rng(0).standard_normal((37, 96), np.float32)
    for dtype in (np.float16, np.float32, np.float64):
        values = cuda.asarray(x.astype(dtype))
        for view in (values, values[:, 1:], values[::3, ::2], values.T):
            for fmt in ("fp8_e4m3", "fp8_e5m2"):
                codes = corekern.encode(view, fmt, 0.7)
                for out_dtype in ("float16", "bfloat16", "float32"):
                    corekern.decode(codes, fmt, 0.7, out_dtype=out_dtype)
    scales = cuda.asarray(np.linspace(0.5, 2, 37, dtype=np.float32)[:, None])
    corekern.encode(cuda.asarray(x), scale=scales)


def cache(cuda) -> None:
    rng = np.random.default_rng(1)
    slots = cuda.asarray(np.int64([3, -1, 21, 3, 40, 10**12]))
    for dtype in ("fp8_e4m3", "fp8_e5m2", "float16", "bfloat16", "float32"):
        for layout in ("separate", "interleaved"):
            pages = corekern.PagedKVCache.empty(3, 16, 2, 64, dtype=dtype, layout=layout, device="cuda")
            k, v = (
                cuda.asarray(rng.standard_normal((6, 2, 66), np.float32).astype(np.float16)) for _ in "kv"
            )
            for column in (0, 1):
                pages.write(k[..., column : column + 64], v[..., column : column + 64], slots)
            pages.gather(cuda.asarray(np.int32([2, -1, 1])), 45, pad_to=16, out_dtype="bfloat16")


def attention(cuda) -> None:
    for kv_dtype, layout, rows, group, head_dim in (
        ("fp8_e4m3", "interleaved-offset-14", (3, 1), 3, 64),
        ("fp8_e4m3", "token+8", (8,), 6, 256),
        ("float16", "separate", (1, 2), 2, 40),
    ):
        problem = make_problem(
            2, rows=rows, seq_lens=(70, 600)[: len(rows)], q_heads=group, head_dim=head_dim, kv_dtype=kv_dtype
        )
        problem.run(cuda, layout)
        arguments = problem.arguments(cuda, layout)
        state = corekern.partial_attention(**arguments)
        corekern.finalize(corekern.merge_states(state, state), "bfloat16")


def grouped(cuda) -> None:
    """The tensor-core routes: whole tiles and masked ones, pages that tiles cross, no tensor maps, batches, every state."""
    for options, layout in (
        ({"rows": (8,), "seq_lens": (300,), "q_heads": 6, "head_dim": 256, "page_size": 80}, "separate"),
        ({"rows": (3,), "seq_lens": (200,), "q_heads": 4, "head_dim": 128, "page_size": 24}, "token+8"),
        (
            {"rows": (2, 0, 4), "seq_lens": (150, 0, 400), "q_heads": 8, "kv_heads": 2, "head_dim": 64},
            "interleaved",
        ),
        (
            {"rows": (2,), "seq_lens": (150,), "q_heads": 4, "head_dim": 128, "kv_dtype": "fp8_e5m2"},
            "separate",
        ),
        (
            {"rows": (2,), "seq_lens": (150,), "q_heads": 4, "head_dim": 128, "kv_dtype": "float16"},
            "separate",
        ),
        (
            {"rows": (2,), "seq_lens": (150,), "q_heads": 4, "head_dim": 128, "kv_dtype": "bfloat16"},
            "separate",
        ),
    ):
        problem = make_problem(3, **options)
        for route in ("grouped_fp32", "grouped_fp16_legacy"):
            problem.run(cuda, layout, route=route)
        problem.state(cuda, route="grouped_fp32")


if __name__ == "__main__":
    cuda = cuda_backend()
    for exercise in (codec, cache, attention, grouped):
        exercise(cuda)
        print(exercise.__name__, "done", flush=True)
