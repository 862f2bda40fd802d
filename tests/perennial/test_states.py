"""Properties of the transition table."""

import pytest

from perennial.states import EXPOSED, ON_TIMEOUT, OPEN, TERMINAL, TIMEOUT, TRANSITIONS, State


def test_every_state_is_in_the_table():
    assert set(TRANSITIONS) == set(State)
    assert set(State) == OPEN | TERMINAL
    assert not OPEN & TERMINAL


@pytest.mark.parametrize("state", sorted(OPEN))
def test_every_open_state_has_a_timeout_and_ways_out(state):
    assert TIMEOUT[state].total_seconds() > 0
    assert ON_TIMEOUT[state] in TRANSITIONS[state] & TERMINAL
    assert {State.ABORTED, State.FAILED} <= TRANSITIONS[state]


@pytest.mark.parametrize("state", sorted(EXPOSED))
def test_every_exposed_state_has_a_guardrail_edge(state):
    assert State.ROLLED_BACK in TRANSITIONS[state]


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_ends_are_ends_but_on_a_persons_word(state):
    words = {State.REJECTED: {State.EXPORTING}, State.PROMOTED: {State.ROLLED_BACK}}
    assert TRANSITIONS[state] == words.get(state, set())


def test_promotion_is_reached_only_through_probation_and_evidence_or_no_champion():
    into = {s for s, nexts in TRANSITIONS.items() if State.PROMOTED in nexts}
    assert into == {State.PROBATION}
    into = {s for s, nexts in TRANSITIONS.items() if State.PROMOTING in nexts}
    assert into == {State.EXPORTING, State.RAMPING, State.AWAITING_APPROVAL}


def test_every_state_can_be_reached_and_can_end():
    reached, frontier = {State.REQUESTED}, {State.REQUESTED}
    while frontier:
        frontier = {n for s in frontier for n in TRANSITIONS[s]} - reached
        reached |= frontier
    assert reached == set(State)
