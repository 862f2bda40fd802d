"""What a model folder says in code: `model.py`, and optionally `data.py`, loaded by path.

`model.py` holds

    build_model(context: BuildContext) -> keras.Model      required
    loss(labels, outputs) -> [batch]                       optional; per example, Keras ops

The model is functional, takes `context.inputs()` and returns a dict with `context.output`,
[batch, 1]: the probability of a binary label, or the value of a regression. It does its own
encoding (vocabularies, moments, missing values), so that clients send raw features and nothing can
drift between training and serving. Layer names are unique and fixed: checkpoints go by them.

`data.py`, where there is history to import, holds `load() -> pyarrow.Table` in the form that
`training.history.import_history` takes.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa

from perennial.errors import Permanent
from perennial.spec import Feature, FeatureType, ModelSpec

DTYPE = {
    FeatureType.STRING: "string",
    FeatureType.INT: "int64",
    FeatureType.FLOAT: "float32",
    FeatureType.BOOL: "bool",
}


@dataclass(frozen=True)
class Encoding:
    """What the graph's encoding needs to know of the training rows; it travels with a checkpoint.

    Attributes:
        vocabularies: levels of each string feature, the most frequent first.
        moments: mean and standard deviation (1 when constant) of each number, unknown values apart.
    """

    vocabularies: dict[str, list[str]]
    moments: dict[str, tuple[float, float]]

    def write(self, path: Path) -> None:
        content = {"vocabularies": self.vocabularies, "moments": self.moments}
        path.write_text(json.dumps(content, indent=1, sort_keys=True))

    @classmethod
    def read(cls, path: Path) -> Encoding:
        content = json.loads(path.read_text())
        moments = {name: (m[0], m[1]) for name, m in content["moments"].items()}
        return cls(content["vocabularies"], moments)


@dataclass(frozen=True)
class BuildContext:
    """What `build_model` may use.

    Attributes:
        features: the features that reach the model; what the recorder drops or hashes does not.
        output: name of the output tensor.
        label_kind: `binary` or `regression`.
    """

    features: dict[str, Feature]
    output: str
    label_kind: str
    encoding: Encoding

    @property
    def vocabularies(self) -> dict[str, list[str]]:
        return self.encoding.vocabularies

    @property
    def moments(self) -> dict[str, tuple[float, float]]:
        return self.encoding.moments

    def inputs(self) -> dict[str, Any]:
        """One Keras input per feature, shape [batch], dtype as on the wire."""
        import keras

        return {
            name: keras.Input((), dtype=DTYPE[feature.type], name=name)
            for name, feature in self.features.items()
        }


def learnable(spec: ModelSpec) -> dict[str, Feature]:
    """The features a model may learn from: those whose raw values reach the log."""
    return {name: f for name, f in spec.data.features.items() if f.sensitive is None}


def build_context(spec: ModelSpec, encoding: Encoding) -> BuildContext:
    return BuildContext(learnable(spec), spec.data.output, spec.data.label.kind, encoding)


def load_code(spec: ModelSpec) -> ModuleType:
    """Imports the model's `model.py`.

    Raises:
        Permanent: `hooks.missing` (no file, or no `build_model`), `hooks.import` (it fails).
    """
    return _load(spec, "model.py", "build_model")


def load_history(spec: ModelSpec) -> pa.Table:
    """What `data.py` of the model folder gives: labelled rows from before Perennial.

    Raises:
        Permanent: `hooks.missing` (no file, or no `load`), `hooks.import` (it fails).
    """
    table: pa.Table = _load(spec, "data.py", "load").load()
    return table


def _load(spec: ModelSpec, file: str, function: str) -> ModuleType:
    path = spec.folder / file
    name = f"perennial_{spec.name}_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or found is None or found.loader is None:
        raise Permanent("hooks.missing", f"{path} does not exist")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise Permanent("hooks.import", f"{path}: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, function, None)):
        raise Permanent("hooks.missing", f"{path} has no function {function}")
    return module


def build_model(spec: ModelSpec, encoding: Encoding) -> Any:
    """The model of `model.py`, checked against the contract.

    Raises:
        Permanent: `hooks.contract`, saying what differs; what `load_code` raises.
    """
    context = build_context(spec, encoding)
    model = load_code(spec).build_model(context)
    path = spec.folder / "model.py"
    names = set(model.input) if isinstance(model.input, dict) else set()
    if names != set(context.features):
        raise Permanent(
            "hooks.contract",
            f"{path}: the model's inputs {sorted(names)} are not the features "
            f"{sorted(context.features)}",
            hint="build the model on context.inputs()",
        )
    if not isinstance(model.output, dict) or context.output not in model.output:
        raise Permanent(
            "hooks.contract",
            f"{path}: the model must return a dict with {context.output!r}",
            hint=f"keras.Model(inputs, {{{context.output!r}: tensor}})",
        )
    shape = tuple(model.output[context.output].shape)
    if shape != (None, 1):
        raise Permanent(
            "hooks.contract", f"{path}: output {context.output!r} has shape {shape}, not [batch, 1]"
        )
    return model


def loss_function(spec: ModelSpec) -> Callable[[Any, Any], Any]:
    """Per-example loss (labels [batch], outputs {name: [batch, 1]}) -> [batch].

    The model's own `loss`, else cross-entropy for a binary label and the squared error otherwise.
    """
    own = getattr(load_code(spec), "loss", None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    output, binary = spec.data.output, spec.data.label.kind == "binary"

    def default(labels: Any, outputs: dict[str, Any]) -> Any:
        from keras import ops

        predicted = ops.reshape(ops.cast(outputs[output], "float32"), [-1])
        if binary:
            return ops.binary_crossentropy(labels, predicted)
        return ops.square(labels - predicted)

    return default
