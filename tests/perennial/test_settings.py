"""Settings come from the environment; a bad one is named."""

import stat
from pathlib import Path
from threading import Thread

import pytest

from perennial.errors import NeedsHuman, Permanent
from perennial.local.supervisor import check_ports
from perennial.settings import Settings


def test_they_survive_the_way_through_an_environment(tmp_path):
    settings = Settings.from_environment(
        {"PERENNIAL_HOME": str(tmp_path), "PERENNIAL_ROUTER_PORT": "9999", "OTHER": "x"}
    )
    assert settings.router_port == 9999
    assert Settings.from_environment(settings.as_environment()) == settings


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PERENNIAL_ROUTER_PORT", "http"),
        ("PERENNIAL_ROUTER_PORT", "70000"),
        ("PERENNIAL_CAPTURE_PERCENT", "101"),
        ("PERENNIAL_POLL_S", "0"),
        ("PERENNIAL_STABLE_REPLICAS", "a:1"),
        ("PERENNIAL_STABLE_REPLICAS", "a:1:2,"),
        ("PERENNIAL_STABLE_REPLICAS", "a:1:70000"),
        ("PERENNIAL_CANARY_REPLICAS", "a:1:2,a:1:2"),
    ],
)
def test_a_bad_value_is_named_with_its_variable(variable, value):
    with pytest.raises(Permanent, match=f"{variable}='{value}'"):
        Settings.from_environment({variable: value})


def test_a_pool_is_one_local_server_or_what_is_listed():
    assert Settings(stable_port=1, stable_rest_port=2).replicas("stable") == (("127.0.0.1", 1, 2),)
    several = Settings(canary_replicas="10.0.0.7:8500:8501, two.internal:8500:8501")
    assert several.replicas("canary") == (
        ("10.0.0.7", 8500, 8501),
        ("two.internal", 8500, 8501),
    )


def test_an_empty_variable_is_the_default():
    assert Settings.from_environment({"PERENNIAL_ROUTER_PORT": ""}).router_port == 9000


def test_the_key_secret_is_made_once_and_private(tmp_path):
    settings = Settings(home=tmp_path)
    seen = []
    threads = [Thread(target=lambda: seen.append(settings.key_secret())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == 1
    assert len(seen[0]) == 64
    assert stat.S_IMODE((tmp_path / "key_secret").stat().st_mode) == 0o600
    assert [p.name for p in Path(tmp_path).iterdir()] == ["key_secret"]


def test_a_busy_port_is_named_with_the_setting_that_changes_it():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(NeedsHuman, match=f"port {port} .*\n.*PERENNIAL_LABELS_PORT"):
            check_ports("127.0.0.1", {"PERENNIAL_LABELS_PORT": port})
    with pytest.raises(NeedsHuman, match="both say 5"):
        check_ports("127.0.0.1", {"PERENNIAL_A_PORT": 5555, "PERENNIAL_B_PORT": 5555})
