"""What Prometheus scrapes and evaluates, rendered from the settings and each `model.yaml`.

For every threshold, two or three recorded series with the labels `model` and `threshold`:

    perennial_threshold_value      what is compared, in the metric's own unit
    perennial_threshold_count      how many rows or calls it rests on (quality, errors, latency)
    perennial_threshold_breached   0 or 1; **absent: no data**

and one alert, `PerennialThreshold`, after `for`. No traffic, too few rows, a missing exporter or
NaN leave the series out: an absent series is never "all is well".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import yaml

from perennial.durations import format_duration
from perennial.settings import Settings
from perennial.spec import ModelSpec, Threshold
from perennial.store import write_atomic

ALERT: Final = "PerennialThreshold"
VALUE: Final = "perennial_threshold_value"
COUNT: Final = "perennial_threshold_count"
BREACHED: Final = "perennial_threshold_breached"

QUALITY_METRICS: Final = ("log_loss", "brier", "mae", "label_coverage")


def config_path(settings: Settings) -> Path:
    """The configuration that Prometheus is started with."""
    return settings.home / "prometheus" / "prometheus.yml"


def render(settings: Settings, specs: Mapping[str, ModelSpec]) -> dict[str, str]:
    """All files, by name relative to the configuration's folder."""
    files = {"prometheus.yml": _config(settings)}
    for name, spec in sorted(specs.items()):
        groups = [
            {"name": f"{name}/{t.name}", "rules": list(_rules(settings, name, t))}
            for t in spec.thresholds
        ]
        if groups:
            files[f"rules/{name}.yml"] = _yaml({"groups": groups})
    return files


def write(settings: Settings, specs: Mapping[str, ModelSpec]) -> Path:
    """Writes what `render` gives, removes rules of models that are gone; returns `config_path`.

    A running Prometheus reads it on `POST /-/reload`.
    """
    folder = config_path(settings).parent
    files = render(settings, specs)
    for name, text in files.items():
        write_atomic(folder / name, text.encode())
    for path in (folder / "rules").glob("*.yml"):
        if f"rules/{path.name}" not in files:
            path.unlink()
    return config_path(settings)


def _config(settings: Settings) -> str:
    host = settings.reachable
    interval = f"{settings.scrape_interval_s}s"

    def job(name: str, port: int, host: str = host, **given: Any) -> dict[str, Any]:
        return {"job_name": name, "static_configs": [{"targets": [f"{host}:{port}"]}], **given}

    pools = {
        "job_name": "tfserving",
        "metrics_path": "/monitoring/prometheus/metrics",
        "static_configs": [
            {
                "targets": [f"{r.host}:{r.rest_port}" for r in settings.replicas(pool)],
                "labels": {"pool": pool},
            }
            for pool in ("stable", "canary")
        ],
    }
    router = job(
        "router",
        settings.router_admin_port,
        settings.router_admin_host,
        metrics_path="/stats/prometheus",
        params={"usedonly": [""]},
    )
    return _yaml(
        {
            "global": {
                "scrape_interval": interval,
                "scrape_timeout": f"{min(settings.scrape_interval_s, 10)}s",
                "evaluation_interval": interval,
            },
            "rule_files": ["rules/*.yml"],
            "scrape_configs": [
                pools,
                router,
                job("recorder", settings.recorder_metrics_port),
                job("labels", settings.labels_metrics_port),
                job("exporter", settings.exporter_port),
            ],
        }
    )


