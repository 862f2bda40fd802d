"""Whatever stands in the spool, the parser gives rows of the schema or one of its reasons."""

from __future__ import annotations

import base64
import gzip
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perennial.records import hash_key, masked_column, prediction_schema, stored_type
from perennial.spec import Feature, FeatureType, ModelSpec
from serving import payload
from serving.capture import CLIENT_LEFT, Reason, Rows, Unparsable, parse_line
from serving.protos import tfserving_pb2 as pb
from tests.support.traffic import float_tensor, int_tensor, predict_request, string_tensor

SECRET = b"secret"
SPEC = ModelSpec.model_validate(
    {
        "name": "trips",
        "owner": "tests",
        "data": {
            "features": {
                "city": {"type": "string"},
                "email": {"type": "string", "sensitive": "hash"},
                "secret": {"type": "string", "sensitive": "drop"},
                "distance": {"type": "float"},
                "stops": {"type": "int"},
            },
            "label": {"name": "late"},
            "output": "late",
            "routing_key": "email",
            "label_horizon": "1h",
        },
        "evaluation": {"gates": [{"metric": "log_loss"}]},
    }
)
SPECS = {"trips": SPEC}


def frame(message: bytes, compressed: bool = False) -> bytes:
    content = gzip.compress(message) if compressed else message
    return bytes([compressed]) + len(content).to_bytes(4, "big") + content


def reply(*scores: float, version: int = 3) -> bytes:
    message = pb.PredictResponse(outputs={"late": float_tensor(*scores)})
    message.model_spec.version.value = version
    return frame(message.SerializeToString())


def line(**given: Any) -> bytes:
    """A line as the router writes it; `request` and `reply` are bodies."""
    fields: dict[str, Any] = {
        "version": "2",
        "time": "1700000000.000123",
        "duration": "7",
        "arm": "stable",
        "cluster": "stable",
        "route": "split",
        "model": "trips",
        "versions": "3:4",
        "http": "200",
        "grpc": "0",
        "flags": "-",
        "attempt": "1",
        "request": frame(predict_request().SerializeToString()),
        "reply": reply(0.25),
        "path": "/tensorflow.serving.PredictionService/Predict",
        "request_encoding": "-",
        "reply_encoding": "-",
        "request_id": "r-1",
        "key": "-",
        **given,
    }
    for name, prefix in (("request", b"a1:9:"), ("reply", b"")):
        body = fields[name]
        if isinstance(body, bytes):
            fields[name] = prefix + b"%d:" % len(body) + base64.b64encode(body)
    return b"\t".join(v if isinstance(v, bytes) else v.encode() for v in fields.values())


def read(**given: Any) -> list[dict[str, Any]]:
    return rows_of(line(**given))


def rows_of(content: bytes) -> list[dict[str, Any]]:
    """The rows of one line, by the schema."""
    rows = Rows(SPECS, SECRET)
    rows.add(parse_line(content))
    [(model, hour, table)] = rows.tables()
    assert model == "trips"
    assert table.schema == prediction_schema(SPEC)
    table.validate(full=True)
    found = table.to_pylist()
    assert {row["time"].replace(minute=0, second=0, microsecond=0) for row in found} == {hour}
    assert rows.counts().total() == len(found)
    return found


def reason(**given: Any) -> Reason:
    with pytest.raises(Unparsable) as error:
        read(**given)
    return error.value.reason


def test_a_whole_line() -> None:
    [row] = read(key="someone@example.org")
    assert row["time"].isoformat() == "2023-11-14T22:13:20.000123+00:00"
    assert (row["version"], row["score"], row["latency_ms"]) == (3, 0.25, 7.0)
    assert row["key_hash"] == hash_key(SECRET, "someone@example.org") == row["feature_email"]
    assert row["feature_secret"] is None


