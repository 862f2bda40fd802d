"""Validates what was collected and publishes the snapshot: Great Expectations decides.

A check that fails and a check that cannot be run are different things: the first is a verdict on
the data, the second is an error of ours and stops with `validate.broken_check`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from perennial.errors import Conflict, Permanent
from perennial.spec import ModelSpec
from perennial.store import Store, is_published, publishing, read_manifest, verify
from training import snapshot
from training.collect import ROWS_FILE

log = logging.getLogger(__name__)

SUITE_FILE = "expectations.yaml"


@dataclass(frozen=True)
class ValidationResult:
    """The verdict on the data.

    Attributes:
        accepted: no critical check failed and enough rows remain.
        critical_failures, warnings: one sentence per failed check.
        rows: rows that remain (training and holdout).
        quarantined: rows that were put aside.
        checks: how many checks ran.
        path: the snapshot, or when rejected `runs/<episode>/validation`.
    """

    accepted: bool
    critical_failures: tuple[str, ...]
    warnings: tuple[str, ...]
    rows: int
    quarantined: int
    checks: int
    path: Path


@dataclass(frozen=True)
class _Check:
    name: str
    passed: bool
    critical: bool
    says: str
    bad_rows: list[int]


def validate(spec: ModelSpec, store: Store, episode_id: str) -> ValidationResult:
    """Checks `runs/<episode>/collected`; publishes the snapshot, or the rejection.

    Raises:
        Permanent: `validate.suite` (expectations.yaml cannot be used), `validate.broken_check`
            (a check raised, naming it), `store.*` when the collected rows are missing or changed.
    """
    accepted = store.snapshot(spec.name, episode_id)
    rejected = store.run(spec.name, episode_id) / "validation"
    for target in (accepted, rejected):
        if is_published(target):
            return _result(target)

    collected = store.run(spec.name, episode_id) / "collected"
    known_at = verify(collected).facts.get("known_at")
    rows = pq.read_table(collected / ROWS_FILE)
    checks, page = _run_suite(spec, rows)

    reasons: dict[int, list[str]] = {}
    for check in checks:
        for i in check.bad_rows:
            reasons.setdefault(i, []).append(check.name)
    for i in np.flatnonzero(~snapshot.is_complete(spec, rows)).tolist():
        reasons.setdefault(i, []).append("incomplete")
    bad = np.zeros(rows.num_rows, bool)
    bad[list(reasons)] = True
    quarantine = rows.filter(pa.array(bad)).append_column(
        "reasons", pa.array([reasons[i] for i in sorted(reasons)], pa.list_(pa.string()))
    )
    good = rows.filter(pa.array(~bad))

    critical = [check.says for check in checks if check.critical and not check.passed]
    if good.num_rows < spec.training.min_rows:
        critical.append(
            f"{good.num_rows} rows remain of {rows.num_rows}, "
            f"training.min_rows is {spec.training.min_rows}"
        )
    warnings = [check.says for check in checks if not check.critical and not check.passed]
    target = rejected if critical else accepted
    result = ValidationResult(
        accepted=not critical,
        critical_failures=tuple(critical),
        warnings=tuple(warnings),
        rows=good.num_rows,
        quarantined=quarantine.num_rows,
        checks=len(checks),
        path=target,
    )
    try:
        with publishing(
            target,
            kind="validation" if critical else "snapshot",
            model=spec.name,
            id=episode_id,
            parents={"collected": episode_id},
        ) as (folder, facts):
            facts.update(_content(result), spec_hash=spec.spec_hash, known_at=known_at)
            if not critical:
                train, holdout = snapshot.split(good, spec.training.holdout_fraction)
                facts.update(snapshot.write_rows(folder, spec, train, holdout))
            pq.write_table(quarantine, folder / snapshot.QUARANTINE)
            told = [{**asdict(check), "bad_rows": len(check.bad_rows)} for check in checks]
            content = {**_content(result), "results": told}
            (folder / snapshot.VALIDATION).write_text(json.dumps(content, indent=1))
            (folder / "data_docs").mkdir()
            (folder / "data_docs" / "index.html").write_text(page)
    except Conflict:
        log.info("%s %s: validated by somebody else meanwhile", spec.name, episode_id)
    return _result(target)


def _content(result: ValidationResult) -> dict[str, Any]:
    return {key: value for key, value in asdict(result).items() if key != "path"}


def _result(target: Path) -> ValidationResult:
    facts = read_manifest(target).facts
    return ValidationResult(
        accepted=facts["accepted"],
        critical_failures=tuple(facts["critical_failures"]),
        warnings=tuple(facts["warnings"]),
        rows=facts["rows"],
        quarantined=facts["quarantined"],
        checks=facts["checks"],
        path=target,
    )


def load_suite(path: Path) -> list[dict[str, Any]]:
    """The expectations as Great Expectations configurations; severity defaults to critical.

    Raises:
        Permanent: `validate.suite`, naming the file and the entry.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise Permanent(
            "validate.suite",
            f"{path} does not exist",
            hint="write a list of {type, kwargs, severity: critical | warning}",
        ) from None
    except yaml.YAMLError as error:
        raise Permanent("validate.suite", f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, list) or not content:
        raise Permanent("validate.suite", f"{path}: expected a list of expectations")
    for i, entry in enumerate(content):
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise Permanent("validate.suite", f"{path}: entry {i} has no `type`: {entry!r}")
        if unknown := set(entry) - {"type", "kwargs", "severity", "meta"}:
            raise Permanent(
                "validate.suite",
                f"{path}: entry {i} ({entry['type']}): unknown key {min(unknown)!r}",
                hint="known: type, kwargs, severity, meta",
            )
        if entry.get("severity", "critical") not in ("critical", "warning"):
            raise Permanent(
                "validate.suite",
                f"{path}: entry {i} ({entry['type']}): severity {entry['severity']!r} is neither "
                "critical nor warning",
            )
    return [{"kwargs": {}, "severity": "critical", **entry} for entry in content]


