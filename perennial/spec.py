"""`model.yaml`: what one model under care wants. Validated; unknown keys are errors.

`load_spec(folder)` reads `model.yaml`, merges `model.<profile>.yaml` over it when a profile is set,
and returns a frozen `ModelSpec`. `spec_hash` names exactly what an episode ran under.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterator
from datetime import timedelta
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from perennial.durations import Duration
from perennial.errors import Permanent

NAME_FORM = re.compile(r"[a-z][a-z0-9_]{0,39}")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class FeatureType(StrEnum):
    """The type of one feature on the wire and in the log."""

    STRING = "string"
    INT = "int"
    FLOAT = "float"
    BOOL = "bool"


MASKED_TYPES: Final = {
    # A float's text differs between gRPC and REST, so that its hash would; two values hide nothing.
    "hash": (FeatureType.STRING, FeatureType.INT),
    "bucket": (FeatureType.INT, FeatureType.FLOAT),
    "redact": (FeatureType.STRING,),
}


class Feature(_Part):
    """One input tensor of the model: shape [batch], one value per row."""

    type: FeatureType
    sensitive: Literal["drop", "hash", "bucket", "redact"] | None = Field(
        None,
        description="What the recorder does before anything is written; null: keep. drop: null. "
        "hash (string, int): keyed hash. bucket (int, float): which of `edges` it lies between. "
        "redact (string): whether it was there at all.",
    )
    edges: tuple[float, ...] = Field(
        (),
        description="Of `bucket`, increasing; stored is how many are at or below the value.",
    )
    description: str = ""

    @model_validator(mode="after")
    def _fits(self) -> Feature:
        fitting = MASKED_TYPES.get(self.sensitive or "", tuple(FeatureType))
        if self.type not in fitting:
            raise ValueError(
                f"sensitive: {self.sensitive} is for {' and '.join(fitting)} features, "
                f"this one is {self.type}"
            )
        if (self.sensitive == "bucket") != bool(self.edges):
            raise ValueError("sensitive: bucket and edges belong together")
        if not all(map(math.isfinite, self.edges)) or any(b <= a for a, b in pairwise(self.edges)):
            raise ValueError(f"edges must be finite and increasing, got {list(self.edges)}")
        return self


class Label(_Part):
    name: str = Field(description="Name of the label; the score's output tensor has `output`.")
    kind: Literal["binary", "regression"] = "binary"


class Data(_Part):
    features: dict[str, Feature] = Field(min_length=1)
    label: Label
    output: str = Field(description="Output tensor of the score, [batch] or [batch, 1].")
    routing_key: str = Field(
        description="What identifies the unit of an experiment; clients send its value in the "
        "header x-routing-key."
    )
    label_horizon: Duration = Field(
        description="Age at which a prediction's label is expected to have arrived (matured)."
    )
    label_feedback: Literal["none", "possible"] = Field(
        "none", description="Whether what was served can change the label."
    )


class Threshold(_Part):
    """One condition on what serving reports; rendered into Prometheus rules."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    metric: Literal[
        "log_loss", "brier", "mae", "error_rate", "latency_p99_ms", "staleness_s", "label_coverage"
    ]
    above: float | None = Field(None, description="Breached above this value.")
    below: float | None = Field(None, description="Breached below this value.")
    worse_than_promotion: float | None = Field(
        None, gt=0, description="Breached when the metric exceeds its value at promotion by this."
    )
    window: Duration = timedelta(hours=1)
    for_: Duration = Field(timedelta(0), alias="for", description="How long it must hold.")
    min_count: int = Field(0, ge=0, description="Fewer matured rows than this is 'no data'.")
    action: Literal["retrain", "page"] = "page"

    @model_validator(mode="after")
    def _one_bound(self) -> Threshold:
        given = [b for b in (self.above, self.below, self.worse_than_promotion) if b is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of above, below, worse_than_promotion")
        if self.action == "retrain" and self.metric in ("error_rate", "latency_p99_ms"):
            raise ValueError(
                f"a breach of {self.metric} pages and rolls back, it never retrains; "
                "use action: page"
            )
        return self


class RetrainPolicy(_Part):
    cooldown: Duration = Field(timedelta(days=1), description="Least time between two episodes.")
    max_per_week: int = Field(7, ge=1)
    min_new_labels: int = Field(1000, ge=0, description="Matured rows since the champion's data.")


class Window(_Part):
    max_rows: int = Field(1_000_000, ge=1, description="The newest matured rows, at most.")
    max_age: Duration | None = Field(None, description="Nothing older; null: no limit.")


class Training(_Part):
    strategy: Literal["one_device", "multi_worker_mirrored"] = "multi_worker_mirrored"
    workers: int = Field(2, ge=1, le=64)
    global_batch: int = Field(1024, ge=1)
    epochs: float = Field(4.0, gt=0, description="Passes over the training rows.")
    learning_rate: float = Field(1e-3, gt=0)
    clip_norm: float | None = Field(1.0, gt=0)
    warm_start: Literal["champion", "scratch"] = "champion"
    window: Window = Window()
    holdout_fraction: float = Field(0.15, gt=0, lt=0.9, description="Newest share, kept apart.")
    checkpoint_every_steps: int = Field(100, ge=1)
    seed: int = 17
    max_duration: Duration = timedelta(hours=6)
    max_restarts: int = Field(3, ge=0)
    min_rows: int = Field(1000, ge=1)

    @model_validator(mode="after")
    def _divides(self) -> Training:
        if self.global_batch % self.workers:
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of workers {self.workers}"
            )
        return self


