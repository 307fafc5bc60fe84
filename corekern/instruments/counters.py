"""Speculative decoding's counters, read from Prometheus snapshots and from per-request JSON lines.

The names are vLLM's (vllm/v1/spec_decode/metrics.py): `spec_decode_num_drafts`, `spec_decode_num_draft_tokens`,
`spec_decode_num_accepted_tokens` and `spec_decode_num_accepted_tokens_per_pos`, the last with a label `position`,
all with `engine` and `model_name`. A JSON line has the same without `spec_decode_num_`: `request_id`, `drafts`,
`draft_tokens`, `accepted_tokens`, and `accepted_tokens_per_pos` where known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corekern.instruments import report

PREFIX = "spec_decode_num_"
COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")
PER_POSITION = "accepted_tokens_per_pos"
# Gauges and log lines that are averages: over a window of time, or since the server's start.
AVERAGES = (
    "spec_decode_draft_acceptance_rate",
    "spec_decode_efficiency",
    "spec_accept_rate",
    "spec_accept_length",
    "acceptance_rate",
    "acceptance rate",
    "mean acceptance length",
)

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A counter's short name and its labels."""


@dataclass(frozen=True)
class Counts:
    """What was drafted and accepted, over a request or over a run."""

    draft_tokens: int
    accepted_tokens: int
    drafts: int | None = None
    """How often drafts were verified."""
    per_position: tuple[int, ...] | None = None
    """How many drafts had their first, second, ... token accepted."""


@dataclass(frozen=True)
class Run:
    """A configuration's counts, and those of its requests where they are known."""

    total: Counts
    requests: tuple[Counts, ...] | None
    notes: tuple[str, ...] = ()


def read_run(paths: list[Path], labels: dict[str, str] | None = None) -> Run:
    """The counts of a run: between two snapshots, or of one file of requests.

    Args:
        paths: BEFORE and AFTER, both Prometheus text or both JSON lines whose counts grow; or one file of JSON lines
            with each request's own counts.
        labels: take only the series with these labels.

    Raises:
        ValueError: a bad file; counters that were reset in between; an average where counts are needed; one line.
    """
    files = [_read_text(path) for path in paths]
    names = [str(path) for path in paths]
    kinds = {text.lstrip().startswith("{") for text in files}
    if len(kinds) == 2:
        raise ValueError(f"{names[1]}: one file is JSON lines and the other is not")
    if kinds == {True}:
        return _requests(files, names)
    if len(files) == 1:
        raise ValueError(
            f"{names[0]}: one snapshot counts from the server's start; give one before and one after"
        )
    before, after = (_snapshot(text, name, labels or {}) for text, name in zip(files, names, strict=True))
    return _between(before, after, names)


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8 text") from None
    if not text.strip():
        raise ValueError(f"{path}: is empty")
    return text


def _refuse_average(name: str, text: str) -> None:
    """Says why an average will not do, where a file has one and no counts."""
    found = next((average for average in AVERAGES if average in text.lower()), None)
    if found is not None:
        raise ValueError(
            f"{name}: holds a rolling average ({found}) and no counters: it mixes requests from before and after, and "
            "cannot be taken apart into requests or given an interval; take the counters of drafted and accepted tokens"
        )


# Prometheus


