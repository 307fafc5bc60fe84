"""`corekern acceptance`: how many drafted tokens a run accepted, how sure that is, and against another run."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from corekern.instruments import report
from corekern.instruments.counters import Counts, Run, read_run
from corekern.instruments.intervals import Interval, bootstrap_ratio, difference, normal, wilson

NAME = "acceptance"
# Fewer requests than this say too little about how requests differ.
MIN_REQUESTS = 5


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    interval: Interval


@dataclass(frozen=True)
class Acceptance:
    """A run's acceptance."""

    drafts: int | None
    draft_tokens: int
    accepted_tokens: int
    requests: int | None
    """That drafted anything; None where the counters are of the server as a whole."""
    rate: Estimate
    """Accepted tokens over drafted ones."""
    length: Estimate | None
    """Mean tokens that a verification settles, the model's own one included: 1 + accepted tokens / drafts. None
    where drafts are not counted."""
    per_position: tuple[Estimate, ...] | None
    """For each place in a draft, how many drafts had their tokens accepted up to there."""
    method: str
    """Where the intervals come from."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """A run against a baseline."""

    rate: Estimate
    length: Estimate | None


def measure(run: Run) -> Acceptance:
    """The acceptance of a run from `read_run`.

    Raises:
        ValueError: nothing was drafted.

    Tokens of a request stand or fall together, so with the requests known, whole requests are drawn again
    (bootstrap); counting their tokens as independent would give an interval that is too narrow. Counters of the
    server as a whole do not show how requests differ: then drafts are taken to be independent, where the counts by
    position give how accepted lengths vary, or else tokens (Wilson), and the method says so.

    >>> found = measure(Run(Counts(40, 30, 10, (10, 9, 7, 4)), None))
    >>> found.rate.value, found.length.value, [round(p.value, 1) for p in found.per_position]
    (0.75, 4.0, [1.0, 0.9, 0.7, 0.4])
    """
    total, requests = run.total, run.requests
    if not total.draft_tokens:
        raise ValueError("no token was drafted in between")
    notes = list(run.notes)
    if requests is not None and len(requests) < MIN_REQUESTS:
        notes.append(f"{len(requests)} requests are too few to show how requests differ")
        requests = None
    if requests is not None:
        rate, length, per_position = _by_requests(total, requests)
        method = f"bootstrap over {len(requests)} requests"
    elif total.per_position is not None and total.drafts:
        rate, length, per_position = _by_drafts(total, total.drafts, total.per_position)
        method = "drafts taken as independent: too narrow where requests differ"
    else:
        rate, length, per_position = _by_tokens(total)
        method = "Wilson, tokens taken as independent: too narrow where requests differ"
    return Acceptance(
        total.drafts,
        total.draft_tokens,
        total.accepted_tokens,
        None if run.requests is None else len(run.requests),
        rate,
        length,
        per_position,
        method,
        tuple(notes),
    )


Figures = tuple[Estimate, Estimate | None, tuple[Estimate, ...] | None]


def _by_requests(total: Counts, requests: tuple[Counts, ...]) -> Figures:
    accepted = np.array([c.accepted_tokens for c in requests], np.float64)
    drafted = np.array([c.draft_tokens for c in requests], np.float64)
    rate = Estimate(total.accepted_tokens / total.draft_tokens, bootstrap_ratio(accepted, drafted))
    if not total.drafts:
        return rate, None, None
    drafts = np.array([c.drafts for c in requests], np.float64)
    length = _scaled(
        Estimate(total.accepted_tokens / total.drafts, bootstrap_ratio(accepted, drafts)), lambda x: 1 + x
    )
    if total.per_position is None:
        return rate, length, None
    positions = []
    for i, count in enumerate(total.per_position):
        own = [c.per_position[i] if c.per_position and i < len(c.per_position) else 0 for c in requests]
        positions.append(Estimate(count / total.drafts, bootstrap_ratio(np.array(own, np.float64), drafts)))
    return rate, length, tuple(positions)


def _by_drafts(total: Counts, drafts: int, per_position: tuple[int, ...]) -> Figures:
    # With p_i the share of drafts accepted up to place i, an accepted length has the mean sum p_i and the mean
    # square sum (2 i - 1) p_i.
    shares = np.array(per_position, np.float64) / drafts
    mean = total.accepted_tokens / drafts
    variance = float(((2 * np.arange(1, len(shares) + 1) - 1) * shares).sum()) - mean**2
    accepted = Estimate(mean, normal(mean, max(variance, 0.0), drafts))
    tokens_a_draft = total.draft_tokens / drafts
    rate = _scaled(accepted, lambda x: min(1.0, max(0.0, x / tokens_a_draft)))
    positions = tuple(Estimate(count / drafts, wilson(count, drafts)) for count in per_position)
    return rate, _scaled(accepted, lambda x: 1 + x), positions


def _by_tokens(total: Counts) -> Figures:
    rate = Estimate(
        total.accepted_tokens / total.draft_tokens, wilson(total.accepted_tokens, total.draft_tokens)
    )
    if not total.drafts:
        return rate, None, None
    tokens_a_draft = total.draft_tokens / total.drafts
    return rate, _scaled(rate, lambda x: 1 + x * tokens_a_draft), None


def _scaled(estimate: Estimate, by: Callable[[float], float]) -> Estimate:
    low, high = estimate.interval.low, estimate.interval.high
    return Estimate(by(estimate.value), Interval(by(low), by(high)))


def compare(run: Acceptance, baseline: Acceptance) -> Difference:
    """A run minus a baseline, measured apart."""
    length = None
    if run.length is not None and baseline.length is not None:
        length = _minus(run.length, baseline.length)
    return Difference(_minus(run.rate, baseline.rate), length)


def _minus(one: Estimate, other: Estimate) -> Estimate:
    return Estimate(one.value - other.value, difference(one.value, one.interval, other.value, other.interval))


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        type=Path,
        help="BEFORE and AFTER: Prometheus snapshots, or JSON lines; or one file of JSON lines, a request a line",
    )
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        nargs="+",
        type=Path,
        help="the same of the configuration to compare with",
    )
    parser.add_argument(
        "--label", metavar="NAME=VALUE", action="append", default=[], help="take only series with this label"
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw acceptance by position (.png, .svg)")
    report.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    return report.run_reporting(NAME, lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    labels = {}
    for label in options.label:
        name, equals, value = label.partition("=")
        if not (name and equals):
            raise ValueError(f"--label: {label!r} is not NAME=VALUE")
        labels[name] = value
    found = _measured(options.files, labels, "FILE")
    baseline = None if options.baseline is None else _measured(options.baseline, labels, "--baseline")
    change = None if baseline is None else compare(found, baseline)
    if options.plot is not None:
        _plot(options.plot, found, baseline)
    if options.json:
        report.print_json({"run": found, "baseline": baseline, "difference": change})
    else:
        report.show(*render(found, baseline, change))


def _measured(files: list[Path], labels: dict[str, str], name: str) -> Acceptance:
    if len(files) > 2:
        raise ValueError(f"{name}: {len(files)} files given; one of requests, or BEFORE and AFTER")
    try:
        return measure(read_run(files, labels))
    except ValueError as error:
        message = str(error)
        raise ValueError(
            message if message.startswith(str(files[0])) or len(files) > 1 else f"{files[0]}: {message}"
        ) from None


def render(
    found: Acceptance, baseline: Acceptance | None = None, change: Difference | None = None
) -> list[report.Table | str]:
    """The figures for a person: a table, and where its intervals come from."""
    header = ["", "run", "95 %"]
    columns = [found]
    if baseline is not None:
        header += ["baseline", "95 %"]
        columns.append(baseline)
    if change is not None:
        header += ["difference", "95 %"]

    def row(name: str, figures: list[Estimate | None], moved: Estimate | None) -> list[str]:
        cells = [cell for figure in figures for cell in _cells(figure)]
        return [name, *cells, *(_cells(moved, "+") if change is not None else [])]

    rows = [
        row("acceptance rate", [c.rate for c in columns], None if change is None else change.rate),
        row("mean accepted length", [c.length for c in columns], None if change is None else change.length),
    ]
    places = max(len(c.per_position or ()) for c in columns)
    for i in range(places):
        figures = [c.per_position[i] if c.per_position and i < len(c.per_position) else None for c in columns]
        known = [figure for figure in figures if figure is not None]
        moved = _minus(known[0], known[1]) if len(known) == 2 else None
        rows.append(row(f"position {i}", figures, moved))
    sentences = []
    for name, column in zip(("run", "baseline"), columns, strict=False):
        drafts = "" if column.drafts is None else f" in {column.drafts:,} drafts"
        sentences.append(
            f"{name}: {column.accepted_tokens:,} of {column.draft_tokens:,} drafted tokens accepted{drafts}; "
            f"intervals: {column.method}"
        )
        sentences += [f"{name}: {note}" for note in column.notes]
    if change is not None:
        shown = change.rate.interval.excludes(0)
        sentences.append(
            f"rates {'differ' if shown else 'are not shown to differ'}: 95 % of the difference "
            f"{'excludes' if shown else 'holds'} 0"
        )
    return [report.Table("Speculative decoding: drafted tokens accepted", header, rows), *sentences]


def _cells(figure: Estimate | None, sign: str = "") -> list[str]:
    if figure is None or math.isnan(figure.value):
        return ["-", "-"]
    low, high = figure.interval.low, figure.interval.high
    return [f"{figure.value:{sign}.4f}", f"{low:{sign}.4f} to {high:{sign}.4f}"]


def _plot(path: Path, found: Acceptance, baseline: Acceptance | None) -> None:
    runs = [(name, r.per_position) for name, r in (("run", found), ("baseline", baseline)) if r is not None]
    if not all(places for _, places in runs):
        raise ValueError("--plot: acceptance by position is not known, so there is nothing to draw")

    def draw(axes) -> None:
        for (name, estimates), colour in zip(runs, ("#5e3c99", "#d95f02"), strict=False):
            values, low, high = np.array(
                [(e.value, e.value - e.interval.low, e.interval.high - e.value) for e in estimates or ()]
            ).T
            places = np.arange(len(values)) + 0.06 * (name == "baseline")  # beside each other
            axes.errorbar(
                places, values, [low.clip(0), high.clip(0)], marker="o", capsize=3, color=colour, label=name
            )
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("share of drafts accepted up to it")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(frameon=False)

    report.figure(path, draw)
