"""The flights model's data: what the package holds is what the model is promised."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from perennial.errors import Permanent
from perennial.spec import load_spec
from perennial.store import Store
from tests.support.training import SECRET, write_model
from training.collect import collect
from training.history import import_history
from training.hooks import load_code, load_history
from training.validate import validate

SPEC = load_spec(Path("models/flights"))
# Share of late flights by month, as published with the data set's analysis.
LATE = (0.227, 0.229, 0.228, 0.279, 0.220, 0.308, 0.315, 0.238, 0.132, 0.168, 0.174, 0.326)


@pytest.fixture(scope="module")
def flights() -> pa.Table:
    return load_history(SPEC)


def test_every_flight_with_an_outcome_is_there_in_scheduled_order(flights: pa.Table) -> None:
    assert flights.num_rows == 336_776 - 9_430
    assert set(SPEC.data.features) < set(flights.column_names)
    scheduled = flights["scheduled"].to_numpy()
    assert (np.diff(scheduled) >= np.timedelta64(0)).all()
    late, month = flights["late"].to_numpy(), flights["month"].to_numpy()
    assert [round(float(late[month == m].mean()), 3) for m in range(1, 13)] == list(LATE)
    assert flights["tail_number"].null_count == 0


def test_a_label_is_known_when_the_flight_has_arrived(flights: pa.Table) -> None:
    """UA 1545 to Houston, 1 January: 5:15 in New York, due 8:19 there, 11 minutes late."""
    first = flights.slice(0, 1).to_pylist()[0]
    assert (first["carrier"], first["dest"], first["tail_number"]) == ("UA", "IAH", "N14228")
    assert first["scheduled"] == datetime(2013, 1, 1, 10, 15, tzinfo=UTC)
    assert first["known"] == datetime(2013, 1, 1, 14, 30, tzinfo=UTC)
    assert first["day_of_week"] == 1
    took = (flights["known"].to_numpy() - flights["scheduled"].to_numpy()) / np.timedelta64(1, "m")
    assert took.min() > 0


def test_unknown_weather_is_nan(flights: pa.Table) -> None:
    assert flights["pressure"].null_count == 0
    assert 0.05 < np.isnan(flights["pressure"].to_numpy()).mean() < 0.2


def test_a_month_of_flights_is_accepted_without_a_warning(
    flights: pa.Table, tmp_path: Path
) -> None:
    store = Store(f"file://{tmp_path}")
    month = flights.filter(pc.equal(flights["month"], 1))
    import_history(SPEC, store, month, secret=SECRET)
    collected = collect(SPEC, store, "e1", now=datetime(2013, 2, 1, tzinfo=UTC))
    assert collected.counts["immature"] > 0
    result = validate(SPEC, store, "e1")
    assert (result.accepted, result.warnings, result.quarantined) == (True, (), 0)
    assert result.rows == collected.rows


def test_a_model_folder_without_its_code_is_refused_by_file(tmp_path: Path) -> None:
    spec = write_model(tmp_path)
    with pytest.raises(Permanent, match=r"data\.py does not exist"):
        load_history(spec)
    (spec.folder / "model.py").write_text("def build_mode(context): ...")
    with pytest.raises(Permanent, match="has no function build_model"):
        load_code(spec)
    (spec.folder / "model.py").write_text("import nothing_of_that_name")
    with pytest.raises(Permanent, match="ModuleNotFoundError") as caught:
        load_code(spec)
    assert caught.value.code == "hooks.import"
