"""What must change no bit of attention, and what must not be seen.

Nothing here has a tolerance, but where a state merged from parts is held to the contract's bounds.
"""

import functools
import importlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import (
    DTYPES,
    FP8,
    LAYOUTS,
    STATE,
    Problem,
    assert_at_floor,
    assert_same_bits,
    bits,
    make_problem,
    place,
    rel_l2,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import corekern

POISONED_FORMATS = (*FP8, "float16", "bfloat16")

each_kv_dtype = pytest.mark.parametrize("kv_dtype", POISONED_FORMATS)


@functools.cache
def batch(q_dtype: str = "float16", kv_dtype: str = "fp8_e4m3") -> Problem:
    """Three requests: several splits, less than a tile, and several tiles."""
    return make_problem(
        1, rows=(3, 1, 4), seq_lens=(4200, 20, 300), q_heads=6, kv_heads=2, head_dim=64, page_size=48,
        q_dtype=q_dtype, kv_dtype=kv_dtype,
    )  # fmt: skip


@functools.cache
def crowd() -> Problem:
    """64 requests of 1 to 4 rows."""
    rng = np.random.default_rng(2)
    lengths = rng.integers(4, 300, 64)
    lengths[[5, 40]] = 2049, 2500
    return make_problem(
        2, rows=tuple(rng.integers(1, 5, 64).tolist()), seq_lens=tuple(lengths.tolist()), q_heads=4, kv_heads=2,
        head_dim=64,
    )  # fmt: skip


def only(problem: Problem, *requests: int) -> Problem:
    """The same problem with these requests alone, in this order."""
    rows = [np.arange(*problem.query_start_loc[r : r + 2]) for r in requests]
    chosen = np.concatenate(rows)
    return problem.but(
        q=problem.q[chosen],
        block_table=problem.block_table[list(requests)],
        row_lengths=problem.row_lengths[chosen],
        query_start_loc=np.cumsum([0, *map(len, rows)]).astype(np.int32),
    )


def rows_of(problem: Problem, request: int) -> slice:
    return slice(*problem.query_start_loc[request : request + 2].tolist())


# The same call again


def test_run_to_run(backend):
    problem = batch()
    first = problem.run(backend)
    for _ in range(4):
        assert_same_bits(problem.run(backend), first)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_number_of_threads(backend, monkeypatch, threads):
    problem = crowd()
    expected = problem.run(backend)
    monkeypatch.setenv("COREKERN_NUM_THREADS", str(threads))
    assert_same_bits(problem.run(backend), expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_for_partial_states(backend, monkeypatch, threads):
    """With room for few splits at a time, a request's splits are folded in several goes."""
    if backend.name != "cpu":
        pytest.skip(f"{backend.name}: keeps all partial states at once")
    problems = [crowd(), batch()]
    expected = [p.run(backend) for p in problems]
    module = importlib.import_module("corekern.cpu.attention")  # whose name its function has too
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 0)  # leaves two tasks a thread
    monkeypatch.setenv("COREKERN_NUM_THREADS", str(threads))
    for problem, out in zip(problems, expected, strict=True):
        assert_same_bits(problem.run(backend), out)


def test_concurrent_calls(backend):
    problems = [batch(), crowd(), batch("bfloat16"), only(crowd(), 40, 5)]
    expected = [p.run(backend) for p in problems]
    work = list(range(len(problems))) * 6
    with ThreadPoolExecutor(2) as pool:
        for which, out in zip(work, pool.map(lambda i: problems[i].run(backend), work), strict=True):
            assert_same_bits(out, expected[which])


# The same request in another place


@pytest.mark.parametrize("request_", [0, 5, 17, 40, 63])
def test_a_request_alone_and_among_63_others(backend, request_):
    problem = crowd()
    together = problem.run(backend)[rows_of(problem, request_)]
    assert_same_bits(only(problem, request_).run(backend), together)


def test_the_order_of_a_batch(backend):
    problem = crowd()
    together = problem.run(backend)
    order = np.random.default_rng(3).permutation(64).tolist()
    shuffled = only(problem, *order).run(backend)
    assert_same_bits(shuffled, np.concatenate([together[rows_of(problem, r)] for r in order]))


@pytest.mark.parametrize("row", range(4))
def test_a_row_alone_and_in_its_request(backend, row):
    problem = only(batch(), 2)
    alone = problem.but(
        q=problem.q[row : row + 1],
        row_lengths=problem.row_lengths[row : row + 1],
        query_start_loc=np.int32([0, 1]),
    )
    assert_same_bits(alone.run(backend), problem.run(backend)[row : row + 1])


def test_a_short_row_beside_a_long_one(backend):
    # One row that ends splits before its neighbour: what the neighbour adds must be exactly nothing.
    if backend.route == "grouped_fp32":
        pytest.skip("splits follow the request's longest row")
    problem = only(batch(), 0).but(row_lengths=np.int32([33, 4200, 2048]))
    together = problem.run(backend)
    for row in range(3):
        alone = problem.but(
            q=problem.q[row : row + 1],
            row_lengths=problem.row_lengths[row : row + 1],
            query_start_loc=np.int32([0, 1]),
        )
        assert_same_bits(alone.run(backend), together[row : row + 1])


@pytest.mark.parametrize("more_pages", [0, 7])
def test_relocated_pages(backend, more_pages):
    problem = batch()
    pages = len(problem.k)
    where = np.random.default_rng(4).permutation(pages + more_pages)[:pages].astype(np.int32)
    moved = {}
    for name in ("k", "v"):
        array = np.full((pages + more_pages, *problem.k.shape[1:]), 0xFF, np.uint8)
        array[where] = getattr(problem, name)
        moved[name] = array
    table = np.where(problem.block_table >= 0, where[problem.block_table], -1).astype(np.int32)
    assert_same_bits(problem.but(block_table=table, **moved).run(backend), problem.run(backend))


@pytest.mark.parametrize("page", [-1, 0, 65536, 2**31 - 1])
@pytest.mark.parametrize("columns", [1, 100])
def test_wider_block_tables(backend, columns, page):
    problem = batch()
    wider = np.pad(problem.block_table, ((0, 0), (0, columns)), constant_values=page)
    assert_same_bits(problem.but(block_table=wider).run(backend), problem.run(backend))


def test_block_tables_cut_from_larger_ones(backend):
    problem = batch()
    large = backend.asarray(np.pad(problem.block_table, ((1, 1), (2, 5)), constant_values=-1))
    rows, columns = problem.block_table.shape
    assert_same_bits(
        problem.run(backend, block_table=large[1 : rows + 1, 2 : columns + 2]), problem.run(backend)
    )


@pytest.mark.parametrize("rows", [1, 29])
def test_row_padding(backend, rows):
    problem = batch()
    padded = problem.but(
        q=np.concatenate([problem.q, np.full((rows, *problem.q.shape[1:]), np.nan, problem.q.dtype)]),
        row_lengths=np.concatenate([problem.row_lengths, np.full(rows, 50, np.int32)]),
    )
    out = padded.run(backend)
    assert_same_bits(out[:-rows], problem.run(backend))
    assert not bits(out[-rows:]).any()


# The same values at other addresses


@pytest.mark.parametrize("offset", [2, 8, 14])
@pytest.mark.parametrize("q_dtype", DTYPES)
def test_queries_at_any_byte_offset(backend, q_dtype, offset):
    backend.require(q_dtype=q_dtype)
    problem = batch(q_dtype)
    q = place(backend, problem.q, offset=offset)
    assert_same_bits(problem.run(backend, q=q), problem.run(backend))


@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("padding", [2, 8, 14, 256])
def test_padded_queries_and_outputs(backend, q_dtype, padding):
    problem = batch(q_dtype)
    head = 64 * 2 + padding
    strides = (6 * head + padding, head, 2)
    q = place(backend, problem.q, strides=strides)
    out = place(backend, np.zeros_like(problem.q), strides=strides, offset=2)
    problem.run(backend, q=q, out=out)
    assert_same_bits(backend.asnumpy(out), problem.run(backend))


@pytest.mark.parametrize("kv_dtype", [*FP8, *DTYPES])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_layouts(backend, layout, kv_dtype):
    problem = batch(kv_dtype=kv_dtype)
    assert_same_bits(problem.run(backend, layout), problem.run(backend))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_layouts_of_one_head_of_256(backend, layout):
    # Padded by 8 bytes, its tokens are 264 apart: no power of two, and no multiple of 16.
    problem = make_problem(5, rows=(4,), seq_lens=(2500,), q_heads=6, head_dim=256, page_size=784)
    if layout == "token+8":
        assert problem.cache(backend, layout).k.strides[1] == 264
    assert_same_bits(problem.run(backend, layout), problem.run(backend))


def test_read_only_inputs(backend):
    problem = batch()
    arguments = problem.arguments(backend)
    for name in ("q", "block_table", "row_lengths", "query_start_loc"):
        if hasattr(arguments[name].flags, "writeable"):
            arguments[name].flags.writeable = False
    route = backend.route if backend.forced else None
    out = corekern.paged_attention(**arguments, route=route)
    assert_same_bits(backend.asnumpy(out), problem.run(backend))


def test_inputs_are_not_written(backend):
    problem = batch()
    arguments = problem.arguments(backend)
    corekern.paged_attention(**arguments)
    for name in ("q", "block_table", "row_lengths", "query_start_loc"):
        assert_same_bits(backend.asnumpy(arguments[name]), getattr(problem, name), name)
    assert_same_bits(backend.asnumpy(arguments["cache"].k), problem.k)
    assert_same_bits(backend.asnumpy(arguments["cache"].v), problem.v)


# States


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_finalize_of_a_partial_state_is_attention(backend, out_dtype):
    problem = batch()
    arguments = problem.arguments(backend)
    out = backend.asarray(np.zeros(problem.q.shape, DTYPES[out_dtype]))
    _, returned = corekern.paged_attention(**arguments, out=out, return_state=True)
    state = corekern.partial_attention(**arguments)
    for field in ("numerator", "maximum", "sum"):
        assert_same_bits(
            backend.asnumpy(getattr(state, field)), backend.asnumpy(getattr(returned, field)), field
        )
    assert_same_bits(backend.asnumpy(corekern.finalize(state, out_dtype)), backend.asnumpy(out))
    into = backend.asarray(np.zeros(problem.q.shape, DTYPES[out_dtype]))
    assert corekern.finalize(state, out=into) is into
    assert_same_bits(backend.asnumpy(into), backend.asnumpy(out))


def _parts(problem: Problem, cuts: list[int]) -> list[Problem]:
    """A one-request problem as several over consecutive pages of its context."""
    page_size = problem.k.shape[1]
    ends = [*cuts, problem.block_table.shape[1]]
    return [
        problem.but(
            block_table=problem.block_table[:, begin:end],
            row_lengths=np.clip(problem.row_lengths - begin * page_size, 0, (end - begin) * page_size),
        )
        for begin, end in zip([0, *cuts], ends, strict=True)
    ]


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 50), max_size=4).map(sorted), seed=st.integers(0, 2**32))
def test_merging_the_states_of_parts(backend, cuts, seed):
    problem = make_problem(seed, rows=(2,), seq_lens=(2500,), q_heads=6, head_dim=64, page_size=50)
    states = [corekern.partial_attention(**part.arguments(backend)) for part in _parts(problem, cuts)]
    merged = corekern.merge_states(*states)
    numerator, maximum, total = problem.expected_state()
    scale = np.exp2(maximum - backend.asnumpy(merged.maximum))
    assert rel_l2(backend.asnumpy(merged.sum), total * scale) <= STATE
    assert rel_l2(backend.asnumpy(merged.numerator), numerator * scale[..., None]) <= STATE
    assert_at_floor(backend.asnumpy(corekern.finalize(merged, "float16")), problem.expected())


