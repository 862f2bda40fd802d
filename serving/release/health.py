"""Whether the experiment itself is sound. A failed check is no verdict on the model: it is INVALID.

Sample-ratio mismatch is judged on keys, not requests: keys are the unit that was assigned, and
requests of sticky keys would alarm on 96 % of sound experiments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import betaln

from serving.release.estimator import label_rate_difference
from serving.release.evidence import Cells, Ticks
from serving.release.sequence import interval, mixture_rho

SRM_E_VALUE = 1000.0
# How strongly the alternative is centred on the declared share, in keys.
SRM_CONCENTRATION = 200.0
MAX_MISMATCHED_SHARE = 0.001
MAX_CROSSED_SHARE = 0.01
LABEL_RATE_ALPHA = 0.001
LABEL_RATE_MDE = 0.05
# A share of a handful is no share.
MIN_COUNT = 5


@dataclass(frozen=True)
class Health:
    """The checks' numbers; `problem` is the reason code of the first that failed, or ""."""

    problem: str
    log_srm_e_value: float
    keys_canary: int
    keys_expected: float
    mismatched: int
    answered: int
    crossed_keys: int
    label_rate_difference: float | None


def check(cells: Cells, ticks: Ticks, shares: Mapping[int, float]) -> Health:
    """Runs all checks.

    Args:
        shares: the canary's share of keys by stage index.
    """
    log_e, observed, expected = sample_ratio(cells, shares)
    answered, mismatched = ticks.answered.sum(axis=0), ticks.mismatched.sum(axis=0)
    crossed, canary_keys = _crossed(cells)
    rate = label_rate_difference(cells)
    problem = ""
    if log_e >= np.log(SRM_E_VALUE):
        problem = "srm"
    elif ((mismatched >= MIN_COUNT) & (mismatched > MAX_MISMATCHED_SHARE * answered)).any():
        problem = "version_mix"
    elif crossed >= MIN_COUNT and crossed > MAX_CROSSED_SHARE * canary_keys:
        problem = "crossed_keys"
    elif rate is not None and min(rate.keys_stable, rate.keys_canary) >= 300:
        rho = mixture_rho(mde=LABEL_RATE_MDE, alpha=LABEL_RATE_ALPHA)
        bounds = interval(rate.theta, rate.variance, rho=rho, alpha=LABEL_RATE_ALPHA)
        if bounds.lower > 0 or bounds.upper < 0:
            problem = "label_mismatch"
    return Health(
        problem=problem,
        log_srm_e_value=log_e,
        keys_canary=observed,
        keys_expected=expected,
        mismatched=int(mismatched.sum()),
        answered=int(answered.sum()),
        crossed_keys=crossed,
        label_rate_difference=None if rate is None else rate.theta,
    )


def sample_ratio(cells: Cells, shares: Mapping[int, float]) -> tuple[float, int, float]:
    """Log e-value against the declared shares; keys that joined the canary, seen and expected.

    Shares are nested: a key joins the canary once and stays. So each stage asks, of the keys that
    were never on the canary before: given the share h at which a key was last seen on the champion
    (0 if it is new), it joins at share g with probability (g - h) / (1 - h). Keys are independent
    and each question is asked once, so that the product of the stages' beta-binomial e-values
    (Lindon & Malek 2022) is one, at any time.
    """
    last_share = np.zeros(cells.key.max(initial=-1) + 1)
    joined = np.zeros(len(last_share), dtype=bool)
    log_e, observed, expected = 0.0, 0, 0.0
    for stage in sorted(shares):
        here = (cells.stage == stage) & (cells.requests > 0)
        on_canary = np.unique(cells.key[here & cells.is_canary])
        on_stable = np.setdiff1d(cells.key[here & ~cells.is_canary], on_canary)
        asked = np.concatenate([on_canary, on_stable])
        answers = np.arange(len(asked)) < len(on_canary)
        new = ~joined[asked]
        asked, answers = asked[new], answers[new]
        for before in np.unique(last_share[asked]):
            group = answers[last_share[asked] == before]
            probability = (shares[stage] - before) / (1 - before)
            if not 0 < probability < 1:
                continue
            log_e += _log_beta_binomial_e(int(group.sum()), len(group), probability)
            observed += int(group.sum())
            expected += len(group) * probability
        joined[on_canary] = True
        last_share[on_stable] = shares[stage]
    return float(log_e), observed, float(expected)


def _log_beta_binomial_e(successes: int, trials: int, probability: float) -> float:
    a = SRM_CONCENTRATION * probability
    b = SRM_CONCENTRATION - a
    failures = trials - successes
    return float(
        betaln(a + successes, b + failures)
        - betaln(a, b)
        - successes * np.log(probability)
        - failures * np.log1p(-probability)
    )


def _crossed(cells: Cells) -> tuple[int, int]:
    """Keys seen in both arms within a stage, and all keys of the canary."""
    seen = cells.requests > 0
    pairs = np.stack([cells.key[seen], cells.stage[seen]], axis=1)
    canary = cells.is_canary[seen]
    both = {tuple(pair) for pair in pairs[canary]} & {tuple(pair) for pair in pairs[~canary]}
    return len({key for key, _ in both}), len(np.unique(cells.key[seen & cells.is_canary]))
