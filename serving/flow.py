"""The release's steps: from a published version to the last word on it.

A step never "sets" anything in serving: it reconciles (`serving.reconcile`), and says what the
evidence allows. Looks at the evidence are kept in `runs/<episode>/looks.jsonl`; the verdict's
evidence is frozen as the artifact `releases/<episode>` before the ledger is told, so that a crash
in between finds the same verdict again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perennial.episode import HOLD, Outcome, Step, end
from perennial.errors import Conflict, NeedsHuman, Permanent
from perennial.ledger import ChampionMove, Episode, Ledger, utc_now
from perennial.settings import Settings
from perennial.spec import ModelSpec
from perennial.states import EXPOSED, State
from perennial.store import Store, is_published, publishing
from serving.reconcile import Serving
from serving.release import probation
from serving.release.cells import collect_cells
from serving.release.evidence import Evidence, StageWindow
from serving.release.report import look_of, read_verdict, write_report
from serving.release.verdict import Kind, Latch, Verdict, judge

log = logging.getLogger(__name__)

_REVERTIBLE = frozenset({State.PROMOTED, State.PROBATION})


class ReleaseFlow:
    """The steps of one model's release, from `shadowing` to the end."""

    def __init__(self, settings: Settings, spec: ModelSpec, ledger: Ledger) -> None:
        self.settings = settings
        self.spec = spec
        self.ledger = ledger
        self.serving = Serving(settings, ledger, spec)
        self.store = Store(settings.store)

    def steps(self) -> dict[State, Step]:
        """The serving room's step of each state it does the work of."""
        return {
            State.SHADOWING: self.load_canary,
            State.RAMPING: self.ramp,
            State.AWAITING_APPROVAL: self.await_approval,
            State.PROMOTING: self.promote,
            State.PROBATION: self.watch_probation,
        }

    def guard(self, episode: Episode) -> Outcome:
        """Harm ends a release in every exposed state, also while a person is asked.

        The ramp's own step judges the guardrails with everything else.
        """
        if episode.state in (State.AWAITING_APPROVAL, State.PROMOTING) and "stages" in episode.data:
            verdict, _ = self._look(episode)
            if verdict.kind is Kind.ROLLBACK:
                return self._rolled_back(verdict)
        if episode.state is State.PROBATION:
            return self._guard_probation(episode)
        return HOLD

    def load_canary(self, episode: Episode) -> Outcome:
        """The canary pool loads the candidate; the router sends it copies, no call of a user."""
        if moved := self._superseded(episode):
            return moved
        self.serving.reconcile(episode.model)
        if utc_now() - episode.state_since < self.spec.release.shadow_duration:
            return HOLD
        first = self.spec.release.ramp[0]
        return Outcome(
            State.RAMPING,
            {"loaded": episode.version, "pool": "canary", "next_share": first.share},
            {"stages": [_stage(0, first.share)]},
        )

    def ramp(self, episode: Episode) -> Outcome:
        """Starts the stage the episode is in, or judges it."""
        if moved := self._superseded(episode):
            return moved
        self.serving.reconcile(episode.model)
        *before, current = episode.data["stages"]
        if current["start"] is None:
            started = {**current, "start": utc_now().isoformat()}
            return Outcome(
                State.RAMPING,
                {"stage": current["index"], "share": current["share"]},
                {"stages": [*before, started]},
            )
        verdict, evidence = self._look(episode)
        match verdict.kind:
            case Kind.HOLD:
                return HOLD
            case Kind.ADVANCE:
                following = current["index"] + 1
                share = self.spec.release.ramp[following].share
                ended = {**current, "end": utc_now().isoformat()}
                return Outcome(
                    State.RAMPING,
                    _evidence(verdict),
                    {"stages": [*before, ended, _stage(following, share)]},
                )
        return self._conclude(self._freeze(episode, verdict, evidence))

    def await_approval(self, episode: Episode) -> Outcome:
        """Keeps the stage as it is until a person answers."""
        if moved := self._superseded(episode):
            return moved
        self.serving.reconcile(episode.model)
        return HOLD

    def promote(self, episode: Episode) -> Outcome:
        """The stable pool loads the candidate beside the champion; then the record moves over."""
        if moved := self._superseded(episode):
            return moved
        if episode.version is None:
            raise Permanent("flow.no_version", f"episode {episode.id} has no version")
        if reason := self.ledger.fences(episode.model).get(episode.version):
            return Outcome(
                State.ROLLED_BACK, {"reason": f"version {episode.version} is fenced: {reason}"}
            )
        want = self.serving.reconcile(episode.model)
        return Outcome(
            State.PROBATION,
            {"loaded": list(want.stable), "pool": "stable", "champion": episode.version},
            champion=ChampionMove(
                int(episode.data["champion_revision"]),
                episode.version,
                episode.id,
                episode.data.get("baseline", {}),
            ),
        )

    def watch_probation(self, episode: Episode) -> Outcome:
        """The candidate serves everybody; the way back stays loaded until this ends."""
        self.serving.reconcile(episode.model)
        lasted = utc_now() - episode.state_since
        if lasted < self.spec.release.probation:
            return HOLD
        requests, errors = self._errors_in_probation(episode)
        return Outcome(
            State.PROMOTED,
            {"probation_s": lasted.total_seconds(), "requests": requests, "errors": errors},
        )

    def cleanup(self, episode: Episode) -> None:
        """Takes an ended candidate out of serving: its traffic first, then the rest."""
        if episode.version is None:
            return
        if self.ledger.open_episode_of(episode.model) is None and self.serving.share(episode.model):
            self.serving.cut_canary(episode.model)
        self.serving.reconcile(episode.model)

    def _superseded(self, episode: Episode) -> Outcome | None:
        """The end of an episode whose champion moved since the candidate was evaluated."""
        champion = self.ledger.champion(episode.model)
        revision = champion.revision if champion else 0
        expected = int(episode.data.get("champion_revision", 0))
        if revision == expected:
            return None
        return Outcome(
            State.SUPERSEDED,
            {
                "reason": "the champion moved after the candidate was evaluated against it",
                "champion_revision": revision,
                "evaluated_against_revision": expected,
            },
        )

    # Evidence

    def _look(self, episode: Episode) -> tuple[Verdict, Evidence]:
        """Judges the evidence as it is now, and notes the look."""
        now = utc_now()
        stages = self._stages(episode)
        evidence = collect_cells(
            self.store.predictions(episode.model),
            self.store.labels(episode.model),
            self.spec,
            stages,
            now=now,
            versions={
                "stable": int(episode.champion_at_start or 0),
                "canary": int(episode.version or 0),
            },
            tick_s=max(1.0, self.settings.poll_s),
        )
        verdict = judge(self.spec.release, evidence, stages, now=now, latch=self._latch(episode))
        self._note(episode, verdict)
        return verdict, evidence

    def _stages(self, episode: Episode) -> list[StageWindow]:
        return [StageWindow.from_dict(s) for s in episode.data["stages"] if s["start"] is not None]

    def _looks(self, episode: Episode) -> Path:
        return self.store.run(episode.model, episode.id) / "looks.jsonl"

    def _note(self, episode: Episode, verdict: Verdict) -> None:
        look = {
            "at": verdict.at.isoformat(),
            "kind": verdict.kind.value,
            "reason": verdict.reason,
            "stage": verdict.numbers["stage"],
            "latch": verdict.latch.as_dict(),
            "chart": look_of(verdict),
        }
        path = self._looks(episode)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(look) + "\n")

    def _latch(self, episode: Episode) -> Latch:
        looks = read_looks(self._looks(episode))
        return Latch.from_dict(looks[-1]["latch"]) if looks else Latch()

    def _freeze(self, episode: Episode, verdict: Verdict, evidence: Evidence) -> Verdict:
        """Publishes the report; returns the verdict that is published, which may be older."""
        target = self.store.release(episode.model, episode.id)
        if not is_published(target):
            try:
                with publishing(target, kind="release", model=episode.model, id=episode.id) as (
                    folder,
                    facts,
                ):
                    write_report(
                        folder,
                        spec=self.spec,
                        episode=episode.id,
                        candidate=int(episode.version or 0),
                        champion=int(episode.champion_at_start or 0),
                        stages=self._stages(episode),
                        evidence=evidence,
                        verdict=verdict,
                        looks=[
                            look["chart"]
                            for look in read_looks(self._looks(episode))
                            if look["chart"] is not None
                        ],
                        facts={"code": episode.code_revision, "trigger": _why(episode)},
                    )
                    facts.update({"kind": verdict.kind.value, "reason": verdict.reason})
            except Conflict:
                log.info("episode %s: its report was published meanwhile", episode.id)
        return read_verdict(target)

    def _conclude(self, verdict: Verdict) -> Outcome:
        evidence = _evidence(verdict)
        match verdict.kind:
            case Kind.PROMOTE:
                asked = self.spec.release.approval == "required"
                return Outcome(State.AWAITING_APPROVAL if asked else State.PROMOTING, evidence)
            case Kind.ROLLBACK:
                return self._rolled_back(verdict)
            case Kind.INCONCLUSIVE if self.spec.release.on_inconclusive == "promote":
                return Outcome(State.PROMOTING, {**evidence, "policy": "on_inconclusive: promote"})
        return Outcome(State.INCONCLUSIVE, evidence)

    def _rolled_back(self, verdict: Verdict) -> Outcome:
        return Outcome(State.ROLLED_BACK, _evidence(verdict), fence=verdict.headline)

    # Probation

    def _errors_in_probation(self, episode: Episode) -> tuple[int, int]:
        return probation.errors(
            self.store.predictions(episode.model),
            since=episode.state_since,
            version=int(episode.version or 0),
            now=utc_now(),
        )

    def _guard_probation(self, episode: Episode) -> Outcome:
        champion = self.ledger.champion(episode.model)
        if champion is None or champion.previous_version is None:
            # The first version: there is nobody to go back to; alerts page a person.
            return HOLD
        requests, errors = self._errors_in_probation(episode)
        for guardrail in self.spec.release.guardrails:
            if probation.is_tripped(guardrail, requests, errors):
                reason = f"{errors} of {requests} requests failed in probation"
                return Outcome(State.ROLLED_BACK, {"reason": reason}, fence=reason)
        return HOLD


