"""Runs of a real model for `corekern trace` and `corekern acceptance` to compare: what a KV format changes.

    python -m corekern_examples.record_runs --output runs

For each KV format: `trace-FORMAT.npz`, the log-probs of a passage, and `requests-FORMAT.jsonl`, what each of some
requests drafted and had accepted. `trace-repeat.npz` scores the first format once more. The model is the demo's:
SmolLM2-135M-Instruct, fetched once, or any Llama-architecture GGUF.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from corekern_examples.demo import COPY_REQUEST, opening
from corekern_examples.errors import DemoError
from corekern_examples.gguf_model import Model, load_model
from corekern_examples.linear import single_threaded_blas
from corekern_examples.llama import new_state
from corekern_examples.score import PassageScore, score_passage
from corekern_examples.speculate import MAX_DRAFT, generate
from corekern_examples.tokenizer import ModelTokenizer, build_tokenizer, encode, encode_prompt

import corekern

FORMATS = ("float32", "fp8_e4m3")


def record(
    model: Model,
    tokenizer: ModelTokenizer,
    text: str,
    folder: Path,
    *,
    formats: tuple[str, ...] = FORMATS,
    max_tokens: int = 48,
    piece: int = 300,
) -> list[Path]:
    """Score a text and decode requests about its pieces with each KV format, and write what came of it.

    Args:
        model, tokenizer: the demo's.
        text: what to score; requests ask to repeat pieces of it, where drafts are often right.
        folder: where to write; made where it is not there.
        formats: corekern format names; the first is scored twice.
        max_tokens: of each answer.
        piece: characters of a request's text.

    Returns:
        The files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = encode(tokenizer, text)
    written = []
    for name, kv_dtype in (*((name, name) for name in formats), ("repeat", formats[0])):
        path = folder / f"trace-{name}.npz"
        write_trace(path, tokens, score_passage(model, tokens, kv_dtype))
        written.append(path)
    for kv_dtype in formats:
        path = folder / f"requests-{kv_dtype}.jsonl"
        lines = [
            json.dumps(_request(model, tokenizer, words, kv_dtype, max_tokens) | {"request_id": number})
            for number, words in enumerate(pieces(text, piece))
        ]
        path.write_text("\n".join(lines) + "\n")
        written.append(path)
    return written


def write_trace(path: Path, tokens: list[int], score: PassageScore) -> None:
    """A trace that `corekern trace` reads."""
    np.savez(path, tokens=tokens, log_probs=score.log_probs, top1=score.top1, margins=score.margins)


def pieces(text: str, characters: int) -> list[str]:
    """A text cut where sentences end, in pieces of at most so many characters where sentences allow it."""
    found = []
    while text.strip():
        found.append(opening(text.strip(), characters))
        text = text.strip()[len(found[-1]) :]
    return found


def _request(
    model: Model, tokenizer: ModelTokenizer, words: str, kv_dtype: str, max_tokens: int
) -> dict[str, object]:
    prompt = encode_prompt(tokenizer, COPY_REQUEST + words)
    state = new_state(model.config, len(prompt) + max_tokens, kv_dtype)
    done = generate(
        model, prompt, state, max_tokens=max_tokens, stop_ids=tokenizer.stop_ids, max_draft=MAX_DRAFT
    )
    return {
        "drafts": sum(steps for rows, steps in done.rows_per_step.items() if rows > 1),
        "draft_tokens": done.drafted,
        "accepted_tokens": done.accepted,
        "accepted_tokens_per_pos": done.accepted_per_position,
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0, or the error's exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs"), metavar="DIR")
    parser.add_argument("--model", type=Path, metavar="FILE.gguf")
    parser.add_argument("--text", type=Path, default=Path(__file__).with_name("passage.txt"), metavar="FILE")
    options = parser.parse_args(argv)
    try:
        with single_threaded_blas():
            model = load_model(options.model or _default_model())
            text = options.text.read_text(encoding="utf-8").strip()
            files = record(model, build_tokenizer(model.vocabulary), text, options.output)
    except DemoError as error:
        print(f"record_runs: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"record_runs: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    print("\n".join(f"wrote {path}" for path in files))
    print(corekern.route_summary(), file=sys.stderr)
    return 0


def _default_model() -> Path:
    from corekern_examples.fetch_model import cached_model, fetch_model

    return cached_model() or fetch_model()


if __name__ == "__main__":
    sys.exit(main())
