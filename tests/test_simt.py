"""The numba-cuda backend: its bits and invariances, in numba-cuda's simulator and on a GPU, and its compilation.

Only the tests marked `gpu` need one. The simulator must be chosen before numba-cuda is imported, so this file is
also a program: run with NUMBA_ENABLE_CUDASIM=1 it makes the checks and prints what failed as JSON, which the
tests then read. The simulator's threads are Python's, so the shapes are small. What it does not show: its fma
rounds twice, and NaNs keep payloads that a GPU drops.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import pytest

from corekern import PagedKVCache, cpu, reference
from corekern.attention import AttentionCall
from corekern.formats import BFLOAT16, FORMATS
from corekern.routing import AttentionProblem
from corekern.state import PartialState

FP8 = ("fp8_e4m3", "fp8_e5m2")

# ---- Arrays on the device ------------------------------------------------------------------------------------


def call(function, *arguments):
    """function(*arguments), with NumPy arrays there and back where that means a GPU.

    Arrays arrive as they were: views of one buffer, with their strides and offsets, stay that.
    """
    from corekern.simt.device import SIMULATED

    if SIMULATED:
        return function(*arguments)
    import cupy

    buffers = {}

    def put(x):
        if isinstance(x, np.ndarray):
            root = x
            while isinstance(root.base, np.ndarray):
                root = root.base
            if id(root) not in buffers:
                buffers[id(root)] = root, cupy.asarray(root.reshape(-1).view(np.uint8))
            memory = buffers[id(root)][1].data + (x.ctypes.data - root.ctypes.data)
            return cupy.ndarray(x.shape, x.dtype, memory, x.strides)
        return each(put, x)

    def get(x):
        return x.get() if isinstance(x, cupy.ndarray) else each(get, x)

    result = get(function(*[put(x) for x in arguments]))
    for root, buffer in buffers.values():
        root.reshape(-1).view(np.uint8)[...] = buffer.get()
    return result


def each(function, x):
    """`function` of what a list or a dataclass holds; anything else as it is."""
    if isinstance(x, (list, tuple)):
        return type(x)(function(y) for y in x)
    if isinstance(x, (AttentionCall, PagedKVCache, PartialState)):
        return type(x)(**{field.name: function(getattr(x, field.name)) for field in dataclasses.fields(x)})
    return x


# ---- The checks, which run in the simulator and on a GPU -----------------------------------------------------


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    unsigned = np.dtype(f"u{a.itemsize}")
    different = np.flatnonzero(
        np.ascontiguousarray(a).view(unsigned) != np.ascontiguousarray(b).view(unsigned)
    )
    assert not len(different), f"{len(different)} differ, first at {different[0]}"


def same_states(a: PartialState, b: PartialState, rows=slice(None)) -> None:
    for x, y in zip(dataclasses.astuple(a), dataclasses.astuple(b), strict=True):
        same_bits(x[rows], y[rows])


@dataclasses.dataclass
class Case:
    """An attention call. Pages lie in random order, and whatever no row may see is NaN."""

    q: np.ndarray
    cache: PagedKVCache
    block_table: np.ndarray
    row_lengths: np.ndarray
    query_start_loc: np.ndarray

    @property
    def arguments(self):
        return self.q, self.cache, self.block_table, self.row_lengths, self.query_start_loc

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def state(self, **changes) -> PartialState:
        from corekern import simt

        case = dataclasses.replace(self, **changes)
        return call(simt.attention_state, AttentionCall(problem_of(case), *case.arguments, case.scale))


def make_case(
    *,
    rows,
    lengths,
    group=3,
    kv_heads=1,
    head_dim=16,
    page_size=16,
    kv="fp8_e4m3",
    q=np.float16,
    seed=0,
    value=None,
) -> Case:
    """Request r has rows[r] causal rows, the last of which sees lengths[r] tokens."""
    rng = np.random.default_rng(seed)
    max_pages = -(-max(lengths) // page_size)
    pages = max_pages * len(rows) + 3
    cache = PagedKVCache.empty(
        pages, page_size, kv_heads, head_dim, dtype=kv, layout="interleaved", k_scale=0.75, v_scale=1.25
    )
    table = rng.permutation(pages)[: max_pages * len(rows)].reshape(len(rows), max_pages).astype(np.int32)
    slots = [
        table[r, t // page_size] * page_size + t % page_size for r, n in enumerate(lengths) for t in range(n)
    ]
    poison(cache)
    k, v = rng.standard_normal((2, len(slots), kv_heads, head_dim)).astype(np.float32)
    if value is not None:
        v[:] = value
    cache.write(k, v, np.array(slots, np.int32))
    return Case(
        q=rng.standard_normal((sum(rows), kv_heads * group, head_dim)).astype(q),
        cache=cache,
        block_table=table,
        row_lengths=np.concatenate(
            [n - np.arange(r)[::-1] for r, n in zip(rows, lengths, strict=True)]
        ).astype(np.int32),
        query_start_loc=np.cumsum([0, *rows]).astype(np.int32),
    )


def poison(cache: PagedKVCache) -> None:
    for pages in (cache.k, cache.v):
        pages[...] = 0x7F if cache.format.is_fp8 else np.nan


def check_decode_all_codes():
    from corekern import simt

    codes = np.arange(256, dtype=np.uint8)
    for name in FP8:
        for dtype in (np.float16, BFLOAT16, np.float32):
            for scale in (0.37, np.linspace(1e-3, 30.0, 256, dtype=np.float32)):
                ours, theirs = np.empty(256, dtype), np.empty(256, dtype)
                call(simt.decode, codes, ours, FORMATS[name], scale)
                cpu.decode(codes, theirs, FORMATS[name], scale)
                same_bits(ours, theirs)


def interesting_floats(name: str) -> np.ndarray:
    """Every value of a format, every tie between neighbours, what lies just beside them, and random patterns."""
    values = reference.decode(np.arange(0x80, dtype=np.uint8), FORMATS[name])
    values = np.append(values[np.isfinite(values)], 2.0 * FORMATS[name].max)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    around = np.concatenate(
        [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))]
    )
    patterns = np.random.default_rng(1).integers(0, 2**32, 800, dtype=np.uint32).view(np.float32)
    special = np.float32([np.inf, np.nan, 1e-45, 1e-38, 3.4e38])
    signless = np.concatenate([around, special])
    return np.concatenate([signless, -signless, patterns])


def check_encode_bits():
    from corekern import simt

    for name in FP8:
        x = interesting_floats(name)
        scales = np.random.default_rng(2).uniform(1e-3, 9.0, x.size).astype(np.float32)
        for saturate, scale in ((True, 1.0), (False, 0.3), (True, scales)):
            ours, theirs = np.empty(x.shape, np.uint8), np.empty(x.shape, np.uint8)
            call(simt.encode, x, ours, FORMATS[name], scale, saturate)
            cpu.encode(x, theirs, FORMATS[name], scale, saturate)
            same_bits(ours, theirs)


def check_encode_other_dtypes():
    from corekern import simt

    # float64 must not be rounded twice: a hair above a tie that float32 cannot tell from it.
    ties = interesting_floats("fp8_e4m3").astype(np.float64)
    for dtype, x in (
        (np.float16, np.arange(0, 65536, 61)),
        (BFLOAT16, np.arange(0, 65536, 61)),
        (
            np.float64,
            np.concatenate([ties[:400] * (1 + 2.0**-40), [np.nan, -np.nan, np.inf, 1e300, -1e-300]]),
        ),
    ):
        x = x if dtype == np.float64 else x.astype(np.uint16).view(dtype)
        ours, theirs = np.empty(x.shape, np.uint8), np.empty(x.shape, np.uint8)
        scale = float(np.float32(0.3))  # what the public functions make of 0.3
        call(simt.encode, x, ours, FORMATS["fp8_e4m3"], scale, True)
        cpu.encode(x, theirs, FORMATS["fp8_e4m3"], scale, True)
        same_bits(ours, theirs)


def check_codec_strides():
    from corekern import simt

    x = np.random.default_rng(3).standard_normal((6, 5, 4)).astype(np.float32)
    codes, expected = np.zeros((4, 5, 12), np.uint8), np.empty((4, 5, 6), np.uint8)
    call(simt.encode, x.T, codes[:, :, ::-2], FORMATS["fp8_e4m3"], 0.5, True)
    cpu.encode(np.ascontiguousarray(x.T), expected, FORMATS["fp8_e4m3"], 0.5, True)
    same_bits(codes[:, :, ::-2], expected)
    assert not codes[:, :, ::2].any()
    values = np.zeros((6, 5, 8), np.float16)
    call(simt.decode, expected.T, values[:, :, 1::2], FORMATS["fp8_e4m3"], 0.5)
    same_bits(values[:, :, 1::2], reference.decode(expected.T, "fp8_e4m3", 0.5).astype(np.float16))


def near_reference(case: Case) -> None:
    """The state within 3e-6 of float64 on the same codes: the project's bound, of which a few tiles use a tenth."""
    state = case.state()
    numerator, maximum, total = reference.partial_attention(*case.arguments)
    assert np.linalg.norm(state.numerator - numerator) <= 3e-6 * np.linalg.norm(numerator)
    assert np.abs(state.sum - total).max() <= 3e-6 * total.max()
    # A score is off by at most 2^-21 of sum |q k|: here below 40 in base 2.
    seen = np.isfinite(maximum)
    assert np.abs(state.maximum[seen] - maximum[seen]).max() <= 40 * 2.0**-21
    assert (state.maximum[~seen] == -np.inf).all()


