"""Stories of a release, told on real pools, a real router and a real ledger.

The traffic is written as the recorder would have written it, so that a story decides in seconds.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from perennial.episode import advance
from perennial.ledger import ChampionMove, Ledger
from perennial.records import LABEL_SCHEMA, prediction_schema
from perennial.settings import Settings
from perennial.spec import ModelSpec
from perennial.states import State
from perennial.store import Store
from serving.flow import ReleaseFlow

# The salt is drawn: 5 % of them are 80, give or take 9, and `min_keys` is 30.
KEYS = [f"key-{i}" for i in range(1600)]


def quick(flights: ModelSpec) -> ModelSpec:
    """The flights model on a clock that lets every stage end at once."""
    release = flights.release.model_dump()
    release |= {
        "ramp": [
            {"share": 0.05, "min_duration": 0},
            {"share": 0.25, "min_duration": 0},
            {"share": 0.5, "min_duration": 0},
        ],
        "margin": 0.05,
        "mde": 0.05,
        "min_keys": 30,
        "min_keys_stage": 10,
        "probation": 0,
    }
    data = flights.data.model_copy(update={"label_horizon": timedelta(0)})
    return flights.model_copy(
        update={"data": data, "release": type(flights.release).model_validate(release)}
    )


def begin(settings: Settings, spec: ModelSpec, ledger: Ledger, exports: Path) -> Story:
    """A story on a fresh ledger: three versions in the store, nothing served."""
    store = Store(settings.store)
    shutil.rmtree(store.model_dir(spec.name), ignore_errors=True)
    for version in (1, 2, 3):
        shutil.copytree(exports / "affine" / str(version), store.version(spec.name, version))
    told = Story(settings, spec, ledger)
    serving = told.flow().serving
    serving.write_routes((spec.name,))
    serving.reconcile(spec.name)
    return told


class Story:
    """given a champion v1 and a candidate v2; when traffic comes; then …"""

    def __init__(self, settings: Settings, spec: ModelSpec, ledger: Ledger) -> None:
        self.settings, self.spec, self.ledger = settings, spec, ledger
        self.store = Store(settings.store)
        self.random = np.random.default_rng(5)
        self.parts = 0

    def given_champion(self, version: int) -> Story:
        episode = self._walk(State.PROMOTING, version)
        moved = self.ledger.transition(
            episode,
            State.PROBATION,
            actor="test",
            evidence={},
            champion=ChampionMove(version - 1, version, episode.id),
        )
        self.ledger.transition(moved, State.PROMOTED, actor="test", evidence={})
        self.flow().serving.reconcile(self.spec.name)
        return self

    def given_candidate(self, version: int) -> Story:
        champion = self.ledger.champion(self.spec.name)
        assert champion is not None
        episode = self._walk(State.EXPORTING, version)
        self.episode = self.ledger.transition(
            episode,
            State.SHADOWING,
            actor="test",
            evidence={},
            data={"champion_revision": champion.revision},
        )
        return self

    def _walk(self, to: State, version: int):
        episode = self.ledger.open_episode(self.spec, actor="test", trigger={"kind": "test"})
        for state in list(State)[1:6]:
            episode = self.ledger.transition(episode, state, actor="test", evidence={})
        assert self.ledger.allocate_version(episode.id) == version
        episode = self.ledger.episode(episode.id)
        if to is not State.EXPORTING:
            episode = self.ledger.transition(episode, to, actor="test", evidence={})
        return episode

    def flow(self, ledger: Ledger | None = None) -> ReleaseFlow:
        return ReleaseFlow(self.settings, self.spec, ledger or self.ledger)

    def step(self, ledger: Ledger | None = None):
        flow = self.flow(ledger)
        return advance(
            ledger or self.ledger,
            self.episode.id,
            flow.steps(),
            actor="test",
            guard=flow.guard,
            cleanup=flow.cleanup,
        )

    def traffic(
        self, *, candidate_loss: float, failing: float = 0.0, not_a_number: float = 0.0
    ) -> None:
        """One request of each key in the running stage, with its label.

        Args:
            candidate_loss: how far the candidate's probabilities are off; the champion's: 0.3.
            failing: share of the canary's calls that fail.
            not_a_number: share of the canary's answers that are NaN, with status OK.
        """
        stages = self.ledger.episode(self.episode.id).data.get("stages", [])
        if not stages or stages[-1]["start"] is None:
            return
        share, now = stages[-1]["share"], datetime.now(UTC)
        versions = {"stable": self.episode.champion_at_start, "canary": self.episode.version}
        rows, labels = [], []
        for key in KEYS:
            digest = hashlib.sha256(f"{self.episode.id}:{key}".encode()).digest()
            is_canary = int.from_bytes(digest[:8], "big") / 2**64 < share
            truth = float(self.random.random() < 0.3)
            off = candidate_loss if is_canary else 0.3
            arm = "canary" if is_canary else "stable"
            failed = is_canary and self.random.random() < failing
            score = abs(truth - off)
            if is_canary and self.random.random() < not_a_number:
                score = math.nan
            request_id = f"{self.parts}-{key}"
            rows.append(
                {
                    "request_id": request_id,
                    "row": 0,
                    "key_hash": key,
                    "time": now,
                    "arm": arm,
                    "assigned": arm,
                    "route": "split",
                    "version": versions[arm],
                    "status": 13 if failed else 0,
                    "score": None if failed else score,
                }
            )
            labels.append(
                {
                    "request_id": request_id,
                    "row": 0,
                    "value": truth,
                    "time": now,
                    "received": now,
                    "source": "test",
                }
            )
        self._write(self.store.predictions(self.spec.name), rows, prediction_schema(self.spec), now)
        self._write(self.store.labels(self.spec.name), labels, LABEL_SCHEMA, now)
        self.parts += 1

    def _write(self, folder: Path, rows: list, schema: pa.Schema, now: datetime) -> None:
        place = folder / f"date={now:%Y-%m-%d}" / f"hour={now:%H}"
        place.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist(rows, schema)
        pq.write_table(table, place / f".{self.parts}")
        (place / f".{self.parts}").rename(place / f"{self.parts}.parquet")

    def until(self, *states: State, limit: int = 40, **traffic: float):
        """Traffic and steps in turn, until the episode is in one of the states."""
        for _ in range(limit):
            self.traffic(**traffic)
            episode = self.step()
            if episode.state in states:
                return episode
        raise AssertionError(f"still {episode.state} after {limit} steps")

    def served(self) -> tuple[list[int], list[int], float]:
        serving = self.flow().serving
        return (
            list(serving._stable.served(self.spec.name)[0].available),
            list(serving._canary.served(self.spec.name)[0].available),
            serving.share(self.spec.name),
        )
