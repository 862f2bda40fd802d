"""Logs to evidence: which rows count, and how often."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from perennial.records import LABEL_SCHEMA, prediction_schema
from perennial.spec import ModelSpec, load_spec
from serving.release.cells import collect_cells
from serving.release.evidence import CELLS_SCHEMA, TICKS_SCHEMA, Evidence, StageWindow

START = datetime(2026, 3, 1, 23, 50, tzinfo=UTC)
NOW = START + timedelta(hours=2)
STAGES = (
    StageWindow(0, 0.1, START, START + timedelta(minutes=30)),
    StageWindow(1, 0.5, START + timedelta(minutes=30)),
)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return load_spec(Path(__file__).parents[2] / "models" / "flights")


class Logs:
    """The two logs in a folder, written as the recorder and the intake write them."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.predictions, self.labels = folder / "predictions", folder / "labels"
        self.spec = spec
        self.files = 0

    def _write(self, folder: Path, schema: pa.Schema, time: str, row: dict[str, Any]) -> None:
        at = row[time]
        target = folder / f"date={at:%Y-%m-%d}" / f"hour={at:%H}"
        target.mkdir(parents=True, exist_ok=True)
        self.files += 1
        full = {name: row.get(name) for name in schema.names}
        pq.write_table(pa.Table.from_pylist([full], schema), target / f"{self.files}.parquet")

    def predict(
        self, request: str, minutes: float, score: float | None = 0.25, **over: Any
    ) -> None:
        row = {
            "request_id": request,
            "row": 0,
            "key_hash": f"key-{request[0]}",
            "time": START + timedelta(minutes=minutes),
            "latency_ms": 1.0,
            "assigned": "stable",
            "route": "split",
            "version": 1,
            "status": 0,
            "score": score,
            **over,
        }
        row.setdefault("arm", row["assigned"])
        self._write(self.predictions, prediction_schema(self.spec), "time", row)

    def label(self, request: str, minutes: float, value: float = 0.0, row: int = 0) -> None:
        at = START + timedelta(minutes=minutes)
        label = {"request_id": request, "row": row, "value": value, "time": at, "received": at}
        self._write(self.labels, LABEL_SCHEMA, "received", label | {"source": "test"})

    def collect(self, **changes: Any) -> Evidence:
        arguments: dict[str, Any] = {"now": NOW, "stages": STAGES, **changes}
        return collect_cells(self.predictions, self.labels, self.spec, **arguments)


@pytest.fixture
def logs(tmp_path: Path, spec: ModelSpec) -> Logs:
    return Logs(tmp_path, spec)


def by_key(evidence: Evidence) -> dict[tuple[str, int, str], dict[str, Any]]:
    return {
        (row.pop("key_hash"), row.pop("stage"), row.pop("arm")): row
        for row in evidence.cells.to_pylist()
    }


def test_missing_folders_are_no_data(logs: Logs) -> None:
    evidence = logs.collect()

    assert (evidence.cells.num_rows, evidence.ticks.num_rows) == (0, 0)
    assert evidence.cells.schema == CELLS_SCHEMA


def test_requests_without_labels_are_counted(logs: Logs) -> None:
    logs.predict("a1", 1)

    evidence = logs.collect()

    assert by_key(evidence) == {
        ("key-a", 0, "stable"): {"requests": 1, "errors": 0, "n": 0, "s": 0.0, "s2": 0.0}
        | {"aged": 0, "aged_labelled": 0}
    }
    assert evidence.cells.schema == CELLS_SCHEMA
    assert evidence.ticks.schema == TICKS_SCHEMA


def test_a_cell_sums_the_clipped_loss_of_its_labelled_rows(logs: Logs) -> None:
    logs.predict("a1", 1, score=0.25)
    logs.predict("a2", 2, score=0.5)
    logs.predict("a2", 2, score=1.0, row=1)
    logs.label("a1", 10, 0.0)
    logs.label("a2", 10, 1.0)
    logs.label("a2", 10, 0.0, row=1)

    cell = by_key(logs.collect())["key-a", 0, "stable"]

    losses = [-math.log(0.75), -math.log(0.5), 4.0]
    assert cell["requests"] == 2
    assert cell["n"] == 3
    assert cell["s"] == pytest.approx(sum(losses))
    assert cell["s2"] == pytest.approx(sum(loss * loss for loss in losses))


def test_stage_is_by_the_time_of_the_request_and_arm_by_assignment(logs: Logs) -> None:
    logs.predict("a1", 29.99)
    logs.predict("a2", 30, assigned="canary", version=2)
    logs.predict("b1", -1)
    logs.label("a1", 100, 0.0)

    cells = by_key(logs.collect())

    assert set(cells) == {("key-a", 0, "stable"), ("key-a", 1, "canary")}
    assert cells["key-a", 0, "stable"]["n"] == 1


