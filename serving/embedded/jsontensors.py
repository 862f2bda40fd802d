"""JSON ↔ numpy, in the row form (`instances` / `predictions`) and the column form.

The checks and most messages are those of the real server. Integers need JSON integers in range;
floats take any number; strings are text or `{"b64": "..."}`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from tensorflow.core.framework import types_pb2

from serving.embedded.session import numpy_type, type_name
from serving.embedded.signature import Output, Signature
from serving.embedded.status import Code, StatusError, invalid

_SHOWN_BYTES = 256
_INTEGERS = frozenset(
    {
        types_pb2.DT_INT8,
        types_pb2.DT_INT16,
        types_pb2.DT_INT32,
        types_pb2.DT_INT64,
        types_pb2.DT_UINT8,
        types_pb2.DT_UINT16,
        types_pb2.DT_UINT32,
        types_pb2.DT_UINT64,
    }
)
_FLOATS = frozenset({types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE})


def parse_body(body: bytes) -> dict[str, Any]:
    """The request's JSON object. NaN and Infinity are accepted, text after the object is ignored.

    Raises:
        StatusError: no JSON, or no object.
    """
    if not body.strip():
        raise invalid("JSON Parse error: The document is empty")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = _parse_leniently(body)
    if not isinstance(document, dict):
        raise invalid(f"{shown(document)} Is not object")
    return document


def _parse_leniently(body: bytes) -> Any:
    try:
        return json.JSONDecoder().raw_decode(body.decode().lstrip())[0]
    except UnicodeDecodeError as error:
        raise invalid(f"JSON Parse error: not UTF-8 at offset: {error.start}") from error
    except json.JSONDecodeError as error:
        raise invalid(f"JSON Parse error: {error.msg} at offset: {error.pos}") from error
    except RecursionError as error:
        raise invalid("JSON Parse error: nested too deep at offset: 0") from error


def signature_name(document: Mapping[str, Any]) -> str:
    name = document.get("signature_name", "")
    if not isinstance(name, str):
        raise invalid(f"{shown(document)} 'signature_name' key must be a string value.")
    return name


def is_row_form(document: Mapping[str, Any]) -> bool:
    """Whether the request has `instances`; False for `inputs`.

    Raises:
        StatusError: neither or both.
    """
    rows, columns = "instances" in document, "inputs" in document
    if rows and columns:
        raise invalid(
            f"{shown(document)} Not formatted correctly expecting only one of 'inputs' or "
            "'instances' keys to exist "
        )
    if not rows and not columns:
        raise invalid(f"{shown(document)} Missing 'inputs' or 'instances' key")
    return rows


def to_arrays(document: Mapping[str, Any], signature: Signature) -> dict[str, np.ndarray]:
    """The request's tensors by input alias.

    Raises:
        StatusError: a value that does not fit.
    """
    inputs = {one.alias: one.dtype for one in signature.inputs}
    if is_row_form(document):
        return _rows(document["instances"], inputs)
    return _columns(document["inputs"], inputs)


def _rows(instances: Any, inputs: Mapping[str, int]) -> dict[str, np.ndarray]:
    if not isinstance(instances, list):
        raise invalid(f"{shown(instances)} Expecting 'instances' to be an list/array")
    if not instances:
        raise invalid(f"{shown(instances)} No values in 'instances' array")
    first = instances[0]
    if not isinstance(first, dict) or (is_base64(first) and set(inputs) != {"b64"}):
        if len(inputs) != 1:
            raise invalid(
                f"{shown(first)} Expecting object value; keys must be equal to: {_names(inputs)}"
            )
        ((alias, dtype),) = inputs.items()
        return {alias: _stack(instances, dtype, key=None)}
    for instance in instances:
        if not isinstance(instance, dict) or set(instance) != set(inputs):
            raise invalid(
                f"{shown(instance)} Failed to process element: "
                f"{instances.index(instance)} of 'instances' list. Error: INVALID_ARGUMENT: "
                f"{shown(instance)} keys must be equal to: {_names(inputs)}"
            )
    return {
        alias: _stack([instance[alias] for instance in instances], dtype, key=alias)
        for alias, dtype in inputs.items()
    }


def _stack(values: Sequence[Any], dtype: int, *, key: str | None) -> np.ndarray:
    """One tensor from one value per row; all rows have the shape of the first."""
    flat: list[Any] = []
    shape = _shape(values[0])
    for index, value in enumerate(values):
        try:
            own = _shape(value)
            if (size := _size(own)) != (wanted := _size(shape)):
                raise invalid(f"Expecting tensor size: {wanted} but got: {size}")
            if own != shape:
                raise invalid(f"Expecting shape {_text(shape)} but got: {_text(own)}")
            _flatten(value, shape, 0, dtype, flat)
        except StatusError as error:
            where = f"element: {index} " + (f"key: {key} " if key else "")
            raise StatusError(
                error.code, f"Failed to process {where}of 'instances' list. Error: {error}"
            ) from error
    return _array(flat, (len(values), *shape), dtype)


def _columns(value: Any, inputs: Mapping[str, int]) -> dict[str, np.ndarray]:
    if isinstance(value, dict) and not (is_base64(value) and set(inputs) != {"b64"}):
        arrays = {}
        for alias, dtype in inputs.items():
            if alias not in value:
                raise invalid(f"{shown(value)} Missing named input: {alias} in 'inputs' object.")
            arrays[alias] = _whole(value[alias], dtype)
        return arrays
    if len(inputs) != 1:
        raise invalid(
            f"'inputs' is a plain value/list, but expecting an object as multiple input tensors "
            f"required as per tensorinfo_map: {_names(inputs)}"
        )
    ((alias, dtype),) = inputs.items()
    return {alias: _whole(value, dtype)}


def _whole(value: Any, dtype: int) -> np.ndarray:
    flat: list[Any] = []
    shape = _shape(value)
    _flatten(value, shape, 0, dtype, flat)
    return _array(flat, shape, dtype)


def _shape(value: Any) -> tuple[int, ...]:
    """The lengths down the first elements."""
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        if not value:
            break
        value = value[0]
    return tuple(shape)


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _flatten(value: Any, shape: tuple[int, ...], depth: int, dtype: int, out: list[Any]) -> None:
    if depth == len(shape):
        out.append(_scalar(value, dtype))
        return
    if not isinstance(value, list):
        raise invalid(f"{shown(value)} Encountered value at unexpected level: {depth}")
    if len(value) != shape[depth]:
        raise invalid(
            f"{shown(value)} Encountered list at unexpected size: {len(value)} at level: {depth} "
            f"expected size: {shape[depth]}"
        )
    for item in value:
        _flatten(item, shape, depth + 1, dtype, out)


def _scalar(value: Any, dtype: int) -> Any:
    if isinstance(value, list):
        raise invalid(f"{shown(value)} Encountered list at unexpected level")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if dtype in _FLOATS and is_number:
        return value
    if dtype in _INTEGERS and is_number and isinstance(value, int):
        return value
    if dtype == types_pb2.DT_BOOL and isinstance(value, bool):
        return value
    if dtype == types_pb2.DT_STRING:
        if isinstance(value, str):
            return value.encode("utf-8", "surrogatepass")
        if is_base64(value):
            return from_base64(value)
    if dtype not in _FLOATS | _INTEGERS | {types_pb2.DT_BOOL, types_pb2.DT_STRING}:
        raise StatusError(
            Code.UNIMPLEMENTED, f"Conversion of JSON values to {type_name(dtype)} is unsupported"
        )
    raise invalid(
        f"{shown(value)} Type: {_kind(value)} is not of expected type: {type_name(dtype)}"
    )


def _array(flat: list[Any], shape: tuple[int, ...], dtype: int) -> np.ndarray:
    if dtype == types_pb2.DT_STRING:
        array = np.empty(len(flat), object)
        array[:] = flat
        return array.reshape(shape)
    numpy_dtype = numpy_type(dtype)
    try:
        with np.errstate(over="ignore"):
            return np.array(flat, dtype=numpy_dtype).reshape(shape)
    except OverflowError as error:
        raise invalid(
            f"{shown(flat)} Value is out of range for type: {type_name(dtype)}"
        ) from error


def to_json(outputs: Sequence[Output], *, row_form: bool) -> str:
    """The answer's JSON text.

    Raises:
        StatusError: row form of outputs that have no common number of rows, or an odd type.
    """
    if not row_form:
        if len(outputs) == 1:
            return f'{{"outputs": {_value(outputs[0], outputs[0].array)}}}'
        return f'{{"outputs": {{{_members((o, o.array) for o in outputs)}}}}}'
    rows = None
    for output in outputs:
        if not output.array.shape:
            raise invalid(f"Tensor name: {output.alias} has no shape information ")
        if rows is not None and output.array.shape[0] != rows:
            raise invalid(
                f"Tensor name: {output.alias} has inconsistent batch size: "
                f"{output.array.shape[0]} expecting: {rows}"
            )
        rows = output.array.shape[0]
    if len(outputs) == 1:
        return f'{{"predictions": {_value(outputs[0], outputs[0].array)}}}'
    objects = (
        f"{{{_members((output, output.array[row]) for output in outputs)}}}"
        for row in range(rows or 0)
    )
    return f'{{"predictions": [{", ".join(objects)}]}}'


def _members(pairs: Any) -> str:
    return ", ".join(f"{json.dumps(output.alias)}: {_value(output, v)}" for output, v in pairs)


def _value(output: Output, value: Any) -> str:
    dtype = output.dtype
    if dtype in _FLOATS:
        short = np.float32 if dtype == types_pb2.DT_FLOAT else np.float64
        return _nested(np.asarray(value).tolist(), lambda number: float_text(number, short))
    if dtype in _INTEGERS:
        return _nested(np.asarray(value).tolist(), str)
    if dtype == types_pb2.DT_BOOL:
        return _nested(np.asarray(value).tolist(), lambda flag: "true" if flag else "false")
    if dtype == types_pb2.DT_STRING:
        values = value.tolist() if isinstance(value, np.ndarray) else value
        return _nested(values, _base64 if output.alias.endswith("_bytes") else string_text)
    raise StatusError(
        Code.UNIMPLEMENTED, f"Conversion of {type_name(dtype)} to JSON is unsupported"
    )


def _nested(value: Any, scalar: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_nested(item, scalar) for item in value)}]"
    return str(scalar(value))


def float_text(number: float, width: type = np.float32) -> str:
    """The shortest of 6 or 9 (17) digits that reads back the same in its own width."""
    if number != number:
        return "NaN"
    if number in (float("inf"), float("-inf")):
        return "Infinity" if number > 0 else "-Infinity"
    text = f"{number:.6g}"
    if width(text) != number:
        text = f"{number:.9g}" if width is np.float32 else f"{number:.17g}"
    return text if any(mark in text for mark in ".e") else text + ".0"


def string_text(value: bytes | str) -> str:
    """A JSON string; bytes that are not UTF-8 are replaced."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return json.dumps(text, ensure_ascii=False)


def _base64(value: bytes | str) -> str:
    raw = value if isinstance(value, bytes) else value.encode()
    return f'{{"b64": "{base64.b64encode(raw).decode()}"}}'


def is_base64(value: Any) -> bool:
    """Whether it is `{"b64": "..."}`."""
    return isinstance(value, dict) and set(value) == {"b64"}


def from_base64(value: Mapping[str, Any]) -> bytes:
    """The bytes of `{"b64": "..."}`; raises StatusError."""
    try:
        return base64.b64decode(value["b64"], validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise invalid(f"{shown(value)} Unable to base64 decode") from error


def _kind(value: Any) -> str:
    if value is None:
        return "Null"
    kinds = {bool: "Boolean", str: "String", dict: "Object", list: "Array"}
    return kinds.get(type(value), "Number")


def _names(names: Mapping[str, int]) -> str:
    return ",".join(sorted(names))


def _text(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def shown(value: Any) -> str:
    """The beginning of a value, for a message about it."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")[:_SHOWN_BYTES]
    return f"JSON Value: {text.decode(errors='ignore')}"
