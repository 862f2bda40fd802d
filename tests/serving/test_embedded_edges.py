"""The corners of the contract: deadlines, defaults, sizes, JSON forms, loads beside each other."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from tensorflow.core.framework import types_pb2
from tensorflow_serving.apis import get_model_metadata_pb2, predict_pb2
from tensorflow_serving.config import model_server_config_pb2

from serving.embedded import jsontensors
from serving.embedded import session as tf_session
from serving.embedded.http import Request
from serving.embedded.inference import Core
from serving.embedded.manager import Manager, Options
from serving.embedded.metrics import LATENCY_BOUNDS_US, Metrics
from serving.embedded.predict import predict_call
from serving.embedded.rest import Handler
from serving.embedded.servable import LoadOptions, Servable
from serving.embedded.signature import Output
from serving.embedded.status import Code, StatusError
from serving.embedded.versions import KEPT_ENDED, Model, State, Version
from tests.support.embedded import AVAILABLE, Client, ours_only, refused
from tests.support.serving import Server, export_model, wait_until


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(tmp_path_factory.mktemp("slow") / "1", "slow")


@pytest.fixture(scope="module")
def client(server: Server, exports: Path, slow: Path) -> Iterator[Client]:
    with grpc.insecure_channel(
        server.target, options=[("grpc.max_receive_message_length", -1)]
    ) as channel:
        client = Client(server, channel)
        client.reload(
            f'name: "affine" base_path: "{exports}/affine" model_version_policy {{ all {{}} }}',
            f'name: "mixed" base_path: "{exports}/mixed"',
            f'name: "slow" base_path: "{slow.parent}"',
        )
        client.await_states("affine", v1=AVAILABLE, v2=AVAILABLE, v3=AVAILABLE)
        client.reload(
            f'name: "affine" base_path: "{exports}/affine" model_version_policy {{ all {{}} }} '
            'version_labels { key: "a b" value: 2 }',
            f'name: "mixed" base_path: "{exports}/mixed"',
            f'name: "slow" base_path: "{slow.parent}"',
        )
        yield client


@pytest.fixture
def http(client: Client) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=client.server.rest_url, timeout=20, trust_env=False) as http:
        yield http


# gRPC


def test_a_deadline_ends_the_run_and_the_server_goes_on(client: Client) -> None:
    def ask(turns: int, timeout_s: float) -> Any:
        request = predict_pb2.PredictRequest()
        request.model_spec.name = "slow"
        request.inputs["turns"].CopyFrom(tf.make_tensor_proto(turns, tf.int64))
        return client.prediction.Predict(request, timeout=timeout_s)

    assert ask(10, 20).outputs["total"].int64_val == [45]
    for _ in range(3):
        assert refused(lambda: ask(10**12, 0.3))[0] == "DEADLINE_EXCEEDED"
    assert ask(10, 20).outputs["total"].int64_val == [45]


def test_version_0_is_a_version_and_no_version_is_the_highest(client: Client) -> None:
    assert client.predict(x=[1.0]).model_spec.version.value == 3
    assert refused(lambda: client.predict(version=0, x=[1.0])) == (
        "NOT_FOUND",
        "Servable not found for request: Specific(affine, 0)",
    )


def test_shapes_are_the_graphs_business_and_messages_may_be_large(client: Client) -> None:
    values = np.arange(2_000_000, dtype=np.float32).reshape(2, -1)

    # The signature says [n]; 8 MB is twice gRPC's own limit.
    response = client.predict(version=1, x=tf.make_tensor_proto(values))

    np.testing.assert_array_equal(tf.make_ndarray(response.outputs["y"]), 2 * values)


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x7fcut", b"\x0a"])
def test_bytes_that_are_no_request_are_refused(client: Client, raw: bytes) -> None:
    for method in ("PredictionService/Predict", "ModelService/GetModelStatus"):
        call = client.channel.unary_unary(f"/tensorflow.serving.{method}")
        code, details = refused(lambda call=call: call(raw, timeout=10))
        assert code == "INTERNAL"
        assert "the request is no tensorflow.serving." in details


def test_what_is_not_registered_is_unimplemented(client: Client) -> None:
    call = client.channel.unary_unary("/tensorflow.serving.SessionService/SessionRun")

    assert refused(lambda: call(b"", timeout=10))[0] == "UNIMPLEMENTED"


@ours_only
def test_long_messages_are_cut(client: Client) -> None:
    code, details = refused(lambda: client.predict("m" * 2000, x=[1.0]))

    assert code == "NOT_FOUND"
    assert len(details) == 1024 + len("...TRUNCATED")
    assert details.endswith("...TRUNCATED")


def test_metadata_names_the_init_op_too(client: Client) -> None:
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "affine"
    signatures = get_model_metadata_pb2.SignatureDefMap()
    client.prediction.GetModelMetadata(request).metadata["signature_def"].Unpack(signatures)

    assert set(signatures.signature_def) == {"serving_default", "__saved_model_init_op"}


# Loaded in this process


def with_signature(folder: Path, to: Path, change: Any) -> Servable:
    """The affine model with its SignatureDef changed."""
    from tensorflow.core.protobuf import saved_model_pb2

    shutil.copytree(folder, to)
    path = to / "saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    change(saved.meta_graphs[0].signature_def["serving_default"])
    path.write_bytes(saved.SerializeToString())
    return Servable.load("affine", 1, to, LoadOptions(check_method_name=True))


def ask(servable: Servable, **inputs: Any) -> list[Output]:
    request = predict_pb2.PredictRequest()
    for alias, value in inputs.items():
        request.inputs[alias].CopyFrom(tf.make_tensor_proto(value))
    call = predict_call(servable, request)
    return list(call.finish(call.program.run(call.arrays)))


def test_defaults_of_a_signature_stand_in(exports: Path, tmp_path: Path) -> None:
    def change(signature: Any) -> None:
        signature.defaults["x"].CopyFrom(tf.make_tensor_proto([7.0]))

    servable = with_signature(exports / "affine" / "1", tmp_path / "1", change)

    assert ask(servable)[0].array.tolist() == [14.0]
    assert ask(servable, x=[1.0])[0].array.tolist() == [2.0]
    with pytest.raises(StatusError, match="Inputs contains invalid name"):
        ask(servable, z=[1.0])
    servable.retire()


def test_a_method_that_is_none_is_refused_with_the_flag(exports: Path, tmp_path: Path) -> None:
    def change(signature: Any) -> None:
        signature.method_name = "my/method"

    servable = with_signature(exports / "affine" / "1", tmp_path / "1", change)

    with pytest.raises(StatusError, match="Was: my/method") as caught:
        ask(servable, x=[1.0])
    assert caught.value.code == Code.INTERNAL
    servable.retire()


def test_a_run_that_may_not_take_longer_is_ended_by_the_runtime(slow: Path) -> None:
    session = tf_session.load(slow)
    signature = session.signatures["serving_default"]
    names = (signature.inputs["turns"].name,), (signature.outputs["total"].name,)

    assert session.run_within(*names, [np.int64(10)], 60.0)[0] == 45
    with pytest.raises(tf.errors.DeadlineExceededError):
        session.run_within(*names, [np.int64(10**12)], 0.1)
    session.close()


@pytest.mark.parametrize(
    ("break_it", "code", "message"),
    [
        (lambda folder: shutil.rmtree(folder / "variables"), Code.DATA_LOSS, "not a valid check"),
        (
            lambda folder: (folder / "export.meta").touch(),
            Code.UNIMPLEMENTED,
            "Session Bundle is deprecated and removed.",
        ),
    ],
)
def test_a_folder_that_cannot_answer_is_refused_at_load(
    exports: Path, tmp_path: Path, break_it: Any, code: Code, message: str
) -> None:
    folder = shutil.copytree(exports / "affine" / "1", tmp_path / "1")
    break_it(folder)

    with pytest.raises(StatusError, match=message) as caught:
        Servable.load("affine", 1, folder, LoadOptions())

    assert caught.value.code == code


# The manager


def model_list(**base_paths: Path) -> Any:
    config = model_server_config_pb2.ModelServerConfig()
    for name, path in base_paths.items():
        config.model_config_list.config.add(
            name=name, base_path=str(path), model_platform="tensorflow"
        )
    return config


def test_a_load_that_hangs_holds_up_no_other_model(exports: Path, tmp_path: Path) -> None:
    release = threading.Event()
    for name in ("fast", "stuck"):
        (tmp_path / name / "1").mkdir(parents=True)

    def load(model: str, version: int, folder: Path) -> Servable:
        if model == "stuck":
            release.wait(60)
        return Servable.load(model, version, exports / "affine" / "1", LoadOptions())

    manager = Manager(load, Options())
    stuck = model_list(stuck=tmp_path / "stuck", fast=tmp_path / "fast")
    reload = threading.Thread(target=manager.reload, args=(stuck,))
    reload.start()
    try:
        wait_until(lambda: manager.available() == {"fast": (1,)}, what="the fast one answers")
        assert manager.status("stuck")[0].state == State.LOADING
        assert manager.find("fast").version == 1
    finally:
        release.set()
        reload.join()
        manager.stop()


def test_a_failed_load_is_tried_again_and_its_error_shown_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    attempts = []

    def load(model: str, version: int, folder: Path) -> Servable:
        attempts.append(version)
        raise StatusError(Code.DATA_LOSS, "half copied")

    manager = Manager(load, Options(max_retries=2, retry_interval_s=0.01))
    with pytest.raises(StatusError, match=r"version: 1 due to error: <DATA_LOSS: half copied>"):
        manager.reload(model_list(m=tmp_path))
    (version,) = manager.status("m")
    manager.stop()

    assert attempts == [1, 1, 1]
    assert (version.state, str(version.error)) == (State.END, "DATA_LOSS: half copied")


def test_an_unloaded_version_leaves_nothing_behind(exports: Path, tmp_path: Path) -> None:
    for version in ("1", "2"):
        (tmp_path / version).mkdir()

    def load(model: str, version: int, folder: Path) -> Servable:
        return Servable.load(model, version, exports / "affine" / "1", LoadOptions())

    manager = Manager(load, Options(poll_s=0.05))
    config = model_list(m=tmp_path)
    policy = config.model_config_list.config[0].model_version_policy
    policy.specific.versions.append(1)
    manager.reload(config)
    graph = weakref.ref(manager.find("m").programs._session._session.graph)
    assert graph() is not None

    policy.specific.versions[0] = 2
    manager.reload(config)
    wait_until(lambda: manager.status("m", 1)[0].state == State.END, what="version 1 is unloaded")
    manager.stop()

    assert graph() is None


def test_ended_versions_do_not_pile_up() -> None:
    model = Model()
    for number in range(100):
        model.want({number: Path("/m")})
        model.versions[number] = Version(number, Path("/m"), state=State.END)
        model.want({})

    assert sorted(model.versions) == list(range(100 - KEPT_ENDED, 100))


# REST


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/V1/Models/affine/Versions/1", 200),
        ("/v1/models/affine/labels/a%20b", 200),
        ("/v1/models/affine?x=y", 200),
        ("/v1/models/affine/versions/9", 404),
        ("/v1/models/affine/versions/99999999999999999999", 400),
        ("/v1/models/affine/versions/stable", 400),
        ("/v1/nothing", 400),
        ("/v2/models/affine", 404),
    ],
)
def test_rest_paths(http: httpx.Client, path: str, status: int) -> None:
    response = http.get(path)

    assert response.status_code == status
    assert response.headers["content-type"] == (
        "text/html" if path.startswith("/v2") else "application/json"
    )


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("GET", "/v1/models", "Missing model name in request."),
        ("POST", "/v1/models/affine", "Malformed request: POST /v1/models/affine"),
        ("DELETE", "/v1/models/affine", "Malformed request: DELETE /v1/models/affine"),
        ("POST", "/v1/models/affine:PREDICT", "Malformed request: POST /v1/models/affine:PREDICT"),
        (
            "GET",
            "/v1/models/affine/versions/99999999999999999999",
            "Failed to convert version: 99999999999999999999 to numeric.",
        ),
    ],
)
def test_rest_malformed(http: httpx.Client, method: str, path: str, message: str) -> None:
    assert http.request(method, path).json() == {"error": message}


def test_rest_by_label_and_in_both_forms(http: httpx.Client) -> None:
    url = "/v1/models/affine/labels/a%20b:predict"

    assert http.post(url, json={"instances": [1]}).json() == {"predictions": [3.0]}
    assert http.post(url, json={"inputs": {"x": [1], "z": 1}}).json() == {"outputs": [3.0]}
    missing = http.post(url, json={"inputs": {"z": 1}}).json()["error"]
    assert missing.endswith("Missing named input: x in 'inputs' object.")


def test_rest_gzip_is_bounded_and_checked(http: httpx.Client) -> None:
    url, headers = "/v1/models/affine:predict", {"Content-Encoding": "gzip"}
    body = gzip.compress(b'{"instances": [1]}')

    assert http.post(url, content=body, headers=headers).json() == {"predictions": [4.0]}
    assert http.post(url, content=body[:-5], headers=headers).status_code == 400
    assert http.post(url, content=b"no gzip", headers=headers).status_code == 400


def test_rest_large_requests_are_answered_too(http: httpx.Client) -> None:
    values = list(range(100_000))

    response = http.post("/v1/models/affine/versions/1:predict", json={"instances": values})

    assert response.json()["predictions"] == [2.0 * value for value in values]


def test_rest_requests_end_at_their_timeout(slow: Path) -> None:
    def load(model: str, version: int, folder: Path) -> Servable:
        return Servable.load(model, version, folder, LoadOptions())

    manager, metrics = Manager(load, Options()), Metrics()
    manager.reload(model_list(slow=slow.parent))
    core = Core(manager, metrics, grpc_threads=1, rest_threads=1)
    handler = Handler(core, metrics_path="", cors=False, timeout_s=0.2)

    async def post(turns: int) -> Any:
        body = bytearray(f'{{"inputs": {turns}}}'.encode())
        return await handler(Request("POST", "/v1/models/slow:predict", raw_body=body))

    late, in_time = asyncio.run(post(10**12)), asyncio.run(post(10))
    core.close()
    manager.stop()

    assert late.status == 504
    assert in_time.body == b'{"outputs": 45}'
    assert 'request_count{model_name="slow",status="DEADLINE_EXCEEDED"} 1' in metrics.text()


def test_rest_metadata(http: httpx.Client) -> None:
    document = http.get("/v1/models/affine/labels/a%20b/metadata").json()

    assert document["model_spec"] == {"name": "affine", "signature_name": "", "version": "2"}
    signature = document["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["method_name"] == "tensorflow/serving/predict"
    assert signature["inputs"]["x"] == {
        "dtype": "DT_FLOAT",
        "name": "serving_default_x:0",
        "tensor_shape": {"dim": [{"name": "", "size": "-1"}], "unknown_rank": False},
    }


@pytest.mark.parametrize(
    ("alias", "dtype", "array", "text"),
    [
        ("y", types_pb2.DT_FLOAT, np.float32([0.1, 1e30, 16777217]), "[0.1, 1e+30, 16777216.0]"),
        ("y", types_pb2.DT_FLOAT, np.float32([1 / 3]), "[0.333333343]"),
        ("y", types_pb2.DT_DOUBLE, np.float64([1 / 3]), "[0.33333333333333331]"),
        ("y", types_pb2.DT_FLOAT, np.float32([np.nan, -np.inf]), "[NaN, -Infinity]"),
        ("y", types_pb2.DT_INT64, np.int64([[2**62], [-1]]), f"[[{2**62}], [-1]]"),
        ("y", types_pb2.DT_BOOL, np.array([True, False]), "[true, false]"),
        (
            "y",
            types_pb2.DT_STRING,
            np.array([b'a"', "\u00e9".encode()], object),
            '["a\\"", "\u00e9"]',
        ),
        ("y_bytes", types_pb2.DT_STRING, np.array([b"\xff"], object), '[{"b64": "/w=="}]'),
    ],
)
def test_json_values(alias: str, dtype: int, array: np.ndarray, text: str) -> None:
    outputs = [Output(alias, dtype, array)]

    assert jsontensors.to_json(outputs, row_form=True) == f'{{"predictions": {text}}}'
    assert jsontensors.to_json(outputs, row_form=False) == f'{{"outputs": {text}}}'


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([Output("y", 1, np.float32(1))], "Tensor name: y has no shape information "),
        (
            [Output("a", 1, np.float32([1])), Output("b", 1, np.float32([1, 2]))],
            "Tensor name: b has inconsistent batch size: 2 expecting: 1",
        ),
    ],
)
def test_rows_need_a_common_first_dimension(outputs: list[Output], message: str) -> None:
    with pytest.raises(StatusError, match=message):
        jsontensors.to_json(outputs, row_form=True)


# Metrics


def test_the_stock_names_and_limits_are_there(client: Client, http: httpx.Client) -> None:
    client.predict(x=[1.0])
    text = http.get("/monitoring/prometheus/metrics").text

    for name, kind in (
        (":tensorflow:serving:request_count", "counter"),
        (":tensorflow:serving:request_latency", "histogram"),
        (":tensorflow:serving:runtime_latency", "histogram"),
        (":tensorflow:serving:request_example_counts", "histogram"),
        (":tensorflow:serving:request_log_count", "counter"),
        (":tensorflow:serving:model_warmup_latency", "histogram"),
        (":tensorflow:serving:batching_session:queuing_latency", "histogram"),
        (":tensorflow:serving:mlmd_map", "gauge"),
        (":tensorflow:cc:saved_model:load_attempt_count", "counter"),
        (":tensorflow:cc:saved_model:load_latency_by_stage", "histogram"),
        (":tensorflow:core:graph_runs", "counter"),
        (":tensorflow:core:direct_session_runs", "counter"),
    ):
        assert f"# TYPE {name} {kind}\n" in text
    latency = ':tensorflow:serving:request_latency_bucket{model_name="affine",API="Predict",'
    limits = [line for line in text.splitlines() if line.startswith(latency)]
    assert len(limits) == len(LATENCY_BOUNDS_US) + 1 == 34
    assert [limit.split('le="')[1].split('"')[0] for limit in (limits[0], limits[4])] == [
        "10",
        "104.976",
    ]
    assert 'le="1.47476e+09"' in limits[-2]
    assert 'le="+Inf"' in limits[-1]
    assert ":tensorflow:core:graph_runs{} " in text


def test_label_values_are_escaped() -> None:
    metrics = Metrics()
    metrics.request_count.add('a"b\\c', "OK")

    assert 'model_name="a\\"b\\\\c",status="OK"} 1' in metrics.text()


def test_a_reload_reports_what_it_counted(client: Client, exports: Path) -> None:
    from tensorflow_serving.apis import model_management_pb2

    request = model_management_pb2.ReloadConfigRequest(
        metric_names=[
            "/tensorflow/cc/saved_model/load_attempt_count",
            "/tensorflow/nothing",
        ]
    )
    text_format.Parse(
        f"""config {{ name: "affine" base_path: "{exports}/affine" model_platform: "tensorflow" }}
        config {{ name: "again" base_path: "{exports}/mixed" model_platform: "tensorflow" }}""",
        request.config.model_config_list,
    )
    response = client.models.HandleReloadConfigRequest(request, timeout=60)

    assert [metric.int64_value_increase for metric in response.metric] == [1, 0]
    assert response.status.error_code == 0