def test_a_state_merged_with_nothing_keeps_its_bits(backend):
    state = batch().state(backend)
    nothing = batch().but(row_lengths=np.zeros(8, np.int32)).state(backend)
    on_backend = [
        corekern.PartialState(*(backend.asarray(getattr(s, f)) for f in ("numerator", "maximum", "sum")))
        for s in (state, nothing)
    ]
    for merged in (
        corekern.merge_states(on_backend[0]),
        corekern.merge_states(*on_backend),
        corekern.merge_states(*on_backend[::-1]),
        corekern.merge_states(on_backend[1], *on_backend),
    ):
        for field in ("numerator", "maximum", "sum"):
            assert_same_bits(backend.asnumpy(getattr(merged, field)), getattr(state, field), field)
    empty = corekern.merge_states(on_backend[1], on_backend[1])
    assert not bits(backend.asnumpy(corekern.finalize(empty))).any()


def test_merging_writes_no_input(backend):
    state = corekern.partial_attention(**batch().arguments(backend))
    before = backend.asnumpy(state.numerator).copy()
    corekern.merge_states(state, state)
    assert_same_bits(backend.asnumpy(state.numerator), before)


@pytest.mark.parametrize("gap", [0.0, 3.5, 100.0, 200.0, 1e30], ids="{}".format)
def test_merging_states_of_distant_maxima(backend, gap):
    rng = np.random.default_rng(6)
    numerators, sums = (
        rng.uniform(1, 2, (2, 3, 4, 8)).astype(np.float32),
        rng.uniform(1, 2, (2, 3, 4)).astype(np.float32),
    )
    maxima = np.float32([gap, 0])[:, None, None] * np.ones((3, 4), np.float32)
    states = [
        corekern.PartialState(*(backend.asarray(a) for a in arrays))
        for arrays in zip(numerators, maxima, sums, strict=True)
    ]
    weight = 2.0**-gap if gap < 1000 else 0.0
    # Two products and a sum of float32, each off by at most 2^-24 of it; 2^-23 for the power of two.
    for merged in (corekern.merge_states(*states), corekern.merge_states(*states[::-1])):
        assert (backend.asnumpy(merged.maximum) == np.float32(gap)).all()
        wide = numerators.astype(np.float64), sums.astype(np.float64)
        for got, (first, second) in zip((merged.numerator, merged.sum), wide, strict=True):
            np.testing.assert_allclose(backend.asnumpy(got), first + weight * second, rtol=2.0**-21)


