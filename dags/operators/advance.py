"""Moves an episode through one state of its way; thin: `perennial.episode.advance` decides."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from dags._errors import airflow_errors
from dags._rooms import open_rooms
from perennial.errors import PerennialError
from perennial.ledger import Episode
from perennial.states import OPEN, State

log = logging.getLogger(__name__)

ORDER = list(State)
"""The order of the states along the way, as the enum declares them."""


class AdvanceOperator(BaseOperator):
    """Advances an episode until it is past `state`; one that is past it already is left alone.

    So clearing a task is safe.

    Args:
        model: name of the model under care.
        state: the last state whose work this task does.
        episode_id: template; usually the XCom of the task that opened the episode.

    The task is skipped when the episode has ended without an error, and fails when it has failed.
    """

    template_fields: Sequence[str] = ("episode_id",)

    def __init__(self, *, model: str, state: State, episode_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = model
        self.state = state
        self.episode_id = episode_id

    def execute(self, context: Context) -> str:
        actor = f"airflow:{context['dag_run'].run_id}"
        with airflow_errors(), open_rooms(self.model) as rooms:
            episode = rooms.ledger.episode(self.episode_id)
            while episode.is_open and ORDER.index(episode.state) <= ORDER.index(self.state):
                before = episode
                episode = rooms.advance(episode.id, actor=actor)
                if episode == before:
                    break
        return settle(episode, self.state)


def settle(episode: Episode, done: State) -> str:
    """What a task says after its step: the episode's state, a skip, or a failure."""
    log.info("episode %s is %s", episode.id, episode.state)
    if episode.state is State.FAILED:
        raise AirflowFailException(f"episode {episode.id} failed: see `perennial explain`")
    if episode.state not in OPEN and episode.state is not State.PROMOTED:
        raise AirflowSkipException(f"episode {episode.id} has ended: {episode.state}")
    if ORDER.index(episode.state) < ORDER.index(done):
        raise AirflowException(f"episode {episode.id} is still {episode.state}, before {done}")
    return str(episode.state)


def fail_episode(context: Context) -> None:
    """Task callback after the last try: an episode never hangs because its task is gone."""
    from perennial.episode import end

    task = context["task"]
    episode_id = getattr(task, "episode_id", "")
    error = context.get("exception")
    try:
        with open_rooms(task.model) as rooms:
            if episode_id and rooms.ledger.episode(episode_id).is_open:
                end(
                    rooms.ledger,
                    episode_id,
                    State.FAILED,
                    actor=f"airflow:{context['dag_run'].run_id}",
                    reason=f"task {task.task_id} failed: {error}"[:400],
                    cleanup=rooms.cleanup,
                )
    except PerennialError:
        # Housekeeping ends what is left open; a callback has nobody to raise to.
        log.exception("episode %s could not be ended", episode_id)
