"""The ledger's tables. `perennial/migrations` makes them; only `perennial.ledger` reads them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    String,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from perennial.states import TERMINAL

_TERMINAL_SQL = ", ".join(f"'{state.value}'" for state in sorted(TERMINAL))


class Base(DeclarativeBase):
    type_annotation_map = {  # noqa: RUF012
        dict[str, Any]: JSONB,
        datetime: DateTime(timezone=True),
    }


class EpisodeRow(Base):
    """One attempt to improve one model. `revision` grows by one with every event."""

    __tablename__ = "episodes"

    id: Mapped[str] = mapped_column(String(80), primary_key=True)
    model: Mapped[str] = mapped_column(String(40))
    state: Mapped[str] = mapped_column(String(20))
    revision: Mapped[int] = mapped_column(Integer)
    champion_at_start: Mapped[int | None] = mapped_column(BigInteger)
    version: Mapped[int | None] = mapped_column(BigInteger)
    spec_hash: Mapped[str] = mapped_column(String(64))
    code_revision: Mapped[str] = mapped_column(String(64))
    trigger: Mapped[dict[str, Any]]
    params: Mapped[dict[str, Any]]
    data: Mapped[dict[str, Any]]
    created: Mapped[datetime]
    state_since: Mapped[datetime]
    updated: Mapped[datetime]

    __table_args__ = (
        UniqueConstraint("model", "version", name="one_episode_per_version"),
        Index(
            "one_open_episode_per_model",
            "model",
            unique=True,
            postgresql_where=text(f"state NOT IN ({_TERMINAL_SQL})"),
        ),
    )


class EventRow(Base):
    """Append-only history; `hash` covers the row and the hash before it."""

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=True)
    episode_id: Mapped[str] = mapped_column(ForeignKey("episodes.id"))
    seq: Mapped[int] = mapped_column(Integer)
    time: Mapped[datetime]
    actor: Mapped[str] = mapped_column(String(120))
    from_state: Mapped[str] = mapped_column(String(20))
    to_state: Mapped[str] = mapped_column(String(20))
    evidence: Mapped[dict[str, Any]]
    previous_hash: Mapped[str] = mapped_column(String(64))
    hash: Mapped[str] = mapped_column(String(64))

    __table_args__ = (UniqueConstraint("episode_id", "seq"),)


class TriggerRow(Base):
    """Every evaluation of the retrain policy that had something to say, fired or suppressed."""

    __tablename__ = "triggers"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=True)
    model: Mapped[str] = mapped_column(String(40))
    kind: Mapped[str] = mapped_column(String(40))
    window: Mapped[str] = mapped_column(String(80))
    time: Mapped[datetime]
    fired: Mapped[bool] = mapped_column(Boolean)
    reasons: Mapped[dict[str, Any]]
    episode_id: Mapped[str | None] = mapped_column(ForeignKey("episodes.id"))

    __table_args__ = (UniqueConstraint("model", "kind", "window"),)


class ChampionRow(Base):
    """Who serves. Moved only by compare-and-set on `revision`."""

    __tablename__ = "champions"

    model: Mapped[str] = mapped_column(String(40), primary_key=True)
    revision: Mapped[int] = mapped_column(Integer)
    version: Mapped[int] = mapped_column(BigInteger)
    episode_id: Mapped[str] = mapped_column(ForeignKey("episodes.id"))
    previous_version: Mapped[int | None] = mapped_column(BigInteger)
    previous_episode_id: Mapped[str | None] = mapped_column(ForeignKey("episodes.id"))
    since: Mapped[datetime]
    baseline: Mapped[dict[str, Any]]
    previous_baseline: Mapped[dict[str, Any]]


class FenceRow(Base):
    """Versions that no later run may warm-start from and no operator may promote."""

    __tablename__ = "fences"

    model: Mapped[str] = mapped_column(String(40), primary_key=True)
    version: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    episode_id: Mapped[str] = mapped_column(ForeignKey("episodes.id"))
    reason: Mapped[str] = mapped_column(String(400))
    actor: Mapped[str] = mapped_column(String(120))
    time: Mapped[datetime]


class LeaseRow(Base):
    """Who runs which job. A lease whose heartbeat is older than its term is free to take."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(160), primary_key=True)
    holder: Mapped[str] = mapped_column(String(160))
    taken: Mapped[datetime]
    heartbeat: Mapped[datetime]
    term_s: Mapped[int] = mapped_column(Integer)
