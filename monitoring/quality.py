"""Quality on matured labels: predictions joined with the labels that came back, per version.

A prediction is matured when it is older than the model's label horizon; only then is a missing
label a fact about the feedback and not about the clock. The window is by the time of the request
and ends where maturity begins: [now - horizon - window, now - horizon).

Columns and meaning of both logs: `perennial.records`. A label that came twice counts once, the one
that was received last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from perennial.query import EXAMPLE, known_labels, latest_labels
from perennial.spec import ModelSpec
from perennial.store import Store

CLIP: Final = 1e-7
"""Scores are clipped to [CLIP, 1 - CLIP] in the log loss: one confident error is not infinite."""

_CLOCK_SKEW: Final = timedelta(minutes=1)
_RECORDER_LAG: Final = timedelta(seconds=10)


@dataclass(frozen=True)
class VersionQuality:
    """One served version's matured rows of a window.

    Attributes:
        matured: answered rows, old enough to have a label; `labelled` of them have one.
        metrics: by the names of `Threshold.metric`: log_loss, brier (binary), mae,
            label_coverage; those that need a label are absent without one.
        base_rate: mean label; None without one.
        first, last: times of the oldest and newest matured row.
    """

    version: int
    matured: int
    labelled: int
    metrics: dict[str, float]
    base_rate: float | None
    first: datetime
    last: datetime

    @property
    def coverage(self) -> float:
        return self.labelled / self.matured


@dataclass(frozen=True)
class Quality:
    """A model's matured rows of a window, by served version.

    Attributes:
        unknown: labels of the last `window` whose prediction is not in the log: ids that nobody
            was given, or labels that came later than the label horizon. The newest seconds are
            left out, for the recorder may lag behind the labels.
        duplicates: labels beyond the first of a row.
        late: matured rows of the window whose label came after the label horizon.
        conflicting: rows whose labels differ.
    """

    versions: dict[int, VersionQuality]
    unknown: int
    duplicates: int
    late: int = 0
    conflicting: int = 0


def measure(
    spec: ModelSpec,
    store: Store,
    *,
    window: timedelta,
    now: datetime,
    known_at: datetime | None = None,
) -> Quality:
    """Joins and aggregates one window.

    Args:
        known_at: an aware time; labels and corrections that came later are not seen. None: `now`.
            A later one judges the same rows by what was learnt since.

    Shadow and imported rows were nobody's answer, failed calls have no score: they don't count.
    """
    known_at = now if known_at is None else known_at
    end = now - spec.data.label_horizon
    start = end - window
    asked_files = list(_files(store.predictions(spec.name), start, now))
    told_files = list(_files(store.labels(spec.name), start, known_at))
    if not asked_files:
        return Quality({}, 0, 0)
    import ibis
    import pyarrow as pa

    from perennial.records import LABEL_SCHEMA

    connection = ibis.duckdb.connect()
    try:
        options: dict[str, Any] = {"hive_partitioning": False, "union_by_name": True}
        log = connection.read_parquet(asked_files, **options)
        told = (
            connection.read_parquet(told_files, **options)
            if told_files
            else connection.create_table("told", pa.Table.from_pylist([], schema=LABEL_SCHEMA))
        )
        told = known_labels(told, known_at).filter(lambda t: t.received >= start)
        labels = latest_labels(told).select(*EXAMPLE, "value", "received")
        answered = log.filter(
            log.arm.isin(["stable", "canary"]),
            log.status == 0,
            log.score.notnull(),
            log.version > 0,
            log.time >= start,
            log.time < end,
        )
        rows = answered.group_by(EXAMPLE).aggregate(
            version=answered.version.first(),
            score=answered.score.first(),
            time=answered.time.min(),
        )
        joined = rows.left_join(labels, EXAMPLE)
        found = _by_version(joined, binary=spec.data.label.kind == "binary")
        settled = labels.filter(
            labels.received >= now - window, labels.received < now - _RECORDER_LAG
        )
        per_row = told.group_by(EXAMPLE).aggregate(values=told.value.nunique())
        counted = {
            "told": told,
            "labels": labels,
            "unknown": settled.anti_join(log, EXAMPLE),
            "late": joined.filter(joined.received > joined.time + spec.data.label_horizon),
            "conflicting": per_row.filter(per_row["values"] > 1),
        }
        sizes = ibis.union(
            *(t.aggregate(n=t.count()).mutate(what=ibis.literal(w)) for w, t in counted.items())
        )
        numbers = {row["what"]: row["n"] for row in sizes.to_pyarrow().to_pylist()}
        versions = [_version(row) for row in found.to_pyarrow().to_pylist()]
    finally:
        connection.disconnect()
    return Quality(
        {one.version: one for one in versions},
        unknown=numbers["unknown"],
        duplicates=numbers["told"] - numbers["labels"],
        late=numbers["late"],
        conflicting=numbers["conflicting"],
    )


def matured_labels_since(spec: ModelSpec, store: Store, *, since: datetime, now: datetime) -> int:
    """How many matured, labelled rows of any version were requested after `since`."""
    window = now - spec.data.label_horizon - since
    if window <= timedelta(0):
        return 0
    found = measure(spec, store, window=window, now=now)
    return sum(one.labelled for one in found.versions.values())


def _by_version(joined: Any, *, binary: bool) -> Any:
    """One row per version; the metrics' means skip rows without a label."""
    import ibis

    score, value = joined.score, joined.value
    terms = {"mae": (score - value).abs()}
    if binary:
        p = score.clip(CLIP, 1 - CLIP)
        terms["log_loss"] = -(value * p.log() + (1 - value) * (1 - p).log())
        terms["brier"] = (score - value) ** 2
    table = joined.mutate(**{f"term_{name}": term for name, term in terms.items()})
    return (
        table.group_by("version")
        .aggregate(
            matured=table.count(),
            labelled=table.value.count(),
            base_rate=table.value.mean(),
            first=table.time.min(),
            last=table.time.max(),
            **{f"metric_{name}": table[f"term_{name}"].mean() for name in terms},
        )
        .order_by(ibis.asc("version"))
    )


def _version(row: dict[str, Any]) -> VersionQuality:
    metrics = {
        name.removeprefix("metric_"): value
        for name, value in row.items()
        if name.startswith("metric_") and value is not None
    }
    return VersionQuality(
        version=row["version"],
        matured=row["matured"],
        labelled=row["labelled"],
        metrics={**metrics, "label_coverage": row["labelled"] / row["matured"]},
        base_rate=row["base_rate"],
        first=row["first"],
        last=row["last"],
    )


def _files(folder: Path, start: datetime, now: datetime) -> Iterator[str]:
    """Files that can hold rows of [start, now]: by partition, and by when they were written.

    A file that was written before `start` has only older rows, whatever hour it lies in.
    """
    oldest = (start - _CLOCK_SKEW).timestamp()
    hour = (start - _CLOCK_SKEW).astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    newest = (now + _CLOCK_SKEW).astimezone(UTC)
    for day in sorted(folder.glob("date=*")):
        if not f"{hour:date=%Y-%m-%d}" <= day.name <= f"{newest:date=%Y-%m-%d}":
            continue
        for part in sorted(day.glob("hour=*")):
            if not f"{hour:date=%Y-%m-%d/hour=%H}" <= f"{day.name}/{part.name}":
                continue
            for path in sorted(part.glob("*.parquet")):
                if not path.name.startswith(".") and path.stat().st_mtime >= oldest:
                    yield str(path)
