"""The report: its numbers come back from its tables, and what people typed is no markup."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from perennial.errors import Permanent
from perennial.spec import ModelSpec, load_spec
from serving.release.evidence import Evidence
from serving.release.report import look_of, rederive, write_report
from serving.release.verdict import Kind, Latch, judge
from tests.support.release import START, TICK, Simulation, evidence_of, release, windows


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    flights = load_spec(Path(__file__).parents[2] / "models" / "flights")
    return flights.model_copy(update={"release": release()})


@cache
def simulated(delta: float) -> Evidence:
    return evidence_of(Simulation(1, delta=delta).cells_at(59))


def write(folder: Path, spec: ModelSpec, evidence: Evidence, **over: Any) -> None:
    latch, looks = Latch(), []
    for tick in (44, 59):
        verdict = judge(
            spec.release, evidence, windows(), now=START + (tick + 1) * TICK, latch=latch
        )
        latch = verdict.latch
        looks += [look_of(verdict)] if look_of(verdict) else []
    write_report(
        folder,
        **{
            "spec": spec,
            "episode": "e1",
            "champion": 3,
            "candidate": 4,
            "evidence": evidence,
            "stages": windows(),
            "verdict": verdict,
            "looks": looks,
            **over,
        },
    )


@pytest.mark.parametrize(
    ("delta", "kind"), [(-0.04, Kind.PROMOTE), (0.04, Kind.ROLLBACK), (0.0, None)]
)
def test_every_number_is_derived_again(
    tmp_path: Path, spec: ModelSpec, delta: float, kind: Kind | None
) -> None:
    write(tmp_path, spec, simulated(delta))

    assert rederive(tmp_path) == []
    document = json.loads((tmp_path / "report.json").read_text())
    assert kind is None or document["verdict"]["kind"] == kind
    page = (tmp_path / "report.html").read_text()
    assert document["verdict"]["headline"].replace("'", "&#39;") in page
    assert page.count("<svg") == 2
    for word in ("http://", "https://", "<script", "src="):
        assert word not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_changed_table_or_number_is_found(tmp_path: Path, spec: ModelSpec) -> None:
    write(tmp_path, spec, simulated(0.04))
    cells = pq.read_table(tmp_path / "cells.parquet").to_pylist()
    cells[0]["s"] += 1
    pq.write_table(Evidence.from_rows(cells).cells, tmp_path / "cells.parquet")

    assert any(line.startswith("numbers.theta: ") for line in rederive(tmp_path))

    (tmp_path / "cells.parquet").unlink()
    with pytest.raises(Permanent) as caught:
        rederive(tmp_path)
    assert caught.value.code == "report.unreadable"


def test_a_release_without_data_has_a_report(tmp_path: Path, spec: ModelSpec) -> None:
    write(tmp_path, spec, Evidence.from_rows())

    assert rederive(tmp_path) == []
    page = (tmp_path / "report.html").read_text()
    assert "HOLD" in page
    assert "No look had labels" in page


def test_what_people_typed_is_text(tmp_path: Path, spec: ModelSpec) -> None:
    facts = {"approved by": "<script>alert(1)</script>"}

    write(tmp_path, spec, Evidence.from_rows(), facts=facts, episode="<b>e</b>")

    page = (tmp_path / "report.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "<b>e</b>" not in page
