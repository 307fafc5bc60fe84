"""Sparse attention over packed selections: error, modes, invariances, and what must not be seen."""

import logging

import numpy as np
import pytest
from helpers import BFLOAT16, assert_at_floor, assert_same_bits, rel_l2
from qsa_problems import make_sparse, poisoned

import corekern
from corekern import PagedKVCache, qsa
from corekern import reference as dense

FORMATS = ("fp8_e4m3", "fp8_e5m2", "bfloat16", "float16")
HEADS = {"24/2": (24, 2), "12/1": (12, 1), "6/1": (6, 1)}


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("heads", HEADS)
def test_error_is_the_rounding_floor(backend, heads, kv_dtype, gated):
    q_heads, kv_heads = HEADS[heads]
    problem = make_sparse(
        1, rows=9, requests=3, q_heads=q_heads, kv_heads=kv_heads, head_dim=256, page_size=80, budget=256,
        kv_dtype=kv_dtype, gated=gated, padding=2,
    )  # fmt: skip
    out = problem.run(backend)
    assert out.dtype == BFLOAT16
    assert_at_floor(out, problem.expected())
    assert not out[9:].view(np.uint16).any()


def test_a_budget_for_every_token_is_dense_attention(backend):
    problem = make_sparse(18, rows=20, requests=3, q_heads=12, budget=80, gated=False)
    starts = np.searchsorted(problem.token_to_request, np.arange(4)).astype(np.int32)
    lengths = problem.packed[:, -1]  # all that a row sees is selected
    expected = dense.paged_attention(problem.q, problem.cache(), problem.block_table, lengths, starts)
    assert_at_floor(problem.run(backend), expected)


@pytest.mark.parametrize("page_size", [1, 16, 784, 800, 1568, 1600])
@pytest.mark.parametrize("unit_scales", [True, False], ids=["unit", "scaled"])
def test_pages_of_any_size(backend, page_size, unit_scales):
    problem = make_sparse(
        2, rows=5, requests=2, q_heads=12, head_dim=128, page_size=page_size,
        pages_per_request=max(2, 128 // page_size), unit_scales=unit_scales,
    )  # fmt: skip
    assert_at_floor(problem.run(backend), problem.expected())


@pytest.mark.parametrize("q_dtype", ["bfloat16", "float16"])
def test_rounding_twice_reproduces_the_two_roundings(backend, q_dtype):
    problem = make_sparse(3, rows=6, q_heads=8, q_dtype=q_dtype)
    attention = problem.but(gate=None).run(backend).astype(np.float32)
    gate = problem.gate.astype(np.float32)
    twice = problem.run(backend, round_before_gate=True)
    # The gate's exponential differs by some FP32 units between libraries: one rounding in about 2^13 may flip.
    expected = (attention / (1 + np.exp(-gate))).astype(problem.q.dtype)
    different = np.count_nonzero(twice != expected)
    assert different <= twice.size // 500
    assert rel_l2(twice, problem.expected(round_before_gate=True)) < rel_l2(twice, problem.expected())
    once = problem.run(backend)
    assert rel_l2(once, problem.expected()) < rel_l2(twice, problem.expected())


def test_the_gate_may_come_flat(backend):
    problem = make_sparse(4)
    flat = backend.asarray(problem.gate.reshape(len(problem.gate), -1))
    assert_same_bits(problem.run(backend, gate=flat), problem.run(backend))


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "bfloat16"])
def test_a_row_does_not_depend_on_its_company(backend, kv_dtype):
    problem = make_sparse(5, rows=40, requests=5, q_heads=6, kv_dtype=kv_dtype, padding=1)
    together = problem.run(backend)
    for rows in ([0], [17], [3, 2, 39], list(range(20, 33)), list(range(39, -1, -1))):
        assert_same_bits(problem.rows(rows).run(backend), together[rows], str(rows))
    wider = np.pad(problem.block_table, ((0, 0), (0, 3)), constant_values=-1)
    assert_same_bits(problem.but(block_table=wider).run(backend), together, "table width")
    assert_same_bits(problem.run(backend), together, "a second run")


