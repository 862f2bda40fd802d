"""Fixtures that every room uses: one PostgreSQL per session, one empty ledger per test."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from perennial.ledger import Ledger
from perennial.local.postgres import database_url, running_postgres
from perennial.settings import Settings
from perennial.spec import ModelSpec, load_spec

REPOSITORY = Path(__file__).parent.parent
_numbers = itertools.count()


@pytest.fixture(scope="session")
def long_lived_path() -> Iterator[Path]:
    """A folder for the whole session; pytest's own are tidied up by other sessions."""
    with tempfile.TemporaryDirectory(prefix="perennial-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def postgres(long_lived_path: Path) -> Iterator[Settings]:
    """Settings whose embedded PostgreSQL runs until the session ends."""
    settings = Settings(home=long_lived_path / "home")
    with running_postgres(settings):
        yield settings


@pytest.fixture(scope="session")
def _template(postgres: Settings) -> str:
    """Name of an empty, migrated ledger that nobody writes to."""
    _execute(postgres, "CREATE DATABASE ledger_template")
    ledger = Ledger(database_url(postgres, "ledger_template"))
    ledger.migrate()
    ledger.close()
    return "ledger_template"


def _execute(postgres: Settings, statement: str) -> None:
    admin = create_engine(database_url(postgres, "postgres"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(statement))
    admin.dispose()


@pytest.fixture
def ledger_url(postgres: Settings, _template: str) -> Iterator[str]:
    """URL of a fresh, migrated ledger database, dropped after the test."""
    name = f"ledger_{next(_numbers)}"
    _execute(postgres, f"CREATE DATABASE {name} TEMPLATE {_template}")
    yield database_url(postgres, name)
    _execute(postgres, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    ledger = Ledger(ledger_url)
    yield ledger
    ledger.close()


@pytest.fixture(scope="session")
def flights() -> ModelSpec:
    return load_spec(REPOSITORY / "models" / "flights")
