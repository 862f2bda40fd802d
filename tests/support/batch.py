"""Small SavedModels, published as versions: of the model `clicks`, and of any other's signature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perennial.spec import FeatureType, ModelSpec
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
    return _publish(store, "clicks", version, module, module.serve)


def publish_any(store: Store, spec: ModelSpec, version: int) -> Path:
    """The sum of a row's known numbers through a sigmoid, as any model's output, [n, 1]."""
    import tensorflow as tf

    kinds = {
        FeatureType.STRING: tf.string,
        FeatureType.INT: tf.int64,
        FeatureType.FLOAT: tf.float32,
        FeatureType.BOOL: tf.bool,
    }
    features = spec.data.features

    @tf.function(
        input_signature=[{n: tf.TensorSpec([None], kinds[f.type], n) for n, f in features.items()}]
    )
    def serve(inputs: dict[str, Any]) -> dict[str, Any]:
        numbers = [
            tf.cast(inputs[name], tf.float32)
            for name, feature in features.items()
            if feature.type != FeatureType.STRING
        ]
        known = [tf.where(tf.math.is_nan(number), 0.0, number) for number in numbers]
        return {spec.data.output: tf.sigmoid(tf.add_n(known) / 1e4)[:, None]}

    return _publish(store, spec.name, version, tf.Module(), serve)


def _publish(store: Store, model: str, version: int, module: Any, serve: Any) -> Path:
    import tensorflow as tf

    target = store.version(model, version)
    with publishing(target, kind="version", model=model, id=str(version)) as (folder, _):
        tf.saved_model.save(module, str(folder), signatures={"serving_default": serve})
    return target
