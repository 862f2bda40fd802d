"""Collecting: what is matured and labelled is learnt from, everything else is counted."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from perennial.errors import Permanent
from perennial.spec import ModelSpec
from perennial.store import Store, read_manifest
from tests.support.training import (
    SECRET,
    START,
    clicks,
    write_labels,
    write_model,
    write_predictions,
)
from training.collect import ROWS_FILE, SETTLE, collect, rebuild
from training.history import import_history

NOW = START + timedelta(days=1)
HOUR = timedelta(hours=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path / 'store'}")


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return write_model(tmp_path / "models", training={"min_rows": 1})


def test_every_way_a_label_can_go_wrong_is_counted(spec: ModelSpec, store: Store) -> None:
    write_predictions(
        spec,
        store,
        [
            {"request_id": "labelled", "time": START},
            {"request_id": "labelled", "time": START, "row": 1},
            {"request_id": "labelled", "time": START, "arm": "shadow", "version": 2},
            {"request_id": "failed", "time": START, "status": 14, "score": None, "version": 0},
            {"request_id": "silent", "time": START},
            {"request_id": "told-twice", "time": START, "arm": "canary"},
            {"request_id": "contradicted", "time": START},
            {"request_id": "young", "time": NOW - HOUR / 2},
        ],
    )
    later, latest = START + HOUR / 2, START + 2 * HOUR
    write_labels(
        spec,
        store,
        [
            {"request_id": "labelled", "value": 1.0, "time": later},
            {"request_id": "labelled", "row": 1, "value": 0.0, "time": later},
            {"request_id": "failed", "value": 1.0, "time": later},
            {"request_id": "told-twice", "value": 1.0, "time": later},
            {"request_id": "told-twice", "value": 1.0, "time": latest},
            {"request_id": "contradicted", "value": 1.0, "time": later},
            {"request_id": "contradicted", "value": 0.0, "time": latest},
            {"request_id": "nobody", "value": 1.0, "time": later},
            {"request_id": "young", "value": 1.0, "time": NOW - HOUR / 4},
            {"request_id": "silent", "value": 1.0, "time": later, "received": NOW + HOUR},
            {"request_id": "recorder-lags", "value": 1.0, "time": NOW - HOUR / 2},
            {"request_id": "silent", "value": 1.0, "time": NOW + HOUR, "received": later},
        ],
    )
    result = collect(spec, store, "e1", now=NOW)
    assert result.counts == {
        "predictions": 6,
        "labels": 8,
        "joined": 5,
        "unlabelled": 1,
        "late": 2,
        "unknown": 1,
        "unmatched": 1,
        "future": 1,
        "duplicates": 2,
        "conflicting": 1,
        "duplicate_predictions": 0,
        "immature": 1,
    }
    rows = pq.read_table(result.path / ROWS_FILE).to_pylist()
    assert {(r["request_id"], r["row"]): r["label"] for r in rows} == {
        ("labelled", 0): 1.0,
        ("labelled", 1): 0.0,
        ("failed", 0): 1.0,
        ("told-twice", 0): 1.0,
        ("contradicted", 0): 0.0,
    }
    assert "shadow" not in {r["arm"] for r in rows}


def test_a_collection_is_rebuilt_as_it_was_known_then(spec: ModelSpec, store: Store) -> None:
    """Corrections, late and new labels change what is known now, never what was known then."""
    noon = START + 12 * HOUR
    write_predictions(
        spec, store, [{"request_id": f"r{n}", "time": START + n * HOUR / 60} for n in range(40)]
    )
    told = [{"request_id": f"r{n}", "value": float(n % 2), "time": START + HOUR} for n in range(30)]
    write_labels(spec, store, told)
    then = collect(spec, store, "then", now=noon)
    drill = collect(spec, store, "drill", now=noon, shuffle_labels=True)
    assert (then.rows, then.known_at) == (30, noon - SETTLE)
    assert read_manifest(then.path).facts["known_at"] == (noon - SETTLE).isoformat()

    corrected = [{**told[0], "value": 1.0}, {**told[1], "value": 0.0, "source": "audit"}]
    late = [{"request_id": f"r{n}", "value": 1.0, "time": START + HOUR} for n in range(30, 40)]
    write_labels(spec, store, [{**one, "received": noon + HOUR} for one in corrected + late])

    for result in (then, drill):
        again = rebuild(spec, store, result.path.parent.name)
        assert again.equals(pq.read_table(result.path / ROWS_FILE))
    by_hand = collect(spec, store, "by-hand", now=noon, known_at=then.known_at)
    assert by_hand.counts == then.counts
    assert (by_hand.path / ROWS_FILE).read_bytes() == (then.path / ROWS_FILE).read_bytes()

    now = collect(spec, store, "now", now=noon, known_at=noon + 2 * HOUR)
    rows = pq.read_table(now.path / ROWS_FILE)
    labels = dict(zip(rows["request_id"].to_pylist(), rows["label"].to_pylist(), strict=True))
    assert (now.rows, now.counts["conflicting"]) == (40, 2)
    assert (labels["r0"], labels["r1"], labels["r39"]) == (1.0, 0.0, 1.0)


def test_a_label_that_is_dated_ahead_counts_from_its_time_on(spec: ModelSpec, store: Store) -> None:
    write_predictions(spec, store, [{"request_id": "a", "time": START}])
    ahead = {"request_id": "a", "value": 1.0, "time": NOW + HOUR, "received": START + HOUR}
    write_labels(spec, store, [ahead])
    with pytest.raises(Permanent, match="1 future") as caught:
        collect(spec, store, "e1", now=NOW)
    assert caught.value.code == "collect.no_matured_labels"
    assert collect(spec, store, "e1", now=NOW, known_at=NOW + HOUR).rows == 1


def test_a_rebuild_under_another_spec_is_refused(
    tmp_path: Path, spec: ModelSpec, store: Store
) -> None:
    import_history(spec, store, clicks(50), secret=SECRET)
    collect(spec, store, "e1", now=NOW)
    other = write_model(tmp_path / "other", training={"min_rows": 2})
    with pytest.raises(Permanent, match="was collected under spec") as caught:
        rebuild(other, store, "e1")
    assert caught.value.code == "collect.spec"


def test_the_window_takes_the_newest_rows(tmp_path: Path, store: Store) -> None:
    spec = write_model(
        tmp_path / "models",
        training={"min_rows": 1, "window": {"max_rows": 100, "max_age": "30d"}},
    )
    import_history(spec, store, clicks(300, start=START - timedelta(days=40)), secret=SECRET)
    import_history(spec, store, clicks(300, start=START), secret=SECRET)
    result = collect(spec, store, "e1", now=NOW)
    assert (result.rows, result.counts["joined"]) == (100, 300)
    assert result.first == START + timedelta(seconds=200)
    assert result.last == START + timedelta(seconds=299)


def test_history_is_imported_once_and_masked(spec: ModelSpec, store: Store) -> None:
    table = clicks(200)
    assert import_history(spec, store, table, secret=SECRET) == 200
    assert import_history(spec, store, table, secret=SECRET) == 200
    result = collect(spec, store, "e1", now=NOW)
    assert (result.rows, result.counts["duplicates"]) == (200, 0)
    rows = pq.read_table(result.path / ROWS_FILE)
    assert rows["feature_email"].null_count == 200
    assert set(rows["arm"].to_pylist()) == {"history"}
    assert rows["label"].to_pylist() == table["clicked"].to_pylist()
    assert not any(b"example.org" in p.read_bytes() for p in store.root.rglob("*.parquet"))


def test_history_with_missing_columns_is_refused(spec: ModelSpec, store: Store) -> None:
    with pytest.raises(Permanent, match=r"lacks city, user") as caught:
        import_history(spec, store, clicks(5).drop_columns(["city", "user"]), secret=SECRET)
    assert caught.value.code == "history.columns"


def test_collecting_again_returns_what_was_published(spec: ModelSpec, store: Store) -> None:
    import_history(spec, store, clicks(50), secret=SECRET)
    first = collect(spec, store, "e1", now=NOW)
    import_history(spec, store, clicks(70, seed=1), secret=SECRET)
    assert collect(spec, store, "e1", now=NOW + HOUR) == first
    assert collect(spec, store, "e2", now=NOW).rows == 120


def test_a_drill_shuffles_the_labels_and_says_so(spec: ModelSpec, store: Store) -> None:
    table = clicks(300)
    import_history(spec, store, table, secret=SECRET)
    result = collect(spec, store, "e1", now=NOW, shuffle_labels=True)
    shuffled = pq.read_table(result.path / ROWS_FILE)["label"].to_numpy()
    honest = table["clicked"].to_numpy()
    assert shuffled.sum() == honest.sum()
    trained_on = int(len(honest) * (1 - spec.training.holdout_fraction))
    assert np.mean(shuffled[:trained_on] != honest[:trained_on]) > 0.3
    assert (shuffled[trained_on:] == honest[trained_on:]).all()
    assert result.shuffled
    assert read_manifest(result.path).facts["shuffled_labels"] is True


def test_an_older_log_without_a_newer_feature_still_joins(tmp_path: Path, store: Store) -> None:
    old = write_model(tmp_path / "old", training={"min_rows": 1})
    import_history(old, store, clicks(50), secret=SECRET)
    features = {**old.model_dump(mode="json")["data"]["features"], "device": {"type": "string"}}
    new = write_model(tmp_path / "new", training={"min_rows": 1}, data={"features": features})
    result = collect(new, store, "e1", now=NOW)
    assert pq.read_table(result.path / ROWS_FILE)["feature_device"].null_count == 50


def test_without_labels_it_says_what_there_is(spec: ModelSpec, store: Store) -> None:
    with pytest.raises(Permanent, match="0 prediction_files") as caught:
        collect(spec, store, "e1", now=NOW)
    assert caught.value.code == "collect.no_matured_labels"
    write_predictions(spec, store, [{"request_id": "a", "time": START}])
    write_labels(spec, store, [{"request_id": "b", "value": 1.0, "time": START}])
    with pytest.raises(Permanent, match=r"horizon 1h .*1 predictions.* 1 unknown") as caught:
        collect(spec, store, "e1", now=NOW)
    assert caught.value.code == "collect.no_matured_labels"
    assert not (store.run("clicks", "e1") / "collected").exists()


def test_too_few_rows_are_refused_with_the_numbers(tmp_path: Path, store: Store) -> None:
    spec = write_model(tmp_path / "models", training={"min_rows": 500})
    import_history(spec, store, clicks(499), secret=SECRET)
    with pytest.raises(Permanent, match=r"499 labelled rows, training.min_rows is 500") as caught:
        collect(spec, store, "e1", now=NOW)
    assert caught.value.code == "collect.too_few_rows"
