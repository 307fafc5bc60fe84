"""The demo's findings as data (`demo.json`), as tables, and as a few sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from corekern_examples.score import DECILES, Comparison, PassageScore
from corekern_examples.speculate import Generation

REFERENCE = "float32"
SCORE_HEADER = (
    "KV format",
    "bytes/token",
    "mean |diff| (nats)",
    "largest",
    "top-1 agreement",
    "perplexity",
)
DRIFT_HEADER = ("KV format", *(f"{100 * part // DECILES}%" for part in range(1, DECILES + 1)))
DRAFT_HEADER = ("KV format", "tokens", "drafted", "accepted", "steps, plain", "steps, drafts", "same tokens")


@dataclass(frozen=True)
class Drafting:
    """One request decoded twice with one KV format: plainly, and with drafts."""

    plain: Generation
    drafts: Generation

    @property
    def equal(self) -> bool:
        """Whether the two wrote the same tokens and ended alike."""
        return self.plain.tokens == self.drafts.tokens and self.plain.stopped == self.drafts.stopped


def score_rows(scores: dict[str, PassageScore], comparisons: dict[str, Comparison]) -> list[list[str]]:
    """The rows under `SCORE_HEADER`, the reference first."""
    rows = []
    for name, score in scores.items():
        row = [name, f"{score.bytes_per_token:,}"]
        if name == REFERENCE:
            row += ["-", "-", "-"]
        else:
            found = comparisons[name]
            row += [f"{found.mean:.4f}", f"{found.max:.3f}", f"{100 * found.top1_agreement:.1f} %"]
        rows.append([*row, f"{score.perplexity:.3f}"])
    return rows


def drift_rows(comparisons: dict[str, Comparison]) -> list[list[str]]:
    """The rows under `DRIFT_HEADER`."""
    return [[name, *(f"{part:.4f}" for part in found.deciles)] for name, found in comparisons.items()]


def draft_rows(drafting: dict[str, Drafting]) -> list[list[str]]:
    """The rows under `DRAFT_HEADER`."""
    return [
        [
            name,
            str(len(run.drafts.tokens)),
            str(run.drafts.drafted),
            str(run.drafts.accepted),
            str(run.plain.steps),
            str(run.drafts.steps),
            "yes" if run.equal else "NO",
        ]
        for name, run in drafting.items()
    ]


def sentences(
    scores: dict[str, PassageScore], comparisons: dict[str, Comparison], drafting: dict[str, Drafting]
) -> list[str]:
    """What the tables say about E4M3, each claim computed from the numbers it is about."""
    e4m3, found = scores["fp8_e4m3"], comparisons["fp8_e4m3"]
    saved = scores[REFERENCE].bytes_per_token / e4m3.bytes_per_token
    saved_bf16 = scores["bfloat16"].bytes_per_token / e4m3.bytes_per_token
    percent = 100 * (e4m3.perplexity / scores[REFERENCE].perplexity - 1)
    halves = [
        sum(part) / len(part) for part in (found.deciles[: DECILES // 2], found.deciles[DECILES // 2 :])
    ]
    changed = sum(1 for run in drafting.values() if not run.equal)
    return [
        f"E4M3 KV takes {e4m3.bytes_per_token:,} bytes a token: {saved:.1f} times less than float32, "
        f"{saved_bf16:.1f} times less than bfloat16.",
        f"It moves a token's log-prob by {found.mean:.3f} nats on average and perplexity by {percent:+.1f} %; "
        f"the likeliest token stays the same at {100 * found.top1_agreement:.1f} % of positions. "
        f"E5M2 moves log-probs {comparisons['fp8_e5m2'].mean / max(found.mean, 1e-12):.1f} times as far.",
        f"Mean difference in the first half of the passage {halves[0]:.3f}, in the second {halves[1]:.3f}.",
        "Drafts changed no token: every row of a verification call has the bits of plain decoding."
        if changed == 0
        else f"Drafts changed the text with {changed} of {len(drafting)} KV formats.",
    ]


def score_data(
    tokens: Sequence[int], scores: dict[str, PassageScore], comparisons: dict[str, Comparison]
) -> dict[str, Any]:
    """The "scores" part of `demo.json`."""

    def entry(name: str) -> dict[str, Any]:
        score = scores[name]
        data = {"bytes_per_token": score.bytes_per_token, "perplexity": score.perplexity}
        if name != REFERENCE:
            found = comparisons[name]
            data |= {
                "mean_abs_difference": found.mean,
                "max_abs_difference": found.max,
                "mean_abs_difference_by_decile": list(found.deciles),
                "top1_agreement": found.top1_agreement,
                "abs_difference_by_position": [round(float(x), 6) for x in found.difference],
            }
        return data

    return {
        "passage_tokens": len(tokens),
        "scored_tokens": len(tokens) - 1,
        "reference": REFERENCE,
        "formats": {name: entry(name) for name in scores},
    }


def draft_data(drafting: dict[str, Drafting], text: dict[str, str]) -> dict[str, Any]:
    """The "speculation" part of `demo.json`."""
    return {
        name: {
            "text": text[name],
            "tokens": len(run.drafts.tokens),
            "drafted": run.drafts.drafted,
            "accepted": run.drafts.accepted,
            "steps_plain": run.plain.steps,
            "steps_with_drafts": run.drafts.steps,
            "steps_by_live_rows": {str(k): v for k, v in sorted(run.drafts.rows_per_step.items())},
            "equals_plain_decoding": run.equal,
        }
        for name, run in drafting.items()
    }
