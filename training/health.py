"""When a group of workers counts as dead or hung: a pure function over what was heard of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """How long silence is borne.

    Attributes:
        start_s: from the start of a worker to its first heartbeat (graph building included).
        beat_s: between two heartbeats; workers send one every few steps.
    """

    start_s: float = 180.0
    beat_s: float = 60.0


def find_hung(
    last_beat: dict[int, float], started: float, now: float, workers: int, patience: Patience
) -> str | None:
    """The reason to stop the group, or None.

    Args:
        last_beat: time of the newest heartbeat by rank; absent before the first.
        started, now: seconds of one monotonic clock, like `last_beat`.
    """
    for rank in range(workers):
        beat = last_beat.get(rank)
        if beat is None and now - started > patience.start_s:
            return f"worker {rank} gave no sign of life for {now - started:.0f} s after its start"
        if beat is not None and now - beat > patience.beat_s:
            return f"worker {rank} has been silent for {now - beat:.0f} s"
    return None
