"""Features and scores inside predict bodies: TensorProto and TF Serving's JSON, without TensorFlow.

Shapes: every feature is [batch] or [batch, 1], the score too; a scalar is a batch of one.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from perennial.spec import Feature, FeatureType
from serving.protos import tfserving_pb2 as pb

_STRING: Final = 7
_BFLOAT16: Final = 14
_HALF: Final = 19
_BOOL: Final = 10
# DataType of tensorflow/core/framework/types.proto -> (numpy type of tensor_content, typed field).
_DTYPES: Final[dict[int, tuple[str, str]]] = {
    1: ("<f4", "float_val"),
    2: ("<f8", "double_val"),
    3: ("<i4", "int_val"),
    4: ("u1", "int_val"),
    5: ("<i2", "int_val"),
    6: ("i1", "int_val"),
    9: ("<i8", "int64_val"),
    _BOOL: ("?", "bool_val"),
    _BFLOAT16: ("<u2", "half_val"),
    17: ("<u2", "int_val"),
    _HALF: ("<f2", "half_val"),
    22: ("<u4", "uint32_val"),
    23: ("<u8", "uint64_val"),
}
MAX_ROWS: Final = 100_000


class Malformed(ValueError):
    """The body is not what was expected of it."""


def grpc_columns(
    inputs: Mapping[str, pb.TensorProto], features: Mapping[str, Feature]
) -> dict[str, list[Any]]:
    """Each feature's values, [batch], as str, int, float or bool.

    Raises:
        Malformed: a feature is missing, or has another type, or another number of rows.
    """
    columns = {}
    for name, feature in features.items():
        if name not in inputs:
            raise Malformed(f"feature {name} is missing")
        columns[name] = [_typed(name, value, feature.type) for value in tensor(inputs[name])]
    return _even(columns)


def grpc_scores(outputs: Mapping[str, pb.TensorProto], output: str, count: int) -> list[float]:
    """The `count` scores of output tensor `output`."""
    if output not in outputs:
        raise Malformed(f"output {output} is missing")
    return _scores(tensor(outputs[output]), count)


def rest_columns(request: Any, features: Mapping[str, Feature]) -> dict[str, list[Any]]:
    """As `grpc_columns`, from `{"instances": [...]}` or `{"inputs": {...}}`."""
    if not isinstance(request, dict):
        raise Malformed("the request is no JSON object")
    if isinstance(instances := request.get("instances"), list):
        raw = _by_column(instances, features)
    elif isinstance(inputs := request.get("inputs"), dict):
        raw = {name: _list(inputs.get(name)) for name in features}
    elif "inputs" in request and len(features) == 1:
        raw = {next(iter(features)): _list(request["inputs"])}
    else:
        raise Malformed("the request has neither instances nor inputs")
    return _even(
        {
            name: [_typed(name, _unwrap(value), feature.type) for value in raw[name]]
            for name, feature in features.items()
        }
    )


def rest_scores(reply: Any, output: str, count: int) -> list[float]:
    """As `grpc_scores`, from `{"predictions": [...]}` or `{"outputs": ...}`."""
    if not isinstance(reply, dict):
        raise Malformed("the reply is no JSON object")
    found = reply.get("predictions", reply.get("outputs"))
    if isinstance(found, dict):
        found = found.get(output)
    values = [v.get(output) if isinstance(v, dict) else v for v in _list(found)]
    return _scores([_unwrap(value) for value in values], count)


def read_json(content: bytes) -> Any:
    """JSON as TF Serving takes and gives it: NaN and Infinity are numbers."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {error}") from None


def tensor(proto: pb.TensorProto) -> list[Any]:
    """The values of a tensor of shape [], [batch] or [batch, 1]: bytes, int, float or bool."""
    shape = [dim.size for dim in proto.tensor_shape.dim]
    if proto.tensor_shape.unknown_rank or shape[1:] not in ([], [1]) or any(d < 0 for d in shape):
        raise Malformed(f"shape {shape[:8]}")
    count = shape[0] if shape else 1
    if count > MAX_ROWS:
        raise Malformed(f"{count} rows")
    if proto.dtype == _STRING:
        return _repeated(list(proto.string_val), count)
    if proto.dtype not in _DTYPES:
        raise Malformed(f"dtype {proto.dtype}")
    dtype, field = _DTYPES[proto.dtype]
    if proto.tensor_content:
        if len(proto.tensor_content) != count * np.dtype(dtype).itemsize:
            raise Malformed("tensor_content does not fit its shape")
        array = np.frombuffer(proto.tensor_content, dtype)
    else:
        values = _repeated(list(getattr(proto, field)), count)
        bits = field == "half_val"
        try:
            array = np.array(values, "<u2" if bits else dtype)
        except OverflowError as error:
            raise Malformed(str(error)) from None
        array = array.view(dtype) if bits else array
    if proto.dtype == _BFLOAT16:
        array = (array.astype("<u4") << 16).view("<f4")
    return array.tolist()


def _repeated(values: list[Any], count: int) -> list[Any]:
    """A typed field may leave out the repetitions of its last value."""
    if len(values) > count or (not values and count):
        raise Malformed(f"{len(values)} values for {count} rows")
    return values + values[-1:] * (count - len(values))


def _scores(values: list[Any], count: int) -> list[float]:
    if len(values) != count:
        raise Malformed(f"{len(values)} scores for {count} rows")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Malformed(f"score {str(value)[:20]!r} is no number")
    return [_float("score", value) for value in values]


def _typed(name: str, value: Any, kind: FeatureType) -> Any:
    """`value` as its feature's type; no silent loss: 1.5 is no int, "1" no float."""
    if kind is FeatureType.STRING:
        if isinstance(value, bytes):
            try:
                return value.decode()
            except UnicodeDecodeError:
                raise Malformed(f"feature {name} is not UTF-8") from None
        # Lone surrogates are JSON, and no string that Parquet can hold.
        if isinstance(value, str) and value == value.encode("utf-8", "ignore").decode():
            return value
    elif kind is FeatureType.BOOL:
        if isinstance(value, bool):
            return value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if kind is FeatureType.FLOAT:
            return _float(name, value)
        if isinstance(value, int) and abs(value) < 2**63:
            return value
    raise Malformed(f"feature {name} is no {kind}")


def _float(name: str, value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise Malformed(f"{name} is too large") from None


def _by_column(instances: list[Any], features: Mapping[str, Feature]) -> dict[str, list[Any]]:
    if len(features) == 1 and not any(isinstance(i, dict) and "b64" not in i for i in instances):
        return {next(iter(features)): instances}
    columns: dict[str, list[Any]] = {name: [] for name in features}
    for instance in instances:
        if not isinstance(instance, dict):
            raise Malformed("an instance is no JSON object")
        for name, column in columns.items():
            if name not in instance:
                raise Malformed(f"feature {name} is missing")
            column.append(instance[name])
    return columns


def _list(value: Any) -> list[Any]:
    if value is None:
        raise Malformed("a column is missing")
    return value if isinstance(value, list) else [value]


def _unwrap(value: Any) -> Any:
    """[x] is x, {"b64": ...} is bytes."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict) and value.keys() == {"b64"}:
        try:
            return base64.b64decode(value["b64"], validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise Malformed("bad b64") from None
    return value


def _even(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    counts = {len(column) for column in columns.values()}
    if len(counts) != 1 or counts == {0} or max(counts) > MAX_ROWS:
        raise Malformed(f"rows per feature: {sorted(counts)[:5]}")
    return columns
