"""Classify, Regress and MultiInference, over gRPC and REST, against a started server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tensorflow as tf
from tensorflow_serving.apis import (
    classification_pb2,
    inference_pb2,
    input_pb2,
    prediction_log_pb2,
    regression_pb2,
)

from serving.embedded.servable import LoadOptions, Servable
from serving.embedded.status import StatusError
from serving.embedded.warmup import FILE, warm_up
from tests.support.embedded import AVAILABLE, Client, refused
from tests.support.serving import Server, export_model

CLASSIFY, REGRESS = "tensorflow/serving/classify", "tensorflow/serving/regress"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base path of the model `examples`: version 1 scales by 2, version 2 by 3."""
    base_path = tmp_path_factory.mktemp("examples")
    for version, scale in ((1, 2.0), (2, 3.0)):
        export_model(base_path / str(version), "examples", scale=scale)
    return base_path


@pytest.fixture(scope="module")
def client(server: Server, model: Path) -> Iterator[Client]:
    with grpc.insecure_channel(server.target) as channel:
        client = Client(server, channel)
        client.reload(f'name: "examples" base_path: "{model}" model_version_policy {{ all {{}} }}')
        client.await_states("examples", v1=AVAILABLE, v2=AVAILABLE)
        yield client


@pytest.fixture
def http(client: Client) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=client.server.rest_url, timeout=10, trust_env=False) as http:
        yield http


def example(**features: float) -> tf.train.Example:
    made = tf.train.Example()
    for name, value in features.items():
        made.features.feature[name].float_list.value.append(value)
    return made


def examples(*values: float) -> input_pb2.Input:
    given = input_pb2.Input()
    given.example_list.examples.extend(example(x=value) for value in values)
    return given


def classify(client: Client, signature: str, given: input_pb2.Input, version: int = 1) -> Any:
    request = classification_pb2.ClassificationRequest(input=given)
    request.model_spec.name = "examples"
    request.model_spec.signature_name = signature
    request.model_spec.version.value = version
    return client.prediction.Classify(request, timeout=10)


def regress(client: Client, signature: str, given: input_pb2.Input, version: int = 1) -> Any:
    request = regression_pb2.RegressionRequest(input=given)
    request.model_spec.name = "examples"
    request.model_spec.signature_name = signature
    request.model_spec.version.value = version
    return client.prediction.Regress(request, timeout=10)


def values(result: regression_pb2.RegressionResult) -> list[float]:
    return [one.value for one in result.regressions]


def classes(result: classification_pb2.ClassificationResult) -> list[list[tuple[str, float]]]:
    return [[(one.label, one.score) for one in row.classes] for row in result.classifications]


# gRPC


def test_regress(client: Client) -> None:
    response = regress(client, "", examples(1.0, 2.5))

    assert values(response.result) == [2.0, 5.0]
    assert response.model_spec.name == "examples"
    assert response.model_spec.version.value == 1
    assert response.model_spec.signature_name == "serving_default"
    assert values(regress(client, "flat", examples(1.0)).result) == [2.0]
    assert values(regress(client, "", examples(1.0), version=2).result) == [3.0]


def test_classify(client: Client) -> None:
    response = classify(client, "classify", examples(1.0, -2.0))

    assert classes(response.result) == [
        [("low", -2.0), ("high", 2.0)],
        [("low", 4.0), ("high", -4.0)],
    ]
    assert response.model_spec.signature_name == "classify"
    assert classes(classify(client, "labels", examples(1.0)).result) == [[("low", 0), ("high", 0)]]
    assert classes(classify(client, "scores", examples(1.0)).result) == [[("", -2.0), ("", 2.0)]]


def test_a_context_belongs_to_every_example(client: Client) -> None:
    given = input_pb2.Input()
    given.example_list_with_context.context.CopyFrom(example(c=100.0))
    given.example_list_with_context.examples.extend([example(x=1.0), example(x=2.0)])

    assert values(regress(client, "", given).result) == [102.0, 104.0]


@pytest.mark.parametrize(
    ("call", "signature", "message"),
    [
        (regress, "nope", "No signature was found with the name: nope"),
        (classify, "nope", "No signature was found with the name: nope"),
        (regress, "classify", "Expected one output Tensor."),
        (regress, "labels", "No regression outputs found in SignatureDef: "),
        (regress, "other", "No regression inputs found in SignatureDef: "),
        (regress, "wide", "Expected output Tensor shape to be either [batch_size] or "),
        (regress, "short", "Input batch size did not match output batch size"),
        (classify, "three", "Expected one or two output Tensors, found 3"),
        (classify, "other", "No classification inputs found in SignatureDef: "),
        (classify, "flat", "Expected classification signature outputs to contain "),
        (classify, "number", "Expected classes Tensor of DT_STRING. Got: DT_FLOAT"),
    ],
)
def test_a_signature_that_does_not_fit_is_refused(
    client: Client, call: Any, signature: str, message: str
) -> None:
    code, details = refused(lambda: call(client, signature, examples(1.0)))

    assert code == "INVALID_ARGUMENT"
    assert details.startswith(message)


