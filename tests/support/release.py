"""Simulated canary experiments: sticky keys, drift, uneven activity, delayed labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import numpy as np

from perennial.spec import Release
from serving.release.evidence import CANARY, STABLE, Cells, Evidence, StageWindow

START = datetime(2026, 1, 5, tzinfo=UTC)
TICK = timedelta(minutes=1)


def release(**changes: object) -> Release:
    """A release of a binary model judged by its error rate, ramp 1/5/25/50 % of 15 ticks each."""
    values = {
        "ramp": [{"share": share, "min_duration": "15m"} for share in (0.01, 0.05, 0.25, 0.5)],
        "primary_metric": "absolute_error",
        "clip": 1.0,
        "margin": 0.02,
        "mde": 0.02,
        "min_keys_stage": 20,
        "max_duration": "1h",
    }
    return Release.model_validate({**values, **changes})


def windows(
    shares: Sequence[float] = (0.01, 0.05, 0.25, 0.5), ticks: int = 15
) -> list[StageWindow]:
    """Stages of equal length; the last one is still running."""
    starts = [START + i * ticks * TICK for i in range(len(shares) + 1)]
    return [
        StageWindow(i, share, start, None if i == len(shares) - 1 else end)
        for i, (share, (start, end)) in enumerate(zip(shares, pairwise(starts), strict=True))
    ]


@dataclass
class Simulation:
    """Labelled requests of 60 ticks by key: the benchmark's scenario A2 with an effect `delta`.

    Beta-distributed error rates with intra-key correlation 0.05, gamma(0.5) activity, a daily and
    a linear drift; labels arrive a geometric number of ticks later.
    """

    seed: int
    delta: float = 0.0
    keys: int = 4000
    ticks: int = 60
    shares: tuple[float, ...] = (0.01, 0.05, 0.25, 0.5)
    lost_canary_keys: float = 0.0

    def __post_init__(self) -> None:
        rng = np.random.default_rng([20261130, self.seed])
        bucket = rng.random(self.keys)
        activity = rng.gamma(0.5, 2.0, self.keys)
        base = rng.beta(0.2 * 19, 0.8 * 19, self.keys)
        tick = np.arange(self.ticks)
        drift = 0.05 * np.sin(2 * np.pi * tick / 24) + 0.06 * (tick / (self.ticks - 1) - 0.5)
        stage = tick * len(self.shares) // self.ticks
        canary = bucket[:, None] < np.array(self.shares)[stage]
        requests = rng.poisson(activity[:, None], canary.shape)
        lost = canary & (rng.random(self.keys) < self.lost_canary_keys)[:, None]
        requests[lost] = 0
        key, when = np.repeat(np.argwhere(requests), requests[requests > 0], axis=0).T
        wrong = base[key] + drift[when] + self.delta * canary[key, when]
        self.key, self.when, self.stage_of = key, when, stage
        self.is_canary = canary[key, when]
        self.loss = (rng.random(len(key)) < np.clip(wrong, 0, 1)).astype(float)
        self.arrives = when + rng.geometric(0.2, len(key)) - 1

    def cells_at(self, tick: int) -> Cells:
        """What is known at the end of a tick."""
        seen = self.when <= tick
        labelled = (self.arrives <= tick)[seen]
        key, loss = self.key[seen], self.loss[seen]
        stage, canary = self.stage_of[self.when[seen]], self.is_canary[seen]
        group = (stage * 2 + canary) * self.keys + key
        unique, code = np.unique(group, return_inverse=True)
        n = np.bincount(code, weights=labelled, minlength=len(unique))
        return Cells(
            key=unique % self.keys,
            stage=unique // self.keys // 2,
            is_canary=(unique // self.keys % 2).astype(bool),
            requests=np.bincount(code, minlength=len(unique)),
            errors=np.zeros(len(unique), int),
            n=n,
            s=np.bincount(code, weights=loss * labelled, minlength=len(unique)),
            aged=np.zeros(len(unique)),
            aged_labelled=np.zeros(len(unique)),
        )

    def looks(self, *, first: int = 4, every: int = 5) -> Iterator[tuple[int, Cells]]:
        for tick in range(first, self.ticks, every):
            yield tick, self.cells_at(tick)


def evidence_of(cells: Cells, *, error_share: tuple[float, float] = (0.0, 0.0)) -> Evidence:
    """The cells as the tables that `judge` takes, with one tick per stage and arm.

    Args:
        error_share: of the stable's and of the canary's requests.
    """
    ticks = []
    rows = []
    for index in range(len(cells.key)):
        rows.append(
            {
                "key_hash": f"{cells.key[index]:032x}",
                "stage": int(cells.stage[index]),
                "arm": CANARY if cells.is_canary[index] else STABLE,
                "requests": int(cells.requests[index]),
                "errors": int(error_share[int(cells.is_canary[index])] > 0),
                "n": int(cells.n[index]),
                "s": float(cells.s[index]),
                "s2": float(cells.s[index]),
                "aged": 0,
                "aged_labelled": 0,
            }
        )
    for stage in np.unique(cells.stage):
        for is_canary, arm in ((False, STABLE), (True, CANARY)):
            chosen = (cells.stage == stage) & (cells.is_canary == is_canary)
            requests = int(cells.requests[chosen].sum())
            errors = round(requests * error_share[int(is_canary)])
            ticks.append(
                {
                    "stage": int(stage),
                    "tick": int(stage) * 15,
                    "arm": arm,
                    "requests": requests,
                    "errors": errors,
                    "error_keys": errors,
                    "answered": requests - errors,
                    "mismatched": 0,
                }
            )
    return Evidence.from_rows(rows, ticks)
