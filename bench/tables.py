"""Writes the README's tables from the results files, so that no number in it is typed by hand.

    python -m bench.tables            # rewrite README.md
    python -m bench.tables --check    # exit 1 if it would change

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function below.
"""

from __future__ import annotations

import argparse
import json
import re
import sys

from bench import dense
from bench.common import RESULTS, ROOT

README = ROOT / "README.md"


def codec_cpu() -> str:
    results = _load("codec-cpu")
    rows = [
        [
            case["name"].removeprefix("codec/").replace("/", " "),
            f"{case['ours_gelements_per_s']:.2f}",
            *(_ratio(case, peer) for peer in ("ml_dtypes", "numpy_table", "torch")),
        ]
        for case in results["cases"]
    ]
    header = ["", "G elements/s", "ml_dtypes takes", "NumPy table takes", "torch takes"]
    return _table(header, rows, results)


def cpu_attention() -> str:
    results = _load("cpu_attention-cpu")
    rows = [
        [
            f"{int(case['name'].split('/L')[1].split('/')[0]):,}",
            f"{case['ours']['median_us'] / 1e3:.1f} ms",
            *(
                _ratio(case, peer)
                for peer in ("numpy_dequantize_blas", "torch_dequantize_sdpa", "torch_sdpa_on_float32")
            ),
            f"{case['memory_growth_MiB']:.0f} MiB",
            f"{case['error']['rel_l2'] / case['error']['floor']:.4f}",
        ]
        for case in results["cases"]
    ]
    header = [
        "tokens",
        "corekern",
        "NumPy: decode + BLAS takes",
        "torch: decode + SDPA takes",
        "torch: SDPA on float32 KV takes",
        "memory",
        "error / rounding floor",
    ]
    return _table(header, rows, results)


def codec_cuda() -> str:
    results = _load("codec-h200")
    rows = [
        [
            case["name"].removeprefix("codec/").replace("/", " "),
            f"{case['bytes'] / 2**20:,.0f} MiB",
            f"{case['GBps']:,.0f} GB/s",
            f"{100 * case['of_copy']:.0f} %",
            _ratio(case, "torch"),
        ]
        for case in results["cases"]
    ]
    return _table(["", "moved", "bandwidth", "of a copy's", "torch takes"], rows, results)


def dense_peers() -> str:
    results = _load("peers-h200")
    rows = []
    for case in results["cases"]:
        vllm = [found for who, found in case["peers"].items() if who.startswith("vllm")]
        fastest = min(vllm, key=lambda found: found["median_us"])
        rows.append(
            [
                _shape(case["name"]),
                f"{case['ours']['median_us']:.1f} us",
                f"{fastest['median_us'] / case['ours']['median_us']:.1f}x",
                f"{case['limit_us']:.1f} us",
                f"{case['error']['over_floor']:.4f}",
                f"{fastest['error']['over_floor']:.2f}",
            ]
        )
    header = [
        "",
        "corekern",
        "vLLM's Triton kernel takes",
        "reading the cache once",
        "error / rounding floor",
        "vLLM's",
    ]
    return _table(header, rows, results)


def operator() -> str:
    results = _load("operator-h200")
    rows = []
    for case in results["cases"]:
        legacy = case["peers"]["grouped_fp16_legacy"]
        ours = case["ours"]["median_us"]
        rows.append(
            [
                _shape(case["name"]),
                f"{ours:.1f} us",
                f"{100 * (ours / legacy['median_us'] - 1):+.1f} %",
                f"{case['error']['over_floor']:.4f}",
                f"{legacy['error']['over_floor']:.2f}",
                f"{case['error']['state_rel_l2']:.1e}",
                f"{case['error']['quantization_rel_l2']:.1e}",
            ]
        )
    header = [
        "",
        "`grouped_fp32`",
        "over `grouped_fp16_legacy`",
        "error / rounding floor",
        "legacy's",
        "state's error",
        "quantization's",
    ]
    return _table(header, rows, results)


def _shape(name: str) -> str:
    case = dense.parse(name)
    requests = f"{case.requests} requests of " if case.requests > 1 else ""
    return f"{requests}{case.rows} rows, {case.length:,} tokens, {case.q_heads}/{case.kv_heads} heads, page {case.page}"


def demo() -> str:
    found = json.loads((RESULTS / "demo-cpu.json").read_text())["scores"]
    rows = []
    for name, score in found["formats"].items():
        if name == found["reference"]:
            differences = ["-", "-", "-", "-"]
        else:
            deciles = score["mean_abs_difference_by_decile"]
            differences = [
                f"{score['mean_abs_difference']:.4f}",
                f"{deciles[0]:.4f}",
                f"{deciles[-1]:.4f}",
                f"{100 * score['top1_agreement']:.1f} %",
            ]
        rows.append([name, f"{score['bytes_per_token']:,}", *differences, f"{score['perplexity']:.3f}"])
    header = [
        "KV format",
        "bytes a token",
        "mean log-prob difference",
        "first tenth",
        "last tenth",
        "same top-1",
        "perplexity",
    ]
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    note = (
        f"{found['scored_tokens']} tokens of a passage, differences in nats from float32 KV; `corekern demo`."
    )
    return "\n".join([*lines, "", note])


def logits_cpu() -> str:
    results = _load("logits-cpu")
    rows = [
        [
            case["name"].removeprefix("logits/").replace("/r", ", rows "),
            f"{case['ours']['median_us'] / 1e3:.1f} ms",
            f"{case['error']['rel_l2']:.1e}",
            f"{case['error']['float16_rel_l2']:.1e}",
            f"{case['error']['times_nearer']:.0f}x",
        ]
        for case in results["cases"]
    ]
    return _table(["62,080 x 5,120 head", "time", "rel-L2", "of float16 results", "nearer"], rows, results)


TABLES = {
    f.__name__: f for f in (codec_cpu, cpu_attention, codec_cuda, dense_peers, operator, demo, logits_cpu)
}


def _load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text()) | {"file": f"bench/results/{name}.json"}


def _ratio(case: dict, peer: str) -> str:
    if peer not in case["peers"]:
        return "-"
    return f"{case['peers'][peer]['median_us'] / case['ours']['median_us']:.1f}x"


def _table(header: list[str], rows: list[list[str]], results: dict) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    env = results["env"]
    where = env["cpu"] if env["card"] == "cpu" else env["card"]
    lines += ["", f"Medians on {where}, {env['date'][:10]}; `{env['command']}`, `{results['file']}`."]
    return "\n".join(lines)


def rewritten(text: str) -> str:
    """The README with every table made again."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: match[1] + TABLES[match[2]]() + "\n" + match[3],
        text,
        flags=re.DOTALL,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    old = README.read_text()
    new = rewritten(old)
    if not options.check:
        README.write_text(new)
    return int(options.check and new != old)


if __name__ == "__main__":
    sys.exit(main())
