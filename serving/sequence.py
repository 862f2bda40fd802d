"""Lines that never came, found by the numbers that the router gives to captured calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

GRACE_S: Final = 120.0
"""A call gets its number when it arrives and its line when it ends: later than others."""
_MAX_HOLES: Final = 100_000
_MAX_WORKERS: Final = 256


class SequenceGaps:
    """Follows each worker's numbers; a hole that isn't filled within the grace is a lost line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._highest: dict[bytes, int] = {}
        self._holes: dict[tuple[bytes, int], float] = {}

    def see(self, worker: bytes, number: int) -> int:
        """Takes one line's number; returns how many lines are given up as lost by now."""
        highest = self._highest.get(worker)
        if not self._holes and highest is not None and number == highest + 1:
            self._highest[worker] = number
            return 0
        now = self._clock()
        if highest is None:
            if len(self._highest) >= _MAX_WORKERS:
                self._highest.pop(next(iter(self._highest)))
            self._highest[worker] = number
        elif number > highest:
            self._highest[worker] = number
            # A jump that no router makes is no gap.
            if number - highest <= _MAX_HOLES:
                for missing in range(highest + 1, number):
                    self._holes[worker, missing] = now
        else:
            self._holes.pop((worker, number), None)
        return self._expire(now)

    def _expire(self, now: float) -> int:
        lost = 0
        for since in self._holes.values():
            if now - since < GRACE_S and len(self._holes) - lost <= _MAX_HOLES:
                break
            lost += 1
        for _ in range(lost):
            self._holes.pop(next(iter(self._holes)))
        return lost
