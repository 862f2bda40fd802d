"""Waits for a release without holding a worker; the trigger of the same name does the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import BaseOperator, Context

from dags._build import settings
from dags._errors import airflow_errors
from dags._rooms import open_rooms
from dags.operators.advance import settle
from dags.triggers.release import ReleaseTrigger
from perennial.states import State


class ReleaseOperator(BaseOperator):
    """Drives an episode while it is in one of `states`; deferred meanwhile.

    Args:
        model: name of the model under care.
        states: left when the episode is in none of them any more.
        episode_id: template.
    """

    template_fields: Sequence[str] = ("episode_id",)

    def __init__(
        self, *, model: str, states: Sequence[State], episode_id: str, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.model = model
        self.states = tuple(states)
        self.episode_id = episode_id

    def execute(self, context: Context) -> str:
        with airflow_errors(), open_rooms(self.model) as rooms:
            episode = rooms.ledger.episode(self.episode_id)
        if episode.state in self.states:
            self.defer(
                trigger=ReleaseTrigger(
                    model=self.model,
                    episode_id=self.episode_id,
                    states=[str(state) for state in self.states],
                    actor=f"airflow:{context['dag_run'].run_id}",
                    poll_s=settings().poll_s,
                ),
                method_name="execute_complete",
            )
        return settle(episode, self.states[-1])

    def execute_complete(self, context: Context, event: dict[str, Any]) -> str:
        with airflow_errors(), open_rooms(self.model) as rooms:
            episode = rooms.ledger.episode(event["episode"])
        return settle(episode, self.states[-1])
