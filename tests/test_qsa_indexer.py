"""Compress, select and expand: against the reference, and exactly where exactness is promised."""

import ml_dtypes
import numpy as np
import pytest
from helpers import BFLOAT16, assert_same_bits

from corekern import qsa
from corekern.qsa import reference

RATIO = 4


# Side caches and compress


@pytest.mark.parametrize("rope", [True, False], ids=["rope", "plain"])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=["bfloat16", "float16"])
def test_groups_are_means_whatever_steps_they_came_in(backend, rope, dtype):
    """Three requests, written a few rows a step; every group's mean is that of its four keys."""
    rng = np.random.default_rng(0)
    lengths, dim, size = (57, 30, 44), 128, qsa.ring_size(RATIO, step_rows=4)
    keys = [rng.standard_normal((n, dim), np.float32).astype(dtype) for n in lengths]
    rope_positions = [rng.integers(0, 1 << 40, (n, 3)) for n in lengths]
    ring = backend.asarray(np.full((5, size, dim), np.nan, dtype))
    rope_ring = backend.asarray(np.full((5, size, 3), -7, np.int64))
    compressed = backend.asarray(np.full((9, 2, dim), np.nan, dtype))
    ring_table = backend.asarray(np.int32([4, 0, 2]))
    table = rng.permutation(9).astype(np.int32).reshape(1, 9)
    table = np.vstack([np.pad(table[:, :0], ((0, 0), (0, 8)), constant_values=-1)] * 3)
    table[0, :4], table[1, :3], table[2, :2] = (8, 1, 3, 7), (0, 6, 2), (5, 4)
    device_table = backend.asarray(table)
    done, firsts = [0, 0, 0], {}
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        counts = [min(int(rng.integers(0, 5)), n - d) for d, n in zip(done, lengths, strict=True)]
        if done[0] == 0:
            counts[0] = 21  # a prefill: more rows than the ring holds
        starts = np.cumsum([0, *counts]).astype(np.int32)
        lens = np.int32([d + c for d, c in zip(done, counts, strict=True)])
        rows = int(starts[-1]) + 2  # two of padding
        step, step_rope = np.full((rows, dim), np.nan, dtype), np.full((rows, 3), -9, np.int64)
        for r in range(3):
            step[starts[r] : starts[r + 1]] = keys[r][done[r] : lens[r]]
            step_rope[starts[r] : starts[r + 1]] = rope_positions[r][done[r] : lens[r]]
        device_starts = backend.asarray(starts)
        owner, positions = qsa.row_positions(backend.asarray(lens), device_starts, rows)
        to_compressed = qsa.compressed_slots(positions, owner, device_table, 2, RATIO)
        to_ring = qsa.ring_slots(positions, owner, device_starts, ring_table, size)
        kept = backend.asnumpy(to_ring)
        assert (
            len(np.unique(kept[kept >= 0])) == np.minimum(counts, size).sum() == np.count_nonzero(kept >= 0)
        )
        step, step_rope = backend.asarray(step), backend.asarray(step_rope)
        arguments = {"keys": step, "ring": ring, "ring_table": ring_table, "token_to_request": owner}
        arguments |= {"query_start_loc": device_starts, "positions": positions}
        arguments |= {"compressed_slots": to_compressed, "compress_ratio": RATIO}
        if rope:
            arguments |= {"rope_positions": step_rope, "rope_ring": rope_ring}
        pooled, first = qsa.compress(**arguments)
        host = {n: backend.asnumpy(a) if hasattr(a, "shape") else a for n, a in arguments.items()}
        expected, expected_first = reference.compress(**host)
        np.testing.assert_array_equal(backend.asnumpy(first), expected_first)
        live = backend.asnumpy(to_compressed) >= 0
        assert not backend.asnumpy(pooled)[~live].view(np.uint16).any()
        # bfloat16's half unit in the last place; float16's is smaller.
        means = backend.asnumpy(pooled)[live].astype(np.float64)
        np.testing.assert_allclose(means, expected[live], rtol=2.0**-8, atol=1e-6)
        for slot, position in zip(
            backend.asnumpy(to_compressed)[live], backend.asnumpy(first)[live], strict=True
        ):
            firsts[int(slot)] = position
        qsa.store(compressed, pooled, to_compressed)
        qsa.store(ring, step, to_ring)
        qsa.store(rope_ring, step_rope, to_ring)
        done = lens.tolist()
    stored = backend.asnumpy(compressed)
    for r, n in enumerate(lengths):
        for block in range(min(n // RATIO, 2 * int((table[r] >= 0).sum()))):
            four = keys[r][block * RATIO : (block + 1) * RATIO].astype(np.float32)
            # Sums of four such values and their quarter are exact in float64 and in order in float32.
            mean = (((four[0] + four[1]) + four[2]) + four[3]) / np.float32(4)
            page, offset = table[r, block // 2], block % 2
            assert_same_bits(stored[page, offset], mean.astype(dtype), f"request {r}, block {block}")
            want = rope_positions[r][block * RATIO] if rope else [block * RATIO] * 3
            np.testing.assert_array_equal(firsts[page * 2 + offset], want)


def test_a_rejected_speculation_leaves_the_open_group_alone(backend):
    """Rows stored and then taken back must not have overwritten what the ring still needs."""
    size = qsa.ring_size(RATIO, step_rows=6)
    rng = np.random.default_rng(1)
    keys = rng.standard_normal((40, 16), np.float32).astype(BFLOAT16)
    ring = backend.asarray(np.zeros((1, size, 16), BFLOAT16))
    ring_table = backend.asarray(np.int32([0]))
    seen = 7  # an open group of three
    accepted = iter([0, 1, 5, 2, 3, 1, 4])

    def step(first, rows, wrong):
        given = keys[first : first + rows].copy()
        given[wrong:] = 99
        starts = backend.asarray(np.int32([0, rows]))
        owner, positions = qsa.row_positions(backend.asarray(np.int32([first + rows])), starts, rows)
        slots = backend.asarray(np.arange(rows, dtype=np.int64))
        given = backend.asarray(given)
        pooled, _ = qsa.compress(given, ring, ring_table, owner, starts, positions, slots)
        qsa.store(ring, given, qsa.ring_slots(positions, owner, starts, ring_table, size))
        return backend.asnumpy(pooled).astype(np.float32)

    step(0, seen, seen)
    for count in accepted:
        pooled = step(seen, 6, count)
        for row in range(count):
            if (seen + row + 1) % RATIO == 0:
                group = keys[seen + row - 3 : seen + row + 1].astype(np.float32)
                np.testing.assert_allclose(pooled[row], group.mean(0), rtol=2**-8, atol=1e-6)
        seen += count


def test_padding_and_dummies_store_nothing(backend):
    starts, table = backend.asarray(np.int32([0, 2, 4])), backend.asarray(np.int32([-1, 1]))
    owner, positions = qsa.row_positions(backend.asarray(np.int32([9, 0])), starts, 6)
    assert backend.asnumpy(owner).tolist() == [0, 0, -1, -1, -1, -1]
    slots = qsa.ring_slots(positions, owner, starts, table, 4)
    assert backend.asnumpy(slots).tolist() == [-1] * 6  # request 0 has no ring, request 1 no tokens
    pages = backend.asarray(np.int32([[-1], [0]]))
    assert backend.asnumpy(qsa.compressed_slots(positions, owner, pages, 16)).tolist() == [-1] * 6
    cache = backend.asarray(np.full((2, 4, 8), 3, np.float16))
    qsa.store(
        cache, backend.asarray(np.zeros((3, 8), np.float16)), backend.asarray(np.int64([-1, 8, 1 << 40]))
    )
    assert (backend.asnumpy(cache) == 3).all()


# Select


def make_index(seed, *, rows=(3, 1), blocks=(300, 90), heads=4, head_dim=128, page_size=16, dtype="bfloat16"):
    rng = np.random.default_rng(seed)
    counts = [-(-n // page_size) for n in blocks]
    ids = rng.permutation(sum(counts) + 2)
    table = np.full((len(rows), max(counts) + 1), -1, np.int32)
    taken = 0
    for r, count in enumerate(counts):
        table[r, :count] = ids[taken : taken + count]
        taken += count
    keys = rng.standard_normal((sum(counts) + 2, page_size, head_dim), np.float32)
    keys = keys.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) if dtype == "fp8_e4m3" else keys.astype(dtype)
    q = rng.standard_normal((sum(rows), heads, head_dim), np.float32)
    owner = np.repeat(np.arange(len(rows), dtype=np.int32), rows)
    visible = np.concatenate([n - np.arange(m)[::-1] for n, m in zip(blocks, rows, strict=True)])
    return {
        "q": q.astype(BFLOAT16 if dtype == "fp8_e4m3" else dtype), "keys": keys, "block_table": table,
        "token_to_request": owner, "visible_blocks": visible.astype(np.int32),
    }  # fmt: skip


def on(backend, arguments):
    return {name: backend.asarray(a) for name, a in arguments.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "fp8_e4m3"])
@pytest.mark.parametrize(
    "shape", [{}, {"heads": 1, "head_dim": 64}, {"heads": 64, "head_dim": 40, "page_size": 7}]
)
def test_logits_against_float64(backend, dtype, shape):
    problem = make_index(2, dtype=np.dtype(BFLOAT16) if dtype == "bfloat16" else dtype, **shape)
    problem["block_table"][0, 1] = -1
    problem["block_table"][1, 0] = 10**6
    logits = backend.asnumpy(qsa.index_logits(**on(backend, problem)))
    expected = reference.index_logits(**problem)
    seen = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(logits), seen)
    # Each head's product of up to 128 terms and the sum over heads: a few float32 units of the sum of |terms|.
    bound = np.abs(expected[seen]).max() * 64 * 2.0**-24 * (8 if shape.get("heads") == 64 else 4)
    assert np.abs(logits[seen] - expected[seen]).max() <= bound


def distributions(columns):
    rng = np.random.default_rng(3)
    tiny = np.float32(2.0**-149)
    narrow = np.full(columns, 1.0, np.float32).view(np.int32) + rng.integers(0, 60, columns, dtype=np.int32)
    return {
        "normal": rng.standard_normal(columns, np.float32),
        "all equal": np.full(columns, 0.25, np.float32),
        "all zero": np.where(rng.random(columns) < 0.5, np.float32(0), np.float32(-0.0)),
        "one bin": narrow.view(np.float32),
        "two values": np.where(rng.random(columns) < 0.01, np.float32(2), np.float32(1)),
        "denormal": (rng.integers(-40, 40, columns) * tiny).astype(np.float32),
        "huge": rng.choice(np.float32([-3e38, 3e38, 1e-38, 1e38, -1e-38]), columns),
        "rising": np.arange(columns, dtype=np.float32),
        "falling": -np.arange(columns, dtype=np.float32),
        "minus infinity": np.where(rng.random(columns) < 0.9999, np.float32(-np.inf), np.float32(1)),
    }


@pytest.mark.parametrize("columns", [1, 511, 512, 513, 5000, 65_536])
def test_topk_is_a_stable_sorts(backend, columns):
    cases = distributions(columns)
    logits = np.stack(list(cases.values()))
    for visible in {columns, max(columns - 3, 0), min(columns, 7), 0}:
        count = np.full(len(logits), visible, np.int32)
        out = qsa.topk(backend.asarray(logits), backend.asarray(count), 512)
        expected = reference.topk(logits, count, 512)
        for name, got, want in zip(cases, backend.asnumpy(out), expected, strict=True):
            np.testing.assert_array_equal(got, want, f"{name}, {visible} of {columns}")


@pytest.mark.parametrize("name", ["normal", "one bin", "all equal"])
def test_topk_of_the_longest_row(backend, name):
    logits = distributions(262_144)[name][None]
    visible = np.int32([262_144])
    out = backend.asnumpy(qsa.topk(backend.asarray(logits), backend.asarray(visible), 512))
    np.testing.assert_array_equal(out, reference.topk(logits, visible, 512))


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_select_takes_the_top_of_its_logits(backend, dtype):
    problem = make_index(
        4, rows=(9, 1, 20), blocks=(400, 3, 900), dtype=BFLOAT16 if dtype != "fp8_e4m3" else dtype
    )
    problem["visible_blocks"][3] = 10**6  # past the table
    problem["visible_blocks"][4] = -5
    problem["token_to_request"][[5, 6]] = -1, 3
    problem["block_table"][0, 2] = -1
    problem["block_table"][2, 5] = 10**6
    arguments = on(backend, problem)
    blocks = backend.asnumpy(qsa.select(**arguments, token_budget=256))
    logits = backend.asnumpy(qsa.index_logits(**arguments))
    np.testing.assert_array_equal(blocks, reference.topk(logits, problem["visible_blocks"], 64))
    assert (blocks[[4, 5, 6]] == -1).all()
    assert not ((blocks[:9] >= 32) & (blocks[:9] < 48)).any()
    small = qsa.select(**arguments, token_budget=256, max_logits_bytes=1)
    np.testing.assert_array_equal(backend.asnumpy(small), blocks)
    for rows in ([0], [28, 2], list(range(12, 30))):
        part = {n: a if n in ("keys", "block_table") else a[rows] for n, a in problem.items()}
        alone = qsa.select(**on(backend, part), token_budget=256)
        np.testing.assert_array_equal(backend.asnumpy(alone), blocks[rows])


def test_select_ties_go_to_the_lowest_blocks(backend):
    problem = make_index(5, rows=(2,), blocks=(200,))
    problem["q"][0] = 0  # every logit is 0
    problem["keys"][problem["block_table"][0, :13]] = problem["keys"][0, 0]
    blocks = backend.asnumpy(qsa.select(**on(backend, problem), token_budget=128))
    assert blocks.tolist() == [list(range(32))] * 2


# Expand


def test_expand_against_the_reference(backend):
    rng = np.random.default_rng(6)
    positions = np.int64([-1, 0, 2, 3, 4, 30, 63, 64, 65, 66, 1000])
    visible = np.asarray(qsa.visible_blocks(positions))
    logits = rng.standard_normal((len(positions), 251), np.float32)
    blocks = reference.topk(logits, visible, 16)
    packed = qsa.expand(*(backend.asarray(a) for a in (blocks, positions, visible)))
    expected = reference.expand(blocks, positions, visible)
    np.testing.assert_array_equal(backend.asnumpy(packed), expected)
    count = expected[:, -1]
    assert count.tolist() == [0, 1, 3, 4, 5, 31, 64, 64 + 1, 64 + 2, 64 + 3, 64 + 1]


BAD = {
    "q": ({"q": np.zeros((4, 4, 128), np.float32)}, TypeError),
    "q ": ({"q": np.zeros((4, 65, 128), BFLOAT16)}, ValueError),
    "keys": ({"keys": np.zeros((3, 16, 64), BFLOAT16)}, ValueError),
    "keys ": ({"keys": np.zeros((3, 16, 128), np.float16)}, TypeError),
    "block_table": ({"block_table": np.zeros((2, 3), np.int64)}, TypeError),
    "token_to_request": ({"token_to_request": np.zeros(5, np.int32)}, ValueError),
    "visible_blocks": ({"visible_blocks": np.zeros((4, 1), np.int32)}, ValueError),
    "token_budget": ({"token_budget": 2047}, ValueError),
    "compress_ratio": ({"compress_ratio": 0}, ValueError),
    "scale": ({"scale": -1.0}, ValueError),
    "max_logits_bytes": ({"max_logits_bytes": 0}, ValueError),
    "out": ({"out": np.zeros((4, 511), np.int32)}, ValueError),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_one_clear_line(backend, name):
    change, kind = BAD[name]
    change = {n: backend.asarray(a) if isinstance(a, np.ndarray) else a for n, a in change.items()}
    with pytest.raises(kind, match=rf"^{name.strip()}: [^\n]+$"):
        qsa.select(**(on(backend, make_index(7)) | change))
