"""Errors of a new champion while the way back is still loaded."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from perennial.spec import Guardrail
from serving.release.cells import files_between
from serving.release.guardrails import TRIPWIRE_FLOOR, TRIPWIRE_REQUESTS


def errors(
    predictions_dir: Path, *, since: datetime, version: int, now: datetime
) -> tuple[int, int]:
    """Split calls since `since` that `version` answered or nobody did, and how many failed.

    A call fails when its status is not OK or its score is missing or not finite.
    """
    files = files_between(predictions_dir, since, now)
    if not files:
        return 0, 0
    import pyarrow.compute as pc
    import pyarrow.dataset as ds

    field = ds.field
    rows = ds.dataset(files, format="parquet").to_table(
        columns=["status", "score"],
        filter=(field("time") >= since)
        & (field("time") <= now)
        & (field("route") == "split")
        & ((field("version") == version) | (field("status") != 0)),
    )
    finite = pc.fill_null(pc.is_finite(rows["score"]), False)
    failed = pc.invert(pc.and_(pc.equal(rows["status"], 0), finite))
    return rows.num_rows, int(pc.sum(failed).as_py() or 0)


def is_tripped(guardrail: Guardrail, requests: int, failed: int) -> bool:
    """Whether the new champion fails grossly: the ramp's tripwire, against its floor."""
    if requests < TRIPWIRE_REQUESTS:
        return False
    return failed / requests > guardrail.max_ratio * TRIPWIRE_FLOOR
