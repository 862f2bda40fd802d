"""Labels over HTTP and API keys, against the real process."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from perennial.errors import NeedsHuman, Permanent
from perennial.local import traffic
from perennial.settings import Settings
from perennial.spec import load_spec
from perennial.store import Store
from serving import access, labels_rest
from serving import intake as intake_module
from serving.access import ApiKeys, is_loopback, keys_for, presented_key
from serving.intake import Intake, Metrics, Models
from serving.protos import labels_pb2 as pb
from serving.protos import labels_pb2_grpc as pb_grpc
from tests.support.serving import ROOT
from tests.support.traffic import (
    add_model,
    eventually,
    log_rows,
    make_settings,
    metric,
    python_module,
)

KEY = "a-key-of-the-tests-0123456789"
NOTHING = {"accepted": 0, "duplicates": 0, "conflicts": 0, "future": 0, "rejected": []}


class Client:
    """HTTP calls of one intake."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{settings.labels_rest_port}", trust_env=False, timeout=30
        )

    def post(self, body: Any, model: str = "trips", **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.post(f"/v1/models/{model}/labels", content=content, headers=named)

    def rows_of(self, request_id: str) -> list[dict[str, Any]]:
        rows = log_rows(Store(self.settings.store).labels("trips"))
        return [row for row in rows if row["request_id"] == request_id]

    def is_up(self) -> bool:
        try:
            return self.http.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """An intake that asks for no key."""
    settings = make_settings(tmp_path_factory.mktemp("rest"))
    add_model(settings)
    with python_module(settings, "serving.labels") as process:
        running = Client(settings)
        eventually(running.is_up, "the intake answers")
        yield running
        running.http.close()
        assert process.stop() == 0


def test_one_label_and_a_batch_are_on_disk_when_answered(client: Client) -> None:
    answer = client.post({"request_id": "one", "value": True})
    assert (answer.status_code, answer.json()) == (200, {**NOTHING, "accepted": 1})
    moment = "2026-01-31T14:00:00+02:00"
    batch = [
        {"request_id": "two", "row": 1, "value": 0, "time": moment},
        {"request_id": "two", "row": 1, "value": 0},
        {"request_id": "two", "row": 1, "value": 1},
        {"request_id": "two", "value": 0.5},
    ]
    answer = client.post({"source": "billing", "labels": batch})
    assert answer.json() == {
        "accepted": 2,
        "duplicates": 1,
        "conflicts": 1,
        "future": 0,
        "rejected": [{"index": 3, "reason": "not_binary"}],
    }
    assert client.rows_of("one")[0]["source"] == "default"
    first, second = sorted(client.rows_of("two"), key=lambda row: row["received"])
    assert first["time"] == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert [(r["row"], r["value"], r["source"]) for r in (first, second)] == [
        (1, 0.0, "billing"),
        (1, 1.0, "billing"),
    ]


def test_both_transports_know_the_same_labels(client: Client) -> None:
    client.post({"request_id": "both", "value": 1, "source": "s"})
    request = pb.RecordLabelsRequest(
        model="trips", source="s", labels=[pb.Label(request_id="both", value=1.0)]
    )
    with grpc.insecure_channel(f"127.0.0.1:{client.settings.labels_port}") as channel:
        answer = pb_grpc.LabelServiceStub(channel).RecordLabels(request, timeout=20)
    assert (answer.accepted, answer.duplicates) == (0, 1)


def test_a_gzipped_body_is_taken(client: Client) -> None:
    body = gzip.compress(json.dumps({"request_id": "zipped", "value": 1}).encode())
    assert client.post(body, content_encoding="gzip").json()["accepted"] == 1
    assert len(client.rows_of("zipped")) == 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no JSON"),
        (b"[1]", "no JSON object"),
        (b'{"value": 1}', "request_id: expected a string"),
        (b'{"request_id": "r"}', "value: expected a number"),
        (b'{"request_id": "r", "value": "1"}', "value: expected a number"),
        (b'{"request_id": "r", "value": NaN}', "no JSON"),
        (b'{"request_id": "r", "value": 1, "row": 1.5}', "row: expected an integer"),
        (b'{"request_id": "r", "value": 1, "time": "soon"}', "time: expected RFC 3339"),
        (b'{"request_id": "r", "value": 1, "time": "2030-01-31T12:00:00"}', "RFC 3339"),
        (b'{"request_id": "r", "value": 1, "when": 3}', "when: unknown key"),
        (b'{"labels": {}}', "labels: expected a list"),
        (b'{"labels": [{"request_id": "r", "value": 1}, 7]}', "labels[1]: expected an object"),
        (b'{"labels": [{"request_id": "r", "v": 1}]}', "labels[0].v: unknown key"),
        (b'{"labels": [], "model": "trips"}', "model: unknown key"),
        (b'{"source": 5, "labels": []}', "source: expected a string"),
        (b'{"source": "%s", "labels": []}' % (b"x" * 51), "50 characters of source"),
        (b'{"labels": [%s]}' % b",".join([b'{"request_id":"r","value":1}'] * 10_001), "10000"),
    ],
)
def test_a_wrong_form_is_refused_where_it_is_wrong(client: Client, body: bytes, says: str) -> None:
    answer = client.post(body)
    assert (answer.status_code, answer.json()["status"]) == (400, "INVALID_ARGUMENT")
    assert says in answer.json()["error"]
    assert client.rows_of("r") == []


