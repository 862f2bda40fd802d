"""One replica of a model-server pool: what it should serve, what it serves, and calls to it.

Speaks TensorFlow Serving's gRPC without its stubs, which would import all of TensorFlow.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from perennial.errors import Permanent, Retryable
from serving.protos import tfserving_pb2 as pb

CALL_S = 10.0
_PREDICTION = "/tensorflow.serving.PredictionService/"
_MODEL = "/tensorflow.serving.ModelService/"
_State = pb.ModelVersionStatus.State
_UNREACHABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})


@dataclass(frozen=True)
class ModelAssignment:
    """What a pool should serve of one model.

    Attributes:
        base_path: absolute folder of versions, as the servers see it.
        versions: the versions to load; at least one.
        labels: label → version, each one of `versions`.
    """

    base_path: str
    versions: tuple[int, ...]
    labels: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.base_path.startswith("/"):
            raise Permanent("pool.assignment", f"base path {self.base_path!r} is not absolute")
        if not self.versions or min(self.versions) < 0:
            raise Permanent("pool.assignment", f"versions {self.versions} are not usable")
        object.__setattr__(self, "versions", tuple(sorted(set(self.versions))))
        for label, version in self.labels.items():
            if version not in self.versions:
                raise Permanent(
                    "pool.assignment",
                    f"label {label!r} names version {version}, which is not in {self.versions}",
                )


@dataclass(frozen=True)
class ServedVersions:
    """What one replica serves of one model, as it says itself.

    Attributes:
        available: versions that answer, ascending.
        pending: versions that are loading or unloading.
        failed: version → the server's error.
        labels: the declared labels that resolve, and the versions that they resolve to.
    """

    replica: str
    available: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    failed: dict[int, str] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)

    def is_exactly(self, assignment: ModelAssignment | None) -> bool:
        """Whether it serves what is assigned and nothing else; None: nothing."""
        if assignment is None:
            return not self.available and not self.pending
        return (
            self.available == assignment.versions
            and not self.pending
            and self.labels == assignment.labels
        )


@dataclass(frozen=True)
class Replica:
    """One model server by its gRPC address, `host:port`."""

    grpc: str


class ReplicaClient:
    """Calls to one replica, without TensorFlow's stubs."""

    def __init__(self, replica: Replica) -> None:
        self.name = replica.grpc
        # A channel must not outlive a change of the server behind its address.
        self._channel = grpc.insecure_channel(
            replica.grpc,
            options=[("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)],
        )
        self._status = self._method(_MODEL + "GetModelStatus", pb.GetModelStatusResponse)
        self._reload = self._method(_MODEL + "HandleReloadConfigRequest", pb.ReloadConfigResponse)
        self._metadata = self._method(_PREDICTION + "GetModelMetadata", pb.GetModelMetadataResponse)

    def __enter__(self) -> ReplicaClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def _method(self, path: str, response: Any) -> Any:
        return self._channel.unary_unary(
            path,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )

    def served(self, model: str, assignment: ModelAssignment | None) -> ServedVersions:
        """States of all versions, and what the assignment's labels resolve to.

        Raises:
            Retryable: `pool.unreachable`.
        """
        available, pending, failed = [], [], {}
        for status in self._statuses(model):
            if status.state == _State.AVAILABLE:
                available.append(status.version)
            elif status.state != _State.END:
                pending.append(status.version)
            elif status.status.error_code:
                failed[status.version] = (
                    f"code {status.status.error_code}: {status.status.error_message}"
                )
        labels = {
            label: version
            for label in (assignment.labels if assignment and available else ())
            if (version := self._resolve(model, label)) is not None
        }
        return ServedVersions(
            self.name, tuple(sorted(available)), tuple(sorted(pending)), failed, labels
        )

    def reload(self, assignments: Mapping[str, ModelAssignment], deadline: float) -> str:
        """Sends a configuration; returns the server's error, "" when it accepted.

        Raises:
            Retryable: `pool.unreachable`.
        """
        request = pb.ReloadConfigRequest(config=server_config(assignments))
        timeout_s = max(0.1, deadline - time.monotonic())
        try:
            response = self._reload(request, timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                # The server waits for a new model; its status tells how far that is.
                return ""
            if error.code() in _UNREACHABLE:
                raise self._unreachable(error) from error
            return f"{error.code().name}: {error.details()}"
        return str(response.status.error_message)

    def _statuses(self, model: str) -> list[Any]:
        request = pb.GetModelStatusRequest(model_spec=pb.ModelSpec(name=model))
        try:
            return list(self._status(request, timeout=CALL_S).model_version_status)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return []
            raise self._unreachable(error) from error

    def _resolve(self, model: str, label: str) -> int | None:
        request = pb.GetModelMetadataRequest(
            model_spec=pb.ModelSpec(name=model, version_label=label),
            metadata_field=["signature_def"],
        )
        try:
            return int(self._metadata(request, timeout=CALL_S).model_spec.version.value)
        except grpc.RpcError as error:
            if error.code() in _UNREACHABLE:
                raise self._unreachable(error) from error
            return None

    def _unreachable(self, error: Any) -> Retryable:
        return Retryable(
            "pool.unreachable",
            f"model server {self.name}: {error.code().name}: {error.details()}",
            hint="is it running?",
            replica=self.name,
        )


def server_config(assignments: Mapping[str, ModelAssignment]) -> pb.ModelServerConfig:
    config = pb.ModelServerConfig()
    config.model_config_list.SetInParent()
    for name, assignment in sorted(assignments.items()):
        model = config.model_config_list.config.add(
            name=name, base_path=assignment.base_path, model_platform="tensorflow"
        )
        model.model_version_policy.specific.versions.extend(assignment.versions)
        for label, version in sorted(assignment.labels.items()):
            model.version_labels[label] = version
    return config
