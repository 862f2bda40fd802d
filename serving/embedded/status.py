"""Errors as a client sees them: a gRPC code and a message, over gRPC and over HTTP."""

from __future__ import annotations

from enum import IntEnum

import grpc

MAX_MESSAGE_BYTES = 1024


class Code(IntEnum):
    """The canonical status codes; `tf.errors.OpError.error_code` uses the same numbers."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


GRPC_CODE = {code: grpc.StatusCode[code.name] for code in Code}

HTTP_CODE = {
    Code.OK: 200,
    Code.INVALID_ARGUMENT: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.OUT_OF_RANGE: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.ABORTED: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.CANCELLED: 499,
    Code.UNKNOWN: 500,
    Code.INTERNAL: 500,
    Code.DATA_LOSS: 500,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}


class StatusError(Exception):
    """What a call fails with. `str()` is the form the real server prints: `CODE: message`."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


def invalid(message: str) -> StatusError:
    return StatusError(Code.INVALID_ARGUMENT, message)


def truncated(message: str) -> str:
    """The message as gRPC carries it: at most 1024 bytes."""
    raw = message.encode()
    if len(raw) <= MAX_MESSAGE_BYTES:
        return message
    return raw[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "...TRUNCATED"
