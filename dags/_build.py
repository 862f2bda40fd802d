"""What every DAG file shares: the models under care, their assets, defaults. No heavy import."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import cache
from typing import Any

from airflow.sdk import (
    DAG,
    Asset,
    IdentityMapper,
    PartitionedAssetTimetable,
    get_parsing_context,
)

from perennial.settings import Settings
from perennial.spec import ModelSpec, load_specs

DEFAULT_ARGS: dict[str, Any] = {
    "retries": 5,
    "retry_delay": timedelta(seconds=5),
    "retry_exponential_backoff": 2.0,
    "max_retry_delay": timedelta(minutes=5),
}


@cache
def settings() -> Settings:
    return Settings.from_environment()


def models(kind: str) -> Iterator[tuple[str, ModelSpec]]:
    """(DAG id, spec) of every model; only the one asked for while a task parses its own DAG.

    Raises:
        Permanent: from `load_specs`; Airflow shows it as the file's import error.
    """
    wanted = get_parsing_context().dag_id
    for name, spec in load_specs(settings().models_dir, settings().profile).items():
        dag_id = f"{name}.{kind}"
        if wanted in (None, dag_id):
            yield dag_id, spec


def retrain_asset(model: str) -> Asset:
    """An episode was opened; partition key = its id."""
    return Asset(name=f"{model}.retrain_requested", uri=f"perennial://{model}/retrain")


def release_asset(model: str) -> Asset:
    """A version was published; partition key = its episode's id."""
    return Asset(name=f"{model}.version_published", uri=f"perennial://{model}/release")


def episode_dag(dag_id: str, spec: ModelSpec, asset: Asset, **more: Any) -> DAG:
    """A DAG with one run per episode, whose id is the partition key of `asset`'s events."""
    return DAG(
        dag_id,
        schedule=PartitionedAssetTimetable(assets=asset, default_partition_mapper=IdentityMapper()),
        start_date=datetime(2026, 1, 1),
        catchup=False,
        max_active_runs=1,
        default_args=DEFAULT_ARGS,
        tags=["perennial", spec.name],
        **more,
    )
