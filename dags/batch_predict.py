"""`<model>.batch_predict`: an Airflow dag that predicts files with the champion, when asked to.

A task that is retried, or a run that is triggered again with the same params, goes on with the
shards that are missing.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Context, Param, task

from dags._build import DEFAULT_ARGS, models
from dags._errors import airflow_errors
from dags._rooms import open_rooms
from perennial.spec import ModelSpec

PARAMS = {
    "input": Param(
        type="string",
        minLength=1,
        title="Input",
        description="Parquet or CSV: a file, a pattern or a folder, on a disk the worker sees.",
    ),
    "output": Param(
        type="string",
        pattern="^/.*[^/]$",
        title="Output",
        description="Absolute path of the folder to publish; it must not exist yet.",
    ),
    "version": Param(
        None,
        type=["null", "integer"],
        minimum=1,
        title="Version",
        description="Of the model; empty: the champion.",
    ),
}


def build(dag_id: str, spec: ModelSpec) -> DAG:
    with DAG(
        dag_id,
        description=f"Predicts files with {spec.name}'s champion",
        schedule=None,
        start_date=datetime(2026, 1, 1),
        catchup=False,
        max_active_runs=1,
        params=PARAMS,
        default_args={**DEFAULT_ARGS, "retries": 2},
        tags=["perennial", spec.name],
        doc_md=__doc__,
    ) as dag:

        @task(task_id="predict")
        def predict(**context: Any) -> dict[str, Any]:
            return predict_files(spec.name, context)  # type: ignore[arg-type]

        predict()
    return dag


def predict_files(model: str, context: Context) -> dict[str, Any]:
    """Runs the job that the params describe; returns its figures."""
    from serving.batch.job import batch_predict

    params = context["params"]
    with airflow_errors(), open_rooms(model) as rooms:
        champion = rooms.ledger.champion(model)
        done = batch_predict(
            rooms.spec,
            rooms.store,
            [params["input"]],
            Path(params["output"]),
            version=params.get("version"),
            champion=champion.version if champion else None,
        )
    return {**asdict(done), "output": str(done.output)}


for _dag_id, _spec in models("batch_predict"):
    globals()[_dag_id] = build(_dag_id, _spec)
