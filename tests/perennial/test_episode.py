"""Stories of the reconcile step: twice is harmless, a crash anywhere resumes."""

from datetime import timedelta

import pytest

from perennial.episode import HOLD, Outcome, advance, end, override
from perennial.errors import Conflict, Permanent, Retryable
from perennial.ledger import ChampionMove, utc_now
from perennial.states import TIMEOUT, State

PATH = {
    State.REQUESTED: State.COLLECTING,
    State.COLLECTING: State.VALIDATING,
    State.VALIDATING: State.TRAINING,
    State.TRAINING: State.EVALUATING,
    State.EVALUATING: State.EXPORTING,
    State.EXPORTING: State.SHADOWING,
    State.SHADOWING: State.RAMPING,
    State.RAMPING: State.PROMOTING,
    State.PROMOTING: State.PROBATION,
    State.PROBATION: State.PROMOTED,
}


def straight(ledger):
    """Steps that walk the whole path; each writes an artifact-like fact once."""

    def step(to):
        def run(episode):
            champion = None
            if to is State.PROBATION:
                ledger.allocate_version(episode.id)
                champion = ChampionMove(0, ledger.episode(episode.id).version, episode.id)
            return Outcome(to, {"to": to}, {f"did_{to}": True}, champion)

        return run

    return {state: step(to) for state, to in PATH.items()}


@pytest.fixture
def episode(ledger, flights):
    return ledger.open_episode(flights, actor="t", trigger={"kind": "manual"})


def drive(ledger, episode_id, steps, until=None, limit=40):
    for _ in range(limit):
        episode = advance(ledger, episode_id, steps, actor="t")
        if episode.state is until or not episode.is_open:
            return episode
    raise AssertionError(f"still {episode.state}")


def test_the_straight_path_is_one_event_per_transition(ledger, episode):
    done = drive(ledger, episode.id, straight(ledger))
    assert done.state is State.PROMOTED
    assert [e.to_state for e in ledger.events(episode.id)] == [State.REQUESTED, *PATH.values()]
    assert ledger.verify_history(episode.id) == len(PATH) + 1
    assert ledger.champion("flights").version == 1


@pytest.mark.parametrize("crash_at", list(PATH))
@pytest.mark.parametrize("when", ["before", "after the work"])
def test_a_crash_between_any_two_steps_resumes(ledger, episode, crash_at, when):
    steps = straight(ledger)
    real, crashed = steps[crash_at], []

    def crashing(episode):
        if crashed:
            return real(episode)
        crashed.append(True)
        if when == "after the work":
            real(episode)
        raise KeyboardInterrupt

    steps[crash_at] = crashing
    with pytest.raises(KeyboardInterrupt):
        drive(ledger, episode.id, steps)
    assert ledger.episode(episode.id).state is crash_at
    assert drive(ledger, episode.id, steps).state is State.PROMOTED
    assert ledger.verify_history(episode.id) == len(PATH) + 1


def test_holding_writes_nothing(ledger, episode):
    before = ledger.episode(episode.id)
    assert advance(ledger, episode.id, {State.REQUESTED: lambda e: HOLD}, actor="t") == before


def test_a_retryable_error_writes_nothing_and_a_permanent_one_ends(ledger, episode):
    def away(_):
        raise Retryable("x.away", "away")

    def broken(_):
        raise Permanent("x.broken", "broken", hint="mend it", rows=3)

    with pytest.raises(Retryable):
        advance(ledger, episode.id, {State.REQUESTED: away}, actor="t")
    assert ledger.episode(episode.id).revision == 1
    failed = advance(ledger, episode.id, {State.REQUESTED: broken}, actor="t")
    assert failed.state is State.FAILED
    assert ledger.events(episode.id)[-1].evidence["error"]["hint"] == "mend it"


def test_a_guard_wins_over_the_step_in_every_exposed_state(ledger, episode):
    steps = straight(ledger)
    drive(ledger, episode.id, steps, until=State.RAMPING)
    ledger.allocate_version(episode.id)
    cleaned = []
    ended = advance(
        ledger,
        episode.id,
        steps,
        actor="t",
        guard=lambda e: Outcome(State.ROLLED_BACK, {"errors": 9}, fence="errors"),
        cleanup=lambda e: cleaned.append(e.state),
    )
    assert ended.state is State.ROLLED_BACK
    assert ledger.fences("flights") == {1: "errors"}
    assert cleaned == [State.ROLLED_BACK]
    advance(ledger, episode.id, steps, actor="t", cleanup=lambda e: cleaned.append("again"))
    assert cleaned[-1] == "again"


def test_every_state_times_out(ledger, episode):
    later = utc_now() + TIMEOUT[State.REQUESTED] + timedelta(seconds=1)
    ended = advance(ledger, episode.id, {}, actor="t", now=later)
    assert ended.state is State.FAILED
    assert ledger.events(episode.id)[-1].evidence["reason"] == "timeout"


def test_two_drivers_do_not_do_one_step_twice(ledger, episode):
    def nested(_):
        with pytest.raises(Conflict, match="being done by"):
            advance(ledger, episode.id, {State.REQUESTED: lambda e: HOLD}, actor="other")
        return Outcome(State.COLLECTING)

    assert (
        advance(ledger, episode.id, {State.REQUESTED: nested}, actor="t").state is State.COLLECTING
    )


def test_an_abort_during_a_step_wins(ledger, episode):
    def slow(_):
        end(ledger, episode.id, State.ABORTED, actor="ann", reason="changed my mind")
        return Outcome(State.COLLECTING)

    with pytest.raises(Conflict):
        advance(ledger, episode.id, {State.REQUESTED: slow}, actor="t")
    assert ledger.episode(episode.id).state is State.ABORTED
    with pytest.raises(Permanent, match="already ended"):
        end(ledger, episode.id, State.FAILED, actor="t", reason="late")


def test_an_override_needs_a_reason_and_a_candidate(ledger, episode):
    steps = straight(ledger)
    with pytest.raises(Permanent, match="only a rejected"):
        override(ledger, episode.id, actor="ann", reason="please")
    drive(ledger, episode.id, steps, until=State.EVALUATING)
    steps[State.EVALUATING] = lambda e: Outcome(State.REJECTED, {"reason": "gate"})
    drive(ledger, episode.id, steps)
    with pytest.raises(Permanent, match="needs a reason"):
        override(ledger, episode.id, actor="ann", reason=" ")
    moved = override(ledger, episode.id, actor="ann", reason="drill")
    assert moved.state is State.EXPORTING
    assert moved.data["override"] == {"actor": "ann", "reason": "drill"}


def test_data_that_was_rejected_cannot_be_overridden(ledger, episode):
    steps = straight(ledger)
    steps[State.VALIDATING] = lambda e: Outcome(State.REJECTED, {"reason": "data_invalid"})
    drive(ledger, episode.id, steps)
    with pytest.raises(Permanent, match="no candidate"):
        override(ledger, episode.id, actor="ann", reason="I know better")
