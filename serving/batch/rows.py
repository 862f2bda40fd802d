"""The rows of a batch job: files are cut into shards, a shard's rows become tensors or bad rows.

Parquet is read as it is. CSV is copied first into a Parquet file of strings, so that it can be cut
as well and a value that doesn't fit is a bad row and not a bad file.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from perennial.errors import Permanent
from perennial.spec import Feature, FeatureType, ModelSpec

SUFFIXES: Final = (".parquet", ".csv")
OUTPUT_COLUMNS: Final = {
    "input": pa.string(),
    "row": pa.int64(),
    "model": pa.string(),
    "version": pa.int64(),
    "score": pa.float64(),
}
BAD_COLUMNS: Final = {"input": pa.string(), "row": pa.int64(), "reason": pa.string()}
FAULT: Final = "__fault"
"""Column of a copied CSV: why a line is no row, or null."""
_CHUNK: Final = 20_000
_ARROW: Final = {
    FeatureType.STRING: pa.string(),
    FeatureType.INT: pa.int64(),
    FeatureType.FLOAT: pa.float64(),
    FeatureType.BOOL: pa.bool_(),
}
_WORDS: Final = {"true": True, "false": False, "1": True, "0": False}
_CONVERT: Final[dict[FeatureType, Callable[[Any], Any]]] = {
    FeatureType.STRING: lambda value: value if isinstance(value, str) else str(value),
    FeatureType.INT: lambda value: _integer(value),
    FeatureType.FLOAT: float,
    FeatureType.BOOL: lambda value: _WORDS[str(value).strip().lower()],
}


@dataclass(frozen=True)
class Shard:
    """Rows [start, stop) of one file, predicted and published together.

    Attributes:
        path: the Parquet file that is read; `source`: the input as it was named.
        keys: columns that are passed through.
    """

    index: int
    path: str
    source: str
    start: int
    stop: int
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Rows:
    """A shard's rows, checked.

    Attributes:
        table: the key columns, `input` and `row`, of every row of the shard.
        tensors: every feature of the rows that can be predicted, [row], as a client would send it.
        reasons: why a row of `table` can't be predicted, or None. [row of table]
    """

    shard: Shard
    table: pa.Table
    tensors: dict[str, np.ndarray]
    reasons: list[str | None]


def key_columns(spec: ModelSpec, names: list[str], source: str) -> tuple[str, ...]:
    """The columns that are passed through: all that aren't features, and the routing key.

    Sensitive features never are.

    Raises:
        Permanent: `batch.columns`, for features that are missing, and for names that the output
            uses itself.
    """
    features = spec.data.features
    # What the recorder masks, no model reads: it may be left out here.
    missing = [n for n, f in features.items() if n not in names and f.sensitive is None]
    if missing:
        raise Permanent(
            "batch.columns",
            f"{source} lacks {', '.join(missing)}",
            hint=f"{spec.name} needs a column for each feature: {', '.join(features)}",
        )
    key = spec.data.routing_key
    keys = tuple(
        name
        for name in names
        if name != FAULT
        and (name not in features or (name == key and features[name].sensitive is None))
    )
    if taken := sorted({*OUTPUT_COLUMNS, *BAD_COLUMNS} & set(keys)):
        raise Permanent(
            "batch.columns",
            f"{source} has columns that the output uses itself: {', '.join(taken)}",
            hint="rename them",
        )
    return keys


def copy_csv(path: Path, target: Path) -> int:
    """Copies a CSV file with a header into a Parquet file of strings; returns the rows.

    Raises:
        Permanent: `batch.input`, when it has no usable header or can't be read as CSV at all.
    """
    rows = 0
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        lines = csv.reader(file)
        try:
            header = next(lines, [])
            if not header or len(set(header)) != len(header) or FAULT in header:
                raise Permanent("batch.input", f"{path}: the header {header} is no set of names")
            schema = pa.schema([*((name, pa.string()) for name in header), (FAULT, pa.string())])
            with pq.ParquetWriter(target, schema, compression="zstd") as writer:
                for chunk in _chunks(lines, len(header)):
                    writer.write_table(pa.table(chunk, schema=schema))
                    rows += len(chunk[0])
        except csv.Error as error:
            raise Permanent("batch.input", f"{path}:{lines.line_num}: {error}") from error
    return rows


def _chunks(lines: Iterator[list[str]], width: int) -> Iterator[list[list[str | None]]]:
    """Columns of at most `_CHUNK` lines, the last one with the faults."""
    rows: list[list[str | None]] = []
    for line in lines:
        fault = _line_fault(line, width)
        rows.append([*line, None] if fault is None else [*[None] * width, fault])
        if len(rows) == _CHUNK:
            yield _transposed(rows)
            rows = []
    if rows:
        yield _transposed(rows)


def _transposed(rows: list[list[str | None]]) -> list[list[str | None]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _line_fault(line: list[str], width: int) -> str | None:
    if len(line) != width:
        return f"the line has {len(line)} fields, the header {width}"
    try:
        "".join(line).encode()
    except UnicodeEncodeError:
        return "the line is not UTF-8"
    return None


def read(shard: Shard, spec: ModelSpec) -> Rows:
    """A shard's rows as tensors. Raises Permanent `batch.input` when the file can't be read."""
    try:
        table = _slice(shard)
    except (OSError, pa.ArrowException) as error:
        raise Permanent("batch.input", f"{shard.source}: {' '.join(str(error).split())}") from error
    reasons = _faults(table)
    columns = {
        name: _feature(name, feature, table, reasons)
        for name, feature in spec.data.features.items()
    }
    good = np.array([reason is None for reason in reasons], bool)
    kept = table.select(list(shard.keys)).append_column(
        "input", pa.repeat(pa.scalar(shard.source), table.num_rows)
    )
    kept = kept.append_column("row", pa.array(range(shard.start, shard.stop), pa.int64()))
    return Rows(shard, kept, {name: values[good] for name, values in columns.items()}, reasons)


def _slice(shard: Shard) -> pa.Table:
    """Rows [start, stop) of the file; what lies before them is decoded, never kept."""
    file = pq.ParquetFile(shard.path)
    groups: list[int] = []
    begin = skip = 0
    for group in range(file.num_row_groups):
        end = begin + file.metadata.row_group(group).num_rows
        if begin < shard.stop and end > shard.start:
            skip = shard.start - begin if not groups else skip
            groups.append(group)
        begin = end
    parts, wanted = [], shard.stop - shard.start
    for batch in file.iter_batches(batch_size=_CHUNK, row_groups=groups):
        part = batch.slice(skip, wanted)
        skip = max(0, skip - batch.num_rows)
        wanted -= part.num_rows
        if part.num_rows:
            parts.append(part)
        if not wanted:
            break
    return pa.Table.from_batches(parts, schema=file.schema_arrow)


def _faults(table: pa.Table) -> list[str | None]:
    if FAULT in table.column_names:
        return list(table[FAULT].to_pylist())
    return [None] * table.num_rows


def _feature(name: str, feature: Feature, table: pa.Table, reasons: list[str | None]) -> np.ndarray:
    """One feature in its dtype on the wire; rows whose value doesn't fit get a reason. [row]

    No model reads a sensitive one, so its value neither matters nor is ever shown.
    """
    if name not in table.column_names:
        column: pa.Array = pa.nulls(table.num_rows, _ARROW[feature.type])
    else:
        column = table[name].combine_chunks()
        if pa.types.is_string(column.type) and feature.type != FeatureType.STRING:
            column = pc.if_else(pc.equal(pc.utf8_trim_whitespace(column), ""), None, column)
        try:
            column = column.cast(_ARROW[feature.type])
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            if feature.sensitive is not None:
                return _wire(pa.nulls(table.num_rows, _ARROW[feature.type]), feature.type)
            column = _one_by_one(name, feature.type, column, reasons)
    if feature.type != FeatureType.FLOAT and feature.sensitive is None:
        for index in np.flatnonzero(pc.is_null(column).to_numpy(zero_copy_only=False)):
            reasons[index] = reasons[index] or f"{name}: missing"
    return _wire(column, feature.type)


def _one_by_one(
    name: str, kind: FeatureType, column: pa.Array, reasons: list[str | None]
) -> pa.Array:
    values: list[Any] = []
    for index, value in enumerate(column.to_pylist()):
        try:
            values.append(None if value is None else _CONVERT[kind](value))
        except (TypeError, ValueError, KeyError, OverflowError):
            values.append(None)
            reasons[index] = reasons[index] or f"{name}: {str(value)[:50]!r} is no {kind}"
    return pa.array(values, _ARROW[kind])


def _integer(value: Any) -> int:
    number = int(value)
    if (isinstance(value, float) and number != value) or not -(2**63) <= number < 2**63:
        raise ValueError(value)
    return number


def _wire(column: pa.Array, kind: FeatureType) -> np.ndarray:
    if kind == FeatureType.STRING:
        return pc.fill_null(column, "").cast(pa.binary()).to_numpy(zero_copy_only=False)
    if kind == FeatureType.FLOAT:
        with np.errstate(over="ignore"):
            values = pc.fill_null(column, np.nan).to_numpy(zero_copy_only=False)
            return values.astype(np.float32)
    return pc.fill_null(column, 0 if kind == FeatureType.INT else False).to_numpy(
        zero_copy_only=False
    )
