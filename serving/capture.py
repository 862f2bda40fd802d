"""One captured call, from the router's line to rows of the prediction log.

`parse_line` reads the line's fields (`serving.router.envoy.LINE`); `Rows.add` reads the bodies,
gRPC or REST. Both raise `Unparsable` with one of few reasons, so that what could not be read is
counted by reason and kept apart. `Rows` holds a batch column by column, with no object per row, and
masks whole columns: a record must cost little (`make bench-recorder`).
"""

from __future__ import annotations

import binascii
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

from perennial.records import hashed_column, masked_column, prediction_schema
from perennial.spec import ModelSpec
from serving import payload
from serving.protos import tfserving_pb2 as pb
from serving.router.envoy import LINE, LINE_VERSION

MAX_BODY_BYTES: Final = 64 << 20
"""A body that unpacks to more is refused."""

CLIENT_LEFT: Final = -1

MAX_FAILED_ROWS: Final = 100
"""A failed call of more examples is one row without features: nobody computed anything for it, so
that it must not cost much to record."""

_FIELDS = LINE.count("\t") + 1
_VERSION = LINE_VERSION.encode()
_ABSENT = b"-"
_UNKNOWN, _MAX_STATUS = 2, 999
_FRAME = struct.Struct(">BI")
_HOUR_US = 3_600_000_000
_END_OF_TIME_US = 100_000_000_000_000_000
_REQUEST_ID = re.compile(rb"[!-~]{1,200}")
# Place of an arm's version in `stable:canary`.
_ARMS = {b"stable": 0, b"canary": 1, b"shadow": 1}
_ASSIGNED = {
    b"canary": "canary",
    b"canary_rest": "canary",
    b"canary_or_stable": "canary",
    b"canary_or_stable_rest": "canary",
    b"canary_shadow": "shadow",
    b"canary_shadow_rest": "shadow",
}
_REST_PATH = re.compile(r"/v1/models/([^/:?]+)(?:/versions/(\d{1,18})|/labels/[^/:?]+)?:predict")
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


class Call(NamedTuple):
    """One line of the spool.

    Attributes:
        is_rest: else gRPC.
        declared_version: of a REST call, what the answering pool serves as the routes say; 0:
            unknown. The reply doesn't name it.
        time_us: when it arrived, in microseconds since 1970.
        status: gRPC status code; REST's is translated; -1: the client went away.
        request, reply: bodies; None where larger than the router copies.
        request_bytes, reply_bytes: their sizes all the same.
    """

    time_us: int
    latency_ms: float
    arm: str
    assigned: str
    route: str
    routed_model: str
    status: int
    worker: bytes
    sequence: int
    request_bytes: int
    request: bytes | None
    reply_bytes: int
    reply: bytes | None
    path: str
    request_encoding: bytes
    reply_encoding: bytes
    request_id: str
    routing_key: str
    is_rest: bool
    declared_version: int


def parse_line(line: bytes) -> Call:
    """Reads one line, without its newline.

    Raises:
        Unparsable: `line`, `body` or `request_id`.
    """
    fields = line.split(b"\t", _FIELDS - 1)
    if len(fields) != _FIELDS or fields[0] != _VERSION:
        raise Unparsable(Reason.LINE, f"{len(fields)} fields of {_FIELDS}")
    _, time, duration, arm, cluster, route, model, versions, http, grpc, _, _ = fields[:12]
    request, reply, path, request_encoding, reply_encoding, request_id, key = fields[12:]
    try:
        time_us = round(float(time) * 1e6)
        latency_ms = 0.0 if duration == _ABSENT else float(duration)
        worker, sequence, request_size, request = request.split(b":", 3)
        reply_size, reply = (b"0", b"") if reply == _ABSENT else reply.split(b":", 1)
        number, request_bytes, reply_bytes = int(sequence), int(request_size), int(reply_size)
        is_rest = path.startswith(b"/v1/")
        status = 0 if grpc == b"0" else _status(http, grpc, is_rest)
        version = _declared(versions, arm) if is_rest else 0
    except (ValueError, OverflowError, IndexError) as error:
        raise Unparsable(Reason.LINE, str(error)) from None
    if not 0 <= time_us < _END_OF_TIME_US:
        raise Unparsable(Reason.LINE, f"time {time[:30]!r}")
    if not _REQUEST_ID.fullmatch(request_id) or request_id == _ABSENT:
        raise Unparsable(Reason.REQUEST_ID, repr(request_id[:50]))
    assigned = _ASSIGNED.get(cluster, "stable")
    return Call(
        time_us,
        latency_ms,
        # Without a host nobody answered; the status says so.
        assigned if arm == _ABSENT else _word(arm),
        assigned,
        _word(route),
        _word(model),
        status,
        worker,
        number,
        request_bytes,
        _body(request_bytes, request),
        reply_bytes,
        _body(reply_bytes, reply),
        path.decode("utf-8", "replace"),
        request_encoding,
        reply_encoding,
        request_id.decode(),
        _text(key),
        is_rest,
        version,
    )


