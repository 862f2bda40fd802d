"""The reconcile step: what may happen to an episode next.

Airflow (or the command line) decides *when* a step runs; `advance` decides *what* may happen. It
reads the episode, runs the step of its state, and makes at most one transition, in one transaction
with its evidence. Calling it twice is harmless; a crash anywhere resumes, because a step's work is
an artifact that is published whole and found again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from perennial.errors import Conflict, NeedsHuman, Permanent
from perennial.ledger import ChampionMove, Episode, Ledger, utc_now
from perennial.states import EXPOSED, ON_TIMEOUT, OPEN, TIMEOUT, State

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a step found.

    Attributes:
        to: the next state, or None to stay (HOLD): nothing is written then.
        evidence: JSON; why. Becomes the event's evidence.
        data: JSON; merged over the episode's data.
        champion: the champion's move that belongs to this transition.
        fence: why the episode's version is fenced by this transition.
    """

    to: State | None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    champion: ChampionMove | None = None
    fence: str | None = None


HOLD = Outcome(None)

Step = Callable[[Episode], Outcome]
"""Does the work of one state and says what it found. Idempotent: it may run again after a crash."""

Cleanup = Callable[[Episode], None]
"""Takes an ended candidate out of serving. Idempotent."""


def advance(
    ledger: Ledger,
    episode_id: str,
    steps: Mapping[State, Step],
    *,
    actor: str,
    guard: Step | None = None,
    cleanup: Cleanup | None = None,
    now: datetime | None = None,
) -> Episode:
    """Makes at most one transition of an episode.

    Args:
        steps: the step of each state that the caller can do. An episode in another state is
            returned as it is.
        guard: judged before the step in every state of `EXPOSED`; an outcome other than HOLD wins.
        cleanup: runs after a transition from an exposed state to an end, and again on any later
            call for such an ended episode until it has succeeded once.

    Returns:
        The episode after the transition, or unchanged.

    Raises:
        Retryable: the step could not be done now; nothing was written.
        Conflict: `lease.held`: somebody else is doing this step; or `episode.moved`.
    """
    episode = ledger.episode(episode_id)
    if not episode.is_open:
        return _clean(ledger, episode, cleanup)
    now = now or utc_now()
    if now - episode.state_since > TIMEOUT[episode.state]:
        ended = ledger.transition(
            episode,
            ON_TIMEOUT[episode.state],
            actor=actor,
            evidence={"reason": "timeout", "after_s": TIMEOUT[episode.state].total_seconds()},
            fence="timed out in " + episode.state if episode.state in EXPOSED else None,
        )
        return _clean(ledger, ended, cleanup)
    step = steps.get(episode.state)
    if step is None and guard is None:
        return episode
    with ledger.lease(f"{episode.id}/{episode.state}"):
        outcome = HOLD
        try:
            if guard is not None and episode.state in EXPOSED:
                outcome = guard(episode)
            if outcome.to is None and step is not None:
                outcome = step(episode)
        except (Permanent, NeedsHuman) as error:
            outcome = Outcome(
                State.FAILED,
                {"error": error.as_dict()},
                fence=f"failed in {episode.state}" if episode.state in EXPOSED else None,
            )
        if outcome.to is None:
            return episode
        moved = ledger.transition(
            episode,
            outcome.to,
            actor=actor,
            evidence=outcome.evidence,
            data=outcome.data,
            champion=outcome.champion,
            fence=outcome.fence,
        )
    log.info("episode %s: %s -> %s", episode.id, episode.state, moved.state)
    return moved if moved.is_open else _clean(ledger, moved, cleanup)


def _clean(ledger: Ledger, episode: Episode, cleanup: Cleanup | None) -> Episode:
    """Runs the clean-up of an ended episode; its own failure leaves it for the next call."""
    if cleanup is not None:
        cleanup(episode)
    return episode


def end(
    ledger: Ledger,
    episode_id: str,
    to: State,
    *,
    actor: str,
    reason: str,
    evidence: Mapping[str, Any] | None = None,
    cleanup: Cleanup | None = None,
) -> Episode:
    """Ends an open episode from outside its steps: abort, fail, supersede, roll back.

    Args:
        to: a terminal state that the transition table allows from where the episode stands.
        reason: why, in the operator's or the error's words; must not be empty.

    Raises:
        Permanent: `episode.no_reason`, `episode.ended` or `episode.transition`.
        Conflict: `episode.moved` three times in a row.
    """
    if not reason.strip():
        raise Permanent("episode.no_reason", "a reason is needed", hint="give --reason TEXT")
    for attempt in range(3):
        episode = ledger.episode(episode_id)
        if episode.state is to:
            return _clean(ledger, episode, cleanup)
        if episode.state not in OPEN:
            raise Permanent(
                "episode.ended", f"episode {episode_id} has already ended: {episode.state}"
            )
        try:
            ended = ledger.transition(
                episode,
                to,
                actor=actor,
                evidence={"reason": reason, **(evidence or {})},
                fence=reason if episode.state in EXPOSED else None,
            )
        except Conflict:
            if attempt == 2:
                raise
            continue
        return _clean(ledger, ended, cleanup)
    raise AssertionError("unreachable")


def override(ledger: Ledger, episode_id: str, *, actor: str, reason: str) -> Episode:
    """Takes a rejected candidate past the gate, on a person's word.

    Raises:
        Permanent: `episode.no_reason`; `episode.not_rejected`; `episode.no_candidate` when it was
            rejected before a candidate was trained.
        Conflict: `episode.in_flight` when the model has another open episode.
    """
    if not reason.strip():
        raise Permanent("episode.no_reason", "an override needs a reason", hint="--reason TEXT")
    episode = ledger.episode(episode_id)
    if episode.state is not State.REJECTED:
        raise Permanent(
            "episode.not_rejected",
            f"episode {episode_id} is {episode.state}; only a rejected one can be overridden",
        )
    rejected = ledger.events(episode_id)[-1]
    if rejected.from_state not in (State.EVALUATING, State.EXPORTING):
        raise Permanent(
            "episode.no_candidate",
            f"episode {episode_id} was rejected in {rejected.from_state}: there is no candidate",
            hint="mend the data and retrain: `perennial retrain MODEL --reason …`",
        )
    return ledger.transition(
        episode,
        State.EXPORTING,
        actor=actor,
        evidence={"override": reason, "rejected": dict(rejected.evidence)},
        data={"override": {"actor": actor, "reason": reason}},
        override=True,
    )
