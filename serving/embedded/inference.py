"""The gRPC services: PredictionService and ModelService.

`Core` answers one call for both faces, gRPC and REST, so that both find, count and fail alike.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import numpy as np
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_management_pb2,
    model_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from serving.embedded.manager import Manager
from serving.embedded.metrics import UNKNOWN_MODEL, Metrics
from serving.embedded.servable import Output, Servable
from serving.embedded.status import GRPC_CODE, Code, StatusError, invalid, truncated
from serving.embedded.tensors import fill, to_array
from serving.embedded.versions import Version

log = logging.getLogger(__name__)

# A model that usually answers within this runs on the event loop: a thread would cost more.
INLINE_RUN_S = 0.002
METADATA_FIELD = "signature_def"


@dataclass(frozen=True)
class Asked:
    """Which servable a request means."""

    model: str
    version: int | None = None
    label: str | None = None

    @classmethod
    def by(cls, request: Any) -> Asked | None:
        """What the request's ModelSpec says; None without one."""
        if not request.HasField("model_spec"):
            return None
        spec: model_pb2.ModelSpec = request.model_spec
        kind = spec.WhichOneof("version_choice")
        return cls(
            spec.name,
            spec.version.value if kind == "version" else None,
            spec.version_label if kind == "version_label" else None,
        )


@dataclass(frozen=True)
class Answer:
    """What a Predict gave."""

    servable: Servable
    signature: str
    outputs: list[Output]


class Core:
    """Finds the servable, runs it where it is cheapest, counts the result."""

    def __init__(self, manager: Manager, metrics: Metrics, *, threads: int) -> None:
        self.manager = manager
        self.metrics = metrics
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="inference")

    async def predict(
        self,
        asked: Asked | None,
        signature_name: str,
        parse: Callable[[meta_graph_pb2.SignatureDef], Mapping[str, np.ndarray]],
        *,
        entrypoint: str,
        unknown_signature: Callable[[str], StatusError],
        output_filter: Sequence[str] = (),
    ) -> Answer:
        """Answers one Predict.

        Args:
            asked: None when the request has no ModelSpec.
            parse: reads the request's tensors for the signature found; raises StatusError.

        Raises:
            StatusError: after it was counted.
        """
        started = time.perf_counter()
        servable = None
        try:
            servable = self.find(asked)
            with servable:
                try:
                    name, signature = servable.signature(signature_name)
                except KeyError:
                    raise unknown_signature(signature_name) from None
                inputs = parse(signature)
                run_started = time.perf_counter()
                if servable.typical_run_s <= INLINE_RUN_S:
                    outputs = servable.predict(signature, inputs, output_filter)
                else:
                    outputs = await asyncio.get_running_loop().run_in_executor(
                        self._threads, servable.predict, signature, inputs, output_filter
                    )
                finished = time.perf_counter()
        except StatusError as error:
            self.failed(asked, None if servable is None else servable.version, error)
            raise
        self.metrics.predicted(
            servable.model,
            servable.version,
            entrypoint=entrypoint,
            total_s=finished - started,
            run_s=finished - run_started,
        )
        return Answer(servable, name, outputs)

    def find(self, asked: Asked | None) -> Servable:
        """The servable that a request means.

        Raises:
            StatusError: no ModelSpec, no name, unknown model, version or label.
        """
        if asked is None:
            raise invalid("Missing ModelSpec")
        if not asked.model:
            raise invalid("ModelSpec has no name specified.")
        return self.manager.find(asked.model, asked.version, asked.label)

    def failed(self, asked: Asked | None, version: int | None, error: StatusError) -> None:
        """Counts a failed call under a bounded name."""
        model = "" if asked is None else asked.model
        known = model if not model or self.manager.knows(model) else UNKNOWN_MODEL
        self.metrics.failed(known, version, error.code)

    def metadata(
        self, asked: Asked | None
    ) -> tuple[Servable, get_model_metadata_pb2.SignatureDefMap]:
        """The signatures of one version; raises as `find` does."""
        servable = self.find(asked)
        signatures = get_model_metadata_pb2.SignatureDefMap()
        for name, signature in servable.signatures.items():
            signatures.signature_def[name].CopyFrom(signature)
        return servable, signatures

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def version_status(version: Version) -> get_model_status_pb2.ModelVersionStatus:
    """One version's state as GetModelStatus says it."""
    message = get_model_status_pb2.ModelVersionStatus(
        version=version.number, state=int(version.state)
    )
    message.status.SetInParent()
    if version.error is not None:
        message.status.error_code = int(version.error.code)
        message.status.error_message = version.error.message
    return message


