"""`corekern trace`: what two runs of the same prompts say apart, position by position, and whether it grows."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from corekern.instruments import report
from corekern.instruments.intervals import Line, fit_line
from corekern.instruments.traces import Trace, read_traces

NAME = "trace"
DECILES = 10
# Slopes are small: they are told by this many tokens.
PER = 1000


@dataclass(frozen=True)
class Flip:
    """A position where the runs hold different tokens likeliest."""

    prompt: int
    position: int
    before: int | str
    after: int | str
    margin: float
    """A's lead of its likeliest token over its second, in nats; NaN where A's file does not say."""


@dataclass(frozen=True)
class Noise:
    """How two runs of the same configuration differ."""

    mean: float
    max: float
    ratio: float
    """The comparison's mean over this one's; infinite where the repeat has the same log-probs."""
    excess: Line
    """Drift beyond the noise: a line through |B - A| - |C - A|, position by position. In nats a token."""


@dataclass(frozen=True)
class Comparison:
    """B against A. Differences are of log-probs, in nats."""

    prompts: int
    positions: int
    """Predicted tokens of all prompts."""
    mean: float
    """Of |B - A|."""
    max: float
    max_at: tuple[int, int]
    """Prompt and position of the largest."""
    mean_signed: float
    """Of B - A: below 0 where B finds the prompt less likely."""
    deciles: tuple[float, ...]
    """Mean |B - A| in each tenth of its prompt, first to last."""
    drift: Line
    """A line through |B - A| by position, in nats a token."""
    flips: tuple[Flip, ...] | None
    """Largest margin first; None where a file does not say which token is likeliest."""
    noise: Noise | None


def compare(a: list[Trace], b: list[Trace], noise: list[Trace] | None = None) -> Comparison:
    """Compares two runs of the same prompts, given as by `read_traces`.

    Args:
        a: the reference.
        b: what is judged.
        noise: a repeat of a, which shows how much runs differ by themselves.

    Raises:
        ValueError: prompts that differ, with the first differing position; fewer than 10 positions in all.

    Drift is taken to be shown where the 95 % interval of the slope excludes 0.

    >>> a = Trace(tuple(range(21)), np.full(20, -1.0))
    >>> b = Trace(tuple(range(21)), -1 - 0.001 * np.arange(1, 21))
    >>> found = compare([a], [b])
    >>> round(found.mean, 4), round(found.drift.slope, 6), found.drift.interval.excludes(0)
    (0.0105, 0.001, True)
    """
    _check_same_prompts(a, b, "B")
    if noise is not None:
        _check_same_prompts(a, noise, "C")
    places = [(prompt, 1 + i) for prompt, trace in enumerate(a) for i in range(len(trace.log_probs))]
    if len(places) < DECILES:
        raise ValueError(f"A: {len(places)} predicted positions; at least {DECILES} are needed")
    signed = _all(b) - _all(a)
    distance = np.abs(signed)
    position = np.array([at for _, at in places], np.float64)
    tenth = np.concatenate([np.arange(n) * DECILES // n for n in (len(t.log_probs) for t in a)])
    largest = int(distance.argmax())
    return Comparison(
        prompts=len(a),
        positions=len(places),
        mean=float(distance.mean()),
        max=float(distance.max()),
        max_at=places[largest],
        mean_signed=float(signed.mean()),
        deciles=tuple(
            float(distance[tenth == i].mean()) if (tenth == i).any() else math.nan for i in range(DECILES)
        ),
        drift=fit_line(position, distance),
        flips=_flips(a, b),
        noise=None if noise is None else _noise(distance, np.abs(_all(noise) - _all(a)), position),
    )


def _all(traces: list[Trace]) -> np.ndarray:
    return np.concatenate([trace.log_probs for trace in traces])


def _check_same_prompts(a: list[Trace], b: list[Trace], name: str) -> None:
    if len(a) != len(b):
        raise ValueError(f"{name}: {len(b)} prompts, but A has {len(a)}")
    for prompt, (one, other) in enumerate(zip(a, b, strict=True)):
        where = f"{name}: prompt {prompt} " if len(a) > 1 else f"{name}: "
        pairs = zip(one.tokens, other.tokens, strict=False)
        for position, (token, found) in enumerate(pairs):
            if token != found and None not in (token, found):
                raise ValueError(f"{where}differs from A at position {position}: {found!r} is not {token!r}")
        if len(one.tokens) != len(other.tokens):
            position = min(len(one.tokens), len(other.tokens))
            raise ValueError(
                f"{where}differs from A at position {position}: {len(other.tokens)} tokens, not {len(one.tokens)}"
            )


def _flips(a: list[Trace], b: list[Trace]) -> tuple[Flip, ...] | None:
    found = []
    for prompt, (one, other) in enumerate(zip(a, b, strict=True)):
        if one.top1 is None or other.top1 is None:
            return None
        for i, (before, after) in enumerate(zip(one.top1, other.top1, strict=True)):
            if before != after:
                margin = math.nan if one.margins is None else float(one.margins[i])
                found.append(Flip(prompt, 1 + i, before, after, margin))
    return tuple(sorted(found, key=lambda flip: -flip.margin if math.isfinite(flip.margin) else math.inf))


def _noise(distance: np.ndarray, repeat: np.ndarray, position: np.ndarray) -> Noise:
    mean = float(repeat.mean())
    return Noise(
        mean=mean,
        max=float(repeat.max()),
        ratio=float(distance.mean()) / mean if mean else math.inf,
        excess=fit_line(position, distance - repeat),
    )


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("a", metavar="A", type=Path, help="the reference: response JSON, JSON lines or .npz")
    parser.add_argument("b", metavar="B", type=Path, help="what is judged: the same prompts, in any form")
    parser.add_argument(
        "--noise", metavar="C", type=Path, help="a repeat of A: how much runs differ by themselves"
    )
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="draw |difference| by position (.png, .svg)"
    )
    report.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    return report.run_reporting(NAME, lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    a, b = read_traces(options.a), read_traces(options.b)
    found = compare(a, b, None if options.noise is None else read_traces(options.noise))
    if options.plot is not None:
        report.figure(options.plot, lambda axes: _draw(axes, a, b, found))
    if options.json:
        report.print_json(found)
    else:
        report.show(*render(found))


def render(found: Comparison) -> list[report.Table | str]:
    """The comparison for a person: a table, and what it comes to."""
    rows = [
        [f"{10 * i}-{10 * (i + 1)} %", "-" if math.isnan(mean) else f"{mean:.4f}"]
        for i, mean in enumerate(found.deciles)
    ]
    title = f"{found.positions:,} positions of {found.prompts} prompt{'s' * (found.prompts != 1)}: |log-prob difference|, nats"
    prompt, position = found.max_at
    sentences = [
        f"mean {found.mean:.4f}, largest {found.max:.4f} at position {position}"
        + (f" of prompt {prompt}" if found.prompts > 1 else "")
        + f"; mean signed {found.mean_signed:+.4f}",
        f"drift: {_slope(found.drift)}",
    ]
    if found.noise is not None:
        sentences += _noise_sentences(found.noise)
    return [report.Table(title, ("tenth of the prompt", "mean"), rows), *sentences, *_flip_parts(found)]


def _slope(line: Line) -> str:
    slope, low, high = (PER * value for value in (line.slope, line.interval.low, line.interval.high))
    verdict = "none shown"
    if line.interval.excludes(0):
        verdict = "the difference grows" if slope > 0 else "the difference shrinks"
    return f"{slope:+.4f} nats per {PER:,} tokens, 95 % from {low:+.4f} to {high:+.4f}: {verdict}"


def _noise_sentences(noise: Noise) -> list[str]:
    if noise.max == 0:
        return ["noise: the repeat has the same log-probs; all of the difference is B's"]
    return [
        f"noise: mean {noise.mean:.4f}, largest {noise.max:.4f}; B differs {noise.ratio:.1f} times as much",
        f"drift beyond noise: {_slope(noise.excess)}",
    ]


def _flip_parts(found: Comparison) -> list[report.Table | str]:
    if found.flips is None:
        return ["likeliest token: a file does not say which it is"]
    share = 100 * len(found.flips) / found.positions
    summary = f"likeliest token: {len(found.flips)} flips ({share:.1f} %)"
    known = [flip.margin for flip in found.flips if not math.isnan(flip.margin)]
    if not known:
        return [summary]
    rows = [
        [str(flip.position), repr(flip.before), repr(flip.after), f"{flip.margin:.4f}"]
        for flip in found.flips[:5]
    ]
    table = report.Table("Flips with the largest margins in A", ("position", "A", "B", "margin"), rows)
    return [f"{summary}, median margin {float(np.median(known)):.4f} nats", table]


def _draw(axes: Any, a: list[Trace], b: list[Trace], found: Comparison) -> None:
    largest = 0
    for one, other in zip(a, b, strict=True):
        distance = np.abs(other.log_probs - one.log_probs)
        position = np.arange(1, len(distance) + 1)
        axes.scatter(position, distance, s=7, alpha=0.35, linewidths=0, color="#5e3c99")
        largest = max(largest, len(distance))
    ends = np.array([1, largest])
    line = found.drift.intercept + found.drift.slope * ends
    axes.plot(ends, line, color="#d95f02", linewidth=2, label=f"drift: {_slope(found.drift)}")
    axes.set_yscale("symlog", linthresh=max(1e-6, found.mean / 10))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("position in the prompt (tokens)")
    axes.set_ylabel("|log-prob difference| (nats)")
    axes.legend(loc="upper left", frameon=False, fontsize=8)
