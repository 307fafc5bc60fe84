"""Runs kernels that release the GIL on every core, from any thread, also after a fork."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_pool: ThreadPoolExecutor | None = None


def num_threads() -> int:
    """Cores this process may use, or COREKERN_NUM_THREADS."""
    asked = os.environ.get("COREKERN_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _forget_pool() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):  # a forked child has none of its parent's threads
    os.register_at_fork(after_in_child=_forget_pool)


def for_ranges(work: Callable[[int, int], None], count: int, grain: int) -> None:
    """Calls work(begin, end) over [0, count) in pieces of `grain`, on as many threads as pay.

    The pieces are the same whatever the number of threads; which thread takes which is not fixed,
    so `work` must not care.
    """
    global _pool
    pieces = -(-count // grain)
    threads = min(num_threads(), pieces)
    numbers = itertools.count()  # next() on it is atomic

    def take_pieces() -> None:
        for piece in numbers:
            if piece >= pieces:
                return
            work(piece * grain, min(count, (piece + 1) * grain))

    if threads <= 1:
        take_pieces()
        return
    if _pool is None:
        _pool = ThreadPoolExecutor(max(1, num_threads() - 1), thread_name_prefix="corekern")
    others = [_pool.submit(take_pieces) for _ in range(threads - 1)]
    take_pieces()
    for other in others:
        other.result()