def test_each_refusal_has_its_status(client: Client) -> None:
    answer = client.post({"request_id": "r", "value": 1}, model="nobody")
    assert (answer.status_code, answer.json()["status"]) == (404, "NOT_FOUND")
    assert "trips" in answer.json()["error"]
    assert client.http.get("/v1/models/trips/labels").status_code == 405
    assert client.http.post("/v1/labels").status_code == 404
    assert client.post(b"x", content_encoding="br").status_code == 415
    assert client.post(b"x", content_encoding="gzip").status_code == 400
    cut = gzip.compress(b'{"request_id": "cut", "value": 1}')[:-9]
    assert client.post(cut, content_encoding="gzip").status_code == 400
    assert client.post(b" " * (labels_rest.MAX_BODY_BYTES + 1)).status_code == 413
    bomb = gzip.compress(b" " * (labels_rest.MAX_BODY_BYTES + 1))
    assert client.post(bomb, content_encoding="gzip").status_code == 413
    chunks = iter([b" " * (1 << 20)] * 5)
    assert client.http.post("/v1/models/trips/labels", content=chunks).status_code == 413
    port = client.settings.labels_metrics_port
    refused = metric(port, "perennial_labels_calls_total", transport="rest", status="NOT_FOUND")
    assert refused is not None
    assert refused >= 2


def test_a_client_that_goes_away_halfway_harms_nobody(client: Client) -> None:
    with socket.create_connection(("127.0.0.1", client.settings.labels_rest_port)) as half:
        half.sendall(
            b"POST /v1/models/trips/labels HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
        )
    assert client.post({"request_id": "after-half", "value": 1}).json()["accepted"] == 1


