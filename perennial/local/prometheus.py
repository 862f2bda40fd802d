"""Finds Prometheus, or fetches Debian's package into `.local/prometheus`. No root, no service."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from perennial.errors import NeedsHuman
from perennial.settings import Settings

LOCAL: Final = Path(__file__).parents[2] / ".local" / "prometheus"
_HINT: Final = (
    "`perennial fetch-prometheus` fetches it on Debian and Ubuntu; elsewhere install it and set "
    "PERENNIAL_PROMETHEUS_COMMAND to the path of the binary"
)


def find_prometheus(settings: Settings, *, local: Path = LOCAL) -> Path:
    """Path of the binary: PERENNIAL_PROMETHEUS_COMMAND, then PATH, then `.local`.

    Raises:
        NeedsHuman: `prometheus.missing`.
    """
    if given := settings.prometheus_command:
        if found := shutil.which(given):
            return Path(found)
        raise NeedsHuman(
            "prometheus.missing",
            f"PERENNIAL_PROMETHEUS_COMMAND={given!r} is no program",
            hint="set it to the path of the binary, or unset it",
        )
    if found := shutil.which("prometheus"):
        return Path(found)
    if os.access(fetched := local / "usr" / "bin" / "prometheus", os.X_OK):
        return fetched
    raise NeedsHuman("prometheus.missing", "there is no Prometheus here", hint=_HINT)


def fetch_prometheus(*, local: Path = LOCAL) -> Path:
    """Downloads the package with apt and unpacks it; returns the binary, `promtool` beside it.

    Raises:
        NeedsHuman: `prometheus.missing`, where that can't be done.
    """
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise NeedsHuman("prometheus.missing", f"there is no {tool} here", hint=_HINT)
    local.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=local.parent) as scratch:
        _run(["apt-get", "download", "prometheus"], Path(scratch))
        package = next(Path(scratch).glob("prometheus_*.deb"))
        unpacked = Path(scratch) / "unpacked"
        _run(["dpkg", "-x", str(package), str(unpacked)], Path(scratch))
        shutil.rmtree(local, ignore_errors=True)
        unpacked.rename(local)
    return local / "usr" / "bin" / "prometheus"


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NeedsHuman(
            "prometheus.missing",
            f"`{shlex.join(command)}` failed: {done.stderr.strip().splitlines()[-1:]}",
            hint=f"run `apt-get update` first; {_HINT}",
        )