def _snapshot(text: str, name: str, labels: dict[str, str]) -> dict[Series, float]:
    """{(counter, labels): value}; creation times are under "<counter>_created"."""
    parser = report.need("prometheus_client.parser", "reading Prometheus snapshots")
    found: dict[Series, float] = {}
    seen: dict[str, set[str]] = {}
    try:
        samples = [s for family in parser.text_string_to_metric_families(text) for s in family.samples]
    except Exception as error:  # the parser's own, of many types
        _refuse_average(name, text)
        raise ValueError(f"{name}: is no Prometheus text ({error})") from None
    for sample in samples:
        _, marker, short = sample.name.partition(PREFIX)
        short = short.removesuffix("_total")
        if not marker or short.removesuffix("_created") not in (*COUNTERS, PER_POSITION):
            continue
        for label, value in sample.labels.items():
            seen.setdefault(label, set()).add(value)
        if any(sample.labels.get(label) != value for label, value in labels.items()):
            continue
        if not math.isfinite(sample.value) or sample.value < 0:
            raise ValueError(f"{name}: {sample.name} is {sample.value}")
        found[short, tuple(sorted(sample.labels.items()))] = sample.value
    missing = [c for c in COUNTERS[1:] if all(short != c for short, _ in found)]
    if missing:
        if labels and seen:
            raise ValueError(f"{name}: no series has {_show(labels.items())}; there are {_choices(seen)}")
        _refuse_average(name, text)
        raise ValueError(f"{name}: has no counter {PREFIX}{missing[0]} (does the server speculate?)")
    models = {value for _, key in found for label, value in key if label == "model_name"}
    if len(models) > 1:
        raise ValueError(f"{name}: has {len(models)} models; choose one with --label model_name=NAME")
    return found


def _between(before: dict[Series, float], after: dict[Series, float], names: list[str]) -> Run:
    """What was counted from one snapshot to the next, over all engines."""
    notes = []
    for series, value in before.items():
        counter, shown = series[0].removesuffix("_created"), _show(series[1])
        if series not in after:
            raise ValueError(f"{names[1]}: lacks {PREFIX}{counter} of {shown}, which {names[0]} has")
        restarted = after[series] != value if series[0].endswith("_created") else after[series] < value
        if restarted:
            raise ValueError(
                f"{names[1]}: {PREFIX}{counter} of {shown} was reset ({value:.0f}, then {after[series]:.0f}): the "
                "server restarted in between; take both snapshots after its start"
            )
    new = {series for series in after if series not in before and not series[0].endswith("_created")}
    if new:
        notes.append(f"{len(new)} series are new in {names[1]} and count from 0")
    grown = {
        series: value - before.get(series, 0.0)
        for series, value in after.items()
        if not series[0].endswith("_created")
    }

    def total(counter: str) -> int | None:
        values = [value for (short, _), value in grown.items() if short == counter]
        return round(sum(values)) if values else None

    positions: dict[int, float] = {}
    for (short, labels), value in grown.items():
        position = dict(labels).get("position", "")
        if short == PER_POSITION and position.isdigit():
            positions[int(position)] = positions.get(int(position), 0.0) + value
        elif short == PER_POSITION:
            notes.append(f"{PREFIX}{PER_POSITION} lacks the label 'position' and is left out")
    per_position = None
    if positions:
        per_position = tuple(round(positions.get(i, 0.0)) for i in range(max(positions) + 1))
    counts = Counts(total("draft_tokens") or 0, total("accepted_tokens") or 0, total("drafts"), per_position)
    _check(counts, names[1])
    if not _positions_agree(counts):
        notes.append(
            f"{PER_POSITION} does not agree with the other counters (read during a step) and is left out"
        )
        counts = replace(counts, per_position=None)
    return Run(counts, None, tuple(dict.fromkeys(notes)))


def _show(labels: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name}={value}" for name, value in labels) or "no labels"


def _choices(seen: dict[str, set[str]]) -> str:
    return "; ".join(f"{label}: {', '.join(sorted(values))}" for label, values in sorted(seen.items()))


# Requests


def _requests(files: list[str], names: list[str]) -> Run:
    runs = [_rows(text, name) for text, name in zip(files, names, strict=True)]
    notes: tuple[str, ...] = ()
    requests = runs[0]
    if len(runs) == 2:
        gone = [request for request in runs[0] if request not in runs[1]]
        if gone:
            raise ValueError(f"{names[1]}: lacks request {gone[0]!r}, which {names[0]} has")
        requests = {
            request: _grown(runs[0].get(request), counts, f"{names[1]}: request {request!r}")
            for request, counts in runs[1].items()
        }
    kept = [counts for counts in requests.values() if counts.draft_tokens]
    idle = len(requests) - len(kept)
    if idle:
        notes = (f"{idle} of {len(requests)} requests drafted nothing",)
    return Run(_sum(kept), tuple(kept), notes)


