"""A SavedModel for the model `clicks` of tests/support/training.py, published as a version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perennial.store import Store, publishing

REFUSED = "refused"
"""A city that the model raises an error for; an hour of -1 gives NaN."""


def publish_version(store: Store, version: int, *, seed: int = 0) -> Path:
    """A small network with random weights: every feature [n] → click float [n, 1]."""
    import tensorflow as tf

    class Clicks(tf.Module):
        def __init__(self) -> None:
            random = tf.random.Generator.from_seed(seed)
            self.cities = tf.Variable(random.normal([64, 8]))
            self.hidden = tf.Variable(random.normal([11, 64]) / 4)
            self.last = tf.Variable(random.normal([64, 1]) / 8)

        @tf.function(
            input_signature=[
                tf.TensorSpec([None], tf.string, "city"),
                tf.TensorSpec([None], tf.int64, "hour"),
                tf.TensorSpec([None], tf.float32, "amount"),
                tf.TensorSpec([None], tf.bool, "member"),
                tf.TensorSpec([None], tf.string, "email"),
            ]
        )
        def serve(self, city: Any, hour: Any, amount: Any, member: Any, email: Any) -> Any:
            tf.debugging.Assert(tf.reduce_all(city != REFUSED), ["no such city"])
            amount = tf.where(tf.math.is_nan(amount), 0.0, amount)
            numbers = tf.stack(
                [
                    tf.cast(hour, tf.float32) / 24,
                    amount / 20,
                    tf.cast(member, tf.float32),
                ],
                axis=1,
            )
            code = tf.strings.to_hash_bucket_fast(city, 64)
            x = tf.concat([tf.gather(self.cities, code), numbers], axis=1)
            score = tf.sigmoid(tf.nn.relu(x @ self.hidden) @ self.last)
            return {"click": tf.where((hour == -1)[:, None], float("nan"), score)}

    module = Clicks()
    target = store.version("clicks", version)
    with publishing(target, kind="version", model="clicks", id=str(version)) as (folder, _):
        tf.saved_model.save(module, str(folder), signatures={"serving_default": module.serve})
    return target
