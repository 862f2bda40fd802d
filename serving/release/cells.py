"""The logs as evidence: one row per key, stage and arm, and counts per tick.

Which rows count: `route = 'split'` and a routing key, in the stage that the *request* fell into.
Forced requests and those without a key were not assigned by chance. A row belongs to the arm it was
`assigned`, also when the other one had to answer: such a fallback is an error of the canary.

A label counts when it arrives, for it is a complete record (0 as well as 1 is sent): both arms wait
alike, and stages are compared within themselves. Whether labels arrive alike is checked on the rows
older than the label horizon (`aged`). Of two labels for one row, the one received last counts.

An error is a call that was not answered with a number: a status other than OK (also: the client
gave up), a fallback, a score that is missing or not finite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from perennial.query import EXAMPLE, known_labels, latest_labels
from perennial.records import LABEL_SCHEMA, prediction_schema
from perennial.spec import ModelSpec
from serving.release.evidence import CELLS_SCHEMA, TICKS_SCHEMA, Evidence, StageWindow

if TYPE_CHECKING:
    import ibis.expr.types as ir

TICK_S = 60.0
# Keeps the log loss of a probability of exactly 0 or 1 finite before it is clipped.
_EPSILON = 1e-7
_HOUR = re.compile(r"date=(\d{4}-\d{2}-\d{2})/hour=(\d{2})/")


def collect_cells(
    predictions_dir: Path,
    labels_dir: Path,
    spec: ModelSpec,
    stages: Sequence[StageWindow],
    *,
    now: datetime,
    versions: Mapping[str, int] | None = None,
    tick_s: float = TICK_S,
) -> Evidence:
    """Reads the Parquet logs; files may be added meanwhile, missing folders are no data.

    Args:
        stages: the ramp so far, in order.
        now: later requests and labels are left out, and ages are measured from here.
        versions: arm → version that should answer; None: not checked.
    """
    if not stages:
        return Evidence.from_rows()
    start = stages[0].start
    prediction_files = files_between(predictions_dir, start, now)
    if not prediction_files:
        return Evidence.from_rows()
    import ibis

    connection = ibis.duckdb.connect()
    try:
        connection.raw_sql("SET TimeZone = 'UTC'")
        predictions = _read(connection, prediction_files, prediction_schema(spec))
        labels = _read(connection, files_between(labels_dir, start, now), LABEL_SCHEMA)
        rows = _rows(predictions, labels, spec, stages, now, versions or {}, tick_s)
        cached = connection.create_table("rows", rows, temp=True)
        return Evidence(
            _cells(cached).to_pyarrow().cast(CELLS_SCHEMA),
            _ticks(cached).to_pyarrow().cast(TICKS_SCHEMA),
        )
    finally:
        connection.disconnect()


def files_between(folder: Path, start: datetime, end: datetime) -> list[str]:
    """The folder's Parquet files whose hour may hold something between `start` and `end`."""
    first = start.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    files = []
    for path in sorted(folder.rglob("*.parquet")):
        if path.name.startswith((".", "tmp")):
            continue
        if match := _HOUR.search(path.as_posix()):
            hour = datetime.fromisoformat(f"{match[1]}T{match[2]}:00:00+00:00")
            if not first <= hour <= end:
                continue
        files.append(str(path))
    return files


def _read(connection: Any, files: list[str], schema: pa.Schema) -> ir.Table:
    """Only the schema's own columns, so that older files with fewer features still read."""
    import ibis

    names = [name for name in schema.names if not name.startswith("feature_")]
    if not files:
        empty = pa.schema([schema.field(name) for name in names]).empty_table()
        return ibis.memtable(empty)
    table = connection.read_parquet(files, hive_partitioning=False, union_by_name=True)
    return table.select(*names)


