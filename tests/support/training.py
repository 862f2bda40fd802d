"""A small model under care and its labelled traffic, in the schemas of the real logs."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from perennial.records import LABEL_SCHEMA, TIME, prediction_schema
from perennial.spec import ModelSpec, load_spec
from perennial.store import Store

START = datetime(2030, 1, 1, tzinfo=UTC)
SECRET = b"a secret of the tests"
LEVELS = ("Aarhus", "Bern", "Cork", "Düsseldorf")

MODEL: dict[str, Any] = {
    "version": 1,
    "name": "clicks",
    "owner": "tests",
    "data": {
        "features": {
            "city": {"type": "string"},
            "hour": {"type": "int"},
            "amount": {"type": "float"},
            "member": {"type": "bool"},
            "email": {"type": "string", "sensitive": "drop"},
        },
        "label": {"name": "clicked", "kind": "binary"},
        "output": "click",
        "routing_key": "user",
        "label_horizon": "1h",
    },
    "training": {
        "workers": 2,
        "global_batch": 64,
        "epochs": 2,
        "learning_rate": 0.01,
        "checkpoint_every_steps": 20,
        "min_rows": 500,
        "max_restarts": 3,
    },
    "evaluation": {
        "gates": [
            {"metric": "log_loss", "max_regression": 0.02, "bound": 0.68},
            {"metric": "auc", "max_regression": 0.02, "bound": 0.6},
        ],
        "slices": ["city"],
        "slice_min_rows": 50,
    },
    "export": {"compression": "int8", "max_size_ratio": 1.0, "max_accuracy_loss": 0.005},
    "release": {"ramp": [{"share": 0.5, "min_duration": "1m"}], "primary_metric": "log_loss"},
}

MODEL_CODE = """
import keras
from keras import layers, ops


def build_model(context):
    inputs = context.inputs()
    city = layers.StringLookup(vocabulary=context.vocabularies["city"], name="city_lookup")
    size = len(context.vocabularies["city"]) + 1
    mean, deviation = context.moments["amount"]
    unknown = ops.isnan(inputs["amount"])
    amount = ops.where(unknown, ops.zeros_like(inputs["amount"]), inputs["amount"] - mean)
    numbers = ops.stack(
        [
            amount / deviation,
            ops.cast(unknown, "float32"),
            ops.cast(inputs["member"], "float32"),
            ops.cast(inputs["hour"], "float32") / 24,
        ],
        -1,
    )
    x = layers.Concatenate(name="encoded")(
        [layers.Embedding(size, 4, name="city_embedding")(city(inputs["city"])), numbers]
    )
    x = layers.Dense(WIDTH, activation="relu", name="hidden")(x)
    x = layers.Dropout(0.1, name="dropout")(x)
    x = layers.Dense(WIDTH, activation="relu", name="hidden_2")(x)
    click = layers.Dense(1, activation="sigmoid", name="click")(x)
    return keras.Model(inputs, {context.output: click}, name="clicks")
"""

EXPECTATIONS: list[dict[str, Any]] = [
    {
        "type": "expect_column_values_to_be_in_set",
        "kwargs": {"column": "city", "value_set": list(LEVELS), "mostly": 0.95},
        "severity": "critical",
    },
    {
        "type": "expect_column_values_to_be_between",
        "kwargs": {"column": "hour", "min_value": 0, "max_value": 23, "mostly": 0.99},
        "severity": "critical",
    },
    {
        "type": "expect_column_values_to_be_between",
        "kwargs": {"column": "amount", "min_value": -1000, "max_value": 1000},
        "severity": "warning",
    },
    {
        "type": "expect_column_values_to_not_be_null",
        "kwargs": {"column": "amount", "mostly": 0.5},
        "severity": "warning",
        "meta": {"quarantine": False},
    },
    {
        "type": "expect_column_mean_to_be_between",
        "kwargs": {"column": "clicked", "min_value": 0.05, "max_value": 0.95},
        "severity": "critical",
    },
]


def write_model(
    models_dir: Path,
    *,
    width: int = 64,
    expectations: list[dict[str, Any]] | None = None,
    **changes: dict[str, Any],
) -> ModelSpec:
    """Writes the folder of the model `clicks`; `changes` are merged into model.yaml's parts."""
    folder = models_dir / "clicks"
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        part: {**value, **changes.get(part, {})} if isinstance(value, dict) else value
        for part, value in MODEL.items()
    }
    (folder / "model.yaml").write_text(yaml.safe_dump(content, allow_unicode=True))
    (folder / "model.py").write_text(MODEL_CODE.replace("WIDTH", str(width)))
    suite = EXPECTATIONS if expectations is None else expectations
    (folder / "expectations.yaml").write_text(yaml.safe_dump(suite, allow_unicode=True))
    return load_spec(folder)


