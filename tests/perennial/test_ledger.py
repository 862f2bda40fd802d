"""The ledger: compare-and-set, one open episode, a history that can be verified."""

from datetime import timedelta
from threading import Barrier, Thread

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, text

from perennial.errors import Conflict, Permanent, Retryable
from perennial.ledger import ChampionMove, Ledger, utc_now
from perennial.states import State


def open_episode(ledger, spec, **kwargs):
    return ledger.open_episode(
        spec, actor="test", trigger={"kind": "manual", "reasons": ["test"]}, **kwargs
    )


def walk(ledger, episode, *states, **kwargs):
    for state in states:
        episode = ledger.transition(episode, state, actor="test", evidence={}, **kwargs)
    return episode


TO_PROMOTING = (
    State.COLLECTING,
    State.VALIDATING,
    State.TRAINING,
    State.EVALUATING,
    State.EXPORTING,
    State.PROMOTING,
)


def test_an_episode_keeps_its_history(ledger, flights):
    episode = open_episode(ledger, flights)
    episode = ledger.transition(
        episode,
        State.COLLECTING,
        actor="ann",
        evidence={"rows": 7, "loss": float("nan")},
        data={"a": 1},
    )
    assert episode.data == {"a": 1}
    events = ledger.events(episode.id)
    assert [(e.seq, e.from_state, e.to_state) for e in events] == [
        (1, State.REQUESTED, State.REQUESTED),
        (2, State.REQUESTED, State.COLLECTING),
    ]
    assert events[1].evidence == {"rows": 7, "loss": "nan"}
    assert ledger.verify_history(episode.id) == 2


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("xyz"), JSON))
@example({"x": -0.0, "y": 1e22, "z": 5e-324})
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_evidence_keeps_the_history_whole(ledger, flights, evidence):
    episode = open_episode(ledger, flights)
    ledger.transition(episode, State.ABORTED, actor="a", evidence=evidence)
    assert ledger.verify_history(episode.id) == 2


@pytest.mark.parametrize(
    "tampering",
    [
        "UPDATE events SET actor = 'nobody' WHERE seq = 2",
        "UPDATE events SET evidence = '{}' WHERE seq = 2",
        "DELETE FROM events WHERE seq = 3",
        "DELETE FROM events WHERE seq = 2",
    ],
)
def test_a_changed_history_is_found(ledger, ledger_url, flights, tampering):
    episode = open_episode(ledger, flights)
    episode = ledger.transition(episode, State.COLLECTING, actor="a", evidence={"n": 1})
    episode = ledger.transition(episode, State.VALIDATING, actor="a", evidence={"n": 2})
    engine = create_engine(ledger_url)
    with engine.begin() as connection:
        connection.execute(text(tampering))
    engine.dispose()
    with pytest.raises(Permanent, match="history"):
        ledger.verify_history(episode.id)


def test_one_open_episode_per_model(ledger, flights):
    first = open_episode(ledger, flights)
    with pytest.raises(Conflict, match=first.id):
        open_episode(ledger, flights)
    ledger.transition(first, State.ABORTED, actor="ann", evidence={})
    open_episode(ledger, flights)


def test_the_same_trigger_twice_is_one_episode(ledger, flights):
    key = ("quality", "2026-11-30T00:00")
    first = open_episode(ledger, flights, trigger_key=key)
    assert open_episode(ledger, flights, trigger_key=key).id == first.id
    assert [t.episode_id for t in ledger.triggers("flights")] == [first.id]


def test_suppressed_triggers_are_kept_once_per_window(ledger):
    assert ledger.record_suppressed("flights", "quality", "w1", {"no": ["cooldown"]})
    assert not ledger.record_suppressed("flights", "quality", "w1", {"no": ["cooldown"]})
    assert [t.fired for t in ledger.triggers("flights")] == [False]


def test_a_stale_revision_writes_nothing(ledger, flights):
    stale = open_episode(ledger, flights)
    ledger.transition(stale, State.COLLECTING, actor="a", evidence={})
    with pytest.raises(Conflict, match="no longer at revision"):
        ledger.transition(stale, State.COLLECTING, actor="b", evidence={}, data={"b": 1})
    assert ledger.episode(stale.id).data == {}


def test_a_forbidden_transition_is_refused(ledger, flights):
    episode = open_episode(ledger, flights)
    with pytest.raises(Permanent, match="cannot become promoted"):
        ledger.transition(episode, State.PROMOTED, actor="a", evidence={})


