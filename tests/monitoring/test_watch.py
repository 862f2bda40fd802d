"""From logs and ledger to a decision, through a real exporter and a real Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from monitoring.exporter import STALE_S, Exporter
from monitoring.prometheus import Prometheus, Sample
from monitoring.thresholds import Verdict, evaluate
from monitoring.watch import watch
from perennial.errors import Permanent, Retryable
from perennial.ledger import Ledger
from perennial.local.postgres import database_url
from perennial.settings import Settings
from perennial.spec import ModelSpec
from perennial.states import State
from perennial.store import Store, publishing
from tests.support.monitoring import (
    Row,
    crown,
    prometheus_binary,
    prometheus_of,
    write_labels,
    write_log,
)
from tests.support.traffic import add_model, eventually, make_settings, metric, python_module

__all__ = ["prometheus_binary"]

MORE = """\
thresholds:
  - {name: quality, metric: log_loss, worse_than_promotion: 0.05, window: 1h, min_count: 100,
     action: retrain}
  - {name: coverage, metric: label_coverage, below: 0.5, window: 1h, min_count: 100}
  - {name: errors, metric: error_rate, above: 0.1, window: 5m}
retrain: {cooldown: 1h, max_per_week: 3, min_new_labels: 150}
"""
AGE = timedelta(seconds=30)


class World:
    """One installation with exporter and Prometheus, a champion of log loss 0.4."""

    def __init__(self, settings: Settings, spec: ModelSpec, ledger: Ledger) -> None:
        self.settings, self.spec, self.ledger = settings, spec, ledger
        self.store = Store(settings.store)
        self.prometheus = Prometheus.of(settings)
        long_ago = datetime.now(UTC) - timedelta(hours=2)
        self.version = crown(ledger, spec, {"log_loss": 0.4, "auc": None}, now=long_ago)
        self._written = 0

    def traffic(self, rows: int, score: float, *, labelled: bool = True) -> None:
        """Rows whose label is 1: their log loss is -log(score)."""
        ids = range(self._written, self._written + rows)
        self._written += rows
        label = 1.0 if labelled else None
        found = [Row(f"r{n}", score, label, AGE, version=self.version) for n in ids]
        write_log(self.spec, self.store, found, datetime.now(UTC))

    def state(self, name: str) -> Verdict:
        return {s.name: s.state for s in evaluate(self.spec, self.prometheus)}[name]

    def comes_to(self, name: str, verdict: Verdict) -> None:
        eventually(lambda: self.state(name) is verdict, f"{name} is {verdict}", 60, 0.2)

    def watch(self) -> str:
        return watch(self.settings, self.spec, self.ledger, actor="tests").summary


@pytest.fixture
def world(tmp_path: Path, ledger: Ledger, prometheus_binary: Path) -> Iterator[World]:
    settings = make_settings(tmp_path, scrape_interval_s=1, watch_interval_s=5)
    spec = add_model(settings, label_horizon="10s", more=MORE)
    with ExitStack() as stack:
        built = World(settings, spec, ledger)
        stack.enter_context(exporting(settings, spec, ledger))
        stack.enter_context(prometheus_of(prometheus_binary, settings, {spec.name: spec}))
        yield built


@contextmanager
def exporting(settings: Settings, spec: ModelSpec, ledger: Ledger) -> Iterator[None]:
    """The exporter on this test's own ledger; its process is tested below."""
    registry, stop = CollectorRegistry(), threading.Event()
    exporter = Exporter({spec.name: spec}, Store(settings.store), registry)

    def refresh() -> None:
        while not stop.wait(0.3):
            exporter.refresh(ledger, datetime.now(UTC))

    thread = threading.Thread(target=refresh)
    server, serving = start_http_server(settings.exporter_port, "127.0.0.1", registry)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        server.shutdown()
        server.server_close()
        serving.join()


