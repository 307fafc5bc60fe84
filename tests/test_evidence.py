"""What a runtime prints at its exit, and `corekern routes`: both say what really ran and what would."""

import json

import numpy as np
import pytest

import corekern
from corekern import cli, evidence, logits, routing
from corekern.instruments.routes import routes
from corekern.routing import RouteRun


@pytest.fixture
def fresh(monkeypatch):
    """A process that has run nothing."""
    monkeypatch.setattr(routing, "_runs", type(routing._runs)())
    monkeypatch.setattr(logits, "_calls", type(logits._calls)())
    monkeypatch.delenv("COREKERN_FP32_LOGITS", raising=False)


def attend(backend, rows=3, page_size=16):
    device = "cpu" if backend.name == "cpu" else "cuda"
    cache = corekern.PagedKVCache.empty(2, page_size, 1, 64, dtype="fp8_e4m3", device=device)
    arrays = (
        np.zeros((rows, 2, 64), np.float16),
        np.int32([[0, 1]]),
        np.full(rows, 2, np.int32),
        np.int32([0, rows]),
    )
    q, table, lengths, starts = map(backend.asarray, arrays)
    corekern.paged_attention(q, cache, table, lengths, starts)


def test_summary_says_what_ran(fresh, backend):
    for _ in range(2):
        attend(backend)
    attend(backend, rows=1, page_size=5)
    head = backend.asarray(np.ones((4, 8), np.float16))
    corekern.dense_logits(head[:1], head)
    found = corekern.route_summary("fp8", model="qwen3.8-dflash2")
    by_kind = {(run.rows, run.page_size): (run, calls) for run, calls in found.runs}
    run, calls = by_kind[3, 16]
    assert (run.kv_dtype, run.q_dtype, calls) == ("fp8_e4m3", "float16", 2)
    assert run.state == "fp32 numerator/max/sum"
    assert by_kind[1, 5][1] == 1
    assert corekern.route_counts() == {run.route: 3}
    assert found.logit_calls == {"dense_logits": 1}
    assert str(found).splitlines() == [
        "corekern: KV dtype fp8 -> fp8_e4m3; logits fp32 (default of qwen3.8-dflash2); precision revision 4",
        f"  {run.route}: 2 calls (rows=3, page=16, kv=fp8_e4m3, q=float16, state=fp32 numerator/max/sum)",
        f"  {run.route}: 1 calls (rows=1, page=5, kv=fp8_e4m3, q=float16, state=fp32 numerator/max/sum)",
        "  dense_logits: 1 calls (fp32)",
    ]


def test_summary_warns_of_what_contradicts_the_settings(fresh, backend):
    assert "no attention call ran" in str(corekern.route_summary("fp8"))
    assert "FP32 logits are on, but none of corekern's ran" in str(corekern.route_summary(fp32_logits=True))
    attend(backend)
    found = corekern.route_summary("fp8_e5m2")
    assert found.other_kv_dtypes == ("fp8_e4m3",)
    assert "WARNING: fp8_e4m3 KV ran, not fp8_e5m2" in str(found)
    for kv_dtype, checkpoint in (("fp8", None), ("fp8_e4m3", "fp8_e5m2"), ("auto", None)):
        assert corekern.route_summary(kv_dtype, checkpoint=checkpoint).other_kv_dtypes == ()


def test_summary_reports_the_revision():
    assert evidence.route_summary().precision_revision == corekern.PRECISION_REVISION == 4


def test_runs_are_copies(fresh, backend):
    attend(backend)
    routing.route_runs().clear()
    ((run, calls),) = routing.route_runs().items()
    assert isinstance(run, RouteRun)
    assert calls == 1


# corekern routes


def test_routes_says_what_a_call_takes(monkeypatch):
    monkeypatch.setenv("COREKERN_FP32_LOGITS", "1")
    found = routes(rows=7, requests=2, kv_cache_dtype="fp8", checkpoint="fp8_e5m2")
    assert (found.taken, found.problem.kv_dtype) == ("cpu_fp32", "fp8_e5m2")
    assert found.problem.max_query_len == 4
    assert found.logits.fp32
    assert routes(kv_cache_dtype="auto", q_dtype="bfloat16").problem.kv_dtype == "bfloat16"
    assert set(found.reasons) == {route.name for route in routing.ROUTES}


def test_routes_command(capsys):
    assert cli.main(["routes", "--device", "cpu", "--rows", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cpu: 5 rows of 1 request, 6 query and 1 KV heads of 256, page 3296, float16 q"
    assert "  cpu_fp32             taken" in [line.rstrip() for line in lines]
    assert lines[-4:] == [
        "KV dtype: fp8 -> fp8_e4m3",
        "state: fp32 numerator/max/sum",
        "logits: model dtype (global default)",
        "precision revision: 4",
    ]
    assert cli.main(["routes", "--device", "cpu", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["taken"], data["problem"]["kv_dtype"], data["precision_revision"]) == (
        "cpu_fp32",
        "fp8_e4m3",
        4,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "rows: 0 is under 1"),
        (["--q-heads", "5", "--kv-heads", "2"], "q_heads: 5 is not a multiple of kv_heads 2"),
        (["--head-dim", "300"], "head_dim: 300 is over 256"),
        (["--kv-dtype", "int8"], "'int8'"),
        (["--q-dtype", "fp8"], "q_dtype"),
        (["--route", "warp"], "route: 'warp' is not one of cpu_fp32"),
        (["--route", "grouped_fp32"], "no route takes this"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_routes_arguments(capsys, arguments, message):
    assert cli.main(["routes", "--device", "cpu", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_gpu_that_is_not_there(capsys):
    from corekern import doctor

    if any(device.kind == "cuda" and device.usable for device in doctor.devices()):
        pytest.skip("there is a GPU")
    assert cli.main(["routes", "--device", "cuda"]) == 2
    assert "--device: CuPy is " in capsys.readouterr().err