@pytest.mark.parametrize("plan", [qsa.Plan(64, 1, 4), qsa.Plan(64, 8, 4)], ids=["one split", "eight"])
def test_a_plan_changes_no_bit(backend, plan):
    problem = make_sparse(6, rows=3, q_heads=12, budget=256)
    assert_same_bits(problem.run(backend, plan=plan), problem.run(backend))


@pytest.mark.parametrize("layout", ["separate", "token+8", "interleaved-offset-14", "heads-first"])
def test_layouts_give_the_same_bits(backend, layout):
    problem = make_sparse(7, kv_heads=2)
    assert_same_bits(problem.run(backend, layout), problem.run(backend))


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "bfloat16"])
def test_unselected_memory_never_reaches_an_output(backend, kv_dtype):
    problem = make_sparse(8, rows=7, requests=3, kv_dtype=kv_dtype, padding=2)
    expected = problem.run(backend)
    problem = poisoned(problem)
    q, gate = problem.q.copy(), problem.gate.copy()
    q[7:] = gate[7:] = np.nan
    packed = problem.packed.copy()
    packed[7:] = 5  # padding rows may hold anything
    assert_same_bits(problem.but(q=q, gate=gate, packed=packed).run(backend), expected)


def test_tokens_without_a_page_are_unseen(backend):
    problem = poisoned(make_sparse(9, rows=6, requests=2, budget=128))
    table, packed = problem.block_table.copy(), problem.packed.copy()
    table[0, 1], table[0, 3], table[1, 0] = -1, 10**6, -(10**9)
    packed[2, 3], packed[2, 5] = -1, 2**31 - 1
    packed[3, 0] = 5 * 16  # just past the table
    problem = problem.but(block_table=table, packed=packed)
    assert_at_floor(problem.run(backend), problem.expected())


def test_page_ids_past_65535(backend):
    problem = make_sparse(17, rows=3, page_size=1, pages_per_request=80, spare_pages=70_000)
    assert (problem.block_table > 65_535).any()
    assert_at_floor(problem.run(backend), problem.expected())


def test_rows_that_see_nothing_are_zero(backend):
    problem = make_sparse(10, rows=5)
    packed, request = problem.packed.copy(), problem.token_to_request.copy()
    packed[0, -1], packed[1, :-1], packed[2, -1] = 0, -1, -7
    request[3], request[4] = -1, 10**6
    problem = problem.but(packed=packed, token_to_request=request)
    assert not problem.run(backend).view(np.uint16).any()


def test_order_and_repeats_of_a_selection(backend):
    problem = make_sparse(11, rows=2)
    packed = problem.packed.copy()
    count = packed[0, -1]
    packed[0, :count] = np.random.default_rng(0).permutation(packed[0, :count])
    packed[1, 1] = packed[1, 0]  # counts twice
    packed[1, -1] = 10**6  # more than there are columns
    problem = problem.but(packed=packed)
    assert_at_floor(problem.run(backend), problem.expected())


