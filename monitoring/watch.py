"""One look at one model: thresholds, policy, and the episode that a yes opens.

Every look that had something to say is recorded in the ledger, with its reasons for yes and for no;
a look that found nothing to complain of is not.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from monitoring.policy import Decision, decide
from monitoring.prometheus import Prometheus
from monitoring.quality import new_matured_labels
from monitoring.thresholds import Status, evaluate
from perennial.errors import Conflict
from perennial.ledger import Ledger, utc_now
from perennial.settings import Settings
from perennial.spec import ModelSpec
from perennial.store import Store

log = logging.getLogger(__name__)

KIND = "threshold"


@dataclass(frozen=True)
class Look:
    """What a look came to.

    Attributes:
        episode_id: the episode it opened, or None.
        reasons: for the yes, or for the no.
        summary: one line.
    """

    episode_id: str | None
    reasons: tuple[str, ...]
    summary: str


def watch(
    settings: Settings,
    spec: ModelSpec,
    ledger: Ledger,
    *,
    actor: str,
    now: datetime | None = None,
) -> Look:
    """Evaluates the thresholds, asks the policy, and opens an episode on a yes.

    Idempotent within one watch interval: the same window is recorded once.

    Raises:
        Retryable: `prometheus.unreachable`, `ledger.unreachable`.
    """
    now = now or utc_now()
    champion = ledger.champion(spec.name)
    if champion is None:
        return Look(None, ("nothing serves yet",), f"{spec.name}: nothing serves yet")
    states = evaluate(spec, Prometheus.of(settings))
    decision = decide(
        spec.retrain,
        states=states,
        episodes=ledger.episodes(spec.name),
        new_labels=new_matured_labels(spec, Store(settings.store), champion.since, now=now),
        now=now,
    )
    window = str(int(now.timestamp()) // settings.watch_interval_s * settings.watch_interval_s)
    record = {
        "reasons": list(decision.yes),
        "suppressed": list(decision.no),
        "thresholds": [_plain(asdict(state)) for state in states],
    }
    if decision.retrain:
        return _open(spec, ledger, actor, window, record, decision, now)
    if any(state.status is Status.BREACHED for state in states):
        ledger.record_suppressed(spec.name, KIND, window, record)
    reasons = decision.no or ("no threshold that retrains is breached",)
    return Look(None, reasons, f"{spec.name}: {'; '.join(reasons)}")


def _open(
    spec: ModelSpec,
    ledger: Ledger,
    actor: str,
    window: str,
    record: dict[str, Any],
    decision: Decision,
    now: datetime,
) -> Look:
    try:
        episode = ledger.open_episode(
            spec,
            actor=actor,
            trigger={"kind": KIND, **record},
            trigger_key=(KIND, window),
            now=now,
        )
    except Conflict as error:
        ledger.record_suppressed(spec.name, KIND, window, {**record, "suppressed": [str(error)]})
        return Look(None, (error.message,), f"{spec.name}: {error.message}")
    return Look(episode.id, decision.yes, f"{spec.name}: opened {episode.id}")


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    return {key: str(v) if isinstance(v, Status) else v for key, v in value.items()}
