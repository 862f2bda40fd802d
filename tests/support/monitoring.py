"""A small world for the monitoring room: logs with known quality, a champion, Prometheus."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from monitoring.rules import write as write_rules
from perennial.errors import NeedsHuman
from perennial.ledger import ChampionMove, Ledger
from perennial.local.prometheus import find_prometheus
from perennial.records import LABEL_SCHEMA, prediction_schema
from perennial.settings import Settings
from perennial.spec import ModelSpec
from perennial.states import State
from perennial.store import Store
from serving.parquet import write_parquet
from tests.support.traffic import Process, eventually

_numbers = itertools.count()


@dataclass(frozen=True)
class Row:
    """One prediction and what came back; `label` None: nothing did."""

    id: str
    score: float | None
    label: float | None
    age: timedelta
    version: int = 1
    arm: str = "stable"
    status: int = 0
    row: int = 0


def write_log(spec: ModelSpec, store: Store, rows: Sequence[Row], now: datetime) -> None:
    """Predictions at `now - age`, their labels a second later."""
    name = f"{next(_numbers)}.parquet"
    by_hour: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        time = now - row.age
        by_hour.setdefault(f"{time:date=%Y-%m-%d/hour=%H}", []).append(
            {
                "request_id": row.id,
                "row": row.row,
                "key_hash": "",
                "time": time,
                "latency_ms": 1.0,
                "arm": row.arm,
                "assigned": row.arm,
                "route": "split",
                "version": row.version,
                "status": row.status,
                "score": row.score,
            }
        )
    for hour, found in by_hour.items():
        table = pa.Table.from_pylist(found, schema=prediction_schema(spec))
        write_parquet(table, store.predictions(spec.name) / hour / name)
    labels = [row for row in rows if row.label is not None]
    write_labels(
        spec, store, [(row.id, row.label, now - row.age + timedelta(seconds=1)) for row in labels]
    )


def write_labels(
    spec: ModelSpec, store: Store, labels: Sequence[tuple[str, float | None, datetime]]
) -> None:
    """(request id, value, received)."""
    by_hour: dict[str, list[dict[str, Any]]] = {}
    for request_id, value, received in labels:
        by_hour.setdefault(f"{received:date=%Y-%m-%d/hour=%H}", []).append(
            {
                "request_id": request_id,
                "row": 0,
                "value": value,
                "time": received,
                "received": received,
                "source": "tests",
            }
        )
    for hour, found in by_hour.items():
        table = pa.Table.from_pylist(found, schema=LABEL_SCHEMA)
        write_parquet(table, store.labels(spec.name) / hour / f"{next(_numbers)}.parquet")


def crown(
    ledger: Ledger, spec: ModelSpec, baseline: Mapping[str, Any], *, now: datetime | None = None
) -> int:
    """Makes a first champion, as a whole episode would; returns its version."""
    episode = ledger.open_episode(spec, actor="tests", trigger={"kind": "manual"}, now=now)
    version = ledger.allocate_version(episode.id)
    way = [
        State.COLLECTING,
        State.VALIDATING,
        State.TRAINING,
        State.EVALUATING,
        State.EXPORTING,
        State.PROMOTING,
        State.PROBATION,
        State.PROMOTED,
    ]
    for state in way:
        champion = ledger.champion(spec.name)
        move = ChampionMove(champion.revision if champion else 0, version, episode.id, baseline)
        episode = ledger.transition(
            episode,
            state,
            actor="tests",
            evidence={},
            champion=move if state is State.PROBATION else None,
            now=now,
        )
    return version


@pytest.fixture(scope="session")
def prometheus_binary() -> Path:
    try:
        return find_prometheus(Settings())
    except NeedsHuman as error:
        pytest.skip(str(error))


def promtool(binary: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [binary.with_name("promtool"), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@contextmanager
def prometheus_of(
    binary: Path, settings: Settings, specs: Mapping[str, ModelSpec]
) -> Iterator[None]:
    """Runs Prometheus on the rendered rules until it is ready."""
    config = write_rules(settings, specs)
    url = f"http://127.0.0.1:{settings.prometheus_port}"
    command = [
        str(binary),
        f"--config.file={config}",
        f"--storage.tsdb.path={settings.home / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{settings.prometheus_port}",
        "--log.level=warn",
    ]
    with Process(command, {}, settings.home / "prometheus.log"):
        eventually(lambda: _ready(url), "Prometheus is ready")
        yield


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
