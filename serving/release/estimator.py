"""The difference between candidate and champion, stratified by stage, clustered by routing key.

theta = sum_g w_g (R_Tg - R_Cg): R is the mean loss of an arm in stage g, w_g is proportional to
N_Tg N_Cg / (N_Tg + N_Cg). Stratifying keeps drift over time out of it while the canary's share
grows; clustering counts a key, not a request, as the unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serving.release.evidence import Cells


@dataclass(frozen=True)
class StageEstimate:
    """One stage's difference; `variance` is 0 when a single key carries it."""

    stage: int
    theta: float
    variance: float
    n_stable: float
    n_canary: float


@dataclass(frozen=True)
class Estimate:
    """Candidate minus champion, in the unit of the loss: below 0 is better.

    Attributes:
        variance: cluster-robust variance of theta.
        keys_stable, keys_canary: distinct labelled keys (one that moved counts in both).
        mean_stable, mean_canary: mean loss with the stages weighted as in theta.
    """

    theta: float
    variance: float
    keys_stable: int
    keys_canary: int
    n_stable: int
    n_canary: int
    mean_stable: float
    mean_canary: float
    stages: tuple[StageEstimate, ...]


def estimate(cells: Cells) -> Estimate | None:
    """The difference of the mean loss; None while it has no variance to go by."""
    return _difference(cells, cells.n, cells.s)


def label_rate_difference(cells: Cells) -> Estimate | None:
    """The same for the share of rows, older than the horizon, whose label arrived."""
    return _difference(cells, cells.aged, cells.aged_labelled)


def labelled_keys(cells: Cells, *, is_canary: bool, stage: int | None = None) -> int:
    """Distinct keys with a labelled row in one arm, in one stage or in all."""
    chosen = (cells.is_canary == is_canary) & (cells.n > 0)
    if stage is not None:
        chosen &= cells.stage == stage
    return len(np.unique(cells.key[chosen]))


def _difference(cells: Cells, n: np.ndarray, s: np.ndarray) -> Estimate | None:
    used = n > 0
    key, n, s = cells.key[used], n[used], s[used]
    arm = cells.is_canary[used].astype(int)
    stages, stage = np.unique(cells.stage[used], return_inverse=True)
    if not len(stages):
        return None
    total_n = np.zeros((len(stages), 2))  # [stages, (stable, canary)]
    total_s = np.zeros((len(stages), 2))
    np.add.at(total_n, (stage, arm), n)
    np.add.at(total_s, (stage, arm), s)
    weight = total_n.prod(axis=1) / total_n.sum(axis=1)
    if not weight.any():
        return None
    weight /= weight.sum()
    mean = np.divide(total_s, total_n, out=np.zeros_like(total_s), where=total_n > 0)
    theta = mean[:, 1] - mean[:, 0]
    # What each cell pulls its own stage's difference by; 0 in stages with one arm only.
    sign = np.where(arm == 1, 1.0, -1.0)
    pull = np.where(weight[stage] > 0, sign * (s - mean[stage, arm] * n) / total_n[stage, arm], 0.0)
    in_both = weight[stage] > 0
    variance = _variance(key[in_both], (weight[stage] * pull)[in_both])
    if variance <= 0:
        return None
    return Estimate(
        theta=float(weight @ theta),
        variance=variance,
        keys_stable=len(np.unique(key[arm == 0])),
        keys_canary=len(np.unique(key[arm == 1])),
        n_stable=int(total_n[:, 0].sum()),
        n_canary=int(total_n[:, 1].sum()),
        mean_stable=float(weight @ mean[:, 0]),
        mean_canary=float(weight @ mean[:, 1]),
        stages=tuple(
            StageEstimate(
                int(stages[g]),
                float(theta[g]),
                _variance(key[stage == g], pull[stage == g]),
                float(total_n[g, 0]),
                float(total_n[g, 1]),
            )
            for g in np.flatnonzero(weight)
        ),
    )


def _variance(key: np.ndarray, pull: np.ndarray) -> float:
    """K/(K-1) times the sum over keys of their squared total pull."""
    keys, code = np.unique(key, return_inverse=True)
    if len(keys) < 2:
        return 0.0
    psi = np.bincount(code, weights=pull)
    return float(len(keys) / (len(keys) - 1) * (psi @ psi))
