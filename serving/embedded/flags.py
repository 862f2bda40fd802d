"""The command line of tensorflow_model_server: the same names, defaults and tolerance.

`--name=value` and bare `--bool`. An unknown flag is a warning, so that a command line written for
the real server starts this one; a value that cannot be read is an error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from serving.embedded.status import Code, StatusError, invalid


class FlagError(Exception):
    """A value that cannot be read."""


def _flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Flags:
    """Values of all flags that this server acts on."""

    port: int = _flag(8500, "gRPC port; 0: none")
    grpc_socket_path: str = _flag("", "also listen on this Unix socket")
    rest_api_port: int = _flag(0, "HTTP port; 0: none")
    rest_api_num_threads: int = _flag(4 * (os.cpu_count() or 1), "threads for long REST requests")
    rest_api_timeout_in_ms: int = _flag(30_000, "after which a REST request is answered with 504")
    rest_api_enable_cors_support: bool = _flag(False, "send CORS headers")
    bind_address: str = _flag("127.0.0.1", "address to listen on (not a flag of the real server)")
    model_name: str = _flag("default", "name of the model at --model_base_path")
    model_base_path: str = _flag("", "folder of versions; ignored with --model_config_file")
    model_config_file: str = _flag("", "text-format ModelServerConfig")
    model_config_file_poll_wait_seconds: int = _flag(0, "re-read the config file; 0: never")
    allow_version_labels_for_unavailable_models: bool = _flag(False, "accept new labels early")
    file_system_poll_wait_seconds: int = _flag(1, "look for versions; 0: once; < 0: never")
    num_load_threads: int = _flag(0, "versions that load at once; 0: one or more of every model")
    num_unload_threads: int = _flag(0, "versions that unload at once; 0: the same")
    max_num_load_retries: int = _flag(5, "attempts after the first")
    load_retry_interval_micros: int = _flag(60_000_000, "between two attempts")
    enable_model_warmup: bool = _flag(True, "replay assets.extra/tf_serving_warmup_requests")
    num_request_iterations_for_warmup: int = _flag(0, "replay each record so often; 0: once")
    enable_batching: bool = _flag(False, "run requests together")
    batching_parameters_file: str = _flag("", "text-format BatchingParameters")
    enable_per_model_batching_parameters: bool = _flag(
        False, "read batching_params.pbtxt of each version; one without it is not batched"
    )
    ssl_config_file: str = _flag("", "text-format SSLConfig: TLS for gRPC")
    use_alts_credentials: bool = _flag(False, "refused: there is no ALTS here")
    monitoring_config_file: str = _flag("", "text-format MonitoringConfig")
    saved_model_tags: str = _flag("serve", "comma-separated tags of the graph to load")
    tensorflow_session_parallelism: int = _flag(0, "threads of both pools; 0: all cores")
    tensorflow_intra_op_parallelism: int = _flag(0, "threads inside an op")
    tensorflow_inter_op_parallelism: int = _flag(0, "threads between ops")
    tensorflow_session_config_file: str = _flag("", "text-format ConfigProto")
    grpc_channel_arguments: str = _flag("", "k=v,k=v")
    grpc_max_threads: int = _flag(4 * (os.cpu_count() or 1), "threads for long inference")
    enable_grpc_healthcheck_service: bool = _flag(False, "serve grpc.health.v1")
    enable_serialization_as_tensor_content: bool = _flag(False, "answer with tensor_content")
    enable_signature_method_name_check: bool = _flag(False, "check SignatureDef.method_name")
    version: bool = _flag(False, "print the version and exit")


# Flags of the real server that change nothing here; given, they are logged and ignored.
IGNORED = frozenset(
    {
        "enable_profiler",
        "flush_filesystem_caches",
        "mixed_precision",
        "num_tflite_interpreters_per_pool",
        "num_tflite_pools",
        "per_process_gpu_memory_fraction",
        "platform_config_file",
        "prefer_tflite_model",
        "remove_unused_fields_from_bundle_metagraph",
        "skip_initialize_tpu",
        "thread_pool_factory_config_file",
        "xla_cpu_compilation_enabled",
        "xla_gpu_compilation_enabled",
    }
)
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def parse(arguments: Sequence[str]) -> tuple[Flags, list[str]]:
    """Flags and warnings; of a flag given twice, the later wins.

    Raises:
        FlagError: a value of the wrong type.
    """
    kinds = {f.name: type(f.default) for f in fields(Flags)}
    given: dict[str, Any] = {}
    warnings = []
    for argument in arguments:
        name, separator, text = argument.removeprefix("-").removeprefix("-").partition("=")
        if not argument.startswith("-"):
            warnings.append(f"unknown argument: {argument}")
        elif name in IGNORED:
            warnings.append(f"--{name} has no effect in the embedded server")
        elif name not in kinds:
            warnings.append(f"unknown argument: {argument}")
        else:
            given[name] = _value(name, kinds[name], text if separator else None)
    return replace(Flags(), **given), warnings


def usage() -> str:
    """One line per flag."""
    lines = ["usage: python -m serving.embedded [--flag=value]..."]
    lines += [f"  --{f.name}={f.default!r}: {f.metadata['help']}" for f in fields(Flags)]
    return "\n".join(lines)


def channel_options(text: str) -> list[tuple[str, int | str]]:
    """`k=v,k=v` as gRPC options; a value that reads as an integer is one."""
    options: list[tuple[str, int | str]] = []
    for pair in filter(None, text.split(",")):
        key, separator, value = pair.partition("=")
        if not separator:
            raise FlagError(f"--grpc_channel_arguments: {pair!r} is not key=value")
        options.append((key, int(value) if value.lstrip("-").isdigit() else value))
    return options


def check(flags: Flags) -> None:
    """Raises StatusError for flags that cannot be honoured together, in the real server's words."""
    if not flags.model_base_path and not flags.model_config_file:
        raise invalid(
            "Both server_options.model_base_path and server_options.model_config_file are empty!"
        )
    if flags.port == 0 and not flags.grpc_socket_path:
        raise invalid("At least one of server_options.port or grpc_socket_path must be set.")
    if flags.use_alts_credentials and flags.ssl_config_file:
        raise invalid("use_alts_credentials and ssl_config_file cannot both be set.")
    if flags.use_alts_credentials:
        raise StatusError(Code.UNIMPLEMENTED, "--use_alts_credentials: there is no ALTS here")
    if flags.batching_parameters_file and not flags.enable_batching:
        raise invalid(
            "server_options.batching_parameters_file is set without setting "
            "server_options.enable_batching to true."
        )
    pools = flags.tensorflow_intra_op_parallelism, flags.tensorflow_inter_op_parallelism
    if flags.tensorflow_session_parallelism > 0 and all(number > 0 for number in pools):
        raise invalid(
            "tensorflow_session_parallelism excludes tensorflow_intra_op_parallelism and "
            "tensorflow_inter_op_parallelism: set either the first or the other two."
        )


def _value(name: str, kind: type, text: str | None) -> Any:
    if kind is bool:
        if text is None:
            return True
        if text.lower() in _BOOLS:
            return _BOOLS[text.lower()]
    elif text is not None and kind is str:
        return text
    elif text is not None and text.lstrip("-").isdigit():
        return int(text)
    raise FlagError(f"Couldn't interpret value {text or ''} for flag {name}.")
