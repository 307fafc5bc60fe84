"""Launch configurations as data: one table for each architecture and cache kind, looked up by rows x kv_heads."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources

FALLBACK = "default"


@dataclass(frozen=True)
class Plan:
    """How a GPU kernel cuts sparse attention up. It changes the time of a call, and no bit of its result."""

    block_n: int
    """Selected tokens a tile."""
    num_splits: int
    """Thread blocks that share one row's selection; 1 for none."""
    num_warps: int
    rows_per_tile: int = 1
    """Rows of one request whose gathers are shared; 1 for none."""


@functools.cache
def table(arch: str) -> dict[str, list[dict]]:
    """The table of an architecture such as "sm_90", or the stated defaults where none was measured."""
    folder = resources.files("corekern") / "tuning"
    name = f"{arch}.json" if (folder / f"{arch}.json").is_file() else f"{FALLBACK}.json"
    return json.loads((folder / name).read_text())["tables"]


def choose_plan(arch: str, itemsize: int, row_heads: int, *, uniform: bool = True) -> Plan:
    """The plan for rows x kv_heads = `row_heads` over a cache of `itemsize`-byte elements.

    Entries hold up to and including `max_row_heads`; null is the last. `uniform` chooses between decode
    (every request has the same few rows) and prefill tables where an entry tells them apart.
    """
    for entry in table(arch)["fp8" if itemsize == 1 else "16bit"]:
        limit = entry["max_row_heads"]
        if (limit is None or row_heads <= limit) and entry.get("uniform", uniform) == uniform:
            return Plan(*(entry[name] for name in ("block_n", "num_splits", "num_warps", "rows_per_tile")))
    raise LookupError(f"tuning: no entry of {arch} covers {row_heads} rows x KV heads")
