"""What the verdict rests on, as two small tables, and the stages of the ramp.

cells: one row per routing key, stage and assigned arm
    key_hash, stage, arm        arm is `stable` or `canary`
    requests, errors            calls, and those that failed (see cells.py)
    n, s, s2                    labelled rows; sum and sum of squares of their clipped loss
    aged, aged_labelled         rows older than the label horizon; those of them with a label

ticks: one row per stage, tick and assigned arm
    stage, tick, arm            tick counts from the start of the release, in time order
    requests, errors            calls
    error_keys                  distinct keys with an error in the tick
    answered, mismatched        calls answered by their own arm; in another version than declared
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

STABLE, CANARY = "stable", "canary"

CELLS_SCHEMA = pa.schema(
    [
        ("key_hash", pa.string()),
        ("stage", pa.int32()),
        ("arm", pa.string()),
        ("requests", pa.int64()),
        ("errors", pa.int64()),
        ("n", pa.int64()),
        ("s", pa.float64()),
        ("s2", pa.float64()),
        ("aged", pa.int64()),
        ("aged_labelled", pa.int64()),
    ]
)
TICKS_SCHEMA = pa.schema(
    [
        ("stage", pa.int32()),
        ("tick", pa.int64()),
        ("arm", pa.string()),
        ("requests", pa.int64()),
        ("errors", pa.int64()),
        ("error_keys", pa.int64()),
        ("answered", pa.int64()),
        ("mismatched", pa.int64()),
    ]
)


@dataclass(frozen=True)
class StageWindow:
    """One stage of the ramp as it ran: share of keys on the canary in [start, end).

    Attributes:
        end: None while it runs.
    """

    index: int
    share: float
    start: datetime
    end: datetime | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "share": self.share,
            "start": self.start.isoformat(),
            "end": None if self.end is None else self.end.isoformat(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StageWindow:
        end = values["end"]
        return cls(
            values["index"],
            values["share"],
            datetime.fromisoformat(values["start"]),
            None if end is None else datetime.fromisoformat(end),
        )


@dataclass(frozen=True)
class Evidence:
    """Both tables."""

    cells: pa.Table
    ticks: pa.Table

    @classmethod
    def from_rows(
        cls, cells: Iterable[Mapping[str, Any]] = (), ticks: Iterable[Mapping[str, Any]] = ()
    ) -> Evidence:
        """Evidence from rows; no rows: nothing was seen."""
        return cls(
            pa.Table.from_pylist(list(cells), CELLS_SCHEMA),
            pa.Table.from_pylist(list(ticks), TICKS_SCHEMA),
        )


@dataclass(frozen=True)
class Cells:
    """The cells as arrays [cells]; `key` numbers the distinct keys from 0."""

    key: np.ndarray
    stage: np.ndarray
    is_canary: np.ndarray
    requests: np.ndarray
    errors: np.ndarray
    n: np.ndarray
    s: np.ndarray
    aged: np.ndarray
    aged_labelled: np.ndarray

    @classmethod
    def of(cls, evidence: Evidence) -> Cells:
        table = evidence.cells
        column = {name: table.column(name) for name in table.column_names}
        return cls(
            key=_codes(column["key_hash"]),
            stage=column["stage"].to_numpy(),
            is_canary=_is_canary(table),
            requests=column["requests"].to_numpy(),
            errors=column["errors"].to_numpy(),
            n=column["n"].to_numpy().astype(float),
            s=column["s"].to_numpy(),
            aged=column["aged"].to_numpy().astype(float),
            aged_labelled=column["aged_labelled"].to_numpy().astype(float),
        )


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    encoded = column.combine_chunks().dictionary_encode()
    return np.asarray(encoded.indices.to_numpy(zero_copy_only=False), dtype=np.int64)


def _is_canary(table: pa.Table) -> np.ndarray:
    return np.asarray(table.column("arm").to_numpy(zero_copy_only=False) == CANARY, dtype=bool)


@dataclass(frozen=True)
class Ticks:
    """Canary and stable counts side by side, arrays [ticks] in time order."""

    stage: np.ndarray
    requests: np.ndarray  # [ticks, 2]: stable, canary
    errors: np.ndarray
    error_keys: np.ndarray
    answered: np.ndarray
    mismatched: np.ndarray

    @classmethod
    def of(cls, evidence: Evidence) -> Ticks:
        table = evidence.ticks
        stage, tick = table.column("stage").to_numpy(), table.column("tick").to_numpy()
        pairs = np.stack([tick, stage], axis=1).astype(np.int64).reshape(-1, 2)
        unique, row = np.unique(pairs, axis=0, return_inverse=True)
        column = _is_canary(table).astype(int)

        def side_by_side(name: str) -> np.ndarray:
            values = np.zeros((len(unique), 2))
            np.add.at(values, (row.reshape(-1), column), table.column(name).to_numpy())
            return values

        return cls(
            unique[:, 1],
            *map(side_by_side, ("requests", "errors", "error_keys", "answered", "mismatched")),
        )
