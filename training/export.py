"""Exports a trained candidate as the SavedModel that is served, and publishes it as a version.

int8 on disk is tried against float32 of the same weights in the same run, both loaded through the
serving path in a process that has never seen the model's code. "Kept float32" is an honest outcome.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from perennial.errors import Conflict, Permanent
from perennial.records import Manifest
from perennial.spec import ModelSpec
from perennial.store import MANIFEST, Store, is_published, publishing, read_manifest, verify
from training import evaluate as evaluation
from training.evaluate import EvaluationResult
from training.job import Answer, Request, run_job
from training.metrics import metric, regression_of
from training.snapshot import HOLDOUT

log = logging.getLogger(__name__)

# Float32 through the serving path must agree with training up to the order of operations.
FLOAT32_TOLERANCE = 1e-4


@dataclass(frozen=True)
class ExportResult:
    """What was exported.

    Attributes:
        path: the artifact, itself the SavedModel.
        compression: what was kept: `int8` or `none`.
        kept_float32_because: why int8 was not kept; "" when it was, or was not asked for.
        size_bytes, size_ratio: of graph and weights, against float32 of the same weights.
        max_abs_error: largest difference to the trained model on the holdout.
        metric, accuracy_loss: the first gate's metric, and how much worse the export is on it.
        latency_ms: median of one call by batch size, for `int8` and `none`, as measured here.
        rows: holdout rows that were compared.
    """

    path: Path
    compression: str
    kept_float32_because: str
    size_bytes: int
    size_ratio: float
    max_abs_error: float
    metric: str
    accuracy_loss: float
    latency_ms: dict[str, dict[str, float]]
    rows: int


def export(spec: ModelSpec, store: Store, episode_id: str) -> ExportResult:
    """Publishes `exports/<episode>`, or returns what is there.

    Raises:
        Permanent: `export.skew` (float32 through the serving path differs from the trained model),
            `store.*`, `job.*`, `hooks.*`.
    """
    target = store.export(spec.name, episode_id)
    if is_published(target):
        return _result(target, read_manifest(target))
    request = _with_variants(
        spec, episode_id, evaluation.request_for(spec, store, episode_id, None)
    )
    with run_job(spec, request, store.run(spec.name, episode_id)) as answer:
        return conclude(spec, store, episode_id, answer)


def evaluate_and_export(
    spec: ModelSpec, store: Store, episode_id: str, *, champion_version: int | None
) -> tuple[EvaluationResult, ExportResult | None]:
    """`evaluate` and `export` in one child: one import of TensorFlow.

    A candidate that failed its gate is exported too where that works, so that an override goes on
    at once; it is returned for one that passed only.
    """
    done = evaluation.published(spec, store, episode_id, champion_version)
    if done is not None:
        return done, export(spec, store, episode_id) if done.passed else None
    request = evaluation.request_for(spec, store, episode_id, champion_version)
    if not is_published(store.export(spec.name, episode_id)):
        request = _with_variants(spec, episode_id, request)
    with run_job(spec, request, store.run(spec.name, episode_id)) as answer:
        result = evaluation.conclude(spec, store, episode_id, champion_version, answer.predictions)
        if result.passed and request.variants:
            return result, conclude(spec, store, episode_id, answer)
        if request.variants:
            try:
                conclude(spec, store, episode_id, answer)
            except Permanent as error:
                log.warning(
                    "%s %s failed its gate, its export too: %s", spec.name, episode_id, error
                )
    if not result.passed:
        return result, None
    return result, export(spec, store, episode_id)


def publish(spec: ModelSpec, store: Store, episode_id: str, version: int) -> Path:
    """Publishes the export as `versions/<version>`, by hard links where the file system has them.

    Publishing the same export as the same version again changes nothing.

    Raises:
        Permanent: `store.checksum`, when the export was changed; `store.unpublished`.
        Conflict: `publish.version_taken`, by another episode.
        ValueError: on a version below 1.
    """
    if version < 1:
        raise ValueError(f"version {version} is not a positive number")
    source, target = store.export(spec.name, episode_id), store.version(spec.name, version)
    manifest = verify(source)
    with contextlib.suppress(Conflict):
        with publishing(
            target,
            kind="version",
            model=spec.name,
            id=str(version),
            parents={**manifest.parents, "episode": episode_id, "export": episode_id},
        ) as (folder, facts):
            facts.update(manifest.facts, version=version)
            shutil.copytree(
                source,
                folder,
                copy_function=_link_or_copy,
                ignore=shutil.ignore_patterns(MANIFEST),
                dirs_exist_ok=True,
            )
    owner = read_manifest(target).parents.get("episode")
    if owner != episode_id:
        raise Conflict(
            "publish.version_taken",
            f"{spec.name}: version {version} was published by episode {owner}",
            hint="take the next version",
            version=version,
            episode=owner,
        )
    return target


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target


def _with_variants(spec: ModelSpec, episode_id: str, request: Request) -> Request:
    variants = ("int8", "none") if spec.export.compression == "int8" else ("none",)
    return Request(
        checkpoint=request.checkpoint,
        holdout=request.holdout,
        champion=request.champion,
        variants=variants,
        scope=f"{spec.name}/{episode_id}",
    )


def conclude(spec: ModelSpec, store: Store, episode_id: str, answer: Answer) -> ExportResult:
    rows = pq.read_table(store.snapshot(spec.name, episode_id) / HOLDOUT, columns=["label"])
    labels = rows["label"].to_numpy()
    trained = answer.predictions["trained"]
    float32_error = _max_abs_error(answer.predictions["none"], trained)
    if not float32_error <= FLOAT32_TOLERANCE * max(1.0, float(np.abs(trained).max())):
        raise Permanent(
            "export.skew",
            f"{spec.name} {episode_id}: the exported model differs from the trained one by "
            f"{float32_error:.3g} on the holdout",
            hint="something in build_model behaves differently in the exported graph",
            max_abs_error=float(float32_error),
        )
    name = spec.evaluation.gates[0].metric
    before = metric(name, labels, trained)
    sizes = {variant: _size(path) for variant, path in answer.savedmodels.items()}

    def measured(variant: str) -> dict[str, Any]:
        predicted = answer.predictions[variant]
        return {
            "compression": variant,
            "size_bytes": sizes[variant],
            "size_ratio": round(sizes[variant] / sizes["none"], 4),
            "max_abs_error": float(_max_abs_error(predicted, trained)),
            "metric": name,
            "accuracy_loss": float(regression_of(name, metric(name, labels, predicted), before)),
        }

    kept, because = measured(spec.export.compression), ""
    if spec.export.compression != "none" and (because := _fails(spec, kept)):
        log.warning("%s %s: kept float32: %s", spec.name, episode_id, because)
        kept = measured("none")
    target = store.export(spec.name, episode_id)
    parents = {"checkpoint": episode_id, "snapshot": episode_id}
    try:
        with publishing(target, kind="export", model=spec.name, id=episode_id, parents=parents) as (
            folder,
            facts,
        ):
            shutil.copytree(answer.savedmodels[kept["compression"]], folder, dirs_exist_ok=True)
            facts.update(
                kept,
                kept_float32_because=because,
                latency_ms={n: f["latency_ms"] for n, f in answer.facts.items()},
                warm_up_records=answer.facts[kept["compression"]]["warm_up_records"],
                inputs=answer.facts[kept["compression"]]["inputs"],
                output=spec.data.output,
                rows=rows.num_rows,
                spec_hash=spec.spec_hash,
            )
    except Conflict:
        log.info("%s %s: exported by somebody else meanwhile", spec.name, episode_id)
    return _result(target, read_manifest(target))


def _fails(spec: ModelSpec, measured: dict[str, Any]) -> str:
    """Why a compressed export is not kept; "" when it is."""
    loss, ratio = measured["accuracy_loss"], measured["size_ratio"]
    if not loss <= spec.export.max_accuracy_loss:
        return (
            f"{measured['metric']} is worse by {loss:.4g}, "
            f"export.max_accuracy_loss is {spec.export.max_accuracy_loss:g}"
        )
    if ratio > spec.export.max_size_ratio:
        return (
            f"its size is {ratio:.2f} of float32, "
            f"export.max_size_ratio is {spec.export.max_size_ratio:g}"
        )
    return ""


def _max_abs_error(a: np.ndarray, b: np.ndarray) -> float:
    """NaN where only one is not finite counts as infinite."""
    difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
    same = np.isnan(a) & np.isnan(b)
    return float(np.where(same, 0.0, np.nan_to_num(difference, nan=np.inf)).max(initial=0.0))


def _size(folder: Path) -> int:
    """Bytes of graph and weights; warm-up requests are not part of the model."""
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and "assets.extra" not in path.parts
    )


def _result(target: Path, manifest: Manifest) -> ExportResult:
    facts = manifest.facts
    return ExportResult(
        path=target,
        **{name: facts[name] for name in ExportResult.__dataclass_fields__ if name != "path"},
    )