def check_attention_grouped():
    near_reference(make_case(rows=(2, 0, 1), lengths=(34, 1, 9), group=2, kv_heads=2))


def check_attention_wide_group():
    near_reference(make_case(rows=(1,), lengths=(9,), group=18, head_dim=5, page_size=5))


def check_attention_large_head():
    near_reference(make_case(rows=(1,), lengths=(33,), group=1, head_dim=200, kv="fp8_e5m2", q=BFLOAT16))


def check_attention_float32():
    near_reference(
        make_case(rows=(1, 1), lengths=(6, 3), kv="float32", q=np.float32, head_dim=3, page_size=1)
    )


def check_attention_float16_kv():
    near_reference(make_case(rows=(2,), lengths=(12,), group=1, kv="float16", head_dim=20))


def check_attention_bfloat16_kv():
    near_reference(make_case(rows=(1,), lengths=(12,), group=2, kv="bfloat16", page_size=784))


def check_two_splits():
    """A split ends at 512, so that 515 tokens take two, and the row before the last one more token than one."""
    near_reference(make_case(rows=(3,), lengths=(515,), group=1, head_dim=4))


def check_uniform_attention_is_exact():
    """Equal scores make every probability exactly 1, and sums of small integers are exact."""
    case = make_case(rows=(1,), lengths=(70,), group=2, head_dim=8, value=1.0)
    case.cache.v[case.block_table[0, 0], 0] = FORMATS["fp8_e4m3"].value.type(1.125).view(np.uint8)
    case = dataclasses.replace(
        case, q=np.zeros_like(case.q), cache=dataclasses.replace(case.cache, v_scale=1.0)
    )
    state = case.state()
    codes = reference.decode(case.cache.v[case.block_table[0]].reshape(-1, 1, 8)[:70, 0], "fp8_e4m3")
    assert (state.maximum == 0).all()
    assert (state.sum == 70).all()
    assert (state.numerator == codes.sum(0)).all()


