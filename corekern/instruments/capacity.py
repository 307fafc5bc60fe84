"""`corekern capacity`: how many tokens fit, by KV format, and which part of a model's caches takes the room."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from corekern.formats import get_format
from corekern.instruments import report
from corekern.instruments.layouts import SHIPPED, Layout, load_layout

NAME = "capacity"
BASELINE = "bfloat16"
PARTS = ("K and V", "index keys", "linear state", "unused ends of pages")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{unit}i": 1024**i for i, unit in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class Fit:
    """What fits in a budget with one KV format; bytes are of one GPU."""

    kv_dtype: str
    page_tokens: int
    token_bytes: dict[str, float]
    """That a token adds, by part."""
    request_bytes: dict[str, int]
    """Of one request of the asked length, by part."""
    concurrency: float
    """Requests of that length that the budget holds."""
    tokens: int
    """Concurrency times length: what runtimes report as the size of the pool."""
    ratio: float
    """Tokens over those of bfloat16 KV in the same budget."""
    ratio_by_part: dict[str, float]
    """The same when the parts up to each are all there is."""


def fit(
    layout: Layout,
    kv_dtype: str,
    *,
    memory: int,
    length: int,
    ranks: int = 1,
    speculative: int = 0,
    states: int | None = None,
) -> Fit:
    """What a memory budget holds.

    Args:
        layout: from `load_layout`.
        kv_dtype: of K and V: a name that `corekern.formats.get_format` takes.
        memory: bytes on each GPU for all caches.
        length: tokens a request.
        ranks: GPUs of a tensor-parallel group.
        speculative: drafted tokens a step.
        states: linear states that a request holds in a layer; 1 and one for each drafted token when left out.
            Runtimes that keep states for prefix caching hold more.

    A request takes whole pages of K and V and of index keys, both of the same tokens; a pool that can only give
    whole requests holds int(concurrency) of them.

    Raises:
        ValueError: a number that is not positive, ranks that do not divide the heads, or an unknown format.

    >>> found = fit(load_layout("smollm2-135m"), "fp8", memory=2**30, length=2048)
    >>> found.token_bytes["K and V"], found.tokens, found.ratio
    (11520.0, 93206, 2.0)
    """
    kv_dtype = get_format(kv_dtype, argument="kv_dtype").name
    for name, value, least in (
        ("memory", memory, 1),
        ("length", length, 1),
        ("ranks", ranks, 1),
        ("speculative", speculative, 0),
    ):
        if value < least:
            raise ValueError(f"{name}: {value} is below {least}")
    states = 1 + speculative if states is None else states
    if states < 1:
        raise ValueError(f"states: {states} is below 1")
    _check_ranks(layout, ranks)
    token, request = _bytes(layout, kv_dtype, length, ranks, speculative, states)
    _, baseline = _bytes(layout, BASELINE, length, ranks, speculative, states)
    total, total_baseline = sum(request.values()), sum(baseline.values())
    by_part, mine, theirs = {}, 0, 0
    for part in PARTS:
        mine, theirs = mine + request[part], theirs + baseline[part]
        by_part[part] = theirs / mine
    return Fit(
        kv_dtype,
        layout.page_tokens(kv_dtype, ranks, speculative),
        token,
        request,
        memory / total,
        memory * length // total,
        total_baseline / total,
        by_part,
    )


def _check_ranks(layout: Layout, ranks: int) -> None:
    for layer in layout.attention:
        if layer.kv_heads % ranks and ranks % layer.kv_heads:
            raise ValueError(f"ranks: {ranks} GPUs can neither share nor repeat {layer.kv_heads} KV heads")
    for linear in layout.linear:
        if linear.key_heads % ranks or linear.value_heads % ranks:
            raise ValueError(
                f"ranks: {linear.key_heads} key and {linear.value_heads} value heads do not divide by {ranks}"
            )


def _bytes(
    layout: Layout, kv_dtype: str, length: int, ranks: int, speculative: int, states: int
) -> tuple[dict[str, float], dict[str, int]]:
    kv = sum(layer.count * layer.kv_bytes(kv_dtype, ranks) for layer in layout.attention)
    keys = sum(layer.count * layer.key_bytes() for layer in layout.attention)
    rings = sum(layer.count * layer.ring_bytes(speculative) for layer in layout.attention)
    linear = sum(layer.count * states * layer.state_bytes(ranks, speculative) for layer in layout.linear)
    page = layout.page_tokens(kv_dtype, ranks, speculative)
    unused = -length % page
    token: dict[str, float] = {"K and V": float(kv), "index keys": float(keys)}
    request = {
        "K and V": length * kv,
        "index keys": round(length * keys) + rings,
        "linear state": linear,
        "unused ends of pages": round(unused * (kv + keys)),
    }
    return token, request


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("layout", help=f"{', '.join(SHIPPED)}, or one's own .json or .toml file")
    parser.add_argument(
        "--memory", required=True, help="for caches on each GPU: bytes, or such as 24GiB or 24GB"
    )
    parser.add_argument("--length", type=int, default=262_144, help="tokens a request (%(default)s)")
    parser.add_argument(
        "--kv-dtype", nargs="+", default=["bfloat16", "fp8_e4m3"], help="formats to compare (%(default)s)"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="GPUS", help="(%(default)s)")
    parser.add_argument(
        "--speculative", type=int, default=0, metavar="TOKENS", help="drafted a step (%(default)s)"
    )
    parser.add_argument(
        "--states",
        type=int,
        help="linear states a request holds in a layer (1 and one for each drafted token)",
    )
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="draw a request's bytes by part (.png, .svg)"
    )
    report.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    return report.run_reporting(NAME, lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    layout = load_layout(options.layout)
    fits = [
        fit(
            layout,
            name,
            memory=parse_bytes(options.memory),
            length=options.length,
            ranks=options.tensor_parallel,
            speculative=options.speculative,
            states=options.states,
        )
        for name in options.kv_dtype
    ]
    if options.plot is not None:
        _plot(options.plot, fits)
    if options.json:
        report.print_json({"layout": layout, "length": options.length, "fits": fits})
    else:
        report.show(*render(layout, options.length, fits))


def parse_bytes(text: str) -> int:
    """Bytes from a number with an optional unit.

    >>> parse_bytes("24GiB"), parse_bytes("1.5 GB"), parse_bytes("4096")
    (25769803776, 1500000000, 4096)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?B?", text.strip())
    if not found or float(found[1]) == 0:
        raise ValueError(
            f"--memory: {text!r} is no positive number of bytes, such as 24GiB, 24GB or 25769803776"
        )
    return int(float(found[1]) * UNITS[found[2] or ""])


