"""Runs requests for the same program together, along their first dimension.

A free batch thread takes whatever is queued: there is no timer unless `batch_timeout_micros` asks
for one, so that batching never adds a wait of its own. Only requests whose other dimensions agree
are put together, and when a batch fails its requests are run singly, so that a bad one fails alone.
Queues and their scheduler live on the event loop; only the runs leave it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from serving.embedded.batchparameters import PER_MODEL_FILE, Parameters
from serving.embedded.flags import Flags
from serving.embedded.metrics import Metrics
from serving.embedded.program import Program
from serving.embedded.servable import Servable
from serving.embedded.status import Code, StatusError, invalid

log = logging.getLogger(__name__)

# Fewer rows do not start a second batch of the same queue while one runs.
BESIDE_ROWS = 16
# Batches of a program that usually takes less run on the event loop; while a thread runs a slower
# one, requests gather.
QUICK_BATCH_S = 0.0002
# A quick program that found nobody to share with runs this many requests at once before it waits
# for company again, for one turn of the event loop.
ALONE = 15

Arrays = Sequence[np.ndarray]
Outcome = list[np.ndarray] | StatusError


@dataclass(eq=False)
class Task:
    """One request, or a part of one, that waits.

    Attributes:
        enqueued_s, deadline_s: monotonic times; no deadline: infinite.
    """

    arrays: Arrays
    rows: int
    future: asyncio.Future[list[np.ndarray]]
    enqueued_s: float
    deadline_s: float


class Scheduler:
    """The batch threads that all queues share; queues take turns."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="batch")
        self._free = threads
        self._ready: dict[Queue, None] = {}
        self._is_scheduled = False

    def wake(self, queue: Queue) -> None:
        """Lets the queue's requests run, at the next turn of the event loop."""
        self._ready[queue] = None
        if not self._is_scheduled and (self._free or queue.is_quick()):
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _dispatch(self) -> None:
        self._is_scheduled = False
        while queue := self._next():
            tasks = queue.take()
            if queue.is_due():
                self._ready[queue] = None
            if not tasks:
                continue
            if queue.is_quick():
                queue.settle(tasks, queue.execute(tasks, None))
                continue
            self._free -= 1
            queue.running_rows += sum(task.rows for task in tasks)
            timeout_s = max(task.deadline_s for task in tasks) - time.monotonic()
            run = asyncio.get_running_loop().run_in_executor(
                self._pool, queue.execute, tasks, timeout_s if timeout_s < float("inf") else None
            )
            run.add_done_callback(partial(self._ended, queue, tasks))

    def _next(self) -> Queue | None:
        """The first queue in turn that can run: a quick one needs no free thread."""
        for queue in self._ready:
            if queue.is_quick() or (self._free and queue.is_worth_a_thread()):
                del self._ready[queue]
                return queue
        return None

    def _ended(self, queue: Queue, tasks: list[Task], run: asyncio.Future[list[Outcome]]) -> None:
        self._free += 1
        queue.running_rows -= sum(task.rows for task in tasks)
        if run.cancelled():
            outcomes: list[Outcome] = [_stopping() for _ in tasks]
        else:
            outcomes = run.result()
        queue.settle(tasks, outcomes)
        self._dispatch()