def check_cancelling_scores():
    """Halves of head_dim that cancel: differences of scores within 2^-21 of sum |q k| (section 4 of the design)."""
    head_dim, tokens = 256, 8
    rng = np.random.default_rng(5)
    case = make_case(
        rows=(tokens,), lengths=(tokens,), group=1, head_dim=head_dim, kv="float32", q=np.float32
    )
    half = rng.uniform(0.1, 0.9, (tokens, 128)).astype(np.float32)
    k = np.concatenate([half, -half[:, rng.permutation(128)]], 1)
    k[:, -1] += np.linspace(
        0, 0.5, tokens
    )  # each token's score is above the last's, and so its row's maximum
    case.cache.k[case.block_table[0, 0], :tokens, 0] = k
    unit = case.scale * np.log2(np.e) * case.cache.k_scale
    scores = case.state(q=np.ones_like(case.q)).maximum[:, 0]
    wide = k.astype(np.float64) * unit
    assert (np.abs(scores - wide.sum(1)) <= 2.0**-21 * np.abs(wide).sum(1)).all()


def check_infinite_scores():
    """A key of -inf gives its token weight 0: the sum's compensation must not make inf - inf of it."""
    case = make_case(rows=(1,), lengths=(6,), group=1, head_dim=40, kv="fp8_e5m2")
    case = dataclasses.replace(case, q=np.abs(case.q))
    case.cache.k[case.block_table[0, 0], 2, 0, [0, 20]] = 0xFC
    near_reference(case)


