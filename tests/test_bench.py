"""The benchmarks' own arithmetic, on problems of a second or less."""

import json

import numpy as np
import pytest

import corekern
from bench import common, dense, operator, tables


def small(name="dense/2xq2/L200/page16/h4-2"):
    return dense.make_problem(dense.parse(name), np, cold_bytes=0)


def test_the_oracle_is_the_reference():
    problem = small()
    arguments = problem.arguments()
    del arguments["max_query_len"]
    expected = corekern.reference.paged_attention(**arguments)
    np.testing.assert_allclose(dense.Oracle(problem, np).output, expected, rtol=1e-12, atol=1e-13)


def test_tables_rotate_over_copies_of_the_same_tokens():
    case = dense.parse("dense/q2/L200/page16/h2-1")
    problem = dense.make_problem(case, np, cold_bytes=3 * 2 * 208 * 256)
    assert len(problem.tables) == 3
    assert len({int(page) for table in problem.tables for page in table.reshape(-1)}) == 3 * 13
    outs = [corekern.paged_attention(**problem.arguments(i)) for i in range(3)]
    assert all((out == outs[0]).all() for out in outs)


def test_errors_are_told_apart():
    problem = small()
    oracle = dense.Oracle(problem, np)
    exact = oracle.output.astype(np.float16)
    state = corekern.PartialState(*oracle.state)
    found = oracle.errors(exact, state)
    assert found["rel_l2"] == found["floor"]
    assert found["over_floor"] == 1
    assert found["state_rel_l2"] == 0
    # E4M3 keeps 3 bits of a mantissa: a few percent, far above both.
    assert 0.01 < found["quantization_rel_l2"] < 0.1
    worse = oracle.errors((oracle.output * 1.01).astype(np.float16), None)
    assert worse["rel_l2"] == pytest.approx(0.01, rel=0.01)


def test_names():
    case = dense.parse("dense/64xq4/L8192/page1600/h24-2")
    assert (case.requests, case.rows, case.length, case.page, case.q_heads, case.kv_heads) == (
        64,
        4,
        8192,
        1600,
        24,
        2,
    )
    assert case.kv_bytes == 64 * 8192 * 2 * 2 * 256
    with pytest.raises(ValueError, match="not of the form"):
        dense.parse("dense/8/L8192")


def test_samples_alternate():
    order = []
    samplers = {name: lambda name=name: order.append(name) or 1.0 for name in "ab"}
    samples = dense.alternate(samplers, blocks=3, warm_up=1)
    assert "".join(order) == "ab" + "abba" * 3
    assert [len(s) for s in samples.values()] == [6, 6]


def test_operator_on_the_cpu(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    output, plot = tmp_path / "operator.json", tmp_path / "operator.png"
    name = "dense/q2/L200/page16"
    operator.main(
        ["--device", "cpu", "--cases", name, "--blocks", "2", "--warm-up", "1", "--output", str(output), "--plot", str(plot)]
    )  # fmt: skip
    assert f"{name}: cpu_fp32" in capsys.readouterr().out
    results = json.loads(output.read_text())
    (case,) = results["cases"]
    assert len(case["ours"]["samples_us"]) == 4
    assert case["error"]["over_floor"] <= 1.02
    assert {"card", "cpu", "packages", "source_hash", "command", "date"} <= set(results["env"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_readmes_tables_are_made_from_the_results():
    text = tables.README.read_text()
    assert tables.rewritten(text) == text


def test_results_name_no_place_of_the_machine(monkeypatch):
    places = ["--output", "/somewhere/a.json", "--path=/elsewhere", "--plot=/here.png"]
    monkeypatch.setattr("sys.argv", ["-m", "--blocks", "6", *places, "--warm-up", "1"])
    assert common.environment()["command"].endswith(" --blocks 6 --warm-up 1")
