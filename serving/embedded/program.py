"""What a session runs: from one list of input tensors to one list of output tensors."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from serving.embedded import session as tf_session

log = logging.getLogger(__name__)

# Programs per version beside those of its signatures: clients choose which outputs they want.
MAX_PROGRAMS = 64
# A program that usually answers within this runs on the event loop: a thread would cost more.
QUICK_RUN_S = 0.0005
# Larger inputs take a thread, however quick smaller ones are.
QUICK_BYTES = 64 * 1024
# No warm-up request may run longer.
WARM_S = 600.0

Key = tuple[tuple[str, ...], tuple[str, ...]]


class Queue(Protocol):
    """Where requests for one program wait to be run together (batching.py)."""

    def run(
        self, arrays: Sequence[np.ndarray], timeout_s: float | None
    ) -> Awaitable[list[np.ndarray]]: ...


class Program:
    """Thread-safe.

    Attributes:
        typical_run_s: how long a run takes when nothing disturbs it; infinite before the first.
        queue: None when its requests run one by one.
    """

    def __init__(
        self,
        session: tf_session.Session,
        feeds: tuple[str, ...],
        fetches: tuple[str, ...],
        on_run: Callable[[float], None],
    ) -> None:
        self.feeds = feeds
        self.fetches = fetches
        self.typical_run_s = float("inf")
        self.queue: Queue | None = None
        self._session = session
        self._run = session.callable(feeds, fetches)
        self._on_run = on_run

    def usually_takes(self, at_most_s: float) -> bool:
        """False with loops in the graph: one value may make a run as long as it likes."""
        return self.typical_run_s <= at_most_s and not self._session.has_loops

    def is_quick(self, arrays: Sequence[np.ndarray]) -> bool:
        """Whether it is cheaper to run these on the event loop than in a thread."""
        return self.usually_takes(QUICK_RUN_S) and all(
            array.nbytes <= QUICK_BYTES for array in arrays
        )

    def run(self, arrays: Sequence[np.ndarray], timeout_s: float | None = None) -> list[np.ndarray]:
        """Runs in the caller's thread.

        Args:
            arrays: in the order of `feeds`.
            timeout_s: after which the runtime ends it, except the first run.

        Returns:
            arrays in the order of `fetches`.

        Raises:
            StatusError: what the graph says.
        """
        started = time.perf_counter()
        try:
            if timeout_s is None or self._is_first():
                values = self._run(*arrays)
            else:
                values = self._session.run_within(self.feeds, self.fetches, arrays, timeout_s)
        except tf.errors.OpError as error:
            raise tf_session.status_of(error) from error
        elapsed_s = time.perf_counter() - started
        typical_s = self.typical_run_s
        if typical_s == float("inf"):
            self.typical_run_s = elapsed_s
        else:
            # Rather a low than a high one: what else runs on the machine only ever adds.
            weight = 0.3 if elapsed_s < typical_s else 0.02
            self.typical_run_s = typical_s + weight * (elapsed_s - typical_s)
        self._on_run(elapsed_s)
        return values

    def _is_first(self) -> bool:
        """Whether this is the first run, which is the slowest; a loop may never end at all."""
        return self.typical_run_s == float("inf") and not self._session.has_loops

    def warm(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs it in every way that requests like this one will."""
        values = self.run(arrays)
        if not self.is_quick(arrays):
            self.run(arrays, WARM_S)
        return values


class Programs:
    """The programs of one session: those of its signatures, and what else is asked for."""

    def __init__(self, session: tf_session.Session, on_run: Callable[[float], None]) -> None:
        self._session = session
        self._on_run = on_run
        self._lock = threading.Lock()
        self._kept: dict[Key, Program] = {}
        self._made: dict[Key, Program] = {}

    def keep(self) -> list[Program]:
        """Keeps all that were made up to now for good, and returns them."""
        with self._lock:
            self._kept.update(self._made)
            self._made = {}
            return list(self._kept.values())

    def get(self, feeds: tuple[str, ...], fetches: tuple[str, ...]) -> Program:
        """Raises StatusError when the runtime refuses the tensors."""
        key = feeds, fetches
        with self._lock:
            program = self._kept.get(key) or self._made.get(key)
            if program is None:
                if len(self._made) >= MAX_PROGRAMS:
                    del self._made[next(iter(self._made))]
                try:
                    program = Program(self._session, feeds, fetches, self._on_run)
                except tf.errors.OpError as error:
                    raise tf_session.status_of(error) from error
                self._made[key] = program
                if any(kept.queue for kept in self._kept.values()):
                    log.warning("%s → %s is no signature and runs unbatched", feeds, fetches)
        return program
