"""Collects what to learn from: matured predictions joined with the labels that came back.

One Ibis expression over the two logs (DuckDB here). Everything that does not join is counted, so
that a leak in the feedback is seen before it is trained on.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from perennial.durations import format_duration
from perennial.errors import Conflict, Permanent
from perennial.records import Manifest
from perennial.spec import ModelSpec
from perennial.store import Store, is_published, publishing, read_manifest

log = logging.getLogger(__name__)

ARMS = ("stable", "canary", "history")
ROWS_FILE = "rows.parquet"


@dataclass(frozen=True)
class CollectResult:
    """What was collected.

    Attributes:
        path: the artifact; `rows.parquet` holds one row per joined example, the oldest first, with
            request_id, row, key_hash, time, arm, version, score, `feature_<name>` and `label`.
        rows: examples in it: the newest `training.window.max_rows` of `joined`.
        counts: matured `predictions`, distinct `labels`, `joined`, `unlabelled` (predictions
            without a label), `unknown` (labels of no known prediction), `duplicates` (labels
            beyond the first of an example), `conflicting` (examples whose labels differ),
            `duplicate_predictions`, `immature` (younger than the label horizon).
        first, last: time of the oldest and the newest example.
        shuffled: labels were permuted on purpose (a drill).
    """

    path: Path
    rows: int
    counts: dict[str, int]
    first: datetime
    last: datetime
    shuffled: bool


def collect(
    spec: ModelSpec,
    store: Store,
    episode_id: str,
    *,
    now: datetime,
    shuffle_labels: bool = False,
) -> CollectResult:
    """Publishes `runs/<episode>/collected`; returns what is published when it is already there.

    Args:
        now: an aware time; a row is matured when `time <= now - label_horizon`, and labels that
            came later than `now` are not seen.
        shuffle_labels: permutes the labels of the rows to train on: a deliberate fault for drills,
            recorded in the facts.

    Raises:
        Permanent: `collect.no_matured_labels`, `collect.too_few_rows`, each with the counts.
    """
    target = store.run(spec.name, episode_id) / "collected"
    if is_published(target):
        return _result(target, read_manifest(target))
    counts, table = _join(spec, store, now)
    numbers = ", ".join(f"{count} {name}" for name, count in counts.items())
    horizon = format_duration(spec.data.label_horizon)
    if table.num_rows == 0:
        raise Permanent(
            "collect.no_matured_labels",
            f"{spec.name}: no prediction older than the label horizon {horizon} has a label "
            f"({numbers})",
            hint="check that labels reach the intake with the request ids of the predictions, "
            "or wait until the horizon has passed",
            **counts,
        )
    if table.num_rows < spec.training.min_rows:
        raise Permanent(
            "collect.too_few_rows",
            f"{spec.name}: {table.num_rows} labelled rows, training.min_rows is "
            f"{spec.training.min_rows} ({numbers})",
            hint="wait for more labels, widen training.window, or lower training.min_rows",
            rows=table.num_rows,
            min_rows=spec.training.min_rows,
            **counts,
        )
    if shuffle_labels:
        log.warning("%s %s: the labels are shuffled on purpose", spec.name, episode_id)
        seed = int.from_bytes(hashlib.sha256(episode_id.encode()).digest()[:8], "big")
        # The newest rows, which become the holdout, keep theirs: the gate judges on the truth.
        trained_on = int(table.num_rows * (1 - spec.training.holdout_fraction))
        order = np.arange(table.num_rows)
        np.random.default_rng(seed).shuffle(order[:trained_on])
        place = table.column_names.index("label")
        table = table.set_column(place, "label", table["label"].take(order))
    try:
        with publishing(target, kind="collected", model=spec.name, id=episode_id) as (
            folder,
            facts,
        ):
            pq.write_table(table, folder / ROWS_FILE)
            times = table["time"]
            facts.update(
                rows=table.num_rows,
                counts=counts,
                now=now.astimezone(UTC).isoformat(),
                first=times[0].as_py().isoformat(),
                last=times[-1].as_py().isoformat(),
                shuffled_labels=shuffle_labels,
                spec_hash=spec.spec_hash,
            )
    except Conflict:
        log.info("%s %s: collected by somebody else meanwhile", spec.name, episode_id)
    return _result(target, read_manifest(target))


def _result(target: Path, manifest: Manifest) -> CollectResult:
    facts = manifest.facts
    return CollectResult(
        path=target,
        rows=facts["rows"],
        counts=facts["counts"],
        first=datetime.fromisoformat(facts["first"]),
        last=datetime.fromisoformat(facts["last"]),
        shuffled=facts["shuffled_labels"],
    )


def _join(spec: ModelSpec, store: Store, now: datetime) -> tuple[dict[str, int], pa.Table]:
    """The counts, and the newest joined rows, the oldest first."""
    window, horizon = spec.training.window, spec.data.label_horizon
    oldest = now - window.max_age if window.max_age is not None else None
    prediction_files = _files(store.predictions(spec.name), oldest, now)
    label_files = _files(store.labels(spec.name), oldest, now)
    if not prediction_files or not label_files:
        return {"prediction_files": len(prediction_files), "label_files": len(label_files)}, (
            pa.table({})
        )
    import ibis

    connection = ibis.duckdb.connect()
    try:
        # Files of an older specification lack newer features: those are null.
        options: dict[str, Any] = {"hive_partitioning": False, "union_by_name": True}
        asked = connection.read_parquet(prediction_files, table_name="asked", **options)
        told = connection.read_parquet(label_files, table_name="told", **options)
        key = ["request_id", "row"]

        # A shadow's record has the ids of the call that it mirrors; it was nobody's answer.
        seen = asked.filter(asked.arm.isin(ARMS))
        if oldest is not None:
            seen = seen.filter(seen.time >= oldest)
        matured = seen.filter(seen.time <= now - horizon)
        first = ibis.row_number().over(group_by=key, order_by=matured.time)
        predictions = matured.mutate(nth=first).filter(lambda t: t.nth == 0).drop("nth")

        told = told.filter(told.received <= now, told.value.notnull())
        newest = ibis.row_number().over(
            group_by=key, order_by=[ibis.desc(told.received), ibis.desc(told.time)]
        )
        labels = told.mutate(nth=newest).filter(lambda t: t.nth == 0)
        labels = labels.select(*key, label="value")

        joined = predictions.join(labels, key)
        per_example = told.group_by(key).aggregate(values=told.value.nunique())
        counted = {
            "seen": seen,
            "matured": matured,
            "predictions": predictions,
            "told": told,
            "labels": labels,
            "joined": joined,
            "unknown": labels.anti_join(asked, key),
            "conflicting": per_example.filter(per_example["values"] > 1),
        }
        sizes = ibis.union(
            *(t.aggregate(n=t.count()).mutate(what=ibis.literal(w)) for w, t in counted.items())
        )
        raw = {row["what"]: row["n"] for row in sizes.to_pyarrow().to_pylist()}
        counts = {
            "predictions": raw["predictions"],
            "labels": raw["labels"],
            "joined": raw["joined"],
            "unlabelled": raw["predictions"] - raw["joined"],
            "unknown": raw["unknown"],
            "duplicates": raw["told"] - raw["labels"],
            "conflicting": raw["conflicting"],
            "duplicate_predictions": raw["matured"] - raw["predictions"],
            "immature": raw["seen"] - raw["matured"],
        }
        columns = [
            *key,
            *("key_hash", "time", "arm", "version", "score"),
            *(f"feature_{name}" for name in spec.data.features),
            "label",
        ]
        for name in columns:
            if name not in joined.columns:
                joined = joined.mutate(**{name: ibis.null()})
        order = [ibis.desc("time"), *key]
        rows = joined.select(*columns).order_by(order).limit(window.max_rows)
        return counts, rows.order_by(["time", *key]).to_pyarrow()
    finally:
        connection.disconnect()


def _files(folder: Path, oldest: datetime | None, now: datetime) -> list[str]:
    """The log's Parquet files of the days that can matter. Hidden names are half-written files."""
    first = oldest.astimezone(UTC).strftime("date=%Y-%m-%d") if oldest else ""
    last = now.astimezone(UTC).strftime("date=%Y-%m-%d")
    return [
        str(path)
        for path in sorted(folder.glob("date=*/hour=*/*.parquet"))
        if first <= path.parts[-3] <= last and not path.name.startswith(".")
    ]