def check_relocated_pages():
    case = make_case(rows=(2, 1), lengths=(37, 20), group=1)
    other = PagedKVCache.empty(
        case.cache.num_pages + 2, 16, 1, 16, k_scale=case.cache.k_scale, v_scale=case.cache.v_scale
    )
    poison(other)
    moved = np.random.default_rng(9).permutation(other.num_pages)[: case.cache.num_pages]
    other.k[moved], other.v[moved] = case.cache.k, case.cache.v
    table = moved[case.block_table].astype(np.int32)
    same_states(case.state(), case.state(cache=other, block_table=table))


def check_wider_table():
    case = make_case(rows=(2, 1), lengths=(37, 20), group=1)
    wider = np.full((2, 100), 2**31 - 1, np.int32)
    wider[:, : case.block_table.shape[1]] = case.block_table
    same_states(case.state(), case.state(block_table=wider))


def check_alone_and_among_others():
    """A request of one row and a request of five, whose blocks have 4, 8 or 16 lanes as the company asks."""
    case = make_case(rows=(1, 5), lengths=(9, 34), group=2, head_dim=4)
    together = case.state()
    for r, (row, past) in enumerate(zip(case.query_start_loc[:-1], case.query_start_loc[1:], strict=True)):
        alone = case.state(
            q=case.q[row:past],
            block_table=case.block_table[r : r + 1],
            row_lengths=case.row_lengths[row:past],
            query_start_loc=np.int32([0, past - row]),
        )
        for x, y in zip(dataclasses.astuple(alone), dataclasses.astuple(together), strict=True):
            same_bits(x, y[row:past])


def check_waves():
    """As many launches as it takes to fit a small workspace, with the same bits."""
    from corekern import simt

    case = make_case(rows=(1, 3), lengths=(5, 8), group=1, head_dim=5)
    problem = problem_of(case)
    state = PartialState(*(np.empty_like(a) for a in dataclasses.astuple(case.state())))
    plan = simt.plan_launch(problem, case.block_table.shape[1], workspace_limit=1)
    assert plan.tiles_per_wave == 1
    assert plan.tiles > 1
    workspace = np.full(plan.workspace_bytes, 0xFF, np.uint8)
    call(plan.launch, *case.arguments, case.scale, workspace, state)
    same_states(case.state(), state)


def check_output_is_the_finalized_state():
    from corekern import simt

    case = make_case(rows=(2,), lengths=(5,), group=2)
    state = case.state()
    for dtype in (np.float16, BFLOAT16, np.float32):
        finalized = np.empty(case.q.shape, dtype)
        call(simt.finalize, state, finalized)
        expected = np.empty(case.q.shape, dtype)
        cpu.finalize(state, expected)
        same_bits(finalized, expected)
        strided = np.zeros((2, 16, 4), dtype)[:, ::-1].swapaxes(1, 2)[:, ::2]
        plan = simt.plan_launch(problem_of(case), case.block_table.shape[1], np.dtype(dtype).name)
        call(plan.launch, *case.arguments, case.scale, np.empty(plan.workspace_bytes, np.uint8), strided)
        same_bits(strided, expected)


