"""The label intake over HTTP: `POST /v1/models/MODEL/labels`, one label or a batch, as JSON.

    {"request_id": "…", "value": 1}
    {"source": "billing", "labels": [{"request_id": "…", "row": 0, "value": 1, "time": "…Z"}, …]}

The answer is that of `RecordLabels`: {"accepted": 1, "duplicates": 0, "conflicts": 0, "future": 0,
"rejected": [{"index": 0, "reason": "not_binary"}]}. Where gRPC answers with an error, HTTP has the
status of `HTTP_STATUS` and {"error": text, "status": gRPC's name}. `GET /healthz` asks for no key.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import orjson
import uvicorn

from perennial.errors import PerennialError
from serving.access import ApiKeys, presented_key
from serving.inbox import Label
from serving.intake import Intake, Taken

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 4 << 20
"""Of a request, as sent and after gunzipping; gRPC's limit is the same."""
MAX_IN_FLIGHT: Final = 64
"""Requests whose body is held at a time; more are told to come again."""
MAX_CONNECTIONS: Final = 512
"""Open at a time; requests beyond them are answered with 503."""
BODY_S: Final = 10.0
"""How long a client may take to send its body."""
UNAUTHENTICATED: Final = "no valid API key: send `authorization: Bearer KEY` or `x-api-key: KEY`"
HTTP_STATUS: Final = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
}
_STATUS: Final = {
    "labels.model": "NOT_FOUND",
    "labels.call": "INVALID_ARGUMENT",
    "labels.busy": "RESOURCE_EXHAUSTED",
    "labels.disk": "UNAVAILABLE",
}
_PATH: Final = re.compile(r"/v1/models/([^/:]+)/labels")
_LABEL_KEYS: Final = ("request_id", "row", "value", "time")
_BACKLOG: Final = 512
_RETRY_AFTER_S: Final = 1

Scope = dict[str, Any]


