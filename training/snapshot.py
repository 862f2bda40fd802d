"""The snapshot: exactly the rows that one episode learns from and is judged on.

train-*.tfrecord    training rows as packed Examples, the oldest first
layout.json         what the packed columns are, and the levels behind the codes
encoding.json       vocabularies and moments of the training rows
holdout.parquet     the newest share of the rows, kept apart
quarantine.parquet  rows that a check refused, with the reasons
profile.json        reference profile of every feature and the label, for drift
validation.json     what validation said;  data_docs/  the same for people
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from perennial.spec import FeatureType, ModelSpec
from training.hooks import Encoding, learnable
from training.tfrecord import write_examples

ROWS_PER_SHARD = 100_000
MAX_LEVELS = 10_000
PROFILE_BINS = 20
HOLDOUT, QUARANTINE, LAYOUT = "holdout.parquet", "quarantine.parquet", "layout.json"
ENCODING, PROFILE, VALIDATION = "encoding.json", "profile.json", "validation.json"


@dataclass(frozen=True)
class Layout:
    """How a training record is packed.

    Attributes:
        codes: features in `codes`, int64 [len(codes)]: integers, booleans, and strings as indices.
        numbers: features in `numbers`, float32 [len(numbers)].
        levels: the strings behind the indices, by feature.
    """

    codes: tuple[str, ...]
    numbers: tuple[str, ...]
    levels: dict[str, list[str]]

    def write(self, path: Path) -> None:
        content = {"codes": self.codes, "numbers": self.numbers, "levels": self.levels}
        path.write_text(json.dumps(content))

    @classmethod
    def read(cls, path: Path) -> Layout:
        content = json.loads(path.read_text())
        return cls(tuple(content["codes"]), tuple(content["numbers"]), content["levels"])


def is_complete(spec: ModelSpec, rows: pa.Table) -> np.ndarray:
    """Which rows can be packed: a label, and every string, integer and boolean known. [row] bool"""
    complete = pc.and_(pc.is_valid(rows["label"]), pc.is_finite(pc.fill_null(rows["label"], 0.0)))
    for name, feature in learnable(spec).items():
        if feature.type != FeatureType.FLOAT:
            complete = pc.and_(complete, pc.is_valid(rows[f"feature_{name}"]))
    return complete.to_numpy()


def split(rows: pa.Table, holdout_fraction: float) -> tuple[pa.Table, pa.Table]:
    """(training rows, holdout): the newest fraction of rows in time order is the holdout."""
    cut = rows.num_rows - max(1, round(rows.num_rows * holdout_fraction))
    return rows.slice(0, cut), rows.slice(cut)


def write_rows(folder: Path, spec: ModelSpec, train: pa.Table, holdout: pa.Table) -> dict[str, Any]:
    """Writes shards, layout, encoding, holdout and profile; returns facts for the manifest."""
    encoding = encoding_of(spec, train)
    encoding.write(folder / ENCODING)
    layout, packed = _pack(spec, train)
    layout.write(folder / LAYOUT)
    shards = max(1, -(-train.num_rows // ROWS_PER_SHARD))
    bounds = np.linspace(0, train.num_rows, shards + 1).astype(int)
    for i in range(shards):
        part = {name: values[bounds[i] : bounds[i + 1]] for name, values in packed.items()}
        write_examples(folder / f"train-{i:05d}-of-{shards:05d}.tfrecord", part)
    pq.write_table(holdout, folder / HOLDOUT)
    profile = profile_of(spec, pa.concat_tables([train, holdout]))
    (folder / PROFILE).write_text(json.dumps(profile, indent=1))
    return {
        "train_rows": train.num_rows,
        "holdout_rows": holdout.num_rows,
        "train_first": train["time"][0].as_py().isoformat(),
        "train_last": train["time"][-1].as_py().isoformat(),
        "holdout_first": holdout["time"][0].as_py().isoformat(),
        "holdout_last": holdout["time"][-1].as_py().isoformat(),
        "label_mean_train": pc.mean(train["label"]).as_py(),
        "label_mean_holdout": pc.mean(holdout["label"]).as_py(),
    }


def encoding_of(spec: ModelSpec, train: pa.Table) -> Encoding:
    """Vocabularies (at most 10,000 levels each) and moments of the training rows."""
    vocabularies, moments = {}, {}
    for name, feature in learnable(spec).items():
        column = train[f"feature_{name}"]
        if feature.type == FeatureType.STRING:
            counts = {v["values"]: v["counts"] for v in pc.value_counts(column).to_pylist()}
            vocabularies[name] = sorted(counts, key=lambda level: (-counts[level], level))[
                :MAX_LEVELS
            ]
        elif feature.type != FeatureType.BOOL:
            values = _floats(column)
            values = values[np.isfinite(values)]
            mean, deviation = (values.mean(), values.std()) if len(values) else (0.0, 1.0)
            moments[name] = (float(mean), float(deviation) or 1.0)
    return Encoding(vocabularies, moments)


def profile_of(spec: ModelSpec, rows: pa.Table) -> dict[str, Any]:
    """The reference profile: per feature its levels, or a histogram between its quantiles.

    Number: `edges` [bin + 1] from quantiles, the outer ones open; `counts` [bin]; `unknown`.
    Level: `counts` by level (the 200 most frequent), `other`, `unknown`.
    """
    features = {}
    for name, feature in learnable(spec).items():
        column = rows[f"feature_{name}"]
        if feature.type in (FeatureType.STRING, FeatureType.BOOL):
            known = column.drop_null().cast(pa.string())
            counts = {v["values"]: v["counts"] for v in pc.value_counts(known).to_pylist()}
            top = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:200])
            features[name] = {
                "kind": "level",
                "counts": top,
                "other": len(known) - sum(top.values()),
                "unknown": column.null_count,
            }
            continue
        values = _floats(column)
        known = values[np.isfinite(values)]
        inner = np.linspace(0, 1, PROFILE_BINS + 1)[1:-1]
        edges = np.unique(np.quantile(known, inner)) if len(known) else np.empty(0)
        bins = np.bincount(np.searchsorted(edges, known, "right"), minlength=len(edges) + 1)
        features[name] = {
            "kind": "number",
            "edges": [None, *edges.tolist(), None],
            "counts": bins.tolist(),
            "mean": float(known.mean()) if len(known) else None,
            "deviation": float(known.std()) if len(known) else None,
            "unknown": len(values) - len(known),
        }
    return {
        "rows": rows.num_rows,
        "first": rows["time"][0].as_py().isoformat(),
        "last": rows["time"][-1].as_py().isoformat(),
        "label_mean": pc.mean(rows["label"]).as_py(),
        "features": features,
    }


def _pack(spec: ModelSpec, rows: pa.Table) -> tuple[Layout, dict[str, np.ndarray]]:
    codes: dict[str, np.ndarray] = {}
    numbers: dict[str, np.ndarray] = {}
    levels: dict[str, list[str]] = {}
    for name, feature in learnable(spec).items():
        column = rows[f"feature_{name}"].combine_chunks()
        if feature.type == FeatureType.STRING:
            coded = column.dictionary_encode()
            levels[name] = coded.dictionary.to_pylist()
            codes[name] = coded.indices.to_numpy().astype(np.int64)
        elif feature.type == FeatureType.FLOAT:
            numbers[name] = _floats(column).astype(np.float32)
        else:
            codes[name] = column.cast(pa.int64()).to_numpy()
    packed = {"label": _floats(rows["label"]).astype(np.float32)[:, None]}
    if codes:
        packed["codes"] = np.stack(list(codes.values()), axis=1)
    if numbers:
        packed["numbers"] = np.stack(list(numbers.values()), axis=1)
    return Layout(tuple(codes), tuple(numbers), levels), packed


def _floats(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """float64 with NaN where unknown. [row]"""
    return pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy()
