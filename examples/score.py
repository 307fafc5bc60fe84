"""What a KV format costs the model: teacher-forced scores of one passage, format against float32.

Each token of the passage is predicted from the true tokens before it, whose keys and values lie in the
cache under test; nothing is generated, so formats stay comparable token by token to the end. Keys and
values are rounded as they are written, and every row, those of the same prefill chunk included, reads
them back through the cache: what is scored is what decoding with that cache would see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from corekern_examples.gguf_model import Model
from corekern_examples.llama import logits, new_state, prefill

DECILES = 10


@dataclass(frozen=True)
class PassageScore:
    """A model's predictions of tokens 1 to n - 1 of a passage of n tokens, with one KV format."""

    log_probs: np.ndarray
    """(n - 1,) float64: natural log of the probability given to the token that came."""
    top1: np.ndarray
    """(n - 1,) int64: the token held most likely."""
    bytes_per_token: int
    """Keys and values of all layers."""
    margins: np.ndarray | None = None
    """(n - 1,) float32: the lead of the likeliest token over the second, in nats."""

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-prob."""
        return float(np.exp(-self.log_probs.mean()))


@dataclass(frozen=True)
class Comparison:
    """One format's predictions beside the reference's."""

    difference: np.ndarray
    """(n - 1,) float64: |log-prob difference| of each token, in nats."""
    mean: float
    max: float
    deciles: tuple[float, ...]
    """Mean difference in each tenth of the positions, first to last: rising numbers mean drift."""
    top1_agreement: float
    """The fraction of positions where both hold the same token most likely."""


def score_passage(
    model: Model,
    tokens: Sequence[int],
    kv_dtype: str,
    *,
    page_size: int = 16,
    on_tokens: Callable[[int], None] | None = None,
) -> PassageScore:
    """Score a passage with one KV format.

    Args:
        model: the model.
        tokens: at least two token ids, no more than the model's context.
        kv_dtype: a corekern format name.
        page_size: tokens a page.
        on_tokens: called with the number of tokens done by each step.

    Raises:
        ValueError: for fewer than two tokens.
        DemoError: when the passage is longer than the model's context.
    """
    if len(tokens) < 2:
        raise ValueError(f"tokens: {len(tokens)} given; scoring takes at least 2")
    state = new_state(model.config, len(tokens), kv_dtype, page_size=page_size)
    targets = np.asarray(tokens)
    log_probs: list[np.ndarray] = []
    top1: list[np.ndarray] = []
    margins: list[np.ndarray] = []

    def take(hidden: np.ndarray) -> None:
        done = sum(len(part) for part in log_probs)
        expected = targets[done + 1 : done + 1 + len(hidden)]
        # The passage's last token predicts one that is not there.
        scores = logits(model.weights, hidden)[: len(expected)]
        if len(expected):
            log_probs.append(token_log_probs(scores, expected))
            top1.append(scores.argmax(axis=1))
            second, first = np.partition(scores, -2, axis=1)[:, -2:].T
            margins.append(first - second)
        if on_tokens is not None:
            on_tokens(len(hidden))

    prefill(model.config, model.weights, tokens, state, on_chunk=take)
    return PassageScore(
        np.concatenate(log_probs), np.concatenate(top1), state.bytes_per_token, np.concatenate(margins)
    )


def token_log_probs(scores: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Log-softmax of each row, at that row's token.

    Args:
        scores: (rows, vocab_size) float32 logits.
        tokens: (rows,) int.

    Returns:
        (rows,) float64, in nats. The sum over the vocabulary is in float64, so that what two formats
        differ by is not the rounding of 50 thousand float32 terms.
    """
    shifted = scores - scores.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, dtype=np.float64)
    return shifted[np.arange(len(tokens)), tokens] - np.log(total)


def compare(reference: PassageScore, candidate: PassageScore) -> Comparison:
    """What the candidate's KV format changed, against the reference's.

    Raises:
        ValueError: when the two did not score the same number of tokens, or fewer than ten.
    """
    count = len(reference.log_probs)
    if len(candidate.log_probs) != count:
        raise ValueError(f"candidate: {len(candidate.log_probs)} tokens scored, but {count} by reference")
    if count < DECILES:
        raise ValueError(f"reference: {count} tokens scored; deciles take at least {DECILES}")
    difference = np.abs(candidate.log_probs - reference.log_probs)
    return Comparison(
        difference=difference,
        mean=float(difference.mean()),
        max=float(difference.max()),
        deciles=tuple(float(part.mean()) for part in np.array_split(difference, DECILES)),
        top1_agreement=float(np.mean(candidate.top1 == reference.top1)),
    )
