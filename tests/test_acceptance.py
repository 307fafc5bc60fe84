"""`corekern acceptance`: real exposition text, intervals against scipy and simulation, and bad input in one line."""

import json
import math

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from scipy import stats

from corekern import cli
from corekern.instruments import acceptance, counters, intervals
from corekern.instruments.counters import Counts, Run

WIDTH = 4


class Server:
    """A server's metrics, declared and counted as vLLM does."""

    def __init__(self, engines=(0,), model="m", created=True, positions=True):
        self.registry, self.engines, self.model = CollectorRegistry(), engines, model
        names = ("model_name", "engine")
        self.counters = {
            name: Counter(f"vllm:spec_decode_num_{name}", "x", names, registry=self.registry)
            for name in counters.COUNTERS
        }
        self.positions = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "x", (*names, "position"), registry=self.registry
        )
        Counter("vllm:prompt_tokens", "x", names, registry=self.registry).labels(model, "0").inc(123)
        self.created, self.with_positions = created, positions
        for engine in engines:
            for counter in self.counters.values():
                counter.labels(model, str(engine))
            for i in range(WIDTH) if positions else ():
                self.positions.labels(model, str(engine), str(i))

    def run(self, accepted_lengths, engine=0):
        for accepted in accepted_lengths:
            for name, by in (("drafts", 1), ("draft_tokens", WIDTH), ("accepted_tokens", accepted)):
                self.counters[name].labels(self.model, str(engine)).inc(by)
            for i in range(accepted) if self.with_positions else ():
                self.positions.labels(self.model, str(engine), str(i)).inc()

    def write(self, path):
        text = generate_latest(self.registry).decode()
        if not self.created:  # several processes write none
            text = "\n".join(line for line in text.splitlines() if "_created" not in line) + "\n"
        path.write_text(text)
        return path


