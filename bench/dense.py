"""Dense attention problems for the benchmarks: held fixed, larger than the L2 cache, with their errors in float64.

Works on NumPy and CuPy arrays alike: `xp` is the one or the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import corekern
from corekern import reference
from corekern.formats import BFLOAT16

# Launches rotate over caches of more than four times the 60 MB L2 of the largest card so far, as a decoder's layers do.
COLD_BYTES = 250 << 20
NAME = re.compile(
    r"dense/(?:(?P<requests>\d+)x)?q(?P<rows>\d+)/L(?P<length>\d+)/page(?P<page>\d+)(?:/h(?P<heads>\d+)-(?P<kv_heads>\d+))?$"
)
HEAD_DIM = 256
# Read bandwidth in bytes a second, from grid-stride 16-byte reads of 2 GiB.
READ_BANDWIDTH = {"NVIDIA H200": 4.55e12}


@dataclass(frozen=True)
class Case:
    """What a case's name says: dense/64x q4 / L8192 / page1600 / h24-2 is 64 requests of 4 rows."""

    name: str
    requests: int
    rows: int
    length: int
    page: int
    q_heads: int
    kv_heads: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of E4M3 keys and values that the rows see."""
        return 2 * self.requests * self.length * self.kv_heads * HEAD_DIM

    def limit_us(self, card: str) -> float | None:
        """Microseconds that reading them once takes, where the card's read bandwidth is known."""
        bandwidth = READ_BANDWIDTH.get(card)
        return round(self.kv_bytes / bandwidth * 1e6, 2) if bandwidth else None


def parse(name: str) -> Case:
    """
    >>> parse("dense/q8/L8192/page3296")
    Case(name='dense/q8/L8192/page3296', requests=1, rows=8, length=8192, page=3296, q_heads=6, kv_heads=1)

    Raises:
        ValueError: a name of another form.
    """
    found = NAME.match(name)
    if not found:
        raise ValueError(
            f"{name!r} is not of the form dense/[REQUESTSx]qROWS/LTOKENS/pageTOKENS[/hQ_HEADS-KV_HEADS]"
        )
    default = {"requests": "1", "heads": "6", "kv_heads": "1"}
    values = {k: int(v or default[k]) for k, v in found.groupdict().items()}
    values["q_heads"] = values.pop("heads")
    return Case(name, **values)


@dataclass(frozen=True, eq=False)
class Problem:
    """A case's arrays. `tables` are block tables into one pool of pages, each with the first one's tokens."""

    case: Case
    q: Any
    cache: corekern.PagedKVCache
    tables: list[Any]
    row_lengths: Any
    query_start_loc: Any
    k: Any
    """(pages of one table, page, kv_heads, head_dim) float32, before quantization."""
    v: Any

    def arguments(self, table: int = 0) -> dict[str, Any]:
        """Of `corekern.paged_attention`."""
        return {
            "q": self.q, "cache": self.cache, "block_table": self.tables[table],
            "row_lengths": self.row_lengths, "query_start_loc": self.query_start_loc, "max_query_len": self.case.rows,
        }  # fmt: skip