def _rows(text: str, name: str) -> dict[Any, Counts]:
    found: dict[Any, Counts] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{name}: line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON ({error.msg}), or the file is truncated") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where} is no object")
        row = {key.removeprefix("num_"): value for key, value in row.items()}
        missing = [key for key in COUNTERS[1:] if key not in row]
        if missing:
            _refuse_average(where, " ".join(row))
            raise ValueError(f"{where} lacks {missing[0]!r}")
        request = row.get("request_id", number)
        if request in found:
            raise ValueError(f"{where}: request {request!r} is there twice")
        per_position = row.get(PER_POSITION)
        if per_position is not None and not isinstance(per_position, list):
            raise ValueError(f"{where}: {PER_POSITION} is no list")
        counts = Counts(
            _count(row["draft_tokens"], f"{where}: draft_tokens"),
            _count(row["accepted_tokens"], f"{where}: accepted_tokens"),
            drafts=None if row.get("drafts") is None else _count(row["drafts"], f"{where}: drafts"),
            per_position=None
            if per_position is None
            else tuple(_count(value, f"{where}: {PER_POSITION}") for value in per_position),
        )
        _check(counts, where)
        if not _positions_agree(counts):
            raise ValueError(
                f"{where}: {PER_POSITION} {list(per_position or ())} does not agree with the other counts"
            )
        found[request] = counts
    return found


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63 or value % 1:
        raise ValueError(f"{where} is {value!r}, not a count")
    return int(value)


def _check(counts: Counts, where: str) -> None:
    if counts.accepted_tokens > counts.draft_tokens:
        raise ValueError(
            f"{where}: {counts.accepted_tokens} tokens accepted of {counts.draft_tokens} drafted"
        )
    if counts.drafts is not None and counts.drafts > counts.draft_tokens:
        raise ValueError(f"{where}: {counts.drafts} drafts with {counts.draft_tokens} tokens in all")


def _positions_agree(counts: Counts) -> bool:
    """Whether the counts by position fall from one to the next and come to the accepted tokens."""
    if counts.per_position is None:
        return True
    falling = counts.per_position if counts.drafts is None else (counts.drafts, *counts.per_position)
    return sum(counts.per_position) == counts.accepted_tokens and list(falling) == sorted(
        falling, reverse=True
    )


def _grown(before: Counts | None, after: Counts, where: str) -> Counts:
    """A request's counts since the earlier file."""
    if before is None:
        return after
    old, new = before.per_position, after.per_position
    if any((getattr(after, name) or 0) < (getattr(before, name) or 0) for name in COUNTERS):
        raise ValueError(
            f"{where}: its counters were reset ({before.draft_tokens} tokens drafted, then {after.draft_tokens})"
        )
    grown = Counts(
        after.draft_tokens - before.draft_tokens,
        after.accepted_tokens - before.accepted_tokens,
        None if after.drafts is None or before.drafts is None else after.drafts - before.drafts,
        None
        if new is None or old is None
        else tuple(value - (old[i] if i < len(old) else 0) for i, value in enumerate(new)),
    )
    _check(grown, where)
    return grown


def _sum(requests: list[Counts]) -> Counts:
    """The total; what some request lacks, the total lacks."""
    drafts = [c.drafts for c in requests if c.drafts is not None]
    positions = [c.per_position for c in requests if c.per_position is not None]
    width = max((len(p) for p in positions), default=0)
    complete = len(positions) == len(requests) and width > 0
    return Counts(
        sum(c.draft_tokens for c in requests),
        sum(c.accepted_tokens for c in requests),
        sum(drafts) if requests and len(drafts) == len(requests) else None,
        tuple(sum(p[i] for p in positions if i < len(p)) for i in range(width)) if complete else None,
    )