def test_input_errors(client: Client) -> None:
    assert refused(lambda: regress(client, "", input_pb2.Input())) == (
        "INVALID_ARGUMENT",
        "Input is empty.",
    )
    given = input_pb2.Input()
    given.example_list.examples.append(example(c=1.0))
    code, details = refused(lambda: regress(client, "", given))
    assert code == "INVALID_ARGUMENT"
    assert "x" in details
    assert refused(
        lambda: client.prediction.Regress(regression_pb2.RegressionRequest(), timeout=10)
    ) == ("INVALID_ARGUMENT", "Missing ModelSpec")
    assert refused(lambda: classify(client, "classify", examples(1.0), version=9)) == (
        "NOT_FOUND",
        "Servable not found for request: Specific(examples, 9)",
    )


def multi(
    client: Client, *tasks: tuple[str, str], model: str = "examples", version: int | None = None
) -> Any:
    request = inference_pb2.MultiInferenceRequest(input=examples(1.0, 2.0))
    for signature, method in tasks:
        task = request.tasks.add(method_name=method)
        task.model_spec.name = model
        task.model_spec.signature_name = signature
        if version is not None:
            task.model_spec.version.value = version
    return client.prediction.MultiInference(request, timeout=10)


def test_multi_inference_answers_all_tasks_in_order(client: Client) -> None:
    response = multi(client, ("classify", CLASSIFY), ("", REGRESS), version=1)

    first, second = response.results
    assert classes(first.classification_result)[1] == [("low", -4.0), ("high", 4.0)]
    assert values(second.regression_result) == [2.0, 4.0]
    assert first.model_spec.signature_name == "classify"
    assert second.model_spec.signature_name == "serving_default"
    assert second.model_spec.version.value == 1
    assert values(multi(client, ("", REGRESS)).results[0].regression_result) == [3.0, 6.0]


@pytest.mark.parametrize(
    ("tasks", "code", "message"),
    [
        ([("", REGRESS), ("", REGRESS)], "INVALID_ARGUMENT", "Duplicate evaluation of signature"),
        ([("x", REGRESS)], "INVALID_ARGUMENT", "Requested signature not found in model graph: x"),
        ([("", "predict")], "UNIMPLEMENTED", "Unsupported signature method_name: predict"),
        ([("wide", REGRESS)], "INVALID_ARGUMENT", "Expected output Tensor shape"),
        ([], "INVALID_ARGUMENT", "ModelSpec has no name specified."),
    ],
)
def test_multi_inference_refuses(
    client: Client, tasks: list[tuple[str, str]], code: str, message: str
) -> None:
    actual, details = refused(lambda: multi(client, *tasks))

    assert (actual, details[: len(message)]) == (code, message)


def test_multi_inference_is_about_one_model(client: Client) -> None:
    request = inference_pb2.MultiInferenceRequest(input=examples(1.0))
    for name in ("examples", "another"):
        request.tasks.add(method_name=REGRESS).model_spec.name = name
    ask = lambda: client.prediction.MultiInference(request, timeout=10)  # noqa: E731

    assert refused(ask) == (
        "INVALID_ARGUMENT",
        "All ModelSpecs in a MultiInferenceRequest must access the same model name.",
    )
    request.tasks[1].model_spec.name = ""
    assert refused(ask)[1] == "Found ModelSpec with an empty model name."