class _Refused(Exception):
    """A request that is answered with an error.

    Args:
        status: gRPC's name of it.
        http: the HTTP status, where it is not that of `HTTP_STATUS`.
    """

    def __init__(self, status: str, message: str, http: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.http = http or HTTP_STATUS[status]


@dataclass(frozen=True)
class _Call:
    source: str
    labels: list[Label]


class App:
    """The ASGI application over an intake.

    Args:
        keys: what callers must present; None: nobody is asked.
    """

    def __init__(self, intake: Intake, keys: ApiKeys | None) -> None:
        self._intake = intake
        self._keys = keys
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/healthz":
            await _answer(send, 200, {"status": "serving"})
            return
        self._in_flight += 1
        try:
            taken = await self._take(scope, receive)
        except _Refused as error:
            self._intake.metrics.calls.labels("rest", error.status).inc()
            await _answer(send, error.http, {"error": str(error), "status": error.status})
        else:
            self._intake.metrics.calls.labels("rest", "OK").inc()
            await _answer(send, 200, _document(taken))
        finally:
            self._in_flight -= 1

    async def _take(self, scope: Scope, receive: Any) -> Taken:
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        match = _PATH.fullmatch(scope["path"])
        if match is None:
            raise _Refused("NOT_FOUND", "nothing here but /v1/models/MODEL/labels and /healthz")
        if scope["method"] != "POST":
            raise _Refused("INVALID_ARGUMENT", "labels are sent by POST", 405)
        if self._keys and not self._keys.allow(presented_key(headers)):
            raise _Refused("UNAUTHENTICATED", UNAUTHENTICATED)
        if self._in_flight > MAX_IN_FLIGHT:
            raise _Refused("RESOURCE_EXHAUSTED", f"{MAX_IN_FLIGHT} requests are being taken")
        call = _parse(_decoded(headers, await _body(headers, receive)))
        try:
            done = self._intake.submit(match[1], call.source, call.labels)
            return await asyncio.wrap_future(done)
        except PerennialError as error:
            raise _Refused(_STATUS[error.code], error.message) from error


class Server:
    """The application on a port, in a thread of its own, until `stop`.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, intake: Intake, keys: ApiKeys | None, bind: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._socket = socket.create_server((bind, port), family=family, backlog=_BACKLOG)
        config = uvicorn.Config(
            App(intake, keys),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=5,
            limit_concurrency=MAX_CONNECTIONS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="labels-rest"
        )
        self._thread.start()

    def stop(self) -> None:
        """Answers what was sent, then ends."""
        self._server.should_exit = True
        self._thread.join()


async def _answer(send: Any, status: int, document: Mapping[str, Any]) -> None:
    body = json.dumps(document).encode() + b"\n"
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status in (429, 503):
        headers.append((b"retry-after", b"%d" % _RETRY_AFTER_S))
    elif status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    elif status == 405:
        headers.append((b"allow", b"POST"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _body(headers: Mapping[str, str], receive: Any) -> bytes:
    """The whole body, within its bounds of size and time."""
    declared = headers.get("content-length", "0")
    if not declared.isdigit() or int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Refused("INVALID_ARGUMENT", "the client went away")
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        raise _Refused("INVALID_ARGUMENT", f"the body took over {BODY_S:g} s", 408) from None


def _too_large() -> _Refused:
    return _Refused("RESOURCE_EXHAUSTED", f"the body exceeds {MAX_BODY_BYTES} bytes", 413)


def _decoded(headers: Mapping[str, str], body: bytes) -> bytes:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding != "gzip":
        raise _Refused("INVALID_ARGUMENT", f"Content-Encoding {encoding!r}: only gzip", 415)
    decoder = zlib.decompressobj(wbits=31)
    try:
        decoded = decoder.decompress(body, MAX_BODY_BYTES)
    except zlib.error as error:
        raise _Refused("INVALID_ARGUMENT", f"Content-Encoding gzip, but {error}") from error
    if decoder.unconsumed_tail:
        raise _too_large()
    if not decoder.eof:
        raise _Refused("INVALID_ARGUMENT", "the gzip body is cut off")
    return decoded


def _parse(body: bytes) -> _Call:
    """One label or a batch; a wrong form refuses the call, as a wrong protobuf does."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _Refused("INVALID_ARGUMENT", f"the body is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise _Refused("INVALID_ARGUMENT", "the body is no JSON object")
    source = document.pop("source", "")
    if not isinstance(source, str):
        raise _Refused("INVALID_ARGUMENT", "source: expected a string")
    if "labels" not in document:
        return _Call(source, [_label(document, "")])
    entries = document.pop("labels")
    if document:
        raise _unknown(sorted(document)[0], ("labels", "source"))
    if not isinstance(entries, list):
        raise _Refused("INVALID_ARGUMENT", "labels: expected a list")
    return _Call(source, [_label(one, f"labels[{i}].") for i, one in enumerate(entries)])


def _label(entry: Any, place: str) -> Label:
    if not isinstance(entry, dict):
        raise _Refused("INVALID_ARGUMENT", f"{place.rstrip('.')}: expected an object")
    for key in entry:
        if key not in _LABEL_KEYS:
            raise _unknown(place + key, _LABEL_KEYS)
    request_id, row, value = entry.get("request_id"), entry.get("row", 0), entry.get("value")
    if not isinstance(request_id, str):
        raise _Refused("INVALID_ARGUMENT", f"{place}request_id: expected a string")
    if not isinstance(row, int) or isinstance(row, bool):
        raise _Refused("INVALID_ARGUMENT", f"{place}row: expected an integer")
    # true and false are how JSON writes a binary label.
    if not isinstance(value, int | float):
        raise _Refused("INVALID_ARGUMENT", f"{place}value: expected a number")
    return Label(request_id, row, float(value), _time(entry.get("time"), place))


def _time(text: Any, place: str) -> datetime | None:
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
        if found.tzinfo is not None:
            return found.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        pass
    raise _Refused("INVALID_ARGUMENT", f"{place}time: expected RFC 3339 like 2030-01-31T12:00:00Z")


def _unknown(key: str, known: tuple[str, ...]) -> _Refused:
    return _Refused("INVALID_ARGUMENT", f"{key[:50]}: unknown key; known: {', '.join(known)}")


def _document(taken: Taken) -> dict[str, Any]:
    return {
        "accepted": taken.accepted,
        "duplicates": taken.duplicates,
        "conflicts": taken.conflicts,
        "future": taken.future,
        "rejected": [{"index": index, "reason": reason} for index, reason in taken.rejected],
    }
