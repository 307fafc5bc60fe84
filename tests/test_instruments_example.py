"""The README's instrument examples, made again from a model, on a short input."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
from corekern_examples import fetch_model, record_runs
from corekern_examples import tokenizer as tokenizing
from corekern_examples.gguf_model import load_model
from corekern_examples.linear import single_threaded_blas
from tiny_llama import write_tiny

from corekern import cli

README = Path(__file__).resolve().parent.parent / "README.md"
TEXT = "The thing in the inn and the hand. " * 12


def readme_commands() -> list[list[str]]:
    """The instruments' commands on the example's files, as in the README."""
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    names = ("corekern trace ", "corekern acceptance ", "corekern capacity ", "corekern routes")
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith(names)]


def run_all(capsys) -> dict[str, str]:
    found = {}
    for command in readme_commands():
        assert cli.main(command) == 0
        found[command[0]] = found.get(command[0], "") + capsys.readouterr().out
    assert set(found) == {"trace", "acceptance", "capacity", "routes"}
    # What the README shows of it.
    shown = next(
        b for b in re.findall(r"```text\n(.*?)```", README.read_text(), re.DOTALL) if "tokens over" in b
    )
    assert shown in found["capacity"]
    return found


def test_examples_on_a_small_model(tmp_path, monkeypatch, capsys):
    model = load_model(write_tiny(tmp_path / "tiny.gguf", seed=3).path)
    # A random model soon says stop; this one, going on, repeats itself, so that there is something to draft.
    tokenizer = dataclasses.replace(tokenizing.build_tokenizer(model.vocabulary), stop_ids=frozenset())
    monkeypatch.chdir(tmp_path)
    with single_threaded_blas():
        record_runs.record(model, tokenizer, TEXT, Path("runs"), max_tokens=60, piece=80)
    found = run_all(capsys)
    # corekern gives the same bits every time, so a repeat shows no noise at all.
    assert "the repeat has the same log-probs" in found["trace"]
    assert "intervals: bootstrap over" in found["acceptance"]
    assert "cpu_fp32" in found["routes"]
    rows = [json.loads(line) for line in Path("runs/requests-fp8_e4m3.jsonl").read_text().splitlines()]
    assert len(rows) == len(record_runs.pieces(TEXT, 80)) >= 5
    for row in rows:
        assert sum(row["accepted_tokens_per_pos"]) == row["accepted_tokens"] <= row["draft_tokens"]


def test_pieces_lose_nothing():
    assert " ".join(record_runs.pieces(TEXT, 80)) == TEXT.strip()


@pytest.mark.network
def test_examples_on_smollm2(tmp_path, monkeypatch, capsys):
    path = fetch_model.cached_model()
    if path is None:
        pytest.skip("SmolLM2 is not in the cache; corekern demo fetches it")
    model = load_model(path)
    tokenizer = tokenizing.build_tokenizer(model.vocabulary)
    text = (Path(record_runs.__file__).with_name("passage.txt")).read_text()[:220]
    monkeypatch.chdir(tmp_path)
    with single_threaded_blas():
        record_runs.record(model, tokenizer, text, Path("runs"), max_tokens=8, piece=60)
    found = run_all(capsys)
    mean = float(re.search(r"^mean (\S+),", found["trace"], re.MULTILINE)[1])
    # E4M3 with scales of 1 moves this model's log-probs by some hundredths of a nat: see the README's table.
    assert 0.01 < mean < 0.3