def check_unseen_is_nothing():
    """Inactive rows, rows of nobody, negative lengths and impossible pages: zero, or as if the tokens were not."""
    case = make_case(rows=(5,), lengths=(40,), group=1)
    rows = np.concatenate([case.q, case.q[:2]])
    lengths = np.int32([36, 0, -3, 39, 2**31 - 1, 7, 9])
    state = case.state(q=rows, row_lengths=lengths)
    clipped = case.state(row_lengths=np.int32([36, 0, 0, 39, 48]))
    same_states(state, clipped, slice(0, 4))
    for row in (1, 2, 5, 6):
        assert (state.numerator[row] == 0).all()
        assert not np.signbit(state.numerator[row]).any()
        assert (state.sum[row] == 0).all()
        assert (state.maximum[row] == -np.inf).all()
    # The last row is cut off at the table's 48 tokens, of which the last 8 are poison.
    assert np.isnan(state.numerator[4]).all()
    for pages in ((-1, 65536), (2**31 - 1, case.cache.num_pages)):
        table = case.block_table.copy()
        table[0, 1:] = pages
        state = case.state(block_table=table)
        numerator, _, total = reference.partial_attention(
            *dataclasses.replace(case, block_table=table).arguments
        )
        assert np.linalg.norm(state.numerator - numerator) <= 3e-6 * np.linalg.norm(numerator)
        assert np.abs(state.sum - total).max() <= 3e-6 * total.max()


def check_strided_arguments():
    """q offset by 2 bytes, padded tokens, lengths and tables that are views: the bits of plain arrays."""
    case = make_case(rows=(2, 1), lengths=(20, 9), group=1, kv_heads=2)
    q = np.zeros(case.q.size + 1, np.float16)[1:].reshape(case.q.shape)
    q[...] = case.q
    pages, page_size, kv_heads, head_dim = case.cache.k.shape
    padded = np.full((pages, page_size + 1, kv_heads, 2, head_dim + 9), 0x7F, np.uint8)[
        :, 1:, ::-1, :, :head_dim
    ]
    padded[:, :, :, 0], padded[:, :, :, 1] = case.cache.k, case.cache.v
    cache = dataclasses.replace(case.cache, k=padded[:, :, :, 0], v=padded[:, :, :, 1])
    table = np.zeros((2, 2 * case.block_table.shape[1]), np.int32)[::-1, ::2]
    lengths, starts = np.zeros(6, np.int32)[::-2], np.zeros(6, np.int32)[::2]
    table[...], lengths[...], starts[...] = case.block_table, case.row_lengths, case.query_start_loc
    same_states(
        case.state(),
        case.state(q=q, cache=cache, block_table=table, row_lengths=lengths, query_start_loc=starts),
    )


def check_merge():
    from corekern import simt

    case = make_case(rows=(1, 1), lengths=(30, 25), page_size=8)
    halves = [case.block_table.copy() for _ in range(2)]
    halves[0][:, 1::2] = -1
    halves[1][:, ::2] = -1
    nothing = case.state(row_lengths=np.zeros_like(case.row_lengths))
    parts = [nothing, *(case.state(block_table=table) for table in halves)]
    merged, whole = call(simt.merge, parts), case.state()
    same_bits(merged.maximum, whole.maximum)
    # Two folds of one FMA each, over states that are themselves a few roundings from exact.
    np.testing.assert_allclose(merged.sum, whole.sum, rtol=1e-6)
    scale = np.abs(whole.numerator).max()
    np.testing.assert_allclose(merged.numerator, whole.numerator, rtol=0, atol=2e-6 * scale)
    same_states(call(simt.merge, [whole]), whole)
    assert call(simt.merge, [whole]).numerator is not whole.numerator
    same_states(call(simt.merge, [nothing, nothing]), nothing)


