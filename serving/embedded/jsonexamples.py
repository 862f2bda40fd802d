"""The JSON of :classify and :regress: lists of features in, labels with scores or values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow_serving.apis import classification_pb2, input_pb2, regression_pb2

from serving.embedded.jsontensors import float_text, from_base64, is_base64, shown, string_text
from serving.embedded.status import invalid

_INT64 = range(-(2**63), 2**63)


def to_input(document: Mapping[str, Any]) -> input_pb2.Input:
    """The request's `examples` and `context`.

    Integers become int64 features, other numbers float ones: `20` and `20.0` differ. Booleans count
    as integers; strings and `{"b64": ...}` as bytes.

    Raises:
        StatusError: a value that is no feature.
    """
    if "examples" not in document:
        raise invalid(f"{shown(document)} Missing 'examples' key")
    examples = document["examples"]
    if not isinstance(examples, list):
        raise invalid(f"{shown(examples)} Expecting 'examples' to be an list/array")
    if not examples:
        raise invalid(f"{shown(examples)} No values in 'examples' array")
    given = input_pb2.Input()
    if "context" in document:
        _fill(given.example_list_with_context.context, document["context"])
        found = given.example_list_with_context.examples
    else:
        found = given.example_list.examples
    for features in examples:
        _fill(found.add(), features)
    return given


def classifications(result: classification_pb2.ClassificationResult) -> str:
    """`{"results": [[["label", score], ...], ...]}`"""
    rows = (
        ", ".join(f"[{string_text(one.label)}, {float_text(one.score)}]" for one in row.classes)
        for row in result.classifications
    )
    return f'{{"results": [{", ".join(f"[{row}]" for row in rows)}]}}'


def regressions(result: regression_pb2.RegressionResult) -> str:
    """`{"results": [value, ...]}`"""
    return f'{{"results": [{", ".join(float_text(one.value) for one in result.regressions)}]}}'


def _fill(example: tf.train.Example, features: Any) -> None:
    if not isinstance(features, dict):
        raise invalid(f"{shown(features)} Is not object")
    example.SetInParent()
    for name, value in features.items():
        values = value if isinstance(value, list) else [value]
        _fill_feature(example.features.feature[name], name, values)


def _fill_feature(feature: tf.train.Feature, name: str, values: Sequence[Any]) -> None:
    kinds = {_kind(value, name) for value in values}
    if len(kinds) > 1:
        raise invalid(
            f"{shown(values)} Unexpected element type: values of feature {name} are of "
            f"different kinds ({', '.join(sorted(kinds))})"
        )
    for kind in kinds:
        if kind == "bytes":
            feature.bytes_list.value.extend(_bytes(value) for value in values)
        elif kind == "int64":
            feature.int64_list.value.extend(int(value) for value in values)
        else:
            feature.float_list.value.extend(values)


def _kind(value: Any, name: str) -> str:
    if isinstance(value, str) or is_base64(value):
        return "bytes"
    if isinstance(value, float):
        return "float"
    if isinstance(value, bool) or (isinstance(value, int) and value in _INT64):
        return "int64"
    raise invalid(f"{shown(value)} is no value of feature {name}")


def _bytes(value: Any) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else from_base64(value)
