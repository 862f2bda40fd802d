"""Predicts two flights in one gRPC call, and sends back what became of them.

    python examples/predict_and_label.py

It needs `grpcio` and `tensorflow-serving-api`, as any client of TensorFlow Serving, and the stubs
of serving/protos/labels.proto. PERENNIAL_LABELS_KEY holds the API key where the intake asks for
one.
"""

from __future__ import annotations

import argparse
import os
import sys

import grpc
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

from serving.protos import labels_pb2, labels_pb2_grpc

# Raw features by the names of models/flights/model.yaml, one value per row.
FLIGHTS = {
    "carrier": (tf.string, ["UA", "B6"]),
    "origin": (tf.string, ["EWR", "JFK"]),
    "dest": (tf.string, ["IAH", "BQN"]),
    "month": (tf.int64, [1, 1]),
    "day_of_week": (tf.int64, [1, 1]),
    "sched_dep_minute": (tf.int64, [315, 545]),
    "sched_arr_minute": (tf.int64, [499, 1022]),
    "distance": (tf.float32, [1400.0, 1576.0]),
    "temp": (tf.float32, [39.0, float("nan")]),
    "dewp": (tf.float32, [28.0, float("nan")]),
    "humid": (tf.float32, [64.4, float("nan")]),
    "wind_speed": (tf.float32, [12.7, float("nan")]),
    "precip": (tf.float32, [0.0, 0.0]),
    "pressure": (tf.float32, [1011.9, float("nan")]),
    "visib": (tf.float32, [10.0, float("nan")]),
}
TAIL_NUMBER = "N14228"
LATE = [0.0, 1.0]


def predict(channel: grpc.Channel) -> tuple[str, list[float]]:
    """The call's request id, and one score per row."""
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "flights"
    for name, (dtype, values) in FLIGHTS.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(values, dtype=dtype))
    metadata = (("x-routing-key", TAIL_NUMBER), ("x-perennial-model", "flights"))
    stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
    reply, call = stub.Predict.with_call(request, timeout=5, metadata=metadata)
    scores = tf.make_ndarray(reply.outputs["late"]).reshape(-1).tolist()
    headers = dict(call.initial_metadata())
    print(f"version {reply.model_spec.version.value} on {headers['x-perennial-arm']}: {scores}")
    return headers["x-request-id"], scores


def send_labels(
    channel: grpc.Channel, request_id: str, values: list[float]
) -> labels_pb2.RecordLabelsResponse:
    """Says what became of each row; the answer means that it is on disk."""
    request = labels_pb2.RecordLabelsRequest(
        model="flights",
        source="example",
        labels=[
            labels_pb2.Label(request_id=request_id, row=row, value=value)
            for row, value in enumerate(values)
        ],
    )
    key = os.environ.get("PERENNIAL_LABELS_KEY")
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    stub = labels_pb2_grpc.LabelServiceStub(channel)
    # Sending a label again is harmless, so a call without an answer is simply repeated.
    return stub.RecordLabels(request, timeout=5, metadata=metadata)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", default="127.0.0.1:9000")
    parser.add_argument("--labels", default="127.0.0.1:9010")
    options = parser.parse_args(arguments)
    with grpc.insecure_channel(options.router) as channel:
        request_id, _ = predict(channel)
    with grpc.insecure_channel(options.labels) as channel:
        answer = send_labels(channel, request_id, LATE)
    print(f"{request_id}: {answer.accepted} labels taken, {answer.duplicates} were there already")


if __name__ == "__main__":
    main(sys.argv[1:])