def problem_of(case: Case) -> AttentionProblem:
    rows, q_heads, head_dim = case.q.shape
    return AttentionProblem(
        device="cuda",
        rows=rows,
        requests=len(case.query_start_loc) - 1,
        q_heads=q_heads,
        kv_heads=case.cache.kv_heads,
        head_dim=head_dim,
        page_size=case.cache.page_size,
        q_dtype=case.q.dtype.name,
        kv_dtype=case.cache.format.name,
        max_query_len=rows,
        compute_capability=0,
    )


CHECKS = {name.removeprefix("check_"): f for name, f in list(globals().items()) if name.startswith("check_")}


def make_checks() -> dict:
    """The traceback of each check that failed, and the seconds that each took."""
    hasten_simulator()
    failed, seconds = {}, {}
    for name, check in CHECKS.items():
        begin = time.monotonic()
        try:
            check()
        except Exception:
            failed[name] = traceback.format_exc()
        seconds[name] = round(time.monotonic() - begin, 1)
    return {"failed": failed, "seconds": seconds}


def hasten_simulator() -> None:
    """Replaces what makes numba-cuda's simulator slow; kernels and the names that they call stay its own.

    It makes threads for every block and polls them, wraps arrays that kernels only index, finds a shared array
    by a whole traceback, and takes two locks to call a device function. In exchange, this one asks that threads
    of a block meet the same barriers, as they do here.
    """
    import threading

    from numba.cuda.np import numpy_support
    from numba.cuda.simulator import kernel, kernelapi
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    from corekern import simt

    modules = [simt.codec, simt.combine, simt.convert, simt.split]
    real_cuda = simt.split.cuda
    lock = threading.Lock()

    class Thread(kernel.BlockThread):
        def run(self):
            try:
                for place in np.ndindex(*self._manager.grid):
                    self.blockIdx = kernelapi.Dim3(*place)
                    self._target()
                    self.barrier.wait()
            except Exception as error:
                self.exception = error
                self.barrier.abort()

        def syncthreads(self):
            self.barrier.wait()

    def call(self, *args):
        if self._device:
            return self.fn(*args)
        args = [a._ary if isinstance(a, FakeCUDAArray) else a for a in args]
        grid, block = (
            (*(n if isinstance(n, tuple) else (n,)), 1, 1)[:3] for n in (self.grid_dim, self.block_dim)
        )
        manager = kernel.BlockManager(self.fn, grid, block, False)
        manager.grid = grid
        places = list(np.ndindex(*block))
        threads = [Thread(lambda: self.fn(*args), manager, (0, 0, 0), place, False) for place in places]
        barrier = threading.Barrier(len(threads), timeout=120)
        for module in modules:
            module.cuda = (
                kernelapi.FakeCUDAModule(grid, block, 0) if module is modules[0] else modules[0].cuda
            )
        try:
            for thread in threads:
                thread.barrier = barrier
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for module in modules:
                module.cuda = real_cuda
        errors = [thread.exception for thread in threads if thread.exception]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error

    def array(self, shape, dtype):
        line = sys._getframe(1).f_lineno
        with lock:
            if line not in self._allocations:
                self._allocations[line] = np.empty(shape, numpy_support.as_dtype(dtype))
            return self._allocations[line]

    sys.setswitchinterval(1.0)  # a thread runs until its next barrier
    kernel.FakeCUDAKernel.__call__ = call
    kernelapi.FakeCUDAShared.array = array


# ---- Compilation, without a GPU -------------------------------------------------------------------------------

ARCHITECTURES = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


@pytest.fixture
def lower(monkeypatch):
    """Lowers a kernel once to what any architecture's PTX can be made from, without a GPU."""
    pytest.importorskip("numba.cuda.core", reason="numba-cuda is not installed")
    from types import SimpleNamespace

    from numba.cuda import compiler, dispatcher, types

    # Device functions ask which GPU there is, though nothing in them depends on it.
    oldest = SimpleNamespace(compute_capability=ARCHITECTURES[0])
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: oldest)

    def lower(kernel, argument_types):
        options = {"nvvm_options": {"opt": 3, "fastmath": False}, "cc": oldest.compute_capability}
        result = compiler.compile_cuda(kernel.py_func, types.void, argument_types, **options)
        compiler.kernel_fixup(result.library.get_function(result.fndesc.llvm_func_name), False)
        return result.library

    return lower


