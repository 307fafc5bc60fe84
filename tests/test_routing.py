"""Which route takes a call, what it says about it, and what it counts."""

import logging

import numpy as np
import pytest
from helpers import Problem, make_problem

import corekern


@pytest.fixture
def backend(backend):
    if backend.forced:
        pytest.skip("what is taken when no route is asked for")
    return backend


def problem(**changes) -> Problem:
    return make_problem(1, rows=(2,), seq_lens=(20,), q_heads=2, head_dim=64, **changes)


def counted(backend) -> int:
    return corekern.route_counts().get(backend.route, 0)


def test_route_counts_grow_by_what_ran(backend):
    before = counted(backend)
    arguments = problem().arguments(backend)
    corekern.paged_attention(**arguments)
    assert counted(backend) == before + 1
    corekern.paged_attention(**arguments, return_state=True)
    corekern.partial_attention(**arguments)
    assert counted(backend) == before + 3
    plan = corekern.plan_attention(**arguments)
    assert counted(backend) == before + 3  # a plan has not run yet
    for _ in range(2):
        plan(arguments["q"], out=backend.asarray(problem().q))
    assert counted(backend) == before + 5
    assert plan.route == backend.route


def test_route_counts_is_a_copy(backend):
    problem().run(backend)
    corekern.route_counts().clear()
    assert counted(backend) > 0


def test_a_refused_call_is_not_counted(backend):
    before = corekern.route_counts()
    with pytest.raises(ValueError, match=r"^row_lengths: "):
        problem().but(row_lengths=np.int32([-1, 2])).run(backend, validate=True)
    with pytest.raises(ValueError, match=r"^route: "):
        problem().run(backend, route="warp_drive")
    assert corekern.route_counts() == before


def test_explain_route_has_one_route_taken(backend):
    arguments = problem().arguments(backend)
    del arguments["softmax_scale"]
    before = corekern.route_counts()
    reasons = corekern.explain_route(**arguments)
    assert [name for name, why in reasons.items() if why == "taken"] == [backend.route]
    assert all(reasons.values())
    by_name = corekern.explain_route(**arguments, route=backend.route)
    assert list(by_name) == list(reasons)  # every route has its say
    assert by_name[backend.route] == "taken"
    assert corekern.route_counts() == before  # explaining runs nothing


def test_a_route_asked_for_by_name(backend):
    np.testing.assert_array_equal(problem().run(backend, route=backend.route), problem().run(backend))


@pytest.mark.parametrize(
    "function", ["paged_attention", "partial_attention", "plan_attention", "explain_route"]
)
@pytest.mark.parametrize("route", ["warp_drive", "", "CPU_FP32"])
def test_unknown_routes(backend, route, function):
    arguments = problem().arguments(backend)
    if function == "explain_route":
        del arguments["softmax_scale"]
    with pytest.raises(ValueError, match=rf"^route: '{route}' is not one of .*{backend.route}") as error:
        getattr(corekern, function)(**arguments, route=route)
    assert "\n" not in str(error.value)


def test_a_route_logs_once_for_its_rows_and_page_size(backend, caplog):
    caplog.set_level(logging.INFO, logger="corekern")
    # Rows and page sizes that no other test has.
    first, other_page = problem(page_size=3299), problem(page_size=3297)
    other_rows = first.but(
        q=np.concatenate([first.q] * 7),
        row_lengths=np.concatenate([first.row_lengths] * 7),
        query_start_loc=np.int32([0, 14]),
    )
    for _ in range(3):
        first.run(backend)
    first.but(q=-first.q).run(backend)
    other_page.run(backend)
    other_rows.run(backend)
    other_rows.run(backend)
    first.run(backend)
    lines = [(r.name, r.levelno, r.getMessage()) for r in caplog.records]
    text = "{} selected (rows={}, page={}, state=fp32 numerator/max/sum)"
    assert lines == [
        ("corekern", logging.INFO, text.format(backend.route, rows, page))
        for rows, page in ((2, 3299), (2, 3297), (14, 3299))
    ]


def test_an_explanation_logs_nothing(backend, caplog):
    caplog.set_level(logging.INFO, logger="corekern")
    arguments = problem(page_size=3301).arguments(backend)
    del arguments["softmax_scale"]
    corekern.explain_route(**arguments)
    assert not caplog.records
