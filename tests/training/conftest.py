"""One trained episode for all tests of this folder: importing TensorFlow costs seconds."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from perennial.spec import ModelSpec
from perennial.store import Store
from tests.support.training import SECRET, START, clicks, write_model
from training.collect import collect
from training.evaluate import EvaluationResult
from training.export import ExportResult, evaluate_and_export
from training.history import import_history
from training.supervisor import TrainResult, train
from training.validate import validate

NOW = START + timedelta(days=1)


@dataclass(frozen=True)
class World:
    """A model with labelled traffic; `prepare` takes an episode as far as its snapshot."""

    spec: ModelSpec
    store: Store
    models_dir: Path

    def prepare(
        self, episode_id: str, spec: ModelSpec | None = None, *, shuffle_labels: bool = False
    ) -> None:
        spec = spec or self.spec
        collect(spec, self.store, episode_id, now=NOW, shuffle_labels=shuffle_labels)
        assert validate(spec, self.store, episode_id).accepted


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("training")
    spec = write_model(folder / "models")
    store = Store(f"file://{folder / 'store'}")
    import_history(spec, store, clicks(3000), secret=SECRET)
    return World(spec, store, folder / "models")


@pytest.fixture(scope="session")
def undisturbed(world: World) -> TrainResult:
    """Episode `first`, trained by two workers without a fault."""
    world.prepare("first")
    return train(world.spec, world.store, "first")


@pytest.fixture(scope="session")
def released(world: World, undisturbed: TrainResult) -> tuple[EvaluationResult, ExportResult]:
    """Episode `first`, evaluated without a champion and exported."""
    evaluation, export = evaluate_and_export(
        world.spec, world.store, "first", champion_version=None
    )
    assert export is not None, evaluation.reasons
    return evaluation, export
