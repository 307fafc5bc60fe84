"""The grouped Hopper kernel without a GPU: it compiles and spills nothing, and its host arithmetic is right."""

import random

import pytest

from corekern.cuda import grouped

# What a model's verify and decode steps use; the fallback without tensor maps may spill.
HOT = {
    "q8-h6-d256": {"HEAD_DIM": "256", "LANES": "48", "VALUE": "float16"},
    "bfloat16": {"HEAD_DIM": "256", "LANES": "48", "VALUE": "bfloat16"},
    "e5m2": {"HEAD_DIM": "256", "LANES": "48", "VALUE": "float16", "FORMAT": "fp8_e5m2"},
    "q1-h6-d256": {"HEAD_DIM": "256", "LANES": "8", "VALUE": "float16"},
    "d128": {"HEAD_DIM": "128", "LANES": "48", "VALUE": "float16"},
    "d64": {"HEAD_DIM": "64", "LANES": "16", "VALUE": "float16"},
}


@pytest.mark.parametrize("case", HOT)
def test_compiles_without_spills(case):
    nvrtc = pytest.importorskip("corekern.cuda.nvrtc")
    try:
        nvrtc.version()
    except ImportError as error:
        pytest.skip(str(error))
    choices = {"FORMAT": "fp8_e4m3", "MAPS": "1", "SEGMENTS": "128", **HOT[case]}
    compiled = nvrtc.compile_cubin(grouped.SOURCE, grouped.ARCH, grouped.defines(choices))
    resources = compiled.resources[grouped.ENTRY]
    assert resources.spill_bytes == 0
    # The whole register file and no more.
    assert resources.registers * grouped.threads_of(int(choices["HEAD_DIM"])) <= 65536


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


@pytest.mark.parametrize("group", grouped.GROUPS)
@pytest.mark.parametrize("rows", range(1, 17))
def test_lanes_cover_every_row_and_head(rows, group):
    lanes, blocks = grouped.lane_blocks(rows, group)
    assert lanes in grouped.LANES
    assert lanes * blocks >= rows * group
