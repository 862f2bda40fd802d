"""Verbs of the one-machine stack: up, down, demo, fetch-prometheus."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import click

from perennial.cli import answer, json_option, settings
from perennial.errors import NeedsHuman
from perennial.settings import Settings


@click.command()
@click.option("--timeout", default=300, show_default=True, help="Seconds to wait until ready.")
@json_option
def up(timeout: int, as_json: bool) -> None:
    """Start the local stack and leave it running."""
    here = settings()
    found = _running(here)
    if found is None:
        found = _launch(here, timeout, quiet=as_json)
    answer(as_json, found, [*_url_lines(found), "stop it with `make down` or `perennial down`"])


def _launch(here: Settings, timeout: int, *, quiet: bool) -> dict[str, object]:
    here.run_dir.mkdir(parents=True, exist_ok=True)
    path = here.run_dir / "stack.log"
    with path.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "perennial.local.stack"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    (here.run_dir / "stack.pid").write_text(f"{process.pid}\n")
    deadline = time.monotonic() + timeout
    with path.open() as shown:
        while time.monotonic() < deadline:
            for line in shown:
                if not quiet:
                    click.echo(line.rstrip())
            if (found := _running(here)) is not None:
                return found
            if (status := process.poll()) is not None:
                raise NeedsHuman(
                    "stack.ended",
                    f"the stack ended with {status}: {path.read_text().strip()[-600:]}",
                    hint=f"read {path}",
                )
            time.sleep(0.2)
    raise NeedsHuman("stack.slow", f"the stack was not ready in {timeout} s", hint=f"read {path}")


def _running(here: Settings) -> dict[str, object] | None:
    try:
        found = json.loads((here.run_dir / "stack.json").read_text())
        os.kill(int(found["pid"]), 0)
    except (OSError, ValueError, KeyError):
        return None
    return dict(found)


def _url_lines(found: dict[str, object]) -> list[str]:
    from perennial.airflow_api import password

    here = settings()
    urls = found["urls"]
    assert isinstance(urls, dict)
    lines = [f"{name:28} {url}" for name, url in urls.items()]
    return [*lines, f"{'Airflow user, password':28} {here.airflow_user} {password(here)}"]


@click.command()
@json_option
def down(as_json: bool) -> None:
    """Stop the local stack that `up` started."""
    from perennial.local.supervisor import stop_process

    here = settings()
    path = here.run_dir / "stack.pid"
    try:
        process_id = int(path.read_text())
        command = Path(f"/proc/{process_id}/cmdline").read_text()
    except (OSError, ValueError):
        command = ""
    # The number may belong to somebody else by now.
    was_up = "perennial.local.stack" in command
    if was_up:
        stop_process(process_id, timeout_s=90)
    path.unlink(missing_ok=True)
    answer(as_json, {"stopped": was_up}, ["stopped" if was_up else "no stack is running"])


@click.command()
@click.option("--keep", is_flag=True, help="Leave the stack running at the end.")
def demo(keep: bool) -> None:
    """Close whole episodes on real flights: a good one, a bad one, a forced one."""
    from perennial.local.demo import run

    sys.exit(run(keep=keep))


@click.command("fetch-prometheus")
def fetch() -> None:
    """Put a Prometheus under .local/ (Debian and Ubuntu; no root needed)."""
    from perennial.local.prometheus import fetch_prometheus

    click.echo(f"prometheus: {fetch_prometheus()}")


COMMANDS = (up, down, demo, fetch)
