"""What the ledger and the logs say, for Prometheus.

    python -m monitoring.exporter

Measured again and again in the background; a scrape gets the newest measurement. What could not be
measured, or is older than `STALE_S`, is left out, so that rules see no data rather than old data.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from monitoring.quality import Quality, measure
from monitoring.rules import QUALITY_METRICS
from perennial.errors import Retryable
from perennial.ledger import Ledger
from perennial.local.postgres import database_url
from perennial.service import run_service
from perennial.settings import Settings
from perennial.spec import ModelSpec, load_specs
from perennial.store import Store

logger = logging.getLogger(__name__)

STALE_S: Final = 120.0

_GAUGES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "perennial_model_info": ("1 for the champion's version.", ("model", "version")),
    "perennial_staleness_seconds": ("Since the champion was promoted.", ("model",)),
    "perennial_baseline": ("The champion's metrics at promotion.", ("model", "metric")),
    "perennial_open_episode": ("1 while an episode is open.", ("model", "state")),
    "perennial_quality": (
        "Quality on matured labels in a threshold's window.",
        ("model", "version", "metric", "threshold"),
    ),
    "perennial_quality_labelled_rows": (
        "Matured rows with a label that the quality rests on.",
        ("model", "version", "threshold"),
    ),
    "perennial_quality_matured_rows": (
        "Answered rows old enough to have a label.",
        ("model", "version", "threshold"),
    ),
    "perennial_labels_unknown": (
        "Labels in the window whose prediction is not in the log.",
        ("model", "threshold"),
    ),
    "perennial_labels_repeated": (
        "Labels in the window beyond the first of a row.",
        ("model", "threshold"),
    ),
    "perennial_labels_late": (
        "Matured rows in the window whose label came after the label horizon.",
        ("model", "threshold"),
    ),
    "perennial_labels_conflicting": (
        "Rows in the window whose labels differ.",
        ("model", "threshold"),
    ),
}

Samples = list[tuple[str, tuple[str, ...], float]]
"""(name of `_GAUGES`, label values, value)."""


class Exporter(Collector):
    """Measures all models under care; gives the newest measurement to each scrape."""

    def __init__(
        self, specs: Mapping[str, ModelSpec], store: Store, registry: CollectorRegistry
    ) -> None:
        self._specs = specs
        self._store = store
        self._measured: dict[str, tuple[float, Samples]] = {}
        self._errors = Counter(
            "perennial_exporter_errors", "Failed measurements.", ["model"], registry=registry
        )
        self._took_s = Gauge(
            "perennial_exporter_refresh_seconds", "Time of the last round.", registry=registry
        )
        for name in specs:
            self._errors.labels(name)
        registry.register(self)

    def refresh(self, ledger: Ledger, now: datetime) -> None:
        """Measures every model; one that fails keeps its last measurement until it is stale."""
        begun = time.monotonic()
        for name, spec in self._specs.items():
            try:
                samples = [*_of_ledger(spec, ledger, now), *_of_logs(spec, self._store, now)]
            except Exception as error:  # noqa: BLE001 - one model's logs must not silence the others
                logger.warning("model %s was not measured: %s", name, error)
                self._errors.labels(name).inc()
            else:
                self._measured[name] = (time.monotonic(), samples)
        self._took_s.set(time.monotonic() - begun)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        families = {
            name: GaugeMetricFamily(name, text, labels=labels)
            for name, (text, labels) in _GAUGES.items()
        }
        for measured, samples in self._measured.values():
            if time.monotonic() - measured < STALE_S:
                for name, labels, value in samples:
                    families[name].add_metric(labels, value)
        return families.values()


def _of_ledger(spec: ModelSpec, ledger: Ledger, now: datetime) -> Samples:
    model, samples = spec.name, Samples()
    if champion := ledger.champion(model):
        samples += [
            ("perennial_model_info", (model, str(champion.version)), 1.0),
            ("perennial_staleness_seconds", (model,), (now - champion.since).total_seconds()),
        ]
        samples += [
            ("perennial_baseline", (model, metric), float(value))
            for metric, value in champion.baseline.items()
            if isinstance(value, int | float) and math.isfinite(value)
        ]
    if episode := ledger.open_episode_of(model):
        samples.append(("perennial_open_episode", (model, str(episode.state)), 1.0))
    return samples


def _of_logs(spec: ModelSpec, store: Store, now: datetime) -> Samples:
    samples: Samples = []
    windows: dict[timedelta, Quality] = {}
    for threshold in spec.thresholds:
        if threshold.metric not in QUALITY_METRICS:
            continue
        if threshold.window not in windows:
            windows[threshold.window] = measure(spec, store, window=threshold.window, now=now)
        found = windows[threshold.window]
        own = (spec.name, threshold.name)
        samples += [
            ("perennial_labels_unknown", own, float(found.unknown)),
            ("perennial_labels_repeated", own, float(found.duplicates)),
            ("perennial_labels_late", own, float(found.late)),
            ("perennial_labels_conflicting", own, float(found.conflicting)),
        ]
        for version, quality in found.versions.items():
            of = (spec.name, str(version), threshold.name)
            samples += [
                ("perennial_quality_labelled_rows", of, float(quality.labelled)),
                ("perennial_quality_matured_rows", of, float(quality.matured)),
            ]
            samples += [
                ("perennial_quality", (spec.name, str(version), metric, threshold.name), value)
                for metric, value in quality.metrics.items()
                # NaN compares as "not breached"; left out, it is no data.
                if math.isfinite(value)
            ]
    return samples


def serve(settings: Settings, stop: threading.Event) -> None:
    """Measures and serves until `stop` is set.

    Raises:
        Permanent: from `load_specs` or `Store`.
        Retryable: `exporter.port`.
    """
    registry = CollectorRegistry()
    specs = load_specs(settings.models_dir, settings.profile)
    exporter = Exporter(specs, Store(settings.store), registry)
    try:
        server, thread = start_http_server(
            settings.exporter_port, addr=settings.bind, registry=registry
        )
    except OSError as error:
        raise Retryable("exporter.port", f"port {settings.exporter_port}: {error}") from error
    ledger: Ledger | None = None
    try:
        while not stop.is_set():
            try:
                if ledger is None:
                    ledger = Ledger(database_url(settings, "perennial"))
                exporter.refresh(ledger, datetime.now(UTC))
            except Retryable as error:
                # The database is starting, or was restarted elsewhere.
                logger.warning("%s", error)
            stop.wait(max(1.0, settings.scrape_interval_s / 2))
    finally:
        if ledger is not None:
            ledger.close()
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    sys.exit(run_service(serve))
