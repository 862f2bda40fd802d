"""Evaluates a candidate on the holdout, against the champion that serves now.

The candidate is its checkpoint; the champion is its SavedModel, run as it is served. A bad model
never raises: it gets a verdict with reasons.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from perennial.errors import Conflict
from perennial.spec import ModelSpec
from perennial.store import Store, is_published, publishing, read_manifest, verify
from training import gate
from training.job import Request, run_job
from training.metrics import metric, metrics_of
from training.snapshot import HOLDOUT

log = logging.getLogger(__name__)

RESULT_FILE = "evaluation.json"


@dataclass(frozen=True)
class EvaluationResult:
    """The verdict on a candidate.

    Attributes:
        passed: every gate and every slice holds.
        reasons: what failed, one sentence each; empty when passed.
        candidate, champion: metrics by name (None where undefined); champion None without one.
        baseline: metrics of the training rows' mean as a constant answer.
        rows: holdout rows.
        champion_version: against which it was judged; None: there was none.
        path: the artifact.
    """

    passed: bool
    reasons: tuple[str, ...]
    gates: tuple[gate.GateResult, ...]
    slices: tuple[gate.SliceResult, ...]
    candidate: dict[str, float | None]
    champion: dict[str, float | None] | None
    baseline: dict[str, float | None]
    rows: int
    champion_version: int | None
    path: Path


def evaluate(
    spec: ModelSpec, store: Store, episode_id: str, *, champion_version: int | None
) -> EvaluationResult:
    """Publishes `runs/<episode>/evaluation-<champion_version or 0>`, or returns what is there.

    Raises:
        Permanent: `store.*` (a missing or changed checkpoint, snapshot or champion), `job.*`,
            `hooks.*`, `served.inputs` (the champion wants features that are no more).
    """
    if (done := published(spec, store, episode_id, champion_version)) is not None:
        return done
    request = request_for(spec, store, episode_id, champion_version)
    with run_job(spec, request, store.run(spec.name, episode_id)) as answer:
        return conclude(spec, store, episode_id, champion_version, answer.predictions)


def published(
    spec: ModelSpec, store: Store, episode_id: str, champion_version: int | None
) -> EvaluationResult | None:
    """The evaluation against this champion, when there is one."""
    target = _target(spec, store, episode_id, champion_version)
    return _read(target) if is_published(target) else None


def request_for(
    spec: ModelSpec, store: Store, episode_id: str, champion_version: int | None
) -> Request:
    """The job that gives the predictions, after its parts are verified."""
    trained = store.run(spec.name, episode_id) / "checkpoint"
    source = store.snapshot(spec.name, episode_id)
    verify(trained)
    verify(source)
    champion = None
    if champion_version is not None:
        champion = store.version(spec.name, champion_version)
        verify(champion)
    return Request(checkpoint=trained, holdout=source / HOLDOUT, champion=champion)


def conclude(
    spec: ModelSpec,
    store: Store,
    episode_id: str,
    champion_version: int | None,
    predictions: dict[str, np.ndarray],
) -> EvaluationResult:
    """Judges the predictions (`trained`, and `champion` if there is one) and publishes."""
    source = store.snapshot(spec.name, episode_id)
    rows = pq.read_table(source / HOLDOUT)
    labels = rows["label"].to_numpy()
    kind = spec.data.label.kind
    mean = read_manifest(source).facts["label_mean_train"]
    candidate = metrics_of(kind, labels, predictions["trained"])
    champion = None
    if champion_version is not None:
        champion = metrics_of(kind, labels, predictions["champion"])
    gates = gate.judge(spec.evaluation, candidate, champion)
    slices = tuple(_slices(spec, rows, labels, predictions))
    reasons = [result.says for result in gates if not result.passed]
    reasons += [
        f"slice {s.feature}={s.level} ({s.rows} rows): {s.metric} {s.candidate} against the "
        f"champion's {s.champion}, allowed is {spec.evaluation.slice_max_regression}"
        for s in slices
        if not s.passed
    ]
    result = EvaluationResult(
        passed=not reasons,
        reasons=tuple(reasons),
        gates=gates,
        slices=slices,
        candidate=_finite(candidate),
        champion=_finite(champion) if champion is not None else None,
        baseline=_finite(metrics_of(kind, labels, np.full(len(labels), mean))),
        rows=rows.num_rows,
        champion_version=champion_version,
        path=_target(spec, store, episode_id, champion_version),
    )
    parents = {"checkpoint": episode_id, "snapshot": episode_id}
    if champion_version is not None:
        parents["version"] = str(champion_version)
    try:
        with publishing(
            result.path, kind="evaluation", model=spec.name, id=episode_id, parents=parents
        ) as (folder, facts):
            content = {key: value for key, value in asdict(result).items() if key != "path"}
            (folder / RESULT_FILE).write_text(json.dumps(content, indent=1))
            facts.update(passed=result.passed, reasons=reasons, spec_hash=spec.spec_hash)
    except Conflict:
        log.info("%s %s: evaluated by somebody else meanwhile", spec.name, episode_id)
    return _read(result.path)


def _slices(
    spec: ModelSpec, rows: pa.Table, labels: np.ndarray, predictions: dict[str, np.ndarray]
) -> Iterator[gate.SliceResult]:
    name = spec.evaluation.gates[0].metric
    for feature in spec.evaluation.slices:
        column = rows[f"feature_{feature}"].cast(pa.string()).fill_null("")
        levels = column.to_numpy(zero_copy_only=False)
        for level in sorted(set(levels)):
            here = levels == level
            if here.sum() < spec.evaluation.slice_min_rows:
                continue
            candidate = metric(name, labels[here], predictions["trained"][here])
            champion = None
            if "champion" in predictions:
                champion = metric(name, labels[here], predictions["champion"][here])
            yield gate.SliceResult(
                feature=feature,
                level=level,
                rows=int(here.sum()),
                metric=name,
                candidate=_or_none(candidate),
                champion=_or_none(champion),
                passed=gate.slice_passes(
                    name, candidate, champion, spec.evaluation.slice_max_regression
                ),
            )


def _target(spec: ModelSpec, store: Store, episode_id: str, champion_version: int | None) -> Path:
    return store.run(spec.name, episode_id) / f"evaluation-{champion_version or 0}"


def _read(target: Path) -> EvaluationResult:
    content: dict[str, Any] = json.loads((target / RESULT_FILE).read_text())
    return EvaluationResult(
        **{
            **content,
            "reasons": tuple(content["reasons"]),
            "gates": tuple(gate.GateResult(**g) for g in content["gates"]),
            "slices": tuple(gate.SliceResult(**s) for s in content["slices"]),
        },
        path=target,
    )


def _finite(metrics: dict[str, float]) -> dict[str, float | None]:
    return {name: _or_none(value) for name, value in metrics.items()}


def _or_none(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
