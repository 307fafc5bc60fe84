"""`corekern capacity`: hand-computed bytes of three layouts, the pages that were published, and bad input in one line."""

import json

import pytest

from corekern import cli
from corekern.instruments.capacity import fit, parse_bytes
from corekern.instruments.layouts import SHIPPED, load_layout

GIB = 2**30
FLASH, DENSE, SMALL = "qwen3.8-flash-next-like", "qwen3.8-27b-like", "smollm2-135m"


def test_smollm2_by_hand():
    # 30 layers x (K, V) x 3 heads x 64 = 11,520 elements a token; 2,050 tokens take 129 pages of 16.
    layout = load_layout(SMALL)
    found = fit(layout, "fp8_e4m3", memory=GIB, length=2050)
    assert found.token_bytes == {"K and V": 11_520.0, "index keys": 0.0}
    assert sum(found.request_bytes.values()) == 129 * 16 * 11_520
    assert found.tokens == GIB * 2050 // (129 * 16 * 11_520)
    assert found.ratio == 2
    assert fit(layout, "float32", memory=GIB, length=2050).ratio == 0.5


def test_27b_by_hand():
    # On each of 4 GPUs: 16 layers x (K, V) x 1 head x 256 = 8,192 a token in FP8. A state is 12 x 128 x 128 float32 and
    # (2 x 4 + 12) x 128 bfloat16 of 3 + 7 tokens = 837,632 bytes: 1,636 tokens of 512 bytes in one layer, so 1,648.
    found = fit(load_layout(DENSE), "fp8", memory=24 * GIB, length=131_072, ranks=4, speculative=7)
    state = 12 * 128 * 128 * 4 + 20 * 128 * 10 * 2
    assert found.page_tokens == 1648
    assert found.request_bytes["K and V"] == 131_072 * 8_192
    assert found.request_bytes["linear state"] == 48 * 8 * state
    assert found.request_bytes["unused ends of pages"] == (80 * 1648 - 131_072) * 8_192
    total = 80 * 1648 * 8_192 + 48 * 8 * state
    assert found.concurrency == 24 * GIB / total
    # bfloat16: pages of 832 tokens, 158 of them, of twice the bytes a token.
    assert found.ratio == (158 * 832 * 16_384 + 48 * 8 * state) / total


def test_flash_next_by_hand():
    # 12 layers x (K, V) x 2 heads x 256, and a key of 128 bfloat16 for every 4 tokens of a layer.
    found = fit(load_layout(FLASH), "fp8_e4m3", memory=24 * GIB, length=262_144, speculative=2)
    state = 24 * 128 * 128 * 4 + (2 * 8 + 24) * 128 * (3 + 2) * 2
    assert found.token_bytes == {"K and V": 12_288.0, "index keys": 768.0}
    rings = 12 * 8 * 128 * 2  # of 3 tokens of an open group and 3 rows of a step: two groups
    assert found.request_bytes["index keys"] == 262_144 * 768 + rings
    assert found.request_bytes["linear state"] == 36 * 3 * state
    keys = 262_144 * 768 + rings
    assert found.ratio_by_part["K and V"] == 2
    assert found.ratio_by_part["index keys"] == (262_144 * 24_576 + keys) / (262_144 * 12_288 + keys)
    assert found.ratio == found.ratio_by_part["unused ends of pages"]


@pytest.mark.parametrize(
    ("name", "kv_dtype", "ranks", "speculative", "tokens"),
    [
        (FLASH, "bfloat16", 1, 0, 784),
        (FLASH, "fp8_e4m3", 1, 0, 1568),
        (FLASH, "bfloat16", 1, 3, 800),
        (FLASH, "fp8_e4m3", 1, 3, 1600),
        (FLASH, "fp8_e4m3", 2, 0, 1568),  # heads are shared as the states are
        (FLASH, "fp8_e4m3", 4, 0, 784),  # 2 KV heads over 4 GPUs are repeated
        (DENSE, "fp8_e4m3", 4, 7, 1648),
        (DENSE, "fp8_e4m3", 4, 15, 1728),
        (SMALL, "fp8_e4m3", 1, 0, 16),
    ],
)
def test_pages(name, kv_dtype, ranks, speculative, tokens):
    """The page sizes that these models' deployments were published with."""
    assert load_layout(name).page_tokens(kv_dtype, ranks, speculative) == tokens


