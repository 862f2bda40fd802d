"""What crosses between rooms: the typed records of the log, and the manifests of artifacts.

The prediction log and the label log are Parquet, partitioned by the UTC date and hour of the
request and of the label's arrival. Their columns:

prediction log (one row per example of a request; `prediction_schema(spec)`)
    request_id        x-request-id, unique per call
    row               index of the example in the request's batch
    key_hash          hex HMAC-SHA-256 of the routing key, 32 characters; "" without a key
    time              when the request arrived, UTC
    latency_ms        as the router measured it
    arm               who answered: stable | canary | shadow | history (imported, nobody answered)
    assigned          who should have answered: stable | canary (differs from arm: a fallback) |
                      shadow
    route             split | forced | default (no model was named; stable answered) | shadow (a
                      copy of the split call with this request_id; no client saw the answer) |
                      history
    version           served model version as the reply says; 0: no reply or history
    status            gRPC status code of the reply, 0 = OK; -1: the client went away
    feature_<name>    one column per feature of model.yaml, masked as it says (`masked_column`)
    score             the output tensor `data.output`; null without an answer

label log (one row per label; `LABEL_SCHEMA`)
    request_id, row   which prediction
    value             the label as a float: 0/1 for binary
    time              when it came to be known, by the sender's clock, UTC
    received          when the intake took it, UTC
    source            who says so
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from perennial.spec import Feature, FeatureType, ModelSpec

TIME = pa.timestamp("us", tz="UTC")

ARROW_TYPE = {
    FeatureType.STRING: pa.string(),
    FeatureType.INT: pa.int64(),
    FeatureType.FLOAT: pa.float64(),
    FeatureType.BOOL: pa.bool_(),
}

LABEL_SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("row", pa.int32()),
        ("value", pa.float64()),
        ("time", TIME),
        ("received", TIME),
        ("source", pa.string()),
    ]
)


def prediction_schema(spec: ModelSpec) -> pa.Schema:
    """The Arrow schema of one model's prediction log."""
    return pa.schema(
        [
            ("request_id", pa.string()),
            ("row", pa.int32()),
            ("key_hash", pa.string()),
            ("time", TIME),
            ("latency_ms", pa.float64()),
            ("arm", pa.string()),
            ("assigned", pa.string()),
            ("route", pa.string()),
            ("version", pa.int64()),
            ("status", pa.int32()),
            *((f"feature_{name}", stored_type(f)) for name, f in spec.data.features.items()),
            ("score", pa.float64()),
        ]
    )


def hash_key(secret: bytes, key: str) -> str:
    """A routing key as it is stored: the first 32 hex digits of HMAC-SHA-256; "" stays ""."""
    return hmac.digest(secret, key.encode(), "sha256").hex()[:32] if key else ""


def stored_type(feature: Feature) -> pa.DataType:
    """The Arrow type of a feature's column in the prediction log, after its mask."""
    masked = {"hash": pa.string(), "bucket": pa.int64(), "redact": pa.bool_()}
    return masked.get(feature.sensitive or "", ARROW_TYPE[feature.type])


def masked_column(feature: Feature, values: Sequence[Any], secret: bytes) -> pa.Array:
    """A feature's column of the prediction log: `values` ([rows], None: unknown) under its mask.

    `hash` is keyed by `secret`; `bucket` gives how many edges are at or below the value, null for
    NaN; `redact` gives whether the text is not empty.
    """
    kind = stored_type(feature)
    if feature.sensitive == "drop":
        return pa.nulls(len(values), kind)
    if feature.sensitive == "hash":
        return pa.array(hashed_column(secret, values), kind)
    if feature.sensitive == "redact":
        return pa.array([None if value is None else value != "" for value in values], kind)
    if feature.sensitive == "bucket":
        numbers = np.array([math.nan if value is None else value for value in values], "f8")
        indices = np.searchsorted(feature.edges, numbers, side="right")
        return pa.array(indices, kind, mask=np.isnan(numbers))
    return pa.array(values, kind)


def hashed_column(secret: bytes, values: Sequence[Any]) -> list[str | None]:
    """`hash_key` of each value's text, computed once per distinct value."""
    known = {
        value: None if value is None else hash_key(secret, str(value)) for value in set(values)
    }
    return [known[value] for value in values]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Record):
    """One file of an artifact."""

    path: str = Field(description="Relative to the artifact, with forward slashes.")
    size_bytes: int = Field(ge=0)
    sha256: str = Field(min_length=64, max_length=64)


class Manifest(_Record):
    """What an artifact is and exactly which bytes it holds. `manifest.json`, written last."""

    kind: str = Field(
        description="collected | validation | snapshot | checkpoint | evaluation | export | "
        "version | release | batch"
    )
    model: str
    id: str
    created: datetime
    files: tuple[FileEntry, ...]
    parents: dict[str, str] = Field(default_factory=dict, description="Artifacts it came from.")
    facts: dict[str, Any] = Field(default_factory=dict, description="Kind-specific, JSON.")
