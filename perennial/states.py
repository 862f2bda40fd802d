"""The states of an episode, and which may follow which.

An episode is one attempt to improve one model, from the trigger to the last word on it. This
module is pure data: `perennial.episode.advance` moves along it, tests prove properties of it.
"""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum


class State(StrEnum):
    """Where an episode stands. The last word of the comment says who moves it on."""

    REQUESTED = "requested"
    """A trigger fired; nothing was done yet."""
    COLLECTING = "collecting"
    """Matured, labelled traffic is being joined."""
    VALIDATING = "validating"
    """The rows are being checked; bad ones are quarantined; the snapshot is written."""
    TRAINING = "training"
    """Workers train a candidate, from the champion's checkpoint if there is one."""
    EVALUATING = "evaluating"
    """The candidate meets the serving champion at the gate."""
    EXPORTING = "exporting"
    """The candidate becomes a SavedModel, is loaded in a fresh process, and is published."""
    SHADOWING = "shadowing"
    """The canary pool loads it; no user sees an answer of it."""
    RAMPING = "ramping"
    """Users see it, stage by stage, while the evidence grows."""
    AWAITING_APPROVAL = "awaiting_approval"
    """The evidence allows a promotion; a person is asked."""
    PROMOTING = "promoting"
    """The stable pool loads it beside the champion; traffic and records move over."""
    PROBATION = "probation"
    """It serves everybody; the old champion stays loaded for an instant way back."""
    PROMOTED = "promoted"
    """End: it is the champion."""
    REJECTED = "rejected"
    """End: the data or the gate said no. An operator may override the gate, with a reason."""
    ROLLED_BACK = "rolled_back"
    """End: the evidence or a person withdrew it; its version is fenced."""
    INCONCLUSIVE = "inconclusive"
    """End: the time allowed passed without a verdict; the champion stays."""
    SUPERSEDED = "superseded"
    """End: the champion moved meanwhile, or a newer episode took its place."""
    ABORTED = "aborted"
    """End: a person stopped it."""
    FAILED = "failed"
    """End: an error that retrying does not cure."""


TERMINAL = frozenset(
    {
        State.PROMOTED,
        State.REJECTED,
        State.ROLLED_BACK,
        State.INCONCLUSIVE,
        State.SUPERSEDED,
        State.ABORTED,
        State.FAILED,
    }
)
OPEN = frozenset(State) - TERMINAL

EXPOSED = frozenset(
    {
        State.SHADOWING,
        State.RAMPING,
        State.AWAITING_APPROVAL,
        State.PROMOTING,
        State.PROBATION,
    }
)
"""From here on the candidate is loaded somewhere: guardrails are judged, an end cleans up."""

_STOPS = frozenset({State.ABORTED, State.FAILED, State.SUPERSEDED})

TRANSITIONS: dict[State, frozenset[State]] = {
    State.REQUESTED: frozenset({State.COLLECTING}) | _STOPS,
    State.COLLECTING: frozenset({State.VALIDATING, State.REJECTED}) | _STOPS,
    State.VALIDATING: frozenset({State.TRAINING, State.REJECTED}) | _STOPS,
    State.TRAINING: frozenset({State.EVALUATING, State.REJECTED}) | _STOPS,
    State.EVALUATING: frozenset({State.EXPORTING, State.REJECTED}) | _STOPS,
    # Without a champion there is nobody to compare with: the first version goes straight on.
    State.EXPORTING: frozenset({State.SHADOWING, State.PROMOTING, State.REJECTED}) | _STOPS,
    State.SHADOWING: frozenset({State.RAMPING, State.ROLLED_BACK, State.INCONCLUSIVE}) | _STOPS,
    # A stage of the ramp is a step of its own: ramping follows ramping.
    State.RAMPING: frozenset(
        {
            State.RAMPING,
            State.AWAITING_APPROVAL,
            State.PROMOTING,
            State.ROLLED_BACK,
            State.INCONCLUSIVE,
        }
    )
    | _STOPS,
    State.AWAITING_APPROVAL: frozenset(
        {State.PROMOTING, State.ROLLED_BACK, State.INCONCLUSIVE} | _STOPS
    ),
    State.PROMOTING: frozenset({State.PROBATION, State.ROLLED_BACK}) | _STOPS,
    State.PROBATION: frozenset({State.PROMOTED, State.ROLLED_BACK}) | _STOPS,
    # Only on a person's word: an override of the gate, a rollback of the champion.
    State.REJECTED: frozenset({State.EXPORTING}),
    State.PROMOTED: frozenset({State.ROLLED_BACK}),
    **{state: frozenset() for state in TERMINAL - {State.REJECTED, State.PROMOTED}},
}
"""State -> states that may follow."""

TIMEOUT: dict[State, timedelta] = {
    State.REQUESTED: timedelta(hours=6),
    State.COLLECTING: timedelta(hours=6),
    State.VALIDATING: timedelta(hours=6),
    State.TRAINING: timedelta(hours=24),
    State.EVALUATING: timedelta(hours=6),
    State.EXPORTING: timedelta(hours=6),
    State.SHADOWING: timedelta(days=1),
    # The ramp's own limit is release.max_duration; this one catches a release nobody drives.
    State.RAMPING: timedelta(days=30),
    State.AWAITING_APPROVAL: timedelta(days=3),
    State.PROMOTING: timedelta(hours=6),
    State.PROBATION: timedelta(days=30),
}
"""State -> how long it may last before the episode ends by itself."""

ON_TIMEOUT: dict[State, State] = {
    state: State.INCONCLUSIVE
    if state in (State.SHADOWING, State.RAMPING, State.AWAITING_APPROVAL)
    else State.ROLLED_BACK
    if state in EXPOSED
    else State.FAILED
    for state in OPEN
}
"""State -> the end that its timeout leads to."""
