"""Collects what to learn from: matured predictions joined with the labels that came back.

One Ibis expression over the two logs (DuckDB here). Everything that does not join is counted, so
that a leak in the feedback is seen before it is trained on.

Labels are taken as they were known at a moment (`known_at`): a correction that came later changes
nothing, and `rebuild` gives the same rows again.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from perennial.durations import format_duration
from perennial.errors import Conflict, Permanent
from perennial.query import EXAMPLE, known_labels, latest_labels
from perennial.records import Manifest
from perennial.spec import ModelSpec
from perennial.store import Store, is_published, publishing, read_manifest

log = logging.getLogger(__name__)

ARMS = ("stable", "canary", "history")
ROWS_FILE = "rows.parquet"
SETTLE = timedelta(seconds=2)
"""How long a label may take from `received` until every reader sees its file."""


@dataclass(frozen=True)
class CollectResult:
    """What was collected.

    Attributes:
        path: the artifact; `rows.parquet` holds one row per joined example, the oldest first, with
            request_id, row, key_hash, time, arm, version, score, `feature_<name>` and `label`.
        rows: examples in it: the newest `training.window.max_rows` of `joined`.
        counts: matured `predictions`, distinct `labels`, `joined`, `unlabelled` (predictions
            without a label), `late` (joined, but the label came after the horizon), `unknown`
            (labels older than the horizon, of no known prediction), `unmatched` (the same, but
            younger: the record may still come), `future` (labels received, but dated ahead),
            `duplicates` (labels beyond the first of an example), `conflicting` (examples whose
            labels differ), `duplicate_predictions`, `immature` (younger than the label horizon).
        first, last: time of the oldest and the newest example.
        known_at: the labels are those that were known then.
        shuffled: labels were permuted on purpose (a drill).
    """

    path: Path
    rows: int
    counts: dict[str, int]
    first: datetime
    last: datetime
    known_at: datetime
    shuffled: bool


def collect(
    spec: ModelSpec,
    store: Store,
    episode_id: str,
    *,
    now: datetime,
    known_at: datetime | None = None,
    shuffle_labels: bool = False,
) -> CollectResult:
    """Publishes `runs/<episode>/collected`; returns what is published when it is already there.

    Args:
        now: an aware time; a row is matured when `time <= now - label_horizon`.
        known_at: an aware time; labels and corrections that came later are not seen. None:
            `SETTLE` before `now`.
        shuffle_labels: permutes the labels of the rows to train on: a deliberate fault for drills,
            recorded in the facts.

    Raises:
        Permanent: `collect.no_matured_labels`, `collect.too_few_rows`, each with the counts.
    """
    target = store.run(spec.name, episode_id) / "collected"
    if is_published(target):
        return _result(target, read_manifest(target))
    known_at = now - SETTLE if known_at is None else known_at
    counts, table = _join(spec, store, now, known_at)
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
        table = _shuffled(spec, table, episode_id)
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
                known_at=known_at.astimezone(UTC).isoformat(),
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
        # Artifacts of older versions saw the labels of `now`.
        known_at=datetime.fromisoformat(facts.get("known_at", facts["now"])),
        shuffled=facts["shuffled_labels"],
    )


def rebuild(spec: ModelSpec, store: Store, episode_id: str) -> pa.Table:
    """The rows of `runs/<episode>/collected` made again from the logs, as they were known then.

    They equal the published rows while the spec and the predictions in the log are the same, also
    after labels were corrected or came late.

    Raises:
        Permanent: `store.unpublished`, when the episode collected nothing; `collect.spec`, when
            the model's specification has changed since.
    """
    facts = read_manifest(store.run(spec.name, episode_id) / "collected").facts
    if facts["spec_hash"] != spec.spec_hash:
        raise Permanent(
            "collect.spec",
            f"{spec.name} {episode_id} was collected under spec {facts['spec_hash'][:12]}, "
            f"model.yaml is {spec.spec_hash[:12]} now",
            hint="check out the model.yaml of that time to rebuild it",
        )
    now = datetime.fromisoformat(facts["now"])
    known_at = datetime.fromisoformat(facts.get("known_at", facts["now"]))
    _, table = _join(spec, store, now, known_at)
    return _shuffled(spec, table, episode_id) if facts["shuffled_labels"] else table


def _shuffled(spec: ModelSpec, table: pa.Table, episode_id: str) -> pa.Table:
    """The same rows with permuted labels; the permutation is the episode's own."""
    seed = int.from_bytes(hashlib.sha256(episode_id.encode()).digest()[:8], "big")
    # The newest rows, which become the holdout, keep theirs: the gate judges on the truth.
    trained_on = int(table.num_rows * (1 - spec.training.holdout_fraction))
    order = np.arange(table.num_rows)
    np.random.default_rng(seed).shuffle(order[:trained_on])
    place = table.column_names.index("label")
    return table.set_column(place, "label", table["label"].take(order))


def _join(
    spec: ModelSpec, store: Store, now: datetime, known_at: datetime
) -> tuple[dict[str, int], pa.Table]:
    """The counts, and the newest joined rows, the oldest first."""
    window, horizon = spec.training.window, spec.data.label_horizon
    oldest = now - window.max_age if window.max_age is not None else None
    prediction_files = _files(store.predictions(spec.name), oldest, now)
    label_files = _files(store.labels(spec.name), oldest, known_at)
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
        key = EXAMPLE

        # A shadow's record has the ids of the call that it mirrors; it was nobody's answer.
        seen = asked.filter(asked.arm.isin(ARMS))
        if oldest is not None:
            seen = seen.filter(seen.time >= oldest)
        matured = seen.filter(seen.time <= now - horizon)
        first = ibis.row_number().over(
            group_by=key, order_by=[matured.time, matured.arm, matured.version]
        )
        predictions = matured.mutate(nth=first).filter(lambda t: t.nth == 0).drop("nth")

        received = told.filter(told.received <= known_at, told.value.notnull())
        told = known_labels(told, known_at)
        labels = latest_labels(told).select(*key, "received", label="value")
        orphans = labels.anti_join(asked, key)

        joined = predictions.join(labels, key)
        per_example = told.group_by(key).aggregate(values=told.value.nunique())
        counted = {
            "seen": seen,
            "matured": matured,
            "predictions": predictions,
            "told": told,
            "labels": labels,
            "joined": joined,
            "late": joined.filter(joined.received > joined.time + horizon),
            "orphans": orphans,
            "unknown": orphans.filter(orphans.received <= known_at - horizon),
            "received": received,
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
            "late": raw["late"],
            "unknown": raw["unknown"],
            "unmatched": raw["orphans"] - raw["unknown"],
            "future": raw["received"] - raw["told"],
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
