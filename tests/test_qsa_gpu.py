"""Sparse attention at the sizes that only a GPU is asked for, and its whole decode pipeline in a CUDA graph."""

import numpy as np
import pytest
from helpers import BFLOAT16, assert_at_floor, assert_same_bits, cuda_backend
from qsa_problems import make_sparse

import corekern
from corekern import PagedKVCache, qsa

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cuda():
    return cuda_backend()


# (rows, query heads, KV heads, page size, requests), as in the published benchmark's table.
SHAPES = [
    (1, 24, 2, 1600, 1), (4, 24, 2, 1600, 1), (8, 24, 2, 784, 8), (16, 12, 1, 1600, 3), (32, 6, 1, 800, 5),
    (64, 24, 2, 1600, 16), (128, 24, 2, 1568, 7), (257, 6, 1, 800, 13), (1024, 12, 1, 16, 33),
    (2048, 24, 2, 784, 63),
]  # fmt: skip


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "bfloat16", "fp8_e5m2"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"rows{s[0]}-{s[1]}/{s[2]}-page{s[3]}")
def test_every_row_count_is_at_the_floor(cuda, shape, kv_dtype):
    rows, q_heads, kv_heads, page_size, requests = shape
    problem = make_sparse(
        20, rows=rows, requests=requests, q_heads=q_heads, kv_heads=kv_heads, head_dim=256,
        page_size=page_size, pages_per_request=max(2, -(-2400 // page_size)), budget=2048, kv_dtype=kv_dtype,
        padding=3,
    )  # fmt: skip
    out = problem.run(cuda)
    assert not out[rows:].view(np.uint16).any()
    sample = sorted({0, 1 % rows, rows // 3, rows // 2, rows - 1})
    assert_at_floor(out[sample], problem.rows(sample).expected())
    # The bits of a row are those that it has alone.
    for row in (0, rows // 2, rows - 1):
        assert_same_bits(problem.rows([row]).run(cuda), out[[row]], f"row {row}")


def test_rows_of_one_long_prefill(cuda):
    problem = make_sparse(
        21, rows=512, q_heads=24, kv_heads=2, head_dim=256, page_size=1600, pages_per_request=4, budget=2048
    )
    out = problem.run(cuda)
    sample = [0, 1, 63, 64, 300, 511]
    assert_at_floor(out[sample], problem.rows(sample).expected())
    assert_same_bits(problem.rows(list(range(100, 164))).run(cuda), out[100:164])


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "bfloat16"])
def test_a_cache_past_two_to_the_31_elements(cuda, kv_dtype):
    problem = make_sparse(22, rows=3, q_heads=6, head_dim=256, page_size=784, pages_per_request=3, budget=512,
                          kv_dtype=kv_dtype)  # fmt: skip
    pages = (1 << 31) // (784 * 256) + 100
    small = problem.cache(cuda, "separate")
    k, v = (cuda.zeros((pages, 784, 1, 256), small.k.dtype) for _ in range(2))
    move = {page: pages - 1 - 7 * i for i, page in enumerate(problem.block_table[0].tolist())}
    for page, new in move.items():
        k[new], v[new] = small.k[page], small.v[page]
    cache = PagedKVCache.from_arrays(k, v, dtype=kv_dtype, k_scale=problem.k_scale, v_scale=problem.v_scale)
    table = cuda.asarray(np.int32([list(move.values())]))
    assert_same_bits(problem.run(cuda, cache=cache, block_table=table), problem.run(cuda))


def test_select_of_many_rows_and_of_one_long_row(cuda):
    import cupy

    for rows, blocks in ((1, 65_536), (700, 8_192), (1, 262_144)):
        rng = np.random.default_rng(blocks)
        q, keys = (
            cuda.asarray(rng.standard_normal(shape, np.float32).astype(BFLOAT16))
            for shape in ((rows, 4, 128), (blocks // 256, 256, 128))
        )
        table = cupy.arange(len(keys), dtype=cupy.int32)[None]
        owner, visible = cupy.zeros(rows, cupy.int32), cupy.full(rows, blocks, cupy.int32)
        chosen = qsa.select(q, keys, table, owner, visible)
        logits = qsa.index_logits(q, keys, table, owner, visible)
        order = cupy.argsort(-logits, axis=1, kind="stable")[:, :512]
        cupy.testing.assert_array_equal(chosen, cupy.sort(order, axis=1))
        for _ in range(3):
            cupy.testing.assert_array_equal(qsa.select(q, keys, table, owner, visible), chosen)


class Decoder:
    """One layer's QSA decode with persistent arrays, as a runtime that captures graphs holds them."""

    RATIO, SIZE, PAGE, DIM, ROWS, BUDGET = 4, 8, 64, 128, 6, 256

    def __init__(self, cuda):
        import cupy

        rng = np.random.default_rng(30)

        def normal(*shape):
            return cuda.asarray(rng.standard_normal(shape, np.float32).astype(BFLOAT16))

        self.cupy = cupy
        self.cache = PagedKVCache.empty(
            40, self.PAGE, 2, 64, layout="interleaved", device="cuda", k_scale=0.02
        )
        self.cache.write(
            normal(40 * 64, 2, 64), normal(40 * 64, 2, 64), cupy.arange(40 * 64, dtype=cupy.int64)
        )
        self.keys, self.ring = normal(12, 64, self.DIM), normal(3, self.SIZE, self.DIM)
        self.k, self.v = normal(self.ROWS, 2, 64), normal(self.ROWS, 2, 64)
        self.raw, self.index_q = normal(self.ROWS, self.DIM), normal(self.ROWS, 4, self.DIM)
        self.q, self.gate = normal(self.ROWS, 12, 64), normal(self.ROWS, 12, 64)
        self.table = cuda.asarray(rng.permutation(40)[:36].reshape(3, 12).astype(np.int32))
        self.index_table = cuda.asarray(rng.permutation(12)[:9].reshape(3, 3).astype(np.int32))
        self.ring_table = cuda.asarray(np.int32([2, 0, 1]))
        integers = {"owner": np.int32, "positions": np.int64, "visible": np.int32, "kv_slots": np.int64,
                    "ring_to": np.int64, "key_to": np.int64}  # fmt: skip
        for name, dtype in integers.items():
            setattr(self, name, cupy.empty(self.ROWS, dtype))
        self.starts = cupy.empty(4, cupy.int32)
        self.pooled = cupy.empty((self.ROWS, self.DIM), BFLOAT16)
        self.first = cupy.empty((self.ROWS, 3), cupy.int64)
        self.blocks = cupy.empty((self.ROWS, self.BUDGET // 4), cupy.int32)
        self.packed = cupy.empty((self.ROWS, self.BUDGET + 4), cupy.int32)
        self.out = cupy.empty((self.ROWS, 12, 64), BFLOAT16)
        self.state = (self.cache.k, self.cache.v, self.keys, self.ring)

    def prepare(self, lengths, counts):
        """What a runtime computes before a step, into the arrays that the graph reads."""
        starts = np.cumsum([0, *counts]).astype(np.int32)
        owner, positions = qsa.row_positions(np.int32(lengths), starts, self.ROWS)
        table = self.table.get()
        live = owner >= 0
        page = table[np.maximum(owner, 0), np.maximum(positions, 0) // self.PAGE].astype(np.int64)
        values = {
            "starts": starts, "owner": owner, "positions": positions, "visible": qsa.visible_blocks(positions),
            "kv_slots": np.where(live, page * self.PAGE + positions % self.PAGE, -1),
            "ring_to": qsa.ring_slots(positions, owner, starts, self.ring_table.get(), self.SIZE),
            "key_to": qsa.compressed_slots(positions, owner, self.index_table.get(), 64),
        }  # fmt: skip
        for name, value in values.items():
            getattr(self, name).set(value)

    def step(self):
        self.cache.write(self.k, self.v, self.kv_slots)
        qsa.compress(self.raw, self.ring, self.ring_table, self.owner, self.starts, self.positions, self.key_to,
                     out=self.pooled, first_positions=self.first)  # fmt: skip
        qsa.store(self.keys, self.pooled, self.key_to)
        qsa.store(self.ring, self.raw, self.ring_to)
        qsa.select(self.index_q, self.keys, self.index_table, self.owner, self.visible,
                   token_budget=self.BUDGET, out=self.blocks)  # fmt: skip
        qsa.expand(self.blocks, self.positions, self.visible, out=self.packed)
        qsa.attention(self.q, self.cache, self.packed, self.table, self.owner, self.gate, out=self.out)

    def save(self):
        return [a.copy() for a in self.state]

    def restore(self, saved):
        for a, b in zip(self.state, saved, strict=True):
            a[...] = b


STEPS = {
    "live": ([700, 300, 41], [2, 2, 2]),
    "a dummy": ([704, 0, 44], [2, 2, 2]),
    "longer": ([760, 301, 200], [1, 4, 1]),
    "one request": ([761, 0, 0], [6, 0, 0]),
    "nobody": ([0, 0, 0], [0, 0, 0]),
    "short": ([3, 2, 1], [3, 2, 1]),
}


def test_the_decode_pipeline_in_a_graph(cuda):
    import cupy

    decoder = Decoder(cuda)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        decoder.prepare(*STEPS["live"])
        saved = decoder.save()
        decoder.step()  # compiles, and grows the stream's workspace; a capture only records
        decoder.restore(saved)
        stream.begin_capture()
        decoder.step()
        graph = stream.end_capture()
        for name, (lengths, counts) in STEPS.items():
            decoder.prepare(lengths, counts)
            saved = decoder.save()
            decoder.step()
            eager = [a.get() for a in (*decoder.state, decoder.packed, decoder.out)]
            decoder.restore(saved)
            decoder.out.view(np.uint16).fill(0x7FFF)  # NaN
            graph.launch()
            stream.synchronize()
            replayed = [a.get() for a in (*decoder.state, decoder.packed, decoder.out)]
            for got, want in zip(replayed, eager, strict=True):
                assert_same_bits(got, want, name)
            idle = decoder.owner.get() < 0
            assert not replayed[-1][idle].view(np.uint16).any()


def test_a_capture_must_be_given_its_outputs(cuda):
    import cupy

    decoder = Decoder(cuda)
    decoder.prepare(*STEPS["live"])
    decoder.step()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(ValueError, match=r"^out: "):
                qsa.attention(decoder.q, decoder.cache, decoder.packed, decoder.table, decoder.owner)
            with pytest.raises(ValueError, match=r"^out: "):
                qsa.expand(decoder.blocks, decoder.positions, decoder.visible)
        finally:
            stream.end_capture()


def test_tensors_come_back_as_tensors(cuda):
    torch = pytest.importorskip("torch")
    problem = make_sparse(24)
    arguments = problem.arguments(cuda)
    tensors = {
        n: torch.from_dlpack(a) if n not in ("cache", "gate", "q") else a for n, a in arguments.items()
    }
    q, gate = (torch.from_numpy(a.astype(np.float32)).bfloat16().cuda() for a in (problem.q, problem.gate))
    out = torch.empty_like(q)
    assert qsa.attention(**tensors | {"q": q, "gate": gate, "out": out}) is out
    assert_same_bits(out.view(torch.int16).cpu().numpy().view(BFLOAT16), problem.run(cuda))
    assert corekern.route_counts()["qsa_splitk_fp32"] > 0
