"""The training room's steps in an episode: what ends it, and what does not touch the champion."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perennial.episode import advance
from perennial.ledger import Ledger, utc_now
from perennial.settings import Settings
from perennial.states import State
from perennial.store import Store, is_published
from tests.support.training import SECRET, clicks, write_model
from training.history import import_history
from training.steps import steps


def run(ledger: Ledger, settings: Settings, spec, until: State):
    episode = ledger.open_episode(spec, actor="test", trigger={"kind": "test"})
    while episode.is_open and episode.state is not until:
        before = episode
        episode = advance(ledger, episode.id, steps(settings, spec, ledger), actor="test")
        assert episode != before
    return episode


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings(home=tmp_path, models_dir=tmp_path / "models")


def test_without_matured_labels_the_episode_fails_and_says_why(ledger, settings):
    spec = write_model(settings.models_dir)
    failed = run(ledger, settings, spec, State.TRAINING)
    assert failed.state is State.FAILED
    error = ledger.events(failed.id)[-1].evidence["error"]
    assert error["code"] == "collect.no_matured_labels"
    assert error["hint"]
    assert ledger.champion(spec.name) is None


def test_data_that_the_suite_rejects_is_never_trained_on(ledger, settings):
    refuse = {
        "type": "expect_column_values_to_be_between",
        "kwargs": {"column": "amount", "min_value": 1000, "mostly": 0.99},
        "severity": "critical",
    }
    spec = write_model(settings.models_dir, expectations=[refuse])
    store = Store(settings.store)
    import_history(spec, store, clicks(3000, start=utc_now() - timedelta(days=2)), secret=SECRET)
    rejected = run(ledger, settings, spec, State.TRAINING)
    assert rejected.state is State.REJECTED
    evidence = ledger.events(rejected.id)[-1].evidence
    assert evidence["reason"] == "data_invalid"
    assert evidence["critical_failures"]
    assert not is_published(store.snapshot(spec.name, rejected.id))
    assert ledger.champion(spec.name) is None


def test_good_data_reaches_training(ledger, settings):
    spec = write_model(settings.models_dir)
    import_history(
        spec,
        Store(settings.store),
        clicks(3000, start=utc_now() - timedelta(days=2)),
        secret=SECRET,
    )
    episode = run(ledger, settings, spec, State.TRAINING)
    assert episode.state is State.TRAINING
    first, last = (ledger.events(episode.id)[i] for i in (1, -1))
    assert first.to_state is State.COLLECTING
    assert last.evidence["quarantined"] >= 0
