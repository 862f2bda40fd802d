"""ModelServerConfig: reading it, checking it, and which versions it asks for."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from google.protobuf import text_format
from tensorflow_serving.config import model_server_config_pb2

from serving.embedded.status import Code, StatusError, invalid
from serving.protos import monitoring_config_pb2

log = logging.getLogger(__name__)

ModelConfig: TypeAlias = model_server_config_pb2.ModelConfig
ModelServerConfig: TypeAlias = model_server_config_pb2.ModelServerConfig

PLATFORM = "tensorflow"
DEFAULT_METRICS_PATH = "/monitoring/prometheus/metrics"
_URI = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_VERSION = re.compile(r"[-+]?\d{1,19}")
_MAX_VERSION = 2**63 - 1


def read_server_config(path: Path) -> ModelServerConfig:
    """Reads a text-format ModelServerConfig.

    Raises:
        StatusError: the file cannot be read or does not parse.
    """
    return read_text_proto(path, ModelServerConfig(), "tensorflow.serving.ModelServerConfig")


def read_metrics_path(path: Path) -> str:
    """Where metrics are served according to a text-format MonitoringConfig; "": nowhere."""
    config = read_text_proto(
        path, monitoring_config_pb2.MonitoringConfig(), "tensorflow.serving.MonitoringConfig"
    )
    if not config.prometheus_config.enable:
        return ""
    return config.prometheus_config.path or DEFAULT_METRICS_PATH


def single_model(name: str, base_path: str) -> ModelServerConfig:
    """The configuration that --model_name and --model_base_path stand for."""
    config = ModelServerConfig()
    config.model_config_list.config.add(name=name, base_path=base_path, model_platform=PLATFORM)
    return config


def checked_models(
    config: ModelServerConfig, previous: Mapping[str, ModelConfig]
) -> dict[str, ModelConfig]:
    """The models of a list by name, checked in the order that the real server checks them.

    Raises:
        StatusError: the first thing that is wrong.
    """
    models: dict[str, ModelConfig] = {}
    for model in config.model_config_list.config:
        if model.name in models:
            raise invalid(f"Illegal to list model {model.name} multiple times in config list")
        if not (model.base_path.startswith("/") or _URI.match(model.base_path)):
            raise invalid(
                f"Expected model {model.name} to have an absolute path or URI; got "
                f"base_path()={model.base_path}"
            )
        if _URI.match(model.base_path):
            raise StatusError(
                Code.UNIMPLEMENTED,
                f"model {model.name}: base_path {model.base_path}: only local paths are supported",
            )
        models[model.name] = model
    for name, model in models.items():
        platform = _platform(model)
        if name in previous and platform != (before := _platform(previous[name])):
            raise invalid(
                f"Illegal to change a model's platform. For model {name} platform was {before} and "
                f"new platform requested is {platform}"
            )
    return models


def check_platforms(models: Mapping[str, ModelConfig]) -> None:
    """Raises StatusError for a platform that is not TensorFlow."""
    for name, model in models.items():
        if _platform(model) != PLATFORM:
            raise invalid(f"Model {name} requests unsupported platform {_platform(model)}")


def check_logging(models: Mapping[str, ModelConfig]) -> None:
    """Request logging is refused, as by the stock binary, rather than silently not done."""
    if any(model.HasField("logging_config") for model in models.values()):
        raise invalid("No request-logger-creator provided.")


def found_versions(base_path: Path) -> dict[int, Path]:
    """The version folders of a base path: children whose whole name is an integer.

    Raises:
        OSError: the base path does not exist or cannot be listed.
    """
    found: dict[int, Path] = {}
    for child in sorted(base_path.iterdir()):
        if _VERSION.fullmatch(child.name) and child.is_dir():
            version = int(child.name)
            if abs(version) <= _MAX_VERSION:
                found.setdefault(version, child)
    return found


def wanted_versions(model: ModelConfig, found: Iterable[int]) -> tuple[set[int], set[int]]:
    """Versions to serve, and versions that are asked for by number but are not there."""
    present = set(found)
    policy = model.model_version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return present, set()
    if choice == "specific":
        asked = set(policy.specific.versions)
        return asked & present, asked - present
    number = max(1, policy.latest.num_versions)
    return set(sorted(present, reverse=True)[:number]), set()


def _platform(model: ModelConfig) -> str:
    has_type = model.model_type != model_server_config_pb2.MODEL_TYPE_UNSPECIFIED
    if has_type == bool(model.model_platform):
        which = "both" if has_type else "neither"
        raise invalid(
            f"Illegal setting {which} ModelServerConfig::model_type and "
            f"ModelServerConfig::model_platform, model name is {model.name}"
        )
    if not has_type:
        return model.model_platform
    return str(model_server_config_pb2.ModelType.Name(model.model_type)).lower()


def read_text_proto(path: Path, message: Any, kind: str) -> Any:
    """Reads a text-format message of the named kind into `message`, and returns it.

    Raises:
        StatusError: the file cannot be read or does not parse.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"{path}: {error}") from error
    try:
        return text_format.Parse(text, message)
    except text_format.ParseError as error:
        log.error("Error parsing text-format %s: %s", kind, error)
        raise invalid(f"{path}: Error parsing text-format {kind}: {error}") from error