def test_a_full_queue_and_a_failing_disk_are_429_and_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk stands still, then fails: each waiting call gets the answer that is its own."""
    settings = make_settings(tmp_path)
    add_model(settings)
    still, go = threading.Event(), threading.Event()

    def stuck(*_: object) -> None:
        still.set()
        assert go.wait(20)
        raise OSError("no space left")

    monkeypatch.setattr(intake_module, "write_parquet", stuck)
    monkeypatch.setattr(intake_module, "MAX_PENDING", 1)
    models, metrics = Models(settings.models_dir), Metrics(CollectorRegistry())
    intake = Intake(Store(settings.store), models, metrics)
    server = labels_rest.Server(intake, None, "127.0.0.1", settings.labels_rest_port)
    client = Client(settings)
    answers: list[httpx.Response] = []

    def send(name: str) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: answers.append(client.post({"request_id": name, "value": 1}))
        )
        thread.start()
        return thread

    try:
        threads = [send("writes")]
        assert still.wait(10)
        threads.append(send("waits"))
        eventually(lambda: intake._queue.full(), "the queue is full")
        busy = client.post({"request_id": "busy", "value": 1})
        assert (busy.status_code, busy.json()["status"]) == (429, "RESOURCE_EXHAUSTED")
        assert busy.headers["retry-after"] == "1"
        go.set()
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [503, 503]
        assert "no space left" in answers[0].json()["error"]
    finally:
        go.set()
        server.stop()
        intake.close()
        client.http.close()


def test_slow_bodies_and_too_many_at_a_time_are_turned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(tmp_path)
    add_model(settings)
    monkeypatch.setattr(labels_rest, "BODY_S", 0.1)
    monkeypatch.setattr(labels_rest, "MAX_CONNECTIONS", 3)
    models, metrics = Models(settings.models_dir), Metrics(CollectorRegistry())
    intake = Intake(Store(settings.store), models, metrics)
    server = labels_rest.Server(intake, None, "127.0.0.1", settings.labels_rest_port)
    client = Client(settings)
    try:
        with socket.create_connection(("127.0.0.1", settings.labels_rest_port)) as slow:
            slow.sendall(
                b"POST /v1/models/trips/labels HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
            )
            slow.settimeout(20)
            assert slow.recv(100).startswith(b"HTTP/1.1 408 ")
        monkeypatch.setattr(labels_rest, "MAX_IN_FLIGHT", 0)
        assert client.post({"request_id": "r", "value": 1}).status_code == 429
        client.http.close()
        with ExitStack() as idle:
            for _ in range(3):
                connection = socket.create_connection(("127.0.0.1", settings.labels_rest_port))
                idle.enter_context(connection)
            client = Client(settings)
            assert client.post({"request_id": "r", "value": 1}).status_code == 503
    finally:
        server.stop()
        intake.close()
        client.http.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """An intake with API keys."""
    home = tmp_path_factory.mktemp("guarded")
    (home / "keys").write_text(f"# who may send labels\nbilling {KEY}\n")
    settings = make_settings(home, labels_key_file=str(home / "keys"))
    add_model(settings)
    with python_module(settings, "serving.labels") as process:
        running = Client(settings)
        eventually(running.is_up, "the intake answers")
        yield running
        running.http.close()
        assert process.stop() == 0


def _grpc_code(client: Client, *metadata: tuple[str, str]) -> grpc.StatusCode:
    request = pb.RecordLabelsRequest(
        model="trips", labels=[pb.Label(request_id="guarded", value=1.0)]
    )
    with grpc.insecure_channel(f"127.0.0.1:{client.settings.labels_port}") as channel:
        try:
            pb_grpc.LabelServiceStub(channel).RecordLabels(request, metadata=metadata, timeout=20)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_without_the_key_nothing_is_taken_by_either_transport(guarded: Client) -> None:
    label = {"request_id": "stranger", "value": 1}
    for headers in ({}, {"authorization": f"Basic {KEY}"}, {"x_api_key": KEY[:-1]}):
        answer = guarded.post(label, **headers)
        assert (answer.status_code, answer.json()["status"]) == (401, "UNAUTHENTICATED")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert _grpc_code(guarded) is grpc.StatusCode.UNAUTHENTICATED
    assert _grpc_code(guarded, ("x-api-key", "wrong")) is grpc.StatusCode.UNAUTHENTICATED
    assert guarded.rows_of("stranger") == guarded.rows_of("guarded") == []


def test_with_the_key_both_transports_take_labels(guarded: Client) -> None:
    for headers in ({"authorization": f"Bearer {KEY}"}, {"x_api_key": KEY}):
        assert guarded.post({"request_id": "friend", "value": 1}, **headers).status_code == 200
    assert _grpc_code(guarded, ("authorization", f"Bearer {KEY}")) is grpc.StatusCode.OK
    assert _grpc_code(guarded, ("x-api-key", KEY)) is grpc.StatusCode.OK


def test_the_replay_sends_its_labels_with_a_key(guarded: Client) -> None:
    """The local stack's own traffic, where the intake asks for keys."""
    spec = load_spec(guarded.settings.models_dir / "trips")
    replay = traffic.Replay(guarded.settings, spec, None, 1.0, 0.0)
    replay._pending = [traffic._Pending(0.0, (0, datetime.now(UTC)), "replayed", 1.0)]
    replay.stopping.set()

    async def send() -> None:
        target = f"127.0.0.1:{guarded.settings.labels_port}"
        async with grpc.aio.insecure_channel(target) as channel:
            await replay._send_labels(channel)

    asyncio.run(send())
    assert (replay.stats.labels_sent, replay.stats.labels_failed) == (1, 0)
    assert len(guarded.rows_of("replayed")) == 1


