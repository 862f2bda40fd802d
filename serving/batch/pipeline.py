"""The Beam pipeline: shards in, one published folder per shard out.

RunInference over the embedded server's own session callable: the same call as online, so that both
give the same scores. A shard is one element and the steps are fused: one shard is in memory at a
time, however many there are.

It runs on the FnApiRunner, the engine that Beam's DirectRunner uses in-process. The name
DirectRunner would first look for a Prism binary on the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from apache_beam.ml.inference.base import ModelHandler, PredictionResult, RunInference
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from perennial.errors import Permanent
from perennial.spec import ModelSpec
from perennial.store import publishing
from serving.batch.rows import BAD_COLUMNS, OUTPUT_COLUMNS, Rows, Shard, read

SIGNATURE: Final = "serving_default"
BATCH_ROWS: Final = 1024
"""Rows of one call of the model."""
SCORES, BAD = "scores.parquet", "bad.parquet"


@dataclass(frozen=True)
class Model:
    """The version that predicts, and where it lies."""

    spec: ModelSpec
    version: int
    folder: Path


@dataclass(frozen=True)
class Scores:
    """Scores of the predictable rows; the reason where the model refused one. [row]"""

    values: np.ndarray
    reasons: list[str | None]


def run(model: Model, shards: Sequence[Shard], folder: Path) -> None:
    """Predicts the shards and publishes each as `folder/<index>`.

    Raises:
        Permanent: `batch.input`, `batch.signature`.
    """
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _ = (
            pipeline
            | "Shards" >> beam.Create(list(shards))
            | "Read" >> beam.Map(read, model.spec)
            | "Predict" >> RunInference(SavedModelHandler(model))
            | "Publish" >> beam.Map(publish, model, folder)
        )


class SavedModelHandler(ModelHandler[Rows, PredictionResult, Any]):
    """RunInference over one SavedModel's `serving_default`."""

    def __init__(self, model: Model) -> None:
        super().__init__(min_batch_size=1, max_batch_size=1)
        self._model = model

    def load_model(self) -> Any:
        from serving.embedded import session
        from serving.embedded.status import StatusError

        folder, data = self._model.folder, self._model.spec.data
        try:
            loaded = session.load(folder)
        except StatusError as error:
            raise Permanent("batch.signature", f"{folder} can't be loaded: {error}") from error
        signature = loaded.signatures.get(SIGNATURE)
        if (
            signature is None
            or set(signature.inputs) != set(data.features)
            or data.output not in signature.outputs
        ):
            given = signature and (sorted(signature.inputs), sorted(signature.outputs))
            raise Permanent(
                "batch.signature",
                f"{folder}: {SIGNATURE} has inputs and outputs {given}; model.yaml says "
                f"{sorted(data.features)} and {data.output!r}",
                hint="predict with the model.yaml of that version",
            )
        return loaded

    def run_inference(
        self, batch: Sequence[Rows], model: Any, inference_args: Any = None
    ) -> Iterable[PredictionResult]:
        for rows in batch:
            yield PredictionResult(rows, self._scores(rows, model))

    def get_num_bytes(self, batch: Sequence[Rows]) -> int:
        return sum(values.nbytes for rows in batch for values in rows.tensors.values())

    def _scores(self, rows: Rows, session: Any) -> Scores:
        from serving.embedded.session import numpy_type

        signature = session.signatures[SIGNATURE]
        output = self._model.spec.data.output
        names = sorted(signature.inputs)
        run = session.callable(
            tuple(signature.inputs[name].name for name in names), (signature.outputs[output].name,)
        )
        tensors = [
            rows.tensors[name].astype(numpy_type(signature.inputs[name].dtype), copy=False)
            for name in names
        ]
        count = len(next(iter(rows.tensors.values())))
        scores = Scores(np.full(count, np.nan), [None] * count)
        for start in range(0, count, BATCH_ROWS):
            stop = min(start + BATCH_ROWS, count)
            _fill(run, tensors, start, stop, scores)
        return scores


def _fill(run: Any, tensors: list[np.ndarray], start: int, stop: int, scores: Scores) -> None:
    """Predicts rows [start, stop); where the model refuses them, halves until it is one row."""
    import tensorflow as tf

    try:
        (values,) = run(*(tensor[start:stop] for tensor in tensors))
    except tf.errors.OpError as error:
        if stop - start == 1:
            scores.reasons[start] = f"the model: {' '.join(error.message.split())[:200]}"
            return
        middle = (start + stop) // 2
        _fill(run, tensors, start, middle, scores)
        _fill(run, tensors, middle, stop, scores)
        return
    values = np.asarray(values, np.float64)
    if values.size != stop - start:
        raise Permanent(
            "batch.signature",
            f"the output has the shape {list(values.shape)} for {stop - start} rows",
            hint="data.output must be [batch] or [batch, 1]",
        )
    scores.values[start:stop] = values.reshape(-1)
    for index in np.flatnonzero(~np.isfinite(scores.values[start:stop])) + start:
        scores.reasons[index] = f"the score is {scores.values[index]}"


def publish(result: PredictionResult, model: Model, folder: Path) -> int:
    """Publishes a shard whole: scores.parquet, and bad.parquet if any; returns its index."""
    rows, scores = result.example, result.inference
    shard: Shard = rows.shard
    good, bad = _tables(rows, scores, model)
    with publishing(
        folder / f"{shard.index:05d}",
        kind="batch_shard",
        model=model.spec.name,
        id=str(shard.index),
    ) as (temporary, facts):
        pq.write_table(good, temporary / SCORES, compression="zstd")
        if bad.num_rows:
            pq.write_table(bad, temporary / BAD, compression="zstd")
        facts.update(rows=rows.table.num_rows, scored=good.num_rows, bad=bad.num_rows)
    return shard.index


def _tables(rows: Rows, scores: Scores, model: Model) -> tuple[pa.Table, pa.Table]:
    """(scored rows, bad rows), in the order of the input."""
    reasons = list(rows.reasons)
    predicted = np.flatnonzero([reason is None for reason in reasons])
    values = np.full(len(reasons), np.nan)
    values[predicted] = scores.values
    for index, reason in zip(predicted, scores.reasons, strict=True):
        reasons[index] = reason
    is_good = pa.array([reason is None for reason in reasons], pa.bool_())
    good = rows.table.filter(is_good)
    added: dict[str, Any] = {
        "model": pa.repeat(pa.scalar(model.spec.name), good.num_rows),
        "version": pa.repeat(pa.scalar(model.version, OUTPUT_COLUMNS["version"]), good.num_rows),
        "score": pa.array(values[is_good.to_numpy(zero_copy_only=False)]),
    }
    for name, column in added.items():
        good = good.append_column(name, column)
    bad = rows.table.append_column("reason", pa.array(reasons, BAD_COLUMNS["reason"]))
    return good, bad.filter(pc.invert(is_good))
