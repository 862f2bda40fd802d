"""Imports labelled rows from before Perennial into the logs, so that a first model can be trained.

Nobody answered them: they carry `arm="history"`, `route="history"`, version 0 and no score.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from perennial.errors import Permanent
from perennial.records import LABEL_SCHEMA, TIME, hash_key, masked_column, prediction_schema
from perennial.spec import ModelSpec
from perennial.store import Store

log = logging.getLogger(__name__)


def import_history(
    spec: ModelSpec,
    store: Store,
    table: pa.Table,
    *,
    secret: bytes,
    time: str = "scheduled",
    known: str = "known",
    source: str = "history",
) -> int:
    """Writes a labelled table into the prediction and the label log; returns the number of rows.

    A day is one file, in the folder of its first hour. The same table gives the same request ids
    and the same files, so importing it again changes nothing.

    Args:
        table: the features, the routing key and the label by their names in `model.yaml`, and two
            UTC timestamps.
        secret: of the routing key's hash (`Settings.key_secret`).
        time: column with the time at which the prediction would have been asked for.
        known: column with the time at which the label came to be known.

    Raises:
        Permanent: `history.columns`, naming the columns that are missing.
    """
    data = spec.data
    needed = [*data.features, data.routing_key, data.label.name, time, known]
    if missing := [name for name in needed if name not in table.column_names]:
        raise Permanent(
            "history.columns",
            f"history of {spec.name}: the table lacks {', '.join(missing)}",
            hint=f"it needs {', '.join(needed)}",
        )
    rows = table.num_rows
    if not rows:
        return 0
    table = table.combine_chunks()
    digest = _digest(table.select(needed))
    ids = pa.array([f"history-{digest}-{i}" for i in range(rows)], pa.string())
    keys = table[data.routing_key].cast(pa.string()).to_pylist()
    hashed = {key: hash_key(secret, key or "") for key in set(keys)}
    zero = pa.array(np.zeros(rows, "i4"))
    asked, learnt = table[time].cast(TIME), table[known].cast(TIME)

    def constant(value: str | int | None, kind: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, kind), rows)

    columns = {
        "request_id": ids,
        "row": zero,
        "key_hash": pa.array([hashed[key] for key in keys], pa.string()),
        "time": asked,
        "latency_ms": constant(None, pa.float64()),
        "arm": constant("history", pa.string()),
        "assigned": constant("stable", pa.string()),
        "route": constant("history", pa.string()),
        "version": constant(0, pa.int64()),
        "status": zero,
        "score": constant(None, pa.float64()),
    }
    for name, feature in data.features.items():
        if feature.sensitive:
            values = table[name].to_pylist()
            columns[f"feature_{name}"] = masked_column(feature, values, secret)
        else:
            columns[f"feature_{name}"] = table[name]
    schema = prediction_schema(spec)
    predictions = pa.table({name: columns[name] for name in schema.names}).cast(schema)
    labels = pa.table(
        {
            "request_id": ids,
            "row": zero,
            "value": table[data.label.name].cast(pa.float64()),
            "time": learnt,
            "received": learnt,
            "source": constant(source, pa.string()),
        }
    ).cast(LABEL_SCHEMA)
    _write_days(predictions, "time", store.predictions(spec.name), digest)
    _write_days(labels, "received", store.labels(spec.name), digest)
    log.info("%s: imported %d rows of history", spec.name, rows)
    return rows


def _digest(table: pa.Table) -> str:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return hashlib.sha256(sink.getvalue()).hexdigest()[:12]


def _write_days(table: pa.Table, time: str, folder: Path, digest: str) -> None:
    days = pc.strftime(table[time], "%Y-%m-%d").to_numpy(zero_copy_only=False)
    order = np.argsort(days, kind="stable")
    table, days = table.take(order), days[order]
    starts = np.flatnonzero(np.r_[True, days[1:] != days[:-1]])
    for start, end in zip(starts, np.r_[starts[1:], len(days)], strict=True):
        place = folder / f"date={days[start]}" / "hour=00"
        place.mkdir(parents=True, exist_ok=True)
        temporary = place / f".history-{digest}.tmp"
        pq.write_table(table.slice(start, end - start), temporary)
        temporary.rename(place / f"history-{digest}.parquet")