@pytest.mark.parametrize(
    ("given_fields", "expected"),
    [
        ({"version": "1"}, Reason.LINE),
        ({"versions": "3", "arm": "canary", "path": "/v1/x"}, Reason.LINE),
        ({"time": "soon"}, Reason.LINE),
        ({"time": "99999999999999.0"}, Reason.LINE),
        ({"grpc": "many"}, Reason.LINE),
        ({"request": "a1:x:3:AAAA"}, Reason.LINE),
        ({"request": "a1:1:3:A?=="}, Reason.BODY),
        ({"request": "a1:1:7:AAAA"}, Reason.BODY),
        ({"request": "a1:1:-7:"}, Reason.BODY),
        ({"request": "a1:1:999999:"}, Reason.OVER_CAP),
        ({"reply": "999999:"}, Reason.OVER_CAP),
        ({"request_id": "-"}, Reason.REQUEST_ID),
        ({"request_id": "x" * 201}, Reason.REQUEST_ID),
        ({"request_id": "a b"}, Reason.REQUEST_ID),
        ({"request": b""}, Reason.BODY),
        ({"request": b"\0\0\0\0\1"}, Reason.BODY),
        ({"request": frame(b"\xff\xff")}, Reason.BODY),
        ({"request": b"\1\0\0\0\2xx", "request_encoding": "gzip"}, Reason.BODY),
        ({"request": b"\1\0\0\0\2xx", "request_encoding": "snappy"}, Reason.BODY),
        ({"request": frame(predict_request("other").SerializeToString())}, Reason.UNKNOWN_MODEL),
        ({"reply": frame(b"")}, Reason.SCORE),
        ({"reply": reply(0.1, 0.2)}, Reason.SCORE),
        ({"reply": "-"}, Reason.BODY),
        ({"path": "/v1/models/trips:predict", "request": b"{"}, Reason.BODY),
        ({"path": "/v1/models/trips:predict", "request": b"[1]"}, Reason.FEATURES),
        ({"path": "/v1/models/x:predict", "request": b"{}"}, Reason.UNKNOWN_MODEL),
    ],
)
def test_what_cannot_be_read_has_its_reason(given_fields: dict[str, Any], expected: Reason) -> None:
    assert reason(**given_fields) is expected


def test_a_bomb_is_not_unpacked() -> None:
    bomb = frame(bytes(200 << 20), compressed=True)
    assert len(bomb) < 1 << 20
    assert reason(request=bomb, request_encoding="gzip") is Reason.BODY


def test_gzip() -> None:
    packed = frame(predict_request(rows=2).SerializeToString(), compressed=True)
    found = read(request=packed, request_encoding="gzip", reply=reply(0.5, 0.75))
    assert [row["score"] for row in found] == [0.5, 0.75]


def test_a_failed_call_counts_even_when_its_features_cannot_be_read() -> None:
    lacking = predict_request()
    del lacking.inputs["city"]
    body = frame(lacking.SerializeToString())
    assert reason(request=body) is Reason.FEATURES
    [row] = read(request=body, grpc="3", reply="-")
    assert (row["status"], row["score"], row["feature_distance"]) == (3, None, None)
    [row] = read(request=b"garbage", grpc="3", reply="-")
    assert (row["status"], row["version"]) == (3, 0)


def test_who_was_asked_and_who_answered() -> None:
    [row] = read(cluster="canary_or_stable", arm="stable")
    assert (row["assigned"], row["arm"]) == ("canary", "stable")
    [row] = read(cluster="canary_or_stable_rest", arm="-", grpc="14", reply="-")
    assert (row["assigned"], row["arm"], row["status"]) == ("canary", "canary", 14)


def test_a_call_split_as_another_model_is_no_experiment() -> None:
    assert read(model="fares")[0]["route"] == "default"
    assert read(model="fares", route="forced")[0]["route"] == "forced"
    assert read(model="-", route="default")[0]["route"] == "default"


def test_a_client_that_left() -> None:
    [row] = read(grpc="-", http="0", reply="-")
    assert (row["status"], row["score"]) == (CLIENT_LEFT, None)


ONE = {"city": "Graz", "email": "a", "secret": "b", "distance": 1.0, "stops": 2}


@pytest.mark.parametrize(
    ("request_body", "reply_body", "scores"),
    [
        ({"instances": [ONE]}, {"predictions": [0.5]}, [0.5]),
        ({"instances": [ONE, ONE]}, {"predictions": [[0.5], [1]]}, [0.5, 1.0]),
        ({"instances": [ONE]}, {"predictions": [{"late": 0.5, "other": 1}]}, [0.5]),
        ({"inputs": {k: [v, v] for k, v in ONE.items()}}, {"outputs": [0.5, 0.25]}, [0.5, 0.25]),
        ({"inputs": {k: [[v]] for k, v in ONE.items()}}, {"outputs": {"late": [[0.5]]}}, [0.5]),
        ({"instances": [{**ONE, "city": {"b64": "R3Jheg=="}}]}, {"predictions": [0.5]}, [0.5]),
    ],
)
def test_the_forms_of_rest(request_body: Any, reply_body: Any, scores: list[float]) -> None:
    found = read(
        path="/v1/models/trips/versions/12:predict",
        grpc="-",
        request=json.dumps(request_body).encode(),
        reply=json.dumps(reply_body).encode(),
    )
    assert [row["score"] for row in found] == scores
    assert {row["version"] for row in found} == {12}
    assert {row["feature_city"] for row in found} == {"Graz"}