def clicks(rows: int, *, seed: int = 0, start: datetime = START) -> pa.Table:
    """Labelled rows, one a second: `city` and `amount` decide, `amount` is unknown at times."""
    random = np.random.default_rng(seed)
    city = random.integers(0, len(LEVELS), rows)
    amount = random.normal(20, 10, rows)
    member = random.random(rows) < 0.3
    signal = (city - 1.5) + (amount - 20) / 10 + member
    clicked = random.random(rows) < 1 / (1 + np.exp(-signal))
    asked = [start + timedelta(seconds=i) for i in range(rows)]
    return pa.table(
        {
            "city": [LEVELS[i] for i in city],
            "hour": random.integers(0, 24, rows),
            "amount": np.where(random.random(rows) < 0.1, np.nan, amount),
            "member": member,
            "email": [f"user{i}@example.org" for i in range(rows)],
            "user": [f"user{i % 97}" for i in range(rows)],
            "clicked": clicked.astype("f8"),
            "scheduled": pa.array(asked, TIME),
            "known": pa.array([t + timedelta(minutes=5) for t in asked], TIME),
        }
    )


def write_predictions(spec: ModelSpec, store: Store, records: list[dict[str, Any]]) -> None:
    """Appends records to the prediction log; what is not given gets a usual value."""
    usual: dict[str, Any] = {
        "row": 0,
        "key_hash": "k",
        "latency_ms": 1.0,
        "arm": "stable",
        "assigned": "stable",
        "route": "split",
        "version": 1,
        "status": 0,
        "feature_city": "Bern",
        "feature_hour": 1,
        "feature_amount": 2.0,
        "feature_member": True,
        "feature_email": None,
        "score": 0.5,
    }
    _append(
        [{**usual, **record} for record in records],
        prediction_schema(spec),
        store.predictions(spec.name),
        "time",
    )


def write_labels(spec: ModelSpec, store: Store, records: list[dict[str, Any]]) -> None:
    """Appends records to the label log; `received` is `time` unless given."""
    full = [{"row": 0, "source": "test", "received": r["time"], **r} for r in records]
    _append(full, LABEL_SCHEMA, store.labels(spec.name), "received")


def _append(records: list[dict[str, Any]], schema: pa.Schema, folder: Path, time: str) -> None:
    for record in records:
        place = folder / record[time].strftime("date=%Y-%m-%d/hour=%H")
        place.mkdir(parents=True, exist_ok=True)
        name = f"part-{len(list(place.iterdir())):05d}.parquet"
        pq.write_table(pa.Table.from_pylist([record], schema), place / name)


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], deadline_s: float = 30) -> None:
    deadline = time.monotonic() + deadline_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.05)


def wait_for_process(*words: str, deadline_s: float = 60) -> int:
    """The id of a process whose command line holds every word."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        for folder in Path("/proc").iterdir():
            try:
                line = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if all(word in line for word in words):
                return int(folder.name)
        time.sleep(0.05)
    raise AssertionError(f"no process with {words}")