def _unknown_signature(name: str) -> StatusError:
    return StatusError(Code.FAILED_PRECONDITION, f'Serving signature key "{name}" not found.')


async def _abort(context: grpc.aio.ServicerContext, error: StatusError) -> NoReturn:
    await context.abort(GRPC_CODE[error.code], truncated(error.message))
    raise AssertionError("abort returned")


class PredictionService(prediction_service_pb2_grpc.PredictionServiceServicer):
    """Predict and GetModelMetadata; the rest is UNIMPLEMENTED."""

    def __init__(self, core: Core, *, as_content: bool) -> None:
        self._core = core
        self._as_content = as_content

    async def Predict(self, request: Any, context: Any) -> predict_pb2.PredictResponse:
        spec = request.model_spec
        try:
            answer = await self._core.predict(
                Asked.by(request),
                spec.signature_name,
                lambda _: _arrays(request),
                entrypoint="GRPC",
                unknown_signature=_unknown_signature,
                output_filter=request.output_filter,
            )
        except StatusError as error:
            await _abort(context, error)
        response = predict_pb2.PredictResponse()
        response.model_spec.name = spec.name
        response.model_spec.version.value = answer.servable.version
        response.model_spec.signature_name = answer.signature
        for output in answer.outputs:
            fill(
                response.outputs[output.alias],
                output.array,
                output.dtype,
                as_content=self._as_content,
            )
        return response

    async def GetModelMetadata(self, request: Any, context: Any) -> Any:
        response = get_model_metadata_pb2.GetModelMetadataResponse()
        try:
            asked = Asked.by(request)
            if asked is None:
                raise invalid("Missing ModelSpec")
            if not request.metadata_field:
                raise invalid("GetModelMetadataRequest must specify at least one metadata_field")
            for name in request.metadata_field:
                if name != METADATA_FIELD:
                    raise invalid(f"Metadata field {name} is not supported")
            servable, signatures = self._core.metadata(asked)
        except StatusError as error:
            await _abort(context, error)
        response.model_spec.name = servable.model
        response.model_spec.version.value = servable.version
        response.metadata[METADATA_FIELD].Pack(signatures)
        return response

    async def Classify(self, request: Any, context: Any) -> Any:
        await _unimplemented(context, "Classify")

    async def Regress(self, request: Any, context: Any) -> Any:
        await _unimplemented(context, "Regress")

    async def MultiInference(self, request: Any, context: Any) -> Any:
        await _unimplemented(context, "MultiInference")


class ModelService(model_service_pb2_grpc.ModelServiceServicer):
    """GetModelStatus and HandleReloadConfigRequest."""

    def __init__(self, core: Core) -> None:
        self._core = core
        # Reloads wait for models; they must take no thread from inference, and they queue up.
        self._reloads = ThreadPoolExecutor(1, thread_name_prefix="reload")

    async def GetModelStatus(self, request: Any, context: Any) -> Any:
        response = get_model_status_pb2.GetModelStatusResponse()
        try:
            asked = Asked.by(request)
            if asked is None:
                raise invalid("Missing ModelSpec")
            versions = self._core.manager.status(asked.model, asked.version)
        except StatusError as error:
            await _abort(context, error)
        response.model_version_status.extend(version_status(version) for version in versions)
        return response

    async def HandleReloadConfigRequest(self, request: Any, context: Any) -> Any:
        before = {name: self._core.metrics.value(name) for name in request.metric_names}
        try:
            if request.config.WhichOneof("config") != "model_config_list":
                raise invalid(
                    "ServerModelConfig type not supported by HandleReloadConfigRequest. Only "
                    "ModelConfigList is currently supported"
                )
            await asyncio.get_running_loop().run_in_executor(
                self._reloads, self._core.manager.reload, request.config
            )
        except StatusError as error:
            log.warning("reload refused: %s", error)
            await _abort(context, error)
        response = model_management_pb2.ReloadConfigResponse()
        response.status.SetInParent()
        for name, value in before.items():
            response.metric.add(
                name=name, int64_value_increase=self._core.metrics.value(name) - value
            )
        return response


def _arrays(request: predict_pb2.PredictRequest) -> dict[str, np.ndarray]:
    arrays = {}
    for alias, tensor in request.inputs.items():
        try:
            arrays[alias] = to_array(tensor)
        except (ValueError, TypeError, OverflowError) as error:
            raise invalid(f"tensor parsing error: {alias} ({error})") from error
    return arrays


async def _unimplemented(context: grpc.aio.ServicerContext, method: str) -> NoReturn:
    await _abort(
        context,
        StatusError(Code.UNIMPLEMENTED, f"{method} is not served by the embedded server"),
    )
