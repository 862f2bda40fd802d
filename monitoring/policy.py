"""Between a breach and a retrain: a pure function that says why, and why not.

A retrain costs compute and attention and puts a new model before users; a breach is a reason to
consider it, not a decision. All rules are evaluated, so that the record names every one that speaks
against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from monitoring.thresholds import ThresholdState, Verdict
from perennial.durations import format_duration
from perennial.spec import RetrainPolicy

WEEK: Final = timedelta(weeks=1)


@dataclass(frozen=True)
class PastEpisode:
    """An episode that was, for the policy.

    Attributes:
        started: when it was opened; `ended`: when it came to its end, None while it is open.
        thresholds: names whose breach asked for it; empty for a manual one.
        cleared: those of them that were seen without a breach since it ended.
    """

    started: datetime
    ended: datetime | None
    thresholds: frozenset[str] = frozenset()
    cleared: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Decision:
    """Whether to retrain.

    Attributes:
        because: breaches that ask for it, one sentence each.
        against: what speaks against it, one sentence each; empty exactly if `retrain` or if
            nothing asks for it.
        thresholds: names of the breached thresholds in `because`.
    """

    retrain: bool
    because: tuple[str, ...]
    against: tuple[str, ...]
    thresholds: tuple[str, ...]


def decide(
    policy: RetrainPolicy,
    history: Sequence[PastEpisode],
    states: Sequence[ThresholdState],
    *,
    now: datetime,
    new_matured_labels: int,
    open_episode: str | None,
) -> Decision:
    """Decides from what is known now; the same arguments give the same answer.

    Only a breached threshold whose action is `retrain` asks for one. No data never does, and
    neither does a threshold that pages.

    Args:
        history: the model's episodes, in any order; those of the last week suffice, and the last.
        new_matured_labels: matured, labelled rows since the champion's data.
        open_episode: id of the episode in flight, or None.
    """
    asking = [s for s in states if s.state is Verdict.BREACHED and s.threshold.action == "retrain"]
    against = []
    fresh = [state for state in asking if not _answered(policy, history, state.name, now)]
    if asking and not fresh:
        names = ", ".join(state.name for state in asking)
        against.append(
            f"hysteresis: an episode answered {names} already; it has not cleared since, and "
            f"{format_duration(policy.cooldown)} have not passed"
        )
    if open_episode is not None:
        against.append(f"in flight: episode {open_episode} is open")
    if history and (since := now - max(past.started for past in history)) < policy.cooldown:
        against.append(
            f"cooldown: the last episode began {_seconds(since)} ago, "
            f"{format_duration(policy.cooldown)} must pass"
        )
    this_week = sum(now - past.started < WEEK for past in history)
    if this_week >= policy.max_per_week:
        against.append(f"budget: {this_week} episodes in a week, {policy.max_per_week} are allowed")
    if new_matured_labels < policy.min_new_labels:
        against.append(
            f"labels: {new_matured_labels} new matured labels, {policy.min_new_labels} are needed"
        )
    because = tuple(f"{state.name}: {state.reason}" for state in asking)
    return Decision(
        retrain=bool(asking) and not against,
        because=because,
        against=tuple(against) if asking else (),
        thresholds=tuple(state.name for state in asking),
    )


def _answered(
    policy: RetrainPolicy, history: Sequence[PastEpisode], name: str, now: datetime
) -> bool:
    """Whether the last episode that this breach asked for ended within the cooldown, and the
    breach has not cleared since."""
    asked = [past for past in history if name in past.thresholds]
    if not asked:
        return False
    last = max(asked, key=lambda past: past.started)
    if last.ended is None:
        return True
    return name not in last.cleared and now - last.ended < policy.cooldown


def _seconds(value: timedelta) -> str:
    return format_duration(timedelta(seconds=round(value.total_seconds())))