def test_more_states_are_less_gain():
    def ratio(states):
        layout = load_layout(FLASH)
        return fit(layout, "fp8", memory=GIB, length=262_144, speculative=2, states=states).ratio

    # Two published ratios lie where a request holds 11 and 18 states: the README says so.
    assert ratio(3) > ratio(11) > ratio(18)
    assert ratio(11) == pytest.approx(1.79, abs=0.005)
    assert ratio(18) == pytest.approx(1.72, abs=0.005)


def test_e5m2_takes_what_e4m3_takes():
    one, other = (fit(load_layout(FLASH), name, memory=GIB, length=8192) for name in ("fp8_e5m2", "fp8_e4m3"))
    assert one.request_bytes == other.request_bytes


# Files and arguments

OWN = {
    "name": "mine",
    "page_size": 32,
    "layers": [{"kind": "attention", "count": 2, "kv_heads": 1, "head_dim": 64}],
}


def test_own_description(tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(OWN))
    command = ["capacity", str(path), "--memory", "1MB", "--length", "33", "--json"]
    assert cli.main(command) == 0
    fits = json.loads(capsys.readouterr().out)["fits"]
    # 64 tokens in two pages, 2 x 2 x 64 elements each.
    assert [sum(f["request_bytes"].values()) for f in fits] == [64 * 256 * 2, 64 * 256]
    toml = tmp_path / "mine.toml"
    toml.write_text(
        'name = "mine"\npage_size = 32\n[[layers]]\nkind = "attention"\ncount = 2\nkv_heads = 1\nhead_dim = 64\n'
    )
    pytest.importorskip("tomllib", reason="Python 3.10 has none")
    assert load_layout(toml) == load_layout(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": []}, "layers: a list"),
        ({"layers": [{"kind": "mamba"}]}, "layers[0]: kind: 'mamba'"),
        ({"layers": [{"kind": "attention", "count": 2, "kv_heads": 1}]}, "layers[0]: head_dim is missing"),
        ({"layers": [OWN["layers"][0] | {"heads": 3}]}, "'heads' is not a field of attention"),
        ({"layers": [OWN["layers"][0] | {"count": -1}]}, "count: -1"),
        ({"layers": [OWN["layers"][0] | {"kv_heads": 1.5}]}, "kv_heads: 1.5"),
        ({"page_size": 0}, "page_size: 0"),
        ({"page_size": "linear_state"}, "needs a linear layer"),
        ({"pages": 1}, "'pages' is not a field"),
    ],
)
def test_bad_descriptions(tmp_path, capsys, change, words):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(OWN | change))
    assert cli.main(["capacity", str(path), "--memory", "1GiB"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert str(path) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing", "--memory", "1GiB"], "neither a .json or .toml file nor one of"),
        (["none.json", "--memory", "1GiB"], "none.json"),
        ([SMALL, "--memory=-3GiB"], "--memory: '-3GiB'"),
        ([SMALL, "--memory", "0"], "--memory: '0'"),
        ([SMALL, "--memory", "many"], "--memory: 'many'"),
        ([SMALL, "--memory", "1GiB", "--length", "0"], "length: 0"),
        ([SMALL, "--memory", "1GiB", "--speculative", "-1"], "speculative: -1"),
        ([SMALL, "--memory", "1GiB", "--tensor-parallel", "0"], "ranks: 0"),
        ([SMALL, "--memory", "1GiB", "--tensor-parallel", "2"], "3 KV heads"),
        ([DENSE, "--memory", "1GiB", "--tensor-parallel", "32"], "32"),
        ([SMALL, "--memory", "1GiB", "--kv-dtype", "int4"], "kv_dtype: 'int4'"),
        ([FLASH, "--memory", "1GiB", "--states", "0"], "states: 0"),
    ],
)
def test_bad_arguments(capsys, arguments, words):
    assert cli.main(["capacity", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_truncated_description(tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(OWN)[:40])
    assert cli.main(["capacity", str(path), "--memory", "1GiB"]) == 2
    assert str(path) in capsys.readouterr().err


def test_units():
    assert [parse_bytes(text) for text in ("1", "1KB", "1KiB", "1.5 GiB", "2T")] == [
        1,
        1000,
        1024,
        3 * 2**29,
        2 * 10**12,
    ]


def test_plot_and_table(tmp_path, capsys):
    picture = tmp_path / "capacity.png"
    command = [
        "capacity",
        FLASH,
        "--memory",
        "24GiB",
        "--kv-dtype",
        "fp8",
        "fp8_e5m2",
        "--plot",
        str(picture),
    ]
    assert cli.main(command) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "bytes a token: index keys" in capsys.readouterr().out
    assert all(load_layout(name).sources for name in SHIPPED)
