"""Features and scores inside predict bodies: TensorProto and TF Serving's JSON, without TensorFlow.

Shapes: every feature is [batch] or [batch, 1], the score too; a scalar is a batch of one.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from perennial.spec import Feature, FeatureType
from serving.protos import tfserving_pb2 as pb

_STRING: Final = 7
_BFLOAT16: Final = 14
_HALF: Final = 19
_UINT64: Final = 23
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
    _UINT64: ("<u8", "uint64_val"),
}
_FLOATS: Final = frozenset({1, 2, _BFLOAT16, _HALF})
_INTS: Final = frozenset({3, 4, 5, 6, 9, 17, 22, _UINT64})
_FITS: Final = {
    FeatureType.STRING: frozenset({_STRING}),
    FeatureType.BOOL: frozenset({_BOOL}),
    FeatureType.INT: _INTS,
    FeatureType.FLOAT: _FLOATS | _INTS,
}
# Typed fields whose Python values are the tensor's: no narrower type hides in a wider field.
_AS_THEY_ARE: Final = frozenset({1, 2, 3, 9, _BOOL, 22, _UINT64})
MAX_ROWS: Final = 100_000


class Malformed(ValueError):
    """The body is not what was expected of it."""


Reader = Callable[[bytes], list[Any]]
"""The values of a serialised TensorProto, [batch], as one feature type. Raises `Malformed`."""


def grpc_columns(inputs: Mapping[str, bytes], readers: Mapping[str, Reader]) -> list[list[Any]]:
    """Each feature's values, [batch], as str, int, float or bool, in the order of `readers`.

    Raises:
        Malformed: a feature is missing, or has another type, or another number of rows.
    """
    columns = []
    for name, read in readers.items():
        raw = inputs.get(name)
        if raw is None:
            raise Malformed(f"feature {name} is missing")
        try:
            columns.append(read(raw))
        except Malformed as error:
            raise Malformed(f"feature {name}: {error}") from None
    return _even(columns)


def grpc_scores(outputs: Mapping[str, bytes], output: str, count: int) -> list[float]:
    """The `count` scores of output tensor `output`."""
    if output not in outputs:
        raise Malformed(f"output {output} is missing")
    scores = _read_scores(outputs[output])
    if len(scores) != count:
        raise Malformed(f"{len(scores)} scores for {count} rows")
    return scores


def tensor_reader(kind: FeatureType) -> Reader:
    """A reader that knows the tensor which nearly all calls send by its first bytes: one row of
    the feature's most usual dtype in its typed field. Any other form is parsed field by field.
    """
    heads = [_head(kind, shape) for shape in _ONE_ROW]
    (short, short_size), (long, long_size) = [(head, len(head)) for head in heads]
    one = _ONE_VALUE[kind]

    def read(raw: bytes) -> list[Any]:
        if raw[:short_size] == short:
            size = short_size
        elif raw[:long_size] == long:
            size = long_size
        else:
            return _read_any(raw, kind)
        value = raw[size + 1 :]
        # The byte between is the value's length, while that is below 128.
        if value and raw[size] == len(value) < 128 and (found := one(value)) is not None:
            return [found]
        return _read_any(raw, kind)

    return read


def rest_columns(request: Any, features: Mapping[str, Feature]) -> list[list[Any]]:
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
        [
            [_typed(name, _unwrap(value), feature.type) for value in raw[name]]
            for name, feature in features.items()
        ]
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


def _read_any(raw: bytes, kind: FeatureType) -> list[Any]:
    try:
        proto = pb.TensorProto.FromString(raw)
    except DecodeError as error:
        raise Malformed(str(error)) from None
    values, dtype = tensor(proto), proto.dtype
    if dtype not in _FITS[kind]:
        raise Malformed(f"dtype {dtype} is no {kind}")
    if kind is FeatureType.STRING:
        return [_decoded(value) for value in values]
    if kind is FeatureType.FLOAT:
        return values if dtype in _FLOATS else [float(value) for value in values]
    if dtype == _UINT64 and values and max(values) >= 2**63:
        raise Malformed(f"a value is no {kind}")
    return values


def _head(kind: FeatureType, shape: bytes) -> bytes:
    """The bytes of dtype, shape and the typed field's tag."""
    dtype, tag = _USUAL[kind]
    return bytes((8, dtype, 0x12, len(shape))) + shape + bytes((tag,))


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Malformed("not UTF-8") from None


def _one_float(value: bytes) -> float | None:
    return _FLOAT.unpack(value)[0] if len(value) == 4 else None


def _one_int(value: bytes) -> int | None:
    """A varint below 128 is its own byte."""
    return value[0] if len(value) == 1 and value[0] < 128 else None


def _one_bool(value: bytes) -> bool | None:
    return None if (found := _one_int(value)) is None else found != 0


_FLOAT: Final = struct.Struct("<f")
_ONE_ROW: Final = (b"\x12\x02\x08\x01", b"\x12\x02\x08\x01" * 2)
"""Shapes [1] and [1, 1]."""
_USUAL: Final = {
    FeatureType.FLOAT: (1, 0x2A),
    FeatureType.STRING: (_STRING, 0x42),
    FeatureType.INT: (9, 0x52),
    FeatureType.BOOL: (_BOOL, 0x5A),
}
"""dtype, and tag of its typed field."""
_ONE_VALUE: Final[dict[FeatureType, Callable[[bytes], Any]]] = {
    FeatureType.FLOAT: _one_float,
    FeatureType.STRING: _decoded,
    FeatureType.INT: _one_int,
    FeatureType.BOOL: _one_bool,
}
_read_scores: Final = tensor_reader(FeatureType.FLOAT)


def tensor(proto: pb.TensorProto) -> list[Any]:
    """The values of a tensor of shape [], [batch] or [batch, 1]: bytes, int, float or bool."""
    count = _rows(proto.tensor_shape)
    dtype = proto.dtype
    if dtype == _STRING:
        return _repeated(list(proto.string_val), count)
    if dtype not in _DTYPES:
        raise Malformed(f"dtype {dtype}")
    form, field = _DTYPES[dtype]
    if content := proto.tensor_content:
        if len(content) != count * np.dtype(form).itemsize:
            raise Malformed("tensor_content does not fit its shape")
        array = np.frombuffer(content, form)
    else:
        values = _repeated(list(getattr(proto, field)), count)
        if dtype in _AS_THEY_ARE:
            return values
        bits = field == "half_val"
        try:
            array = np.array(values, "<u2" if bits else form)
        except OverflowError as error:
            raise Malformed(str(error)) from None
        array = array.view(form) if bits else array
    if dtype == _BFLOAT16:
        array = (array.astype("<u4") << 16).view("<f4")
    return array.tolist()


def _rows(shape: pb.TensorShapeProto) -> int:
    dims = shape.dim
    rank = len(dims)
    if shape.unknown_rank or rank > 2 or (rank == 2 and dims[1].size != 1):
        raise Malformed(f"shape {[dim.size for dim in dims[:8]]}")
    count = dims[0].size if rank else 1
    if not 0 <= count <= MAX_ROWS:
        raise Malformed(f"{count} rows")
    return count


def _repeated(values: list[Any], count: int) -> list[Any]:
    """A typed field may leave out the repetitions of its last value."""
    if len(values) == count:
        return values
    if len(values) > count or not values:
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


def _even(columns: list[list[Any]]) -> list[list[Any]]:
    count = len(columns[0])
    for column in columns:
        if len(column) != count or not 0 < count <= MAX_ROWS:
            raise Malformed(f"rows per feature: {[len(column) for column in columns[:5]]}")
    return columns
