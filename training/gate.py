"""The gate: may the candidate be exported? A pure function of the metrics; it never raises."""

from __future__ import annotations

import math
from dataclasses import dataclass

from perennial.spec import Evaluation
from training.metrics import HIGHER_IS_BETTER, regression_of


@dataclass(frozen=True)
class GateResult:
    """One gate's verdict; `says` is a sentence with its numbers."""

    metric: str
    candidate: float | None
    champion: float | None
    passed: bool
    says: str


@dataclass(frozen=True)
class SliceResult:
    """One level of one sliced feature, on the first gate's metric."""

    feature: str
    level: str
    rows: int
    metric: str
    candidate: float | None
    champion: float | None
    passed: bool


def judge(
    evaluation: Evaluation, candidate: dict[str, float], champion: dict[str, float] | None
) -> tuple[GateResult, ...]:
    """Every gate's verdict: its `bound`, and with a champion the regression against it.

    The bound counts beside a champion too: on labels that are noise a candidate which learnt the
    noise looks better than a champion which did not.
    """
    return tuple(
        _judge(
            gate.metric,
            candidate.get(gate.metric),
            champion.get(gate.metric) if champion is not None else None,
            gate.max_regression,
            gate.bound,
            champion is not None,
        )
        for gate in evaluation.gates
    )


def slice_passes(
    metric: str, candidate: float, champion: float | None, max_regression: float | None
) -> bool:
    """Whether a slice holds; without a bound, a champion, or a defined metric it always does."""
    if max_regression is None or champion is None or math.isnan(champion):
        return True
    return regression_of(metric, candidate, champion) <= max_regression


def _judge(
    metric: str,
    candidate: float | None,
    champion: float | None,
    max_regression: float,
    bound: float | None,
    has_champion: bool,
) -> GateResult:
    def verdict(passed: bool, says: str) -> GateResult:
        return GateResult(metric, _json(candidate), _json(champion), passed, says)

    if candidate is None:
        return verdict(False, f"{metric} is not a metric of this kind of label")
    if not math.isfinite(candidate):
        return verdict(False, f"{metric} of the candidate is {candidate}")
    higher = metric in HIGHER_IS_BETTER
    if bound is not None and (candidate < bound if higher else candidate > bound):
        sign = "below" if higher else "above"
        return verdict(False, f"{metric} {candidate:.4f} is {sign} its bound {bound:g}")
    if not has_champion:
        return verdict(True, f"{metric} {candidate:.4f}, no champion to compare with")
    if champion is None or not math.isfinite(champion):
        return verdict(False, f"{metric} of the champion is {champion}: nothing to compare with")
    worse = regression_of(metric, candidate, champion)
    comparison = f"{metric} {candidate:.4f} against the champion's {champion:.4f}"
    if worse > max_regression:
        return verdict(False, f"{comparison}: worse by {worse:.4f}, allowed is {max_regression:g}")
    return verdict(True, f"{comparison}: {'worse' if worse > 0 else 'better'} by {abs(worse):.4f}")


def _json(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