def make_problem(
    case: Case,
    xp: Any,
    cold_bytes: int = COLD_BYTES,
    seed: int = 20260908,
    kv_dtype: str = "fp8_e4m3",
    q_dtype: str = "float16",
    v_bias: Any = 0.0,
) -> Problem:
    """Normal data in FP8 with amax scales, pages in a random order; `v_bias` (head_dim,) is added to V."""
    rng = xp.random.default_rng(seed)
    pages = -(-case.length // case.page) * case.requests
    shape = (pages, case.page, case.kv_heads, HEAD_DIM)
    k, v = (rng.standard_normal(shape, dtype=xp.float32) for _ in "kv")
    v += v_bias
    largest = float(corekern.get_format(kv_dtype).max)
    scales = [float(abs(x).max()) / largest for x in (k, v)]
    copies = max(1, -(-cold_bytes // (2 * k.size)))
    host = np.random.default_rng(seed)
    order = host.permutation(pages * copies).astype(np.int32).reshape(copies, case.requests, -1)
    pools = []
    for x, scale in zip((k, v), scales, strict=True):
        codes = corekern.encode(x, kv_dtype, scale)
        pool = xp.empty((pages * copies, *shape[1:]), xp.uint8)
        for table in order:
            pool[xp.asarray(table.reshape(-1))] = codes
        pools.append(pool)
    cache = corekern.PagedKVCache.from_arrays(*pools, dtype=kv_dtype, k_scale=scales[0], v_scale=scales[1])
    shape = (case.requests * case.rows, case.q_heads, HEAD_DIM)
    q = xp.asarray(host.standard_normal(shape, np.float32).astype(corekern.get_format(q_dtype).value))
    lengths = np.tile(np.arange(case.length - case.rows + 1, case.length + 1, dtype=np.int32), case.requests)
    starts = np.arange(case.requests + 1, dtype=np.int32) * case.rows
    return Problem(
        case, q, cache, [xp.asarray(t) for t in order], xp.asarray(lengths), xp.asarray(starts), k, v
    )


def exact(
    problem: Problem, xp: Any, requests: int, *, quantized: bool = True, dtype: Any = np.float64
) -> tuple[Any, Any, Any]:
    """(numerator, maximum, sum) of the first requests, on the codes or on what they were made from.

    The arithmetic is in `dtype`, page by page. Shapes (rows, q_heads, head_dim), (rows, q_heads) twice; as in
    `corekern.PartialState`.
    """
    case, cache = problem.case, problem.cache
    decode = xp.asarray(reference.decode(np.arange(256, dtype=np.uint8), cache.format).astype(dtype))
    group = case.q_heads // case.kv_heads
    each = len(problem.k) // case.requests
    scale = dtype(HEAD_DIM**-0.5 * np.log2(np.e))
    states = []
    for request in range(requests):
        rows = slice(request * case.rows, (request + 1) * case.rows)
        q = values(problem.q[rows], dtype).reshape(case.rows, case.kv_heads, group, HEAD_DIM) * scale
        lengths = problem.row_lengths[rows][:, None, None]
        shape = (case.rows, case.kv_heads, group)
        n, m, total = (
            xp.zeros((*shape, HEAD_DIM), dtype),
            xp.full(shape, -np.inf, dtype),
            xp.zeros(shape, dtype),
        )
        for i in range(each):
            if quantized:
                page = int(problem.tables[0][request, i])
                k, v = (
                    decode[cache.k[page]] * dtype(cache.k_scale),
                    decode[cache.v[page]] * dtype(cache.v_scale),
                )
            else:
                k, v = (x[request * each + i].astype(dtype) for x in (problem.k, problem.v))
            s = xp.einsum("rhgd,thd->rhgt", q, k)
            s = xp.where(i * case.page + xp.arange(case.page) < lengths[..., None], s, dtype(-np.inf))
            new = xp.maximum(m, s.max(-1))
            old = xp.exp2(m - new)
            p = xp.exp2(s - new[..., None])
            n, total, m = n * old[..., None] + xp.einsum("rhgt,thd->rhgd", p, v), total * old + p.sum(-1), new
        states.append((n, m, total))
    n, m, total = (xp.concatenate(x) for x in zip(*states, strict=True))
    return n.reshape(-1, case.q_heads, HEAD_DIM), m.reshape(-1, case.q_heads), total.reshape(-1, case.q_heads)


def values(x: Any, dtype: Any = np.float64) -> Any:
    """`x` in another dtype; CuPy converts no bfloat16 array of its own accord."""
    if x.dtype == BFLOAT16:
        x = (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(dtype)


def relative(x: Any, reference: Any, xp: Any) -> float:
    reference = reference.astype(np.float64)
    return float(xp.linalg.norm(values(x) - reference) / xp.linalg.norm(reference))


def rounding_floor(expected: Any, dtype: Any, xp: Any) -> float:
    """The error that rounding `expected` to `dtype` alone makes: what nobody can avoid."""
    host = expected if xp is np else expected.get()
    return relative(host.astype(dtype), host, np)


class Oracle:
    """What a problem's output should be, and how far off an answer is."""

    def __init__(self, problem: Problem, xp: Any, requests: int = 2) -> None:
        self.problem, self.xp = problem, xp
        requests = min(requests, problem.case.requests)
        self.rows = requests * problem.case.rows
        self.state = exact(problem, xp, requests)
        self.output = self.state[0] / self.state[2][..., None]
        n, _, total = exact(problem, xp, requests, dtype=np.float32)
        self.float32 = n / total[..., None]
        n, _, total = exact(problem, xp, requests, quantized=False)
        self.unquantized = n / total[..., None]

    def errors(self, out: Any, state: corekern.PartialState | None) -> dict[str, float]:
        """The three errors apart: quantization, arithmetic before rounding (of the state), and the rounding floor."""
        xp, out = self.xp, out[: self.rows]
        floor = rounding_floor(self.output, out.dtype, xp)
        found = {
            "rel_l2": relative(out, self.output, xp),
            "max_abs": float(abs(values(out) - self.output).max()),
            "rel_l2_to_float32": relative(out, self.float32, xp),
            "float32_rel_l2": relative(self.float32, self.output, xp),
            "floor": floor,
            "quantization_rel_l2": relative(self.output, self.unquantized, xp),
        }
        found["over_floor"] = found["rel_l2"] / floor
        if state is not None:
            n, m, total = self.state
            shift = xp.exp2(state.maximum[: self.rows].astype(np.float64) - m)
            found["state_rel_l2"] = relative(state.numerator[: self.rows] * shift[..., None], n, xp)
            found["sum_rel_l2"] = relative(state.sum[: self.rows] * shift, total, xp)
        return found


def graph_of(calls: list[Callable[[], object]], stream: Any) -> Callable[[], float]:
    """A CuPy graph of the calls, after one run of each; replays it and returns microseconds a call."""
    import cupy

    with stream:
        for call in calls:
            call()
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()

    def sample() -> float:
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        return cupy.cuda.get_elapsed_time(begin, end) * 1e3 / len(calls)

    return sample


def alternate(samplers: dict[str, Callable[[], float]], blocks: int, warm_up: int) -> dict[str, list[float]]:
    """Samples in blocks of A B .. B A, two of each a block, so that drift hits all alike."""
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for sample in samplers.values():
        for _ in range(warm_up):
            sample()
    for _ in range(blocks):
        for name in (*samplers, *reversed(samplers)):
            samples[name].append(samplers[name]())
    return samples
