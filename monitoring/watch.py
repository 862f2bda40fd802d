"""One look at a model: thresholds, policy, and what is written into the ledger about it.

A yes opens an episode; a no to a breach is recorded with its reasons, once an hour for the same
reasons. A look at which nothing asked for a retrain leaves no record.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from monitoring.policy import Decision, PastEpisode, decide
from monitoring.prometheus import Prometheus
from monitoring.quality import matured_labels_since
from monitoring.rules import BREACHED
from monitoring.thresholds import ThresholdState, Verdict, evaluate
from perennial.errors import Conflict, Permanent
from perennial.ledger import Episode, Ledger, utc_now
from perennial.settings import Settings
from perennial.spec import ModelSpec
from perennial.store import Store, read_manifest

logger = logging.getLogger(__name__)

_TRIGGER: Final = "threshold"
_SUPPRESSED: Final = "threshold.suppressed"


@dataclass(frozen=True)
class Watched:
    """What one look came to.

    Attributes:
        episode_id: of the episode that it opened; None: none.
        reasons: why, or why not.
        summary: one line.
    """

    episode_id: str | None
    reasons: tuple[str, ...]
    summary: str
    states: tuple[ThresholdState, ...]


def watch(
    settings: Settings,
    spec: ModelSpec,
    ledger: Ledger,
    *,
    actor: str,
    now: datetime | None = None,
) -> Watched:
    """Evaluates thresholds and policy; opens an episode on a yes. Safe to call at any time.

    Two calls within one `watch_interval_s` that say yes open one episode.

    Raises:
        Retryable: `ledger.unreachable`. Without Prometheus nothing is breached, and that is said.
    """
    now = now or utc_now()
    prometheus = Prometheus.of(settings)
    states = evaluate(spec, prometheus)
    if not any(s.state is Verdict.BREACHED and s.threshold.action == "retrain" for s in states):
        said = "; ".join(f"{state.name} {state.state} ({state.reason})" for state in states)
        return Watched(None, (), f"nothing asks for a retrain: {said}", states)
    open_ = ledger.open_episode_of(spec.name)
    decision = decide(
        spec.retrain,
        [_past(episode, ledger, prometheus, now) for episode in ledger.episodes(spec.name)],
        states,
        now=now,
        new_matured_labels=_new_labels(settings, spec, ledger, now),
        open_episode=open_.id if open_ else None,
    )
    logger.info("%s: %s", spec.name, decision)
    if not decision.retrain:
        return _suppressed(spec, ledger, decision, states, now)
    return _opened(settings, spec, ledger, decision, states, now, actor)


def _opened(
    settings: Settings,
    spec: ModelSpec,
    ledger: Ledger,
    decision: Decision,
    states: tuple[ThresholdState, ...],
    now: datetime,
    actor: str,
) -> Watched:
    trigger = {
        "kind": _TRIGGER,
        "reasons": list(decision.because),
        "thresholds": list(decision.thresholds),
        "states": [_state(state) for state in states],
    }
    window = f"{int(now.timestamp()) // settings.watch_interval_s}"
    try:
        episode = ledger.open_episode(
            spec, actor=actor, trigger=trigger, trigger_key=(_TRIGGER, window), now=now
        )
    except Conflict as error:
        if error.code != "episode.in_flight":
            raise
        # Somebody opened one since we looked.
        return Watched(None, (error.message,), error.message, states)
    said = f"episode {episode.id}: {'; '.join(decision.because)}"
    return Watched(episode.id, decision.because, said, states)


def _suppressed(
    spec: ModelSpec,
    ledger: Ledger,
    decision: Decision,
    states: tuple[ThresholdState, ...],
    now: datetime,
) -> Watched:
    rules = "+".join(said.split(":")[0].replace(" ", "_") for said in decision.against)
    ledger.record_suppressed(
        spec.name,
        _SUPPRESSED,
        f"{now:%Y-%m-%dT%H} {rules}"[:80],
        {
            "because": list(decision.because),
            "against": list(decision.against),
            "states": [_state(state) for state in states],
        },
    )
    said = f"no retrain: {'; '.join(decision.against)} (asked for by {decision.because[0]})"
    return Watched(None, decision.against, said, states)


def _state(state: ThresholdState) -> dict[str, Any]:
    return {
        "threshold": state.name,
        "metric": state.threshold.metric,
        "state": str(state.state),
        "value": state.value,
        "bound": state.bound,
        "count": state.count,
    }


def _past(episode: Episode, ledger: Ledger, prometheus: Prometheus, now: datetime) -> PastEpisode:
    thresholds = frozenset(episode.trigger.get("thresholds", ()))
    ended = None if episode.is_open else episode.state_since
    if ended is None or not thresholds:
        return PastEpisode(episode.created, ended, thresholds)
    champion = ledger.champion(episode.model)
    if champion is not None and champion.since > episode.created:
        # The breach was another champion's.
        return PastEpisode(episode.created, ended, thresholds, thresholds)
    since_s = max(1, int((now - ended).total_seconds()))
    own = f'{BREACHED}{{model="{episode.model}"}}'
    quiet = prometheus.query(f"min_over_time({own}[{since_s}s]) == 0")
    cleared = thresholds & {sample.labels["threshold"] for sample in quiet}
    return PastEpisode(episode.created, ended, thresholds, cleared)


def _new_labels(settings: Settings, spec: ModelSpec, ledger: Ledger, now: datetime) -> int:
    """Matured, labelled rows since the newest row that the champion has learnt from."""
    store = Store(settings.store)
    champion = ledger.champion(spec.name)
    if champion is None:
        since = datetime(1970, 1, 1, tzinfo=UTC)
    else:
        try:
            collected = read_manifest(store.run(spec.name, champion.episode_id) / "collected")
            since = datetime.fromisoformat(collected.facts["last"])
        except (Permanent, KeyError, ValueError):
            # Its data is gone from the store: nothing older than its promotion counts as new.
            since = champion.since
    return matured_labels_since(spec, store, since=since, now=now)