class Queue:
    """The waiting requests of one program.

    Args:
        scheduler: shared by all queues.

    Attributes:
        running_rows: rows of this queue that batch threads are running.
    """

    def __init__(
        self, program: Program, parameters: Parameters, scheduler: Scheduler, metrics: Metrics
    ) -> None:
        self._program = program
        self._parameters = parameters
        self._scheduler = scheduler
        self._metrics = metrics
        # By the shapes of the inputs without their first dimension: these fit together.
        self._waiting: dict[tuple[tuple[int, ...], ...], deque[Task]] = {}
        self._rows = 0
        self.running_rows = 0
        self._alone = 0
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, arrays: Arrays, timeout_s: float | None) -> list[np.ndarray]:
        """Answers one request.

        Raises:
            StatusError: no common number of rows, too many of them, UNAVAILABLE when the queue is
                full, or what the graph says.
        """
        rows = _rows(arrays)
        if not rows:
            return self._program.run(arrays)
        if rows <= self._parameters.max_execution_batch_size:
            if (
                self._alone
                and not self._rows
                and self.is_quick()
                and self._program.is_quick(arrays)
            ):
                self._alone -= 1
                self._metrics.queuing_latency.observe(value=0.0)
                return self._run_padded(arrays, rows, _first_rows(arrays), None)
            return await self._enqueue(arrays, rows, timeout_s)
        if not self._parameters.splits:
            raise invalid(
                f"Task size {rows} is larger than maximum input batch size "
                f"{self._parameters.max_batch_size}"
            )
        size = self._parameters.max_execution_batch_size
        parts = await asyncio.gather(
            *(
                self._enqueue([array[start : start + size] for array in arrays], part, timeout_s)
                for start in range(0, rows, size)
                for part in [min(size, rows - start)]
            ),
            return_exceptions=True,
        )
        answers = []
        for part in parts:
            if isinstance(part, BaseException):
                raise part
            answers.append(part)
        return [np.concatenate(values) for values in zip(*answers, strict=True)]

    # For the scheduler

    def take(self) -> list[Task]:
        """The tasks of the next batch; those whose time is over are told so."""
        self._cancel_timer()
        tasks: list[Task] = []
        rows, now = 0, time.monotonic()
        while self._waiting and not tasks:
            key = next(iter(self._waiting))
            waiting = self._waiting.pop(key)
            while waiting and rows + waiting[0].rows <= self._parameters.max_execution_batch_size:
                task = waiting.popleft()
                self._rows -= task.rows
                if task.future.done():
                    continue
                if task.deadline_s <= now:
                    task.future.set_exception(_too_late())
                    continue
                tasks.append(task)
                rows += task.rows
                self._metrics.queuing_latency.observe(value=(now - task.enqueued_s) * 1e6)
            if waiting:
                self._waiting[key] = waiting
        self._alone = ALONE if len(tasks) == 1 and not self._waiting else 0
        return tasks

    def is_due(self) -> bool:
        """Whether what is left may run now; else a timer is set for it, if anything is left."""
        if not self._waiting:
            return False
        if self._parameters.batch_timeout_s <= 0:
            return True
        if self._rows >= self._parameters.max_execution_batch_size:
            return True
        if self._timer is None:
            oldest = min(waiting[0].enqueued_s for waiting in self._waiting.values())
            wait_s = oldest + self._parameters.batch_timeout_s - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(
                max(0.0, wait_s), self._scheduler.wake, self
            )
        return False

    def is_quick(self) -> bool:
        """Whether its batches run on the event loop."""
        return self._program.usually_takes(QUICK_BATCH_S)

    def is_worth_a_thread(self) -> bool:
        """Whether to run now, or to gather on beside the batch that is under way.

        A run uses all cores already; few rows beside many only make both slower.
        """
        return not self.running_rows or self._rows >= max(self.running_rows, BESIDE_ROWS)

    def execute(self, tasks: list[Task], timeout_s: float | None) -> list[Outcome]:
        """Runs a batch, in any thread; one outcome per task."""
        try:
            return list(self._execute_together(tasks, timeout_s))
        except StatusError as error:
            failure = error
        except Exception as error:
            # Whatever it is, the requests must not wait for ever.
            log.exception("running a batch of %d requests", len(tasks))
            failure = StatusError(Code.INTERNAL, f"{type(error).__name__}: {error}")
        if len(tasks) == 1 or failure.code == Code.DEADLINE_EXCEEDED:
            return [failure] * len(tasks)
        return [self.execute([task], timeout_s)[0] for task in tasks]

    def settle(self, tasks: list[Task], outcomes: list[Outcome]) -> None:
        """Hands each task its outcome."""
        for task, outcome in zip(tasks, outcomes, strict=True):
            if task.future.done():
                continue
            if isinstance(outcome, StatusError):
                task.future.set_exception(outcome)
            else:
                task.future.set_result(outcome)

    def _enqueue(
        self, arrays: Arrays, rows: int, timeout_s: float | None
    ) -> asyncio.Future[list[np.ndarray]]:
        limit = self._parameters.max_enqueued_batches * self._parameters.max_execution_batch_size
        if self._rows + rows > limit:
            raise StatusError(
                Code.UNAVAILABLE,
                "The batch scheduling queue to which this task was submitted is full; "
                f"{self._rows} rows are waiting, at most {limit} may",
            )
        now = time.monotonic()
        deadline_s = float("inf") if timeout_s is None else now + timeout_s
        future = asyncio.get_running_loop().create_future()
        task = Task(arrays, rows, future, now, deadline_s)
        key = (
            ()
            if self._parameters.pad_variable_length_inputs
            else tuple(array.shape[1:] for array in arrays)
        )
        self._waiting.setdefault(key, deque()).append(task)
        self._rows += rows
        if self.is_due():
            self._scheduler.wake(self)
        return future

    def _execute_together(
        self, tasks: list[Task], timeout_s: float | None
    ) -> Sequence[list[np.ndarray]]:
        rows = sum(task.rows for task in tasks)
        columns: list[Arrays] = list(zip(*(task.arrays for task in tasks), strict=True))
        if self._parameters.pad_variable_length_inputs:
            columns = [_same_shape(column) for column in columns]
        arrays = [column[0] if len(column) == 1 else np.concatenate(column) for column in columns]
        last = [column[-1][:1] for column in columns]
        values = self._run_padded(arrays, rows, last, timeout_s)
        if len(tasks) == 1:
            return [values]
        ends = np.cumsum([task.rows for task in tasks])[:-1]
        return [list(parts) for parts in zip(*(np.split(v, ends) for v in values), strict=True)]

    def _run_padded(
        self, arrays: Arrays, rows: int, last: Arrays, timeout_s: float | None
    ) -> list[np.ndarray]:
        """Runs `rows` rows, padded by repeating `last` [1, ...]; gives the outputs of the rows."""
        size = self._parameters.padded(rows)
        if size > rows:
            arrays = [
                np.concatenate([array, np.repeat(row, size - rows, axis=0)])
                for array, row in zip(arrays, last, strict=True)
            ]
        values = self._program.run(arrays, timeout_s)
        metrics = self._metrics
        metrics.wrapped_runs.add()
        metrics.input_batch_size.observe(value=rows)
        metrics.processed_batch_size.observe(value=size)
        metrics.padding_size.observe(value=size - rows)
        for value in values:
            if not np.ndim(value):
                raise StatusError(
                    Code.FAILED_PRECONDITION, "Batched output tensor has 0 dimensions"
                )
            if len(value) != size:
                raise StatusError(
                    Code.FAILED_PRECONDITION,
                    "Batched output tensor's 0th dimension does not equal the sum of the 0th "
                    "dimension sizes of the input tensors",
                )
        return values if size == rows else [value[:rows] for value in values]

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Batcher:
    """Gives versions their queues, as the flags say."""

    def __init__(self, flags: Flags, metrics: Metrics) -> None:
        self._is_on = flags.enable_batching
        self._per_model = flags.enable_per_model_batching_parameters
        self._metrics = metrics
        self._parameters = (
            Parameters.read(Path(flags.batching_parameters_file))
            if flags.batching_parameters_file
            else Parameters()
        )
        self._scheduler = Scheduler(self._parameters.num_batch_threads)

    def batch(self, servable: Servable, folder: Path) -> None:
        """From now on the version's signatures are batched; raises StatusError for a bad file."""
        parameters = self._parameters
        if self._per_model:
            path = folder / PER_MODEL_FILE
            if not path.exists():
                return
            parameters = Parameters.read(path)
        if self._is_on:
            for program in servable.declared:
                program.queue = Queue(program, parameters, self._scheduler, self._metrics)

    def close(self) -> None:
        self._scheduler.close()


