"""`corekern trace`: every form of file, the statistics against scipy, and bad input in one line."""

import json
import math
import re

import numpy as np
import pytest
from scipy import stats

from corekern import cli
from corekern.instruments import intervals, trace
from corekern.instruments.traces import Trace, read_traces

TOKENS = [11, 5, 7, 5, 9, 2, 4, 4, 8, 3, 6, 1]


def made(count=200, seed=0, top1=True):
    rng = np.random.default_rng(seed)
    tokens = tuple(rng.integers(0, 90, count + 1).tolist())
    return Trace(
        tokens,
        -rng.exponential(2.0, count),
        tuple(rng.integers(0, 90, count).tolist()) if top1 else None,
        rng.exponential(1.0, count) if top1 else None,
    )


def moved(t, by, top1=None):
    return Trace(t.tokens, t.log_probs + by, t.top1 if top1 is None else top1, t.margins)


def write_npz(path, t):
    np.savez(path, tokens=t.tokens, log_probs=t.log_probs, top1=t.top1, margins=t.margins)
    return path


# Statistics


@pytest.mark.parametrize("degrees", [8, 9, 12, 30, 100, 5000])
def test_t_quantile_is_scipys(degrees):
    assert intervals.t_quantile(0.975, degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-4)


def test_line_is_scipys_and_its_interval_whites():
    rng = np.random.default_rng(0)
    x = np.arange(1.0, 301)
    y = 0.5 + 0.002 * x + rng.standard_normal(300) * x / 100  # noisier to the right
    found = intervals.fit_line(x, y)
    expected = stats.linregress(x, y)
    assert (found.slope, found.intercept) == pytest.approx((expected.slope, expected.intercept))
    # White's estimator as its definition has it: (X'X)^-1 X' diag(e^2) X (X'X)^-1, and n / (n - 2).
    design = np.stack([np.ones(300), x], 1)
    residuals = y - design @ [expected.intercept, expected.slope]
    inverse = np.linalg.inv(design.T @ design)
    variance = (inverse @ (design.T * residuals**2) @ design @ inverse)[1, 1] * 300 / 298
    reach = stats.t.ppf(0.975, 298) * math.sqrt(variance)
    assert found.interval.high - found.slope == pytest.approx(reach, rel=1e-4)
    assert found.slope - found.interval.low == pytest.approx(reach, rel=1e-4)


def test_drift_is_found_at_the_stated_confidence():
    rng = np.random.default_rng(1)
    x = np.arange(1.0, 101)
    trials, slope = 1000, 0.003
    hits = 0
    for _ in range(trials):
        y = slope * x + rng.standard_normal(100) * (0.2 + x / 100)
        hits += not intervals.fit_line(x, y).interval.excludes(slope)
    # 95 % of 1000, within four standard errors (0.7 %); White's is known to fall a little short at n = 100.
    assert 0.92 < hits / trials < 0.98


def test_comparison_arithmetic():
    a = made(200)
    change = np.where(np.arange(200) % 2, 0.5, -0.25) * np.linspace(1, 2, 200)
    flipped = tuple(-1 if i in (3, 77) else token for i, token in enumerate(a.top1))
    found = trace.compare([a], [moved(a, change, flipped)])
    distance = np.abs(change)
    assert found.mean == pytest.approx(distance.mean())
    assert found.max == pytest.approx(distance.max())
    assert found.max_at == (0, 1 + int(distance.argmax()))
    assert found.mean_signed == pytest.approx(change.mean())
    assert found.deciles == pytest.approx(distance.reshape(10, 20).mean(1))
    assert found.drift.slope == pytest.approx(stats.linregress(np.arange(1, 201), distance).slope)
    assert {(f.position, f.before, f.after) for f in found.flips} == {
        (4, a.top1[3], -1),
        (78, a.top1[77], -1),
    }
    assert [f.margin for f in found.flips] == sorted((a.margins[3], a.margins[77]), reverse=True)


