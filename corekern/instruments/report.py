"""What every instrument shares: tables, JSON, and errors in one line.

Exit codes of the commands: 0, done; 1, a package is missing; 2, an argument or a file is bad. One line on the error
stream says what, and how it was meant.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Table:
    """Rows of text under a header: the first column flush left, the others flush right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def plain(self) -> str:
        """Lines of text that stay the same from run to run and from terminal to terminal.

        >>> print(Table("Routes", ("route", "calls"), [("cpu_fp32", "3")]).plain())
        Routes
          route     calls
          cpu_fp32      3
        """
        widths = [max(len(row[i]) for row in (self.header, *self.rows)) for i in range(len(self.header))]
        lines = [self.title]
        for row in (self.header, *self.rows):
            first, *others = (
                cell.rjust(w) if i else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  " + "  ".join([first, *others]).rstrip())
        return "\n".join(lines)


def show(*parts: Table | str) -> None:
    """Prints tables and sentences: by rich on a terminal where it is installed, as plain text anywhere else."""
    rich = _rich() if sys.stdout.isatty() else None
    for part in parts:
        if isinstance(part, str):
            print(part)
        elif rich is None:
            print(part.plain())
        else:
            _show_rich(part)


def _rich() -> ModuleType | None:
    try:
        return importlib.import_module("rich")
    except ImportError:
        return None


def _show_rich(table: Table) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = RichTable(title=table.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for index, name in enumerate(table.header):
        shown.add_column(name, justify="right" if index else "left")
    for row in table.rows:
        shown.add_row(*row)
    Console().print(shown)


def plain_data(value: Any) -> Any:
    """A dataclass, an array or a container of them as what JSON can hold; NaN and infinities become None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray | np.generic):
        return plain_data(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option that every instrument has."""
    parser.add_argument("--json", action="store_true", help="print plain data instead of tables")


def print_json(value: Any) -> None:
    print(json.dumps(plain_data(value), indent=1))


def need(package: str, purpose: str) -> ModuleType:
    """A package of the `instruments` extra.

    Raises:
        ModuleNotFoundError: with what to install.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ModuleNotFoundError(
            f"{purpose} needs {package.split('.')[0]}: pip install 'corekern[instruments]'"
        ) from None


def figure(path: Path, draw: Callable[[Any], None], size: tuple[float, float] = (9, 5)) -> None:
    """Draws on one pair of axes and writes the picture; no window system is asked for.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
        OSError, ValueError: the file cannot be written, or its suffix is no picture's.
    """
    made = need("matplotlib.figure", "--plot").Figure(figsize=size, dpi=150, layout="constrained")
    axes = made.subplots()
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    made.savefig(path)


def run_reporting(name: str, work: Callable[[], None]) -> int:
    """Runs a command's work; its errors become one line and an exit code."""
    try:
        work()
    except ModuleNotFoundError as error:
        return _fail(name, str(error), 1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(name, f"{where}{error.strerror or error}", 2)
    except (ValueError, TypeError) as error:
        return _fail(name, str(error), 2)
    return 0


def _fail(name: str, message: str, code: int) -> int:
    print(f"corekern {name}: {' '.join(message.split())}", file=sys.stderr)
    return code
