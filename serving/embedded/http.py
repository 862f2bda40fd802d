"""A small HTTP/1.1 server on httptools, in the event loop that the gRPC server runs in."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast

import httptools

from serving.embedded.status import invalid

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 256 * 1024 * 1024
MAX_PIPELINED = 16
# How long a connection that was told "no" may go on sending before it is closed.
LINGER_S = 2.0
JSON = "application/json"


@dataclass
class Request:
    """One HTTP request."""

    method: str = ""
    path: str = ""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    raw_body: bytearray = field(default_factory=bytearray)
    keep_alive: bool = True

    def body(self) -> bytes:
        """The body, unpacked.

        Raises:
            StatusError: gzip that is broken or unpacks to too much.
        """
        if self.headers.get(b"content-encoding", b"").lower() != b"gzip":
            return bytes(self.raw_body)
        decoder = zlib.decompressobj(wbits=31)
        try:
            body = decoder.decompress(bytes(self.raw_body), MAX_BODY_BYTES)
        except zlib.error as error:
            raise invalid(f"Content-Encoding: gzip, but {error}") from error
        if decoder.unconsumed_tail or not decoder.eof:
            raise invalid(f"the gzip body is cut off or exceeds {MAX_BODY_BYTES} bytes")
        return body


@dataclass(frozen=True)
class Response:
    status: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


Handler = Callable[[Request], Awaitable[Response]]


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
        self._lingering = False
        self._transport: asyncio.Transport

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport and are none.
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._closing = True

    def eof_received(self) -> bool:
        """Keeps a half-closed connection until its requests are answered."""
        self._closing = True
        return self._task is not None

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
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
        if len(self._request.raw_body) + len(body) > MAX_BODY_BYTES:
            raise _TooLarge(f"the body exceeds {MAX_BODY_BYTES} bytes")
        self._request.raw_body += body

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
            if self._transport.is_closing() or self._lingering:
                return
            keep_alive = request.keep_alive and not (self._closing and not self._waiting)
            self._write(response, keep_alive=keep_alive)
            if not keep_alive:
                self._linger()
                return
            if len(self._waiting) < MAX_PIPELINED:
                self._transport.resume_reading()
        self._task = None

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        self._write(Response(status, body), keep_alive=False)
        self._linger()

    def _linger(self) -> None:
        """Ends the connection. A close with bytes unread would reset it and lose the answer."""
        self._lingering = True
        if self._closing:
            self._transport.close()
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._transport.resume_reading()
        asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)

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


def _phrase(status: int) -> str:
    # 499 is the one code that Python does not know.
    return "Client Closed Request" if status == 499 else HTTPStatus(status).phrase