def render(layout: Layout, length: int, fits: Sequence[Fit]) -> list[report.Table | str]:
    """The figures for a person."""
    header = ["", *(found.kv_dtype for found in fits)]
    parts = [part for part in PARTS if any(found.request_bytes[part] for found in fits)]
    rows = [["tokens a page", *(f"{found.page_tokens:,}" for found in fits)]]
    rows += [
        [f"bytes a token: {part}", *(f"{found.token_bytes[part]:,.0f}" for found in fits)]
        for part in parts
        if part in fits[0].token_bytes
    ]
    rows += [
        [f"MiB a request: {part}", *(f"{found.request_bytes[part] / 2**20:,.1f}" for found in fits)]
        for part in parts
    ]
    rows += [
        ["requests at once", *(f"{found.concurrency:,.2f}" for found in fits)],
        ["tokens", *(f"{found.tokens:,}" for found in fits)],
        [f"tokens over {BASELINE}'s", *(f"{found.ratio:.3f}" for found in fits)],
    ]
    best = max(fits, key=lambda found: found.ratio)
    steps = "; with ".join(f"{part} {best.ratio_by_part[part]:.3f}" for part in parts)
    title = f"{layout.name}: requests of {length:,} tokens, on each GPU"
    sentences = [f"{best.kv_dtype} over {BASELINE}: {steps}"] if best.kv_dtype != BASELINE else []
    return [report.Table(title, header, rows), *sentences, *layout.sources]


def _plot(path: Path, fits: Sequence[Fit]) -> None:
    def draw(axes) -> None:
        for place, found in enumerate(fits):
            left = 0.0
            for part, colour in zip(PARTS, ("#5e3c99", "#b2abd2", "#fdb863", "#cccccc"), strict=True):
                width = found.request_bytes[part] / 2**20
                axes.barh(place, width, left=left, color=colour, label=part if place == 0 else None)
                left += width
            axes.annotate(f" {found.tokens:,} tokens", (left, place), va="center")
        axes.set_yticks(range(len(fits)), [found.kv_dtype for found in fits])
        axes.invert_yaxis()
        axes.margins(x=0.25)
        axes.set_xlabel("MiB a request")
        axes.legend(frameon=False, loc="lower right")

    report.figure(path, draw, (9, 1.5 + 0.7 * len(fits)))