def test_a_model_that_got_worse_is_retrained_once(world: World) -> None:
    """No data, too few rows, ok, breached, an episode, and then a no with its reasons."""
    assert world.state("quality") is Verdict.NO_DATA
    assert "nothing asks" in world.watch()

    world.traffic(50, 0.3)
    world.comes_to("coverage", Verdict.NO_DATA)
    eventually(lambda: "50 of at least 100" in world.watch(), "the count is said", 60, 0.2)

    world.traffic(80, 0.99)
    world.comes_to("quality", Verdict.BREACHED)  # a third of it is bad: 0.47 > 0.45
    refused = world.watch()
    assert "labels: 130 new matured labels, 150 are needed" in refused
    assert [t.fired for t in world.ledger.triggers("trips")] == [False]
    world.watch()
    assert len(world.ledger.triggers("trips")) == 1

    world.traffic(100, 0.4)
    eventually(
        lambda: watch(world.settings, world.spec, world.ledger, actor="tests").episode_id,
        "an episode is opened",
        60,
        0.2,
    )
    episode = world.ledger.open_episode_of("trips")
    assert episode is not None
    assert episode.trigger["thresholds"] == ["quality"]
    assert episode.trigger["reasons"][0].startswith("quality: log_loss 0.")
    again = world.watch()
    assert again.startswith("no retrain") or episode.id in again
    assert world.ledger.open_episode_of("trips").id == episode.id  # type: ignore[union-attr]

    world.ledger.transition(episode, State.ABORTED, actor="tests", evidence={})
    eventually(lambda: "hysteresis" in world.watch(), "the answered breach waits")


def test_good_answers_are_ok_and_unlabelled_ones_show_in_the_coverage(world: World) -> None:
    world.traffic(200, 0.7)
    world.comes_to("quality", Verdict.OK)
    world.comes_to("coverage", Verdict.OK)
    world.traffic(400, 0.7, labelled=False)
    world.comes_to("coverage", Verdict.BREACHED)
    assert world.state("errors") is Verdict.NO_DATA
    assert "nothing asks" in world.watch()


def test_labels_the_champion_has_learnt_from_are_not_new(world: World) -> None:
    world.traffic(300, 0.4)
    world.comes_to("quality", Verdict.BREACHED)
    champion = world.ledger.champion("trips")
    assert champion is not None
    target = world.store.run("trips", champion.episode_id) / "collected"
    last = datetime.now(UTC) - timedelta(seconds=1)
    with publishing(target, kind="collected", model="trips", id="x") as (folder, facts):
        (folder / "rows").write_text("")
        facts["last"] = last.isoformat()
    assert "labels: 0 new matured labels" in world.watch()


def test_without_prometheus_there_is_no_data_and_no_retrain(tmp_path: Path, ledger: Ledger) -> None:
    settings = make_settings(tmp_path)
    spec = add_model(settings, more=MORE)
    states = evaluate(spec, Prometheus.of(settings))
    assert {state.state for state in states} == {Verdict.NO_DATA}
    assert "did not answer" in states[0].reason
    found = watch(settings, spec, ledger, actor="tests")
    assert found.episode_id is None
    assert ledger.episodes("trips") == []


