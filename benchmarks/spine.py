"""The spine beside bare forms: a transition and its bare SQL, the CLI and its bare imports."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import create_engine, text

from benchmarks._report import Row, publish
from perennial.ledger import Ledger
from perennial.local.postgres import database_url, running_postgres
from perennial.settings import Settings
from perennial.spec import load_spec
from perennial.states import State

REPETITIONS = 200


def main() -> int:
    rows = [_start()]
    with tempfile.TemporaryDirectory() as home:
        settings = Settings(home=Path(home))
        with running_postgres(settings):
            rows.append(_transition(database_url(settings, "perennial")))
    return publish("spine", rows)


def _transition(url: str) -> Row:
    spec = load_spec(Path("models/flights"))
    ledger = Ledger(url)
    ledger.migrate()
    engine = create_engine(url, pool_size=1)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE bare (id int PRIMARY KEY, state text, n int)"))
        connection.execute(text("CREATE TABLE bare_events (id serial, state text, at timestamptz)"))
        connection.execute(text("INSERT INTO bare VALUES (1, 'a', 0)"))

    def bare() -> None:
        with engine.begin() as connection:
            connection.execute(text("UPDATE bare SET n = n + 1 WHERE id = 1"))
            connection.execute(text("INSERT INTO bare_events (state, at) VALUES ('a', now())"))

    episode = ledger.open_episode(spec, actor="bench", trigger={"kind": "bench"})
    for state in list(State)[1:8]:
        episode = ledger.transition(episode, state, actor="bench", evidence={})

    def ours() -> None:
        nonlocal episode
        episode = ledger.transition(episode, State.RAMPING, actor="bench", evidence={"n": 1})

    mine, theirs = _interleaved_ms(ours, bare)
    ledger.close()
    engine.dispose()
    return Row("one transition, median", mine, "ms", "bare UPDATE + INSERT", theirs, "<= 5")


def _interleaved_ms(a: Callable[[], None], b: Callable[[], None]) -> tuple[float, float]:
    times: dict[Callable[[], None], list[float]] = {a: [], b: []}
    for _ in range(REPETITIONS):
        for run in (a, b):
            begun = time.perf_counter()
            run()
            times[run].append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times[a]), statistics.median(times[b])


def _start() -> Row:
    ours = _cpu_s([sys.executable, "-m", "perennial", "--help"])
    peer = _cpu_s([sys.executable, "-c", "import click, pydantic, sqlalchemy.orm, yaml"])
    return Row("`perennial --help`, CPU", ours, "s", "importing its libraries", peer, "<= 1.5")


def _cpu_s(command: list[str]) -> float:
    figures = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        figures.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(figures)


if __name__ == "__main__":
    sys.exit(main())