@pytest.mark.parametrize(
    "over",
    [
        {"route": "forced"},
        {"route": "shadow", "arm": "shadow"},
        {"route": "history"},
        {"key_hash": ""},
        {"time": NOW + timedelta(seconds=1)},
    ],
)
def test_what_was_not_assigned_by_chance_does_not_count(logs: Logs, over: dict[str, Any]) -> None:
    logs.predict("a1", 1, **over)
    logs.label("a1", 2)

    assert logs.collect().cells.num_rows == 0


def test_the_label_received_last_counts_once(logs: Logs) -> None:
    logs.predict("a1", 1, score=0.25)
    for minutes, value in ((5, 0.0), (7, 1.0), (6, 0.0)):
        logs.label("a1", minutes, value)
    logs.label("unknown", 5)
    logs.label("a1", 200, 0.0)

    cell = by_key(logs.collect())["key-a", 0, "stable"]

    assert cell["n"] == 1
    assert cell["s"] == pytest.approx(-math.log(0.25))


def test_a_row_that_was_recorded_twice_counts_once(logs: Logs) -> None:
    for _ in range(2):
        logs.predict("a1", 1)
    logs.label("a1", 2)

    cell = by_key(logs.collect())["key-a", 0, "stable"]

    assert (cell["requests"], cell["n"]) == (1, 1)


def test_errors_are_whatever_was_not_answered_with_a_number(logs: Logs) -> None:
    canary = {"assigned": "canary", "version": 2}
    logs.predict("a1", 1, **canary)
    logs.predict("b1", 1, status=14, score=None, version=0, assigned="canary")
    logs.predict("c1", 1, arm="stable", version=1, assigned="canary")
    logs.predict("d1", 1, score=math.nan, **canary)
    logs.predict("d2", 1, score=math.inf, **canary)
    logs.predict("e1", 1, status=-1, score=None, **canary)
    logs.predict("f1", 1)

    evidence = logs.collect(versions={"stable": 1, "canary": 2})

    ticks = {row["arm"]: row for row in evidence.ticks.to_pylist()}
    assert ticks["canary"] == {
        "stage": 0,
        "tick": 1,
        "arm": "canary",
        "requests": 6,
        "errors": 5,
        "error_keys": 4,
        "answered": 3,
        "mismatched": 0,
    }
    assert (ticks["stable"]["requests"], ticks["stable"]["errors"]) == (1, 0)


def test_not_a_number_costs_the_cap(logs: Logs) -> None:
    logs.predict("a1", 1, score=math.nan)
    logs.label("a1", 2, 1.0)

    cell = by_key(logs.collect())["key-a", 0, "stable"]

    assert (cell["n"], cell["s"]) == (1, 4.0)


def test_another_version_than_declared_is_a_mismatch(logs: Logs) -> None:
    logs.predict("a1", 1, version=7)
    logs.predict("b1", 1, version=1)

    (tick,) = logs.collect(versions={"stable": 1, "canary": 2}).ticks.to_pylist()

    assert (tick["answered"], tick["mismatched"]) == (2, 1)
    (tick,) = logs.collect().ticks.to_pylist()
    assert tick["mismatched"] == 0


def test_ages_are_measured_against_the_label_horizon(logs: Logs, spec: ModelSpec) -> None:
    logs.predict("a1", 1)
    logs.predict("b1", 20)
    logs.label("a1", 2)
    now = START + spec.data.label_horizon + timedelta(minutes=10)

    cells = by_key(logs.collect(now=now))

    assert cells["key-a", 0, "stable"]["aged_labelled"] == 1
    assert cells["key-a", 0, "stable"]["aged"] == 1
    assert cells["key-b", 0, "stable"]["aged"] == 0


def test_a_tick_lasts_as_long_as_asked(logs: Logs) -> None:
    logs.predict("a1", 1)
    logs.predict("b1", 25)

    assert [row["tick"] for row in logs.collect(tick_s=600).ticks.to_pylist()] == [0, 2]


@pytest.mark.parametrize(
    ("metric", "loss"), [("brier", 0.5625), ("absolute_error", 0.75), ("log_loss", math.log(4))]
)
def test_the_three_losses(logs: Logs, spec: ModelSpec, metric: str, loss: float) -> None:
    logs.predict("a1", 1, score=0.25)
    logs.label("a1", 2, 1.0)
    release = spec.release.model_copy(update={"primary_metric": metric})
    logs.spec = spec.model_copy(update={"release": release})

    assert by_key(logs.collect())["key-a", 0, "stable"]["s"] == pytest.approx(loss)
