"""Where the two pools, the router's routes and their configuration files are, from the settings."""

from __future__ import annotations

from pathlib import Path

from perennial.settings import Settings
from serving.tfserving import Pool, Replica

MONITORING_PATH = "/monitoring/prometheus/metrics"


def serving_dir(settings: Settings) -> Path:
    """Declared state of serving: it survives a restart of anything."""
    return settings.home / "serving"


def config_file(settings: Settings, pool: str) -> Path:
    return serving_dir(settings) / f"{pool}.config"


def stable_pool(settings: Settings) -> Pool:
    """The pool that every user can reach."""
    replica = Replica(grpc=f"{settings.bind}:{settings.stable_port}")
    return Pool("stable", (replica,), config_file(settings, "stable"))


def canary_pool(settings: Settings) -> Pool:
    """The pool that only the router's canary share reaches."""
    replica = Replica(grpc=f"{settings.bind}:{settings.canary_port}")
    return Pool("canary", (replica,), config_file(settings, "canary"))
