"""One long trigger per waiting release: a reconcile step per poll, in a thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from dags._rooms import open_rooms
from perennial.errors import Conflict, Retryable
from perennial.ledger import Episode

log = logging.getLogger(__name__)


class ReleaseTrigger(BaseTrigger):
    """Fires when the episode has left `states`.

    A step that cannot be done now is tried again at the next poll. Since a step is a function of
    the ledger and the stores, a triggerer that is killed and started again goes on where it was.

    Args:
        poll_s: between two looks that found nothing to do.
    """

    def __init__(
        self, *, model: str, episode_id: str, states: list[str], actor: str, poll_s: float
    ) -> None:
        super().__init__()
        self.model = model
        self.episode_id = episode_id
        self.states = states
        self.actor = actor
        self.poll_s = poll_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "model": self.model,
                "episode_id": self.episode_id,
                "states": self.states,
                "actor": self.actor,
                "poll_s": self.poll_s,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        while True:
            before, after = await asyncio.to_thread(self._step)
            if after is not None and after.state not in self.states:
                yield TriggerEvent({"episode": after.id, "state": str(after.state)})
                return
            if before == after:
                await asyncio.sleep(self.poll_s)

    def _step(self) -> tuple[Episode | None, Episode | None]:
        """The episode before and after one step; equal when there was nothing to do."""
        try:
            with open_rooms(self.model) as rooms:
                before = rooms.ledger.episode(self.episode_id)
                if before.state not in self.states:
                    return before, before
                return before, rooms.advance(self.episode_id, actor=self.actor)
        except (Retryable, Conflict) as error:
            log.warning("%s; trying again in %s s", error, self.poll_s)
            return None, None
