"""Puts the parts together: configuration, models, then the ports, and at the end the drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
import time
from importlib.metadata import version as package_version
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from serving.embedded import config as configs
from serving.embedded.batching import Batcher
from serving.embedded.flags import Flags, channel_options
from serving.embedded.http import Connection
from serving.embedded.inference import Core
from serving.embedded.loading import Loading
from serving.embedded.manager import Loader, Manager, Options
from serving.embedded.metrics import Metrics
from serving.embedded.rest import Handler
from serving.embedded.services import ModelService, PredictionService
from serving.embedded.status import Code, StatusError
from serving.embedded.tls import listen, read_credentials

log = logging.getLogger(__name__)

DRAIN_S = 10.0
_HEALTH_NAMES = ("", "ModelService", "PredictionService")


async def serve(flags: Flags) -> None:
    """Loads what is configured, opens the ports, serves until SIGTERM or SIGINT, drains.

    Raises:
        StatusError: it could not start.
    """
    # TensorFlow's own million objects stay; the collector need not look at them again and again.
    # Models come and go, so that nothing later is frozen.
    gc.collect()
    gc.freeze()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    config, metrics_path = _configuration(flags)
    credentials = read_credentials(Path(flags.ssl_config_file)) if flags.ssl_config_file else None
    metrics = Metrics()
    batcher = Batcher(flags, metrics)
    manager = _manager(Loading(flags, metrics, batcher), flags, metrics)
    core = Core(
        manager,
        metrics,
        grpc_threads=flags.grpc_max_threads,
        rest_threads=flags.rest_api_num_threads,
    )
    try:
        if not await _until_stopped(
            stop, asyncio.to_thread(manager.reload, config, missing_model_s=None)
        ):
            return
        if flags.model_config_file and flags.model_config_file_poll_wait_seconds > 0:
            _poll_config_file(flags, manager)
        grpc_server, health_service = await _start_grpc(flags, core, credentials)
        async with _rest(flags, core, metrics_path):
            await stop.wait()
            log.info("draining")
            if health_service is not None:
                await health_service.enter_graceful_shutdown()
            await grpc_server.stop(DRAIN_S)
    except StatusError as error:
        # The real server says "servable(s)" here and "model(s)" on a reload.
        raise StatusError(
            error.code, error.message.replace(" model(s) ", " servable(s) ", 1)
        ) from error
    finally:
        manager.stop()
        core.close()
        batcher.close()


async def _until_stopped(stop: asyncio.Event, work) -> bool:  # type: ignore[no-untyped-def]
    """Whether the work ended before a signal came; re-raises what it raised."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        return False
    task.result()
    return True


def _configuration(flags: Flags) -> tuple[configs.ModelServerConfig, str]:
    metrics_path = ""
    if flags.monitoring_config_file:
        metrics_path = configs.read_metrics_path(Path(flags.monitoring_config_file))
    if flags.model_config_file:
        return configs.read_server_config(Path(flags.model_config_file)), metrics_path
    return configs.single_model(flags.model_name, flags.model_base_path), metrics_path


def _manager(load: Loader, flags: Flags, metrics: Metrics) -> Manager:
    manager = Manager(
        load,
        Options(
            poll_s=flags.file_system_poll_wait_seconds,
            max_retries=flags.max_num_load_retries,
            retry_interval_s=flags.load_retry_interval_micros / 1e6,
            early_labels=flags.allow_version_labels_for_unavailable_models,
            load_threads=flags.num_load_threads,
            unload_threads=flags.num_unload_threads,
        ),
    )
    metrics.gauge(
        "perennial_serving_version_available",
        ("model", "version"),
        lambda: (
            ((model, str(version)), 1.0)
            for model, versions in manager.available().items()
            for version in versions
        ),
    )
    build = (package_version("tensorflow"),)
    metrics.gauge("perennial_serving_build_info", ("tensorflow",), lambda: [(build, 1.0)])
    return manager


async def _start_grpc(
    flags: Flags, core: Core, credentials: grpc.ServerCredentials | None
) -> tuple[grpc.aio.Server, health.aio.HealthServicer | None]:
    options = [
        # A second server on the same port must fail, not share it.
        ("grpc.so_reuseport", 0),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        *channel_options(flags.grpc_channel_arguments),
    ]
    server = grpc.aio.server(options=options)
    prediction = PredictionService(core, as_content=flags.enable_serialization_as_tensor_content)
    server.add_generic_rpc_handlers((prediction.handler(), ModelService(core).handler()))
    health_service = None
    if flags.enable_grpc_healthcheck_service:
        health_service = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
        for name in _HEALTH_NAMES:
            await health_service.set(name, health_pb2.HealthCheckResponse.SERVING)
    addresses = [f"{flags.bind_address}:{flags.port}"] if flags.port else []
    if flags.grpc_socket_path:
        addresses.append(f"unix:{flags.grpc_socket_path}")
    listen(server, addresses, credentials)
    await server.start()
    log.info("Running gRPC ModelServer at %s ...", ", ".join(addresses))
    return server, health_service


@contextlib.asynccontextmanager
async def _rest(flags: Flags, core: Core, metrics_path: str):  # type: ignore[no-untyped-def]
    """Serves HTTP inside the block; at its end, answers what was asked and closes."""
    if not flags.rest_api_port:
        yield
        return
    if flags.rest_api_port == flags.port:
        log.error("--rest_api_port is the same as --port: no REST API is served")
        yield
        return
    handler = Handler(
        core,
        metrics_path=metrics_path,
        cors=flags.rest_api_enable_cors_support,
        timeout_s=flags.rest_api_timeout_in_ms / 1000,
    )
    connections: set[Connection] = set()
    try:
        server = await asyncio.get_running_loop().create_server(
            lambda: Connection(handler, connections),
            flags.bind_address,
            flags.rest_api_port,
            backlog=1024,
        )
    except OSError as error:
        raise StatusError(
            Code.UNAVAILABLE, f"cannot listen on port {flags.rest_api_port}: {error}"
        ) from error
    log.info("Exporting HTTP/REST API at:%s:%d ...", flags.bind_address, flags.rest_api_port)
    try:
        yield
    finally:
        server.close()
        tasks = [task for connection in list(connections) if (task := connection.drain())]
        if tasks:
            await asyncio.wait(tasks, timeout=DRAIN_S)


def _poll_config_file(flags: Flags, manager: Manager) -> None:
    """Reloads the file again and again, as the real server does: changed or not."""

    def poll() -> None:
        path = Path(flags.model_config_file)
        while True:
            time.sleep(flags.model_config_file_poll_wait_seconds)
            try:
                config = configs.read_server_config(path)
            except StatusError as error:
                log.error("Failed to read ModelServerConfig file: %s", error)
                continue
            try:
                manager.reload(config)
            except StatusError as error:
                log.error(
                    "PollFilesystemAndReloadConfig failed to ReloadConfig: %s (process %d)",
                    error,
                    os.getpid(),
                )

    threading.Thread(target=poll, name="config", daemon=True).start()