def test_the_exporters_process(
    tmp_path: Path, ledger: Ledger, ledger_url: str, postgres: Settings
) -> None:
    del ledger_url
    settings = make_settings(
        tmp_path, database_url=database_url(postgres, "perennial"), scrape_interval_s=1
    )
    spec = add_model(settings, "exported", label_horizon="10s", more=MORE)
    shared = Ledger(settings.database_url)
    try:
        version = crown(shared, spec, {"log_loss": 0.4})
    finally:
        shared.close()
    write_log(
        spec,
        Store(settings.store),
        [Row(f"r{n}", 0.5, 1.0, AGE, version=version) for n in range(10)],
        datetime.now(UTC),
    )
    # A correction, after the label horizon.
    write_labels(spec, Store(settings.store), [("r0", 0.0, datetime.now(UTC))])
    with python_module(settings, "monitoring.exporter") as process:
        own = {"model": "exported", "version": str(version)}

        def get(name: str, **labels: str) -> float | None:
            return metric(settings.exporter_port, name, **labels)

        eventually(lambda: get("perennial_model_info", **own) == 1, "it measures", 60, 0.2)
        assert get("perennial_baseline", model="exported", metric="log_loss") == 0.4
        assert get("perennial_quality_labelled_rows", threshold="quality", **own) == 10
        for counted in ("late", "conflicting", "repeated"):
            assert get(f"perennial_labels_{counted}", model="exported", threshold="quality") == 1
        assert get("perennial_quality", metric="log_loss", **own) == pytest.approx(0.6931, abs=1e-4)
        assert 0 <= (get("perennial_staleness_seconds", model="exported") or -1) < 300
        assert get("perennial_exporter_errors_total", model="exported") == 0
        assert process.stop() == 0


def test_what_cannot_be_measured_any_more_disappears(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(tmp_path)
    spec = add_model(settings, more=MORE)
    crown(ledger, spec, {"log_loss": 0.4})
    registry, now = CollectorRegistry(), datetime.now(UTC)
    store = Store(settings.store)
    exporter = Exporter({"trips": spec}, store, registry)

    def info() -> float | None:
        return registry.get_sample_value("perennial_model_info", {"model": "trips", "version": "1"})

    exporter.refresh(ledger, now)
    assert info() == 1
    hour = store.predictions("trips") / f"{now:date=%Y-%m-%d/hour=%H}"
    hour.mkdir(parents=True)
    (hour / "bad.parquet").write_text("no parquet")
    exporter.refresh(ledger, now)
    assert registry.get_sample_value("perennial_exporter_errors_total", {"model": "trips"}) == 1
    assert info() == 1
    measured, samples = exporter._measured["trips"]
    exporter._measured["trips"] = (measured - STALE_S, samples)
    assert info() is None


@pytest.fixture
def answering() -> Iterator[tuple[str, dict[str, tuple[int, str]]]]:
    """A server that answers queries with what the test says, as broken proxies do."""
    answers: dict[str, tuple[int, str]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            status, text = answers["next"]
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (502, "<html>bad gateway</html>"),
        (200, "[]"),
        (200, '{"status": "success"}'),
        (503, '{"status": "error", "errorType": "unavailable", "error": "starting"}'),
        (422, '{"status": "error", "errorType": "timeout", "error": "too slow"}'),
    ],
)
def test_an_answer_that_is_none_is_no_answer(
    answering: tuple[str, dict[str, tuple[int, str]]], status: int, text: str
) -> None:
    url, answers = answering
    answers["next"] = (status, text)
    with pytest.raises(Retryable, match=r"prometheus\.unreachable"):
        Prometheus(url).query("up")


def test_silence_is_no_answer() -> None:
    with pytest.raises(Retryable, match=r"prometheus\.unreachable"):
        Prometheus("http://127.0.0.1:9").query("up")


def test_numbers_nan_infinity_and_nothing_are_told_apart(
    tmp_path: Path, prometheus_binary: Path
) -> None:
    settings = make_settings(tmp_path)
    with prometheus_of(prometheus_binary, settings, {}):
        prometheus = Prometheus.of(settings)
        assert prometheus.query("vector(2)") == (Sample({}, 2.0),)
        assert prometheus.value("1") == 1.0
        assert prometheus.value("nothing_of_this_name") is None
        assert str(prometheus.value("vector(0) / 0")) == "nan"
        assert prometheus.value("vector(1) / 0") == float("inf")
        with pytest.raises(Permanent, match=r"prometheus\.query"):
            prometheus.query("sum(")
        with pytest.raises(Permanent, match="2 series"):
            prometheus.value('label_replace(vector(1), "a", "b", "", "") or vector(1)')