# Poison: what no row sees


def poison(kv_dtype: str, kind: str, shape, rng) -> np.ndarray:
    """Stored elements that must not be seen."""
    dtype = np.dtype(np.uint8) if kv_dtype in FP8 else DTYPES[kv_dtype]
    value_dtype = FP8.get(kv_dtype, dtype)
    if kind == "random codes":
        return rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype)
    value = {"nan": np.nan, "-nan": -np.nan, "inf": np.inf, "-inf": -np.inf, "largest": 448.0}[kind]
    return np.full(shape, value, np.float32).astype(value_dtype).view(dtype)  # E4M3 has NaN for infinity


POISONS = ["nan", "-nan", "inf", "-inf", "largest", "random codes"]
each_poison = pytest.mark.parametrize("kind", POISONS)


def seen_slots(problem: Problem) -> np.ndarray:
    """Which (page, offset) any row sees."""
    pages, page_size = problem.k.shape[:2]
    seen = np.zeros((pages, page_size), bool)
    for request in range(len(problem.block_table)):
        lengths = problem.row_lengths[rows_of(problem, request)]
        position = np.arange(lengths.max(initial=0))
        seen[problem.block_table[request, position // page_size], position % page_size] = True
    return seen


@each_kv_dtype
@each_poison
def test_unused_slots_and_pages(backend, kind, kv_dtype):
    rng = np.random.default_rng(7)
    problem = batch(kv_dtype=kv_dtype)
    unseen = ~seen_slots(problem)
    assert unseen.any(1).sum() > unseen.all(1).sum() > 0  # whole pages, and the ends of others
    clean, poisoned = {}, {}
    for name in ("k", "v"):
        clean[name], poisoned[name] = getattr(problem, name).copy(), getattr(problem, name).copy()
        clean[name][unseen] = 0
        poisoned[name][unseen] = poison(kv_dtype, kind, poisoned[name][unseen].shape, rng)
    # Table entries past a request's pages lead to poison too.
    unused = np.flatnonzero(unseen.all(1))[0]
    table = np.where(problem.block_table < 0, unused, problem.block_table).astype(np.int32)
    assert (table != problem.block_table).any()
    expected = problem.but(**clean).run(backend)
    assert np.isfinite(expected.astype(np.float32)).all()
    assert_same_bits(problem.but(block_table=table, **poisoned).run(backend), expected)


@each_kv_dtype
@each_poison
@pytest.mark.parametrize("where", ["k", "v"])
def test_tokens_of_later_rows(backend, where, kind, kv_dtype):
    """Row i must not see tokens i + 1 and on, though its neighbours in the same tile do."""
    rng = np.random.default_rng(8)
    problem = only(batch(kv_dtype=kv_dtype), 2)
    expected = problem.run(backend)
    page_size = problem.k.shape[1]
    for row in range(3):
        array = getattr(problem, where).copy()
        for position in range(problem.row_lengths[row], 300):
            page, offset = problem.block_table[0, position // page_size], position % page_size
            array[page, offset] = poison(kv_dtype, kind, array[page, offset].shape, rng)
        out = problem.but(**{where: array}).run(backend)
        assert_same_bits(out[: row + 1], expected[: row + 1])
        assert (bits(out[row + 1 :]) != bits(expected[row + 1 :])).any()  # they do see it


@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_queries_of_inactive_rows(backend, value, q_dtype):
    problem = batch(q_dtype)
    lengths = problem.row_lengths.copy()
    inactive = [1, 3, 5, 6]
    lengths[inactive] = 0
    problem = problem.but(row_lengths=lengths)
    q = problem.q.copy()
    q[inactive] = value
    assert_same_bits(problem.but(q=q).run(backend), problem.run(backend))


@each_kv_dtype
def test_tokens_behind_page_ids_outside_the_cache(backend, kv_dtype):
    # Beside unseen tokens in one tile lie seen ones; what an unseen token would read is never looked at.
    problem = only(batch(kv_dtype=kv_dtype), 2)
    table = problem.block_table.copy()
    table[0, [0, 3]] = -1
    holes = problem.but(block_table=table)
    expected = holes.run(backend)
    assert_at_floor(expected, holes.expected())
    for page in (-2, -(2**31), len(problem.k), 65536, 2**31 - 1):
        table[0, [0, 3]] = page
        assert_same_bits(problem.but(block_table=table.copy()).run(backend), expected)


# Page ids and lengths that lead nowhere


@pytest.mark.parametrize("page", [-1, 65536, 2**31 - 1])
def test_requests_without_a_single_page(backend, page):
    problem = batch()
    table = problem.block_table.copy()
    table[1] = page
    out = problem.but(block_table=table).run(backend)
    assert not bits(out[rows_of(problem, 1)]).any()
    rest = [0, 1, 2, 4, 5, 6, 7]
    assert_same_bits(out[rest], problem.run(backend)[rest])


@pytest.mark.parametrize("length", [100_000, 2**31 - 1])
def test_lengths_past_the_block_table(backend, length):
    problem = only(batch(), 2)
    table = problem.block_table[:, :5]  # 240 tokens, all of which exist
    lengths = problem.row_lengths.copy()
    lengths[2] = length
    cut = problem.but(block_table=table, row_lengths=lengths)
    assert_at_floor(cut.run(backend), cut.expected())
    full = cut.but(row_lengths=np.full(4, 240, np.int32))
    assert_same_bits(cut.run(backend), full.run(backend))


@pytest.mark.parametrize("asked", ["argument", "environment"])
@pytest.mark.parametrize("page", [-1, 65536, 2**31 - 1])
def test_validation_names_row_request_and_page(backend, monkeypatch, page, asked):
    problem = batch()
    table = problem.block_table.copy()
    table[2, 3] = page
    bad = problem.but(block_table=table)
    bad.run(backend)
    options = {"validate": True}
    if asked == "environment":
        monkeypatch.setenv("COREKERN_VALIDATE", "1")
        options = {}
        bad.run(backend, validate=False)  # the argument has the last word
    message = (
        rf"^block_table: row 7 of request 2 sees page {page} \(entry 3\), outside \[0, {len(problem.k)}\)$"
    )
    for function in (corekern.paged_attention, corekern.partial_attention, corekern.plan_attention):
        with pytest.raises(ValueError, match=message):
            function(**bad.arguments(backend), **options)
    problem.run(backend, **options)


@pytest.mark.parametrize("asked", ["argument", "environment"])
def test_validation_of_lengths_past_the_block_table(backend, monkeypatch, asked):
    problem = batch()
    lengths = problem.row_lengths.copy()
    capacity = problem.block_table.shape[1] * 48
    lengths[5] = capacity + 1
    bad = problem.but(row_lengths=lengths)
    bad.run(backend)
    options = {"validate": True}
    if asked == "environment":
        monkeypatch.setenv("COREKERN_VALIDATE", "1")
        options = {}
    message = (
        rf"^row_lengths: row 5 of request 2 sees {capacity + 1} tokens, past the block table's {capacity}$"
    )
    with pytest.raises(ValueError, match=message):
        bad.run(backend, **options)


def test_validation_looks_only_at_what_rows_see(backend):
    problem = batch()
    lengths = problem.row_lengths.copy()
    lengths[rows_of(problem, 1)] = 0
    table = problem.block_table.copy()
    table[1] = -7
    table[2, 7:] = 2**31 - 1  # 300 tokens end in the seventh page of 48
    hidden = problem.but(row_lengths=lengths, block_table=table)
    assert_same_bits(hidden.run(backend, validate=True), hidden.run(backend))


# What rows do see


@each_kv_dtype
@pytest.mark.parametrize("position", [0, 31, 150, 299])
def test_a_visible_nan_in_v_reaches_its_column_alone(backend, position, kv_dtype):
    problem = only(batch(kv_dtype=kv_dtype), 2)
    page, offset = problem.block_table[0, position // 48], position % 48
    v = problem.v.copy()
    v[page, offset, 1, 9] = poison(kv_dtype, "nan", (1,), None)[0]
    out, expected = problem.but(v=v).run(backend), problem.run(backend)
    sees = problem.row_lengths > position
    assert sees.any()
    assert np.isnan(out[sees, 3:, 9].astype(np.float32)).all()  # query heads 3-5 share KV head 1
    expected[sees, 3:, 9] = out[sees, 3:, 9]
    assert_same_bits(out, expected)


@pytest.mark.parametrize("kv_dtype", ["fp8_e5m2", "float16", "bfloat16"])
@pytest.mark.parametrize("position", [40, 299])
def test_a_visible_infinity_in_v_propagates(backend, position, kv_dtype):
    problem = only(batch(kv_dtype=kv_dtype), 2)
    v = problem.v.copy()
    for head, kinds in enumerate((["inf"], ["inf", "-inf"])):
        for i, kind in enumerate(kinds):
            at = position - i
            v[problem.block_table[0, at // 48], at % 48, head, 0] = poison(kv_dtype, kind, (1,), None)[0]
    out = problem.but(v=v).run(backend).astype(np.float32)
    last = out[-1]  # the row that sees all
    assert (last[:3, 0] == np.inf).all()
    assert np.isnan(last[3:, 0]).all()
    assert np.isfinite(last[:, 1:]).all()


@each_kv_dtype
def test_a_visible_nan_in_k_reaches_its_heads(backend, kv_dtype):
    problem = only(batch(kv_dtype=kv_dtype), 2)
    k = problem.k.copy()
    k[problem.block_table[0, 1], 3, 0, 60] = poison(kv_dtype, "nan", (1,), None)[0]
    out, expected = problem.but(k=k).run(backend), problem.run(backend)
    assert np.isnan(out[:, :3].astype(np.float32)).all()
    assert_same_bits(out[:, 3:], expected[:, 3:])


@pytest.mark.parametrize("kv_dtype", ["fp8_e5m2", "float16"])
def test_a_score_of_minus_infinity_is_a_probability_of_zero(backend, kv_dtype):
    # In the first of four 64-element chains, so that compensated sums go on after it.
    problem = make_problem(31, seq_lens=(40,), q_heads=2, head_dim=256, kv_dtype=kv_dtype)
    q, k = np.abs(problem.q), problem.k.copy()
    page, offset = divmod(7, k.shape[1])
    at = (problem.block_table[0, page], offset, 0, 3)
    k[at] = 0xFC if k.dtype == np.uint8 else -np.inf
    problem = problem.but(q=q, k=k)
    expected = problem.expected()
    assert np.isfinite(expected).all()
    # float16 rounding: half a unit in the last place of 11 bits, and what FP32 adds to it.
    error = np.abs(problem.run(backend) - expected)
    assert (error <= 2**-11 * np.abs(expected) * 1.01 + 1e-6).all()


@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
def test_a_query_that_is_not_finite_reaches_its_row_and_head(backend, value, q_dtype):
    problem = batch(q_dtype)
    q = problem.q.copy()
    q[6, 4, 10] = value
    out, expected = problem.but(q=q).run(backend), problem.run(backend)
    assert np.isnan(out[6, 4].astype(np.float32)).all()
    expected[6, 4] = out[6, 4]
    assert_same_bits(out, expected)
