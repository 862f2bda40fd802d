"""Guardrails on served errors: they act at any time, on few events, and under any base rate.

The e-process asks of each error only whose it is. If both arms are equally good, an error in tick t
is the canary's with probability s_t, the canary's share of that tick's requests; whatever makes all
errors more frequent for a while cancels out. Errors count once per key and tick, so that one client
that repeats a bad request is not many errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from perennial.spec import Guardrail
from serving.release.evidence import Cells, Ticks

RATE_RATIOS = np.array([1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0])
TRIPWIRE_REQUESTS = 50
# The tripwire compares with the champion's error rate, but with no less than this.
TRIPWIRE_FLOOR = 0.01
# Fewer distinct keys with errors than this is a client's problem, not the candidate's.
MIN_ERROR_KEYS = 3


@dataclass(frozen=True)
class ErrorEvidence:
    """What the guardrail saw.

    Attributes:
        log_e_max: log of the largest evidence so far that the canary fails more often.
        rate_stable, rate_canary: errors per request over the whole release.
        recent_stable, recent_canary: the same over the newest ticks that hold 50 canary requests;
            None when there are not so many.
        error_keys: distinct keys with an error on the canary.
    """

    log_e_max: float
    requests_stable: int
    requests_canary: int
    errors_stable: int
    errors_canary: int
    rate_stable: float
    rate_canary: float
    recent_stable: float | None
    recent_canary: float | None
    error_keys: int

    def is_breached(self, guardrail: Guardrail) -> bool:
        """Whether the e-process has crossed 1/alpha at any time."""
        return self.log_e_max >= -np.log(guardrail.alpha) and self.error_keys >= MIN_ERROR_KEYS

    def is_tripped(self, guardrail: Guardrail) -> bool:
        """Whether the canary fails grossly right now."""
        if self.recent_canary is None or self.error_keys < MIN_ERROR_KEYS:
            return False
        reference = max(self.recent_stable or 0.0, TRIPWIRE_FLOOR)
        return self.recent_canary > guardrail.max_ratio * reference


def error_evidence(ticks: Ticks, cells: Cells) -> ErrorEvidence:
    """The evidence of all ticks so far."""
    requests, errors = ticks.requests.sum(axis=0), ticks.errors.sum(axis=0)
    rate = np.divide(errors, requests, out=np.zeros(2), where=requests > 0)
    recent = _recent_rates(ticks)
    path = log_e_path(ticks.requests, ticks.error_keys)
    failing = cells.is_canary & (cells.errors > 0)
    return ErrorEvidence(
        log_e_max=float(max(0.0, path.max(initial=0.0))),
        requests_stable=int(requests[0]),
        requests_canary=int(requests[1]),
        errors_stable=int(errors[0]),
        errors_canary=int(errors[1]),
        rate_stable=float(rate[0]),
        rate_canary=float(rate[1]),
        recent_stable=None if recent is None else recent[0],
        recent_canary=None if recent is None else recent[1],
        error_keys=len(np.unique(cells.key[failing])),
    )


def log_e_path(requests: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Log evidence after each tick: the mean over RATE_RATIOS of the likelihood ratio.

    Args:
        requests, errors: [ticks, 2], stable and canary.
    """
    total = requests.sum(axis=1)
    share = np.divide(requests[:, 1], total, out=np.zeros(len(total)), where=total > 0)
    # [ticks, ratios]
    per_tick = errors[:, 1, None] * np.log(RATE_RATIOS) - errors.sum(axis=1)[:, None] * np.log1p(
        (RATE_RATIOS - 1) * share[:, None]
    )
    return logsumexp(per_tick.cumsum(axis=0), axis=1) - np.log(len(RATE_RATIOS))


def _recent_rates(ticks: Ticks) -> tuple[float, float] | None:
    """Error rates over the shortest run of newest ticks with enough canary requests."""
    newest_first = ticks.requests[::-1].cumsum(axis=0)
    enough = np.flatnonzero(newest_first[:, 1] >= TRIPWIRE_REQUESTS)
    if not len(enough):
        return None
    requests = newest_first[enough[0]]
    errors = ticks.errors[::-1].cumsum(axis=0)[enough[0]]
    stable = errors[0] / requests[0] if requests[0] else 0.0
    return float(stable), float(errors[1] / requests[1])