def write_requests(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(request, drafts, draft_tokens, accepted, positions=None):
    more = {} if positions is None else {"accepted_tokens_per_pos": positions}
    return {
        "request_id": request, "drafts": drafts, "draft_tokens": draft_tokens, "accepted_tokens": accepted, **more,
    }  # fmt: skip


def requests(seed, count=30, p=0.7):
    """Requests that differ: each has its own chance of acceptance."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        chance, drafts = np.clip(rng.normal(p, 0.15), 0.05, 0.98), int(rng.integers(5, 40))
        lengths = np.minimum(rng.geometric(1 - chance, drafts) - 1, WIDTH)
        positions = [int((lengths > i).sum()) for i in range(WIDTH)]
        rows.append(row(f"r{i}", drafts, WIDTH * drafts, int(lengths.sum()), positions))
    return rows


# Statistics


@pytest.mark.parametrize(("hits", "trials"), [(0, 5), (1, 5), (5, 5), (30, 100), (9990, 10000)])
def test_wilson_is_scipys(hits, trials):
    expected = stats.binomtest(hits, trials).proportion_ci(method="wilson")
    found = intervals.wilson(hits, trials)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_difference_is_newcombes():
    # Newcombe (1998), table II, example a: 56/70 against 48/80; method 10 gives 0.0524 to 0.3339.
    one, other = intervals.wilson(56, 70), intervals.wilson(48, 80)
    found = intervals.difference(56 / 70, one, 48 / 80, other)
    assert (found.low, found.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_bootstrap_is_scipys():
    rows = requests(3)
    accepted = np.array([r["accepted_tokens"] for r in rows], float)
    drafted = np.array([r["draft_tokens"] for r in rows], float)
    expected = stats.bootstrap(
        (accepted, drafted), lambda a, d, axis=-1: a.sum(axis) / d.sum(axis), paired=True, vectorized=True,
        method="percentile", n_resamples=10_000, rng=np.random.default_rng(1),
    ).confidence_interval  # fmt: skip
    found = intervals.bootstrap_ratio(accepted, drafted)
    # Two bootstraps of 10,000 draws: each bound is known to about 1.4 % of the interval's width; four times that.
    width = expected.high - expected.low
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.06 * width)
    assert found == intervals.bootstrap_ratio(accepted, drafted)


def test_intervals_over_requests_hold_what_token_counts_miss():
    """Requests that differ widely: tokens taken as independent claim far too much."""
    held = {"requests": 0, "tokens": 0}
    trials, truth = 200, 0.6
    rng = np.random.default_rng(5)
    for _ in range(trials):
        chances = rng.beta(2 * truth, 2 * (1 - truth), 40)
        accepted = rng.binomial(100, chances)
        counts = tuple(Counts(100, int(a)) for a in accepted)
        total = Counts(4000, int(accepted.sum()))
        held["requests"] += not acceptance.measure(Run(total, counts)).rate.interval.excludes(truth)
        held["tokens"] += not acceptance.measure(Run(total, None)).rate.interval.excludes(truth)
    assert held["requests"] / trials > 0.88  # 95 %, less what a bootstrap of 40 gives away
    assert held["tokens"] / trials < 0.5


def test_length_interval_from_positions_is_that_of_the_lengths():
    lengths = np.random.default_rng(6).integers(0, WIDTH + 1, 500)
    positions = tuple(int((lengths > i).sum()) for i in range(WIDTH))
    found = acceptance.measure(Run(Counts(WIDTH * 500, int(lengths.sum()), 500, positions), None))
    reach = stats.norm.ppf(0.975) * lengths.std() / math.sqrt(500)
    assert found.length.value == pytest.approx(1 + lengths.mean())
    assert found.length.interval.high - found.length.value == pytest.approx(reach)
    assert found.rate.value == pytest.approx(lengths.mean() / WIDTH)
    assert found.rate.interval.high - found.rate.value == pytest.approx(reach / WIDTH)
    expected = [stats.binomtest(n, 500).proportion_ci(method="wilson") for n in positions]
    assert [p.interval.low for p in found.per_position] == pytest.approx([e.low for e in expected])


# Snapshots


def test_counts_between_two_snapshots(tmp_path):
    server = Server(engines=(0, 1))
    server.run([4, 4, 4, 0])  # before: counts for nothing
    before = server.write(tmp_path / "before.prom")
    server.run([1, 2, 0, 4], engine=0)
    server.run([3, 3], engine=1)
    found = counters.read_run([before, server.write(tmp_path / "after.prom")])
    assert found.total == Counts(24, 13, 6, (5, 4, 3, 1))
    assert found.requests is None
    one = counters.read_run([before, tmp_path / "after.prom"], {"engine": "1"})
    assert one.total == Counts(8, 6, 2, (2, 2, 2, 0))


def test_series_that_come_later_count_from_0(tmp_path):
    server = Server()
    before = server.write(tmp_path / "before.prom")
    server.run([2], engine=7)
    found = counters.read_run([before, server.write(tmp_path / "after.prom")])
    assert (found.total.draft_tokens, found.total.accepted_tokens) == (4, 2)
    assert "series are new" in found.notes[0]


def test_without_drafts_or_positions(tmp_path):
    # Old servers count tokens alone.
    for name, accepted in (("before", 10), ("after", 40)):
        (tmp_path / f"{name}.prom").write_text(
            "# TYPE vllm:spec_decode_num_accepted_tokens_total counter\n"
            f'vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {accepted}.0\n'
            "# TYPE vllm:spec_decode_num_draft_tokens_total counter\n"
            f'vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {accepted * 2}.0\n'
        )
    found = acceptance.measure(counters.read_run([tmp_path / "before.prom", tmp_path / "after.prom"]))
    assert (found.rate.value, found.length, found.per_position) == (0.5, None, None)
    assert found.method.startswith("Wilson")


def test_a_missing_position_label_is_left_out_with_a_note(tmp_path):
    server = Server(positions=False, created=False)
    before = server.write(tmp_path / "before.prom")
    server.run([3, 1])
    after = server.write(tmp_path / "after.prom")
    line = '\nvllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m"} '
    for path, value in ((before, 0), (after, 4)):
        path.write_text(
            path.read_text()
            + f"# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter{line}{value}\n"
        )
    found = counters.read_run([before, after])
    assert found.total == Counts(8, 4, 2, None)
    assert "lacks the label 'position'" in found.notes[0]


def test_positions_that_disagree_are_left_out_with_a_note(tmp_path):
    server = Server()
    before = server.write(tmp_path / "before.prom")
    server.run([3, 1])
    server.positions.labels("m", "0", "0").inc()
    found = counters.read_run([before, server.write(tmp_path / "after.prom")])
    assert found.total.per_position is None
    assert "does not agree" in found.notes[0]


# Requests


def test_one_file_of_requests(tmp_path):
    path = write_requests(
        tmp_path / "r.jsonl", [row("a", 2, 8, 5, [2, 2, 1, 0]), row("b", 1, 3, 0), row("c", 0, 0, 0)]
    )
    found = counters.read_run([path])
    assert found.total == Counts(11, 5, 3, None)  # b does not say which positions
    assert len(found.requests) == 2
    assert found.notes == ("1 of 3 requests drafted nothing",)


def test_growing_counts_of_requests(tmp_path):
    before = write_requests(
        tmp_path / "b.jsonl", [row("a", 2, 8, 5, [2, 2, 1]), row("done", 1, 4, 4, [1, 1, 1, 1])]
    )
    after = write_requests(
        tmp_path / "a.jsonl",
        [row("a", 5, 20, 11, [5, 4, 1, 1]), row("done", 1, 4, 4, [1, 1, 1, 1]), row("new", 1, 4, 1, [1, 0, 0, 0])],
    )  # fmt: skip
    found = counters.read_run([before, after])
    assert found.requests == (Counts(12, 6, 3, (3, 2, 0, 1)), Counts(4, 1, 1, (1, 0, 0, 0)))
    assert found.total == Counts(16, 7, 4, (4, 2, 0, 1))


# Bad input: one line, exit 2


def refused(capsys, *arguments):
    assert cli.main(["acceptance", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("corekern acceptance: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("created", [True, False])
def test_reset_counters(tmp_path, capsys, created):
    server = Server(created=created)
    server.run([4] * 9)
    before = server.write(tmp_path / "before.prom")
    again = Server(created=created)
    again.run(
        [4] * (20 if created else 3)
    )  # a creation time tells even where counts have grown past the old ones
    error = refused(capsys, before, again.write(tmp_path / "after.prom"))
    assert "of engine=0, model_name=m was reset" in error
    assert "take both snapshots after its start" in error


def test_an_engine_that_is_gone_and_one_that_was_never_there(tmp_path, capsys):
    two, one = Server(engines=(0, 1), created=False), Server(created=False)
    paths = [two.write(tmp_path / "two.prom"), one.write(tmp_path / "one.prom")]
    assert "one.prom: lacks spec_decode_num_drafts of engine=1, model_name=m, which" in refused(
        capsys, *paths
    )
    error = refused(capsys, paths[0], paths[0], "--label", "engine=5")
    assert "no series has engine=5; there are engine: 0, 1; model_name: m" in error


def test_two_models_take_a_choice(tmp_path, capsys):
    path = tmp_path / "two.prom"
    texts = [Server(model=name, created=False).write(tmp_path / f"{name}.prom").read_text() for name in "ab"]
    samples = [line for line in texts[1].splitlines() if not line.startswith("#")]
    path.write_text(texts[0] + "\n".join(samples) + "\n")
    assert "has 2 models; choose one with --label model_name=NAME" in refused(capsys, path, path)
    assert "no token was drafted in between" in refused(capsys, path, path, "--label", "model_name=a")


AVERAGE_JSON = {"request_id": 1, "acceptance_rate": 0.7}


@pytest.mark.parametrize(
    "text",
    [
        "# TYPE vllm:spec_decode_draft_acceptance_rate gauge\nvllm:spec_decode_draft_acceptance_rate 0.7\n",
        "# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length 2.5\n",
        "INFO SpecDecoding metrics: Mean acceptance length: 2.71, Avg Draft acceptance rate: 56.9%\n",
        json.dumps(AVERAGE_JSON),
    ],
    ids=["vLLM gauge", "SGLang gauge", "log line", "JSON line"],
)
def test_a_rolling_average_alone_is_refused_with_the_reason(tmp_path, capsys, text):
    path = tmp_path / "average"
    path.write_text(text)
    error = refused(capsys, *([path] if text.startswith("{") else [path, path]))
    assert "a rolling average" in error
    assert "cannot be taken apart into requests" in error


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "is empty"),
        ('{"request_id": 1, "draft_to', "line 1 is not JSON"),
        ("[1]\n", "is no Prometheus text|has no counter"),
        ('{"draft_tokens": 4}', "line 1 lacks 'accepted_tokens'"),
        ('{"draft_tokens": 4, "accepted_tokens": 5}', "5 tokens accepted of 4 drafted"),
        ('{"draft_tokens": -4, "accepted_tokens": 0}', "draft_tokens is -4, not a count"),
        ('{"draft_tokens": 4, "accepted_tokens": NaN}', "accepted_tokens is nan, not a count"),
        ('{"draft_tokens": 4.5, "accepted_tokens": 1}', "draft_tokens is 4.5, not a count"),
        ('{"draft_tokens": 4, "accepted_tokens": 1, "drafts": 9}', "9 drafts with 4 tokens in all"),
        ('{"draft_tokens": 4, "accepted_tokens": 2, "accepted_tokens_per_pos": [0, 2]}', "does not agree"),
        ('{"draft_tokens": 0, "accepted_tokens": 0}', "no token was drafted"),
    ],
)
def test_bad_request_files(tmp_path, capsys, line, message):
    path = tmp_path / "r.jsonl"
    path.write_text(line)
    error = refused(capsys, *([path, path] if line.startswith("[") else [path]))
    assert any(part in error for part in message.split("|")), error


def test_bad_arguments(tmp_path, capsys):
    path = write_requests(tmp_path / "r.jsonl", requests(0))
    snapshot = Server().write(tmp_path / "s.prom")
    assert "one file is JSON lines and the other is not" in refused(capsys, path, snapshot)
    assert "one snapshot counts from the server's start" in refused(capsys, snapshot)
    assert "3 files given" in refused(capsys, path, path, path)
    assert "'engine' is not NAME=VALUE" in refused(capsys, snapshot, snapshot, "--label", "engine")
    assert "request 'a' is there twice" in refused(
        capsys, write_requests(tmp_path / "t", [row("a", 1, 4, 1)] * 2)
    )
    few = write_requests(tmp_path / "few.jsonl", [row("a", 1, 4, 1)])
    assert "by position is not known" in refused(capsys, few, "--plot", tmp_path / "p.png")


def test_a_gauge_beside_counters_does_no_harm(tmp_path):
    server = Server()
    Gauge("vllm:spec_decode_draft_acceptance_rate", "x", registry=server.registry).set(0.9)
    before = server.write(tmp_path / "before.prom")
    server.run([2, 2])
    assert counters.read_run([before, server.write(tmp_path / "after.prom")]).total.accepted_tokens == 4


# The command


def test_two_configurations_side_by_side(tmp_path, capsys):
    better = write_requests(tmp_path / "better.jsonl", requests(1, 80, 0.8))
    worse = write_requests(tmp_path / "worse.jsonl", requests(2, 80, 0.5))
    arguments = ["acceptance", str(better), "--baseline", str(worse)]
    assert cli.main([*arguments, "--plot", str(tmp_path / "p.svg")]) == 0
    text = capsys.readouterr().out
    assert "bootstrap over 80 requests" in text
    assert "rates differ: 95 % of the difference excludes 0" in text
    assert "position 3" in text
    assert b"<svg" in (tmp_path / "p.svg").read_bytes()
    assert cli.main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    totals = {name: counters.read_run([path]).total for name, path in (("run", better), ("baseline", worse))}
    rates = {name: t.accepted_tokens / t.draft_tokens for name, t in totals.items()}
    assert data["run"]["rate"]["value"] == pytest.approx(rates["run"])
    assert data["run"]["length"]["value"] == pytest.approx(
        1 + totals["run"].accepted_tokens / totals["run"].drafts
    )
    assert data["difference"]["rate"]["value"] == pytest.approx(rates["run"] - rates["baseline"])
    assert data["difference"]["rate"]["interval"]["low"] > 0


def test_a_configuration_does_not_differ_from_itself(tmp_path, capsys):
    path = write_requests(tmp_path / "r.jsonl", requests(4))
    assert cli.main(["acceptance", str(path), "--baseline", str(path)]) == 0
    assert "rates are not shown to differ" in capsys.readouterr().out