def test_extreme_scores(backend):
    """One token outweighs all others by more than float32's range of exponents, at the first and last place."""
    problem = make_sparse(12, rows=2, kv_dtype="bfloat16", gated=False)
    packed, k = problem.packed, problem.k.copy()
    for row, place in ((0, 0), (1, int(packed[1, -1]) - 1)):
        token = packed[row, place]
        page = problem.block_table[0, token // 16]
        k[page, token % 16, 0] = 1000 * problem.q[row, 0]
    problem = problem.but(k=k)
    out = problem.run(backend)
    assert np.isfinite(out.astype(np.float32)).all()
    assert_at_floor(out, problem.expected())


def test_a_route_is_counted_and_explained(backend, caplog):
    problem = make_sparse(13, rows=23, page_size=16)
    name = {"cpu": "qsa_cpu_fp32", "cuda": "qsa_splitk_fp32"}[backend.name]
    before = corekern.route_counts().get(name, 0)
    with caplog.at_level(logging.INFO, "corekern"):
        problem.run(backend)
        problem.run(backend)
    assert corekern.route_counts()[name] == before + 2
    assert sum(f"{name} selected (rows=23, page=16" in r.getMessage() for r in caplog.records) <= 1
    assert qsa.explain_route(**problem.arguments(backend))[name] == "taken"


def test_output_is_written_where_it_is_asked(backend):
    problem = make_sparse(14)
    wide = backend.zeros((4, 4, 128), problem.q.dtype)
    out = wide[:, :, :64]
    assert problem.run(backend, out=out) is not None
    assert_same_bits(np.ascontiguousarray(backend.asnumpy(out)), problem.run(backend))
    assert not backend.asnumpy(wide[:, :, 64:]).any()


BAD = {
    "cache": ({"cache": 3}, TypeError),
    "plan": ({"plan": (64, 8, 4)}, TypeError),
    "q": ({"q": np.zeros((4, 3, 2, 64), BFLOAT16)}, ValueError),
    "packed": ({"packed": np.zeros((4, 68), np.int64)}, TypeError),
    "packed ": ({"packed": np.zeros((4, 1), np.int32)}, ValueError),
    "block_table": ({"block_table": np.zeros((0, 4), np.int32)}, ValueError),
    "token_to_request": ({"token_to_request": np.zeros(3, np.int32)}, ValueError),
    "gate": ({"gate": np.zeros((4, 255), BFLOAT16)}, ValueError),
    "gate ": ({"gate": np.zeros((4, 4, 64), np.float32)}, TypeError),
    "out": ({"out": np.zeros((4, 4, 64), np.float32)}, TypeError),
    "softmax_scale": ({"softmax_scale": np.inf}, ValueError),
    "route": ({"route": "cpu_fp32"}, ValueError),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_one_clear_line(backend, name):
    change, kind = BAD[name]
    change = {n: backend.asarray(a) if isinstance(a, np.ndarray) else a for n, a in change.items()}
    with pytest.raises(kind, match=rf"^{name.strip()}: [^\n]+$"):
        make_sparse(15).run(backend, **change)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("packed", 99, r"^packed: row 1 of request 0 has token 99, past the block table's 80$"),
        ("count", 99, r"^packed: row 1 counts 99 tokens, outside \[0, 67\]$"),
        ("page", 7, r"^block_table: row 0 of request 0 sees page 7 \(entry 0\), outside \[0, 7\)$"),
    ],
    ids=["token", "count", "page"],
)
def test_validate_names_the_row(backend, where, value, message):
    problem = make_sparse(16)
    packed, table = problem.packed.copy(), problem.block_table.copy()
    if where == "page":
        packed[0, :2], packed[0, -1] = (0, 1), 2
        table[0, 0] = value
    else:
        packed[1, 0 if where == "packed" else -1] = value
    problem = problem.but(packed=packed, block_table=table)
    problem.run(backend)
    with pytest.raises(ValueError, match=message):
        problem.run(backend, validate=True)


def test_tuning_tables_cover_every_call():
    for arch in ("sm_70", "sm_90", "sm_120"):
        for itemsize in (1, 2):
            for row_heads in (1, 24, 25, 4096, 1 << 20):
                for uniform in (True, False):
                    plan = qsa.choose_plan(arch, itemsize, row_heads, uniform=uniform)
                    assert plan.num_splits >= 1
                    assert plan.rows_per_tile >= 1


def test_warmup_says_how_many(backend):
    count = qsa.warmup(device=backend.name, q_heads=6, kv_heads=1)
    assert count >= 3  # attention, logits and top k at least
    assert qsa.warmup(device=backend.name, q_heads=6, kv_heads=1) == count
    with pytest.raises(ValueError, match=r"^q_heads: "):
        qsa.warmup(q_heads=5, kv_heads=2)


def test_no_rows(backend):
    cache = PagedKVCache.empty(1, 16, 1, 64, device=backend.name)
    q, packed = backend.zeros((0, 4, 64), np.float16), backend.zeros((0, 8), np.int32)
    table, owner = backend.zeros((1, 1), np.int32), backend.zeros((0,), np.int32)
    assert qsa.attention(q, cache, packed, table, owner).shape == (0, 4, 64)