def test_noise_is_taken_off_position_by_position():
    rng = np.random.default_rng(2)
    a = made(400)
    growing = 0.001 * np.arange(400) + np.abs(rng.standard_normal(400)) * 0.01
    repeat, b = moved(a, growing), moved(a, -growing - 0.05)
    found = trace.compare([a], [b], [repeat])
    assert found.drift.interval.excludes(0)
    # B is 0.05 further away than the repeat, everywhere: all of the drift is noise.
    assert found.noise.excess.slope == pytest.approx(0, abs=1e-12)
    assert found.noise.ratio == pytest.approx(1 + 0.05 / growing.mean())
    same = trace.compare([a], [b], [a])
    assert same.noise.ratio == math.inf


def test_prompts_are_compared_position_by_position():
    a = [made(30, 1), made(15, 2)]
    b = [moved(a[0], 0.1), moved(a[1], np.where(np.arange(15) == 14, -3.0, 0.1))]
    found = trace.compare(a, b)
    assert (found.prompts, found.positions, found.max_at) == (2, 45, (1, 15))
    assert found.mean == pytest.approx((44 * 0.1 + 3) / 45)


# Files: the same trace in every form


LOG_PROBS = [-0.5, -1.5, -0.125, -2.0, -0.75, -3.0, -1.0, -0.25, -4.0, -0.5, -2.5]
TOP1 = [5, 8, 5, 9, 2, 4, 4, 8, 3, 6, 1]
MARGINS = [0.5, 0.25, 1.0, 0.5, 2.0, 0.125, 0.5, 1.0, 0.25, 0.5, 0.75]


def vllm_positions():
    """vLLM's order: the prompt's own token, then the likeliest by rank, each token once."""
    positions = [None]
    for token, value, best, margin in zip(TOKENS[1:], LOG_PROBS, TOP1, MARGINS, strict=True):
        lead = value if token == best else value + 1.0
        entries = {str(token): {"logprob": value, "rank": 1 if token == best else 5, "decoded_token": "x"}}
        entries.setdefault(str(best), {"logprob": lead, "rank": 1, "decoded_token": "y"})
        entries["77"] = {"logprob": lead - margin, "rank": 2, "decoded_token": "z"}
        positions.append(entries)
    return positions


def top_logprobs(texts):
    tops = [None]
    for value, token, best, margin in zip(LOG_PROBS, TOKENS[1:], TOP1, MARGINS, strict=True):
        lead = value if token == best else value + 1.0
        tops.append({texts(best): lead, texts(77): lead - margin})
    return tops


def forms():
    positions, completion = vllm_positions(), {"object": "text_completion"}
    echo = {
        "tokens": [f"token_id:{t}" for t in [*TOKENS, 50]],
        "token_logprobs": [None, *LOG_PROBS, -9.0],
        "top_logprobs": [*top_logprobs(lambda t: f"token_id:{t}"), {"token_id:50": -0.1}],
    }
    lines = [
        {"token": token, "logprob": value, "top_logprobs": top}
        for token, value, top in zip(TOKENS, [None, *LOG_PROBS], top_logprobs(str), strict=True)
    ]
    ids = [
        {**line, "top_logprobs": [{"token": int(k), "logprob": v} for k, v in (line["top_logprobs"] or {}).items()]}
        for line in lines
    ]  # fmt: skip
    with_ids = {**completion, "choices": [{"prompt_logprobs": positions, "prompt_token_ids": TOKENS}]}
    return {
        "vllm-completion.json": json.dumps({**completion, "choices": [{"prompt_logprobs": positions}]}),
        "vllm-completion-ids.json": json.dumps(with_ids, sort_keys=True),
        "vllm-chat.json": json.dumps(
            {"choices": [{"message": {}}], "prompt_logprobs": positions, "prompt_token_ids": TOKENS}
        ),
        "vllm-batch.jsonl": json.dumps(
            {"custom_id": "1", "response": {"status_code": 200, "body": with_ids}}
        ),
        "openai-echo.json": json.dumps(
            {**completion, "choices": [{"logprobs": echo}], "usage": {"prompt_tokens": len(TOKENS)}}
        ),
        "positions.jsonl": "\n".join(map(json.dumps, ids)) + "\n\n",
    }


