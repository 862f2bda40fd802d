"""The ledger: the one record that says why a model was retrained and why it is or isn't serving.

PostgreSQL through SQLAlchemy. Every change of an episode is one transaction: the episode's row
moves on by compare-and-set on its revision, and an event with the evidence is appended to a hash
chain.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, func, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session

from perennial.errors import Conflict, Permanent, Retryable
from perennial.spec import ModelSpec
from perennial.states import OPEN, TERMINAL, TRANSITIONS, State
from perennial.tables import (
    ChampionRow,
    EpisodeRow,
    EventRow,
    FenceRow,
    LeaseRow,
    TriggerRow,
)

GENESIS = "0" * 64


@dataclass(frozen=True)
class Episode:
    """An episode as it was read; `revision` says when."""

    id: str
    model: str
    state: State
    revision: int
    champion_at_start: int | None
    version: int | None
    spec_hash: str
    code_revision: str
    trigger: Mapping[str, Any]
    params: Mapping[str, Any]
    data: Mapping[str, Any]
    created: datetime
    state_since: datetime
    updated: datetime

    @property
    def is_open(self) -> bool:
        return self.state in OPEN


@dataclass(frozen=True)
class Event:
    seq: int
    time: datetime
    actor: str
    from_state: State
    to_state: State
    evidence: Mapping[str, Any]
    hash: str


@dataclass(frozen=True)
class Champion:
    """Who serves a model, and since when; `baseline` holds its metrics at promotion."""

    model: str
    revision: int
    version: int
    episode_id: str
    previous_version: int | None
    previous_episode_id: str | None
    since: datetime
    baseline: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trigger:
    model: str
    kind: str
    window: str
    time: datetime
    fired: bool
    reasons: Mapping[str, Any]
    episode_id: str | None


def utc_now() -> datetime:
    return datetime.now(UTC)


class Ledger:
    """Reads and writes the ledger.

    Args:
        url: SQLAlchemy URL of a PostgreSQL database.

    Raises:
        Permanent: `ledger.url` for another database engine.
        Retryable: `ledger.unreachable`, from any method, when the database does not answer.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith("postgresql"):
            raise Permanent(
                "ledger.url",
                f"database URL scheme {url.partition(':')[0]!r}: the ledger needs PostgreSQL",
                hint="set PERENNIAL_DATABASE_URL to postgresql+psycopg2://…, or unset it",
            )
        self._engine: Engine = create_engine(url, pool_size=2, max_overflow=4, pool_pre_ping=True)

    def close(self) -> None:
        self._engine.dispose()

    def migrate(self) -> None:
        """Brings the schema to the newest revision. Safe to call from several processes."""
        from alembic import command
        from alembic.config import Config

        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        config.set_main_option("path_separator", "os")
        with self._session() as session:
            # One migration at a time, whoever comes first.
            session.execute(text("SELECT pg_advisory_xact_lock(5252101)"))
            config.attributes["connection"] = session.connection()
            command.upgrade(config, "head")

    # Episodes

    def open_episode(
        self,
        spec: ModelSpec,
        *,
        actor: str,
        trigger: Mapping[str, Any],
        params: Mapping[str, Any] | None = None,
        now: datetime | None = None,
        trigger_key: tuple[str, str] | None = None,
    ) -> Episode:
        """Opens an episode in state `requested`.

        Args:
            trigger: why; JSON. Its `kind` and `reasons` are shown to people.
            trigger_key: (kind, window) of the trigger to record in the same transaction. The same
                key twice opens one episode: the second call returns the first's.

        Raises:
            Conflict: `episode.in_flight`, naming the open episode of this model.
        """
        now = now or utc_now()
        with self._session() as session:
            if trigger_key is not None:
                found = session.scalar(
                    select(TriggerRow.episode_id).where(
                        TriggerRow.model == spec.name,
                        TriggerRow.kind == trigger_key[0],
                        TriggerRow.window == trigger_key[1],
                    )
                )
                if found is not None:
                    return _episode(session.get_one(EpisodeRow, found))
            champion = session.get(ChampionRow, spec.name)
            row = EpisodeRow(
                id=f"{spec.name}-{now:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}",
                model=spec.name,
                state=State.REQUESTED.value,
                revision=0,
                champion_at_start=champion.version if champion else None,
                version=None,
                spec_hash=spec.spec_hash,
                code_revision=code_revision(),
                trigger=dict(trigger),
                params=dict(params or {}),
                data={},
                created=now,
                state_since=now,
                updated=now,
            )
            session.add(row)
            try:
                session.flush()
            except IntegrityError as error:
                session.rollback()
                raise self._in_flight(spec.name) from error
            _append_event(session, row, State.REQUESTED, actor, {"trigger": dict(trigger)}, now)
            if trigger_key is not None:
                session.add(
                    TriggerRow(
                        model=spec.name,
                        kind=trigger_key[0],
                        window=trigger_key[1],
                        time=now,
                        fired=True,
                        reasons=dict(trigger),
                        episode_id=row.id,
                    )
                )
            session.flush()
            return _episode(row)

    def _in_flight(self, model: str) -> Conflict:
        open_ = self.open_episode_of(model)
        named = f" ({open_.id}, {open_.state})" if open_ else ""
        return Conflict(
            "episode.in_flight",
            f"model {model!r} already has an open episode{named}",
            hint="wait for it to end, or abort it: `perennial abort EPISODE --reason …`",
            episode=open_.id if open_ else None,
        )

    def episode(self, episode_id: str) -> Episode:
        """One episode. Raises Permanent `episode.unknown`."""
        with self._session() as session:
            row = session.get(EpisodeRow, episode_id)
            if row is None:
                raise Permanent(
                    "episode.unknown",
                    f"no episode {episode_id!r} in the ledger",
                    hint="`perennial status` lists the latest ones",
                )
            return _episode(row)

    def episodes(self, model: str | None = None, limit: int = 50) -> list[Episode]:
        """The newest episodes first."""
        query = select(EpisodeRow).order_by(EpisodeRow.created.desc()).limit(limit)
        if model is not None:
            query = query.where(EpisodeRow.model == model)
        with self._session() as session:
            return [_episode(row) for row in session.scalars(query)]

    def open_episode_of(self, model: str) -> Episode | None:
        with self._session() as session:
            row = session.scalar(
                select(EpisodeRow).where(
                    EpisodeRow.model == model,
                    EpisodeRow.state.not_in([state.value for state in TERMINAL]),
                )
            )
            return _episode(row) if row else None

    def events(self, episode_id: str) -> list[Event]:
        """The episode's history, oldest first."""
        with self._session() as session:
            rows = session.scalars(
                select(EventRow).where(EventRow.episode_id == episode_id).order_by(EventRow.seq)
            )
            return [
                Event(
                    row.seq,
                    row.time.astimezone(UTC),
                    row.actor,
                    State(row.from_state),
                    State(row.to_state),
                    row.evidence,
                    row.hash,
                )
                for row in rows
            ]

    def verify_history(self, episode_id: str) -> int:
        """Recomputes the hash chain; returns the number of events.

        Raises:
            Permanent: `ledger.history`, naming the first event that was changed or is missing.
        """
        with self._session() as session:
            rows = session.scalars(
                select(EventRow).where(EventRow.episode_id == episode_id).order_by(EventRow.seq)
            ).all()
            revision = session.get_one(EpisodeRow, episode_id).revision
            previous = GENESIS
            for expected, row in enumerate(rows, start=1):
                if row.seq != expected or row.previous_hash != previous or row.hash != _hash(row):
                    raise Permanent(
                        "ledger.history",
                        f"episode {episode_id}: event {expected} was changed or removed",
                        hint="restore the ledger from a backup; the history cannot be trusted",
                    )
                previous = row.hash
        if len(rows) != revision:
            raise Permanent(
                "ledger.history",
                f"episode {episode_id}: the history has {len(rows)} events, the episode {revision}",
                hint="restore the ledger from a backup; the history cannot be trusted",
            )
        return len(rows)

    def transition(
        self,
        episode: Episode,
        to: State,
        *,
        actor: str,
        evidence: Mapping[str, Any],
        data: Mapping[str, Any] | None = None,
        champion: ChampionMove | None = None,
        fence: str | None = None,
        now: datetime | None = None,
        override: bool = False,
    ) -> Episode:
        """Moves an episode on: state, data, event, champion and fence in one transaction.

        A champion whose own episode ends otherwise than promoted gives way to the one before it, in
        the same transaction; without one before it, it stays.

        Args:
            episode: as it was read; its revision is compared and set.
            data: merged over the episode's data.
            champion: who is the champion from now on, compared and set on its own revision.
            fence: reason for which the episode's version is fenced.
            override: a person's word; needed to leave an end (`rejected`, `promoted`).

        Raises:
            Conflict: `episode.moved` or `champion.moved`: somebody was faster; nothing was written.
            Permanent: `episode.transition`: the transition table has no such edge.
        """
        now = now or utc_now()
        allowed = TRANSITIONS[episode.state]
        if to not in allowed or (episode.state in TERMINAL and not override):
            raise Permanent(
                "episode.transition",
                f"episode {episode.id}: {episode.state} cannot become {to}",
                hint=f"allowed: {', '.join(sorted(allowed)) or 'nothing, it has ended'}",
            )
        with self._session() as session:
            row = session.scalar(
                select(EpisodeRow)
                .where(EpisodeRow.id == episode.id, EpisodeRow.revision == episode.revision)
                .with_for_update()
            )
            if row is None:
                raise Conflict(
                    "episode.moved",
                    f"episode {episode.id} is no longer at revision {episode.revision}",
                    hint="read it again and decide again",
                )
            if data:
                row.data = {**row.data, **_json(data)}
            if champion is not None:
                self._move_champion(session, row, champion, now)
            if to in TERMINAL and to is not State.PROMOTED:
                evidence = {**evidence, **self._restore_champion(session, row, now)}
            if fence is not None and row.version is not None:
                session.merge(
                    FenceRow(
                        model=row.model,
                        version=row.version,
                        episode_id=row.id,
                        reason=fence[:400],
                        actor=actor,
                        time=now,
                    )
                )
            _append_event(session, row, to, actor, evidence, now)
            try:
                session.flush()
            except IntegrityError as error:
                session.rollback()
                raise self._in_flight(episode.model) from error
            return _episode(row)

    def allocate_version(self, episode_id: str) -> int:
        """The episode's version number: one more than any before it, given once."""
        with self._session() as session:
            session.execute(
                text("SELECT pg_advisory_xact_lock(hashtext(:name))"), {"name": "versions"}
            )
            row = session.get_one(EpisodeRow, episode_id)
            if row.version is None:
                newest = session.scalar(
                    select(func.max(EpisodeRow.version)).where(EpisodeRow.model == row.model)
                )
                row.version = (newest or 0) + 1
            return row.version

    # Champions and fences

    def champion(self, model: str) -> Champion | None:
        with self._session() as session:
            row = session.get(ChampionRow, model)
            return _champion(row) if row else None

    def _move_champion(
        self, session: Session, episode: EpisodeRow, move: ChampionMove, now: datetime
    ) -> None:
        row = session.scalar(
            select(ChampionRow).where(ChampionRow.model == episode.model).with_for_update()
        )
        if (row.revision if row else 0) != move.expected_revision:
            raise Conflict(
                "champion.moved",
                f"model {episode.model!r}: the champion is at revision "
                f"{row.revision if row else 0}, not {move.expected_revision}",
                hint="evaluate against the champion that serves now",
            )
        if row is None:
            session.add(
                ChampionRow(
                    model=episode.model,
                    revision=1,
                    version=move.version,
                    episode_id=move.episode_id,
                    previous_version=None,
                    previous_episode_id=None,
                    since=now,
                    baseline=_json(move.baseline),
                    previous_baseline={},
                )
            )
            return
        row.previous_version, row.version = row.version, move.version
        row.previous_episode_id, row.episode_id = row.episode_id, move.episode_id
        row.previous_baseline, row.baseline = row.baseline, _json(move.baseline)
        row.revision += 1
        row.since = now

    def _restore_champion(
        self, session: Session, episode: EpisodeRow, now: datetime
    ) -> dict[str, Any]:
        row = session.scalar(
            select(ChampionRow).where(ChampionRow.model == episode.model).with_for_update()
        )
        if row is None or row.episode_id != episode.id:
            return {}
        if row.previous_version is None or row.previous_episode_id is None:
            return {"champion": f"version {row.version} stays: there was none before it"}
        back = ChampionMove(
            row.revision, row.previous_version, row.previous_episode_id, row.previous_baseline
        )
        self._move_champion(session, episode, back, now)
        return {"champion": f"back to version {back.version}"}

    def fences(self, model: str) -> dict[int, str]:
        """Fenced versions and why."""
        with self._session() as session:
            rows = session.scalars(select(FenceRow).where(FenceRow.model == model))
            return {row.version: row.reason for row in rows}

    # Triggers

    def record_suppressed(
        self, model: str, kind: str, window: str, reasons: Mapping[str, Any]
    ) -> bool:
        """Records a trigger that did not fire. False when this window was recorded before."""
        with self._session() as session:
            session.add(
                TriggerRow(
                    model=model,
                    kind=kind,
                    window=window,
                    time=utc_now(),
                    fired=False,
                    reasons=_json(reasons),
                    episode_id=None,
                )
            )
            try:
                session.flush()
            except IntegrityError:
                session.rollback()
                return False
            return True

    def triggers(
        self, model: str, since: datetime | None = None, limit: int = 200
    ) -> list[Trigger]:
        """The newest triggers first, fired and suppressed."""
        query = (
            select(TriggerRow)
            .where(TriggerRow.model == model)
            .order_by(TriggerRow.id.desc())
            .limit(limit)
        )
        if since is not None:
            query = query.where(TriggerRow.time >= since)
        with self._session() as session:
            return [
                Trigger(
                    row.model,
                    row.kind,
                    row.window,
                    row.time.astimezone(UTC),
                    row.fired,
                    row.reasons,
                    row.episode_id,
                )
                for row in session.scalars(query)
            ]

    # Leases

    @contextmanager
    def lease(self, name: str, *, term_s: int = 30) -> Iterator[None]:
        """Holds a named lease, with a heartbeat, while the block runs.

        Raises:
            Conflict: `lease.held` when somebody else's heartbeat is younger than its term.
        """
        holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._take_lease(name, holder, term_s)
        stop = threading.Event()
        beat = threading.Thread(
            target=self._beat, args=(name, holder, term_s / 4, stop), daemon=True
        )
        beat.start()
        try:
            yield
        finally:
            stop.set()
            beat.join()
            with self._session() as session:
                session.execute(
                    text("DELETE FROM leases WHERE name = :name AND holder = :holder"),
                    {"name": name, "holder": holder},
                )

    def _take_lease(self, name: str, holder: str, term_s: int) -> None:
        now = utc_now()
        with self._session() as session:
            session.execute(text("SELECT pg_advisory_xact_lock(hashtext(:name))"), {"name": name})
            row = session.get(LeaseRow, name)
            if row is not None and now - row.heartbeat < timedelta(seconds=row.term_s):
                raise Conflict(
                    "lease.held",
                    f"{name} is being done by {row.holder}",
                    hint=f"it is free again {row.term_s} s after that process's last heartbeat",
                    holder=row.holder,
                )
            session.merge(
                LeaseRow(name=name, holder=holder, taken=now, heartbeat=now, term_s=term_s)
            )

    def _beat(self, name: str, holder: str, every_s: float, stop: threading.Event) -> None:
        while not stop.wait(every_s):
            try:
                with self._session() as session:
                    session.execute(
                        update(LeaseRow)
                        .where(LeaseRow.name == name, LeaseRow.holder == holder)
                        .values(heartbeat=utc_now())
                    )
            except Retryable:
                continue  # The database is away; the next beat may reach it before the term ends.

    def expired_leases(self) -> list[tuple[str, str]]:
        """(name, holder) of leases whose holder stopped beating."""
        now = utc_now()
        with self._session() as session:
            return [
                (row.name, row.holder)
                for row in session.scalars(select(LeaseRow))
                if now - row.heartbeat >= timedelta(seconds=row.term_s)
            ]

    @contextmanager
    def _session(self) -> Iterator[Session]:
        try:
            with Session(self._engine) as session, session.begin():
                yield session
        except OperationalError as error:
            raise Retryable(
                "ledger.unreachable",
                f"the ledger's database does not answer: {str(error.orig).strip()}",
                hint="`perennial up` starts the embedded one; PERENNIAL_DATABASE_URL names another",
            ) from error