def _rows(
    predictions: ir.Table,
    labels: ir.Table,
    spec: ModelSpec,
    stages: Sequence[StageWindow],
    now: datetime,
    versions: Mapping[str, int],
    tick_s: float,
) -> ir.Table:
    """One row per prediction row that counts, with its stage, tick, error, age and loss."""
    import ibis

    p = _newest(
        predictions.filter(
            (predictions.route == "split")
            & (predictions.key_hash != "")
            & predictions.assigned.isin(["stable", "canary"])
            & (predictions.time <= now)
        ),
        "time",
    )
    y = latest_labels(known_labels(labels, now)).select(*EXAMPLE, "value")
    joined = p.left_join(y, ["request_id", "row"]).drop("request_id_right", "row_right")
    stage = ibis.cases(
        *(
            (
                (joined.time >= window.start)
                & (ibis.literal(True) if window.end is None else joined.time < window.end),
                window.index,
            )
            for window in stages
        ),
        else_=None,
    )
    is_number = joined.score.notnull() & ~(joined.score.isnan() | joined.score.isinf())
    is_fallback = (joined.assigned == "canary") & (joined.arm == "stable")
    is_answered = (joined.status == 0) & ~is_fallback & (joined.arm == joined.assigned)
    expected = (
        ibis.cases(
            *((joined.assigned == arm, version) for arm, version in versions.items()),
            else_=joined.version,
        )
        if versions
        else joined.version
    )
    seconds = joined.time.epoch_seconds() - int(stages[0].start.timestamp())
    loss = _loss(spec, joined.score, joined.value, is_number)
    counts = (joined.status == 0) & joined.score.notnull()
    table = joined.select(
        "request_id",
        "key_hash",
        arm=joined.assigned,
        stage=stage.cast("int32"),
        tick=(seconds / tick_s).floor().cast("int64"),
        is_error=(joined.status != 0) | is_fallback | ~is_number,
        is_answered=is_answered,
        is_mismatched=is_answered & (joined.version != expected),
        is_aged=counts & (joined.time <= now - spec.data.label_horizon),
        is_labelled=counts & joined.value.notnull(),
        loss=loss,
    )
    return table.filter(table.stage.notnull())


def _newest(table: ir.Table, column: str) -> ir.Table:
    """One row per (request_id, row): the one with the highest `column`."""
    import ibis

    window = ibis.window(group_by=["request_id", "row"], order_by=ibis.desc(column))
    ranked = table.mutate(rank_=ibis.row_number().over(window))
    return ranked.filter(ranked.rank_ == 0).drop("rank_")


def _loss(spec: ModelSpec, score: Any, value: Any, is_number: Any) -> Any:
    """The clipped loss of one row; what is not a number costs the cap."""
    import ibis

    release = spec.release
    if release.primary_metric == "log_loss":
        p = score.clip(lower=_EPSILON, upper=1 - _EPSILON)
        loss = -(value * p.ln() + (1 - value) * (1 - p).ln())
    elif release.primary_metric == "brier":
        loss = (score - value) * (score - value)
    else:
        loss = (score - value).abs()
    return ibis.cases((is_number, loss.clip(upper=release.clip)), else_=release.clip)


def _cells(rows: ir.Table) -> ir.Table:
    loss = rows.is_labelled.ifelse(rows.loss, 0.0)
    return (
        rows.group_by("key_hash", "stage", "arm")
        .aggregate(
            requests=rows.request_id.nunique(),
            errors=rows.request_id.nunique(where=rows.is_error),
            n=rows.is_labelled.cast("int64").sum(),
            s=loss.sum(),
            s2=(loss * loss).sum(),
            aged=rows.is_aged.cast("int64").sum(),
            aged_labelled=(rows.is_aged & rows.is_labelled).cast("int64").sum(),
        )
        .order_by("stage", "arm", "key_hash")
    )


def _ticks(rows: ir.Table) -> ir.Table:
    return (
        rows.group_by("stage", "tick", "arm")
        .aggregate(
            requests=rows.request_id.nunique(),
            errors=rows.request_id.nunique(where=rows.is_error),
            error_keys=rows.key_hash.nunique(where=rows.is_error),
            answered=rows.request_id.nunique(where=rows.is_answered),
            mismatched=rows.request_id.nunique(where=rows.is_mismatched),
        )
        .order_by("tick", "stage", "arm")
    )
