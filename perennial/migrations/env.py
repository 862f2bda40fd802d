"""Alembic's environment: online only, on the connection that `Ledger.migrate` hands over."""

from alembic import context

from perennial.tables import Base

connection = context.config.attributes.get("connection")
if connection is None:
    raise SystemExit("run migrations with `perennial migrate`, which knows the database")
context.configure(connection=connection, target_metadata=Base.metadata, compare_type=True)
with context.begin_transaction():
    context.run_migrations()
