"""`<model>.watch`: an Airflow dag that reads what serving reports and decides whether to retrain.

Every evaluation that had something to say is in the ledger, also the suppressed ones; the task is
skipped when nothing is to be done, so that only a real request raises the asset event.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from airflow.sdk import DAG, Context, task
from airflow.sdk.exceptions import AirflowSkipException

from dags._build import DEFAULT_ARGS, models, retrain_asset, settings
from dags._errors import airflow_errors
from dags._rooms import open_rooms
from perennial.spec import ModelSpec


def build(dag_id: str, spec: ModelSpec) -> DAG:
    asset = retrain_asset(spec.name)
    with DAG(
        dag_id,
        description=f"Watches {spec.name}; asks for a retrain when its policy says so",
        schedule=timedelta(seconds=settings().watch_interval_s),
        start_date=datetime(2026, 1, 1),
        catchup=False,
        max_active_runs=1,
        default_args={**DEFAULT_ARGS, "retries": 0},
        tags=["perennial", spec.name],
        doc_md=__doc__,
    ) as dag:

        @task(outlets=[asset], task_id="decide")
        def decide(**context: Any) -> dict[str, Any]:
            return watch(spec.name, context, asset)  # type: ignore[arg-type]

        decide()
    return dag


def watch(model: str, context: Context, asset: Any) -> dict[str, Any]:
    """Evaluates the thresholds and the policy; opens an episode and raises the event on a yes."""
    from monitoring.watch import watch as decide

    with airflow_errors(), open_rooms(model) as rooms:
        found = decide(
            rooms.settings,
            rooms.spec,
            rooms.ledger,
            actor=f"airflow:{context['dag_run'].run_id}",
        )
    if found.episode_id is None:
        raise AirflowSkipException(found.summary)
    event = context["outlet_events"][asset]
    event.add_partitions([found.episode_id])
    event.extra = {"episode": found.episode_id, "reasons": list(found.reasons)}
    return {"episode": found.episode_id, "reasons": list(found.reasons)}


for _dag_id, _spec in models("watch"):
    globals()[_dag_id] = build(_dag_id, _spec)
