"""Replays a version's recorded requests before it becomes available.

`assets.extra/tf_serving_warmup_requests` is a TFRecord file of PredictionLog messages. A record
that fails, fails the load: a version that cannot answer its own examples must not serve.
"""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow_serving.apis import prediction_log_pb2

from serving.embedded import examples
from serving.embedded import session as tf_session
from serving.embedded.predict import predict_call
from serving.embedded.servable import Servable
from serving.embedded.status import Code, StatusError

FILE = Path("assets.extra") / "tf_serving_warmup_requests"
MAX_RECORDS = 1000


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
    match kind:
        case None:
            return
        case "predict_log":
            call = predict_call(servable, record.predict_log.request)
        case "classify_log":
            classify = record.classify_log.request
            call = examples.classify(servable, classify.model_spec, classify.input)
        case "regress_log":
            regress = record.regress_log.request
            call = examples.regress(servable, regress.model_spec, regress.input)
        case "multi_inference_log":
            call = examples.multi_inference(servable, record.multi_inference_log.request)
        case _:
            raise StatusError(
                Code.UNIMPLEMENTED, f"Unsupported log_type for warmup: {kind} in {path}"
            )
    call.finish(call.program.warm(call.arrays))
