"""Each file of examples/ as it stands, against a real server, router, recorder and label intake."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import text_format

from perennial.settings import Settings
from perennial.spec import load_spec
from perennial.store import Store
from serving.router.routes import ModelRouting
from tests.support.batch import publish_any
from tests.support.serving import ROOT, Server
from tests.support.traffic import eventually, log_rows, make_settings, python_module, routing

EXAMPLES = ROOT / "examples"
KEY = "a-key-of-the-examples-0123"


@dataclass(frozen=True)
class Stack:
    settings: Settings
    store: Store

    def shell(self, script: str, *, path: Path | None = None, **variables: str) -> str:
        """Runs a script as it stands; returns what it prints."""
        found = f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"]
        done = subprocess.run(
            ["sh", str(EXAMPLES / script)],
            env={
                "PATH": found,
                "ROUTER": f"127.0.0.1:{self.settings.router_port}",
                "LABELS_KEY": KEY,
                "no_proxy": "127.0.0.1",
                **variables,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def labels(self, request_id: str) -> list[tuple[int, float, str]]:
        """(row, value, source) of the labels of a request, as they were received."""
        rows = [
            row for row in log_rows(self.store.labels("flights")) if row["request_id"] == request_id
        ]
        rows.sort(key=lambda row: row["received"])
        return [(row["row"], row["value"], row["source"]) for row in rows]

    def predictions(self, request_id: str) -> list[dict[str, Any]]:
        """What the recorder wrote of a request, once it has."""

        def written() -> list[dict[str, Any]]:
            rows = log_rows(self.store.predictions("flights"))
            return [row for row in rows if row["request_id"] == request_id]

        return eventually(written, f"{request_id} is recorded")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[Stack]:
    """The flights model behind the router, with a recorder, and a label intake with API keys."""
    from tensorflow_serving.apis import model_management_pb2, model_service_pb2_grpc

    home = tmp_path_factory.mktemp("examples")
    (home / "keys").write_text(f"examples {KEY}\n")
    settings = make_settings(
        home,
        stable_port=server.port,
        stable_rest_port=server.rest_port,
        labels_key_file=str(home / "keys"),
    )
    settings = settings.model_copy(update={"models_dir": ROOT / "models"})
    store = Store(settings.store)
    publish_any(store, load_spec(ROOT / "models" / "flights"), 5)
    reload = model_management_pb2.ReloadConfigRequest()
    text = f"""config {{ name: "flights" base_path: "{store.versions("flights")}"
        model_platform: "tensorflow" }}"""
    text_format.Parse(text, reload.config.model_config_list)
    with grpc.insecure_channel(server.target) as channel:
        stub = model_service_pb2_grpc.ModelServiceStub(channel)
        stub.HandleReloadConfigRequest(reload, timeout=60)
    with (
        routing(settings) as router,
        python_module(settings, "serving.recorder"),
        python_module(settings, "serving.labels"),
        grpc.insecure_channel(f"127.0.0.1:{settings.labels_port}") as channel,
    ):
        router.declare({"flights": ModelRouting(share=0, salt="examples")})
        grpc.channel_ready_future(channel).result(60)
        yield Stack(settings, store)


def test_the_python_client(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run in this process, which has TensorFlow already."""
    script = EXAMPLES / "predict_and_label.py"
    arguments = ["--router", f"127.0.0.1:{stack.settings.router_port}"]
    arguments += ["--labels", f"127.0.0.1:{stack.settings.labels_port}"]
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    monkeypatch.setenv("PERENNIAL_LABELS_KEY", KEY)
    runpy.run_path(str(script), run_name="__main__")
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("version 5 on stable: [0.")
    request_id, _, says = last.partition(": ")
    assert says == "2 labels taken, 0 were there already"
    assert stack.labels(request_id) == [(0, 0.0, "example"), (1, 1.0, "example")]
    rows = stack.predictions(request_id)
    assert [(row["row"], row["version"], row["feature_carrier"]) for row in rows] == [
        (0, 5, "UA"),
        (1, 5, "B6"),
    ]
    assert len({row["key_hash"] for row in rows} - {""}) == 1


def test_rest_with_curl(stack: Stack) -> None:
    labels = f"127.0.0.1:{stack.settings.labels_rest_port}"
    lines = stack.shell("rest_curl.sh", LABELS=labels)
    assert '"predictions"' in lines
    assert lines.count('"accepted": 1') == 2
    request_id = lines.partition("request id: ")[2].splitlines()[0]
    assert stack.labels(request_id) == [(0, 0.0, "default"), (0, 1.0, "audit")]
    [row] = stack.predictions(request_id)
    assert (row["status"], row["feature_dest"], row["feature_distance"]) == (0, "IAH", 1400.0)


def test_curl_without_the_key_ends_with_the_reason(stack: Stack) -> None:
    labels = f"127.0.0.1:{stack.settings.labels_rest_port}"
    with pytest.raises(AssertionError, match="no valid API key"):
        stack.shell("rest_curl.sh", LABELS=labels, LABELS_KEY="")


def test_grpcurl_by_its_protoset(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grpcurl itself is no package of pip: tests/support/grpcurl.py stands in for it."""
    protoset = tmp_path / "perennial.protoset"
    monkeypatch.setattr(sys, "argv", ["protoset.py", str(protoset)])
    runpy.run_path(str(EXAMPLES / "protoset.py"), run_name="__main__")
    standin = tmp_path / "grpcurl"
    standin.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tests/support/grpcurl.py"}" "$@"\n'
    )
    standin.chmod(0o755)
    lines = stack.shell(
        "grpcurl.sh",
        path=tmp_path,
        PROTOSET=str(protoset),
        LABELS=f"127.0.0.1:{stack.settings.labels_port}",
    )
    assert '"version": "5"' in lines
    assert '"accepted": 1' in lines
    told = [row for row in log_rows(stack.store.labels("flights")) if row["source"] == "example"]
    request_id = max(told, key=lambda row: row["received"])["request_id"]
    [row] = stack.predictions(request_id)
    assert (row["version"], row["arm"], row["feature_origin"]) == (5, "stable", "EWR")