@dataclass(frozen=True)
class ChampionMove:
    """A change of the champion, valid only at `expected_revision` (0: there is none yet)."""

    expected_revision: int
    version: int
    episode_id: str
    baseline: Mapping[str, Any] = field(default_factory=dict)


def code_revision() -> str:
    """The git commit of the code that runs, or its version when there is no repository."""
    from perennial import __version__

    head = Path(__file__).parent.parent / ".git"
    try:
        if head.is_file():
            head = Path(head.read_text().removeprefix("gitdir:").strip())
        ref = (head / "HEAD").read_text().strip()
        if not ref.startswith("ref: "):
            return ref
        name = ref.removeprefix("ref: ")
        common = head / "commondir"
        base = (head / common.read_text().strip()) if common.exists() else head
        return (base / name).read_text().strip()
    except OSError:
        return __version__


def _append_event(
    session: Session,
    row: EpisodeRow,
    to: State,
    actor: str,
    evidence: Mapping[str, Any],
    now: datetime,
) -> None:
    previous = session.scalar(
        select(EventRow.hash)
        .where(EventRow.episode_id == row.id)
        .order_by(EventRow.seq.desc())
        .limit(1)
    )
    event = EventRow(
        episode_id=row.id,
        seq=row.revision + 1,
        time=now,
        actor=actor,
        from_state=row.state,
        to_state=to.value,
        evidence=_json(evidence),
        previous_hash=previous or GENESIS,
    )
    event.hash = _hash(event)
    session.add(event)
    if row.state != to.value or row.revision == 0:
        row.state_since = now
    row.state = to.value
    row.revision += 1
    row.updated = now


