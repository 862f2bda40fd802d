"""Errors, by what the caller should do.

    PerennialError
    ├── Retryable    the same call may succeed later: a server that is starting, a lost connection
    ├── Permanent    the same call will fail again: bad input, a corrupt artifact
    ├── NeedsHuman   somebody has to decide or to install something
    └── Conflict     somebody else got there first: reload and decide again

Every error has a stable `code`, a headline, a hint that says what to do, and the offending values.
`exit_code` is what the command line exits with; `dags.operators` maps the classes to Airflow's
retry, fail and skip.
"""

from __future__ import annotations

from typing import Any


class PerennialError(Exception):
    """Base of all errors that Perennial raises on purpose.

    Args:
        code: stable, dotted, lower case: `spec.unknown_key`, `store.checksum`.
        message: what is wrong and where, one line.
        hint: what to do about it, one line, or "".
        **values: the offending values; JSON-serialisable, never a secret.
    """

    exit_code = 1

    def __init__(self, code: str, message: str, *, hint: str = "", **values: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.values = values

    def __str__(self) -> str:
        text = f"{self.message} [{self.code}]"
        return f"{text}\n  hint: {self.hint}" if self.hint else text

    def as_dict(self) -> dict[str, Any]:
        """The error as JSON-serialisable evidence."""
        return {
            "kind": type(self).__name__,
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "values": self.values,
        }

    def __reduce__(self) -> Any:
        return (_rebuild, (type(self), self.code, self.message, self.hint, self.values))


def _rebuild(
    kind: type[PerennialError], code: str, message: str, hint: str, values: dict[str, Any]
) -> PerennialError:
    return kind(code, message, hint=hint, **values)


class Permanent(PerennialError):
    """The same call will fail again. Exit code 2."""

    exit_code = 2


class Retryable(PerennialError):
    """The same call may succeed later. Exit code 3."""

    exit_code = 3


class NeedsHuman(PerennialError):
    """Somebody has to decide or to install something. Exit code 4."""

    exit_code = 4


class Conflict(PerennialError):
    """Somebody else got there first. Exit code 5."""

    exit_code = 5
