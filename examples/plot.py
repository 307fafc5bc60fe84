"""The demo's picture: log-prob difference by position, and the table under it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Told apart by lightness as well as by hue, so that a grey print and any colour vision serve.
COLOURS = ("#7f8c8d", "#d95f02", "#5e3c99", "#1b7837")
WINDOW = 32


def draw(
    path: Path,
    differences: Mapping[str, np.ndarray],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str,
) -> None:
    """Write the PNG.

    Args:
        path: where to.
        differences: for each KV format, (tokens,) |log-prob difference| from float32 KV, in nats.
        header: the table's.
        rows: the table's; the first cell names a format, and takes its colour.
        title: over the picture.
    """
    colours = dict(zip(differences, COLOURS, strict=False))
    with matplotlib.rc_context({"font.family": "sans-serif", "font.size": 10, "axes.spines.top": False}):
        # A figure of its own, not pyplot's: no window system is asked for, no global state is left.
        figure = Figure(figsize=(9, 6.6), dpi=150, layout="constrained")
        top, bottom = figure.subplots(2, 1, height_ratios=(4, 1.2))
        top.set_title(title, loc="left", fontweight="bold", fontsize=12)
        _positions(top, differences, colours)
        _table(bottom, header, rows, colours)
        figure.savefig(path)


def _positions(axes: Axes, differences: Mapping[str, np.ndarray], colours: Mapping[str, str]) -> None:
    # Formats that agree to the bit still need an axis.
    ceiling = max(1e-6, *(float(values.max()) for values in differences.values()))
    # Three and a half decades: a difference of exactly 0, or one near it, sits on the floor.
    floor = ceiling / 3000
    for name, values in differences.items():
        # Token 0 is predicted by nothing; the first score is that of position 1.
        positions = np.arange(1, len(values) + 1)
        axes.scatter(positions, np.maximum(values, floor), s=7, alpha=0.3, linewidths=0, color=colours[name])
    for name, values in differences.items():
        smooth, centres = running_mean(values, WINDOW)
        axes.plot(centres + 1, np.maximum(smooth, floor), color=colours[name], linewidth=2.2, label=name)
    axes.set_yscale("log")
    axes.set_ylim(floor, ceiling * 1.5)
    axes.set_xlim(0, max(map(len, differences.values())) + 1)
    axes.set_xlabel("position in the passage (tokens)")
    axes.set_ylabel("|log-prob difference| from float32 KV (nats)")
    axes.spines["right"].set_visible(False)
    axes.grid(axis="y", which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(
        title=f"KV format, mean over {WINDOW} tokens",
        ncols=len(differences),
        loc="lower right",
        framealpha=0.95,
        edgecolor="#dddddd",
    )


def running_mean(values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean of each full window, and the index at its centre.

    >>> running_mean(np.array([1.0, 3.0, 5.0]), 2)
    (array([2., 4.]), array([0.5, 1.5]))
    """
    window = min(window, len(values))
    smooth = np.convolve(values, np.full(window, 1 / window), mode="valid")
    return smooth, np.arange(len(smooth)) + (window - 1) / 2


def _table(
    axes: Axes, header: Sequence[str], rows: Sequence[Sequence[str]], colours: Mapping[str, str]
) -> None:
    axes.axis("off")
    shown = axes.table(
        cellText=[list(row) for row in rows],
        colLabels=list(header),
        loc="center",
        cellLoc="right",
        colLoc="right",
        edges="",
    )
    shown.auto_set_font_size(False)
    shown.set_fontsize(10)
    shown.scale(1, 1.5)
    for (row, column), cell in shown.get_celld().items():
        cell.visible_edges = "B"
        cell.set_edgecolor("#444444" if row == 0 else "#dddddd")
        if column == 0:
            cell.get_text().set_horizontalalignment("left")
        if row == 0 or column == 0:
            cell.get_text().set_fontweight("bold")
        if row > 0 and column == 0:
            cell.get_text().set_color(colours.get(rows[row - 1][0], "black"))
