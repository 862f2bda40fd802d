"""The release's steps: from a published version to a verdict, and the reconciliation of serving.

What the pools and the router should be is a pure function of the ledger (`desired`); `Serving`
makes it so, again and again. A step therefore never "sets" anything: it reconciles, checks what is
served, and says what the evidence allows. A kill between any two lines is mended by the next call.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from perennial.ledger import Champion, Episode, Ledger
from perennial.settings import Settings
from perennial.states import State
from perennial.store import Store
from serving.router.routes import (
    ModelRouting,
    read_routes,
    routes_path,
    wait_applied,
    write_routes,
)
from serving.tfserving import Actuator, ModelAssignment
from serving.topology import canary_pool, stable_pool

log = logging.getLogger(__name__)

LOAD_DEADLINE_S = 180.0
ROUTE_DEADLINE_S = 10.0
IDLE_SALT = "idle"

_ON_CANARY = frozenset({State.SHADOWING, State.RAMPING, State.AWAITING_APPROVAL, State.PROMOTING})
_EXPOSED_TO_USERS = frozenset({State.RAMPING, State.AWAITING_APPROVAL, State.PROMOTING})


@dataclass(frozen=True)
class Desired:
    """What serving should be for one model.

    Attributes:
        stable, canary: versions to hold loaded, per pool.
        stable_label: the version that the label `stable` names, or None.
        share: the canary's share of the traffic, 0 to 1.
        salt: of the sticky hash; one per episode, so that each has new users.
    """

    stable: tuple[int, ...]
    canary: tuple[int, ...]
    stable_label: int | None
    share: float
    salt: str


def desired(champion: Champion | None, episode: Episode | None) -> Desired:
    """What serving should be, from the ledger alone.

    Args:
        champion: the model's champion, or None before the first promotion.
        episode: the model's open episode, or None.
    """
    stable = {champion.version} if champion else set()
    canary: set[int] = set()
    share, salt = 0.0, IDLE_SALT
    if episode is not None and episode.version is not None:
        salt = episode.id
        if episode.state in _ON_CANARY and episode.champion_at_start is not None:
            canary = {episode.version}
        if episode.state in _EXPOSED_TO_USERS and (stages := episode.data.get("stages")):
            share = float(stages[-1]["share"])
        if episode.state is State.PROMOTING:
            stable.add(episode.version)
        if episode.state is State.PROBATION and champion and champion.previous_version:
            stable.add(champion.previous_version)
    return Desired(
        tuple(sorted(stable)),
        tuple(sorted(canary)),
        champion.version if champion else None,
        share if canary else 0.0,
        salt,
    )


class Serving:
    """Makes the pools and the router what the ledger says."""

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self.settings = settings
        self.ledger = ledger
        self.store = Store(settings.store)
        self._stable = Actuator(stable_pool(settings))
        self._canary = Actuator(canary_pool(settings))

    def desired(self, model: str) -> Desired:
        return desired(self.ledger.champion(model), self.ledger.open_episode_of(model))

    def reconcile(self, model: str, *, deadline_s: float = LOAD_DEADLINE_S) -> Desired:
        """Makes serving what the ledger says; returns what that is.

        A share is lowered before a pool changes and raised after, so that no request is sent to a
        version that is not loaded.

        Raises:
            Retryable: `pool.unreachable`, `pool.not_available`, `router.unreachable`.
            Permanent: `pool.load_failed`, with the server's own message.
        """
        want = self.desired(model)
        if self.share(model) > want.share or not want.canary:
            self._route(model, 0.0 if not want.canary else want.share, want.salt)
        base_path = str(self.store.versions(model))
        if want.stable:
            label = want.stable_label or want.stable[-1]
            self._stable.apply(
                model,
                ModelAssignment(base_path, want.stable, {"stable": label}),
                deadline_s=deadline_s,
            )
        else:
            self._stable.apply(model, None, deadline_s=deadline_s)
        self._canary.apply(
            model,
            ModelAssignment(base_path, want.canary, {"canary": want.canary[-1]})
            if want.canary
            else None,
            deadline_s=deadline_s,
        )
        self._route(model, want.share, want.salt)
        return want

    def cut_canary(self, model: str) -> None:
        """Takes the canary's share to 0 at once, before anything else is done."""
        self._route(model, 0.0, IDLE_SALT)

    def share(self, model: str) -> float:
        """The canary's share as the routes on disk say."""
        routing = read_routes(routes_path(self.settings)).models.get(model)
        return routing.share if routing else 0.0

    def write_routes(self, models: Sequence[str]) -> None:
        """Writes the routes of all models under care, as the ledger wants them.

        For the start of a stack, before a router runs: nothing is waited for.
        """
        routing = {}
        for model in models:
            want = self.desired(model)
            routing[model] = ModelRouting(want.share, want.salt)
        write_routes(
            routes_path(self.settings), routing, capture_percent=self.settings.capture_percent
        )

    def _route(self, model: str, share: float, salt: str) -> None:
        path = routes_path(self.settings)
        routing = ModelRouting(share, salt)
        # Several models' releases share one file; a lost update would undo another's share.
        with path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            declared = read_routes(path).models
            if declared.get(model) == routing:
                return
            version = write_routes(
                path, {**declared, model: routing}, capture_percent=self.settings.capture_percent
            )
        wait_applied(self.admin_url, version, deadline_s=ROUTE_DEADLINE_S)
        log.info("model %s: canary share %.4g", model, share)

    @property
    def admin_url(self) -> str:
        return f"http://{self.settings.bind}:{self.settings.router_admin_port}"


class ReleaseFlow:
    """The steps of one model's release, from `shadowing` to the end."""

    def __init__(self, settings: Settings, spec: ModelSpec, ledger: Ledger) -> None:
        self.settings = settings
        self.spec = spec
        self.ledger = ledger
        self.serving = Serving(settings, ledger)
        self.store = Store(settings.store)

    def steps(self) -> dict[State, Step]:
        """The serving room's step of each state it does the work of."""
        return {
            State.SHADOWING: self.load_canary,
            State.RAMPING: self.ramp,
            State.AWAITING_APPROVAL: self.hold_stage,
            State.PROMOTING: self.promote,
            State.PROBATION: self.watch_probation,
        }

    def load_canary(self, episode: Episode) -> Outcome:
        """The canary pool loads the candidate; the router sends it nothing yet."""
        if moved := self._superseded(episode):
            return moved
        self.serving.reconcile(episode.model)
        first = self.spec.release.ramp[0]
        return Outcome(
            State.RAMPING,
            {"canary": episode.version, "served": "available", "share": first.share},
            {"stages": [_stage(0, first.share, None)]},
        )

    def ramp(self, episode: Episode) -> Outcome:
        """Starts the stage the episode is in, or judges it."""
        if moved := self._superseded(episode):
            return moved
        stages = list(episode.data["stages"])
        current = stages[-1]
        self.serving.reconcile(episode.model)
        if current["start"] is None:
            started = {**current, "start": utc_now().isoformat()}
            return Outcome(
                State.RAMPING,
                {"stage": current["index"], "share": current["share"]},
                {"stages": [*stages[:-1], started]},
            )
        return self._judge(episode, stages)
