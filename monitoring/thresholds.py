"""The thresholds of a model as Prometheus has evaluated them: ok, breached, or no data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from monitoring.prometheus import Prometheus
from monitoring.rules import ALERT, BREACHED, COUNT, VALUE
from perennial.durations import format_duration
from perennial.errors import Retryable
from perennial.spec import ModelSpec, Threshold


class Verdict(StrEnum):
    """What is known of a threshold."""

    OK = "ok"
    """It was evaluated and holds, or has not been breached for long enough."""
    BREACHED = "breached"
    """Its condition held for its whole `for`."""
    NO_DATA = "no_data"
    """It could not be evaluated. Not ok, and not breached."""


@dataclass(frozen=True)
class ThresholdState:
    """One threshold, now.

    Attributes:
        value: in the metric's own unit; None without data.
        bound: what it is compared with; for `worse_than_promotion` the greatest allowed value,
            None while the value at promotion is unknown.
        count: rows or calls that it rests on; None where nothing is counted.
        reason: one line for people.
    """

    threshold: Threshold
    state: Verdict
    value: float | None
    bound: float | None
    count: float | None
    reason: str

    @property
    def name(self) -> str:
        return self.threshold.name


def evaluate(spec: ModelSpec, prometheus: Prometheus) -> tuple[ThresholdState, ...]:
    """The state of each of the model's thresholds, in their order.

    Without an answer of Prometheus every threshold has no data: nothing is concluded from silence.
    """
    own = f'{{model="{spec.name}"}}'
    try:
        series = {
            name: {s.labels["threshold"]: s.value for s in prometheus.query(name + own)}
            for name in (VALUE, COUNT, BREACHED)
        }
        firing = f'{ALERT}",alertstate="firing",model="{spec.name}'
        alerts = prometheus.query(f'ALERTS{{alertname="{firing}"}}')
        baselines = {
            s.labels["metric"]: s.value for s in prometheus.query(f"perennial_baseline{own}")
        }
    except Retryable as error:
        return tuple(
            ThresholdState(t, Verdict.NO_DATA, None, _bound(t, {}), None, error.message)
            for t in spec.thresholds
        )
    fired = {sample.labels["threshold"] for sample in alerts}
    return tuple(
        _state(
            threshold,
            value=series[VALUE].get(threshold.name),
            count=series[COUNT].get(threshold.name),
            breached=series[BREACHED].get(threshold.name),
            bound=_bound(threshold, baselines),
            fired=threshold.name in fired,
        )
        for threshold in spec.thresholds
    )


def _state(
    threshold: Threshold,
    *,
    value: float | None,
    count: float | None,
    breached: float | None,
    bound: float | None,
    fired: bool,
) -> ThresholdState:
    if value is not None and not math.isfinite(value):
        value = None
    if value is None or breached is None:
        state, reason = Verdict.NO_DATA, _why_no_data(threshold, value, bound, count)
        return ThresholdState(threshold, state, value, bound, count, reason)
    said = f"{threshold.metric} {value:.6g}, bound {bound:.6g}" if bound is not None else ""
    if breached and fired:
        return ThresholdState(threshold, Verdict.BREACHED, value, bound, count, said)
    if breached:
        said += f"; beyond it for less than {format_duration(threshold.for_)}"
    return ThresholdState(threshold, Verdict.OK, value, bound, count, said)


def _why_no_data(
    threshold: Threshold, value: float | None, bound: float | None, count: float | None
) -> str:
    if count is not None and count < threshold.min_count:
        return f"{threshold.metric}: {count:.0f} of at least {threshold.min_count} rows"
    if value is not None and bound is None:
        return f"{threshold.metric} {value:.6g}: no champion with a value at promotion"
    return f"{threshold.metric}: nothing to measure"


def _bound(threshold: Threshold, baselines: Mapping[str, float]) -> float | None:
    if threshold.worse_than_promotion is None:
        return threshold.above if threshold.above is not None else threshold.below
    baseline = baselines.get(threshold.metric)
    return None if baseline is None else baseline + threshold.worse_than_promotion
