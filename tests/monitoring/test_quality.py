"""Quality on matured labels, against numpy on rows whose answer is known."""

from __future__ import annotations

import math
import random
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from monitoring.quality import CLIP, matured_labels_since, measure
from perennial.spec import ModelSpec
from perennial.store import Store
from tests.support.monitoring import Row, write_labels, write_log
from tests.support.traffic import add_model, make_settings

# The horizon of the small model is an hour.
NOW = datetime.now(UTC).replace(microsecond=0)
HOUR = timedelta(hours=1)
MATURED = HOUR + timedelta(minutes=10)
WINDOW = timedelta(hours=2)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return add_model(make_settings(tmp_path))


def test_the_metrics_are_numpys(spec: ModelSpec, store: Store) -> None:
    draw = random.Random(7)
    rows = [
        Row(f"r{n}", draw.random(), float(draw.random() < 0.3), MATURED, version=1 + n % 2)
        for n in range(500)
    ]
    write_log(spec, store, rows, NOW)
    found = measure(spec, store, window=WINDOW, now=NOW).versions
    assert set(found) == {1, 2}
    for version, quality in found.items():
        p = np.array([row.score for row in rows if row.version == version])
        y = np.array([row.label for row in rows if row.version == version])
        assert quality.metrics["log_loss"] == pytest.approx(
            -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))
        )
        assert quality.metrics["brier"] == pytest.approx(np.mean((p - y) ** 2))
        assert quality.metrics["mae"] == pytest.approx(np.mean(np.abs(p - y)))
        assert quality.base_rate == pytest.approx(y.mean())
        assert (quality.matured, quality.labelled, quality.coverage) == (250, 250, 1.0)


def test_only_matured_rows_of_the_window_count(spec: ModelSpec, store: Store) -> None:
    rows = [
        Row("young", 0.5, 1.0, HOUR - timedelta(seconds=1)),
        Row("newest", 0.5, 1.0, HOUR + timedelta(seconds=1)),
        Row("oldest", 0.5, 1.0, HOUR + WINDOW),
        Row("older", 0.5, 1.0, HOUR + WINDOW + timedelta(seconds=1)),
    ]
    write_log(spec, store, rows, NOW)
    quality = measure(spec, store, window=WINDOW, now=NOW).versions[1]
    assert quality.labelled == 2
    assert (quality.first, quality.last) == (NOW - rows[2].age, NOW - rows[1].age)


def test_nobodys_answers_do_not_count(spec: ModelSpec, store: Store) -> None:
    rows = [
        Row("shadow", 0.5, 1.0, MATURED, arm="shadow"),
        Row("history", 0.5, 1.0, MATURED, arm="history", version=0),
        Row("failed", None, 1.0, MATURED, status=14),
        Row("canary", 0.5, 1.0, MATURED, arm="canary", version=2),
    ]
    write_log(spec, store, rows, NOW)
    assert set(measure(spec, store, window=WINDOW, now=NOW).versions) == {2}


def test_a_confident_error_is_clipped(spec: ModelSpec, store: Store) -> None:
    write_log(spec, store, [Row("sure", 1.0, 0.0, MATURED)], NOW)
    quality = measure(spec, store, window=WINDOW, now=NOW).versions[1]
    assert quality.metrics["log_loss"] == pytest.approx(-math.log(CLIP), rel=1e-3)


def test_coverage_and_no_label_at_all(spec: ModelSpec, store: Store) -> None:
    rows = [Row(f"r{n}", 0.5, None, MATURED) for n in range(4)]
    write_log(spec, store, rows, NOW)
    quality = measure(spec, store, window=WINDOW, now=NOW).versions[1]
    assert quality.metrics == {"label_coverage": 0.0}
    assert quality.base_rate is None
    write_labels(spec, store, [("r0", 1.0, NOW)])
    quality = measure(spec, store, window=WINDOW, now=NOW).versions[1]
    assert (quality.labelled, quality.metrics["label_coverage"]) == (1, 0.25)


def test_of_labels_that_came_twice_the_last_received_counts(spec: ModelSpec, store: Store) -> None:
    write_log(spec, store, [Row("r", 0.9, 0.0, MATURED)], NOW)
    write_labels(spec, store, [("r", 1.0, NOW - timedelta(seconds=30))])
    found = measure(spec, store, window=WINDOW, now=NOW)
    assert found.versions[1].labelled == 1
    assert found.versions[1].base_rate == 1.0
    assert found.duplicates == 1


def test_a_window_is_judged_by_what_was_known_at_a_moment(spec: ModelSpec, store: Store) -> None:
    """A late correction changes today's view of the window, and not that of then."""
    write_log(spec, store, [Row("r", 0.9, 0.0, MATURED), Row("late", 0.5, None, MATURED)], NOW)
    told = NOW - MATURED + timedelta(minutes=90)
    write_labels(spec, store, [("r", 1.0, told), ("late", 1.0, told)])
    then = measure(spec, store, window=WINDOW, now=NOW)
    assert (then.versions[1].labelled, then.versions[1].base_rate) == (1, 0.0)
    assert (then.late, then.conflicting) == (0, 0)
    since = measure(spec, store, window=WINDOW, now=NOW, known_at=told)
    assert (since.versions[1].labelled, since.versions[1].base_rate) == (2, 1.0)
    assert (since.late, since.conflicting, since.duplicates) == (2, 1, 1)


def test_a_prediction_that_was_logged_twice_counts_once(spec: ModelSpec, store: Store) -> None:
    for _ in range(2):
        write_log(spec, store, [Row("r", 0.9, 1.0, MATURED)], NOW)
    assert measure(spec, store, window=WINDOW, now=NOW).versions[1].labelled == 1


def test_labels_of_unknown_ids_are_counted(spec: ModelSpec, store: Store) -> None:
    write_log(spec, store, [Row("r", 0.9, 1.0, MATURED)], NOW)
    write_labels(
        spec,
        store,
        [
            ("nobody", 1.0, NOW - timedelta(minutes=20)),
            ("recorder-lags", 1.0, NOW - timedelta(seconds=1)),
        ],
    )
    assert measure(spec, store, window=WINDOW, now=NOW).unknown == 1


def test_an_empty_log_is_no_quality(spec: ModelSpec, store: Store) -> None:
    found = measure(spec, store, window=WINDOW, now=NOW)
    assert (found.versions, found.unknown, found.duplicates) == ({}, 0, 0)


def test_new_labels_are_those_of_rows_after_a_moment(spec: ModelSpec, store: Store) -> None:
    rows = [Row(f"r{n}", 0.5, 1.0, MATURED + n * timedelta(minutes=1)) for n in range(10)]
    write_log(spec, store, rows, NOW)
    since = NOW - MATURED - timedelta(minutes=5)
    assert matured_labels_since(spec, store, since=since, now=NOW) == 6
    assert matured_labels_since(spec, store, since=NOW, now=NOW) == 0


def test_two_hundred_thousand_rows_take_seconds(spec: ModelSpec, store: Store) -> None:
    """It runs every few seconds beside everything else; the limit allows for a busy machine."""
    rows = [Row(f"r{n}", 0.5, 1.0, MATURED) for n in range(200_000)]
    write_log(spec, store, rows, NOW)
    begun = time.process_time()
    quality = measure(spec, store, window=WINDOW, now=NOW).versions[1]
    assert quality.labelled == 200_000
    assert time.process_time() - begun < 10
