"""Reconciles serving with the ledger.

What the pools and the router should be is a pure function of the ledger (`desired`); `Serving`
makes it so, again and again. Nothing else changes a pool or a route, so that a kill between any two
lines is mended by the next call.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perennial.ledger import Champion, Episode, Ledger
from perennial.settings import Settings
from perennial.spec import ModelSpec, load_spec
from perennial.states import State
from perennial.store import Store
from serving.router.envoy import admin_url
from serving.router.routes import (
    ModelRouting,
    read_routes,
    route_options,
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
        is_shadowed: whether calls are mirrored to the canary.
    """

    stable: tuple[int, ...]
    canary: tuple[int, ...]
    stable_label: int | None
    share: float
    salt: str
    is_shadowed: bool = False


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
        is_shadowed=bool(canary) and episode is not None and episode.state is State.SHADOWING,
    )


def _only(versions: tuple[int, ...]) -> int:
    return versions[0] if len(versions) == 1 else 0


class Serving:
    """Makes the pools and the router what the ledger says.

    Args:
        spec: of the model that will be reconciled; None: read from its folder when it is needed.
    """

    def __init__(self, settings: Settings, ledger: Ledger, spec: ModelSpec | None = None) -> None:
        self.settings = settings
        self._spec = spec
        self.ledger = ledger
        self.store = Store(settings.store)
        self._stable = Actuator(stable_pool(settings))
        self._canary = Actuator(canary_pool(settings))

    def desired(self, model: str) -> Desired:
        return desired(self.ledger.champion(model), self.ledger.open_episode_of(model))

    def reconcile(self, model: str, *, deadline_s: float = LOAD_DEADLINE_S) -> Desired:
        """Makes serving what the ledger says; returns what that is.

        A share is lowered before a pool changes and raised after, so that no request is sent to a
        version that is not loaded. Calls are mirrored once the canary is loaded. While a pool
        changes, the routes name no version.

        Raises:
            Retryable: `pool.unreachable`, `pool.not_available`, `router.unreachable`.
            Permanent: `pool.load_failed`, with the server's own message.
        """
        want = self.desired(model)
        share = want.share if want.canary else 0.0
        declared = read_routes(routes_path(self.settings)).models.get(model)
        if (
            declared is None
            or declared.share > share
            or (declared.shadow_percent and not want.canary)
        ):
            self._route(model, ModelRouting(share, want.salt))
        stable_label = want.stable_label or max(want.stable, default=0)
        self._apply(self._stable, model, want.stable, stable_label, deadline_s)
        self._apply(self._canary, model, want.canary, max(want.canary, default=0), deadline_s)
        self._route(model, self._routing(model, want))
        return want

    def _routing(self, model: str, want: Desired) -> ModelRouting:
        percent = 0
        if want.is_shadowed:
            spec = self._spec
            if spec is None or spec.name != model:
                spec = load_spec(self.settings.models_dir / model, self.settings.profile)
            percent = spec.release.shadow_percent
        return ModelRouting(want.share, want.salt, percent, _only(want.stable), _only(want.canary))

    def _apply(
        self,
        pool: Actuator,
        model: str,
        versions: tuple[int, ...],
        labelled: int,
        deadline_s: float,
    ) -> None:
        """The pool holds exactly these versions; nothing is reloaded when it does already."""
        base_path = str(self.store.versions(model))
        wanted = (
            ModelAssignment(base_path, versions, {pool.pool.name: labelled}) if versions else None
        )
        if pool.declared().get(model) == wanted and all(
            served.is_exactly(wanted) for served in pool.served(model)
        ):
            return
        declared = read_routes(routes_path(self.settings)).models.get(model)
        if declared is not None:
            self._route(model, replace(declared, stable_version=0, canary_version=0))
        pool.apply(model, wanted, deadline_s=deadline_s)

    def cut_canary(self, model: str) -> None:
        """Takes the canary's share to 0 at once, before anything else is done."""
        self._route(model, ModelRouting(0.0, IDLE_SALT))

    def share(self, model: str) -> float:
        """The canary's share as the routes on disk say."""
        routing = read_routes(routes_path(self.settings)).models.get(model)
        return routing.share if routing else 0.0

    def write_routes(self, models: Sequence[str]) -> None:
        """Writes the routes of all models under care, as the ledger wants them.

        For the start of a stack, before a router runs: nothing is waited for.
        """
        routing = {
            # What the pools serve is not known before the first reconciliation.
            model: replace(
                self._routing(model, self.desired(model)), stable_version=0, canary_version=0
            )
            for model in models
        }
        write_routes(routes_path(self.settings), routing, **route_options(self.settings))

    def _route(self, model: str, routing: ModelRouting) -> None:
        path = routes_path(self.settings)
        # Several models' releases share one file; a lost update would undo another's share.
        with path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            declared = read_routes(path).models
            if declared.get(model) == routing:
                return
            version = write_routes(
                path, {**declared, model: routing}, **route_options(self.settings)
            )
        wait_applied(self.admin_url, version, deadline_s=ROUTE_DEADLINE_S)
        log.info(
            "model %s: canary share %.4g, %d %% mirrored",
            model,
            routing.share,
            routing.shadow_percent,
        )

    @property
    def admin_url(self) -> str:
        return admin_url(self.settings)
