"""`perennial.housekeeping`: an Airflow dag that ends what nobody drives and mends what drifted.

Episodes past their state's timeout end; serving is reconciled with the ledger.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from airflow.sdk import DAG, task

from dags._build import settings
from dags._errors import airflow_errors
from dags._rooms import open_rooms
from perennial.ledger import utc_now
from perennial.states import TIMEOUT

with DAG(
    "perennial.housekeeping",
    description="Ends episodes that nobody drives; reconciles serving with the ledger",
    schedule=timedelta(minutes=10),
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    tags=["perennial"],
    doc_md=__doc__,
) as dag:

    @task
    def models() -> list[str]:
        from perennial.spec import load_specs

        with airflow_errors():
            return list(load_specs(settings().models_dir, settings().profile))

    @task(retries=2, retry_delay=timedelta(seconds=10))
    def mend(model: str) -> str:
        from serving.reconcile import Serving

        with airflow_errors(), open_rooms(model) as rooms:
            episode = rooms.ledger.open_episode_of(model)
            if episode and utc_now() - episode.state_since > TIMEOUT[episode.state]:
                episode = rooms.advance(episode.id, actor="housekeeping")
            want = Serving(rooms.settings, rooms.ledger).reconcile(model)
        return f"{episode.state if episode else 'idle'}: {want}"

    mend.expand(model=models())
