"""The command line without a stack: what it says, and with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
IN_OUT = ("--input", "nothing.csv", "--output", "out", "--json")


@pytest.fixture
def perennial(tmp_path):
    def run(*arguments, **environment):
        return subprocess.run(
            [sys.executable, "-m", "perennial", *arguments],
            env={
                **os.environ,
                "PERENNIAL_HOME": str(tmp_path / "home"),
                "PYTHONPATH": str(REPOSITORY),
                **environment,
            },
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


def test_check_names_what_is_wrong(perennial, tmp_path):
    assert perennial("check").stdout.startswith("flights: ok")
    folder = tmp_path / "models" / "flights"
    folder.mkdir(parents=True)
    text = (REPOSITORY / "models" / "flights" / "model.yaml").read_text()
    (folder / "model.yaml").write_text(text.replace("owner:", "ownr:"))
    done = perennial("check", PERENNIAL_MODELS_DIR=str(folder.parent))
    assert done.returncode == 2
    assert "did you mean 'owner'?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "exit_code"),
    [
        (("status", "--json"), "postgres.down", 3),
        (("explain", "nope", "--json"), "postgres.down", 3),
        (("retrain", "flights", "--reason", "x", "--json"), "airflow.password", 4),
        (("retrain", "nope", "--reason", "x", "--json"), "spec.missing", 2),
        (("batch-predict", "nope", *IN_OUT), "spec.missing", 2),
        (("batch-predict", "flights", *IN_OUT), "postgres.down", 3),
    ],
)
def test_an_error_is_one_document_with_a_hint(perennial, arguments, code, exit_code):
    done = perennial(*arguments)
    assert done.returncode == exit_code
    error = json.loads(done.stdout)["error"]
    assert error["code"] == code
    assert error["hint"]


def test_wrong_arguments_and_wrong_settings(perennial):
    assert perennial("nope").returncode == 2
    assert perennial("retrain", "flights").returncode == 2
    done = perennial("status", PERENNIAL_ROUTER_PORT="many")
    assert done.returncode == 2
    assert "PERENNIAL_ROUTER_PORT='many'" in done.stderr


def test_down_without_a_stack(perennial):
    done = perennial("down", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"stopped": False})
