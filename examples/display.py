"""What the demo shows: rich on a terminal, plain lines of the same content anywhere else.

Results go to stdout, progress and timings to stderr, so that piped output holds results alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


@contextmanager
def phase(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show that something is being done; the time it took stays on stderr.

    Args:
        label: what is being done.
        total: how much of it there is, in any unit.

    Yields:
        A function to call with each amount done.
    """
    start = time.perf_counter()
    if sys.stderr.isatty():
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(label, total=total)
            yield lambda amount: progress.update(task, advance=amount)
    else:
        print(f"{label} ...", file=sys.stderr, flush=True)
        yield _quarters(label, total)
    print(f"{label}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column flush left, the others flush right."""
    if sys.stdout.isatty():
        shown = Table(title=title, title_justify="left", title_style="bold")
        for index, name in enumerate(header):
            shown.add_column(name, justify="right" if index else "left")
        for row in rows:
            shown.add_row(*row)
        Console().print(shown)
    else:
        print(plain_table(title, header, rows))
    print(flush=True)


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table as lines of text."""
    widths = [max(len(row[index]) for row in (header, *rows)) for index in range(len(header))]
    lines = [title]
    for row in (header, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _quarters(label: str, total: int) -> Callable[[int], None]:
    """Three lines on the way, and only for what takes long enough to wonder."""
    done, shown, start = 0, 0, time.perf_counter()

    def advance(amount: int) -> None:
        nonlocal done, shown
        done += amount
        quarter = min(4 * done // total, 3)
        if quarter > shown and time.perf_counter() - start > 5:
            print(f"{label}: {25 * quarter} %", file=sys.stderr, flush=True)
            shown = quarter

    return advance
