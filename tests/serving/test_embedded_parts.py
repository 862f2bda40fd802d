"""Parts of the embedded server that need no process: flags, the version policy, config files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.embedded import config as configs
from serving.embedded.flags import FlagError, Flags, channel_options, check, parse
from serving.embedded.status import StatusError, truncated
from serving.embedded.versions import Load, State, Unload, next_step
from tests.support.serving import ROOT


def test_flags_of_the_real_server_start_this_one() -> None:
    flags, warnings = parse(
        [
            "--port=1",
            "--port=2",
            "--enable_grpc_healthcheck_service",
            "--enable_model_warmup=false",
            "--num_load_threads=4",
            "--enable_profiler=false",
            "--made_up=1",
        ]
    )

    assert (flags.port, flags.rest_api_port, flags.bind_address) == (2, 0, "127.0.0.1")
    assert flags.enable_grpc_healthcheck_service
    assert not flags.enable_model_warmup
    assert warnings == [
        "--enable_profiler has no effect in the embedded server",
        "unknown argument: --made_up=1",
    ]


@pytest.mark.parametrize(
    "argument",
    [
        "--port=x",
        "--port",
        "--enable_model_warmup=maybe",
        "--use_alts_credentials=2",
    ],
)
def test_values_that_cannot_be_honoured_are_errors(argument: str) -> None:
    with pytest.raises(FlagError):
        parse([argument])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "Both server_options.model_base_path and server_options.model_config_file are empty!"),
        ({"port": 0, "model_base_path": "/m"}, "At least one of server_options.port or"),
        (
            {"model_base_path": "/m", "batching_parameters_file": "f"},
            "server_options.batching_parameters_file is set without setting "
            "server_options.enable_batching to true.",
        ),
        (
            {"model_base_path": "/m", "use_alts_credentials": True, "ssl_config_file": "f"},
            "cannot both be set",
        ),
        ({"model_base_path": "/m", "use_alts_credentials": True}, "there is no ALTS"),
        (
            {
                "model_base_path": "/m",
                "tensorflow_session_parallelism": 1,
                "tensorflow_intra_op_parallelism": 1,
                "tensorflow_inter_op_parallelism": 1,
            },
            "excludes",
        ),
    ],
)
def test_flags_that_do_not_fit_together_end_the_start(given: dict[str, Any], message: str) -> None:
    with pytest.raises(StatusError, match=message):
        check(Flags(**given))


def test_channel_options() -> None:
    assert channel_options("a=1,b=x") == [("a", 1), ("b", "x")]
    with pytest.raises(FlagError):
        channel_options("a")


def test_version_says_what_it_is_and_loads_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "serving.embedded", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.startswith("Perennial embedded model server")
    assert "not TF Serving" in done.stdout
    assert "tensorflow.python" not in done.stderr


def test_messages_are_cut_where_grpc_would() -> None:
    assert truncated("x" * 1024) == "x" * 1024
    assert truncated("é" * 1000) == "é" * 512 + "...TRUNCATED"


states = st.dictionaries(st.integers(1, 5), st.sampled_from(State))


@given(wanted=st.sets(st.integers(1, 5)), states=states)
def test_no_step_ever_leaves_a_wanted_model_without_a_version(
    wanted: set[int], states: dict[int, State]
) -> None:
    step = next_step(wanted, states)

    ready = {version for version, state in states.items() if state == State.AVAILABLE}
    if isinstance(step, Unload):
        assert step.version in ready - wanted
        assert not wanted or ready - {step.version}
    if isinstance(step, Load):
        assert step.version in wanted - set(states)


@given(wanted=st.sets(st.integers(1, 5)), ready=st.sets(st.integers(1, 5)))
def test_steps_lead_to_exactly_what_is_wanted(wanted: set[int], ready: set[int]) -> None:
    states = dict.fromkeys(ready, State.AVAILABLE)
    for _ in range(20):
        step = next_step(wanted, states)
        if step is None:
            break
        if isinstance(step, Load):
            states[step.version] = State.AVAILABLE
        else:
            del states[step.version]

    assert set(states) == wanted


def test_versions_are_children_whose_whole_name_is_a_number(tmp_path: Path) -> None:
    for name in ("1", "00003", "tmp-4", "5x", "20260101", "7" * 30):
        (tmp_path / name).mkdir()
    (tmp_path / "9").write_text("a file")

    assert configs.found_versions(tmp_path) == {
        1: tmp_path / "1",
        3: tmp_path / "00003",
        20260101: tmp_path / "20260101",
    }


@pytest.mark.parametrize(
    ("policy", "wanted", "missing"),
    [
        ("", {3}, set()),
        ("latest { num_versions: 2 }", {2, 3}, set()),
        ("all {}", {1, 2, 3}, set()),
        ("specific { versions: [1, 9] }", {1}, {9}),
        ("specific {}", set(), set()),
    ],
)
def test_policies(policy: str, wanted: set[int], missing: set[int], tmp_path: Path) -> None:
    path = tmp_path / "models.config"
    path.write_text(
        "model_config_list { config { name: 'm' base_path: '/m' model_platform: 'tensorflow' "
        f"model_version_policy {{ {policy} }} }} }}"
    )
    (model,) = configs.read_server_config(path).model_config_list.config

    assert configs.wanted_versions(model, [1, 2, 3]) == (wanted, missing)


def test_a_configuration_that_does_not_parse_is_named(tmp_path: Path) -> None:
    path = tmp_path / "models.config"
    path.write_text("model_config_list { nonsense: 1 }")

    with pytest.raises(StatusError, match=r"models\.config: Error parsing text-format"):
        configs.read_server_config(path)
    with pytest.raises(StatusError, match="No such file"):
        configs.read_metrics_path(tmp_path / "monitoring.config")