# REST


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        (
            "examples/versions/1:regress",
            {"examples": [{"x": 1.0}, {"x": [2.5]}]},
            {"results": [2.0, 5.0]},
        ),
        (
            "examples/versions/1:regress",
            {"context": {"c": 100.5}, "examples": [{"x": 1.0}]},
            {"results": [102.5]},
        ),
        (
            "examples/versions/1:classify",
            {"signature_name": "classify", "examples": [{"x": 1.5}]},
            {"results": [[["low", -3.0], ["high", 3.0]]]},
        ),
    ],
)
def test_rest(http: httpx.Client, path: str, body: Any, answer: Any) -> None:
    response = http.post(f"/v1/models/{path}", json=body)

    assert response.json() == answer
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("method", "body", "message"),
    [
        ("regress", {}, "JSON Value: {} Missing 'examples' key"),
        ("regress", {"examples": 1}, "JSON Value: 1 Expecting 'examples' to be an list/array"),
        ("regress", {"examples": []}, "JSON Value: [] No values in 'examples' array"),
        ("regress", {"examples": [1]}, "JSON Value: 1 Is not object"),
        ("regress", {"examples": [{"x": None}]}, "JSON Value: null is no value of feature x"),
        ("regress", {"examples": [{"x": [1, "a"]}]}, 'JSON Value: [1, "a"] Unexpected element'),
        # An integer is no float: the graph says so.
        ("regress", {"examples": [{"x": 20}]}, ""),
        ("classify", {"signature_name": "nope", "examples": [{"x": 1.5}]}, "No signature was "),
    ],
)
def test_rest_refuses(http: httpx.Client, method: str, body: Any, message: str) -> None:
    response = http.post(f"/v1/models/examples:{method}", json=body)

    assert response.status_code == 400
    assert response.json()["error"].startswith(message)


def test_all_three_are_counted(client: Client, http: httpx.Client) -> None:
    def count(line: str) -> float:
        text = http.get("/monitoring/prometheus/metrics").text
        return next(
            (float(row.split()[-1]) for row in text.splitlines() if row.startswith(line + " ")),
            0.0,
        )

    serving = ":tensorflow:serving:"
    labels = 'model_name="examples",API='
    lines = [
        f'{serving}request_latency_count{{{labels}"Classify",entrypoint="GRPC"}}',
        f'{serving}request_latency_count{{{labels}"regress",entrypoint="REST"}}',
        f'{serving}runtime_latency_count{{{labels}"Regress",runtime="TF1"}}',
        f'{serving}request_example_counts_sum{{model="examples"}}',
        f'{serving}request_example_count_total{{model="examples"}}',
        f'{serving}request_count{{model_name="examples",status="OK"}}',
    ]
    before = [count(line) for line in lines]
    classify(client, "classify", examples(1.0))
    http.post("/v1/models/examples:regress", json={"examples": [{"x": 1.0}]}).raise_for_status()
    multi(client, ("", REGRESS))

    assert [count(line) - b for line, b in zip(lines, before, strict=True)] == [1, 1, 1, 2, 2, 2]


# Loaded in this process


def test_method_names_count_only_with_the_flag(model: Path) -> None:
    from tensorflow_serving.apis import model_pb2

    from serving.embedded import examples as calls

    servable = Servable.load("m", 1, model / "1", LoadOptions(check_method_name=True))
    for check, signature, wanted in (
        (calls.regress, "serving_default", None),
        (calls.classify, "classify", None),
        (calls.regress, "flat", f"regression signature method_name to be {REGRESS}. Was: "),
        (calls.classify, "labels", f"classification signature method_name to be {CLASSIFY}. Was: "),
    ):
        spec = model_pb2.ModelSpec(signature_name=signature)
        if wanted is None:
            check(servable, spec, examples(1.0))
            continue
        with pytest.raises(StatusError, match="Expected " + wanted):
            check(servable, spec, examples(1.0))
    servable.retire()


def test_warm_up_replays_every_kind(model: Path, tmp_path: Path) -> None:
    logs = [prediction_log_pb2.PredictionLog() for _ in range(4)]
    logs[0].classify_log.request.input.CopyFrom(examples(1.0))
    logs[0].classify_log.request.model_spec.signature_name = "classify"
    logs[1].regress_log.request.input.CopyFrom(examples(1.0))
    task = logs[2].multi_inference_log.request.tasks.add(method_name=REGRESS)
    task.model_spec.name = "whatever"
    logs[2].multi_inference_log.request.input.CopyFrom(examples(1.0))
    servable = Servable.load("m", 1, model / "1", LoadOptions())
    (tmp_path / FILE).parent.mkdir()

    def write(*records: prediction_log_pb2.PredictionLog) -> None:
        with tf.io.TFRecordWriter(str(tmp_path / FILE)) as writer:
            for record in records:
                writer.write(record.SerializeToString())

    write(*logs)
    assert warm_up(servable, tmp_path) == 4

    logs[3].regress_log.request.model_spec.signature_name = "wide"
    logs[3].regress_log.request.input.CopyFrom(examples(1.0))
    write(*logs)
    with pytest.raises(StatusError, match="Expected output Tensor shape"):
        warm_up(servable, tmp_path)

    logs[3].session_run_log.SetInParent()
    write(logs[3])
    with pytest.raises(StatusError, match="Unsupported log_type for warmup: session_run_log"):
        warm_up(servable, tmp_path)
    servable.retire()