def _rules(settings: Settings, model: str, threshold: Threshold) -> Iterator[dict[str, Any]]:
    own = f'{{model="{model}",threshold="{threshold.name}"}}'
    labels = {"model": model, "threshold": threshold.name}
    count = _count(settings, model, threshold)
    value = _value(settings, model, threshold)
    if count is not None:
        yield {"record": COUNT, "expr": count, "labels": {**labels}}
        if threshold.min_count:
            value = f"({value}) and on() {COUNT}{own} >= {threshold.min_count}"
    yield {"record": VALUE, "expr": value, "labels": {**labels}}
    yield {"record": BREACHED, "expr": _breached(model, threshold, own), "labels": {**labels}}
    yield {
        "alert": ALERT,
        "expr": f"{BREACHED}{own} == 1",
        "for": format_duration(threshold.for_),
        "labels": {**labels, "action": threshold.action, "metric": threshold.metric},
        "annotations": {
            "summary": f"{model}: {threshold.metric} breaches threshold {threshold.name}",
            "value": f'{{{{ with query "{VALUE}{_escaped(own)}" }}}}'
            "{{ . | first | value }}{{ end }}",
        },
    }


def _breached(model: str, threshold: Threshold, own: str) -> str:
    if threshold.above is not None:
        return f"{VALUE}{own} > bool {threshold.above!r}"
    if threshold.below is not None:
        return f"{VALUE}{own} < bool {threshold.below!r}"
    baseline = f'perennial_baseline{{model="{model}",metric="{threshold.metric}"}}'
    difference = f"({VALUE}{own} - on() max({baseline}))"
    return f"{difference} > bool {threshold.worse_than_promotion!r}"


def _value(settings: Settings, model: str, threshold: Threshold) -> str:
    if threshold.metric in QUALITY_METRICS:
        wanted = f'model="{model}",metric="{threshold.metric}",threshold="{threshold.name}"'
        return _of_champion(f"perennial_quality{{{wanted}}}", model)
    if threshold.metric == "staleness_s":
        return f'max(perennial_staleness_seconds{{model="{model}"}})'
    calls = _calls(model)
    window = _window(settings, threshold)
    if threshold.metric == "latency_p99_ms":
        buckets = f'envoy_perennial_latency_ms_bucket{{model="{model}",route!="forced"}}[{window}]'
        # Without calls it is NaN, which no comparison holds for: no data.
        return f"histogram_quantile(0.99, sum by (le) (rate({buckets}))) >= 0"
    refused = [
        f"envoy_perennial_requests{{{calls},{outcome}}}[{window}]"
        for outcome in (
            'grpc_status!~"0|"',
            'grpc_status="",http_status=~"[45].."',
        )
    ]
    # Without an error there is no such series, and that is a rate of 0.
    errors = " + ".join(f"(sum(rate({one})) or vector(0))" for one in refused)
    all_calls = f"sum(rate(envoy_perennial_requests{{{calls}}}[{window}]))"
    return f"({errors}) / ({all_calls} > 0)"


def _count(settings: Settings, model: str, threshold: Threshold) -> str | None:
    if threshold.metric in QUALITY_METRICS:
        wanted = f'model="{model}",threshold="{threshold.name}"'
        # Coverage is of matured rows; a guard of labelled ones would hide that none came back.
        of = "matured" if threshold.metric == "label_coverage" else "labelled"
        return _of_champion(f"perennial_quality_{of}_rows{{{wanted}}}", model)
    if threshold.metric in ("error_rate", "latency_p99_ms"):
        window = _window(settings, threshold)
        return f"sum(increase(envoy_perennial_requests{{{_calls(model)}}}[{window}]))"
    return None


def _calls(model: str) -> str:
    """Calls of users that stayed for the answer."""
    return f'model="{model}",route!="forced",http_status!="0",grpc_status!="1"'


def _of_champion(expression: str, model: str) -> str:
    """The champion's series among those of all served versions."""
    champion = f'perennial_model_info{{model="{model}"}}'
    return f"max({expression} * on(model, version) group_left() {champion})"


def _window(settings: Settings, threshold: Threshold) -> str:
    """A rate needs samples: at least four scrapes."""
    least = timedelta(seconds=4 * settings.scrape_interval_s)
    return format_duration(max(threshold.window, least))


def _escaped(selector: str) -> str:
    return selector.replace('"', '\\"')


def _yaml(content: Any) -> str:
    return yaml.safe_dump(content, sort_keys=False, width=1000)
