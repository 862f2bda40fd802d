"""What serving should be is a function of the ledger alone."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perennial.ledger import Champion, Episode
from perennial.states import OPEN, State
from serving.reconcile import IDLE_SALT, desired

NOW = datetime(2026, 11, 30, tzinfo=UTC)


def champion(version=3, previous=2):
    return Champion("m", 5, version, "e3", previous, "e2" if previous else None, NOW)


def episode(state, version=4, champion_at_start=3, share=0.25):
    return Episode(
        id="e4",
        model="m",
        state=state,
        revision=9,
        champion_at_start=champion_at_start,
        version=version,
        spec_hash="",
        code_revision="",
        trigger={},
        params={},
        data={"stages": [{"share": 0.05}, {"share": share}]},
        created=NOW,
        state_since=NOW,
        updated=NOW,
    )


@pytest.mark.parametrize(
    ("state", "stable", "canary", "share"),
    [
        (State.TRAINING, (3,), (), 0.0),
        (State.SHADOWING, (3,), (4,), 0.0),
        (State.RAMPING, (3,), (4,), 0.25),
        (State.AWAITING_APPROVAL, (3,), (4,), 0.25),
        (State.PROMOTING, (3, 4), (4,), 0.25),
    ],
)
def test_a_candidate_on_its_way(state, stable, canary, share):
    want = desired(champion(), episode(state))
    assert (want.stable, want.canary, want.share, want.stable_label) == (stable, canary, share, 3)
    assert want.salt == "e4"
    assert want.is_shadowed == (state is State.SHADOWING)


def test_in_probation_the_way_back_stays_loaded():
    want = desired(champion(version=4, previous=3), episode(State.PROBATION))
    assert (want.stable, want.canary, want.share, want.stable_label) == ((3, 4), (), 0.0, 4)


def test_nobody_on_the_way():
    want = desired(champion(), None)
    assert (want.stable, want.canary, want.share, want.salt) == ((3,), (), 0.0, IDLE_SALT)
    assert desired(None, None).stable == ()


def test_the_first_version_needs_no_canary():
    want = desired(None, episode(State.PROMOTING, version=1, champion_at_start=None))
    assert (want.stable, want.canary, want.share) == ((1,), (), 0.0)


@given(
    st.sampled_from(sorted(OPEN)),
    st.sampled_from([None, 1, 4]),
    st.sampled_from([None, 3]),
    st.booleans(),
    st.floats(0.001, 0.5),
)
def test_nobody_is_sent_to_what_is_not_loaded(state, version, at_start, has_champion, share):
    want = desired(champion() if has_champion else None, episode(state, version, at_start, share))
    if want.share:
        assert want.canary
        assert state in (State.RAMPING, State.AWAITING_APPROVAL, State.PROMOTING)
    if want.is_shadowed:
        assert want.canary
        assert not want.share
    if has_champion:
        assert 3 in want.stable
        assert want.stable_label in want.stable
