"""The official stubs as one client, for the contract tests of the model server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
import tensorflow as tf
from google.protobuf import text_format
from tensorflow.core.framework.tensor_pb2 import TensorProto
from tensorflow_serving.apis import (
    get_model_status_pb2,
    model_management_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from tests.support.serving import Server, is_embedded, wait_until

AVAILABLE = get_model_status_pb2.ModelVersionStatus.AVAILABLE
END = get_model_status_pb2.ModelVersionStatus.END
ours_only = pytest.mark.skipif(not is_embedded(), reason="differs on purpose from the real server")


class Client:
    """The official stubs on one channel."""

    def __init__(self, server: Server, channel: grpc.Channel) -> None:
        self.server = server
        self.channel = channel
        self.prediction = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        self.models = model_service_pb2_grpc.ModelServiceStub(channel)

    def reload(self, *models: str, timeout_s: float = 60) -> None:
        """Sends a ModelConfigList of the given text-format ModelConfigs."""
        request = model_management_pb2.ReloadConfigRequest()
        request.config.model_config_list.SetInParent()
        text = "".join(f"config {{ model_platform: 'tensorflow' {model} }}" for model in models)
        text_format.Parse(text, request.config.model_config_list)
        self.models.HandleReloadConfigRequest(request, timeout=timeout_s)

    def states(self, model: str) -> dict[int, int]:
        request = get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.name = model
        try:
            response = self.models.GetModelStatus(request, timeout=10)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise
            return {}
        return {status.version: status.state for status in response.model_version_status}

    def await_states(self, model: str, **wanted: int) -> None:
        versions = {int(name[1:]): state for name, state in wanted.items()}

        def reached() -> bool:
            states = self.states(model)
            return all(states.get(version, END) == state for version, state in versions.items())

        wait_until(reached, what=f"{model} reaches {versions}")

    def predict(
        self,
        model: str = "affine",
        *,
        version: int | None = None,
        label: str | None = None,
        signature: str = "",
        outputs: tuple[str, ...] = (),
        **inputs: Any,
    ) -> predict_pb2.PredictResponse:
        request = predict_pb2.PredictRequest(output_filter=outputs)
        request.model_spec.name = model
        request.model_spec.signature_name = signature
        if version is not None:
            request.model_spec.version.value = version
        if label is not None:
            request.model_spec.version_label = label
        for alias, value in inputs.items():
            is_tensor = isinstance(value, TensorProto)
            request.inputs[alias].CopyFrom(value if is_tensor else tf.make_tensor_proto(value))
        return self.prediction.Predict(request, timeout=10)


def refused(call: Callable[[], Any]) -> tuple[str, str]:
    """The status code's name and the details of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code().name, error.details()
