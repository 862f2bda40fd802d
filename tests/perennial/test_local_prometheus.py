"""Where Prometheus is looked for, and what is said when it is nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perennial.errors import NeedsHuman
from perennial.local.prometheus import fetch_prometheus, find_prometheus
from perennial.settings import Settings


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_setting_the_path_and_the_local_one_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    local = program(tmp_path / "local" / "usr" / "bin" / "prometheus")
    assert find_prometheus(Settings(), local=tmp_path / "local") == local
    on_path = program(tmp_path / "bin" / "prometheus")
    assert find_prometheus(Settings(), local=tmp_path / "local") == on_path
    given = program(tmp_path / "given")
    settings = Settings(prometheus_command=str(given))
    assert find_prometheus(settings, local=tmp_path / "local") == given


@pytest.mark.parametrize("command", ["", "/nowhere/prometheus"])
def test_when_it_is_nowhere_the_hint_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NeedsHuman, match=r"prometheus\.missing") as error:
        find_prometheus(Settings(prometheus_command=command), local=tmp_path)
    assert error.value.hint


def test_where_there_is_no_apt_it_cannot_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NeedsHuman, match="apt-get") as error:
        fetch_prometheus(local=tmp_path / "local")
    assert "PERENNIAL_PROMETHEUS_COMMAND" in error.value.hint


def test_a_download_that_fails_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tool in ("apt-get", "dpkg"):
        program(tmp_path / "bin" / tool).write_text("#!/bin/sh\necho no network >&2\nexit 100\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/bin")
    with pytest.raises(NeedsHuman, match="no network"):
        fetch_prometheus(local=tmp_path / "local" / "prometheus")
    assert list((tmp_path / "local").iterdir()) == []