def roll_back(
    settings: Settings, spec: ModelSpec, ledger: Ledger, *, actor: str, reason: str
) -> dict[str, Any]:
    """Withdraws a model's exposed candidate, or else its champion; fences it. No Airflow needed.

    The ledger moves first: whatever is killed after that, the next reconciliation completes it.

    Raises:
        Permanent: `episode.no_reason`.
        NeedsHuman: `rollback.nowhere`: there is no earlier version, or it is fenced.
    """
    if not reason.strip():
        raise Permanent("episode.no_reason", "a reason is needed", hint="give --reason TEXT")
    flow = ReleaseFlow(settings, spec, ledger)
    open_ = ledger.open_episode_of(spec.name)
    if open_ is not None and open_.state in EXPOSED and open_.state is not State.PROBATION:
        ended = end(
            ledger, open_.id, State.ROLLED_BACK, actor=actor, reason=reason, cleanup=flow.cleanup
        )
        return _done(ledger, ended, f"candidate v{ended.version} withdrawn and fenced")
    champion = ledger.champion(spec.name)
    if champion is None or champion.previous_version is None:
        raise NeedsHuman(
            "rollback.nowhere",
            f"model {spec.name!r} has no version before the one that serves",
            hint="retrain, or publish a version by hand",
        )
    if champion.previous_version in ledger.fences(spec.name):
        raise NeedsHuman(
            "rollback.nowhere",
            f"version {champion.previous_version}, before the one that serves, is fenced",
            hint="retrain from scratch: the fenced version must not serve",
        )
    episode = ledger.episode(champion.episode_id)
    if episode.state not in _REVERTIBLE:
        raise NeedsHuman(
            "rollback.nowhere",
            f"the champion's episode {episode.id} is {episode.state}",
            hint="`perennial explain` tells what happened to it",
        )
    ended = ledger.transition(
        episode,
        State.ROLLED_BACK,
        actor=actor,
        evidence={"reason": reason},
        fence=reason,
        override=True,
    )
    flow.cleanup(ended)
    return _done(ledger, ended, f"v{ended.version} withdrawn and fenced")


def _done(ledger: Ledger, episode: Episode, what: str) -> dict[str, Any]:
    champion = ledger.champion(episode.model)
    serving = champion.version if champion else None
    return {
        "model": episode.model,
        "episode": episode.id,
        "withdrawn": episode.version,
        "champion": serving,
        "summary": f"{episode.model}: {what}; v{serving} serves",
    }


def read_looks(path: Path) -> list[dict[str, Any]]:
    """The looks so far, oldest first; a last line that a crash cut short is left out."""
    try:
        lines = path.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def _why(episode: Episode) -> str:
    return "; ".join(map(str, episode.trigger.get("reasons", []))) or "unknown"


def _stage(index: int, share: float) -> dict[str, Any]:
    """A stage that has not started: its share is set, its start is not known yet."""
    return {"index": index, "share": share, "start": None, "end": None}


def _evidence(verdict: Verdict) -> Mapping[str, Any]:
    return {
        "verdict": verdict.kind.value,
        "reason": verdict.reason,
        "says": verdict.headline,
        "numbers": verdict.numbers,
    }
