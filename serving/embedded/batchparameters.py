"""BatchingParameters: how large batches may be, and how long they wait."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from serving.embedded.config import read_text_proto
from serving.embedded.status import invalid
from serving.protos import batching_parameters_pb2

# In a version's folder, with --enable_per_model_batching_parameters.
PER_MODEL_FILE = "batching_params.pbtxt"


@dataclass(frozen=True)
class Parameters:
    """BatchingParameters with their defaults.

    Attributes:
        max_batch_size: rows of one request, and of a batch unless requests are split.
        batch_timeout_s: how long a batch waits to fill up; 0: not at all.
        max_enqueued_batches: full batches that may wait in one queue.
        allowed_batch_sizes: batches are padded up to the next of these; empty: never.
        pad_variable_length_inputs: pad other dimensions too, so that all requests fit together.
        splits: whether a larger request is run in parts.
        max_execution_batch_size: rows of one run.
    """

    max_batch_size: int = 1000
    batch_timeout_s: float = 0.0
    max_enqueued_batches: int = 10
    num_batch_threads: int = os.cpu_count() or 1
    allowed_batch_sizes: tuple[int, ...] = ()
    pad_variable_length_inputs: bool = False
    splits: bool = False
    max_execution_batch_size: int = 1000

    @classmethod
    def read(cls, path: Path) -> Parameters:
        """Reads a text-format BatchingParameters.

        Raises:
            StatusError: it cannot be read, or its values do not fit together.
        """
        message = read_text_proto(
            path,
            batching_parameters_pb2.BatchingParameters(),
            "tensorflow.serving.BatchingParameters",
        )
        given = {
            field.name: value.value
            for field, value in message.ListFields()
            if field.message_type is not None
        }
        for name in ("max_batch_size", "num_batch_threads", "max_enqueued_batches"):
            if given.get(name, 1) < 1:
                raise invalid(f"{name} must be positive; was {given[name]}")
        if given.get("batch_timeout_micros", 0) < 0:
            raise invalid(
                f"batch_timeout_micros must be non-negative; was {given['batch_timeout_micros']}"
            )
        max_batch_size = given.get("max_batch_size", cls.max_batch_size)
        splits = given.get("enable_large_batch_splitting", False)
        max_run = given.get("max_execution_batch_size", 0) if splits else 0
        return cls(
            max_batch_size=max_batch_size,
            batch_timeout_s=given.get("batch_timeout_micros", 0) / 1e6,
            max_enqueued_batches=given.get("max_enqueued_batches", cls.max_enqueued_batches),
            num_batch_threads=given.get("num_batch_threads", cls.num_batch_threads),
            allowed_batch_sizes=tuple(message.allowed_batch_sizes),
            pad_variable_length_inputs=message.pad_variable_length_inputs,
            splits=splits,
            max_execution_batch_size=max_run or max_batch_size,
        ).checked()

    def checked(self) -> Parameters:
        """Itself; raises StatusError when `allowed_batch_sizes` cannot be kept."""
        sizes = self.allowed_batch_sizes
        if any(after <= before for before, after in zip((0, *sizes), sizes, strict=False)):
            raise invalid("allowed_batch_sizes entries must be positive and in increasing order")
        if sizes and sizes[-1] != self.max_execution_batch_size:
            which = "max_execution_batch_size" if self.splits else "max_batch_size"
            raise invalid(
                f"Last entry in allowed_batch_sizes must match {which}; last entry was "
                f"{sizes[-1]}; expected {self.max_execution_batch_size}"
            )
        return self

    def padded(self, rows: int) -> int:
        """The smallest allowed batch that holds `rows`."""
        return next((size for size in self.allowed_batch_sizes if size >= rows), rows)
