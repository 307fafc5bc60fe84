"""Grouped attention without a GPU: its host arithmetic, and what its route takes."""

import random

import pytest

from corekern import routing
from corekern.cuda import grouped


def test_division_by_the_page_size():
    numbers = random.Random(0)
    divisors = [1, 2, 3, 7, 16, 784, 3296, 3456, 1 << 20, 1 << 30, (1 << 31) - 1]
    divisors += [numbers.randrange(1, 1 << 31) for _ in range(500)]
    for divisor in divisors:
        magic, shift = grouped.division(divisor)
        assert magic < 1 << 32
        some = [0, 1, divisor - 1, divisor, 2 * divisor - 1, 2 * divisor, (1 << 31) - 1]
        for n in [*some, *(numbers.randrange(1 << 31) for _ in range(20))]:
            if n < 1 << 31:
                assert (2 * n * magic >> 32) >> shift == n // divisor


@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("rows", range(1, 17))
def test_lanes_cover_every_row_and_head(rows, group):
    lanes, blocks = grouped.lane_blocks(rows, group)
    assert lanes in grouped.LANES
    assert lanes * blocks >= rows * group


def problem(**changes) -> routing.AttentionProblem:
    usual = {
        "device": "cuda:0", "rows": 8, "requests": 1, "q_heads": 6, "kv_heads": 1, "head_dim": 256, "page_size": 3296,
        "q_dtype": "float16", "kv_dtype": "fp8_e4m3", "max_query_len": 8, "compute_capability": 90,
    }  # fmt: skip
    return routing.AttentionProblem(**usual | changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "taken"),
        ({"rows": 256, "requests": 64, "max_query_len": 4}, "taken"),
        ({"device": "cpu", "compute_capability": 0}, "arrays are on the CPU"),
        ({"head_dim": 96}, "head_dim 96 is not 64, 128 or 256"),
        ({"q_dtype": "float32"}, "q is float32, not float16 or bfloat16"),
        ({"q_heads": 17}, "17 query heads share a KV head, more than 16"),
        ({"rows": 17, "max_query_len": 17}, "a request may have 17 rows, more than 16"),
        (
            {"rows": 256, "requests": 64, "max_query_len": 256},
            "a request may have 256 rows, more than 16 (say how many with max_query_len)",
        ),
    ],
)
def test_what_the_route_takes(changes, why):
    assert routing.explain(problem(**changes))["grouped_fp32"] == why


def test_scalar_takes_what_is_left():
    assert routing.select(problem(head_dim=96)).name == "scalar_fp32"
    with pytest.raises(
        ValueError, match=r"^route: grouped_fp32 cannot take this: head_dim 96 is not 64, 128 or 256$"
    ):
        routing.select(problem(head_dim=96), "grouped_fp32")