def _rows(arrays: Arrays) -> int:
    """The common first dimension."""
    if not arrays:
        raise invalid("Batching Run() must have at least one input tensor")
    if not all(array.ndim for array in arrays):
        raise invalid("Batching Run() input tensors must have at least one dimension")
    rows = len(arrays[0])
    if any(len(array) != rows for array in arrays):
        raise invalid("Batching Run() input tensors must have equal 0th-dimension size")
    return rows


def _first_rows(arrays: Arrays) -> Arrays:
    return [array[:1] for array in arrays]


def _same_shape(column: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Pads every dimension but the first to the largest, with the array's own first value."""
    if len({array.ndim for array in column}) > 1:
        raise invalid("Batching Run() input tensors must have equal rank to be padded")
    shape = tuple(max(sizes) for sizes in zip(*(array.shape[1:] for array in column), strict=True))
    padded = []
    for array in column:
        if array.shape[1:] != shape and array.size:
            wider = np.full((len(array), *shape), array.flat[0], array.dtype)
            wider[tuple(slice(size) for size in array.shape)] = array
            array = wider
        padded.append(array)
    return padded


def _too_late() -> StatusError:
    return StatusError(Code.DEADLINE_EXCEEDED, "The deadline passed while the request was queued")


def _stopping() -> StatusError:
    return StatusError(Code.UNAVAILABLE, "The server is stopping")
