"""Greedy generation, plain and with prompt-lookup drafts that one call verifies.

A draft costs nothing to make: when the last few tokens stood somewhere before in the sequence, what came
after them there is proposed to come again (https://github.com/apoorvumang/prompt-lookup-decoding). One
step then runs the last token and up to seven drafted ones as query rows of one attention call, each row
seeing one token more than the row above it. The model's own choice after each row says how many drafts
stand, and is itself the next token. Rejected drafts leave keys and values behind; stepping the length back
hides them until the next step overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from corekern_examples.gguf_model import Model
from corekern_examples.llama import STEP_ROWS, KVState, forward, logits, prefill

MAX_DRAFT = STEP_ROWS - 1
# Longest match first: it is the surest. One token alone matches nearly everywhere and drafts badly.
NGRAMS = (4, 3, 2)


@dataclass
class Generation:
    """What a request produced, and what it took."""

    tokens: list[int] = field(default_factory=list)
    """Without the stop token."""
    stopped: bool = False
    """Whether a stop token ended it, rather than its limit."""
    drafted: int = 0
    accepted: int = 0
    """Drafted tokens that the model chose too, the stop token among them if it was drafted."""
    accepted_per_position: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT)
    """How many drafts had their first, second, ... token accepted."""
    rows_per_step: dict[int, int] = field(default_factory=dict)
    """How many steps ran with how many live query rows (1: nothing drafted)."""

    @property
    def steps(self) -> int:
        """Steps after prefill."""
        return sum(self.rows_per_step.values())


def generate(
    model: Model,
    prompt: Sequence[int],
    state: KVState,
    *,
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    max_draft: int = 0,
    on_token: Callable[[int], None] | None = None,
) -> Generation:
    """Continue a prompt with the likeliest token each time.

    Args:
        model: the model.
        prompt: at least one token id.
        state: fresh, of a capacity of at least `len(prompt) + max_tokens`.
        max_tokens: at least 1; the stop token does not count.
        stop_ids: tokens that end the answer.
        max_draft: drafted tokens a step, 0 (plain decoding) to `MAX_DRAFT`.
        on_token: called with each token as it is settled.

    Returns:
        The generation. `tokens` does not depend on `max_draft`, bit for bit, with any KV format.

    Raises:
        ValueError: for a `max_tokens` or `max_draft` out of range.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: {max_tokens} given; at least 1 is needed")
    if not 0 <= max_draft <= MAX_DRAFT:
        raise ValueError(f"max_draft: {max_draft} given; 0 to {MAX_DRAFT} fit one step")
    result = Generation()
    hidden = prefill(model.config, model.weights, prompt, state)
    chosen = logits(model.weights, hidden[None]).argmax(axis=1).tolist()
    while True:
        for token in chosen:
            if token in stop_ids:
                result.stopped = True
                return result
            result.tokens.append(token)
            if on_token is not None:
                on_token(token)
        room = max_tokens - len(result.tokens)
        if room == 0:
            return result
        # A step settles one token more than it drafts.
        draft = prompt_lookup([*prompt, *result.tokens], min(max_draft, room - 1))
        chosen = _step(model, state, result, draft, stop_ids)


def prompt_lookup(tokens: Sequence[int], max_draft: int) -> list[int]:
    """The tokens that followed the latest earlier occurrence of the sequence's last few.

    Args:
        tokens: the sequence so far.
        max_draft: the most tokens to propose.

    Returns:
        At most `max_draft` token ids; none when the last two tokens never stood together before.

    >>> prompt_lookup([5, 6, 7, 8, 9, 5, 6], 3)
    [7, 8, 9]
    """
    if max_draft <= 0:
        return []
    sequence = np.asarray(tokens)
    for size in NGRAMS:
        # The last n-gram itself is no earlier occurrence, and one needs a token after it.
        if len(sequence) <= size:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(sequence[:-1], size)
        found = np.flatnonzero((windows == sequence[-size:]).all(axis=1))
        if len(found):
            start = int(found[-1]) + size
            return [int(token) for token in sequence[start : start + max_draft]]
    return []


def _step(
    model: Model, state: KVState, result: Generation, draft: list[int], stop_ids: frozenset[int]
) -> list[int]:
    """Run the last token and its drafts; return the tokens that are now settled: 1 to len(draft) + 1."""
    before = state.length
    rows = [result.tokens[-1], *draft]
    hidden = forward(model.config, model.weights, rows, state, rows=STEP_ROWS)
    choices = logits(model.weights, hidden).argmax(axis=1).tolist()
    accepted = 0
    while accepted < len(draft) and choices[accepted] == draft[accepted]:
        accepted += 1
        if draft[accepted - 1] in stop_ids:
            # The answer ends here; that later drafts agree too is no merit.
            break
    # Row i is right only when the drafts up to it were: the rest is forgotten.
    state.length = before + 1 + accepted
    result.drafted += len(draft)
    result.accepted += accepted
    for position in range(accepted):
        result.accepted_per_position[position] += 1
    result.rows_per_step[len(rows)] = result.rows_per_step.get(len(rows), 0) + 1
    return choices[: accepted + 1]