@pytest.mark.parametrize(
    ("http", "status"), [("200", 0), ("404", 5), ("400", 3), ("503", 14), ("500", 13)]
)
def test_rest_statuses(http: str, status: int) -> None:
    body = json.dumps({"instances": [ONE]}).encode()
    answer = b'{"predictions": [1.0]}'
    [row] = read(path="/v1/models/trips:predict", grpc="-", http=http, request=body, reply=answer)
    assert row["status"] == status


@pytest.mark.parametrize(
    ("given_fields", "version"),
    [
        ({}, 3),
        ({"arm": "canary"}, 4),
        ({"arm": "shadow"}, 4),
        ({"versions": "0:4"}, 0),
        ({"versions": "-"}, 0),
        ({"http": "503"}, 0),
        ({"path": "/v1/models/trips/versions/12:predict"}, 12),
    ],
)
def test_a_rest_reply_is_of_the_version_that_its_pool_serves_alone(
    given_fields: dict[str, Any], version: int
) -> None:
    body, answer = json.dumps({"instances": [ONE]}).encode(), b'{"predictions": [1.0]}'
    rest = {"path": "/v1/models/trips:predict", "grpc": "-", "request": body, "reply": answer}
    [row] = read(**{**rest, **given_fields})
    assert row["version"] == version


def test_a_tab_in_a_header_spoils_its_own_line_only() -> None:
    [row] = read(key="a\tb")
    assert row["key_hash"] == hash_key(SECRET, "a\tb")


@pytest.mark.parametrize(
    ("feature", "values", "stored"),
    [
        ({"type": "string", "sensitive": "drop"}, ["a", "b"], [None, None]),
        ({"type": "int", "sensitive": "hash"}, [7, None], [hash_key(SECRET, "7"), None]),
        ({"type": "string", "sensitive": "hash"}, ["", "a"], ["", hash_key(SECRET, "a")]),
        ({"type": "string", "sensitive": "redact"}, ["a", "", None], [True, False, None]),
        (
            {"type": "float", "sensitive": "bucket", "edges": [0.0, 10.0]},
            [-0.5, 0.0, 9.9, 10.0, math.inf, math.nan, None],
            [0, 1, 1, 2, 2, None, None],
        ),
        ({"type": "int", "sensitive": "bucket", "edges": [18, 65]}, [17, 18, 99], [0, 1, 2]),
        ({"type": "bool"}, [True, None], [True, None]),
    ],
)
def test_masks(feature: dict[str, Any], values: list[Any], stored: list[Any]) -> None:
    column = masked_column(Feature.model_validate(feature), values, SECRET)
    assert column.to_pylist() == stored
    assert column.type == stored_type(Feature.model_validate(feature))


@pytest.mark.parametrize(
    ("dtype", "code"),
    [("<f4", 1), ("<f8", 2), ("<i4", 3), ("u1", 4), ("<i2", 5), ("<i8", 9), ("?", 10), ("<f2", 19)],
)
def test_tensor_content_and_typed_fields_agree(dtype: str, code: int) -> None:
    values = np.array([1, 0, 1], dtype)
    shape = float_tensor(0, 0, 0).tensor_shape
    packed = pb.TensorProto(dtype=code, tensor_shape=shape, tensor_content=values.tobytes())
    field = payload._DTYPES[code][1]
    typed = pb.TensorProto(dtype=code, tensor_shape=shape)
    getattr(typed, field).extend(values.view("<u2").tolist() if code == 19 else values.tolist())
    assert payload.tensor(packed) == payload.tensor(typed) == values.tolist()