def test_two_episodes_never_promote_over_each_other(ledger, flights):
    episode = walk(ledger, open_episode(ledger, flights), *TO_PROMOTING)
    ledger.allocate_version(episode.id)
    move = ChampionMove(0, 1, episode.id)
    moved = ledger.transition(episode, State.PROBATION, actor="a", evidence={}, champion=move)
    walk(ledger, moved, State.PROMOTED)
    second = walk(ledger, open_episode(ledger, flights), *TO_PROMOTING)
    with pytest.raises(Conflict, match="champion is at revision 1, not 0"):
        ledger.transition(
            second,
            State.PROBATION,
            actor="a",
            evidence={},
            champion=ChampionMove(0, 2, second.id),
        )
    assert ledger.champion("flights").version == 1
    assert ledger.episode(second.id).state is State.PROMOTING


def champion_of(ledger, spec, version, revision):
    """An episode in probation whose version is the champion."""
    episode = walk(ledger, open_episode(ledger, spec), *TO_PROMOTING)
    assert ledger.allocate_version(episode.id) == version
    move = ChampionMove(revision, version, episode.id, {"log_loss": version / 10})
    return ledger.transition(
        ledger.episode(episode.id), State.PROBATION, actor="a", evidence={}, champion=move
    )


@pytest.mark.parametrize("end", [State.ROLLED_BACK, State.FAILED, State.ABORTED])
def test_a_champion_that_ends_badly_gives_way_to_the_one_before(ledger, flights, end):
    walk(ledger, champion_of(ledger, flights, 1, 0), State.PROMOTED)
    second = champion_of(ledger, flights, 2, 1)
    ledger.transition(second, end, actor="a", evidence={}, fence="bad")
    champion = ledger.champion("flights")
    assert (champion.version, champion.previous_version, champion.revision) == (1, 2, 3)
    assert champion.baseline == {"log_loss": 0.1}
    assert ledger.events(second.id)[-1].evidence == {"champion": "back to version 1"}


def test_the_first_champion_stays_when_there_is_none_before(ledger, flights):
    first = champion_of(ledger, flights, 1, 0)
    walk(ledger, first, State.FAILED)
    assert ledger.champion("flights").version == 1


def test_a_promoted_champion_is_rolled_back_only_on_a_persons_word(ledger, flights):
    walk(ledger, champion_of(ledger, flights, 1, 0), State.PROMOTED)
    second = walk(ledger, champion_of(ledger, flights, 2, 1), State.PROMOTED)
    with pytest.raises(Permanent, match="cannot become rolled_back"):
        walk(ledger, second, State.ROLLED_BACK)
    walk(ledger, second, State.ROLLED_BACK, override=True)
    assert ledger.champion("flights").version == 1


def test_versions_are_given_once_and_grow(ledger, flights):
    first = open_episode(ledger, flights)
    assert ledger.allocate_version(first.id) == ledger.allocate_version(first.id) == 1
    walk(ledger, ledger.episode(first.id), State.ABORTED)
    second = open_episode(ledger, flights)
    assert second.champion_at_start is None
    assert ledger.allocate_version(second.id) == 2


def test_a_fence_stands_with_the_transition_that_made_it(ledger, flights):
    episode = open_episode(ledger, flights)
    ledger.allocate_version(episode.id)
    ledger.transition(
        ledger.episode(episode.id), State.ABORTED, actor="a", evidence={}, fence="it is bad"
    )
    assert ledger.fences("flights") == {1: "it is bad"}


def test_only_one_of_many_racing_transitions_wins(ledger_url, flights):
    ledgers = [Ledger(ledger_url) for _ in range(4)]
    episode = open_episode(ledgers[0], flights)
    barrier, results = Barrier(4), []

    def race(ledger):
        barrier.wait()
        try:
            ledger.transition(episode, State.COLLECTING, actor="a", evidence={})
            results.append("won")
        except Conflict:
            results.append("lost")

    threads = [Thread(target=race, args=(ledger,)) for ledger in ledgers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["lost", "lost", "lost", "won"]
    assert ledgers[0].verify_history(episode.id) == 2
    for ledger in ledgers:
        ledger.close()


def test_a_lease_excludes_and_is_free_when_its_holder_stops_beating(ledger, ledger_url):
    with ledger.lease("job", term_s=60):
        with pytest.raises(Conflict, match="job is being done by"):
            with ledger.lease("job"):
                pass
    with ledger.lease("job"):
        engine = create_engine(ledger_url)
        with engine.begin() as connection:
            connection.execute(
                text("UPDATE leases SET heartbeat = :t"), {"t": utc_now() - timedelta(hours=1)}
            )
        engine.dispose()
        assert [name for name, _ in ledger.expired_leases()] == ["job"]
        with ledger.lease("job"):
            pass


def test_errors_say_what_to_do():
    with pytest.raises(Permanent, match="needs PostgreSQL"):
        Ledger("sqlite:///x.db")
    unreachable = Ledger("postgresql+psycopg2://postgres@127.0.0.1:1/perennial")
    with pytest.raises(Retryable, match="PERENNIAL_DATABASE_URL"):
        unreachable.champion("flights")
    unreachable.close()