class Rows:
    """The rows of a batch of calls, column by column and masked, per model and hour.

    Args:
        secret: that routing keys and `hash` features are hashed with.
    """

    def __init__(self, specs: Mapping[str, ModelSpec], secret: bytes) -> None:
        self._specs = specs
        self._secret = secret
        self._models: dict[str, _Columns] = {}

    def add(self, call: Call) -> None:
        """Takes one call: a row per example.

        A call that failed and whose features can't be read is one row without features: its failure
        counts all the same.

        Raises:
            Unparsable: with the reason; nothing of the call was taken.
        """
        if call.request is None:
            raise Unparsable(Reason.OVER_CAP, f"request of {call.request_bytes} bytes")
        model, version, found = call.routed_model, 0, None
        try:
            if call.is_rest:
                model, version, found = _read_rest(call, call.request)
            else:
                model, found = _read_grpc(call, call.request)
        except payload.Malformed as error:
            if call.status == 0 or model not in self._specs:
                raise Unparsable(Reason.BODY, str(error)) from None
        table = self._table(model)
        spec = table.spec
        columns = None
        try:
            if found is not None and call.is_rest:
                columns = payload.rest_columns(found, spec.data.features)
            elif found is not None:
                columns = payload.grpc_columns(found, table.readers)
        except payload.Malformed as error:
            if call.status == 0:
                raise Unparsable(Reason.FEATURES, str(error)) from None
        if columns and call.status != 0 and len(columns[0]) > MAX_FAILED_ROWS:
            columns = None
        count = len(columns[0]) if columns else 1
        if columns is None:
            columns = [[None]] * len(spec.data.features)
        scores: Sequence[float | None] = [None] * count
        if call.status == 0:
            version, scores = _answer(call, spec, count, version)
        # Split by another model's salt is not split by this one's.
        route = "default" if call.route == "split" and call.routed_model != model else call.route
        table.append(call, route, version, columns, scores)

    def _table(self, model: str) -> _Columns:
        if model not in self._models:
            if model not in self._specs:
                raise Unparsable(Reason.UNKNOWN_MODEL, repr(model[:50]))
            self._models[model] = _Columns(self._specs[model])
        return self._models[model]

    def counts(self) -> Counter[tuple[str, str, str]]:
        """How many rows of each (model, arm, route)."""
        counts: Counter[tuple[str, str, str]] = Counter()
        for model, columns in self._models.items():
            for arm, route, rows in zip(
                columns.shared("arm"), columns.shared("route"), columns.counts, strict=True
            ):
                counts[model, arm, route] += rows
        return counts

    def newest_us(self) -> int | None:
        """Time of the newest call."""
        times = [time for columns in self._models.values() for time in columns.shared("time")]
        return max(times, default=None)

    def tables(self) -> Iterator[tuple[str, datetime, pa.Table]]:
        """(model, start of the hour, its rows by `records.prediction_schema`)."""
        for model, columns in self._models.items():
            if not columns.counts:
                continue
            table = columns.table(self._secret)
            hours = np.repeat(np.array(columns.shared("time")) // _HOUR_US, columns.counts)
            for hour in np.unique(hours):
                start = datetime.fromtimestamp(int(hour) * 3600, UTC)
                yield model, start, table.filter(pa.array(hours == hour))


class _Columns:
    """One model's rows: per call what its rows share, per row its features and its score.

    Long lists of plain values: an object per call would keep the garbage collector busy.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        features = spec.data.features
        self.readers = {name: payload.tensor_reader(one.type) for name, one in features.items()}
        self.counts: list[int] = []
        self._calls: list[Any] = []
        self._features: list[list[Any]] = [[] for _ in features]
        self._scores: list[float | None] = []

    def append(
        self,
        call: Call,
        route: str,
        version: int,
        columns: list[list[Any]],
        scores: Sequence[float | None],
    ) -> None:
        self._calls += (
            call.time_us,
            call.arm,
            route,
            call.request_id,
            call.routing_key,
            call.latency_ms,
            call.assigned,
            version,
            call.status,
        )
        self.counts.append(len(scores))
        for column, values in zip(self._features, columns, strict=True):
            column.extend(values)
        self._scores.extend(scores)

    def shared(self, name: str) -> list[Any]:
        """What the calls' rows share, [calls]: one of `_SHARED`."""
        return self._calls[_SHARED.index(name) :: len(_SHARED)]

    def table(self, secret: bytes) -> pa.Table:
        schema = prediction_schema(self.spec)
        shared = {name: self.shared(name) for name in _SHARED}
        shared["key_hash"] = hashed_column(secret, shared["key_hash"])
        columns = {name: pa.array(v, schema.field(name).type) for name, v in shared.items()}
        counts = np.array(self.counts)
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        if len(starts) > len(counts):
            of_call = pa.array(np.repeat(np.arange(len(counts)), counts))
            columns = {name: column.take(of_call) for name, column in columns.items()}
        columns["row"] = pa.array(np.arange(len(starts)) - starts, pa.int32())
        columns["score"] = pa.array(self._scores, pa.float64())
        for (name, feature), values in zip(
            self.spec.data.features.items(), self._features, strict=True
        ):
            columns[f"feature_{name}"] = masked_column(feature, values, secret)
        return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


_SHARED = (
    "time",
    "arm",
    "route",
    "request_id",
    "key_hash",
    "latency_ms",
    "assigned",
    "version",
    "status",
)


def _read_grpc(call: Call, content: bytes) -> tuple[str, Mapping[str, bytes]]:
    request = _parse(pb.RawPredictRequest, _message(content, call.request_encoding))
    return request.model_spec.name, request.inputs


def _read_rest(call: Call, content: bytes) -> tuple[str, int, Any]:
    match = _REST_PATH.match(call.path)
    if match is None:
        raise payload.Malformed("the path names no model")
    request = payload.read_json(_unzip(content, call.request_encoding))
    return match[1], int(match[2] or 0), request


def _answer(call: Call, spec: ModelSpec, count: int, version: int) -> tuple[int, list[float]]:
    """The served version and the `count` scores of an answered call."""
    if call.reply is None:
        raise Unparsable(Reason.OVER_CAP, f"reply of {call.reply_bytes} bytes")
    output = spec.data.output
    try:
        if call.is_rest:
            reply: Any = payload.read_json(_unzip(call.reply, call.reply_encoding))
        else:
            reply = _parse(pb.RawPredictResponse, _message(call.reply, call.reply_encoding))
            version = reply.model_spec.version.value
    except payload.Malformed as error:
        raise Unparsable(Reason.BODY, str(error)) from None
    try:
        if call.is_rest:
            scores = payload.rest_scores(reply, output, count)
            return version or call.declared_version, scores
        return version, payload.grpc_scores(reply.outputs, output, count)
    except payload.Malformed as error:
        raise Unparsable(Reason.SCORE, str(error)) from None


def _status(http: bytes, grpc: bytes, is_rest: bool) -> int:
    if grpc != _ABSENT:
        status = int(grpc)
        return status if 0 <= status <= _MAX_STATUS else _UNKNOWN
    code = 0 if http == _ABSENT else int(http)
    if code == 0 or (code == 200 and not is_rest):
        return CLIENT_LEFT
    if code == 200:
        return 0
    return _GRPC_OF_HTTP.get(code, 13 if code >= 500 else _UNKNOWN)


def _declared(versions: bytes, arm: bytes) -> int:
    """The answering arm's version, of `stable:canary`."""
    if versions == _ABSENT or arm not in _ARMS:
        return 0
    return int(versions.split(b":")[_ARMS[arm]])


def _text(field: bytes) -> str:
    return "" if field == _ABSENT else field.decode("utf-8", "replace")


# For what the router writes: few words, again and again.
_word = lru_cache(maxsize=1024)(_text)


def _body(size_bytes: int, encoded: bytes) -> bytes | None:
    """None for a body over the cap."""
    if size_bytes < 0:
        raise Unparsable(Reason.BODY, "negative size")
    if not encoded:
        return None if size_bytes else b""
    try:
        content = binascii.a2b_base64(encoded, strict_mode=True)
    except binascii.Error as error:
        raise Unparsable(Reason.BODY, str(error)) from None
    if len(content) != size_bytes:
        raise Unparsable(Reason.BODY, f"{len(content)} bytes where {size_bytes} were counted")
    return content


def _message(frame: bytes, encoding: bytes) -> bytes:
    """The one message of a unary call: flag (1 byte), length (4), message; flag 1: compressed."""
    flag, size = _FRAME.unpack_from(frame) if len(frame) >= 5 else (2, 0)
    if flag > 1 or size != len(frame) - 5:
        raise payload.Malformed("not one whole gRPC frame")
    return _unzip(frame[5:], encoding) if flag else frame[5:]


def _unzip(content: bytes, encoding: bytes) -> bytes:
    if encoding in (_ABSENT, b"identity"):
        return content
    if encoding not in (b"gzip", b"deflate"):
        raise payload.Malformed(f"encoding {encoding[:20]!r}")
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    try:
        unpacked = unpacker.decompress(content, MAX_BODY_BYTES)
    except zlib.error as error:
        raise payload.Malformed(str(error)) from None
    if not unpacker.eof:
        raise payload.Malformed(f"truncated, or more than {MAX_BODY_BYTES} bytes unpacked")
    return unpacked


def _parse(kind: Any, content: bytes) -> Any:
    try:
        return kind.FromString(content)
    except DecodeError as error:
        raise payload.Malformed(str(error)) from None
