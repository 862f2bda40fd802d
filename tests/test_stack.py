"""The real stack once, end to end, with kills: a shorter episode than the demo's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perennial.errors import Conflict, NeedsHuman
from perennial.ledger import Ledger
from perennial.local.demo import FAST, Demo
from perennial.local.postgres import database_url
from perennial.local.stack import PORT_SETTINGS, Stack
from perennial.settings import Settings
from perennial.states import State
from perennial.store import Store
from tests.support.traffic import free_ports

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def settings(long_lived_path):
    models = shutil.copytree(REPOSITORY / "models", long_lived_path / "models")
    overlay = models / "flights" / "model.demo.yaml"
    # The candidate learns from little more than its champion: about equal, decided in seconds.
    text = overlay.read_text()
    assert "\n  margin: 0.03\n" in text
    overlay.write_text(text.replace("\n  margin: 0.03\n", "\n  margin: 0.15\n"))
    ports = dict(zip(PORT_SETTINGS, free_ports(len(PORT_SETTINGS)), strict=True))
    environment = {
        **FAST,
        "PERENNIAL_HOME": str(long_lived_path / "stack"),
        "PERENNIAL_MODELS_DIR": str(models),
        **{f"PERENNIAL_{name.upper()}": str(port) for name, port in ports.items()},
    }
    return Settings.from_environment(environment)


@pytest.fixture(scope="module")
def play(settings):
    """A running stack with a first champion of three weeks of January, under live traffic."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.as_environment().items():
            patch.setenv(name, value)
        patch.setattr("perennial.local.demo.RATE", 80.0)
        demo = Demo(settings)
        try:
            demo.start_stack()
            demo.import_history("2013-01-01", "2013-01-22")
            demo.finish(demo.retrain("first champion"), State.PROMOTED)
            demo.start_traffic()
            demo.wait(lambda: demo.stats().get("sent", 0) > 200, 60, "traffic flows")
            yield demo
        finally:
            demo.close()
            shutil.rmtree(settings.spool_dir, ignore_errors=True)


def kill(play, name):
    """SIGKILLs one of the stack's processes; returns once another has taken its place."""
    supervisor = play._stack.supervisor
    before = supervisor.process_id(name)
    os.kill(before, signal.SIGKILL)
    play.wait(lambda: supervisor.process_id(name) != before, 30, f"{name} is started again")


def perennial(settings, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "perennial", *arguments],
        env={**os.environ, **settings.as_environment(), "PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_an_episode_under_kills_is_promoted(play, settings):
    ledger = play.ledger
    episode = play.retrain("end to end")
    kill(play, "recorder")
    kill(play, "labels")
    play.wait(lambda: ledger.episode(episode.id).state is State.TRAINING, 120, "it trains")
    kill(play, "exporter")
    play.wait(lambda: ledger.episode(episode.id).state is State.RAMPING, 240, "it ramps")
    kill(play, "airflow-scheduler")
    kill(play, "airflow-triggerer")
    done = play.finish(episode, State.PROMOTED)
    assert ledger.champion("flights").version == done.version == 2
    assert ledger.champion("flights").previous_version == 1
    assert ledger.verify_history(episode.id) == done.revision
    shares = [e.evidence["share"] for e in ledger.events(episode.id) if "stage" in e.evidence]
    assert shares == [stage.share for stage in play.spec.release.ramp]


def test_a_canary_pool_that_dies_is_rolled_back_and_no_user_notices(play, settings):
    ledger = play.ledger
    episode = play.retrain("the canary dies")
    play.wait(lambda: play.counts()["captured"] and _share(settings) > 0, 300, "it ramps")
    kill(play, "pool-canary")
    done = play.finish(episode, State.ROLLED_BACK)
    assert ledger.events(done.id)[-1].evidence["reason"].startswith("guardrail.")
    assert ledger.fences("flights").keys() == {3}
    assert ledger.champion("flights").version == 2
    play.stop_traffic()
    stats, counts = play.stats(), play.counts()
    assert stats["failed"] == 0, stats["errors"]
    assert {"1", "2", "3"} >= stats["by_version"].keys() >= {"1", "2"}
    assert counts["captured"] == stats["sent"]
    assert counts["labelled"] == stats["sent"]


def _share(settings):
    from serving.router.routes import read_routes, routes_path

    return read_routes(routes_path(settings)).models["flights"].share


def test_the_command_line_tells_its_story(play, settings):
    status = json.loads(perennial(settings, "status", "flights", "--json").stdout)
    assert status["flights"]["champion"]["version"] == 2
    latest = status["flights"]["episodes"][0]["episode"]
    told = perennial(settings, "explain", latest)
    assert told.returncode == 0
    assert "hash chain intact" in told.stdout
    assert perennial(settings, "explain", "no-such-episode").returncode == 2
    assert perennial(settings, "check", "flights").returncode == 0


def test_the_report_shows_it(play, settings):
    champion = play.ledger.champion("flights")
    folder = Store(settings.store).release("flights", champion.episode_id)
    page = (folder / "report.html").read_text()
    assert "<svg" in page
    assert "PROMOTE" in page


# MLflow's own imports warn of SQLAlchemy's deprecations.
@pytest.mark.filterwarnings("default")
def test_the_registry_shows_it(play, settings):
    from mlflow import MlflowClient

    url = database_url(settings, "mlflow")
    client = MlflowClient(tracking_uri=url, registry_uri=url)
    champion = play.ledger.champion("flights")

    def aliased(alias):
        version = client.get_model_version_by_alias("flights", alias)
        return version.tags["perennial.episode"]

    play.wait(lambda: aliased("champion") == champion.episode_id, 60, "the registry is synced")
    assert aliased("previous") == champion.previous_episode_id


def test_a_rollback_from_the_command_line_needs_no_airflow(play, settings):
    supervisor = play._stack.supervisor
    names = ("scheduler", "triggerer", "dag-processor", "api-server")
    stopped = [supervisor.process_id(f"airflow-{name}") for name in names]
    for process_id in stopped:
        os.kill(process_id, signal.SIGSTOP)
    try:
        done = perennial(settings, "rollback", "flights", "--reason", "drill", "--json")
    finally:
        for process_id in stopped:
            os.kill(process_id, signal.SIGCONT)
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = Ledger(database_url(settings, "perennial"))
    assert ledger.champion("flights").version == 1
    assert ledger.fences("flights")[2] == "drill"
    ledger.close()


def test_a_second_stack_is_refused(play, settings):
    with pytest.raises(Conflict, match="already runs"):
        Stack(settings).start()
    with pytest.raises(NeedsHuman, match=r"port \d+ .*is taken"):
        Stack(settings.model_copy(update={"home": settings.home / "other"})).start()
    assert perennial(settings, "status", "flights").returncode == 0
