"""TensorProto ↔ numpy, without a copy where the wire form allows it.

A tensor comes as `tensor_content` (the raw bytes: a read-only view suffices), or as values in the
field of its type, where the last value repeats up to the shape's size. Strings are object arrays of
bytes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from tensorflow.core.framework import tensor_pb2, types_pb2

from serving.embedded.session import numpy_type

TensorProto: TypeAlias = tensor_pb2.TensorProto

_VALUE_FIELD = {
    types_pb2.DT_FLOAT: "float_val",
    types_pb2.DT_DOUBLE: "double_val",
    types_pb2.DT_INT32: "int_val",
    types_pb2.DT_INT16: "int_val",
    types_pb2.DT_INT8: "int_val",
    types_pb2.DT_UINT16: "int_val",
    types_pb2.DT_UINT8: "int_val",
    types_pb2.DT_QINT8: "int_val",
    types_pb2.DT_QUINT8: "int_val",
    types_pb2.DT_QINT16: "int_val",
    types_pb2.DT_QUINT16: "int_val",
    types_pb2.DT_QINT32: "int_val",
    types_pb2.DT_INT64: "int64_val",
    types_pb2.DT_UINT32: "uint32_val",
    types_pb2.DT_UINT64: "uint64_val",
    types_pb2.DT_BOOL: "bool_val",
    types_pb2.DT_STRING: "string_val",
    types_pb2.DT_HALF: "half_val",
    types_pb2.DT_BFLOAT16: "half_val",
    types_pb2.DT_COMPLEX64: "scomplex_val",
    types_pb2.DT_COMPLEX128: "dcomplex_val",
}
# The packed wire form of these fields is the array's own little-endian bytes: (field key, type).
_PACKED_AS_BYTES = {types_pb2.DT_FLOAT: b"\x2a", types_pb2.DT_DOUBLE: b"\x32"}
# A splat may claim any shape: a few bytes must not become gigabytes.
MAX_SPLAT_BYTES = 1 << 28


def to_array(tensor: TensorProto) -> np.ndarray:
    """The tensor's values; read-only where they are a view of the message.

    Raises:
        ValueError: a shape, type or number of values that do not fit together.
    """
    dtype = tensor.dtype
    if dtype not in _VALUE_FIELD:
        raise ValueError(f"type {dtype} cannot be sent as a value")
    if tensor.tensor_shape.unknown_rank:
        raise ValueError("unknown rank")
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    if shape and min(shape) < 0:
        raise ValueError(f"shape {shape} is not fully defined")
    size = math.prod(shape)
    if tensor.tensor_content:
        return _from_content(tensor, dtype, size).reshape(shape)
    if dtype in _PACKED_AS_BYTES and (array := _packed(tensor, dtype, size)) is not None:
        return array.reshape(shape)
    return _from_values(tensor, dtype, size).reshape(shape)


def _from_content(tensor: TensorProto, dtype: int, size: int) -> np.ndarray:
    if dtype == types_pb2.DT_STRING:
        return _strings_from_content(tensor.tensor_content, size)
    array = np.frombuffer(tensor.tensor_content, dtype=numpy_type(dtype))
    if array.size != size:
        raise ValueError(f"tensor_content holds {array.size} values, the shape {size}")
    return array


def _packed(tensor: TensorProto, dtype: int, size: int) -> np.ndarray | None:
    """A view of float values in the tensor's own wire form, where they come last; else None."""
    numpy_dtype = np.dtype(numpy_type(dtype))
    values = size * numpy_dtype.itemsize
    raw = tensor.SerializeToString()
    if not values or values > len(raw):
        return None
    start = len(raw) - values
    if not raw.endswith(_PACKED_AS_BYTES[dtype] + _varint(values), 0, start):
        return None
    return np.frombuffer(raw, numpy_dtype, size, start)


