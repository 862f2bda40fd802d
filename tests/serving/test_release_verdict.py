"""The verdict: what each kind of evidence leads to, and what it must never lead to."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perennial.spec import Release
from serving.release.evidence import Evidence, StageWindow
from serving.release.verdict import FINAL, Kind, Latch, Verdict, judge
from tests.support.release import START, TICK, Simulation, evidence_of, release, windows

END = START + 60 * TICK


@cache
def evidence(seed: int, delta: float, tick: int = 59, **changes: Any) -> Evidence:
    return evidence_of(Simulation(seed, delta=delta, **changes).cells_at(tick))


def at_the_end(seed: int, delta: float, rules: Release | None = None) -> Verdict:
    return judge(rules or release(), evidence(seed, delta), windows(), now=END)


def test_nothing_seen_holds_at_any_time() -> None:
    for now in (START, END, END + timedelta(days=365)):
        verdict = judge(
            release(on_inconclusive="promote"), Evidence.from_rows(), windows(), now=now
        )
        assert (verdict.kind, verdict.reason) == (Kind.HOLD, "hold.no_traffic")


def test_traffic_without_labels_holds_at_any_time() -> None:
    rows = [
        {"key_hash": f"{k:032x}", "stage": 3, "arm": arm, "requests": 3, "errors": 0}
        | {"n": 0, "s": 0.0, "s2": 0.0, "aged": 3, "aged_labelled": 0}
        for k, arm in enumerate(["stable", "canary"] * 400)
    ]

    verdict = judge(release(), Evidence.from_rows(rows), windows(), now=END + timedelta(days=365))

    assert (verdict.kind, verdict.reason) == (Kind.HOLD, "hold.no_labels")


def test_four_points_worse_is_rolled_back() -> None:
    verdict = at_the_end(1, 0.04)

    assert (verdict.kind, verdict.reason) == (Kind.ROLLBACK, "primary.worse")
    assert verdict.numbers["lower"] > 0
    assert verdict.latch.worse_at == END


def test_better_is_promoted_under_either_objective() -> None:
    for objective in ("non_inferior", "superior"):
        verdict = at_the_end(1, -0.04, release(objective=objective))
        assert (verdict.kind, verdict.reason) == (Kind.PROMOTE, f"primary.{objective}")


def test_equal_is_promoted_within_a_wide_margin_and_never_as_superior() -> None:
    for seed in range(3):
        assert at_the_end(seed, 0.0, release(margin=0.06)).kind == Kind.PROMOTE
        assert at_the_end(seed, 0.0, release(objective="superior")).kind == Kind.INCONCLUSIVE


def test_undecided_at_the_end_is_inconclusive_and_before_it_holds() -> None:
    rules = release(margin=0.001)
    before = judge(rules, evidence(1, 0.0), windows(), now=END - TICK)
    after = at_the_end(1, 0.0, rules)

    assert (before.kind, before.reason) == (Kind.HOLD, "hold.min_duration")
    assert (after.kind, after.reason) == (Kind.INCONCLUSIVE, "inconclusive.max_duration")


def test_promotion_waits_for_the_last_stage_and_its_duration() -> None:
    good = evidence(1, -0.04)
    rules = release(max_duration="1d")

    early = judge(rules, good, windows()[:3], now=START + 60 * TICK)
    short = judge(rules, good, windows(), now=START + 59 * TICK)

    assert early.kind == Kind.ADVANCE
    assert (short.kind, short.reason) == (Kind.HOLD, "hold.min_duration")


def test_few_keys_decide_nothing() -> None:
    few = evidence(1, 0.2, keys=500)
    rules = release(max_duration="1d")

    verdict = judge(rules, few, windows(), now=END)

    assert (verdict.kind, verdict.reason) == (Kind.HOLD, "hold.keys")
    assert verdict.latch == Latch()


def test_a_crossing_is_kept_when_the_interval_widens_again() -> None:
    rules = release()
    first = judge(rules, evidence(1, -0.04), windows()[:3], now=END - 20 * TICK)
    assert first.latch.good_enough_at == END - 20 * TICK
    later = judge(rules, evidence(1, 0.0), windows(), now=END, latch=first.latch)

    assert later.kind == Kind.PROMOTE
    assert later.latch.good_enough_at == END - 20 * TICK
    assert Latch.from_dict(first.latch.as_dict()) == first.latch


# The ramp


def ramp(tick: int, stage: int, rules: Release, delta: float = 0.0) -> Verdict:
    return judge(
        rules, evidence(1, delta, tick), windows()[: stage + 1], now=START + (tick + 1) * TICK
    )


def test_the_ramp_advances_on_weaker_evidence_than_promotion() -> None:
    rules = release(advance_margin=0.2, max_duration="1d")

    assert ramp(10, 0, rules).reason == "hold.min_duration"
    assert ramp(14, 0, rules).kind == Kind.ADVANCE
    assert ramp(29, 1, rules).kind == Kind.ADVANCE
    assert ramp(29, 1, release(margin=0.001, max_duration="1d")).reason == "hold.advance_margin"
    assert ramp(14, 0, release(min_keys_stage=100, max_duration="1d")).reason == "hold.stage_keys"


def test_the_default_advance_margin_is_five_times_the_margin() -> None:
    assert ramp(29, 1, release()).numbers["advance_bound"] == pytest.approx(0.1)
    assert ramp(29, 1, release(advance_margin=0.0)).numbers["advance_bound"] == 0


# Guardrails and health


def with_errors(stable: float, canary: float) -> Evidence:
    return evidence_of(Simulation(1).cells_at(59), error_share=(stable, canary))


@pytest.mark.parametrize(
    ("stable", "canary", "reason"),
    [
        (0.0, 0.2, "guardrail.tripwire"),
        (0.001, 0.03, "guardrail.error_rate"),
        (0.1, 0.1, None),
        (0.01, 0.0, None),
        (0.0, 0.0, None),
    ],
)
def test_served_errors_roll_back_at_any_time(
    stable: float, canary: float, reason: str | None
) -> None:
    for now in (START, END):
        verdict = judge(release(), with_errors(stable, canary), windows(), now=now)
        if reason is None:
            assert not verdict.reason.startswith("guardrail")
        else:
            assert (verdict.kind, verdict.reason) == (Kind.ROLLBACK, reason)


def test_errors_of_one_client_are_not_the_candidates() -> None:
    rows = [
        {"key_hash": "a" * 32, "stage": 0, "arm": "canary", "requests": 500, "errors": 500}
        | {"n": 0, "s": 0.0, "s2": 0.0, "aged": 0, "aged_labelled": 0}
    ]
    ticks = [
        {"stage": 0, "tick": t, "arm": arm, "requests": requests, "errors": errors}
        | {"error_keys": int(errors > 0), "answered": 0, "mismatched": 0}
        for t in range(20)
        for arm, requests, errors in (("stable", 900, 0), ("canary", 25, 25))
    ]

    verdict = judge(release(), Evidence.from_rows(rows, ticks), windows()[:1], now=END)

    assert verdict.kind == Kind.HOLD


def test_a_broken_experiment_is_invalid_not_bad() -> None:
    lost = evidence_of(Simulation(1, lost_canary_keys=0.3).cells_at(59))
    assert judge(release(), lost, windows(), now=END).reason == "health.srm"

    sound = evidence(1, 0.0)
    ticks = sound.ticks.to_pylist()
    ticks[-1] |= {"mismatched": 500}
    mixed = Evidence(sound.cells, Evidence.from_rows(ticks=ticks).ticks)
    verdict = judge(release(), mixed, windows(), now=END)
    assert (verdict.kind, verdict.reason) == (Kind.INVALID, "health.version_mix")

    cells = sound.cells.to_pylist()
    moved = [row | {"arm": "stable"} for row in cells if row["arm"] == "canary"][:200]
    crossed = Evidence(Evidence.from_rows(cells + moved).cells, sound.ticks)
    assert judge(release(), crossed, windows(), now=END).reason == "health.crossed_keys"

    late = [
        row | {"aged": 10, "aged_labelled": 9 if row["arm"] == "stable" else 5 + i % 2}
        for i, row in enumerate(cells)
    ]
    unequal = Evidence(Evidence.from_rows(late).cells, sound.ticks)
    assert judge(release(), unequal, windows(), now=END).reason == "health.label_mismatch"


@settings(max_examples=40, deadline=None)
@given(
    delta=st.sampled_from([-0.04, 0.0, 0.04]),
    tick=st.sampled_from([4, 14, 29, 44, 59]),
    stage=st.integers(0, 3),
    minutes=st.integers(0, 5000),
)
def test_promotion_and_rollback_are_always_covered_by_their_bounds(
    delta: float, tick: int, stage: int, minutes: int
) -> None:
    rules = release()
    stages = windows()[: stage + 1]

    verdict = judge(rules, evidence(1, delta, tick), stages, now=START + minutes * TICK)

    if verdict.kind == Kind.PROMOTE:
        assert verdict.numbers["upper"] < verdict.numbers["required_bound"]
        assert min(verdict.numbers["keys_stable"], verdict.numbers["keys_canary"]) >= 300
        assert stage == 3
    if verdict.kind == Kind.ROLLBACK:
        assert verdict.numbers["lower"] > 0
    if verdict.kind == Kind.ADVANCE:
        assert stage < 3
        assert verdict.kind not in FINAL
    assert verdict.headline
    assert isinstance(stages[-1], StageWindow)