@pytest.mark.parametrize("name", forms())
def test_every_form_is_read_alike(tmp_path, name):
    path = tmp_path / name
    path.write_text(forms()[name])
    (found,) = read_traces(path)
    assert found.tokens[1:] == tuple(TOKENS[1:])
    assert found.tokens[0] in (None, TOKENS[0])
    assert found.log_probs.tolist() == LOG_PROBS
    assert found.top1 == tuple(TOP1)
    assert found.margins.tolist() == pytest.approx(MARGINS)


def test_npz_with_and_without_a_place_for_position_0(tmp_path):
    t = Trace(tuple(TOKENS), np.array(LOG_PROBS), tuple(TOP1), np.array(MARGINS))
    (short,) = read_traces(write_npz(tmp_path / "a.npz", t))
    np.savez(tmp_path / "b.npz", tokens=TOKENS, log_probs=[np.nan, *LOG_PROBS], top1=[0, *TOP1])
    (long,) = read_traces(tmp_path / "b.npz")
    for found in (short, long):
        assert (found.tokens, found.log_probs.tolist(), found.top1) == (tuple(TOKENS), LOG_PROBS, tuple(TOP1))
    assert long.margins is None


def test_a_batch_of_prompts(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join([forms()["vllm-completion.json"]] * 3))
    assert len(read_traces(path)) == 3


# Bad input: one line, exit 2


def old_order():
    """As an old server wrote it: by rank, the prompt's token where it falls."""
    positions = [None]
    for position in vllm_positions()[1:]:
        positions.append(dict(sorted(position.items(), key=lambda item: item[1]["rank"])))
    return json.dumps({"prompt_logprobs": [None, *positions[1:] * 2]})


def sorted_keys():
    entries = {str(token): {"logprob": -1.0, "rank": rank} for token, rank in ((3, 4), (5, 2), (7, 1))}
    return json.dumps({"prompt_logprobs": [None, entries, entries]})


