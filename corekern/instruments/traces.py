"""Prompt log-prob traces, read from what servers and offline runs write.

What is understood, by what is in the file:

- vLLM responses (`prompt_logprobs`, of a completion, a chat completion or an offline RequestOutput): for each
  position null or {token id: {"logprob", "rank", "decoded_token"}}. The prompt's own token is the first entry
  of its position, unless `prompt_token_ids` (asked for by `return_token_ids`) says which it is.
- OpenAI completions with `echo` and `logprobs`: parallel lists `tokens`, `token_logprobs`, `top_logprobs`.
- JSON lines: a position a line ({"token", "logprob", and "top_logprobs" where known}), or a response a line,
  batch outputs ({"response": {"body": ...}}) included.
- `.npz`: `tokens` and `log_probs`, and `top1` and `margins` where known.

Chat completions' own `logprobs` belong to generated tokens, which two runs need not share: they are refused.
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# vLLM's servers write -inf, which JSON lacks, as this.
_CLAMPED = -9999.0


@dataclass(frozen=True)
class Trace:
    """One prompt's log-probs; position 0 is predicted by nothing and has none."""

    tokens: tuple[int | str | None, ...]
    """(n,) ids, or texts where the file has no ids; the first is None where the file does not say."""
    log_probs: np.ndarray
    """(n - 1,) float64, in nats: of tokens 1 to n - 1."""
    top1: tuple[int | str, ...] | None = None
    """(n - 1,) the likeliest token of each position."""
    margins: np.ndarray | None = None
    """(n - 1,) float64, in nats: the likeliest token's lead over the second; NaN where the file does not say."""


def read_traces(path: str | Path) -> list[Trace]:
    """The prompts of a file, in its order.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, empty, of no known form, or holds a log-prob that is not a finite number; one line
            that names the file and the position.
    """
    path = Path(path)
    try:
        found = _read_npz(path) if path.suffix == ".npz" else _read_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not found:
        raise ValueError(f"{path}: holds no trace")
    return found


def _trace(
    tokens: Sequence[Any],
    log_probs: Sequence[float],
    top1: Sequence[Any] | None = None,
    margins: Sequence[float] | np.ndarray | None = None,
) -> Trace:
    """Checks what every form has in common. The last three are of positions 1 and on."""
    if len(tokens) < 2:
        raise ValueError(f"the trace has {len(tokens)} tokens; at least 2 are needed")
    if len(log_probs) != len(tokens) - 1:
        raise ValueError(
            f"{len(tokens)} tokens take {len(tokens) - 1} log-probs after the first, not {len(log_probs)}"
        )
    try:
        values = np.array([math.nan if value is None else value for value in log_probs], np.float64)
    except (TypeError, ValueError):
        raise ValueError("a log-prob is not a number") from None
    bad = np.flatnonzero(~(np.isfinite(values) & (values > _CLAMPED) & (values < 1e-3)))
    if len(bad):
        at = int(bad[0])
        raise ValueError(f"position {at + 1}: {log_probs[at]} is no finite log-prob of 0 or less")
    return Trace(
        tuple(tokens),
        values,
        None if top1 is None else tuple(top1),
        None if margins is None else np.asarray(margins, np.float64),
    )


# .npz


def _read_npz(path: Path) -> list[Trace]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError):
        raise ValueError("is damaged or truncated, or no .npz of plain arrays") from None
    for name in ("tokens", "log_probs"):
        if name not in arrays:
            raise ValueError(f"has no array {name!r}, only {', '.join(sorted(arrays)) or 'none at all'}")
    tokens = arrays["tokens"]
    for name, array in arrays.items():
        if array.ndim != 1:
            raise ValueError(f"{name}: shape {array.shape} is not (tokens,)")
    predicted = {name: _predicted(name, arrays[name], len(tokens)) for name in arrays if name != "tokens"}
    top1 = predicted.get("top1")
    return [
        _trace(
            tokens.tolist(),
            predicted["log_probs"].tolist(),
            None if top1 is None else top1.tolist(),
            predicted.get("margins"),
        )
    ]


def _predicted(name: str, values: np.ndarray, tokens: int) -> np.ndarray:
    """Positions 1 and on of an array that may have a place for position 0."""
    if len(values) not in (tokens, tokens - 1):
        raise ValueError(f"{name}: {len(values)} values for {tokens} tokens")
    return values[len(values) - (tokens - 1) :]


# JSON and JSON lines


def _read_json(path: Path) -> list[Trace]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
    if not text.strip():
        raise ValueError("is empty")
    try:
        values = json.loads(text)
        values = values if isinstance(values, list) else [values]
    except json.JSONDecodeError:
        values = _lines(text)
    if not all(isinstance(value, dict) for value in values):
        raise ValueError("holds no response and no positions: expected JSON objects")
    if values and "logprob" in values[0]:
        return [_positions(values)]
    return [trace for value in values for trace in _response(value)]


def _lines(text: str) -> list[Any]:
    values = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            values.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is not JSON ({error.msg}), or the file is truncated") from None
    return values


def _positions(lines: list[dict]) -> Trace:
    for number, line in enumerate(lines):
        if "token" not in line or "logprob" not in line:
            raise ValueError(f"position {number} lacks 'token' or 'logprob'")
    tops = [_ranked(line.get("top_logprobs")) for line in lines[1:]]
    return _trace([line["token"] for line in lines], [line["logprob"] for line in lines[1:]], *_top(tops))


