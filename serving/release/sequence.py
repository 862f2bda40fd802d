"""Always-valid bounds by the normal mixture (also known as GAVI, asymptotic CS, mSPRT).

With information I = 1/variance, the interval
    theta ± sqrt((I + rho) ln((I + rho) / (rho alpha²))) / I
covers the truth at all looks together with probability 1 - alpha. Howard, Ramdas, McAuliffe, Sekhon
(2021), eq. 14; Waudby-Smith et al. (2024) for the asymptotic version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """The current interval of the sequence.

    Attributes:
        log_e_value: log of the evidence against "no difference"; it crosses log(1/alpha) exactly
            when the interval excludes 0.
    """

    lower: float
    upper: float
    log_e_value: float


def mixture_rho(*, mde: float, alpha: float) -> float:
    """The rho that makes the sequence tightest where `mde` is three standard errors."""
    information = (3 / mde) ** 2
    log = math.log(1 / alpha)
    return information / (2 * log + math.log(1 + 2 * log))


def interval(theta: float, variance: float, *, rho: float, alpha: float) -> Interval:
    """The two-sided interval; each side errs with probability alpha / 2."""
    information = 1 / variance
    width = (
        math.sqrt((information + rho) * math.log((information + rho) / (rho * alpha * alpha)))
        / information
    )
    return Interval(theta - width, theta + width, log_e_value(theta, variance, rho=rho))


def log_e_value(theta: float, variance: float, *, rho: float, null: float = 0.0) -> float:
    """Log of the mixture's evidence against theta = null."""
    information = 1 / variance
    score = information * (theta - null)
    return 0.5 * math.log(rho / (information + rho)) + score * score / (2 * (information + rho))


def fixed_horizon(theta: float, variance: float) -> tuple[float, float]:
    """The usual 95% interval, for comparison only: valid for one look that was planned."""
    half = 1.959963984540054 * math.sqrt(variance)
    return theta - half, theta + half