Metric = Literal["log_loss", "auc", "brier", "accuracy", "mae", "rmse"]


class Gate(_Part):
    """The candidate may be worse than the champion by at most `max_regression` on `metric`."""

    metric: Metric
    max_regression: float = Field(0.0, ge=0, description="Absolute, in the metric's own unit.")
    bound: float | None = Field(None, description="Absolute bound, with or without a champion.")


class Evaluation(_Part):
    gates: tuple[Gate, ...] = Field(min_length=1)
    slices: tuple[str, ...] = Field((), description="Features whose levels are evaluated apart.")
    slice_min_rows: int = Field(200, ge=1)
    slice_max_regression: float | None = Field(
        None, ge=0, description="Bound on the first gate's metric in each slice; null: report only."
    )


class Export(_Part):
    compression: Literal["int8", "none"] = "int8"
    max_size_ratio: float = Field(1.0, gt=0, description="Against the same weights in float32.")
    max_accuracy_loss: float = Field(
        0.005, ge=0, description="Of the first gate's metric, exported against trained model."
    )


class Stage(_Part):
    share: float = Field(gt=0, le=0.5)
    min_duration: Duration = timedelta(hours=1)


class Guardrail(_Part):
    metric: Literal["error_rate"] = "error_rate"
    alpha: float = Field(0.01, gt=0, lt=0.5)
    max_ratio: float = Field(5.0, gt=1, description="Tripwire: at >= 50 requests, at once.")


class Release(_Part):
    ramp: tuple[Stage, ...] = (
        Stage(share=0.01),
        Stage(share=0.05),
        Stage(share=0.25),
        Stage(share=0.5),
    )
    shadow_percent: int = Field(
        100, ge=0, le=100, description="While shadowing: share of the calls that are mirrored."
    )
    hedge_after: Duration = Field(
        timedelta(seconds=1),
        description="A call that the canary has not answered by then is asked of stable as well.",
    )
    shadow_duration: Duration = Field(
        timedelta(0),
        lt=timedelta(hours=20),
        description="How long calls are mirrored before the ramp; 0: while the canary loads.",
    )
    primary_metric: Literal["log_loss", "brier", "absolute_error"] = "log_loss"
    clip: float = Field(4.0, gt=0, description="Cap of the loss of one row, declared beforehand.")
    objective: Literal["non_inferior", "superior"] = "non_inferior"
    margin: float = Field(0.01, ge=0, description="Absolute, in the primary metric's unit.")
    advance_margin: float | None = Field(None, ge=0, description="Default: 5 x margin.")
    mde: float = Field(0.02, gt=0, description="Effect that the sequence is tuned to detect.")
    alpha: float = Field(0.05, gt=0, lt=0.5)
    min_keys: int = Field(300, ge=2, description="Labelled routing keys per arm before a verdict.")
    min_keys_stage: int = Field(100, ge=2, description="Labelled canary keys to advance a stage.")
    guardrails: tuple[Guardrail, ...] = (Guardrail(),)
    max_duration: Duration = timedelta(days=7)
    on_inconclusive: Literal["keep_champion", "promote"] = "keep_champion"
    approval: Literal["none", "required"] = "none"
    probation: Duration = timedelta(hours=24)

    @model_validator(mode="after")
    def _nested(self) -> Release:
        shares = [stage.share for stage in self.ramp]
        if not shares or any(b <= a for a, b in pairwise(shares)):
            raise ValueError(f"ramp shares must grow from stage to stage, got {shares}")
        return self