def _hash(event: EventRow) -> str:
    content = [
        event.previous_hash,
        event.episode_id,
        event.seq,
        event.time.astimezone(UTC).isoformat(timespec="microseconds"),
        event.actor,
        event.from_state,
        event.to_state,
        _canonical(event.evidence),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _canonical(value: Any) -> Any:
    """JSON with each number written one way: JSONB gives 1e22 back as an int, and -0.0 as 0.0."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        number = Decimal(repr(value)).normalize()
        return f"number {number}" if number else "number 0"
    if isinstance(value, Mapping):
        return {key: _canonical(inner) for key, inner in value.items()}
    return [_canonical(inner) for inner in value]


def _json(value: Mapping[str, Any]) -> dict[str, Any]:
    """What PostgreSQL's JSONB will give back: NaN and infinities become strings."""
    return _finite(json.loads(json.dumps(dict(value), default=str)))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return value


def _episode(row: EpisodeRow) -> Episode:
    return Episode(
        id=row.id,
        model=row.model,
        state=State(row.state),
        revision=row.revision,
        champion_at_start=row.champion_at_start,
        version=row.version,
        spec_hash=row.spec_hash,
        code_revision=row.code_revision,
        trigger=row.trigger,
        params=row.params,
        data=row.data,
        created=row.created.astimezone(UTC),
        state_since=row.state_since.astimezone(UTC),
        updated=row.updated.astimezone(UTC),
    )


def _champion(row: ChampionRow) -> Champion:
    return Champion(
        model=row.model,
        revision=row.revision,
        version=row.version,
        episode_id=row.episode_id,
        previous_version=row.previous_version,
        previous_episode_id=row.previous_episode_id,
        since=row.since.astimezone(UTC),
        baseline=row.baseline,
    )