def _from_values(tensor: TensorProto, dtype: int, size: int) -> np.ndarray:
    values = getattr(tensor, _VALUE_FIELD[dtype])
    numpy_dtype = numpy_type(dtype)
    if dtype in (types_pb2.DT_HALF, types_pb2.DT_BFLOAT16):
        array = np.fromiter(values, np.uint16, len(values)).view(numpy_dtype)
    elif dtype in (types_pb2.DT_COMPLEX64, types_pb2.DT_COMPLEX128):
        parts = np.array(values, np.dtype(numpy_dtype).type(0).real.dtype)
        array = parts.view(numpy_dtype)
    elif dtype == types_pb2.DT_STRING:
        array = np.empty(len(values), object)
        array[:] = values
    else:
        array = np.array(values, numpy_dtype)
    if array.size == size:
        return array
    if array.size > size:
        raise ValueError(f"{array.size} values for a shape of {size}")
    if size * array.itemsize > MAX_SPLAT_BYTES:
        raise ValueError(f"{array.size} values repeated to {size} exceed {MAX_SPLAT_BYTES} bytes")
    if array.size == 0:
        return np.full(size, b"", object) if numpy_dtype is object else np.zeros(size, numpy_dtype)
    return np.concatenate([array, np.repeat(array[-1:], size - array.size)])


def _strings_from_content(content: bytes, size: int) -> np.ndarray:
    """All lengths as varints, then all bytes: how the C++ side encodes a string tensor."""
    if size > len(content):
        raise ValueError(f"tensor_content of {len(content)} bytes cannot hold {size} strings")
    lengths, position = [], 0
    for _ in range(size):
        value = shift = 0
        while True:
            if position >= len(content):
                raise ValueError("tensor_content ends inside a string length")
            byte = content[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        lengths.append(value)
    if position + sum(lengths) != len(content):
        raise ValueError("tensor_content's string lengths do not add up to its size")
    array = np.empty(size, object)
    for index, length in enumerate(lengths):
        array[index] = content[position : position + length]
        position += length
    return array


def fill(tensor: TensorProto, array: np.ndarray, dtype: int, *, as_content: bool) -> None:
    """Writes `array` into an empty `tensor`, as typed values or (not strings) as raw bytes."""
    array = np.asarray(array)
    if as_content and dtype != types_pb2.DT_STRING:
        tensor.tensor_content = array.tobytes()
    else:
        _extend(getattr(tensor, _VALUE_FIELD[dtype]), array, dtype)
    tensor.dtype = dtype
    shape = tensor.tensor_shape
    for size in array.shape:
        shape.dim.add().size = size


def serialized(array: np.ndarray, dtype: int, *, as_content: bool) -> bytes:
    """The array as a serialised TensorProto; floats are written by hand, which is much cheaper."""
    key = None if as_content else _PACKED_AS_BYTES.get(dtype)
    if key is None:
        tensor = TensorProto()
        fill(tensor, array, dtype, as_content=as_content)
        return bytes(tensor.SerializeToString())
    raw = array.tobytes()
    head = _dtype_and_shape(dtype, np.shape(array))
    return head + field_bytes(key, raw) if raw else head


@lru_cache(maxsize=1024)
def _dtype_and_shape(dtype: int, shape: tuple[int, ...]) -> bytes:
    """The fields dtype = 1 and tensor_shape = 2 of a TensorProto."""
    dims = b"".join(
        field_bytes(b"\x12", b"\x08" + _varint(size) if size else b"") for size in shape
    )
    return b"\x08" + _varint(dtype) + field_bytes(b"\x12", dims)


def field_bytes(key: bytes, value: bytes) -> bytes:
    """A length-delimited protobuf field; `key` is its number and wire type."""
    size = len(value)
    return key + (_SHORT[size] if size < 0x80 else _varint(size)) + value


def _extend(field, array: np.ndarray, dtype: int) -> None:  # type: ignore[no-untyped-def]
    flat = array.ravel()
    if dtype in (types_pb2.DT_HALF, types_pb2.DT_BFLOAT16):
        flat = flat.view(np.uint16)
    elif dtype in (types_pb2.DT_COMPLEX64, types_pb2.DT_COMPLEX128):
        flat = flat.view(flat.real.dtype)
    field.extend(flat.tolist())


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# The varints of one byte.
_SHORT = [bytes([value]) for value in range(0x80)]
