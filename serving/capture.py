"""One captured call, from the router's line to rows of the prediction log.

`parse_line` reads the line's fields (`serving.router.envoy.LINE`); `rows` reads the bodies, gRPC or
REST, and gives one row per example, masked. Both raise `Unparsable` with one of few reasons, so
that what could not be read is counted by reason and kept apart.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from google.protobuf.message import DecodeError

from perennial.records import hash_key
from perennial.spec import Feature, ModelSpec
from serving import payload
from serving.protos import tfserving_pb2 as pb
from serving.router.envoy import LINE, LINE_VERSION

MAX_BODY_BYTES: Final = 64 << 20
"""A body that unpacks to more is refused."""

CLIENT_LEFT: Final = -1

_FIELDS = LINE.count("\t") + 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_REQUEST_ID = re.compile(r"[!-~]{1,200}")
_REST_PATH = re.compile(r"/v1/models/([^/:?]+)(?:/versions/(\d+)|/labels/[^/:?]+)?:predict")
_GRPC_OF_HTTP = {
    400: 3,
    401: 16,
    403: 7,
    404: 5,
    408: 4,
    409: 10,
    412: 9,
    413: 8,
    429: 8,
    499: 1,
    501: 12,
    503: 14,
    504: 4,
}


class Reason(StrEnum):
    """Why a captured call gave no row."""

    LINE = "line"
    """Torn, from another format version, or not ours."""
    OVER_CAP = "over_cap"
    """A body larger than the router copies."""
    REQUEST_ID = "request_id"
    """Empty, too long or not printable."""
    BODY = "body"
    """Not what its encoding says: base64, frame, gzip, protobuf, JSON."""
    UNKNOWN_MODEL = "unknown_model"
    """No model under care."""
    FEATURES = "features"
    """Answered, and yet not the features that model.yaml names."""
    SCORE = "score"
    """Answered without the output that model.yaml names, one value per row."""


class Unparsable(ValueError):
    """A captured call that gives no row."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Body:
    """One captured body; `content` is None when it was larger than the router copies."""

    size_bytes: int
    content: bytes | None


@dataclass(frozen=True, slots=True)
class Call:
    """One line of the spool."""

    time: datetime
    latency_ms: float
    arm: str
    assigned: str
    route: str
    routed_model: str
    http_status: int
    grpc_status: int | None
    worker: str
    sequence: int
    request: Body
    reply: Body
    path: str
    request_encoding: str
    reply_encoding: str
    request_id: str
    routing_key: str

    @property
    def is_rest(self) -> bool:
        return self.path.startswith("/v1/")

    @property
    def status(self) -> int:
        """gRPC status code; REST's is translated; -1: the client went away."""
        if self.grpc_status is not None:
            return self.grpc_status
        if self.http_status == 0 or (self.http_status == 200 and not self.is_rest):
            return CLIENT_LEFT
        if self.http_status == 200:
            return 0
        return _GRPC_OF_HTTP.get(self.http_status, 13 if self.http_status >= 500 else 2)


def parse_line(line: bytes) -> Call:
    """Reads one line, without its newline.

    Raises:
        Unparsable: `line`, `body` or `request_id`.
    """
    fields = line.split(b"\t", _FIELDS - 1)
    if len(fields) != _FIELDS or fields[0] != LINE_VERSION.encode():
        raise Unparsable(Reason.LINE, f"{len(fields)} fields of {_FIELDS}")
    text = ["" if field == b"-" else field.decode("utf-8", "replace") for field in fields]
    try:
        time = _EPOCH + timedelta(microseconds=_micros(text[1]))
        latency_ms = float(text[2] or 0)
        http_status = int(text[7] or 0)
        grpc_status = int(text[8]) if text[8] else None
        worker, sequence, request_bytes, request = fields[11].split(b":", 3)
        reply_bytes, reply = fields[12].split(b":", 1) if text[12] else (b"0", b"")
        number, sizes = int(sequence), (int(request_bytes), int(reply_bytes))
    except (ValueError, OverflowError) as error:
        raise Unparsable(Reason.LINE, str(error)) from None
    if not _REQUEST_ID.fullmatch(text[16]):
        raise Unparsable(Reason.REQUEST_ID, repr(text[16][:50]))
    assigned = "canary" if text[4].startswith("canary") else "stable"
    return Call(
        time=time,
        latency_ms=latency_ms,
        # Without a host nobody answered; the status says so.
        arm=text[3] or assigned,
        assigned=assigned,
        route=text[5],
        routed_model=text[6],
        http_status=http_status,
        grpc_status=grpc_status,
        worker=worker.decode("ascii", "replace"),
        sequence=number,
        request=_body(sizes[0], request),
        reply=_body(sizes[1], reply),
        path=text[13],
        request_encoding=text[14],
        reply_encoding=text[15],
        request_id=text[16],
        routing_key=text[17],
    )