def test_a_key_is_replaced_without_a_restart(guarded: Client) -> None:
    path = Path(guarded.settings.labels_key_file)
    old, new = path.read_text(), "another-key-of-the-tests"

    def status(key: str) -> int:
        return guarded.post({"request_id": "rotated", "value": 1}, x_api_key=key).status_code

    try:
        path.write_text(f"{new}\n")
        eventually(lambda: status(new) == 200, "the new key is known")
        assert status(KEY) == 401
        path.write_text("short\n")
        eventually(
            lambda: (
                "stay in force" in (guarded.settings.home / "serving.labels.log").read_text()
                or status(new) != 200
            ),
            "the bad file is seen",
        )
        assert status(new) == 200
    finally:
        path.write_text(old)
        eventually(lambda: status(KEY) == 200, "the old key is back")


def test_a_bind_beyond_loopback_without_keys_is_refused_at_start(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, bind="0.0.0.0")
    add_model(settings)
    done = subprocess.run(
        [sys.executable, "-m", "serving.labels"],
        env={**os.environ, **settings.as_environment()},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == NeedsHuman.exit_code
    assert "0.0.0.0 can be reached from other machines" in done.stderr
    assert "PERENNIAL_LABELS_KEY_FILE" in done.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no API key"),
        ("# only a comment\n", "holds no API key"),
        ("short\n", "keys:1: expected"),
        (f"{KEY}\none two three-is-too-many-words\n", "keys:2: expected"),
    ],
)
def test_a_bad_key_file_is_named_with_its_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(Permanent, match=says) as caught:
        ApiKeys(path)
    assert caught.value.code == "access.keys"
    assert KEY not in str(caught.value)


def test_a_key_file_that_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(Permanent, match="can't be read"):
        keys_for("127.0.0.1", str(tmp_path / "nothing"), setting="X")


def test_every_key_is_compared_whichever_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("\n".join(f"{KEY}-{n}" for n in range(5)))
    keys, compared = ApiKeys(tmp_path / "keys"), []
    compare = access.hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return compare(one, other)

    monkeypatch.setattr(access.hmac, "compare_digest", counting)
    assert keys.allow(f"{KEY}-0")
    assert not keys.allow("nobody")
    assert not keys.allow("")
    assert compared == [32] * 15


@pytest.mark.parametrize(
    ("bind", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_only_loopback_is_loopback(bind: str, loopback: bool) -> None:
    assert is_loopback(bind) is loopback


def test_a_key_is_found_in_either_header() -> None:
    assert presented_key({"authorization": "bEaReR  abc "}) == "abc"
    assert presented_key({"x-api-key": "abc"}) == "abc"
    assert presented_key({"authorization": "Basic abc"}) == ""


def test_a_busy_rest_port_ends_the_process_with_a_reason(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    add_model(settings)
    with socket.create_server(("127.0.0.1", settings.labels_rest_port)):
        with python_module(settings, "serving.labels") as process:
            assert process.popen.wait(60) == 3
    assert f"REST port {settings.labels_rest_port}" in process.log.read_text()
