"""The upstream side of the router: pools, fallbacks, and where copies go."""

from __future__ import annotations

from ipaddress import ip_address
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
        _pool("stable", settings),
        _pool("canary", settings),
        _pool("stable", settings, rest=True),
        _pool("canary", settings, rest=True),
        _fallback(""),
        _fallback("_rest"),
        *_shadow_clusters(settings),
    ]


def shadow_socket(settings: Settings) -> Path:
    """Of the listener that takes the copies."""
    return settings.spool_dir / "shadow.sock"


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
    listener = {"pipe": {"path": str(shadow_socket(settings))}}
    return [
        _cluster(name + ("_rest" if rest else ""), places, "shadow", rest, MAX_SHADOW_REQUESTS)
        for rest in (False, True)
        for name, places in (
            ("shadow", [listener]),
            ("canary_shadow", _addresses(settings, "canary", rest)),
        )
    ]


def _addresses(settings: Settings, pool: str, rest: bool) -> list[dict[str, Any]]:
    return [
        address(replica.host, replica.rest_port if rest else replica.port)
        for replica in settings.replicas(pool)
    ]


def _cluster(
    name: str,
    places: list[dict[str, Any]],
    arm: str,
    rest: bool,
    max_requests: int | None = None,
) -> dict[str, Any]:
    http = {"http_protocol_options": {}} if rest else {"http2_protocol_options": WINDOWS}
    endpoints = [
        {
            "endpoint": {"address": place},
            "metadata": {"filter_metadata": {"perennial": {"arm": arm}}},
        }
        for place in places
    ]
    protocol = "extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        "name": name,
        "type": "STATIC" if all(map(_is_numeric, places)) else "STRICT_DNS",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        "circuit_breakers": _limits(max_requests or MAX_REQUESTS),
        "typed_extension_protocol_options": {
            f"envoy.{protocol}": {"@type": TYPE + protocol, "explicit_http_config": http}
        },
    }


def _is_numeric(place: dict[str, Any]) -> bool:
    """Whether it needs no name server."""
    try:
        return "pipe" in place or bool(ip_address(place["socket_address"]["address"]))
    except ValueError:
        return False


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
        "cluster_type": typed(
            "envoy.clusters.composite",
            "extensions.clusters.composite.v3.ClusterConfig",
            clusters=members,
        ),
    }
