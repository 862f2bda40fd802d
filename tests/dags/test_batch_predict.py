"""The task of `<model>.batch_predict`, with a ledger and a version that are real."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from perennial.ledger import Ledger
from perennial.local.postgres import database_url
from perennial.settings import Settings
from perennial.store import Store
from tests.support.batch import publish_version
from tests.support.monitoring import crown
from tests.support.training import clicks, write_model


def test_the_task_predicts_with_the_champion(
    tmp_path: Path, postgres: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_model(tmp_path / "models")
    url = database_url(postgres, "perennial")
    settings = Settings(home=tmp_path, models_dir=tmp_path / "models", database_url=url)
    for name, value in settings.as_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "airflow"))
    ledger = Ledger(url)
    ledger.migrate()
    version = crown(ledger, spec, {}, now=datetime.now(UTC))
    ledger.close()
    publish_version(Store(settings.store), version)
    pq.write_table(clicks(20), tmp_path / "rows.parquet")

    from dags.batch_predict import predict_files

    params = {"input": str(tmp_path / "*.parquet"), "output": str(tmp_path / "out")}
    done = predict_files("clicks", {"params": {**params, "version": None}})  # type: ignore[typeddict-item]
    assert (done["version"], done["scored"]) == (version, 20)
    rows = pq.read_table(tmp_path / "out" / "part-00000.parquet")
    assert set(rows["version"].to_pylist()) == {version}
