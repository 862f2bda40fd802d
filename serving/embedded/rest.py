"""The REST interface: predict, status, metadata, and the metrics page.

A small HTTP/1.1 server on httptools, in the event loop that the gRPC server runs in.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import unquote

import httptools
from google.protobuf.json_format import MessageToDict
from tensorflow_serving.apis import get_model_status_pb2

from serving.embedded import jsontensors
from serving.embedded.inference import Asked, Core, version_status
from serving.embedded.status import HTTP_CODE, Code, StatusError, invalid

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 256 * 1024 * 1024
MAX_PIPELINED = 16
_JSON = "application/json"
_WHICH = r"(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
_POST = re.compile(
    rf"/v1/models/(?P<model>[^/:]+){_WHICH}:(?P<method>classify|regress|predict)", re.I
)
_GET = re.compile(rf"/v1/models(?:/(?P<model>[^/:]+))?{_WHICH}(?P<metadata>/metadata)?", re.I)


@dataclass
class Request:
    """One HTTP request."""

    method: str = ""
    path: str = ""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    keep_alive: bool = True


@dataclass(frozen=True)
class Response:
    status: int
    body: bytes
    content_type: str = _JSON
    headers: tuple[tuple[str, str], ...] = ()


class Handler:
    """Answers requests.

    Args:
        metrics_path: where the metrics are; "": nowhere.
        cors: whether to send CORS headers.
    """

    def __init__(self, core: Core, *, metrics_path: str, cors: bool) -> None:
        self._core = core
        self._metrics_path = metrics_path
        self._cors = cors

    async def __call__(self, request: Request) -> Response:
        """Never raises: whatever goes wrong is a response."""
        if request.method == "GET" and request.path == self._metrics_path:
            return Response(200, self._core.metrics.text().encode(), "text/plain")
        if not request.path.startswith("/v1/"):
            return Response(404, b"<html><body>Not Found</body></html>", "text/html")
        headers: tuple[tuple[str, str], ...] = ()
        if self._cors:
            headers = (
                ("Access-Control-Allow-Origin", "*"),
                ("Access-Control-Allow-Methods", "POST, GET"),
                ("Access-Control-Allow-Headers", "Content-Type"),
            )
        try:
            body = await self._answer(request)
            return Response(200, body.encode(), headers=headers)
        except StatusError as error:
            text = json.dumps({"error": error.message}, ensure_ascii=False)
            return Response(HTTP_CODE[error.code], text.encode(), headers=headers)
        except Exception:
            log.exception("%s %s", request.method, request.path)
            return Response(500, b'{"error": "internal error"}', headers=headers)

    async def _answer(self, request: Request) -> str:
        if request.method == "OPTIONS" and self._cors:
            if not request.headers.get(b"origin", b"").startswith((b"http://", b"https://")):
                raise invalid("OPTIONS needs an Origin header that is http:// or https://")
            return ""
        if request.method == "POST" and (match := _POST.fullmatch(request.path)):
            return await self._post(request, match)
        if request.method == "GET" and (match := _GET.fullmatch(request.path)):
            return self._get(match)
        raise self._counted(None, invalid(f"Malformed request: {request.method} {request.path}"))

    async def _post(self, request: Request, match: re.Match[str]) -> str:
        asked = self._asked(match)
        method = match["method"]
        if method in ("classify", "regress"):
            raise self._counted(
                asked,
                StatusError(Code.UNIMPLEMENTED, f"{method} is not served by the embedded server"),
            )
        if method != "predict":
            raise self._counted(asked, invalid(f"Malformed request: POST {request.path}"))
        try:
            document = jsontensors.parse_body(_decoded(request))
            name = jsontensors.signature_name(document)
            row_form = jsontensors.is_row_form(document)
        except StatusError as error:
            raise self._counted(asked, error) from None
        answer = await self._core.predict(
            asked,
            name,
            lambda signature: jsontensors.to_arrays(document, signature),
            entrypoint="REST",
            unknown_signature=lambda name: invalid(
                f'Serving signature name: "{name or "serving_default"}" not found in signature def'
            ),
        )
        return jsontensors.to_json(answer.outputs, row_form=row_form)

    def _get(self, match: re.Match[str]) -> str:
        started = time.perf_counter()
        asked = None
        try:
            if match["model"] is None:
                raise invalid("Missing model name in request.")
            asked = self._asked(match)
            text = self._metadata(asked) if match["metadata"] else self._status(asked)
        except StatusError as error:
            raise self._counted(asked, error) from None
        self._core.metrics.request_count.add(asked.model, "OK")
        self._core.metrics.request_latency.observe(
            asked.model, "", "REST", value=(time.perf_counter() - started) * 1e6
        )
        return text

    def _status(self, asked: Asked) -> str:
        versions = self._core.manager.status(asked.model, asked.version)
        message = get_model_status_pb2.GetModelStatusResponse(
            model_version_status=[version_status(version) for version in versions]
        )
        return json.dumps(_as_dict(message), indent=1)

    def _metadata(self, asked: Asked) -> str:
        servable, signatures = self._core.metadata(asked)
        return json.dumps(
            {
                "model_spec": {
                    "name": servable.model,
                    "signature_name": "",
                    "version": str(servable.version),
                },
                "metadata": {"signature_def": _as_dict(signatures)},
            },
            indent=1,
        )

    def _asked(self, match: re.Match[str]) -> Asked:
        version = match["version"]
        if version is not None and int(version) >= 2**63:
            raise self._counted(None, invalid(f"Failed to convert version: {version} to numeric."))
        return Asked(
            unquote(match["model"]),
            None if version is None else int(version),
            None if match["label"] is None else unquote(match["label"]),
        )

    def _counted(self, asked: Asked | None, error: StatusError) -> StatusError:
        self._core.failed(asked, None, error)
        return error


class Connection(asyncio.Protocol):
    """One client connection; its requests are answered in order."""

    def __init__(self, handler: Handler, connections: set[Connection]) -> None:
        self._handler = handler
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._request = Request()
        self._head_bytes = 0
        self._waiting: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._transport: asyncio.Transport

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._closing = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except _TooLarge as error:
            self._refuse(413, str(error))
        except httptools.HttpParserUpgrade:
            self._refuse(400, "upgrades are not supported")
        except httptools.HttpParserError as error:
            # What a callback raises arrives wrapped.
            cause = error.__context__
            if isinstance(cause, _TooLarge):
                self._refuse(413, str(cause))
            else:
                self._refuse(400, f"malformed HTTP: {error}")

    def drain(self) -> asyncio.Task[None] | None:
        """Closes once what was asked is answered."""
        self._closing = True
        if self._task is None:
            self._transport.close()
        return self._task

    # httptools

    def on_message_begin(self) -> None:
        self._request = Request()
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        self._request.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        self._request.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._request.method = self._parser.get_method().decode()
        self._request.path = self._request.path.partition("?")[0]
        if self._request.headers.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if len(self._request.body) + len(body) > MAX_BODY_BYTES:
            raise _TooLarge(f"the body exceeds {MAX_BODY_BYTES} bytes")
        self._request.body += body

    def on_message_complete(self) -> None:
        self._request.keep_alive = self._parser.should_keep_alive()
        self._waiting.append(self._request)
        if len(self._waiting) >= MAX_PIPELINED:
            self._transport.pause_reading()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._serve())

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _TooLarge(f"the headers exceed {MAX_HEAD_BYTES} bytes")

    async def _serve(self) -> None:
        while self._waiting:
            request = self._waiting.popleft()
            response = await self._handler(request)
            if self._transport.is_closing():
                return
            keep_alive = request.keep_alive and not (self._closing and not self._waiting)
            self._write(response, keep_alive=keep_alive)
            if not keep_alive:
                self._transport.close()
                return
            if len(self._waiting) < MAX_PIPELINED:
                self._transport.resume_reading()
        self._task = None

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        self._write(Response(status, body), keep_alive=False)
        self._transport.close()

    def _write(self, response: Response, *, keep_alive: bool) -> None:
        lines = [
            f"HTTP/1.1 {response.status} {_phrase(response.status)}",
            f"Content-Type: {response.content_type}",
            f"Content-Length: {len(response.body)}",
            *(f"{name}: {value}" for name, value in response.headers),
        ]
        if not keep_alive:
            lines.append("Connection: close")
        self._transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + response.body)


class _TooLarge(Exception):
    """A request that exceeds a bound."""


def _decoded(request: Request) -> bytes:
    if request.headers.get(b"content-encoding", b"").lower() != b"gzip":
        return bytes(request.body)
    decoder = zlib.decompressobj(wbits=31)
    try:
        body = decoder.decompress(bytes(request.body), MAX_BODY_BYTES)
    except zlib.error as error:
        raise invalid(f"Content-Encoding: gzip, but {error}") from error
    if decoder.unconsumed_tail or not decoder.eof:
        raise invalid(f"the gzip body is cut off or exceeds {MAX_BODY_BYTES} bytes")
    return body


def _as_dict(message) -> dict:  # type: ignore[no-untyped-def, type-arg]
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _phrase(status: int) -> str:
    # 499 is the one code that Python does not know.
    return "Client Closed Request" if status == 499 else HTTPStatus(status).phrase