def _response(response: dict) -> list[Trace]:
    """The prompts of a server's response."""
    if isinstance(response.get("response"), dict):  # a line of a batch's output
        response = response["response"].get("body") or response["response"]
    choices = response.get("choices") or []
    if response.get("prompt_logprobs"):
        return [_vllm(response["prompt_logprobs"], response.get("prompt_token_ids"))]
    found = []
    for choice in choices:
        logprobs = choice.get("logprobs") or {}
        if choice.get("prompt_logprobs"):
            ids = choice.get("prompt_token_ids") or response.get("prompt_token_ids")
            found.append(_vllm(choice["prompt_logprobs"], ids))
        elif "token_logprobs" in logprobs:
            usage = response.get("usage") or {}
            found.append(_echo(logprobs, usage.get("prompt_tokens") if len(choices) == 1 else None))
        elif "content" in logprobs:
            raise ValueError("holds log-probs of generated tokens alone; ask the server for prompt_logprobs")
    if not found:
        raise ValueError("has no prompt_logprobs and no echoed logprobs")
    return found


def _vllm(positions: list[dict | None], ids: list[Any] | None) -> Trace:
    entries = [_entries(position, number) for number, position in enumerate(positions[1:], 1)]
    if ids is None:
        _check_order(entries)
        ids = [None, *(next(iter(position)) for position in entries)]  # nothing says which the first token is
    if len(ids) != len(positions):
        raise ValueError(f"{len(ids)} prompt_token_ids for {len(positions)} prompt_logprobs")
    for number, (token, position) in enumerate(zip(ids[1:], entries, strict=True), 1):
        if token not in position:
            raise ValueError(f"position {number}: prompt_logprobs lacks its token {token}")
    log_probs = [position[token][0] for token, position in zip(ids[1:], entries, strict=True)]
    tops = []
    for position in entries:
        by_rank = {rank: (token, value) for token, (value, rank) in position.items()}
        tops.append([by_rank[rank] for rank in (1, 2) if rank in by_rank] if 1 in by_rank else [])
    return _trace(ids, log_probs, *_top(tops))


def _entries(position: Any, number: int) -> dict[int, tuple[float, int | None]]:
    """{token id: (log-prob, rank)} in the file's order."""
    if not isinstance(position, dict) or not position:
        raise ValueError(f"position {number}: prompt_logprobs has no entry")
    try:
        return {
            int(token): (entry["logprob"], entry.get("rank")) if isinstance(entry, dict) else (entry, None)
            for token, entry in position.items()
        }
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"position {number}: not {{token id: {{'logprob', 'rank'}}}}") from None


def _check_order(entries: list[dict[int, tuple[float, int | None]]]) -> None:
    """Refuses positions whose first entry cannot be taken for the prompt's own token.

    It comes first and the likeliest follow in the order of their ranks. Old servers sorted all by rank, and whoever
    writes a JSON again may sort its keys.
    """
    help_ = "so which is the prompt's token is not known; ask the server for return_token_ids"
    several = [position for position in entries if len(position) > 1]
    for number, position in enumerate(entries, 1):
        ranks = [rank for _, rank in position.values()]
        rest = [rank for rank in ranks[1:] if rank is not None]
        if rest != sorted(rest):
            raise ValueError(f"position {number}: entries are not in the order of their ranks, {help_}")
    if len(several) > 16 and all(next(iter(p.values()))[1] == 1 for p in several):
        raise ValueError(f"every position's first entry is the likeliest token, {help_}")


def _echo(logprobs: dict, prompt_tokens: int | None) -> Trace:
    """A completion's `logprobs`; what was generated after the prompt is left out."""
    tokens, values = logprobs.get("tokens"), logprobs["token_logprobs"]
    if not tokens or not values:
        raise ValueError("logprobs has no tokens")
    if values[0] is not None:
        raise ValueError("logprobs do not start with a prompt (the first is not null); ask for echo")
    end = prompt_tokens or len(tokens)
    tops = [_ranked(top) for top in (logprobs.get("top_logprobs") or [])[1:end]]
    ids = [_token_id(token) for token in tokens[:end]]
    return _trace(ids, values[1:end], *_top(tops))


def _token_id(token: str) -> int | str:
    """vLLM writes "token_id:42" when it is asked to return tokens as ids."""
    number = str(token).removeprefix("token_id:")
    return int(number) if number != token and number.isdigit() else token


def _ranked(top: Any) -> list[tuple[Any, float]]:
    """The two likeliest of {token: log-prob}, or of OpenAI's [{"token", "logprob"}]."""
    if isinstance(top, list):
        pairs = [(entry["token"], entry["logprob"]) for entry in top]
    else:
        pairs = list((top or {}).items())
    return sorted(((_token_id(token), value) for token, value in pairs), key=lambda pair: -pair[1])[:2]


def _top(tops: list[list[tuple[Any, float]]]) -> tuple[list | None, list[float] | None]:
    """The likeliest tokens and their leads, where every position says which is likeliest."""
    if not tops or not all(tops):
        return None, None
    leads = [two[0][1] - two[1][1] if len(two) == 2 else math.nan for two in tops]
    return [two[0][0] for two in tops], leads
