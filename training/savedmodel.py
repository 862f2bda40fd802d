"""Writes a trained model as a lean SavedModel, its weights in int8 on disk when asked.

Keras' own export writes every weight twice. Here a `tf.Module` holds each once: large float
matrices as int8 with one scale per output channel, dequantised once by the SavedModel's init op
into a resource, everything else as it is. Only standard operations are used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_log_pb2

from perennial.spec import FeatureType, ModelSpec
from training.hooks import DTYPE, learnable
from training.served import SIGNATURE, WARM_UP

# Smaller variables cost nothing and lose nothing in float32.
QUANTISED_FROM = 4096
WARM_UP_BATCHES = (1, 1, 8, 32)


class Dequantized(tf.saved_model.experimental.TrackableResource):
    """A float32 weight that is stored as int8 [.., channel] and one scale per channel.

    Args:
        weight: float32, the last axis holds the output channels.
        name: of the resource; unique among everything that one server has loaded.
    """

    def __init__(self, weight: np.ndarray, name: str) -> None:
        super().__init__()
        self.name, self.shape = name, weight.shape
        channels = np.abs(weight).max(axis=tuple(range(weight.ndim - 1)))
        scale = np.maximum(channels, 1e-8) / 127
        self.quantized = tf.Variable(np.round(weight / scale).astype(np.int8), trainable=False)
        self.scale = tf.Variable(scale.astype(np.float32), trainable=False)
        self._handle = self.resource_handle

    def _create_resource(self) -> tf.Tensor:
        return tf.raw_ops.VarHandleOp(
            dtype=tf.float32, shape=self.shape, shared_name=self.name, container=""
        )

    def _initialize(self) -> None:
        tf.raw_ops.AssignVariableOp(
            resource=self.resource_handle, value=tf.cast(self.quantized, tf.float32) * self.scale
        )

    def read(self) -> tf.Tensor:
        value = tf.raw_ops.ReadVariableOp(resource=self.resource_handle, dtype=tf.float32)
        return tf.ensure_shape(value, self.shape)


class Servable(tf.Module):
    """The model's function over exactly the variables that it needs.

    Args:
        scope: makes the names of resources unique: model, episode and compression.
    """

    def __init__(self, model: keras.Model, spec: ModelSpec, *, int8: bool, scope: str) -> None:
        super().__init__()
        self._spec = spec
        self.quantized, self.plain = [], []
        readers: list[tuple[Any, Any]] = []
        for variable in model.variables:
            value = variable.value.numpy()
            if int8 and value.dtype == np.float32 and value.size >= QUANTISED_FROM:
                resource = Dequantized(value, f"{scope}/{variable.path}")
                resource._initialize()
                # The variables inside a resource must be reachable from the module as well.
                self.quantized.append((resource, resource.quantized, resource.scale))
                readers.append((variable, resource.read))
            else:
                plain = tf.Variable(value, trainable=False, name=variable.path.replace("/", "."))
                self.plain.append(plain)
                readers.append((variable, plain.read_value))
        self._trained = _Untracked(model, readers)
        # Lookup tables are resources of their own.
        self.tables = [
            layer.lookup_table
            for layer in model._flatten_layers()
            if getattr(layer, "lookup_table", None) is not None
        ]

    def signatures(self) -> dict[str, Any]:
        """`serving_default` over named tensors [batch], `serve_examples` over tf.Examples."""
        features = self._spec.data.features
        specs = {
            name: tf.TensorSpec([None], DTYPE[feature.type], name=name)
            for name, feature in features.items()
        }

        @tf.function(input_signature=[specs])
        def serve(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return self._call(inputs)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="examples")])
        def serve_examples(examples: tf.Tensor) -> dict[str, tf.Tensor]:
            form = {}
            for name, feature in features.items():
                number = feature.type == FeatureType.FLOAT
                kind = tf.int64 if feature.type == FeatureType.BOOL else DTYPE[feature.type]
                default = float("nan") if number else None
                form[name] = tf.io.FixedLenFeature([], kind, default)
            parsed = tf.io.parse_example(examples, form)
            return self._call({n: tf.cast(t, specs[n].dtype) for n, t in parsed.items()})

        return {SIGNATURE: serve, "serve_examples": serve_examples}

    def _call(self, inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """{output: float32 [batch, 1]}; what never reaches the log does not reach the model."""
        used = {name: inputs[name] for name in learnable(self._spec)}
        state = [(variable, read()) for variable, read in self._trained.readers]
        with keras.StatelessScope(state_mapping=state):
            outputs = self._trained.model(used, training=False)
        name = self._spec.data.output
        return {name: tf.cast(outputs[name], tf.float32)}


class _Untracked:
    """Hides Keras' variables from tf.Module, which would store them a second time.

    Attributes:
        readers: (Keras variable, function that gives the value to use for it).
    """

    def __init__(self, model: keras.Model, readers: list[tuple[Any, Any]]) -> None:
        self.model, self.readers = model, readers


def write(
    path: Path,
    model: keras.Model,
    spec: ModelSpec,
    tensors: dict[str, np.ndarray],
    *,
    int8: bool,
    scope: str,
) -> None:
    """Writes the SavedModel and its warm-up requests, made of the first rows of `tensors`."""
    module = Servable(model, spec, int8=int8, scope=scope)
    tf.saved_model.save(module, str(path), signatures=module.signatures())
    _write_warm_up(path / WARM_UP, spec, tensors)


def _write_warm_up(path: Path, spec: ModelSpec, tensors: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for batch in WARM_UP_BATCHES:
            request = predict_pb2.PredictRequest()
            request.model_spec.name = spec.name
            request.model_spec.signature_name = SIGNATURE
            for name, values in tensors.items():
                proto = tf.make_tensor_proto(
                    values[:batch], dtype=DTYPE[spec.data.features[name].type]
                )
                request.inputs[name].CopyFrom(proto)
            logged = prediction_log_pb2.PredictionLog()
            logged.predict_log.request.CopyFrom(request)
            writer.write(logged.SerializeToString())
