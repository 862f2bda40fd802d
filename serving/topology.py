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
    return _pool(settings, "stable")


def canary_pool(settings: Settings) -> Pool:
    """The pool that only the router's canary share reaches."""
    return _pool(settings, "canary")


def _pool(settings: Settings, name: str) -> Pool:
    replicas = tuple(Replica(f"{r.host}:{r.port}") for r in settings.replicas(name))
    return Pool(name, replicas, config_file(settings, name))
