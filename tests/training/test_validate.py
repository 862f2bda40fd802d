"""Validation: bad rows are put aside, bad data refused, a broken check is nobody's verdict."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from perennial.errors import Permanent
from perennial.spec import ModelSpec
from perennial.store import Store, is_published, read_manifest, verify
from tests.support.training import EXPECTATIONS, SECRET, START, clicks, write_model
from training import snapshot
from training.collect import ROWS_FILE, collect
from training.history import import_history
from training.hooks import Encoding
from training.validate import ValidationResult, validate

NOW = START + timedelta(days=1)


def given(
    tmp_path: Path, table: pa.Table, *, expectations: list[dict[str, Any]] | None = None
) -> tuple[ModelSpec, Store]:
    spec = write_model(tmp_path / "models", expectations=expectations)
    store = Store(f"file://{tmp_path / 'store'}")
    import_history(spec, store, table, secret=SECRET)
    collect(spec, store, "e1", now=NOW)
    return spec, store


def spoilt(column: str, values: dict[int, Any], rows: int = 1000) -> pa.Table:
    table = clicks(rows)
    content = table[column].to_pylist()
    for i, value in values.items():
        content[i] = value
    kind = table.schema.field(column).type
    return table.set_column(table.column_names.index(column), column, pa.array(content, kind))


def test_bad_rows_go_to_quarantine_with_reasons_and_the_rest_is_split_by_time(
    tmp_path: Path,
) -> None:
    table = spoilt("city", {3: "Atlantis", 7: None})
    amounts = table["amount"].to_numpy().copy()
    amounts[[7, 11]] = 1e6
    table = table.set_column(table.column_names.index("amount"), "amount", pa.array(amounts))
    spec, store = given(tmp_path, table)

    result = validate(spec, store, "e1")
    assert result.accepted
    assert (result.rows, result.quarantined) == (997, 3)
    (warning,) = result.warnings
    assert warning.startswith("expect_column_values_to_be_between(amount): 2 of 1000 rows")
    assert result.path == store.snapshot("clicks", "e1")
    collected = read_manifest(store.run("clicks", "e1") / "collected").facts
    assert verify(result.path).facts["known_at"] == collected["known_at"]

    quarantine = pq.read_table(result.path / snapshot.QUARANTINE).to_pylist()
    second = {(r["time"] - START).seconds: r["reasons"] for r in quarantine}
    assert second == {
        3: ["expect_column_values_to_be_in_set(city)"],
        7: ["expect_column_values_to_be_between(amount)", "incomplete"],
        11: ["expect_column_values_to_be_between(amount)"],
    }
    holdout = pq.read_table(result.path / snapshot.HOLDOUT)
    assert holdout.num_rows == round(997 * 0.15)
    assert min(holdout["time"].to_pylist()) == START + timedelta(seconds=1000 - 150)
    encoding = Encoding.read(result.path / snapshot.ENCODING)
    assert sorted(encoding.vocabularies["city"]) == ["Aarhus", "Bern", "Cork", "Düsseldorf"]
    assert encoding.moments["amount"][0] == pytest.approx(20, abs=2)
    assert "email" not in encoding.vocabularies
    profile = json.loads((result.path / snapshot.PROFILE).read_text())
    amount = profile["features"]["amount"]
    assert sum(amount["counts"]) + amount["unknown"] == profile["rows"] == 997
    assert 0.05 < amount["unknown"] / 997 < 0.15
    assert sum(profile["features"]["member"]["counts"].values()) == 997
    assert (
        "compiled by Great Expectations" in (result.path / "data_docs" / "index.html").read_text()
    )
    assert validate(spec, store, "e1") == result


def test_data_beyond_a_critical_check_are_rejected_without_a_snapshot(tmp_path: Path) -> None:
    spec, store = given(tmp_path, spoilt("city", dict.fromkeys(range(60), "Atlantis")))
    result = validate(spec, store, "e1")
    assert not result.accepted
    (failure,) = result.critical_failures
    assert "expect_column_values_to_be_in_set(city): 60 of 1000 rows (6 %) do not fit" in failure
    assert "allowed 5 %" in failure
    assert not is_published(store.snapshot("clicks", "e1"))
    verify(store.run("clicks", "e1") / "validation")
    assert (result.path / "data_docs" / "index.html").exists()
    assert pq.read_table(result.path / snapshot.QUARANTINE).num_rows == 60
    assert validate(spec, store, "e1") == result


def test_too_few_rows_after_quarantine_are_rejected(tmp_path: Path) -> None:
    table = spoilt("amount", dict.fromkeys(range(300), 1e6), rows=600)
    spec, store = given(tmp_path, table)
    result = validate(spec, store, "e1")
    assert result.critical_failures == ("300 rows remain of 600, training.min_rows is 500",)


def test_a_check_of_an_aggregate_is_judged_too(tmp_path: Path) -> None:
    table = clicks(1000)
    place = table.column_names.index("clicked")
    spec, store = given(tmp_path, table.set_column(place, "clicked", pa.array(np.zeros(1000))))
    (failure,) = validate(spec, store, "e1").critical_failures
    assert failure.startswith("expect_column_mean_to_be_between(clicked): observed 0.0")


def test_a_check_that_cannot_run_is_an_error_and_not_a_verdict(tmp_path: Path) -> None:
    broken = {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "cty"}}
    spec, store = given(tmp_path, clicks(600), expectations=[*EXPECTATIONS, broken])
    with pytest.raises(Permanent, match=r"not_be_null\(cty\) could not be run") as caught:
        validate(spec, store, "e1")
    assert caught.value.code == "validate.broken_check"
    assert not is_published(store.snapshot("clicks", "e1"))
    assert not is_published(store.run("clicks", "e1") / "validation")


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"kwargs": {}}, "entry 0 has no `type`"),
        ({"type": "expect_nothing"}, "expect_nothing {}: no such expectation"),
        ({"type": "expect_column_values_to_be_between", "kwargs": {"column": "hour"}}, "min_value"),
        ({"type": "expect_column_to_exist", "severity": "fatal"}, "'fatal' is neither"),
        ({"type": "expect_column_to_exist", "kwarg": {}}, "unknown key 'kwarg'"),
    ],
)
def test_a_suite_that_cannot_be_used_is_refused_by_entry(
    tmp_path: Path, entry: dict[str, Any], says: str
) -> None:
    spec, store = given(tmp_path, clicks(600), expectations=[entry])
    with pytest.raises(Permanent, match=says) as caught:
        validate(spec, store, "e1")
    assert caught.value.code == "validate.suite"
    assert "expectations.yaml" in caught.value.message


def test_rows_that_were_changed_after_collecting_are_refused(tmp_path: Path) -> None:
    spec, store = given(tmp_path, clicks(600))
    path = store.run("clicks", "e1") / "collected" / ROWS_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(Permanent) as caught:
        validate(spec, store, "e1")
    assert caught.value.code == "store.checksum"


def test_without_an_expectations_file_it_says_what_to_write(tmp_path: Path) -> None:
    spec, store = given(tmp_path, clicks(600))
    (spec.folder / "expectations.yaml").unlink()
    with pytest.raises(Permanent, match="severity: critical"):
        validate(spec, store, "e1")


def test_results_are_plain_values(tmp_path: Path) -> None:
    spec, store = given(tmp_path, clicks(600))
    result = validate(spec, store, "e1")
    assert isinstance(result, ValidationResult)
    json.loads((result.path / snapshot.VALIDATION).read_text())
