"""What clients of tensorflow_model_server may rely on, against a started server.

`PERENNIAL_TFS_COMMAND` runs the same tests against the real one; those that hold for ours only are
marked.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tensorflow as tf
from google.protobuf import text_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tensorflow.core.framework.tensor_pb2 import TensorProto
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    predict_pb2,
)

from perennial import store
from tests.support.embedded import AVAILABLE, END, Client, ours_only, refused
from tests.support.serving import Server, wait_until


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.target) as channel:
        yield channel


@pytest.fixture
def base(exports: Path) -> tuple[str, str]:
    """The two models that every test may use, in text format."""
    return (
        f'name: "affine" base_path: "{exports}/affine" '
        "model_version_policy { specific { versions: 1 } }",
        f'name: "mixed" base_path: "{exports}/mixed"',
    )


@pytest.fixture
def client(server: Server, channel: grpc.Channel, base: tuple[str, str]) -> Client:
    client = Client(server, channel)
    client.reload(*base)
    client.await_states("affine", v1=AVAILABLE, v2=END, v3=END)
    return client


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.rest_url, timeout=10, trust_env=False) as http:
        yield http


# Predict


def test_answers_with_typed_values_and_what_served_them(client: Client) -> None:
    response = client.predict(x=[1.0, 2.5])

    assert list(response.outputs["y"].float_val) == [2.0, 5.0]
    assert response.outputs["y"].tensor_content == b""
    assert response.model_spec.name == "affine"
    assert response.model_spec.version.value == 1
    assert response.model_spec.signature_name == "serving_default"


def test_takes_every_wire_form_of_a_tensor(client: Client) -> None:
    def tensor(text: str) -> Any:
        return text_format.Parse(text, TensorProto())

    shape = "tensor_shape { dim { size: 3 } }"
    content = tf.make_tensor_proto([1.0, 2.0, 3.0])
    assert content.tensor_content
    forms = {
        "typed": tensor(f"dtype: DT_FLOAT {shape} float_val: [1, 2, 3]"),
        "splat": tensor(f"dtype: DT_FLOAT {shape} float_val: 1"),
        "last repeats": tensor(f"dtype: DT_FLOAT {shape} float_val: [1, 2]"),
        "content": content,
    }

    answers = {name: list(client.predict(x=t).outputs["y"].float_val) for name, t in forms.items()}

    assert answers == {
        "typed": [2, 4, 6],
        "splat": [2, 2, 2],
        "last repeats": [2, 4, 4],
        "content": [2, 4, 6],
    }


@pytest.mark.parametrize(
    "text",
    [
        "dtype: DT_FLOAT tensor_shape { dim { size: 1 } } float_val: [1, 2]",
        "dtype: DT_FLOAT tensor_shape { dim { size: -1 } } float_val: 1",
        "dtype: DT_FLOAT tensor_shape { unknown_rank: true } float_val: 1",
        "dtype: DT_FLOAT tensor_shape { dim { size: 2 } } tensor_content: '\\000\\000\\000'",
        "dtype: DT_RESOURCE tensor_shape { dim { size: 1 } }",
    ],
)
def test_refuses_a_tensor_that_does_not_add_up(client: Client, text: str) -> None:
    tensor = text_format.Parse(text, TensorProto())

    code, details = refused(lambda: client.predict(x=tensor))

    assert code == "INVALID_ARGUMENT"
    assert details.startswith("tensor parsing error: x")


@ours_only
def test_refuses_a_few_bytes_that_claim_terabytes(client: Client) -> None:
    tensor = text_format.Parse(
        "dtype: DT_FLOAT tensor_shape { dim { size: 1000000000000 } } float_val: 1",
        TensorProto(),
    )

    assert refused(lambda: client.predict(x=tensor))[0] == "INVALID_ARGUMENT"


def test_strings_ints_and_several_outputs(client: Client) -> None:
    response = client.predict(
        "mixed", x=[1.0, 2.0], k=tf.constant([10, 20], tf.int64), s=["a", "é"]
    )

    assert list(response.outputs["total"].float_val) == [12.0, 24.0]
    assert list(response.outputs["echo"].string_val) == [b"a!", "é!".encode()]


def test_output_filter(client: Client) -> None:
    given = {"x": [1.0], "k": tf.constant([1], tf.int64), "s": ["a"]}

    assert set(client.predict("mixed", outputs=("echo",), **given).outputs) == {"echo"}
    assert refused(lambda: client.predict("mixed", outputs=("q",), **given)) == (
        "INVALID_ARGUMENT",
        "output tensor alias not found in signature: q Outputs expected to be in the set "
        "{echo,total}.",
    )
    assert refused(lambda: client.predict("mixed", outputs=("echo", "echo"), **given)) == (
        "INVALID_ARGUMENT",
        "duplicate output tensor alias: echo",
    )


def test_missing_and_wrong_inputs(client: Client) -> None:
    code, details = refused(lambda: client.predict("mixed", x=[1.0], s=["a"]))
    assert code == "INVALID_ARGUMENT"
    assert details == (
        "input size does not match signature: 2!=3 len({s,x}) != len({k,s,x}). Sent extra: {}. "
        "Missing but required: {k}."
    )

    code, details = refused(lambda: client.predict(z=[1.0]))
    assert code == "INVALID_ARGUMENT"
    assert details.startswith(
        "Signature input alias: x(feed name: serving_default_x:0) not found in request and no "
        "default value provided. Inputs expected to be in the request {z}"
    )


def test_wrong_type(client: Client) -> None:
    code, details = refused(lambda: client.predict(x=["one"]))

    assert code == "INVALID_ARGUMENT"
    assert "to be float but string is provided" in details


def test_graph_errors_keep_their_code(client: Client) -> None:
    given = {"x": [1.0, 2.0, 3.0], "k": tf.constant([1, 2], tf.int64), "s": ["a"]}

    code, details = refused(lambda: client.predict("mixed", **given))

    assert code == "INVALID_ARGUMENT"
    assert "Incompatible shapes" in details


def test_unknown_signature_model_version_and_label(client: Client) -> None:
    assert refused(lambda: client.predict(signature="nope", x=[1.0])) == (
        "FAILED_PRECONDITION",
        'Serving signature key "nope" not found.',
    )
    assert refused(lambda: client.predict("nope", x=[1.0])) == (
        "NOT_FOUND",
        "Servable not found for request: Latest(nope)",
    )
    assert refused(lambda: client.predict(version=9, x=[1.0])) == (
        "NOT_FOUND",
        "Servable not found for request: Specific(affine, 9)",
    )
    assert refused(lambda: client.predict(label="nope", x=[1.0])) == (
        "INVALID_ARGUMENT",
        "Unrecognized servable version label: nope",
    )
    assert refused(lambda: client.predict("", x=[1.0])) == (
        "INVALID_ARGUMENT",
        "ModelSpec has no name specified.",
    )
    empty = predict_pb2.PredictRequest()
    assert refused(lambda: client.prediction.Predict(empty)) == (
        "INVALID_ARGUMENT",
        "Missing ModelSpec",
    )


def test_metadata(client: Client) -> None:
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "mixed"

    response = client.prediction.GetModelMetadata(request)

    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(signatures)
    assert set(signatures.signature_def["serving_default"].inputs) == {"x", "k", "s"}
    assert response.model_spec.version.value == 1
    del request.metadata_field[:]
    assert refused(lambda: client.prediction.GetModelMetadata(request)) == (
        "INVALID_ARGUMENT",
        "GetModelMetadataRequest must specify at least one metadata_field",
    )
    request.metadata_field.append("weights")
    assert refused(lambda: client.prediction.GetModelMetadata(request)) == (
        "INVALID_ARGUMENT",
        "Metadata field weights is not supported",
    )


def test_health(client: Client) -> None:
    stub = health_pb2_grpc.HealthStub(client.channel)

    for name in ("", "ModelService", "PredictionService"):
        response = stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert response.status == health_pb2.HealthCheckResponse.SERVING
    assert refused(lambda: stub.Check(health_pb2.HealthCheckRequest(service="x")))[0] == "NOT_FOUND"


# Reload, labels, versions


def affine(exports: Path, versions: str, labels: str = "") -> str:
    pairs = "".join(
        f"version_labels {{ key: '{label}' value: {version} }}"
        for label, version in (pair.split("=") for pair in labels.split())
    )
    policy = "".join(f"versions: {version} " for version in versions.split())
    return (
        f'name: "affine" base_path: "{exports}/affine" '
        f"model_version_policy {{ specific {{ {policy} }} }} {pairs}"
    )


def test_a_label_before_its_load_is_refused_and_changes_nothing(
    client: Client, exports: Path
) -> None:
    client.reload(affine(exports, "1", "stable=1"))

    assert refused(lambda: client.reload(affine(exports, "1 2", "stable=1 canary=2"))) == (
        "FAILED_PRECONDITION",
        "Request to assign label to version 2 of model affine, which is not currently available "
        "for inference",
    )

    assert client.predict(label="stable", x=[1.0]).model_spec.version.value == 1
    assert refused(lambda: client.predict(label="canary", x=[1.0]))[0] == "INVALID_ARGUMENT"
    assert client.states("affine").get(2, END) == END


def test_a_label_moves_once_its_version_is_available(client: Client, exports: Path) -> None:
    client.reload(affine(exports, "1", "stable=1"))
    client.reload(affine(exports, "1 2", "stable=1"))
    client.await_states("affine", v1=AVAILABLE, v2=AVAILABLE)

    client.reload(affine(exports, "1 2", "stable=1 canary=2"))
    assert list(client.predict(label="canary", x=[1.0]).outputs["y"].float_val) == [3.0]
    client.reload(affine(exports, "2", "stable=2 canary=2"))

    assert client.predict(label="stable", x=[1.0]).model_spec.version.value == 2
    client.await_states("affine", v1=END, v2=AVAILABLE)
    assert refused(lambda: client.predict(version=1, x=[1.0]))[0] == "NOT_FOUND"


def test_a_version_that_was_dropped_can_come_back(client: Client, exports: Path) -> None:
    for versions, wanted in (("2", {"v1": END, "v2": AVAILABLE}), ("1", {"v1": AVAILABLE})):
        client.reload(affine(exports, versions))
        client.await_states("affine", **wanted)

    assert client.predict(x=[1.0]).model_spec.version.value == 1


def test_latest_and_all_policies(client: Client, exports: Path, tmp_path: Path) -> None:
    for version in (1, 2):
        shutil.copytree(exports / "affine" / str(version), tmp_path / str(version))
    (tmp_path / "tmp-3").mkdir()
    client.reload(f'name: "policy" base_path: "{tmp_path}"')
    client.await_states("policy", v1=END, v2=AVAILABLE)

    client.reload(f'name: "policy" base_path: "{tmp_path}" model_version_policy {{ all {{}} }}')
    client.await_states("policy", v1=AVAILABLE, v2=AVAILABLE)

    shutil.copytree(exports / "affine" / "3", tmp_path / "tmp", dirs_exist_ok=True)
    (tmp_path / "tmp").rename(tmp_path / "3")
    client.await_states("policy", v3=AVAILABLE)
    assert client.predict("policy", x=[1.0]).model_spec.version.value == 3


def test_omitted_models_are_unloaded_and_an_empty_list_is_legal(client: Client) -> None:
    client.reload()

    wait_until(lambda: client.states("affine").get(1, END) == END)
    assert refused(lambda: client.predict(x=[1.0])) == (
        "NOT_FOUND",
        "Servable not found for request: Latest(affine)",
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ('name: "m" base_path: "relative"', "Expected model m to have an absolute path or URI"),
        (
            'name: "m" base_path: "/m" model_type: TENSORFLOW',
            "Illegal setting both ModelServerConfig::model_type and "
            "ModelServerConfig::model_platform",
        ),
        ('name: "affine" base_path: "/m"', "Illegal to list model affine multiple times"),
    ],
)
def test_a_wrong_configuration_is_refused(
    client: Client, base: tuple[str, str], model: str, message: str
) -> None:
    code, details = refused(lambda: client.reload(*base, model))

    assert code == "INVALID_ARGUMENT"
    assert details.startswith(message)
    assert client.predict(x=[1.0]).model_spec.version.value == 1


@ours_only
def test_a_reload_with_a_bad_path_ends_with_the_reason(
    client: Client, base: tuple[str, str], tmp_path: Path
) -> None:
    bad = f'name: "missing" base_path: "{tmp_path}/nowhere"'

    code, details = refused(lambda: client.reload(*base, bad))

    assert code == "UNKNOWN"
    assert details.startswith("1 model(s) did not become available: {{name: missing")
    assert "Could not find base path" in details
    client.reload(*base)
    assert client.predict(x=[1.0]).model_spec.version.value == 1


def test_a_new_model_that_does_not_load_fails_the_reload(
    client: Client, base: tuple[str, str], exports: Path, tmp_path: Path
) -> None:
    shutil.copytree(exports / "corrupt", tmp_path / "1")

    code, details = refused(lambda: client.reload(*base, f'name: "bad" base_path: "{tmp_path}"'))

    assert code == "UNKNOWN"
    assert "model(s) did not become available: {{name: bad version: 1" in details
    assert "OUT_OF_RANGE" in details


@ours_only
def test_a_published_version_that_was_changed_is_refused_by_name(
    client: Client, exports: Path, tmp_path: Path
) -> None:
    for version in (1, 2):
        with store.publishing(
            tmp_path / str(version), kind="export", model="m", id=str(version)
        ) as (folder, _):
            shutil.copytree(exports / "affine" / str(version), folder, dirs_exist_ok=True)
    changed = tmp_path / "2" / "variables" / "variables.index"
    changed.write_bytes(changed.read_bytes()[:-1] + b"x")
    path = f'name: "published" base_path: "{tmp_path}"'

    client.reload(f"{path} model_version_policy {{ specific {{ versions: 1 }} }}")
    client.reload(f"{path} model_version_policy {{ specific {{ versions: [1, 2] }} }}")
    client.await_states("published", v1=AVAILABLE, v2=END)

    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = "published"
    request.model_spec.version.value = 2
    (status,) = client.models.GetModelStatus(request).model_version_status
    assert status.state == END
    assert status.status.error_code == grpc.StatusCode.DATA_LOSS.value[0]
    assert "variables.index" in status.status.error_message
    assert client.predict("published", x=[1.0]).model_spec.version.value == 1


def test_a_corrupt_version_leaves_the_old_one_serving(
    client: Client, exports: Path, tmp_path: Path
) -> None:
    shutil.copytree(exports / "affine" / "1", tmp_path / "1")
    client.reload(f'name: "swap" base_path: "{tmp_path}"')
    shutil.copytree(exports / "corrupt", tmp_path / "tmp")
    (tmp_path / "tmp").rename(tmp_path / "2")

    wait_until(lambda: client.states("swap").get(2) == END, what="version 2 fails")

    assert client.states("swap")[1] == AVAILABLE
    assert client.predict("swap", x=[1.0]).model_spec.version.value == 1


def test_versions_swap_under_load_without_a_failure(client: Client, exports: Path) -> None:
    client.reload(affine(exports, "1", "stable=1"))
    done = threading.Event()
    answered: dict[int, int] = {}
    failures: list[grpc.RpcError] = []

    def ask() -> None:
        while not done.is_set():
            try:
                response = client.predict(label="stable", x=[1.0])
            except grpc.RpcError as error:
                failures.append(error)
                continue
            version = response.model_spec.version.value
            answered[version] = answered.get(version, 0) + 1
            assert list(response.outputs["y"].float_val) == [version + 1.0]

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for old, new in ((1, 2), (2, 3), (3, 1)):
            client.reload(affine(exports, f"{old} {new}", f"stable={old}"))
            client.await_states("affine", **{f"v{new}": AVAILABLE})
            client.reload(affine(exports, f"{old} {new}", f"stable={new}"))
            wait_until(lambda new=new: answered.get(new, 0) > 20, what=f"version {new} answers")
            client.reload(affine(exports, f"{new}", f"stable={new}"))
            client.await_states("affine", **{f"v{old}": END})
    finally:
        done.set()
        for thread in threads:
            thread.join()

    assert failures == []
    assert set(answered) == {1, 2, 3}


def test_status(client: Client) -> None:
    request = get_model_status_pb2.GetModelStatusRequest()
    assert refused(lambda: client.models.GetModelStatus(request)) == (
        "INVALID_ARGUMENT",
        "Missing ModelSpec",
    )
    request.model_spec.name = "nope"
    assert refused(lambda: client.models.GetModelStatus(request)) == (
        "NOT_FOUND",
        "Could not find any versions of model nope",
    )
    request.model_spec.name = "affine"
    request.model_spec.version.value = 77
    assert refused(lambda: client.models.GetModelStatus(request)) == (
        "NOT_FOUND",
        "Could not find version 77 of model affine",
    )


# REST


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("affine", {"instances": [1, 2.5]}, {"predictions": [2.0, 5.0]}),
        ("affine", {"inputs": [1, 2.5]}, {"outputs": [2.0, 5.0]}),
        ("affine", {"inputs": {"x": [0.1]}}, {"outputs": [0.2]}),
        ("AFFINE", {"instances": [1]}, None),
        ("affine/versions/1", {"instances": [1]}, {"predictions": [2.0]}),
        (
            "mixed",
            {"instances": [{"x": 1, "k": 2, "s": "a"}, {"x": 3, "k": 4, "s": {"b64": "Yg=="}}]},
            {"predictions": [{"echo": "a!", "total": 4.0}, {"echo": "b!", "total": 10.0}]},
        ),
        (
            "mixed",
            {"inputs": {"x": [1], "k": [2], "s": ["a"]}},
            {"outputs": {"echo": ["a!"], "total": [4.0]}},
        ),
    ],
)
def test_rest_predict(
    client: Client, http: httpx.Client, path: str, body: Any, answer: Any
) -> None:
    response = http.post(f"/v1/models/{path}:predict", json=body)

    if answer is None:
        assert response.status_code == 404
    else:
        assert response.json() == answer
        assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("affine:predict", b"", 400, "JSON Parse error: The document is empty"),
        ("affine:predict", b"{", 400, "JSON Parse error: "),
        ("affine:predict", b"[1]", 400, "JSON Value: [1] Is not object"),
        ("affine:predict", b"{}", 400, "JSON Value: {} Missing 'inputs' or 'instances' key"),
        ("affine:predict", b'{"instances": []}', 400, "JSON Value: [] No values in 'instances'"),
        ("affine:predict", b'{"instances": [[1], [1, 2]]}', 400, "Failed to process element: 1 "),
        ("affine:predict", b'{"inputs": [[1], 2]}', 400, "JSON Value: 2 Encountered"),
        ("affine:predict", b'{"instances": ["1"]}', 400, "Failed to process element: 0 "),
        ("affine:predict", b'{"signature_name": "s", "instances": [1]}', 400, "Serving signature"),
        ("affine:predict", b'{"signature_name": 1, "instances": [1]}', 400, "JSON Value: "),
        (
            "nope:predict",
            b'{"instances": [1]}',
            404,
            "Servable not found for request: Latest(nope)",
        ),
        ("affine/labels/x:predict", b'{"instances": [1]}', 400, "Unrecognized servable version "),
        ("affine:train", b"{}", 400, "Malformed request: POST /v1/models/affine:train"),
        (
            "mixed:predict",
            b'{"instances": [{"x": 1, "k": 2.5, "s": "a"}]}',
            400,
            "Failed to process element: 0 key: k of 'instances' list. Error: INVALID_ARGUMENT: "
            "JSON Value: 2.5 Type: Number is not of expected type: int64",
        ),
    ],
)
def test_rest_refuses(
    client: Client, http: httpx.Client, path: str, body: bytes, status: int, message: str
) -> None:
    response = http.post(f"/v1/models/{path}", content=body)

    assert response.status_code == status
    assert response.json()["error"].startswith(message)


def test_rest_accepts_nan_gzip_and_ignores_what_follows(client: Client, http: httpx.Client) -> None:
    import gzip

    body = b'{"instances": [NaN, -Infinity, 1e30]} trailing'
    response = http.post(
        "/v1/models/affine:predict",
        content=gzip.compress(body),
        headers={"Content-Encoding": "gzip"},
    )

    assert response.text.replace(" ", "").replace("\n", "") == (
        '{"predictions":[NaN,-Infinity,2e+30]}'
    )


def test_rest_status_and_metadata(client: Client, http: httpx.Client) -> None:
    (status,) = http.get("/v1/models/mixed").json()["model_version_status"]
    assert status == {
        "version": "1",
        "state": "AVAILABLE",
        "status": {"error_code": "OK", "error_message": ""},
    }
    metadata = http.get("/v1/models/affine/versions/1/metadata").json()
    assert metadata["model_spec"] == {"name": "affine", "signature_name": "", "version": "1"}
    signature = metadata["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["inputs"]["x"]["dtype"] == "DT_FLOAT"
    assert http.get("/v1/models/nope").status_code == 404
    assert http.get("/v1/models").json() == {"error": "Missing model name in request."}
    assert http.get("/elsewhere").status_code == 404


def test_metrics(client: Client, http: httpx.Client) -> None:
    def count(line: str) -> float:
        text = http.get("/monitoring/prometheus/metrics").text
        lines = [entry for entry in text.splitlines() if entry.startswith(line + " ")]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0

    stock = ':tensorflow:serving:request_count{model_name="affine",status="OK"}'
    latency = (
        ":tensorflow:serving:request_latency_count"
        '{model_name="affine",API="Predict",entrypoint="GRPC"}'
    )
    before = count(stock), count(latency)
    for _ in range(3):
        client.predict(x=[1.0])

    assert (count(stock), count(latency)) == (before[0] + 3, before[1] + 3)


@ours_only
def test_own_metrics_carry_versions_and_clients_cannot_make_series(
    client: Client, http: httpx.Client
) -> None:
    client.predict(x=[1.0])
    for number in range(5):
        refused(lambda number=number: client.predict(f"made_up_{number}", x=[1.0]))

    text = http.get("/monitoring/prometheus/metrics").text

    assert 'perennial_serving_requests_total{model="affine",version="1",status="OK"}' in text
    assert 'perennial_serving_version_available{model="affine",version="1"} 1' in text
    assert "made_up" not in text


@ours_only
def test_http_connection_outlives_pipelined_and_broken_requests(server: Server) -> None:
    import socket

    def talk(raw: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", server.rest_port), timeout=10) as connection:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            received = b""
            while block := connection.recv(65536):
                received += block
            return received

    one = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert talk(one * 30 + last).count(b"HTTP/1.1 400") == 31
    assert talk(b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
    huge = b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n"
    assert talk(huge).startswith(b"HTTP/1.1 413")
    assert json.loads(talk(last).partition(b"\r\n\r\n")[2])
