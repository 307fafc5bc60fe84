"""`corekern routes`: which kernel a configuration's attention would take, in which precision, and why no other."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from corekern import PRECISION_REVISION, arrays, doctor, routing
from corekern.formats import resolve_kv_dtype
from corekern.instruments import report
from corekern.logits import LogitPrecision, resolve_fp32_logits
from corekern.routing import AttentionProblem

NAME = "routes"


@dataclass(frozen=True)
class Routes:
    """What a configuration resolves to."""

    problem: AttentionProblem
    kv_cache_dtype: str
    """What was asked for; `problem.kv_dtype` is what it means."""
    taken: str | None
    """None where no route can."""
    state: str | None
    reasons: dict[str, str]
    """For each route, "taken" or why it is not."""
    logits: LogitPrecision
    precision_revision: int


def routes(
    *,
    device: str = "cpu",
    kv_cache_dtype: str = "fp8",
    checkpoint: str | None = None,
    rows: int = 8,
    requests: int = 1,
    q_heads: int = 6,
    kv_heads: int = 1,
    head_dim: int = 256,
    page_size: int = 3296,
    q_dtype: str = "float16",
    route: str | None = None,
    model: str | None = None,
) -> Routes:
    """What `paged_attention` would do with calls of this shape; nothing runs.

    Args:
        device: "cpu" or "cuda:<index>".
        kv_cache_dtype, checkpoint: as in `resolve_kv_dtype`, of which nothing better is "auto" = q_dtype.
        rows, requests: of a step; no request has more than ceil(rows / requests) rows.
        q_heads, kv_heads, head_dim, page_size: of the layer.
        q_dtype: float16, bfloat16 or float32.
        route: one asked for by name.
        model: whose defaults hold for logits.

    Raises:
        ValueError: a name that does not exist, or a number that no call can have.

    >>> found = routes(kv_cache_dtype="fp8", rows=5)
    >>> found.problem.kv_dtype, found.taken, found.state
    ('fp8_e4m3', 'cpu_fp32', 'fp32 numerator/max/sum')
    """
    for name, number in (
        ("rows", rows),
        ("requests", requests),
        ("q_heads", q_heads),
        ("kv_heads", kv_heads),
        ("head_dim", head_dim),
        ("page_size", page_size),
    ):
        if number < 1:
            raise ValueError(f"{name}: {number} is under 1")
    if q_heads % kv_heads:
        raise ValueError(f"q_heads: {q_heads} is not a multiple of kv_heads {kv_heads}")
    if head_dim > 256:
        raise ValueError(f"head_dim: {head_dim} is over 256")
    q_dtype = str(arrays.float_dtype(q_dtype, "q_dtype"))
    backend = "cpu" if device == "cpu" else "cuda"
    kv_dtype = resolve_kv_dtype(kv_cache_dtype, checkpoint, backend=backend)
    problem = AttentionProblem(
        device=device,
        rows=rows,
        requests=requests,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        q_dtype=q_dtype,
        kv_dtype=q_dtype if kv_dtype == "auto" else kv_dtype,
        max_query_len=-(-rows // requests),
        compute_capability=arrays.compute_capability(device),
    )
    reasons = routing.explain(problem, route)
    taken = next((r for r in routing.ROUTES if reasons[r.name] == "taken"), None)
    return Routes(
        problem=problem,
        kv_cache_dtype=kv_cache_dtype,
        taken=taken.name if taken else None,
        state=taken.state if taken else None,
        reasons=reasons,
        logits=resolve_fp32_logits(model),
        precision_revision=PRECISION_REVISION,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--kv-dtype", default="fp8", help="as a runtime's kv_cache_dtype (%(default)s)")
    parser.add_argument("--checkpoint", metavar="FORMAT", help="the KV format that the checkpoint states")
    for name, default, what in (
        ("rows", 8, "query rows of a step"),
        ("requests", 1, "requests of a step"),
        ("q-heads", 6, "query heads"),
        ("kv-heads", 1, "KV heads"),
        ("head-dim", 256, "elements of a head"),
        ("page-size", 3296, "tokens a page"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (%(default)s)")
    parser.add_argument("--q-dtype", default="float16", help="(%(default)s)")
    parser.add_argument("--route", help="a route asked for by name")
    parser.add_argument("--model", help="whose defaults hold for logits")
    report.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    return report.run_reporting(NAME, lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    usable = {device.kind: device for device in doctor.devices()}
    kind = options.device or ("cuda" if usable["cuda"].usable else "cpu")
    if not usable[kind].usable:
        raise ValueError(f"--device: {usable[kind].note}")
    found = routes(
        device="cpu" if kind == "cpu" else "cuda:0",
        kv_cache_dtype=options.kv_dtype,
        checkpoint=options.checkpoint,
        rows=options.rows,
        requests=options.requests,
        q_heads=options.q_heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        page_size=options.page_size,
        q_dtype=options.q_dtype,
        route=options.route,
        model=options.model,
    )
    if options.json:
        report.print_json(found)
    else:
        report.show(*render(found))
    if found.taken is None:
        raise ValueError("no route takes this")


def render(found: Routes) -> list[report.Table | str]:
    """The findings for a person."""
    p = found.problem
    title = (
        f"{p.device}: {p.rows} rows of {p.requests} request{'s' * (p.requests != 1)}, {p.q_heads} query and "
        f"{p.kv_heads} KV heads of {p.head_dim}, page {p.page_size}, {p.q_dtype} q"
    )
    width = max(map(len, found.reasons.values()))
    rows = [[name, reason.ljust(width)] for name, reason in found.reasons.items()]
    return [
        report.Table(title, ("route", "".ljust(width)), rows),
        f"KV dtype: {found.kv_cache_dtype} -> {p.kv_dtype}",
        f"state: {found.state or '-'}",
        f"logits: {'fp32' if found.logits.fp32 else 'model dtype'} ({found.logits.source})",
        f"precision revision: {found.precision_revision}",
    ]