def rows(
    call: Call, specs: Mapping[str, ModelSpec], secret: bytes
) -> tuple[str, list[dict[str, Any]]]:
    """The model's name and one masked row per example, by `records.prediction_schema`.

    A call that failed and whose features can't be read is one row without features: its failure
    counts all the same.

    Raises:
        Unparsable: with the reason.
    """
    if call.request.content is None:
        raise Unparsable(Reason.OVER_CAP, f"request of {call.request.size_bytes} bytes")
    read = _read_rest if call.is_rest else _read_grpc
    try:
        model, version, features = read(call, call.request.content, specs)
    except payload.Malformed as error:
        model, spec = call.routed_model, specs.get(call.routed_model)
        if call.status == 0 or spec is None:
            raise Unparsable(Reason.BODY, str(error)) from None
        version, features = 0, None
    if model not in specs:
        raise Unparsable(Reason.UNKNOWN_MODEL, repr(model[:50]))
    spec = specs[model]
    try:
        columns = None if features is None else features()
    except payload.Malformed as error:
        if call.status == 0:
            raise Unparsable(Reason.FEATURES, str(error)) from None
        columns = None
    if columns is None:
        count, columns = 1, {name: [None] for name in spec.data.features}
    else:
        count = len(next(iter(columns.values())))
    scores: Sequence[float | None] = [None] * count
    if call.status == 0:
        version, scores = _answer(call, spec, count, version)
    shared = {
        "request_id": call.request_id,
        "key_hash": hash_key(secret, call.routing_key),
        "time": call.time,
        "latency_ms": call.latency_ms,
        "arm": call.arm,
        "assigned": call.assigned,
        # Split by another model's salt is not split by this one's.
        "route": "default" if call.route == "split" and call.routed_model != model else call.route,
        "version": version,
        "status": call.status,
    }
    masked = {
        f"feature_{name}": _mask(feature, columns[name], secret)
        for name, feature in spec.data.features.items()
    }
    return model, [
        {
            **shared,
            "row": index,
            **{name: values[index] for name, values in masked.items()},
            "score": scores[index],
        }
        for index in range(count)
    ]


_Features = Callable[[], dict[str, list[Any]]]


def _read_grpc(
    call: Call, content: bytes, specs: Mapping[str, ModelSpec]
) -> tuple[str, int, _Features]:
    request = pb.PredictRequest()
    _parse(request, _message(content, call.request_encoding))
    model = request.model_spec.name

    def features() -> dict[str, list[Any]]:
        wanted = specs[model].data.features
        return payload.grpc_columns(request.inputs, wanted)

    return model, 0, features


def _read_rest(
    call: Call, content: bytes, specs: Mapping[str, ModelSpec]
) -> tuple[str, int, _Features]:
    match = _REST_PATH.match(call.path)
    if match is None:
        raise payload.Malformed("the path names no model")
    model, version = match[1], int(match[2] or 0)
    request = payload.read_json(_unzip(content, call.request_encoding))

    def features() -> dict[str, list[Any]]:
        return payload.rest_columns(request, specs[model].data.features)

    return model, version, features


def _answer(call: Call, spec: ModelSpec, count: int, version: int) -> tuple[int, list[float]]:
    """The served version and the `count` scores of an answered call."""
    if call.reply.content is None:
        raise Unparsable(Reason.OVER_CAP, f"reply of {call.reply.size_bytes} bytes")
    output = spec.data.output
    try:
        if call.is_rest:
            reply: Any = payload.read_json(_unzip(call.reply.content, call.reply_encoding))
        else:
            reply = pb.PredictResponse()
            _parse(reply, _message(call.reply.content, call.reply_encoding))
            version = reply.model_spec.version.value
    except payload.Malformed as error:
        raise Unparsable(Reason.BODY, str(error)) from None
    try:
        if call.is_rest:
            return version, payload.rest_scores(reply, output, count)
        return version, payload.grpc_scores(reply.outputs, output, count)
    except payload.Malformed as error:
        raise Unparsable(Reason.SCORE, str(error)) from None


def _mask(feature: Feature, values: list[Any], secret: bytes) -> list[Any]:
    if feature.sensitive == "drop":
        return [None] * len(values)
    if feature.sensitive == "hash":
        return [None if value is None else hash_key(secret, str(value)) for value in values]
    return values


def _micros(text: str) -> int:
    seconds, fraction = text.split(".")
    return int(seconds) * 1_000_000 + int(fraction)


def _body(size_bytes: int, encoded: bytes) -> Body:
    if size_bytes < 0:
        raise Unparsable(Reason.BODY, "negative size")
    if not encoded:
        return Body(size_bytes, None if size_bytes else b"")
    try:
        content = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise Unparsable(Reason.BODY, str(error)) from None
    if len(content) != size_bytes:
        raise Unparsable(Reason.BODY, f"{len(content)} bytes where {size_bytes} were counted")
    return Body(size_bytes, content)


def _message(frame: bytes, encoding: str) -> bytes:
    """The one message of a unary call: flag (1 byte), length (4), message; flag 1: compressed."""
    if len(frame) < 5 or frame[0] > 1 or int.from_bytes(frame[1:5], "big") != len(frame) - 5:
        raise payload.Malformed("not one whole gRPC frame")
    return _unzip(frame[5:], encoding if frame[0] else "")


def _unzip(content: bytes, encoding: str) -> bytes:
    if encoding in ("", "identity"):
        return content
    if encoding not in ("gzip", "deflate"):
        raise payload.Malformed(f"encoding {encoding[:20]!r}")
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    try:
        unpacked = unpacker.decompress(content, MAX_BODY_BYTES)
    except zlib.error as error:
        raise payload.Malformed(str(error)) from None
    if not unpacker.eof:
        raise payload.Malformed(f"truncated, or more than {MAX_BODY_BYTES} bytes unpacked")
    return unpacked


def _parse(message: Any, content: bytes) -> None:
    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise payload.Malformed(str(error)) from None
