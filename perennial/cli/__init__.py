"""`perennial`: the command line.

Exit codes: 0 done; 1 an unexpected error; 2 it will fail again (bad input, wrong arguments);
3 it may succeed later; 4 somebody has to decide or install something; 5 somebody else got there
first. With `--json` the answer, and an error as {"error": …}, is one JSON document on stdout.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from perennial import __version__
from perennial.errors import PerennialError
from perennial.ledger import Ledger
from perennial.settings import Settings


def actor() -> str:
    """Who acts, for the ledger: user@host, or PERENNIAL_ACTOR."""
    return os.environ.get("PERENNIAL_ACTOR") or f"{getpass.getuser()}@{socket.gethostname()}"


def settings() -> Settings:
    return Settings.from_environment()


@contextmanager
def open_ledger(settings: Settings) -> Iterator[Ledger]:
    """The ledger, migrated. Raises Retryable `postgres.down` or `ledger.unreachable`."""
    from perennial.local.postgres import database_url

    ledger = Ledger(database_url(settings, "perennial"))
    try:
        ledger.migrate()
        yield ledger
    finally:
        ledger.close()


def answer(as_json: bool, document: Any, lines: list[str]) -> None:
    """Prints the document as JSON, or the lines for people."""
    if as_json:
        click.echo(json.dumps(document, indent=1, default=str))
    else:
        for line in lines:
            click.echo(line)


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
reason_option = click.option("--reason", required=True, help="Why; it goes into the ledger.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.version_option(__version__, prog_name="perennial")
def cli() -> None: ...


def main() -> None:
    """Runs the command line; errors become one message and their exit code."""
    from perennial.cli import batch, operate, show, stack

    for module in (show, operate, batch, stack):
        for command in module.COMMANDS:
            cli.add_command(command)
    try:
        status = cli.main(standalone_mode=False)
    except PerennialError as error:
        if "--json" in sys.argv:
            click.echo(json.dumps({"error": error.as_dict()}, indent=1, default=str))
        else:
            click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)
