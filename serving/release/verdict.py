"""The verdict: one pure function over the evidence, the stage and the clock.

Guardrails act at any time. A failed health check invalidates, it never blames the model. Without
data the answer is HOLD, also at the end: an analysis without a measurement is no success and no
failure. Promotion needs the last stage; going to the next stage needs much less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from perennial.spec import Release
from serving.release import guardrails, health
from serving.release.estimator import Estimate, estimate, labelled_keys
from serving.release.evidence import Cells, Evidence, StageWindow, Ticks
from serving.release.sequence import Interval, fixed_horizon, interval, mixture_rho


class Kind(StrEnum):
    """What is to be done."""

    PROMOTE = "PROMOTE"  # the candidate is good enough: make it the champion
    ADVANCE = "ADVANCE"  # nothing speaks against the next stage of the ramp
    HOLD = "HOLD"  # wait; the reason says for what
    ROLLBACK = "ROLLBACK"  # the candidate does harm: take its traffic away now
    INCONCLUSIVE = "INCONCLUSIVE"  # the time is over and the evidence decides nothing
    INVALID = "INVALID"  # the experiment is broken; its numbers say nothing about the model


FINAL = frozenset({Kind.PROMOTE, Kind.ROLLBACK, Kind.INCONCLUSIVE, Kind.INVALID})


@dataclass(frozen=True)
class Latch:
    """When the sequence first crossed each bound; None: not yet.

    The guarantee covers all looks together, so that a crossing counts from then on.
    """

    good_enough_at: datetime | None = None
    worse_at: datetime | None = None

    def as_dict(self) -> dict[str, str | None]:
        return {name: None if at is None else at.isoformat() for name, at in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, str | None]) -> Latch:
        return cls(**{k: datetime.fromisoformat(at) if at else None for k, at in values.items()})


@dataclass(frozen=True)
class Verdict:
    """What is to be done, why, and the numbers.

    Attributes:
        reason: stable code, `primary.worse`, `guardrail.error_rate`, `hold.labels`, ...
        headline: one sentence for people.
        numbers: JSON-serialisable.
        latch: to be given to the next call.
    """

    kind: Kind
    reason: str
    headline: str
    at: datetime
    numbers: dict[str, Any] = field(default_factory=dict)
    latch: Latch = Latch()

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind.value,
            "reason": self.reason,
            "headline": self.headline,
            "at": self.at.isoformat(),
            "numbers": self.numbers,
            "latch": self.latch.as_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Verdict:
        return cls(
            Kind(values["kind"]),
            values["reason"],
            values["headline"],
            datetime.fromisoformat(values["at"]),
            dict(values["numbers"]),
            Latch.from_dict(values["latch"]),
        )


def judge(
    release: Release,
    evidence: Evidence,
    stages: Sequence[StageWindow],
    *,
    now: datetime,
    latch: Latch = Latch(),
) -> Verdict:
    """Judges one look at the evidence.

    Args:
        release: the `release` part of model.yaml.
        evidence: everything since the ramp began.
        stages: the stages so far, in order; the last one is running.
        latch: of the verdict before.
    """
    cells, ticks = Cells.of(evidence), Ticks.of(evidence)
    errors = guardrails.error_evidence(ticks, cells)
    checks = health.check(cells, ticks, {stage.index: stage.share for stage in stages})
    difference = estimate(cells)
    bounds = _bounds(release, difference)
    if difference is not None and bounds is not None and has_enough_keys(release, difference):
        latch = _latched(release, bounds, latch, now)
    numbers = _numbers(release, cells, errors, checks, difference, bounds, stages, now)

    def verdict(kind: Kind, reason: str, headline: str) -> Verdict:
        return Verdict(kind, reason, headline, now, numbers, latch)

    for guardrail in release.guardrails:
        if errors.is_tripped(guardrail):
            return verdict(
                Kind.ROLLBACK,
                "guardrail.tripwire",
                f"{errors.recent_canary:.1%} of the candidate's latest requests fail, "
                f"{errors.recent_stable:.1%} of the champion's",
            )
        if errors.is_breached(guardrail):
            return verdict(
                Kind.ROLLBACK,
                "guardrail.error_rate",
                f"the candidate fails more often: {errors.rate_canary:.2%} against "
                f"{errors.rate_stable:.2%} of requests",
            )
    if checks.problem:
        return verdict(Kind.INVALID, f"health.{checks.problem}", _HEALTH_HEADLINES[checks.problem])
    if latch.worse_at is not None:
        return verdict(
            Kind.ROLLBACK,
            "primary.worse",
            f"the candidate's {release.primary_metric} is worse by {numbers['theta']:+.4f}",
        )
    return verdict(*_progress(release, cells, difference, bounds, latch, stages, now))


def _progress(
    release: Release,
    cells: Cells,
    difference: Estimate | None,
    bounds: Interval | None,
    latch: Latch,
    stages: Sequence[StageWindow],
    now: datetime,
) -> tuple[Kind, str, str]:
    """The verdict when nothing speaks against the candidate."""
    stage = stages[-1]
    if not (cells.is_canary & (cells.requests > 0)).any():
        return Kind.HOLD, "hold.no_traffic", "no request of the candidate was seen yet"
    if difference is None or bounds is None:
        return Kind.HOLD, "hold.no_labels", "no labels of both arms to compare yet"
    is_last = stage.index == len(release.ramp) - 1
    is_long_enough = now - stage.start >= release.ramp[stage.index].min_duration
    if is_last and is_long_enough and latch.good_enough_at is not None:
        word = "better than" if release.objective == "superior" else "not worse than"
        return (
            Kind.PROMOTE,
            f"primary.{release.objective}",
            f"the candidate's {release.primary_metric} is {word} the champion's",
        )
    if now - stages[0].start >= release.max_duration:
        return (
            Kind.INCONCLUSIVE,
            "inconclusive.max_duration",
            f"undecided after {now - stages[0].start}: the difference lies between "
            f"{bounds.lower:+.4f} and {bounds.upper:+.4f}",
        )
    if not is_long_enough:
        return Kind.HOLD, "hold.min_duration", f"stage {stage.index} has not lasted long enough"
    if is_last:
        if not has_enough_keys(release, difference):
            return (
                Kind.HOLD,
                "hold.keys",
                f"{min(difference.keys_stable, difference.keys_canary)} labelled keys in the "
                f"smaller arm, {release.min_keys} are needed",
            )
        return (
            Kind.HOLD,
            "hold.undecided",
            f"the difference lies between {bounds.lower:+.4f} and {bounds.upper:+.4f}, the bound "
            f"is {required_bound(release):+.4f}",
        )
    keys = labelled_keys(cells, is_canary=True, stage=stage.index)
    if keys < release.min_keys_stage:
        return (
            Kind.HOLD,
            "hold.stage_keys",
            f"{keys} labelled candidate keys in stage {stage.index}, {release.min_keys_stage} are "
            "needed",
        )
    if bounds.upper >= advance_bound(release):
        return (
            Kind.HOLD,
            "hold.advance_margin",
            f"the candidate may still be worse by {bounds.upper:+.4f}, the next stage needs "
            f"{advance_bound(release):+.4f}",
        )
    return Kind.ADVANCE, "ramp.advance", f"stage {stage.index} is passed"


def required_bound(release: Release) -> float:
    """What the upper bound of the difference must be below for promotion."""
    return release.margin if release.objective == "non_inferior" else 0.0


def advance_bound(release: Release) -> float:
    """What the upper bound must be below for the next stage."""
    if release.advance_margin is not None:
        return release.advance_margin
    return 5 * release.margin


def has_enough_keys(release: Release, difference: Estimate) -> bool:
    """Whether the bounds are trusted: with fewer keys per arm they err too often."""
    return min(difference.keys_stable, difference.keys_canary) >= release.min_keys


def _bounds(release: Release, difference: Estimate | None) -> Interval | None:
    if difference is None:
        return None
    rho = mixture_rho(mde=release.mde, alpha=release.alpha)
    return interval(difference.theta, difference.variance, rho=rho, alpha=release.alpha)


def _latched(release: Release, bounds: Interval, latch: Latch, now: datetime) -> Latch:
    if latch.good_enough_at is None and bounds.upper < required_bound(release):
        latch = replace(latch, good_enough_at=now)
    if latch.worse_at is None and bounds.lower > 0:
        latch = replace(latch, worse_at=now)
    return latch


def _numbers(
    release: Release,
    cells: Cells,
    errors: guardrails.ErrorEvidence,
    checks: health.Health,
    difference: Estimate | None,
    bounds: Interval | None,
    stages: Sequence[StageWindow],
    now: datetime,
) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "stage": stages[-1].index,
        "share": stages[-1].share,
        "elapsed_s": (now - stages[0].start).total_seconds(),
        "required_bound": required_bound(release),
        "advance_bound": advance_bound(release),
        "stage_keys": labelled_keys(cells, is_canary=True, stage=stages[-1].index),
        "errors": asdict(errors),
        "health": asdict(checks),
    }
    if difference is not None and bounds is not None:
        numbers |= asdict(difference) | asdict(bounds)
        numbers["fixed_lower"], numbers["fixed_upper"] = fixed_horizon(
            difference.theta, difference.variance
        )
        numbers["stages"] = [
            asdict(stage)
            | dict(zip(("lower", "upper"), fixed_horizon(stage.theta, stage.variance), strict=True))
            for stage in difference.stages
        ]
    return numbers


_HEALTH_HEADLINES = {
    "srm": "the arms' numbers of keys do not fit the declared shares",
    "version_mix": "requests were answered by another version than declared",
    "crossed_keys": "keys changed their arm within a stage",
    "label_mismatch": "labels arrive more often for one arm than for the other",
}
