"""The policy between a breach and a retrain, by examples and by properties."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitoring.policy import WEEK, PastEpisode, decide
from monitoring.thresholds import ThresholdState, Verdict
from perennial.spec import RetrainPolicy, Threshold

NOW = datetime(2026, 3, 1, tzinfo=UTC)
DAY, HOUR = timedelta(days=1), timedelta(hours=1)
POLICY = RetrainPolicy(cooldown=DAY, max_per_week=3, min_new_labels=1000)


def state(
    verdict: Verdict = Verdict.BREACHED, *, name: str = "quality", action: str = "retrain"
) -> ThresholdState:
    threshold = Threshold(name=name, metric="log_loss", above=0.5, action=action)  # type: ignore[arg-type]
    return ThresholdState(threshold, verdict, 0.6, 0.5, 5000, "log_loss 0.6, bound 0.5")


def decision(*states: ThresholdState, history: tuple[PastEpisode, ...] = (), **given_: Any) -> Any:
    arguments = {"now": NOW, "new_matured_labels": 5000, "open_episode": None, **given_}
    return decide(POLICY, history, states or (state(),), **arguments)


def past(ago: timedelta, *thresholds: str, lasted: timedelta = HOUR, cleared: bool = False) -> Any:
    names = frozenset(thresholds)
    ended = NOW - ago + lasted
    return PastEpisode(NOW - ago, ended, names, names if cleared else frozenset())


def test_a_breach_with_enough_labels_and_nothing_in_the_way() -> None:
    found = decision()
    assert found.retrain
    assert found.because == ("quality: log_loss 0.6, bound 0.5",)
    assert found.thresholds == ("quality",)
    assert found.against == ()


@pytest.mark.parametrize("verdict", [Verdict.OK, Verdict.NO_DATA])
def test_what_is_not_breached_asks_for_nothing(verdict: Verdict) -> None:
    found = decision(state(verdict), new_matured_labels=0)
    assert (found.retrain, found.because, found.against) == (False, (), ())


def test_a_threshold_that_pages_never_retrains() -> None:
    assert not decision(state(action="page")).retrain


@pytest.mark.parametrize(
    ("given_", "rule"),
    [
        ({"open_episode": "trips-1"}, "in flight: episode trips-1"),
        ({"history": (past(23 * HOUR),)}, "cooldown: the last episode began 23h ago"),
        ({"history": (past(2 * DAY), past(3 * DAY), past(4 * DAY))}, "budget: 3 episodes"),
        ({"new_matured_labels": 999}, "labels: 999 new"),
    ],
)
def test_each_rule_can_say_no(given_: dict[str, Any], rule: str) -> None:
    found = decision(**given_)
    assert not found.retrain
    [against] = found.against
    assert against.startswith(rule)
    assert found.because


def test_all_that_speaks_against_it_is_said() -> None:
    found = decision(history=(past(HOUR),) * 3, new_matured_labels=0, open_episode="trips-1")
    assert [said.split(":")[0] for said in found.against] == [
        "in flight",
        "cooldown",
        "budget",
        "labels",
    ]


def test_an_answered_breach_waits_from_the_end_of_its_episode() -> None:
    """A release may last longer than the cooldown: its end is not a new breach."""
    long = past(10 * DAY, "quality", lasted=10 * DAY - HOUR)
    assert decision(history=(long,)).against[0].startswith("hysteresis")
    other = state(name="drift")
    assert decision(state(), other, history=(long,)).retrain
    cleared = past(10 * DAY, "quality", lasted=10 * DAY - HOUR, cleared=True)
    assert decision(history=(cleared,)).retrain
    ended_before = past(10 * DAY, "quality", lasted=8 * DAY)
    assert decision(history=(ended_before,)).retrain


STATES = st.builds(
    lambda verdict, name, action: state(verdict, name=name, action=action),
    st.sampled_from(Verdict),
    st.sampled_from(["quality", "stale", "drift"]),
    st.sampled_from(["retrain", "page"]),
)
HISTORY = st.lists(
    st.builds(
        lambda ago, share, names: PastEpisode(
            NOW - timedelta(hours=ago),
            NOW - timedelta(hours=ago * share),
            names,
        ),
        st.floats(0, 400),
        st.floats(0, 1),
        st.frozensets(st.sampled_from(["quality", "stale", "drift"])),
    ),
    max_size=6,
)
POLICIES = st.builds(
    RetrainPolicy,
    cooldown=st.integers(0, 10**6).map(lambda s: timedelta(seconds=s)),
    max_per_week=st.integers(1, 5),
    min_new_labels=st.integers(0, 2000),
)
OPEN = st.none() | st.just("trips-1")


@given(POLICIES, HISTORY, st.lists(STATES, max_size=4), st.integers(0, 3000), OPEN)
def test_a_yes_breaks_no_rule(
    policy: RetrainPolicy, history: Any, states: Any, labels: int, open_: str | None
) -> None:
    found = decide(policy, history, states, now=NOW, new_matured_labels=labels, open_episode=open_)
    asking = [s for s in states if s.state is Verdict.BREACHED and s.threshold.action == "retrain"]
    assert bool(found.because) == bool(asking)
    if not asking:
        assert not found.retrain
        assert not found.against
        return
    assert found.retrain == (not found.against)
    if found.retrain:
        assert open_ is None
        assert labels >= policy.min_new_labels
        assert all(NOW - one.started >= policy.cooldown for one in history)
        assert sum(NOW - one.started < WEEK for one in history) < policy.max_per_week


@given(POLICIES, HISTORY, st.lists(STATES, max_size=4), st.integers(0, 3000), OPEN, st.data())
def test_neither_order_nor_more_quiet_thresholds_change_it(
    policy: RetrainPolicy,
    history: Any,
    states: Any,
    labels: int,
    open_: str | None,
    data: st.DataObject,
) -> None:
    def retrain(history: Any, states: Any) -> bool:
        return decide(
            policy, history, states, now=NOW, new_matured_labels=labels, open_episode=open_
        ).retrain

    quiet = [state(Verdict.NO_DATA), state(Verdict.OK), state(action="page")]
    shuffled = data.draw(st.permutations(history))
    assert retrain(history, states) == retrain(shuffled, [*quiet, *states])


@given(POLICIES, HISTORY, st.lists(STATES, max_size=4), st.integers(0, 3000))
def test_less_reason_never_turns_a_no_into_a_yes(
    policy: RetrainPolicy, history: Any, states: Any, labels: int
) -> None:
    def retrain(states: Any, labels: int, open_: str | None = None) -> bool:
        return decide(
            policy, history, states, now=NOW, new_matured_labels=labels, open_episode=open_
        ).retrain

    if not retrain(states, labels):
        assert not retrain(states[1:], labels)
        assert not retrain(states, labels // 2)
        assert not retrain(states, labels, "trips-1")
