"""Replays a version's recorded requests before it becomes available.

`assets.extra/tf_serving_warmup_requests` is a TFRecord file of PredictionLog messages. A record
that fails, fails the load: a version that cannot answer its own examples must not serve.
"""

from __future__ import annotations

import logging
from pathlib import Path

import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow_serving.apis import prediction_log_pb2

from serving.embedded import session as tf_session
from serving.embedded.servable import Servable
from serving.embedded.status import Code, StatusError
from serving.embedded.tensors import to_array

log = logging.getLogger(__name__)

FILE = Path("assets.extra") / "tf_serving_warmup_requests"
MAX_RECORDS = 1000
_NOT_SERVED = frozenset({"classify_log", "regress_log", "multi_inference_log"})


def warm_up(servable: Servable, folder: Path, *, iterations: int = 1) -> int:
    """Replays every record `iterations` times; returns how many records there were.

    Raises:
        StatusError: too many records, a file that is no TFRecord, or a record that fails.
    """
    path = folder / FILE
    if not path.is_file():
        return 0
    count = 0
    try:
        for raw in tf.compat.v1.io.tf_record_iterator(str(path)):
            count += 1
            if count > MAX_RECORDS:
                raise StatusError(
                    Code.INVALID_ARGUMENT,
                    f"Number of warmup records exceeds the maximum ({MAX_RECORDS}) at {path}",
                )
            for _ in range(iterations):
                _replay(servable, prediction_log_pb2.PredictionLog.FromString(raw), path)
    except DecodeError as error:
        raise StatusError(
            Code.INVALID_ARGUMENT, f"Failed to parse warmup record: {count} from {path}: {error}"
        ) from error
    except tf.errors.OpError as error:
        failure = tf_session.status_of(error)
        raise StatusError(
            failure.code,
            f"{failure.message}. Please verify your warmup data is in TFRecord format.",
        ) from error
    return count


def _replay(servable: Servable, record: prediction_log_pb2.PredictionLog, path: Path) -> None:
    kind = record.WhichOneof("log_type")
    if kind is None:
        return
    if kind in _NOT_SERVED:
        log.warning("%s: a %s record is skipped, this server answers Predict only", path, kind)
        return
    if kind != "predict_log":
        raise StatusError(Code.UNIMPLEMENTED, f"Unsupported log_type for warmup: {kind} in {path}")
    request = record.predict_log.request
    try:
        _, signature = servable.signature(request.model_spec.signature_name)
        inputs = {alias: to_array(tensor) for alias, tensor in request.inputs.items()}
    except KeyError as error:
        raise StatusError(
            Code.FAILED_PRECONDITION, f"Serving signature key {error} not found in {path}"
        ) from error
    except ValueError as error:
        raise StatusError(
            Code.INVALID_ARGUMENT, f"tensor parsing error in {path}: {error}"
        ) from error
    servable.predict(signature, inputs, request.output_filter)