def supported(architecture) -> bool:
    from numba.cuda.cudadrv.nvrtc import get_supported_ccs

    return architecture in get_supported_ccs()


def assemble(ptx: str, architecture, tmp_path) -> dict:
    """Registers, shared memory and spilled bytes, by the assembler that comes with numba-cuda's compiler."""
    nvcc = pytest.importorskip("nvidia.cuda_nvcc", reason="no ptxas: numba-cuda[cu12] brings one")
    ptxas = Path(nvcc.__path__[0], "bin", "ptxas")
    (tmp_path / "kernel.ptx").write_text(ptx)
    arch = "sm_{}{}".format(*architecture)
    command = [ptxas, "-v", "-arch", arch, tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    find = {
        "registers": r"Used (\d+) registers",
        "shared": r"(\d+) bytes smem",
        "spilled": r"(\d+) bytes spill stores",
    }
    return {name: int(found[1]) if (found := re.search(p, report)) else 0 for name, p in find.items()}


def every_kernel():
    """(name, kernel, argument types), each made when it is asked for."""
    from corekern.simt import codec, combine, split

    for source in ("float16", "bfloat16", "float32", "float64"):
        for target in FP8:
            name = f"encode-{source}-{target}"
            yield name, lambda s=source, t=target: (codec.encode_kernel(s, t, True), codec.encode_types(s))
    for source in FP8:
        for target in ("float16", "bfloat16", "float32"):
            name = f"decode-{source}-{target}"
            yield name, lambda s=source, t=target: (codec.decode_kernel(s, t), codec.decode_types(t))
    for target in ("float16", "bfloat16", "float32", None):
        yield (
            f"combine-{target}",
            lambda t=target: (combine.combine_kernel(16, 2, t), combine.combine_types(t)),
        )
    for target in ("float16", "bfloat16", "float32"):
        yield f"finalize-{target}", lambda t=target: (combine.finalize_kernel(t), combine.finalize_types(t))
    yield "merge", lambda: (combine.merge_kernel, combine.merge_types())
    for q, kv, lanes, dims in SPLITS:
        name = f"split-{q}-{kv}-{lanes}-{dims}"
        yield name, lambda a=(q, kv, lanes, dims): (split.split_kernel(*a), split.split_types(*a[:2]))


# Every number of lanes, both sizes of head_dim, and the formats that the others do not convert.
SPLITS = (
    ("float16", "fp8_e4m3", 16, 2),
    ("float16", "fp8_e4m3", 8, 2),
    ("float16", "fp8_e4m3", 4, 1),
    ("bfloat16", "fp8_e5m2", 16, 1),
    ("float32", "float32", 4, 2),
)


def compile_all(lower, tmp_path, names, architectures, assembled) -> None:
    """PTX for those architectures that the compiler knows, and machine code for those in `assembled`."""
    for name, make in every_kernel():
        if name in names:
            library = lower(*make())
            for architecture in filter(supported, architectures):
                ptx = library.get_asm_str(cc=architecture)
                assert ".target sm_{}{}".format(*architecture) in ptx
                if architecture in assembled:
                    used = assemble(ptx, architecture, tmp_path)
                    assert used["spilled"] == 0, (name, architecture, used)
                    assert used["shared"] <= 48 << 10, (name, architecture, used)


def test_kernels_compile_for_every_architecture(lower, tmp_path):
    """One kernel of each family."""
    names = (
        "encode-float64-fp8_e4m3",
        "decode-fp8_e5m2-bfloat16",
        "combine-None",
        "finalize-float16",
        "merge",
        "split-float16-fp8_e4m3-4-1",
    )
    compile_all(lower, tmp_path, names, ARCHITECTURES, assembled=ARCHITECTURES[:1])


@pytest.mark.slow
def test_every_kernel_compiles_for_the_oldest_and_the_newest_architecture(lower, tmp_path):
    ends = (ARCHITECTURES[0], ARCHITECTURES[-1])
    compile_all(lower, tmp_path, [name for name, _ in every_kernel()], ends, assembled=ends)


def test_a_broken_kernel_does_not_compile(lower, tmp_path):
    from numba import cuda
    from numba.cuda.core.errors import TypingError

    from corekern.simt.convert import rounder
    from corekern.simt.device import array_type

    to_stored = rounder("fp8_e4m3")

    @cuda.jit
    def broken(x):
        x[0] = to_stored(x[1], x[2])

    with pytest.raises(TypingError):
        lower(broken, (array_type(np.float32),))
    with pytest.raises(subprocess.CalledProcessError):
        assemble(".version 7.0\n.target sm_70\nbroken", (7, 0), tmp_path)


# ---- The rest -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def program(request):
    """The checks in the simulator, if any are asked for, beside the other tests: they take the longest."""
    asked = any("simulated" in getattr(item, "fixturenames", ()) for item in request.session.items)
    if not asked or importlib.util.find_spec("numba_cuda") is None:
        yield None
        return
    program = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield program
    program.kill()
    program.wait()


@pytest.fixture(scope="module")
def simulated(program):
    if program is None:
        pytest.skip("numba-cuda is not installed")
    output, _ = program.communicate()
    assert program.returncode == 0
    return json.loads(output)


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_simulator(simulated, check):
    assert check in simulated["seconds"]
    assert check not in simulated["failed"], simulated["failed"][check]


@pytest.fixture
def gpu():
    pytest.importorskip("numba.cuda.core", reason="numba-cuda is not installed")
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no CUDA device: {error}")
    return cupy


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_on_a_gpu(gpu, check):
    CHECKS[check]()


@pytest.mark.gpu
def test_a_captured_graph_reads_lengths_when_it_is_replayed(gpu):
    from corekern import simt

    case = make_case(rows=(2, 1), lengths=(600, 70))
    q, table, lengths, starts = (
        gpu.asarray(a) for a in (case.q, case.block_table, case.row_lengths, case.query_start_loc)
    )
    cache = dataclasses.replace(case.cache, k=gpu.asarray(case.cache.k), v=gpu.asarray(case.cache.v))
    plan = simt.plan_launch(problem_of(case), table.shape[1], "float16")
    workspace, out = gpu.empty(plan.workspace_bytes, np.uint8), gpu.empty(q.shape, q.dtype)
    compiled = len(plan.split_kernel.overloads), len(plan.combine_kernel.overloads)
    stream = gpu.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        plan.launch(q, cache, table, lengths, starts, case.scale, workspace, out)
        graph = stream.end_capture()
    assert (len(plan.split_kernel.overloads), len(plan.combine_kernel.overloads)) == compiled
    for new in (case.row_lengths, np.int32([0, 513, 3]), np.int32([1, 0, 70])):
        lengths[...] = gpu.asarray(new)
        gpu.cuda.Device().synchronize()
        with stream:
            graph.launch()
            stream.synchronize()
        expected = np.empty(case.q.shape, np.float16)
        cpu.finalize(case.state(row_lengths=new), expected)
        same_bits(out.get(), expected)


def test_import_without_numba_cuda_says_what_to_install():
    program = (
        "import sys; sys.modules['numba.cuda.core'] = None\n"
        "import corekern\n"
        "try:\n    import corekern.simt\n"
        "except ImportError as error:\n    print(error)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'corekern[cuda12]'" in run.stdout


def test_importing_corekern_imports_no_numba_cuda():
    program = (
        "import sys, corekern; print([m for m in sys.modules if m.startswith(('corekern.simt', 'cupy'))])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


if __name__ == "__main__":
    print(json.dumps(make_checks()))
