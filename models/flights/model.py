"""The flights model: embeddings and weather into a small network, encoded in its own graph.

Clients send raw features. Vocabularies and moments come from the training rows of the snapshot
that the encoding was made from; a warm-started candidate inherits its champion's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras
import numpy as np
from keras import layers, ops

if TYPE_CHECKING:
    from training.hooks import BuildContext

EMBEDDING = {"carrier": 4, "origin": 2, "dest": 8}
MINUTES = ("sched_dep_minute", "sched_arr_minute")
NUMBERS = ("distance", "temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib")
HIDDEN = (256, 256)
L2 = 1e-4


def build_model(context: BuildContext) -> keras.Model:
    """Scalar inputs [batch] by feature name -> {"late": probability, [batch, 1]}."""
    inputs = context.inputs()
    parts = [
        layers.Embedding(len(context.vocabularies[name]) + 1, width, name=f"{name}_embedding")(
            layers.StringLookup(vocabulary=context.vocabularies[name], name=f"{name}_lookup")(
                inputs[name]
            )
        )
        for name, width in EMBEDDING.items()
    ]
    # Zero at first: a month that was never trained on says nothing, instead of noise.
    parts += [
        layers.Embedding(size, 2, embeddings_initializer="zeros", name=f"{name}_embedding")(
            ops.clip(ops.cast(inputs[name], "int32"), 0, size - 1)
        )
        for name, size in (("month", 13), ("day_of_week", 7))
    ]
    parts += [Cyclic(1440, name=f"{name}_cycle")(inputs[name]) for name in MINUTES]
    parts += [
        Standardised(*context.moments[name], name=f"{name}_scaled")(inputs[name])
        for name in NUMBERS
    ]
    x = layers.Concatenate(name="encoded")(parts)
    for i, width in enumerate(HIDDEN):
        x = layers.Dense(
            width,
            activation="relu",
            kernel_regularizer=keras.regularizers.L2(L2),
            name=f"hidden_{i}",
        )(x)
        x = layers.Dropout(0.2, name=f"dropout_{i}")(x)
    late = layers.Dense(1, activation="sigmoid", name="late")(x)
    return keras.Model(inputs, {context.output: late}, name="flights")


class Cyclic(layers.Layer):
    """A number on a circle as sines and cosines of three harmonics: [batch] -> [batch, 6]."""

    def __init__(self, period: float, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.period = period

    def call(self, x: object) -> object:
        angle = ops.expand_dims(ops.cast(x, "float32"), -1) * (2 * np.pi / self.period)
        angles = ops.concatenate([angle, 2 * angle, 3 * angle], -1)
        return ops.concatenate([ops.sin(angles), ops.cos(angles)], -1)


class Standardised(layers.Layer):
    """(value, is unknown): [batch] -> [batch, 2]; the value in deviations, at most 2, NaN as 0."""

    def __init__(self, mean: float, deviation: float, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.mean, self.deviation = mean, deviation

    def call(self, x: object) -> object:
        unknown = ops.isnan(x)
        scaled = ops.clip((x - self.mean) / self.deviation, -2.0, 2.0)
        scaled = ops.where(unknown, ops.zeros_like(scaled), scaled)
        return ops.stack([scaled, ops.cast(unknown, "float32")], -1)
