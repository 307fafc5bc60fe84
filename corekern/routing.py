"""Which kernel takes a problem, why the others do not, and what really ran."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

log = logging.getLogger("corekern")


@dataclass(frozen=True)
class AttentionProblem:
    """What a dense attention call asks for: everything a route may depend on, and no data."""

    device: str
    """ "cpu", or "cuda:<index>"."""
    rows: int
    requests: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: str
    kv_dtype: str
    max_query_len: int
    """No request has more rows than this."""
    compute_capability: int
    """Of the GPU: 90 for 9.0; 0 on the CPU."""


@dataclass(frozen=True)
class Route:
    """A way to compute attention: who takes what, and in which state."""

    name: str
    backend: str
    """The module under `corekern` that runs it."""
    state: str
    refuse: Callable[[AttentionProblem], str | None]
    """Why the route cannot take a problem; None when it can."""
    only_by_name: bool = False
    """Never taken unless it is asked for."""


def _refuse_grouped(problem: AttentionProblem) -> str | None:
    if problem.device == "cpu":
        return "arrays are on the CPU"
    if problem.head_dim not in (64, 128, 256):
        return f"head_dim {problem.head_dim} is not 64, 128 or 256"
    if problem.q_dtype not in ("float16", "bfloat16"):
        return f"q is {problem.q_dtype}, not float16 or bfloat16"
    if problem.q_heads // problem.kv_heads > 16:
        return f"{problem.q_heads // problem.kv_heads} query heads share a KV head, more than 16"
    if problem.max_query_len > 16:
        hint = "" if problem.requests == 1 else " (say how many with max_query_len)"
        return f"a request may have {problem.max_query_len} rows, more than 16{hint}"
    if problem.requests > 65535:
        return f"{problem.requests} requests are more than 65535"
    from corekern.cuda import grouped

    return grouped.refuse(problem)


ROUTES = (
    Route(
        name="cpu_fp32",
        backend="cpu",
        state="fp32 numerator/max/sum",
        refuse=lambda problem: None if problem.device == "cpu" else f"arrays are on {problem.device}",
    ),
    Route(
        name="grouped_fp32",
        backend="cuda.grouped",
        state="fp32 numerator/max/sum",
        refuse=_refuse_grouped,
    ),
    Route(
        name="scalar_fp32",
        backend="simt",
        state="fp32 numerator/max/sum",
        refuse=lambda problem: "arrays are on the CPU" if problem.device == "cpu" else None,
    ),
    Route(
        name="grouped_fp16_legacy",
        backend="cuda.grouped_legacy",
        state="normalised fp16 partials",
        refuse=_refuse_grouped,
        only_by_name=True,
    ),
)


NO_CUDA_QSA = "this build has no CUDA kernels for sparse attention"


def _refuse_qsa(problem: AttentionProblem) -> str | None:
    if problem.device == "cpu":
        return "arrays are on the CPU"
    if importlib.util.find_spec("corekern.cuda.qsa") is None:
        return NO_CUDA_QSA
    group = problem.q_heads // problem.kv_heads
    if problem.q_dtype == "float32" or problem.kv_dtype == "float32":
        return "float32 is for the CPU alone"
    if problem.head_dim % 16:
        return f"head_dim {problem.head_dim} is not a multiple of 16"
    return f"{group} query heads a KV head are over 16" if group > 16 else None


QSA_ROUTES = (
    Route(
        name="qsa_cpu_fp32",
        backend="cpu.qsa",
        state="fp32 numerator/max/sum",
        refuse=lambda problem: None if problem.device == "cpu" else f"arrays are on {problem.device}",
    ),
    Route(
        name="qsa_splitk_fp32",
        backend="cuda.qsa",
        state="fp32 numerator/max/sum",
        refuse=_refuse_qsa,
    ),
)


class RouteRun(NamedTuple):
    """Calls of one kind that a route has run."""

    route: str
    rows: int
    page_size: int
    kv_dtype: str
    q_dtype: str
    state: str


_runs: Counter[tuple] = Counter()
_logged: set[tuple[str, int, int]] = set()
_lock = threading.Lock()


def explain(
    problem: AttentionProblem, route: str | None = None, routes: tuple[Route, ...] = ROUTES
) -> dict[str, str]:
    """For each route, "taken" or why it is not, in the order in which they are tried.

    Raises:
        ValueError: no such route.
    """
    names = [r.name for r in routes]
    if route is not None and route not in names:
        raise ValueError(f"route: {route!r} is not one of {', '.join(names)}")
    chosen = None
    reasons = {}
    for candidate in routes:
        refusal = candidate.refuse(problem)
        if refusal is None and route not in (None, candidate.name):
            refusal = f"{route} was asked for"
        elif refusal is None and candidate.only_by_name and route is None:
            refusal = "taken only when asked for by name"
        elif refusal is None and chosen is not None:
            refusal = f"{chosen} comes first"
        if refusal is None:
            chosen = candidate.name
        reasons[candidate.name] = refusal or "taken"
    return reasons


def select(problem: AttentionProblem, route: str | None = None, routes: tuple[Route, ...] = ROUTES) -> Route:
    """The first route that takes the problem, or the one asked for by name.

    Raises:
        ValueError: no such route, or it cannot take the problem; the message says why.
    """
    reasons = explain(problem, route, routes)
    for candidate in routes:
        if reasons[candidate.name] == "taken":
            return candidate
    wanted = {route: reasons[route]} if route else reasons
    raise ValueError("route: " + "; ".join(f"{name} cannot take this: {why}" for name, why in wanted.items()))


def record(route: Route, problem: AttentionProblem) -> None:
    """Counts a call that is about to run, and logs the first of its kind."""
    kind = (route.name, problem.rows, problem.page_size)
    # A RouteRun, without its cost at every call.
    run = (*kind, problem.kv_dtype, problem.q_dtype, route.state)
    with _lock:
        _runs[run] += 1
        if kind in _logged:
            return
        _logged.add(kind)
    log.info(
        "%s selected (rows=%d, page=%d, state=%s)", route.name, problem.rows, problem.page_size, route.state
    )


def route_counts() -> dict[str, int]:
    """How many calls each route has run in this process, by name; routes that never ran are left out."""
    counts: Counter[str] = Counter()
    for run, calls in route_runs().items():
        counts[run.route] += calls
    return dict(counts)


def route_runs() -> dict[RouteRun, int]:
    """How many calls of each kind have run in this process, in the order in which kinds first ran."""
    with _lock:
        return {RouteRun(*run): calls for run, calls in _runs.items()}


def backend(name: str) -> ModuleType:
    """A module under `corekern`, such as "cpu" or "simt"; imported on first use."""
    return importlib.import_module(f"corekern.{name}")


def storage_backend(device: str) -> ModuleType:
    """Who encodes, decodes, writes and gathers on a device."""
    return backend("cpu" if device == "cpu" else "cuda")


def qsa_backend(device: str) -> ModuleType:
    """Who compresses, selects and expands on a device.

    Raises:
        NotImplementedError: the device is a GPU, and this build has no kernels for it.
    """
    if device != "cpu" and importlib.util.find_spec("corekern.cuda.qsa") is None:
        raise NotImplementedError(f"device: {device}: {NO_CUDA_QSA}")
    return backend("cpu.qsa" if device == "cpu" else "cuda.qsa")


def state_backend(device: str) -> ModuleType:
    """Who merges and finalizes states on a device, whatever route made them."""
    return backend("cpu" if device == "cpu" else "simt")
