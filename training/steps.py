"""The steps from a request to a published version, as `perennial.episode.advance` takes them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perennial.episode import Outcome, Step
from perennial.ledger import Episode, Ledger, utc_now
from perennial.settings import Settings
from perennial.spec import ModelSpec
from perennial.states import State
from perennial.store import Store

log = logging.getLogger(__name__)


def steps(settings: Settings, spec: ModelSpec, ledger: Ledger) -> dict[State, Step]:
    """The training room's step of each state it does the work of."""
    room = _Training(spec, ledger, Store(settings.store))
    return {
        State.REQUESTED: lambda episode: Outcome(State.COLLECTING, {"taken_up": True}),
        State.COLLECTING: room.collect,
        State.VALIDATING: room.validate,
        State.TRAINING: room.train,
        State.EVALUATING: room.evaluate,
        State.EXPORTING: room.export,
    }


class _Training:
    def __init__(self, spec: ModelSpec, ledger: Ledger, store: Store) -> None:
        self.spec = spec
        self.ledger = ledger
        self.store = store

    def collect(self, episode: Episode) -> Outcome:
        from training.collect import collect

        found = collect(
            self.spec,
            self.store,
            episode.id,
            now=utc_now(),
            shuffle_labels=bool(episode.params.get("shuffle_labels")),
        )
        return Outcome(State.VALIDATING, _evidence(found), {"collected": {"rows": found.rows}})

    def validate(self, episode: Episode) -> Outcome:
        from training.validate import validate

        found = validate(self.spec, self.store, episode.id)
        evidence = _evidence(found)
        if not found.accepted:
            return Outcome(State.REJECTED, {"reason": "data_invalid", **evidence})
        return Outcome(State.TRAINING, evidence, {"snapshot": {"rows": found.rows}})

    def train(self, episode: Episode) -> Outcome:
        from training.supervisor import Parent, train

        champion = self.ledger.champion(self.spec.name)
        parent = None
        if champion is not None and self.spec.training.warm_start == "champion":
            if champion.version in self.ledger.fences(self.spec.name):
                log.warning("champion %s is fenced: training from scratch", champion.version)
            else:
                parent = Parent(champion.version, champion.episode_id)
        found = train(self.spec, self.store, episode.id, parent=parent)
        return Outcome(State.EVALUATING, _evidence(found))

    def evaluate(self, episode: Episode) -> Outcome:
        """The gate. A candidate that passes it is exported by the same child process, which spares
        one start of TensorFlow; the next step finds that export."""
        from training.export import evaluate_and_export

        champion = self.ledger.champion(self.spec.name)
        found, _ = evaluate_and_export(
            self.spec,
            self.store,
            episode.id,
            champion_version=champion.version if champion else None,
        )
        evidence = _evidence(found)
        data = {
            "champion_revision": champion.revision if champion else 0,
            "baseline": evidence.get("candidate", {}),
        }
        if not found.passed:
            return Outcome(State.REJECTED, {"reason": "gate", **evidence}, data)
        return Outcome(State.EXPORTING, evidence, data)

    def export(self, episode: Episode) -> Outcome:
        from training.export import export, publish

        found = export(self.spec, self.store, episode.id)
        version = self.ledger.allocate_version(episode.id)
        publish(self.spec, self.store, episode.id, version)
        champion = self.ledger.champion(self.spec.name)
        return Outcome(
            State.SHADOWING if champion else State.PROMOTING,
            {**_evidence(found), "version": version},
            {"export": {"version": version}},
        )


def _evidence(result: Any) -> dict[str, Any]:
    """A result's fields as JSON."""
    return {field.name: _plain(getattr(result, field.name)) for field in dataclasses.fields(result)}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _evidence(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return value
