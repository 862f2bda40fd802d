"""Predict: from a request's tensors to a checked call, from its outputs to the reply's bytes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from tensorflow_serving.apis import predict_pb2

from serving.embedded.servable import Call, Servable
from serving.embedded.signature import Input, Output
from serving.embedded.status import Code, StatusError, invalid
from serving.embedded.tensors import TensorProto, field_bytes, serialized, to_array


def predict_call(servable: Servable, request: predict_pb2.PredictRequest) -> Call:
    """A PredictRequest, checked; it gives a list of Output.

    Raises:
        StatusError: what the client did wrong.
    """
    name = request.model_spec.signature_name
    try:
        signature = servable.signature(name)
    except KeyError:
        raise StatusError(
            Code.FAILED_PRECONDITION, f'Serving signature key "{name}" not found.'
        ) from None
    return servable.predict(signature, request.inputs, _array, request.output_filter)


def predict_response(
    servable: Servable, signature: str, outputs: list[Output], *, as_content: bool
) -> bytes:
    """A serialised PredictResponse: outputs = 1 {key = 1, value = 2}, model_spec = 2."""
    parts = []
    for output in outputs:
        tensor = serialized(output.array, output.dtype, as_content=as_content)
        entry = _key(output.alias) + field_bytes(b"\x12", tensor)
        parts.append(field_bytes(b"\x0a", entry))
    parts.append(servable.described(signature))
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _key(alias: str) -> bytes:
    return field_bytes(b"\x0a", alias.encode())


def _array(one: Input, tensor: TensorProto) -> np.ndarray:
    try:
        array = to_array(tensor)
    except (ValueError, TypeError, OverflowError) as error:
        raise invalid(f"tensor parsing error: {one.alias} ({error})") from error
    if tensor.dtype != one.dtype:
        raise one.wrong_dtype(tensor.dtype)
    return array