def _run_suite(spec: ModelSpec, rows: pa.Table) -> tuple[list[_Check], str]:
    """Runs the suite; returns the checks and Great Expectations' own page about them."""
    path = spec.folder / SUITE_FILE
    entries = load_suite(path)
    import great_expectations as gx
    from great_expectations.data_context.types.base import ProgressBarsConfig

    # It logs what is raised or counted here anyway; importing it sets levels of its own.
    for name in ("great_expectations", "great_expectations.data_context.types.base"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    expectations = []
    for entry in entries:
        place = f"{path}: {entry['type']} {entry['kwargs']}"
        try:
            suite = gx.ExpectationSuite(name=entry["type"], expectations=[entry])
        except Exception as error:
            raise Permanent("validate.suite", f"{place}: {' '.join(str(error).split())}") from error
        # An unknown type is logged and left out by Great Expectations.
        if len(suite.expectations) != 1:
            raise Permanent("validate.suite", f"{place}: no such expectation")
        expectations += suite.expectations
    suite = gx.ExpectationSuite(name=spec.name, expectations=expectations)

    frame = rows.rename_columns(
        [
            spec.data.label.name if name == "label" else name.removeprefix("feature_")
            for name in rows.column_names
        ]
    ).to_pandas()
    source = context.data_sources.add_pandas("collected").add_dataframe_asset("rows")
    batch = source.add_batch_definition_whole_dataframe("all").get_batch(
        batch_parameters={"dataframe": frame}
    )
    results = batch.validate(suite, result_format={"result_format": "COMPLETE"})
    checks = [_check(path, result) for result in results.results]
    return checks, _data_docs(results)


def _check(path: Path, result: Any) -> _Check:
    config = result.expectation_config
    column = config.kwargs.get("column")
    name = f"{config.type}({column})" if column else config.type
    if message := next(_exceptions(result.exception_info), None):
        raise Permanent(
            "validate.broken_check",
            f"{path}: {name} could not be run: {message}",
            hint="the data were not judged; mend the expectation, or collect the column it names",
            expectation=config.type,
            column=column,
        )
    found = result.result
    # numpy's scalars cannot be rendered by Great Expectations' page.
    if isinstance(found.get("observed_value"), np.generic):
        found["observed_value"] = found["observed_value"].item()
    row_level = (config.meta or {}).get("quarantine", True)
    bad_rows = found.get("unexpected_index_list") or []
    if "unexpected_percent" in found:
        limit = 100 * (1 - config.kwargs.get("mostly", 1.0))
        says = (
            f"{name}: {found['unexpected_count']} of {found['element_count']} rows "
            f"({found['unexpected_percent'] or 0.0:.3g} %) do not fit, allowed {limit:.3g} %"
        )
    else:
        bounds = {k: v for k, v in config.kwargs.items() if k not in ("column", "batch_id")}
        says = f"{name}: observed {found.get('observed_value')!r}, expected {bounds}"
    return _Check(
        name=name,
        passed=bool(result.success),
        critical=str(getattr(config.severity, "value", config.severity)) == "critical",
        says=says,
        bad_rows=[int(i) for i in bad_rows] if row_level else [],
    )


def _exceptions(info: Any) -> Iterator[str]:
    """Messages in an `exception_info`, which is flat, or nested by metric."""
    if not isinstance(info, dict):
        return
    if "raised_exception" in info:
        if info["raised_exception"]:
            yield str(info.get("exception_message"))
        return
    for inner in info.values():
        yield from _exceptions(inner)


def _data_docs(results: Any) -> str:
    """Great Expectations' Data Docs page of the validation."""
    from great_expectations.render.renderer import ValidationResultsPageRenderer
    from great_expectations.render.view import DefaultJinjaPageView

    return str(DefaultJinjaPageView().render(ValidationResultsPageRenderer().render(results)))
