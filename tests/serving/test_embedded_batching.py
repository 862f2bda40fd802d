"""Batches are invisible: the same answers, the same errors, and a bad request fails alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from serving.embedded.batching import ALONE, Batcher, Queue, Scheduler
from serving.embedded.batchparameters import PER_MODEL_FILE, Parameters
from serving.embedded.flags import Flags
from serving.embedded.metrics import Histogram, Metrics
from serving.embedded.program import Program
from serving.embedded.servable import LoadOptions, Servable
from serving.embedded.status import StatusError
from tests.support.serving import export_model


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servable]:
    folder = export_model(tmp_path_factory.mktemp("rows") / "1", "rows")
    servable = Servable.load("rows", 1, folder, LoadOptions())
    yield servable
    servable.retire()


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servable]:
    folder = export_model(tmp_path_factory.mktemp("examples") / "1", "examples")
    servable = Servable.load("examples", 1, folder, LoadOptions())
    yield servable
    servable.retire()


def program(servable: Servable, signature: str = "serving_default") -> Program:
    return servable.served[signature].select().program


class Run:
    """One event loop with one queue; `answers` are arrays or StatusErrors, in order."""

    def __init__(
        self,
        program: Program,
        requests: Sequence[Any],
        *,
        turns: int = 1,
        timeout_s: float | None = None,
        **parameters: Any,
    ) -> None:
        self.metrics = Metrics()
        self.answers: list[Any] = []
        checked = Parameters(
            **{"max_execution_batch_size": parameters.get("max_batch_size", 1000), **parameters}
        ).checked()
        scheduler = Scheduler(2)
        queue = Queue(program, checked, scheduler, self.metrics)

        async def ask() -> None:
            for _ in range(turns):
                answers = await asyncio.gather(
                    *(queue.run([np.asarray(request)], timeout_s) for request in requests),
                    return_exceptions=True,
                )
                self.answers = [
                    answer if isinstance(answer, BaseException) else answer[0] for answer in answers
                ]

        asyncio.run(ask())
        scheduler.close()

    def count(self, histogram: Histogram) -> int:
        return sum(histogram.cell().counts)

    @property
    def runs(self) -> int:
        return int(self.metrics.wrapped_runs.cell().value)

    @property
    def padding(self) -> float:
        return self.metrics.padding_size.cell().sum


def matrix(*values: float) -> np.ndarray:
    return np.float32(values)[:, np.newaxis]  # [n, 1]


def strings(*features: dict[str, float]) -> np.ndarray:
    array = np.empty(len(features), object)
    for index, values in enumerate(features):
        example = tf.train.Example()
        for name, value in values.items():
            example.features.feature[name].float_list.value.append(value)
        array[index] = example.SerializeToString()
    return array


def test_what_comes_together_runs_together_and_answers_as_if_alone(rows: Servable) -> None:
    requests = [matrix(*range(start, start + 1 + start % 3)) for start in range(20)]
    alone = [program(rows).run([request])[0] for request in requests]

    run = Run(program(rows), requests)

    assert run.runs == 1
    for answer, wanted in zip(run.answers, alone, strict=True):
        np.testing.assert_array_equal(answer, wanted)
    assert run.count(run.metrics.queuing_latency) == 20


def test_batches_keep_to_the_largest_size(rows: Servable) -> None:
    run = Run(program(rows), [matrix(1.0, 2.0)] * 7, max_batch_size=5)

    assert [answer.tolist() for answer in run.answers] == [[1.0, 2.0]] * 7
    assert run.runs == 4
    assert run.metrics.processed_batch_size.cell().sum == 14


def test_a_bad_request_fails_alone(examples: Servable) -> None:
    bad = strings({"c": 1.0})
    requests = [strings({"x": 1.0}), bad, strings({"x": 2.0}, {"x": 3.0})]

    run = Run(program(examples, "flat"), requests)

    assert run.answers[0].tolist() == [2.0]
    assert run.answers[2].tolist() == [4.0, 6.0]
    with pytest.raises(StatusError) as alone:
        program(examples, "flat").run([bad])
    assert str(run.answers[1]) == str(alone.value)


def test_a_request_that_no_runtime_takes_fails_alone_too(examples: Servable) -> None:
    odd = np.array([object()], object)

    run = Run(program(examples, "flat"), [strings({"x": 1.0}), odd])

    assert run.answers[0].tolist() == [2.0]
    assert isinstance(run.answers[1], StatusError)


def test_other_shapes_are_other_batches(rows: Servable) -> None:
    wide = np.float32([[1, 2, 3]])

    run = Run(program(rows), [matrix(1.0), wide, matrix(5.0), wide])

    assert [answer.tolist() for answer in run.answers] == [[1.0], [6.0], [5.0], [6.0]]
    assert run.runs == 2


def test_variable_lengths_are_padded_when_asked_for(rows: Servable) -> None:
    wide = np.float32([[1, 2, 3]])

    run = Run(program(rows), [matrix(1.0), wide], pad_variable_length_inputs=True)

    # Padded with its own first value: [1] became [1, 1, 1].
    assert [answer.tolist() for answer in run.answers] == [[3.0], [6.0]]
    assert run.runs == 1


def test_batches_are_padded_to_allowed_sizes(rows: Servable) -> None:
    parameters = {"max_batch_size": 8, "allowed_batch_sizes": (2, 8)}

    one = Run(program(rows), [matrix(1.0)], **parameters)
    three = Run(program(rows), [matrix(1.0), matrix(2.0, 3.0)], **parameters)

    assert one.answers[0].tolist() == [1.0]
    assert (one.padding, three.padding) == (1, 5)
    assert [answer.tolist() for answer in three.answers] == [[1.0], [2.0, 3.0]]


def test_a_full_queue_is_unavailable(rows: Servable) -> None:
    run = Run(program(rows), [matrix(1.0)] * 5, max_batch_size=2, max_enqueued_batches=1)

    assert [answer.tolist() for answer in run.answers[:2]] == [[1.0], [1.0]]
    for answer in run.answers[2:]:
        assert str(answer).startswith("UNAVAILABLE: The batch scheduling queue to which")


@pytest.mark.parametrize(
    ("request_array", "signature", "message"),
    [
        (np.float32(1.0), "serving_default", "INVALID_ARGUMENT: Batching Run() input tensors must"),
        (matrix(1, 2, 3), "serving_default", "INVALID_ARGUMENT: Task size 3 is larger than "),
        (matrix(1), "scalar", "FAILED_PRECONDITION: Batched output tensor has 0 dimensions"),
        (matrix(1), "short", "FAILED_PRECONDITION: Batched output tensor's 0th dimension does "),
    ],
)
def test_what_cannot_be_batched_is_refused(
    rows: Servable, request_array: np.ndarray, signature: str, message: str
) -> None:
    run = Run(program(rows, signature), [request_array], max_batch_size=2)

    assert str(run.answers[0]).startswith(message)


def test_inputs_must_agree_on_their_rows(exports: Path) -> None:
    servable = Servable.load("mixed", 1, exports / "mixed" / "1", LoadOptions())
    queue = Queue(program(servable), Parameters(), Scheduler(1), Metrics())
    arrays = [np.int64([1, 2]), np.array([b"a"], object), np.float32([1, 2])]

    with pytest.raises(StatusError, match="must have equal 0th-dimension size"):
        asyncio.run(queue.run(arrays, None))
    with pytest.raises(StatusError, match="must have at least one input tensor"):
        asyncio.run(queue.run([], None))
    servable.retire()


def test_a_large_request_is_split_when_allowed(rows: Servable) -> None:
    values = list(range(7))

    run = Run(
        program(rows), [matrix(*values)], max_batch_size=7, splits=True, max_execution_batch_size=3
    )

    assert run.answers[0].tolist() == values
    assert run.runs == 3


def test_a_timer_is_kept_only_while_the_batch_is_not_full(rows: Servable) -> None:
    started = time.monotonic()
    full = Run(program(rows), [matrix(1.0)] * 4, max_batch_size=4, batch_timeout_s=60.0)
    assert time.monotonic() - started < 30
    assert full.runs == 1

    waited = Run(program(rows), [matrix(1.0)] * 3, max_batch_size=4, batch_timeout_s=0.05)
    assert waited.runs == 1
    assert waited.metrics.queuing_latency.cell().sum > 3 * 0.04e6


def test_a_request_whose_time_is_over_is_not_run(rows: Servable) -> None:
    run = Run(program(rows), [matrix(1.0)], timeout_s=0.01, batch_timeout_s=0.1)

    assert str(run.answers[0]).startswith("DEADLINE_EXCEEDED")
    assert run.runs == 0


def test_a_quick_program_without_company_does_not_wait_for_any(rows: Servable) -> None:
    quick = program(rows)
    quick.typical_run_s = 0.0

    run = Run(quick, [matrix(1.0)], turns=ALONE + 2)

    assert run.answers[0].tolist() == [1.0]
    assert run.runs == ALONE + 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "max_batch_size { value: 8 } allowed_batch_sizes: [2, 4]",
            "Last entry in allowed_batch_sizes must match max_batch_size; last entry was 4; "
            "expected 8",
        ),
        ("allowed_batch_sizes: [4, 2, 1000]", "in increasing order"),
        ("max_batch_size { value: 0 }", "max_batch_size must be positive; was 0"),
        ("num_batch_threads { value: -1 }", "num_batch_threads must be positive; was -1"),
        ("batch_timeout_micros { value: -1 }", "batch_timeout_micros must be non-negative"),
        ("nonsense: 1", "Error parsing text-format tensorflow.serving.BatchingParameters"),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "batching.config"
    path.write_text(text)

    with pytest.raises(StatusError, match=message):
        Parameters.read(path)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "batching.config"
    path.write_text(
        """max_batch_size { value: 64 } batch_timeout_micros { value: 1500 }
        max_enqueued_batches { value: 3 } num_batch_threads { value: 4 }
        thread_pool_name { value: "name" } allowed_batch_sizes: [8, 32]
        pad_variable_length_inputs: true enable_large_batch_splitting { value: true }
        max_execution_batch_size { value: 32 }"""
    )

    assert Parameters.read(path) == Parameters(
        max_batch_size=64,
        batch_timeout_s=0.0015,
        max_enqueued_batches=3,
        num_batch_threads=4,
        allowed_batch_sizes=(8, 32),
        pad_variable_length_inputs=True,
        splits=True,
        max_execution_batch_size=32,
    )


def test_per_model_parameters_rule_their_own_version(exports: Path, tmp_path: Path) -> None:
    flags = Flags(enable_batching=True, enable_per_model_batching_parameters=True)
    batcher = Batcher(flags, Metrics())
    servable = Servable.load("affine", 1, exports / "affine" / "1", LoadOptions())

    batcher.batch(servable, tmp_path)
    assert program(servable).queue is None

    (tmp_path / PER_MODEL_FILE).write_text("max_batch_size { value: 2 }")
    batcher.batch(servable, tmp_path)
    queue = program(servable).queue
    assert queue is not None
    with pytest.raises(StatusError, match="larger than maximum input batch size 2"):
        asyncio.run(queue.run([np.float32([1, 2, 3])], None))
    batcher.close()
    servable.retire()
