"""The life of a version, and the policy that moves it.

START ─▶ LOADING ─▶ AVAILABLE ─▶ UNLOADING ─▶ END
            └────────── failed for good ──────▲
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from serving.embedded.config import ModelConfig
from serving.embedded.servable import Servable
from serving.embedded.status import StatusError

# END entries kept per model, so that GetModelStatus does not grow with every version.
KEPT_ENDED = 10


class State(IntEnum):
    """`ModelVersionStatus.State`."""

    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50


@dataclass
class Version:
    """One version's place in its life.

    Attributes:
        error: why it ended, None when it was unloaded.
        retry_at: monotonic time of the next attempt while LOADING, None while one runs.
        forgiven: it ended and was unwanted since; wanted again, it is tried again.
    """

    number: int
    folder: Path
    state: State = State.START
    error: StatusError | None = None
    servable: Servable | None = None
    attempts: int = 0
    retry_at: float | None = None
    forgiven: bool = False


@dataclass
class Model:
    """What is known of one model.

    Attributes:
        config: None once the configuration no longer names it.
        wanted: versions to serve and their folders, as of the last look at the base path.
        problem: why versions are missing.
        looked: whether the base path was looked at since the last configuration.
    """

    config: ModelConfig | None = None
    wanted: dict[int, Path] = field(default_factory=dict)
    versions: dict[int, Version] = field(default_factory=dict)
    problem: StatusError | None = None
    looked: bool = False

    def want(self, wanted: dict[int, Path]) -> None:
        """Sets what is wanted; forgives ended versions that are not, and forgets the oldest."""
        self.wanted = wanted
        ended = [v for v in self.versions.values() if v.state == State.END]
        for version in ended:
            version.forgiven = version.forgiven or version.number not in wanted
        forgotten = [version.number for version in ended if version.forgiven][:-KEPT_ENDED]
        for number in forgotten:
            del self.versions[number]

    def states(self) -> dict[int, State]:
        """States of the versions that count for `next_step`."""
        return {v.number: v.state for v in self.versions.values() if not v.forgiven}

    def first_settled(self) -> Version | None:
        """The lowest wanted version that answers or has failed."""
        settled = (State.AVAILABLE, State.END)
        for number in sorted(self.wanted):
            version = self.versions.get(number)
            if version is not None and version.state in settled and not version.forgiven:
                return version
        return None


@dataclass(frozen=True)
class Load:
    version: int


@dataclass(frozen=True)
class Unload:
    version: int


def next_step(wanted: Collection[int], states: Mapping[int, State]) -> Load | Unload | None:
    """The availability-preserving policy: at most one step for one model.

    An unwanted version goes when nothing is wanted, when a wanted one is ready, or when another
    unwanted one remains; else the highest wanted version that was not tried yet is loaded.
    """
    ready = {version for version, state in states.items() if state == State.AVAILABLE}
    unwanted = ready.difference(wanted)
    if unwanted and (not wanted or ready.intersection(wanted) or len(unwanted) > 1):
        return Unload(min(unwanted))
    new = [version for version in wanted if version not in states]
    return Load(max(new)) if new else None