GENERATED = {"choices": [{"logprobs": {"content": [{"token": "a", "logprob": -1.0}]}}]}
BAD = {
    "empty.json": ("", "is empty"),
    "cut.json": (forms()["vllm-chat.json"][:300], r"line 1 is not JSON \(.*\), or the file is truncated"),
    "cut.jsonl": ('{"token": 1, "logprob": null}\n{"token": 2, "log', r"line 2 is not JSON"),
    "number.json": ("3", "expected JSON objects"),
    "list.json": ("[]", "holds no trace"),
    "other.json": ("{}", "has no prompt_logprobs and no echoed logprobs"),
    "generated.json": (json.dumps(GENERATED), "log-probs of generated tokens alone; ask .* prompt_logprobs"),
    "nan.jsonl": ('{"token": 1, "logprob": null}\n{"token": 2, "logprob": NaN}', "position 1: nan is no finite"),
    "null.jsonl": ('{"token": 1, "logprob": null}\n{"token": 2, "logprob": null}', "position 1: None is no finite"),
    "minus-inf.jsonl": ('{"token": 1, "logprob": null}\n{"token": 2, "logprob": -9999.0}', "position 1: -9999.0 is"),
    "positive.jsonl": ('{"token": 1, "logprob": null}\n{"token": 2, "logprob": 1.5}', "position 1: 1.5 is no finite"),
    "text.jsonl": ('{"token": 1, "logprob": null}\n{"token": 2, "logprob": "x"}', "a log-prob is not a number"),
    "one.jsonl": ('{"token": 1, "logprob": null}', "has 1 tokens; at least 2"),
    "old-order.json": (old_order(), "first entry is the likeliest token, so which is .* return_token_ids"),
    "sorted.json": (sorted_keys(), "entries are not in the order of their ranks, so which is"),
    "lacks.json": (
        json.dumps({"prompt_logprobs": [None, {"3": {"logprob": -1.0}}], "prompt_token_ids": [1, 2]}),
        "position 1: prompt_logprobs lacks its token 2",
    ),
    "hole.json": (json.dumps({"prompt_logprobs": [None, None]}), "position 1: prompt_logprobs has no entry"),
    "no-echo.json": (
        json.dumps({"choices": [{"logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0]}}]}),
        "do not start with a prompt .* ask for echo",
    ),
}  # fmt: skip


def refused(capsys, *arguments):
    assert cli.main(["trace", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("corekern trace: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("name", BAD)
def test_bad_files(tmp_path, capsys, name):
    text, message = BAD[name]
    path = tmp_path / name
    path.write_text(text)
    error = refused(capsys, path, path)
    assert str(path) in error
    assert re.search(message, error), error


@pytest.mark.parametrize("kept", [0, 40, 0.5, 0.95])
def test_truncated_npz(tmp_path, capsys, kept):
    data = write_npz(tmp_path / "whole.npz", made()).read_bytes()
    path = tmp_path / "cut.npz"
    path.write_bytes(data[: int(kept * len(data)) if 0 < kept < 1 else kept])
    assert "is damaged or truncated" in refused(capsys, path, path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"tokens": TOKENS}, "has no array 'log_probs', only tokens"),
        ({"tokens": TOKENS, "log_probs": [LOG_PROBS]}, "log_probs: shape (1, 11) is not (tokens,)"),
        ({"tokens": TOKENS, "log_probs": LOG_PROBS[:5]}, "log_probs: 5 values for 12 tokens"),
        (
            {"tokens": TOKENS, "log_probs": [*LOG_PROBS[:-1], np.nan]},
            "position 11: nan is no finite log-prob",
        ),
        ({"tokens": TOKENS, "log_probs": LOG_PROBS, "top1": np.array([{}] * 11)}, "is damaged or truncated"),
        ({"tokens": [], "log_probs": []}, "has 0 tokens"),
    ],
    ids=["no log-probs", "two axes", "another length", "NaN", "objects", "empty"],
)
def test_bad_npz(tmp_path, capsys, arrays, message):
    np.savez(tmp_path / "bad.npz", **arrays)
    assert message in refused(capsys, tmp_path / "bad.npz", tmp_path / "bad.npz")


def test_other_prompts_are_refused_with_the_first_differing_position(tmp_path, capsys):
    a = made(40)
    path = write_npz(tmp_path / "a.npz", a)
    changed = list(a.tokens)
    changed[17] = 999
    other = write_npz(tmp_path / "b.npz", Trace(tuple(changed), a.log_probs, a.top1, a.margins))
    message = f"B: differs from A at position 17: 999 is not {a.tokens[17]}"
    assert message in refused(capsys, path, other)
    assert message.replace("B:", "C:") in refused(capsys, path, path, "--noise", other)
    cut = Trace(a.tokens[:30], a.log_probs[:29], a.top1[:29], a.margins[:29])
    message = "B: differs from A at position 30: 30 tokens, not 41"
    assert message in refused(capsys, path, write_npz(tmp_path / "cut.npz", cut))


def test_missing_files_short_traces_and_bad_plots(tmp_path, capsys):
    path = write_npz(tmp_path / "a.npz", made())
    assert "missing.npz: No such file" in refused(capsys, path, tmp_path / "missing.npz")
    short = write_npz(tmp_path / "short.npz", made(9))
    assert "9 predicted positions; at least 10 are needed" in refused(capsys, short, short)
    refused(capsys, path, path, "--plot", tmp_path / "a.nonsense")


# The command


def test_command_prints_writes_json_and_draws(tmp_path, capsys):
    a = made(100)
    paths = [
        write_npz(tmp_path / f"{i}.npz", t)
        for i, t in enumerate((a, moved(a, -0.002 * np.arange(100)), moved(a, 0.01)))
    ]
    arguments = ["trace", *map(str, paths[:2]), "--noise", str(paths[2])]
    assert cli.main([*arguments, "--plot", str(tmp_path / "plot.png")]) == 0
    text = capsys.readouterr().out
    assert "drift: +2.0000 nats per 1,000 tokens" in text
    assert "the difference grows" in text
    assert "noise: mean 0.0100, largest 0.0100; B differs 9.9 times as much" in text
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["mean"] == pytest.approx(0.099)
    assert data["drift"]["slope"] == pytest.approx(0.002)
    assert data["noise"]["ratio"] == pytest.approx(9.9)
    assert data["flips"] == []
