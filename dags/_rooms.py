"""Puts the rooms together for one episode: which step does the work of which state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from perennial.episode import Step, advance
from perennial.errors import Permanent
from perennial.ledger import Episode, Ledger
from perennial.local.postgres import database_url
from perennial.settings import Settings
from perennial.spec import ModelSpec, load_spec
from perennial.states import State
from perennial.store import Store


@dataclass(frozen=True)
class Rooms:
    """One model's view of the system: what a task, a trigger or a command works with."""

    settings: Settings
    spec: ModelSpec
    ledger: Ledger
    store: Store

    def advance(self, episode_id: str, *, actor: str) -> Episode:
        """One step of the episode, whatever its state (see `perennial.episode.advance`)."""
        from serving.flow import ReleaseFlow

        flow = ReleaseFlow(self.settings, self.spec, self.ledger)
        return advance(
            self.ledger,
            episode_id,
            {**self._training(), **flow.steps()},
            actor=actor,
            guard=flow.guard,
            cleanup=flow.cleanup,
        )

    def cleanup(self, episode: Episode) -> None:
        """Takes an ended candidate out of serving and writes the release's report."""
        from serving.flow import ReleaseFlow

        ReleaseFlow(self.settings, self.spec, self.ledger).cleanup(episode)

    def _training(self) -> dict[State, Step]:
        from training.steps import steps

        return steps(self.settings, self.spec, self.ledger)


@contextmanager
def open_rooms(model: str) -> Iterator[Rooms]:
    """The rooms of one model, by its name. Raises Permanent `model.unknown`."""
    settings = Settings.from_environment()
    folder = settings.models_dir / model
    if not (folder / "model.yaml").exists():
        raise Permanent(
            "model.unknown",
            f"no model {model!r} in {settings.models_dir}",
            hint="`perennial status` lists the models under care",
        )
    ledger = Ledger(database_url(settings, "perennial"))
    try:
        yield Rooms(settings, load_spec(folder, settings.profile), ledger, Store(settings.store))
    finally:
        ledger.close()
