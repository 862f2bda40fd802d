"""`<model>.release`: an Airflow dag from a published version to the verdict on it.

Runs for the episode in the partition key. The waits are deferred: one long trigger per release does
a reconcile step per poll, and no worker is held.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, Context, task

from dags._build import episode_dag, models, release_asset
from dags._errors import airflow_errors
from dags._rooms import open_rooms
from dags.operators.advance import AdvanceOperator, fail_episode
from dags.operators.release import ReleaseOperator
from perennial.spec import ModelSpec
from perennial.states import State

EPISODE = "{{ dag_run.partition_key }}"


def build(dag_id: str, spec: ModelSpec) -> DAG:
    with episode_dag(
        dag_id,
        spec,
        release_asset(spec.name),
        description=f"Releases {spec.name}: canary, ramp, verdict, promotion, probation",
        doc_md=__doc__,
    ) as dag:
        common: dict[str, Any] = {
            "model": spec.name,
            "episode_id": EPISODE,
            "on_failure_callback": fail_episode,
        }
        load = AdvanceOperator(task_id="load_canary", state=State.SHADOWING, **common)
        ramp = ReleaseOperator(
            task_id="ramp", states=(State.RAMPING, State.AWAITING_APPROVAL), **common
        )
        promote = AdvanceOperator(task_id="promote", state=State.PROMOTING, **common)
        probation = ReleaseOperator(task_id="probation", states=(State.PROBATION,), **common)

        @task(task_id="conclude", trigger_rule="all_done")
        def conclude(**context: Any) -> str:
            return sum_up(spec.name, context)  # type: ignore[arg-type]

        load >> ramp >> promote >> probation >> conclude()
    return dag


def sum_up(model: str, context: Context) -> str:
    """Makes serving what the ledger says, writes the report, and mirrors both into MLflow.

    Last and always run: it fails when the episode has failed, so that the run's colour is true.
    """
    from dags.operators.advance import settle
    from perennial.registry import sync

    with airflow_errors(), open_rooms(model) as rooms:
        episode = rooms.ledger.episode(context["dag_run"].partition_key)
        if not episode.is_open:
            rooms.cleanup(episode)
        sync(rooms.settings, rooms.ledger, model)
    return settle(episode, State.PROBATION)


for _dag_id, _spec in models("release"):
    globals()[_dag_id] = build(_dag_id, _spec)
