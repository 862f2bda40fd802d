"""The training rows in memory, and which of them make up which step.

The order is a function of (seed, step, global batch) alone: `RandomIndexShuffle` is a bijection on
the rows of an epoch that is computed per index. There is no shuffle buffer and no iterator state: a
run resumes at any step, and every number of workers sees the same global batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from perennial.spec import FeatureType, ModelSpec
from training.hooks import DTYPE, learnable
from training.snapshot import LAYOUT, Layout

PARSE_BATCH = 8192


@dataclass(frozen=True)
class Rows:
    """Features by name and labels, each [row], in the dtype of the wire."""

    features: dict[str, tf.Tensor]
    labels: tf.Tensor
    count: int

    def take(self, indices: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """(features {name: [k]}, labels [k]) of `indices` [k]."""
        features = {name: tf.gather(column, indices) for name, column in self.features.items()}
        return features, tf.gather(self.labels, indices)


def load_rows(spec: ModelSpec, snapshot: Path) -> Rows:
    """Reads the training shards of a snapshot, parsed in batches."""
    layout = Layout.read(snapshot / LAYOUT)
    parsed = _parse(snapshot, layout)
    types = {name: feature.type for name, feature in learnable(spec).items()}
    features = {}
    for i, name in enumerate(layout.numbers):
        features[name] = parsed["numbers"][:, i]
    for i, name in enumerate(layout.codes):
        code = parsed["codes"][:, i]
        if types[name] == FeatureType.STRING:
            features[name] = tf.gather(tf.constant(layout.levels[name], tf.string), code)
        else:
            features[name] = tf.cast(code, DTYPE[types[name]])
    labels = parsed["label"][:, 0]
    return Rows(features, labels, int(labels.shape[0]))


def _parse(snapshot: Path, layout: Layout) -> dict[str, tf.Tensor]:
    """{"label": float32 [row, 1], "numbers": float32 [row, n], "codes": int64 [row, c]}"""
    form = {"label": tf.io.FixedLenFeature([1], tf.float32)}
    if layout.numbers:
        form["numbers"] = tf.io.FixedLenFeature([len(layout.numbers)], tf.float32)
    if layout.codes:
        form["codes"] = tf.io.FixedLenFeature([], tf.string)  # little-endian int64s

    def parse(records: tf.Tensor) -> dict[str, tf.Tensor]:
        parsed = tf.io.parse_example(records, form)
        if layout.codes:
            parsed["codes"] = tf.io.decode_raw(parsed["codes"], tf.int64)
        return parsed

    shards = [str(path) for path in sorted(snapshot.glob("train-*.tfrecord"))]
    batches = list(tf.data.TFRecordDataset(shards).batch(PARSE_BATCH).map(parse))
    return {name: tf.concat([batch[name] for batch in batches], 0) for name in batches[0]}


def indices_of_step(
    step: tf.Tensor, *, rows: int, seed: int, global_batch: int, rank: int, workers: int
) -> tf.Tensor:
    """Which rows worker `rank` takes at `step`: int64 [global_batch / workers].

    Position p of the endless stream is row `shuffle(p mod rows)` of epoch `p // rows`; a step takes
    the next `global_batch` positions and each worker one contiguous part of them.
    """
    local = global_batch // workers
    positions = step * global_batch + rank * local + tf.range(local, dtype=tf.int64)
    epochs = positions // rows
    seeds = tf.stack([tf.fill([local], tf.constant(seed, tf.int64)), epochs, epochs * 0], axis=1)
    return tf.raw_ops.RandomIndexShuffle(
        index=positions % rows,
        seed=seeds,
        max_index=tf.constant(rows - 1, tf.int64),
        rounds=4,
    )