class ModelSpec(_Part):
    """One model under care."""

    version: Literal[1] = 1
    name: str
    description: str = ""
    owner: str = Field(description="Who answers for the model.")
    data: Data
    thresholds: tuple[Threshold, ...] = ()
    retrain: RetrainPolicy = RetrainPolicy()
    training: Training = Training()
    evaluation: Evaluation
    export: Export = Export()
    release: Release = Release()
    folder: Path = Field(Path(), exclude=True, description="Where it was read from.")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not NAME_FORM.fullmatch(value):
            raise ValueError(f"{value!r} is not a lower-case identifier of at most 40 characters")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ModelSpec:
        for name in self.evaluation.slices:
            if name not in self.data.features:
                raise ValueError(f"evaluation.slices: {name!r} is not a feature")
        names = [threshold.name for threshold in self.thresholds]
        if len(set(names)) != len(names):
            raise ValueError(f"thresholds: names must differ, got {names}")
        return self

    @property
    def spec_hash(self) -> str:
        """SHA-256 over the canonical JSON of everything the spec says."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def load_spec(folder: Path, profile: str = "") -> ModelSpec:
    """Reads and validates one model's folder.

    Raises:
        Permanent: `spec.missing`, `spec.syntax`, `spec.unknown_key` (with the nearest known key) or
            `spec.invalid`, each naming the file and the place in it.
    """
    path = folder / "model.yaml"
    content = _read(path)
    if profile and (overlay := folder / f"model.{profile}.yaml").exists():
        content = _merge(content, _read(overlay))
        path = overlay
    try:
        spec = ModelSpec.model_validate({**content, "folder": folder})
    except ValidationError as error:
        raise _explain(path, error) from error
    if spec.name != folder.name:
        raise Permanent(
            "spec.invalid",
            f"{path}: name: {spec.name!r} differs from its folder {folder.name!r}",
            hint="name the folder as the model",
        )
    return spec


def load_specs(models_dir: Path, profile: str = "") -> dict[str, ModelSpec]:
    """All models under care, by name: the folders of `models_dir` that hold a `model.yaml`."""
    return {
        path.parent.name: load_spec(path.parent, profile)
        for path in sorted(models_dir.glob("*/model.yaml"))
    }


def json_schema() -> dict[str, Any]:
    """The published JSON schema of model.yaml."""
    schema = ModelSpec.model_json_schema(by_alias=True)
    schema["properties"].pop("folder", None)
    return schema


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise Permanent(
            "spec.missing", f"{path} does not exist", hint="models/flights shows one that works"
        ) from None
    except yaml.YAMLError as error:
        raise Permanent("spec.syntax", f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise Permanent("spec.syntax", f"{path}: expected a mapping, got {type(content).__name__}")
    return content


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = (
            _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return merged


def _explain(path: Path, error: ValidationError) -> Permanent:
    first = next((e for e in error.errors() if e["type"] == "extra_forbidden"), error.errors()[0])
    place = ".".join(str(part) for part in first["loc"]) or "(whole file)"
    if first["type"] != "extra_forbidden":
        value = first["input"]
        shown = f", got {value!r}" if isinstance(value, str | int | float | bool) else ""
        return Permanent("spec.invalid", f"{path}: {place}: {first['msg']}{shown}", place=place)
    key = str(first["loc"][-1])
    known = sorted(_known_keys(ModelSpec, first["loc"][:-1]))
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known here: {', '.join(known)}"
    return Permanent("spec.unknown_key", f"{path}: {place}: unknown key", hint=hint, place=place)


def _known_keys(model: type[BaseModel], loc: tuple[str | int, ...]) -> Iterator[str]:
    for part in loc:
        field = next((f for n, f in model.model_fields.items() if part in (n, f.alias)), None)
        if field is not None:
            inner = _inner_model(field.annotation)
            if inner is None:
                return
            model = inner
    for name, field in model.model_fields.items():
        if name != "folder":
            yield field.alias or name


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        if (found := _inner_model(argument)) is not None:
            return found
    return None