def test_bfloat16_and_repeated_values() -> None:
    proto = pb.TensorProto(
        dtype=14, tensor_shape=float_tensor(0, 0).tensor_shape, half_val=[0x3F80]
    )
    assert payload.tensor(proto) == [1.0, 1.0]


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([(), (1,), (1, 1), (2,)]))
def test_one_row_read_from_its_bytes_is_the_tensor(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    kind, dtype, field, values = data.draw(
        st.sampled_from(
            [
                (FeatureType.FLOAT, 1, "float_val", st.floats(width=32)),
                (FeatureType.STRING, 7, "string_val", st.text(max_size=150).map(str.encode)),
                (FeatureType.INT, 9, "int64_val", st.integers(-(2**63), 2**63 - 1)),
                (FeatureType.BOOL, 10, "bool_val", st.booleans()),
            ]
        )
    )
    proto = pb.TensorProto(dtype=dtype)
    proto.tensor_shape.dim.extend(pb.TensorShapeProto.Dim(size=size) for size in shape)
    getattr(proto, field).extend(data.draw(st.lists(values, min_size=1, max_size=2)))
    raw = proto.SerializeToString()
    try:
        expected = payload._read_any(raw, kind)
    except payload.Malformed:
        with pytest.raises(payload.Malformed):
            payload.tensor_reader(kind)(raw)
        return
    found = payload.tensor_reader(kind)(raw)
    np.testing.assert_equal(found, expected)
    assert [type(value) for value in found] == [type(value) for value in expected]


def test_the_usual_call_is_read_from_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    request = predict_request()
    monkeypatch.delattr(payload, "_read_any")
    for name, feature in SPEC.data.features.items():
        raw = request.inputs[name].SerializeToString()
        assert len(payload.tensor_reader(feature.type)(raw)) == 1


@pytest.mark.parametrize(
    "proto",
    [
        pb.TensorProto(dtype=1, tensor_shape=float_tensor(0, 0).tensor_shape, tensor_content=b"x"),
        pb.TensorProto(dtype=1, tensor_shape=float_tensor(0).tensor_shape),
        pb.TensorProto(dtype=99, tensor_shape=float_tensor(0).tensor_shape),
        pb.TensorProto(
            dtype=1,
            tensor_shape=pb.TensorShapeProto(dim=[pb.TensorShapeProto.Dim(size=1 << 40)]),
            float_val=[1.0],
        ),
        pb.TensorProto(
            dtype=1,
            tensor_shape=pb.TensorShapeProto(dim=[pb.TensorShapeProto.Dim(size=-1)]),
        ),
        pb.TensorProto(dtype=4, tensor_shape=float_tensor(0).tensor_shape, int_val=[1 << 20]),
    ],
)
def test_a_tensor_that_lies_is_malformed(proto: pb.TensorProto) -> None:
    with pytest.raises(payload.Malformed):
        payload.tensor(proto)


def test_no_value_changes_its_type_silently() -> None:
    def columns(name: str, tensor: pb.TensorProto) -> Any:
        request = predict_request()
        request.inputs[name].CopyFrom(tensor)
        raw = {key: value.SerializeToString() for key, value in request.inputs.items()}
        features = SPEC.data.features
        readers = {key: payload.tensor_reader(one.type) for key, one in features.items()}
        read = payload.grpc_columns(raw, readers)
        return dict(zip(SPEC.data.features, read, strict=True))

    for name, tensor in (
        ("stops", float_tensor(1.5)),
        ("distance", string_tensor("1")),
        ("city", int_tensor(1)),
        ("stops", int_tensor(1, 2)),
    ):
        with pytest.raises(payload.Malformed):
            columns(name, tensor)
    assert columns("distance", int_tensor(3))["distance"] == [3.0]
    assert math.isnan(columns("distance", float_tensor(float("nan")))["distance"][0])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_refused_in_order(content: bytes) -> None:
    with pytest.raises(Unparsable):
        parse_line(content)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_line_gives_rows_or_a_reason(data: st.DataObject) -> None:
    good = line()
    at = data.draw(st.integers(0, len(good) - 1))
    length = data.draw(st.integers(0, 20))
    damaged = good[:at] + data.draw(st.binary(max_size=20)) + good[at + length :]
    try:
        assert rows_of(damaged)
    except Unparsable:
        pass


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["0", "3", "-"]), st.booleans())
def test_any_body_gives_rows_or_a_reason(body: bytes, status: str, framed: bool) -> None:
    try:
        read(request=frame(body) if framed else body, grpc=status)
    except Unparsable:
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "instances": st.lists(
                st.fixed_dictionaries(dict.fromkeys(ONE, JSON)) | JSON, max_size=3
            ),
            "inputs": st.fixed_dictionaries(dict.fromkeys(ONE, JSON)) | JSON,
        },
    ),
    st.dictionaries(st.sampled_from(["predictions", "outputs"]), JSON),
)
def test_any_json_gives_rows_or_a_reason(request_body: Any, reply_body: Any) -> None:
    try:
        read(
            path="/v1/models/trips:predict",
            grpc="-",
            request=json.dumps(request_body).encode(),
            reply=json.dumps(reply_body).encode(),
        )
    except Unparsable:
        pass
