"""The demo: whole episodes on real flights, in one command.

A first champion learns January and February; later months arrive as live traffic, its answers get
worse, the watch asks for a retrain, the candidate is judged on the canary's outcomes and promoted;
a deliberately bad candidate is stopped by the gate, and, forced past it, by the canary's evidence.
Everything runs in `var/demo`, which is emptied first.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from perennial.airflow_api import AirflowApi, password
from perennial.cli.show import story
from perennial.episode import override
from perennial.errors import NeedsHuman, PerennialError, Retryable
from perennial.ledger import Episode, Event, Ledger
from perennial.local.airflow import REPOSITORY
from perennial.local.postgres import database_url
from perennial.local.stack import Stack, interruptible
from perennial.settings import Settings
from perennial.spec import ModelSpec, load_spec
from perennial.states import State
from perennial.store import Store, write_atomic

MODEL = "flights"
RATE = 200.0
PARTS = {
    # (from, to, every n-th flight). A pass over a part takes about as long as a ramp, so that a
    # release meets the weather of a month and not of one stormy day.
    "drift": ("2013-03-24", "2013-05-01", 4),
    "retrain": ("2013-05-01", "2013-06-01", 4),
    "drill": ("2013-05-01", "2013-07-01", 6),
}
FAST = {
    "PERENNIAL_PROFILE": "demo",
    "PERENNIAL_POLL_S": "1.5",
    "PERENNIAL_WATCH_INTERVAL_S": "15",
    "PERENNIAL_SCRAPE_INTERVAL_S": "4",
}


def run(*, keep: bool, home: Path | None = None) -> int:
    """Runs the demo; returns the exit code: 0 when every act ended as it must.

    Args:
        keep: wait for Ctrl-C at the end, with everything running.
        home: a folder that is emptied; default `<PERENNIAL_HOME>/demo`.
    """
    base = Settings.from_environment({**os.environ, **FAST})
    home = home or base.home / "demo"
    settings = base.model_copy(update={"home": home})
    os.environ.update(settings.as_environment())
    demo = Demo(settings)
    try:
        with interruptible():
            demo.play()
            if keep:
                demo.say("everything is still running; Ctrl-C stops it")
                signal.pause()
    except KeyboardInterrupt:
        demo.say("interrupted: stopping everything")
        return 130
    except PerennialError as error:
        demo.say(f"error: {error}")
        return error.exit_code
    finally:
        demo.close()
    return 0 if demo.holds else 1


class Demo:
    """One run; `play` is the script."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.spec: ModelSpec = load_spec(settings.models_dir / MODEL, settings.profile)
        self.holds = False
        self._begun = time.monotonic()
        self._started = datetime.now(UTC)
        self._traffic: subprocess.Popen[bytes] | None = None
        self._stack: Stack | None = None
        self._ledger: Ledger | None = None
        self._ended = threading.Event()
        self._shown: dict[str, int] = {}
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    # The script

    def play(self) -> None:
        """All acts, in order.

        Raises:
            NeedsHuman: `demo.unexpected`: an act ended otherwise than it must; the ledger says why.
        """
        self.say("Act 0: the stack")
        self.start_stack()
        self.say("Act 1: a first champion from January and February")
        self.import_history("2013-01-01", "2013-03-01")
        first = self.finish(self.retrain("first champion"), State.PROMOTED)
        self.say("Act 2: later months arrive as live traffic; the champion ages")
        self.start_traffic()
        second = self.wait(self._watched, 240, "the watch fires")
        self.say(f"the watch fired: {'; '.join(map(str, second.trigger.get('reasons', [])))}")
        self.wait(
            lambda: self.ledger.episode(second.id).state not in (State.REQUESTED, State.COLLECTING),
            120,
            "its data is collected",
        )
        self.plan("retrain")
        second = self.finish(second, State.PROMOTED)
        self.say("Act 3: a deliberately bad candidate meets the gate")
        self.plan("drill")
        bad = self.finish(self.retrain("drill", shuffle_labels=True), State.REJECTED)
        self.say("Act 4: forced past the gate, it meets the canary's evidence")
        override(self.ledger, bad.id, actor="demo", reason="drill: force a bad candidate")
        self.api().trigger(f"{MODEL}.retrain", conf={}, partition_key=bad.id)
        bad = self.finish(bad, State.ROLLED_BACK)
        self.say("Curtain: counting")
        self.stop_traffic()
        summary = self._summary([first, second, bad])
        write_atomic(self.summary_path, json.dumps(summary, indent=1, default=str).encode())
        self._print(summary)
        self.holds = bool(summary["holds"])

    @property
    def summary_path(self) -> Path:
        return self.settings.home / "summary.json"

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            self._ledger = Ledger(database_url(self.settings, "perennial"))
        return self._ledger

    def say(self, text: str) -> None:
        click.echo(f"[{time.monotonic() - self._begun:6.1f} s] {text}")

    def close(self) -> None:
        """Stops everything that was started. Safe to call twice."""
        self._ended.set()
        if self._ticker.is_alive():
            self._ticker.join()
        if self._traffic is not None and self._traffic.poll() is None:
            self._traffic.terminate()
            self._traffic.wait(30)
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
        if self._stack is not None:
            self._stack.stop()
            self._stack = None

    # Acts

    def start_stack(self) -> None:
        home = self.settings.home
        self._stack = Stack(self.settings, report=lambda line: self.say(f"  {line}"))
        self._empty(home)
        self._stack.start()
        for name, url in self._stack.urls().items():
            self.say(f"  {name}: {url}")
        self.say(f"  Airflow user {self.settings.airflow_user}, password {password(self.settings)}")
        self._ticker.start()
        wanted = {f"{MODEL}.watch", f"{MODEL}.retrain", f"{MODEL}.release"}
        self.wait(lambda: wanted <= self.api().dag_ids(), 120, "Airflow has read the DAGs")

    def _empty(self, home: Path) -> None:
        """The demo's folder, emptied unless a stack runs in it (which `Stack.start` refuses).

        So is its spool: a recorder without its state would take up what an earlier run left there.
        """
        if not (home / "run" / "stack.json").exists():
            shutil.rmtree(home, ignore_errors=True)
            shutil.rmtree(self.settings.spool_dir, ignore_errors=True)

    def import_history(self, start: str, end: str) -> None:
        import pyarrow.compute as pc

        from training.history import import_history
        from training.hooks import load_history

        table = load_history(self.spec)
        first, last = (datetime.fromisoformat(day).replace(tzinfo=UTC) for day in (start, end))
        part = table.filter(
            pc.and_(pc.greater_equal(table["scheduled"], first), pc.less(table["scheduled"], last))
        )
        count = import_history(
            self.spec, Store(self.settings.store), part, secret=self.settings.key_secret()
        )
        self.say(f"  imported {count} labelled flights of {start} to {end}")

    def retrain(self, reason: str, *, shuffle_labels: bool = False) -> Episode:
        """Triggers the retrain DAG by hand and returns the episode it opens."""
        for _ in range(3):
            run_id = self.api().trigger(
                f"{MODEL}.retrain",
                conf={"reason": reason, "actor": "demo", "shuffle_labels": shuffle_labels},
            )
            found = self.wait(
                lambda run_id=run_id: self._episode_of_run(run_id) or self._ended_run(run_id),  # type: ignore[misc]
                60,
                "the run opens its episode",
            )
            if isinstance(found, Episode):
                return found
            self.say("  another episode is open: waiting for it to end")
            self.wait(lambda: self.ledger.open_episode_of(MODEL) is None, 300, "it ends")
        raise NeedsHuman("demo.unexpected", "no episode could be opened by hand")

    def _episode_of_run(self, run_id: str) -> Episode | None:
        return next(
            (e for e in self.ledger.episodes(MODEL) if e.trigger.get("run") == run_id), None
        )

    def _ended_run(self, run_id: str) -> str | None:
        state = self.api().run(f"{MODEL}.retrain", run_id)["state"]
        return state if state in ("success", "failed") else None

    def _watched(self) -> Episode | None:
        return next(
            (e for e in self.ledger.episodes(MODEL) if e.trigger.get("kind") != "manual"), None
        )

    def finish(self, episode: Episode, expected: State) -> Episode:
        """Waits for the episode's end, and that the last DAG run has said so too."""
        ended = self.wait(
            lambda: (e := self.ledger.episode(episode.id)).is_open is False and e,
            420,
            f"episode {episode.id} ends",
        )
        self._show_events()
        if ended.state is not expected:
            raise NeedsHuman(
                "demo.unexpected",
                f"episode {ended.id} ended as {ended.state}, not as {expected}",
                hint=f"PERENNIAL_HOME={self.settings.home} has its logs and its ledger",
            )
        return ended

    # Traffic

    def plan(self, part: str) -> None:
        start, end, stride = PARTS[part]
        plan = {"from": start, "to": end, "stride": stride}
        write_atomic(self.settings.home / "plan.json", json.dumps(plan).encode())
        self.say(f"  traffic: flights of {start} to {end}, every {stride}., {RATE:g} per second")

    def start_traffic(self) -> None:
        self.plan("drift")
        home = self.settings.home
        with (self.settings.run_dir / "traffic.log").open("wb") as output:
            self._traffic = subprocess.Popen(
                [
                    *(sys.executable, "-m", "perennial.local.traffic"),
                    *("--model", MODEL, "--rate", str(RATE)),
                    *("--plan", str(home / "plan.json"), "--stats", str(home / "traffic.json")),
                ],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stats(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.settings.home / "traffic.json").read_text()))
        except OSError:
            return {}

    def stop_traffic(self) -> None:
        assert self._traffic is not None
        self._traffic.terminate()
        if status := self._traffic.wait(60):
            raise NeedsHuman(
                "demo.traffic", f"the traffic ended with {status}: {self.settings.run_dir}"
            )

        def drained() -> bool:
            return self.counts()["captured"] >= self.stats()["sent"]

        try:
            self.wait(drained, 20, "the recorder has written everything")
        except Retryable:
            self.say("  the recorder has not written every call; the counts show it")

    def counts(self) -> dict[str, int]:
        """Live rows in the logs: captured calls, and those whose label came back."""
        import pyarrow.compute as pc
        import pyarrow.dataset as ds

        store = Store(self.settings.store)
        predictions = ds.dataset(store.predictions(MODEL), format="parquet")
        labels = ds.dataset(store.labels(MODEL), format="parquet")
        ids = predictions.to_table(["request_id"], filter=pc.field("arm") != "history")
        known = labels.to_table(["request_id"])
        unique = pc.unique(ids["request_id"])
        labelled = pc.sum(pc.is_in(unique, value_set=pc.unique(known["request_id"]))).as_py()
        return {"captured": len(unique), "labelled": int(labelled or 0)}

    # Progress and the end

    def api(self) -> AirflowApi:
        return AirflowApi(self.settings)

    def wait(self, found: Callable[[], Any], limit_s: float, what: str) -> Any:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if (value := found()) not in (None, False):
                return value
            time.sleep(0.3)
        raise Retryable(
            "demo.timeout",
            f"not within {limit_s:g} s: {what}",
            hint=f"the logs are in {self.settings.run_dir} and {self.settings.home}/airflow/logs",
        )

    def _tick(self) -> None:
        """Shows what happened, every second; the traffic's counts every ten."""
        ticks = 0
        while not self._ended.wait(1.0):
            self._show_events()
            ticks += 1
            if ticks % 10 == 0 and (stats := self.stats()):
                self.say(
                    f"  … {stats['position']}: {stats['sent']} sent, {stats['failed']} failed, "
                    f"p50 {stats['latency_ms_p50'] or 0:.1f} ms; {_split(stats['by_arm'])}"
                )

    def _show_events(self) -> None:
        ledger = Ledger(database_url(self.settings, "perennial"))
        try:
            for episode in reversed(ledger.episodes(MODEL)):
                events = ledger.events(episode.id)
                for event in events[self._shown.get(episode.id, 0) :]:
                    self.say(f"  {episode.id}: {headline(event)}")
                self._shown[episode.id] = len(events)
        except PerennialError as error:
            self.say(f"  {error.message}")
        finally:
            ledger.close()

    def _summary(self, episodes: list[Episode]) -> dict[str, Any]:
        stats, counts = self.stats(), self.counts()
        ledger = self.ledger
        fences = ledger.fences(MODEL)
        champion = ledger.champion(MODEL)
        bad = ledger.episode(episodes[-1].id)
        stories = [
            story(episode, ledger.events(episode.id))
            for episode in reversed(ledger.episodes(MODEL))
        ]
        histories = {s["episode"]: ledger.verify_history(s["episode"]) for s in stories}
        expectations = {
            "no failed request": stats["failed"] == 0,
            "champion is the good candidate": champion is not None
            and champion.episode_id == episodes[1].id,
            "bad version is fenced": bad.version in fences,
            "every call was captured": counts["captured"] == stats["sent"],
        }
        return {
            "model": MODEL,
            "started": self._started,
            "wall_s": round(time.monotonic() - self._begun, 1),
            "holds": all(expectations.values()),
            "expectations": expectations,
            "requests": {**stats, **counts},
            "champion": champion.version if champion else None,
            "fences": fences,
            "triggers": [
                {"time": t.time, "kind": t.kind, "fired": t.fired, "reasons": t.reasons}
                for t in reversed(ledger.triggers(MODEL))
            ],
            "episodes": stories,
            "history_events_verified": histories,
            "restarts": self._stack.supervisor.restarts() if self._stack else {},
            "urls": self._stack.urls() if self._stack else {},
        }

    def _print(self, summary: dict[str, Any]) -> None:
        requests = summary["requests"]
        click.echo("\n== What happened ==")
        for told in summary["episodes"]:
            reasons = "; ".join(map(str, told["trigger"].get("reasons", [])))
            click.echo(
                f"\n{told['episode']}  v{told['version']}  {told['state']}\n  why: {reasons}"
            )
            for event in told["events"]:
                click.echo(f"  {event['time'][11:19]}  {event['to']:18} {_gist(event['evidence'])}")
        click.echo(
            f"\nrequests: {requests['sent']} sent, {requests['failed']} failed, "
            f"{requests['captured']} captured, {requests['labelled']} labelled"
        )
        click.echo(f"champion: v{summary['champion']}; fenced: {summary['fences']}")
        for name, held in summary["expectations"].items():
            click.echo(f"  {'ok' if held else 'NO'}  {name}")
        reports = Store(self.settings.store).model_dir(MODEL) / "releases"
        for report in sorted(reports.glob("*/report.html")):
            click.echo(f"report: {_relative(report)}")
        click.echo(f"summary: {_relative(self.summary_path)}; wall {summary['wall_s']} s")
        click.echo(
            "look at it again with: PERENNIAL_PROFILE=demo "
            f"PERENNIAL_HOME={_relative(self.settings.home)} make up"
        )


def headline(event: Event) -> str:
    """One line for an event: where to, and the gist of why."""
    text = f"{event.from_state} -> {event.to_state}" if event.seq > 1 else "requested"
    gist = _gist(event.evidence)
    return f"{text}  {gist}" if gist else text


def _gist(evidence: dict[str, Any] | Any, limit: int = 150) -> str:
    parts = []
    for key, value in evidence.items():
        if isinstance(value, bool | int | str):
            parts.append(f"{key}={value}")
        elif isinstance(value, float):
            parts.append(f"{key}={value:.4g}")
    text = ", ".join(parts)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _split(by_arm: dict[str, int]) -> str:
    return ", ".join(f"{arm} {count}" for arm, count in sorted(by_arm.items()))


def _relative(path: Path) -> Path:
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path
