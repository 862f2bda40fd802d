"""The report of a release: report.html for people, report.json for programs, and the tables behind.

`rederive` computes every number of report.json again from cells.parquet and ticks.parquet. Whoever
doubts the verdict needs nothing else.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from perennial.errors import Permanent
from perennial.spec import ModelSpec, Release
from perennial.store import write_atomic
from serving.release import charts
from serving.release.evidence import Evidence, StageWindow
from serving.release.verdict import Kind, Latch, Verdict, judge

FORMAT = 1
TEMPLATE = "report.html"
RELATIVE_TOLERANCE = 1e-9
# What a look keeps of a verdict's numbers: enough for the chart.
LOOK_FIELDS = ("elapsed_s", "theta", "lower", "upper", "fixed_lower", "fixed_upper", "log_e_value")


def look_of(verdict: Verdict) -> dict[str, Any] | None:
    """What to keep of a verdict for the chart; None when it had no estimate."""
    if "theta" not in verdict.numbers:
        return None
    return {name: verdict.numbers[name] for name in LOOK_FIELDS}


def write_report(
    folder: Path,
    *,
    spec: ModelSpec,
    episode: str,
    champion: int,
    candidate: int,
    evidence: Evidence,
    stages: Sequence[StageWindow],
    verdict: Verdict,
    looks: Sequence[Mapping[str, Any]],
    facts: Mapping[str, str] | None = None,
) -> None:
    """Writes report.html, report.json, cells.parquet and ticks.parquet; overwrites older ones.

    Args:
        champion, candidate: version numbers.
        looks: one `look_of` per look so far, oldest first.
        facts: further lines of the report, e.g. code revision, who approved what.
    """
    document = {
        "format": FORMAT,
        "model": spec.name,
        "episode": episode,
        "champion": champion,
        "candidate": candidate,
        "spec_hash": spec.spec_hash,
        "release": spec.release.model_dump(mode="json"),
        "stages": [stage.as_dict() for stage in stages],
        "verdict": verdict.as_dict(),
        "looks": [dict(look) for look in looks],
        "facts": dict(facts or {}),
    }
    write_atomic(folder / "cells.parquet", _parquet(evidence.cells))
    write_atomic(folder / "ticks.parquet", _parquet(evidence.ticks))
    write_atomic(folder / "report.json", json.dumps(document, indent=1).encode())
    write_atomic(folder / "report.html", render(document).encode())


def read_verdict(folder: Path) -> Verdict:
    """The verdict that a published report is about.

    Raises:
        Permanent: `report.unreadable`.
    """
    try:
        return Verdict.from_dict(json.loads((folder / "report.json").read_text())["verdict"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Permanent(
            "report.unreadable", f"{folder}: {type(error).__name__}: {error}"
        ) from error


def rederive(folder: Path) -> list[str]:
    """Judges the stored tables again; returns each number that differs, [] when all agree.

    Raises:
        Permanent: `report.unreadable`.
    """
    try:
        document = json.loads((folder / "report.json").read_text())
        evidence = Evidence(
            pq.read_table(folder / "cells.parquet"), pq.read_table(folder / "ticks.parquet")
        )
        stored = document["verdict"]
        again = judge(
            Release.model_validate(document["release"]),
            evidence,
            [StageWindow.from_dict(stage) for stage in document["stages"]],
            now=datetime.fromisoformat(stored["at"]),
            latch=Latch.from_dict(stored["latch"]),
        )
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise Permanent(
            "report.unreadable", f"{folder}: {type(error).__name__}: {error}"
        ) from error
    # Through JSON, as the stored ones went.
    return list(_differences("", stored, json.loads(json.dumps(again.as_dict()))))


def render(document: Mapping[str, Any]) -> str:
    """The self-contained HTML of a report.json."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "signed": _signed,
        "share": _share,
        "odds": _odds,
        "points": _points,
        "duration": charts.duration,
    }
    numbers = document["verdict"]["numbers"]
    bound = numbers["required_bound"]
    elapsed_s = numbers["elapsed_s"]
    is_decided = document["verdict"]["kind"] not in (Kind.HOLD, Kind.ADVANCE)
    spans = list(_spans(document["stages"], elapsed_s))
    return environment.get_template(TEMPLATE).render(
        **document,
        numbers=numbers,
        has_estimate="theta" in numbers,
        spans=spans,
        sequence_svg=charts.sequence_chart(
            document["looks"],
            spans,
            required_bound=bound,
            decided_at_s=elapsed_s if is_decided else None,
            end_s=elapsed_s,
        ),
        forest_svg=charts.forest_chart(_forest_rows(numbers), required_bound=bound),
    )


def _forest_rows(numbers: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "theta" not in numbers:
        return []
    rows = [
        {"name": f"stage {stage['stage']}", **stage}
        for stage in numbers["stages"]
        if stage["variance"] > 0
    ]
    return [*rows, {"name": "combined", **numbers}]


def _spans(stages: Sequence[Mapping[str, Any]], elapsed_s: float) -> Iterator[dict[str, Any]]:
    start = datetime.fromisoformat(stages[0]["start"])
    for stage in stages:
        begin = (datetime.fromisoformat(stage["start"]) - start).total_seconds()
        end = elapsed_s
        if stage["end"] is not None:
            end = (datetime.fromisoformat(stage["end"]) - start).total_seconds()
        yield {"index": stage["index"], "share": stage["share"], "from_s": begin, "to_s": end}


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _differences(place: str, stored: Any, again: Any) -> Iterator[str]:
    if isinstance(stored, dict) and isinstance(again, dict):
        for key in sorted({*stored, *again}):
            yield from _differences(f"{place}.{key}", stored.get(key), again.get(key))
    elif isinstance(stored, list) and isinstance(again, list) and len(stored) == len(again):
        for index, (one, other) in enumerate(zip(stored, again, strict=True)):
            yield from _differences(f"{place}[{index}]", one, other)
    elif isinstance(stored, float) and isinstance(again, float | int):
        if not math.isclose(stored, again, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-12):
            yield f"{place.lstrip('.')}: stored {stored!r}, derived {again!r}"
    elif stored != again:
        yield f"{place.lstrip('.')}: stored {stored!r}, derived {again!r}"


def _signed(value: float) -> str:
    return f"{value:+.4f}"


def _points(value: float) -> str:
    return f"{charts.signed(round(100 * value, 2))} points"


def _odds(log_e_value: float) -> str:
    return f"{math.exp(min(log_e_value, math.log(1e9))):.3g} to 1"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2%}"
