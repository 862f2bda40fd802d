"""What several rooms ask of the logs, written once as Ibis expressions."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ibis.expr.types as ir

EXAMPLE = ["request_id", "row"]
"""What identifies one example in both logs."""


def known_labels(told: ir.Table, known_at: datetime) -> ir.Table:
    """The rows of the label log that were known at a moment.

    A label is known once the intake has taken it (`received`), and never before its own `time`: a
    label that is dated ahead waits until then. The log only grows, so the same moment gives the
    same rows for ever.

    Args:
        told: the label log, `perennial.records.LABEL_SCHEMA`.
        known_at: an aware time.
    """
    return told.filter(told.received <= known_at, told.time <= known_at, told.value.notnull())


def latest_labels(known: ir.Table) -> ir.Table:
    """One row per example: the label that was received last, whoever said so.

    Equal times are decided by the row's own content, never by the order of files.
    """
    import ibis

    order = [ibis.desc(name) for name in ("received", "time", "source", "value")]
    nth = ibis.row_number().over(group_by=EXAMPLE, order_by=order)
    return known.mutate(nth=nth).filter(lambda t: t.nth == 0).drop("nth")
