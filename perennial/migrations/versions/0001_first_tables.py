"""first tables

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:

    op.create_table(
        "episodes",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("model", sa.String(length=40), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("champion_at_start", sa.BigInteger(), nullable=True),
        sa.Column("version", sa.BigInteger(), nullable=True),
        sa.Column("spec_hash", sa.String(length=64), nullable=False),
        sa.Column("code_revision", sa.String(length=64), nullable=False),
        sa.Column("trigger", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("params", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("data", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state_since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("model", "version", name="one_episode_per_version"),
    )
    op.create_index(
        "one_open_episode_per_model",
        "episodes",
        ["model"],
        unique=True,
        postgresql_where=sa.text(
            "state NOT IN ('aborted', 'failed', 'inconclusive', 'promoted', 'rejected', 'rolled_back', 'superseded')"
        ),
    )
    op.create_table(
        "leases",
        sa.Column("name", sa.String(length=160), nullable=False),
        sa.Column("holder", sa.String(length=160), nullable=False),
        sa.Column("taken", sa.DateTime(timezone=True), nullable=False),
        sa.Column("heartbeat", sa.DateTime(timezone=True), nullable=False),
        sa.Column("term_s", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "champions",
        sa.Column("model", sa.String(length=40), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("episode_id", sa.String(length=80), nullable=False),
        sa.Column("previous_version", sa.BigInteger(), nullable=True),
        sa.Column("previous_episode_id", sa.String(length=80), nullable=True),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("baseline", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("previous_baseline", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.ForeignKeyConstraint(
            ["episode_id"],
            ["episodes.id"],
        ),
        sa.ForeignKeyConstraint(
            ["previous_episode_id"],
            ["episodes.id"],
        ),
        sa.PrimaryKeyConstraint("model"),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger(), autoincrement=True, nullable=False),
        sa.Column("episode_id", sa.String(length=80), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(length=120), nullable=False),
        sa.Column("from_state", sa.String(length=20), nullable=False),
        sa.Column("to_state", sa.String(length=20), nullable=False),
        sa.Column("evidence", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("previous_hash", sa.String(length=64), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["episode_id"],
            ["episodes.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("episode_id", "seq"),
    )
    op.create_table(
        "fences",
        sa.Column("model", sa.String(length=40), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("episode_id", sa.String(length=80), nullable=False),
        sa.Column("reason", sa.String(length=400), nullable=False),
        sa.Column("actor", sa.String(length=120), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["episode_id"],
            ["episodes.id"],
        ),
        sa.PrimaryKeyConstraint("model", "version"),
    )
    op.create_table(
        "triggers",
        sa.Column("id", sa.BigInteger(), autoincrement=True, nullable=False),
        sa.Column("model", sa.String(length=40), nullable=False),
        sa.Column("kind", sa.String(length=40), nullable=False),
        sa.Column("window", sa.String(length=80), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("fired", sa.Boolean(), nullable=False),
        sa.Column("reasons", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("episode_id", sa.String(length=80), nullable=True),
        sa.ForeignKeyConstraint(
            ["episode_id"],
            ["episodes.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("model", "kind", "window"),
    )


def downgrade() -> None:

    op.drop_table("triggers")
    op.drop_table("fences")
    op.drop_table("events")
    op.drop_table("champions")
    op.drop_table("leases")
    op.drop_index(
        "one_open_episode_per_model",
        table_name="episodes",
        postgresql_where=sa.text(
            "state NOT IN ('aborted', 'failed', 'inconclusive', 'promoted', 'rejected', 'rolled_back', 'superseded')"
        ),
    )
    op.drop_table("episodes")
