"""`<model>.retrain`: an Airflow dag from a request to a published version.

It runs for an episode that `<model>.watch` opened (its id is the partition key), or is triggered by
hand: then it opens the episode itself, from the form's params.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Context, Param, task
from airflow.sdk.exceptions import AirflowSkipException

from dags._build import episode_dag, models, release_asset, retrain_asset
from dags._errors import airflow_errors
from dags._rooms import open_rooms
from dags.operators.advance import AdvanceOperator, fail_episode
from perennial.spec import ModelSpec
from perennial.states import State

PARAMS = {
    "reason": Param(
        None,
        type=["null", "string"],
        title="Reason",
        description="Why the model is retrained by hand; goes into the ledger.",
        section="Request",
    ),
    "actor": Param(None, type=["null", "string"], title="Who asks", section="Request"),
    "shuffle_labels": Param(
        False,
        type="boolean",
        title="Drill: shuffle the labels",
        description="Trains a deliberately bad candidate, to see that it is stopped.",
        section="Drill",
    ),
}

WORK = (
    State.COLLECTING,
    State.VALIDATING,
    State.TRAINING,
    State.EVALUATING,
    State.EXPORTING,
)
EPISODE = "{{ ti.xcom_pull(task_ids='open') }}"


def build(dag_id: str, spec: ModelSpec) -> DAG:
    asset = release_asset(spec.name)
    with episode_dag(
        dag_id,
        spec,
        retrain_asset(spec.name),
        description=f"Retrains {spec.name}: collect, validate, train, evaluate, export, publish",
        params=PARAMS,
        doc_md=__doc__,
    ) as dag:

        @task(task_id="open")
        def open_(**context: Any) -> str:
            return open_episode(spec.name, context)  # type: ignore[arg-type]

        @task(task_id="hand_over", outlets=[asset])
        def hand_over(episode_id: str, **context: Any) -> str:
            return announce(spec.name, episode_id, context, asset)  # type: ignore[arg-type]

        opened = open_()
        last: Any = opened
        for state in WORK:
            step = AdvanceOperator(
                task_id=str(state),
                model=spec.name,
                state=state,
                episode_id=EPISODE,
                on_failure_callback=fail_episode,
                execution_timeout=spec.training.max_duration + timedelta(hours=1),
            )
            last >> step
            last = step
        last >> hand_over(opened)  # type: ignore[arg-type]
    return dag


def open_episode(model: str, context: Context) -> str:
    """The run's episode: the partition key's, or a new one for a run triggered by hand."""
    run = context["dag_run"]
    with airflow_errors(), open_rooms(model) as rooms:
        if run.partition_key:
            return rooms.ledger.episode(run.partition_key).id
        params = context["params"]
        reason = params.get("reason") or "triggered by hand"
        episode = rooms.ledger.open_episode(
            rooms.spec,
            actor=params.get("actor") or f"airflow:{run.run_id}",
            trigger={"kind": "manual", "reasons": [reason], "run": run.run_id},
            params={"shuffle_labels": bool(params.get("shuffle_labels"))},
            trigger_key=("manual", run.run_id),
        )
        return episode.id


def announce(model: str, episode_id: str, context: Context, asset: Any) -> str:
    """Raises the event that a release waits for, when there is something to release."""
    with airflow_errors(), open_rooms(model) as rooms:
        episode = rooms.ledger.episode(episode_id)
    if episode.state not in (State.SHADOWING, State.PROMOTING):
        raise AirflowSkipException(f"episode {episode.id} is {episode.state}: nothing to release")
    event = context["outlet_events"][asset]
    event.add_partitions([episode.id])
    event.extra = {"episode": episode.id, "version": episode.version}
    return str(episode.state)


for _dag_id, _spec in models("retrain"):
    globals()[_dag_id] = build(_dag_id, _spec)
