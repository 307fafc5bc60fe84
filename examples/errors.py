"""The one exception of the demo: a condition that its user can act on, told in one line."""

from __future__ import annotations


class DemoError(Exception):
    """What went wrong and what to do about it; `corekern demo` prints it instead of a traceback.

    Args:
        message: one line.
        exit_code: the command's exit status: 2 when an argument is at fault, else 1.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
