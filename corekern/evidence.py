"""What a process really ran, for a runtime to print at its exit: what to check before a claim is believed."""

from __future__ import annotations

from dataclasses import dataclass

from corekern.formats import resolve_kv_dtype
from corekern.logits import LogitPrecision, logit_calls, resolve_fp32_logits
from corekern.routing import RouteRun, route_runs


@dataclass(frozen=True)
class RouteSummary:
    """The settings as they were resolved, and the calls that ran. `str()` of it is what to print."""

    kv_cache_dtype: str
    """What was asked for."""
    resolved_kv_dtype: str
    runs: tuple[tuple[RouteRun, int], ...]
    """Each kind of call, and how often it ran."""
    logits: LogitPrecision
    logit_calls: dict[str, int]
    """How often this library's FP32 logits ran, by function."""
    precision_revision: int

    @property
    def other_kv_dtypes(self) -> tuple[str, ...]:
        """Formats that ran though the settings resolved to another; a reason not to believe a claim."""
        ran = dict.fromkeys(run.kv_dtype for run, _ in self.runs)
        return tuple(name for name in ran if self.resolved_kv_dtype not in ("auto", name))

    def __str__(self) -> str:
        lines = [
            f"corekern: KV dtype {self.kv_cache_dtype} -> {self.resolved_kv_dtype}; "
            f"logits {'fp32' if self.logits.fp32 else 'model dtype'} ({self.logits.source}); "
            f"precision revision {self.precision_revision}"
        ]
        lines += [
            f"  {run.route}: {calls} calls (rows={run.rows}, page={run.page_size}, kv={run.kv_dtype}, "
            f"q={run.q_dtype}, state={run.state})"
            for run, calls in self.runs
        ]
        lines += [f"  {function}: {calls} calls (fp32)" for function, calls in self.logit_calls.items()]
        if not self.runs:
            lines.append("  no attention call ran")
        if self.other_kv_dtypes:
            lines.append(f"  WARNING: {', '.join(self.other_kv_dtypes)} KV ran, not {self.resolved_kv_dtype}")
        if self.logits.fp32 and not self.logit_calls:
            lines.append("  WARNING: FP32 logits are on, but none of corekern's ran")
        return "\n".join(lines)


def route_summary(
    kv_cache_dtype: str = "auto",
    *,
    checkpoint: str | None = None,
    model: str | None = None,
    fp32_logits: bool | None = None,
) -> RouteSummary:
    """The resolved settings of a runtime and what has run in this process so far.

    Args:
        kv_cache_dtype, checkpoint: as in `resolve_kv_dtype`.
        model, fp32_logits: as `model` and `setting` in `resolve_fp32_logits`.

    Raises:
        TypeError, ValueError: as those two.

    A replayed CUDA graph runs no Python: its calls were counted once, when it was captured.

    >>> print(str(route_summary("fp8")).splitlines()[0])
    corekern: KV dtype fp8 -> fp8_e4m3; logits model dtype (global default); precision revision 4
    """
    from corekern import PRECISION_REVISION

    return RouteSummary(
        kv_cache_dtype,
        resolve_kv_dtype(kv_cache_dtype, checkpoint),
        tuple(route_runs().items()),
        resolve_fp32_logits(model, fp32_logits),
        logit_calls(),
        PRECISION_REVISION,
    )
