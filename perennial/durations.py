"""Durations as people write them: `90s`, `15m`, `6h`, `30d`, `2w`."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_FORM = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")


def parse_duration(value: Any) -> timedelta:
    """`"90s"`, `"6h"` or a number of seconds as a timedelta; ValueError otherwise."""
    if isinstance(value, timedelta):
        return value
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a duration")
    if isinstance(value, int | float):
        seconds = float(value)
    elif isinstance(value, str) and (match := _FORM.fullmatch(value.strip())):
        seconds = float(match[1]) * _UNIT_S[match[2]]
    else:
        raise ValueError(f"{value!r} is not a duration; write a number and ms, s, m, h, d or w")
    if seconds < 0:
        raise ValueError(f"{value!r} is negative")
    return timedelta(seconds=seconds)


def format_duration(value: timedelta) -> str:
    """The shortest form that `parse_duration` reads back."""
    seconds = value.total_seconds()
    for unit in ("w", "d", "h", "m"):
        if seconds and seconds % _UNIT_S[unit] == 0:
            return f"{int(seconds // _UNIT_S[unit])}{unit}"
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"


Duration = Annotated[
    timedelta,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": _FORM.pattern, "examples": ["90s", "6h"]}),
]
