"""The upstream side of the router: pools, fallbacks, and where copies go."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from perennial.settings import Settings
from serving.router.message import TYPE, address, typed

MAX_REQUESTS: Final = 4096
"""In flight per pool and protocol; more are refused at once (UNAVAILABLE, 503)."""

MAX_SHADOW_REQUESTS: Final = 64
"""Copies in flight."""

WINDOWS: Final = {"initial_stream_window_size": 4 << 20, "initial_connection_window_size": 32 << 20}


def clusters(settings: Settings) -> list[dict[str, Any]]:
    """All clusters that routes may name."""
    return [
        _pool("stable", settings, settings.stable_port),
        _pool("canary", settings, settings.canary_port),
        _pool("stable", settings, settings.stable_rest_port, rest=True),
        _pool("canary", settings, settings.canary_rest_port, rest=True),
        _fallback(""),
        _fallback("_rest"),
        *_shadow_clusters(settings),
    ]


def shadow_socket(settings: Settings) -> Path:
    """Of the listener that takes the copies."""
    return settings.spool_dir / "shadow.sock"


def _pool(arm: str, settings: Settings, port: int, *, rest: bool = False) -> dict[str, Any]:
    name = f"{arm}_rest" if rest else arm
    # REST has no health page of its own: whether the port is open has to do.
    check: dict[str, Any] = {"tcp_health_check": {}} if rest else {"grpc_health_check": {}}
    return {
        **_cluster(name, address(_reachable(settings.bind), port), arm, rest=rest),
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
        # Else Envoy routes to hosts it knows to be dead as soon as most of a pool is.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
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
    canary = _reachable(settings.bind)
    listener = {"pipe": {"path": str(shadow_socket(settings))}}
    ports = {"": settings.canary_port, "_rest": settings.canary_rest_port}
    return [
        _cluster(f"{name}{suffix}", place, "shadow", suffix == "_rest", MAX_SHADOW_REQUESTS)
        for suffix, port in ports.items()
        for name, place in (("shadow", listener), ("canary_shadow", address(canary, port)))
    ]


def _cluster(
    name: str, place: dict[str, Any], arm: str, rest: bool, max_requests: int | None = None
) -> dict[str, Any]:
    http = {"http_protocol_options": {}} if rest else {"http2_protocol_options": WINDOWS}
    endpoint = {
        "endpoint": {"address": place},
        "metadata": {"filter_metadata": {"perennial": {"arm": arm}}},
    }
    protocol = "extensions.upstreams.http.v3.HttpProtocolOptions"
    most = max_requests or MAX_REQUESTS
    limits = {
        "max_connections": most,
        "max_requests": most,
        "max_pending_requests": most,
        "max_retries": 256,
    }
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
        "circuit_breakers": {"thresholds": [limits]},
        "typed_extension_protocol_options": {
            f"envoy.{protocol}": {"@type": TYPE + protocol, "explicit_http_config": http}
        },
    }


def _fallback(suffix: str) -> dict[str, Any]:
    """Attempt 1 from the canary, attempt 2 from stable."""
    members = [{"name": f"canary{suffix}"}, {"name": f"stable{suffix}"}]
    return {
        "name": f"canary_or_stable{suffix}",
        "connect_timeout": "1s",
        "lb_policy": "CLUSTER_PROVIDED",
        "cluster_type": typed(
            "envoy.clusters.composite",
            "extensions.clusters.composite.v3.ClusterConfig",
            clusters=members,
        ),
    }


def _reachable(bind: str) -> str:
    return "127.0.0.1" if bind in ("0.0.0.0", "::") else bind
