"""Labels on their way to the log: checked, counted, committed in groups.

Concurrent calls are committed together: all labels that arrive while one Parquet file is being
synced, or within `GATHER_S`, go into the next. A call is answered after its file is on disk.

The log only grows. A row's `received` is when its label became known here; a correction is a newer
row, and the older one stays for whoever asks what was known before it. What a label can be:

| | counted | written |
|---|---|---|
| new | accepted | yes |
| duplicate: the same (request_id, row, source) with the same value, within the window | yes | no |
| conflict: the same with another value, a correction | yes, and accepted | yes |
| future: dated beyond `FUTURE_TOLERANCE` | yes, and accepted | yes; joined from its time on |
| bad: see `_fault` | rejected, with its reason | no |

Whether a prediction has the request id, and how late a label is, can't be known here, since the
recorder may lag: the join counts both.
"""

from __future__ import annotations

import logging
import math
import queue
import secrets
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from prometheus_client import CollectorRegistry, Counter, Gauge

from perennial.errors import PerennialError, Permanent, Retryable
from perennial.records import LABEL_SCHEMA
from perennial.spec import ModelSpec, load_spec
from perennial.store import Store
from serving.inbox import Label
from serving.parquet import write_parquet

logger = logging.getLogger(__name__)

GATHER_S: Final = 0.02
MAX_PENDING: Final = 256
"""Calls that wait for the disk; more are refused with `labels.busy`."""
MAX_PENDING_LABELS: Final = 200_000
"""Labels in those calls: what waits is bounded in memory as well."""
MAX_LABELS: Final = 10_000
"""Per call."""
MAX_SOURCE: Final = 50
"""Characters of a source."""
FUTURE_TOLERANCE: Final = timedelta(minutes=5)
OUTSIDE_THE_CALENDAR: Final = datetime.max.replace(tzinfo=UTC)
"""Stands for a time that the sender gave and no calendar has."""
LOOK_S: Final = 1.0
"""Least time between two looks for models that were added."""
_WINDOW: Final = 1_000_000
_RECENT_FILES: Final = 1000

Key = tuple[str, str, int, str]
"""(model, request_id, row, source)."""


class Metrics:
    """What the intake tells Prometheus."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"perennial_labels_{name}", text, [*labels], registry=registry)

        self.accepted = counter("accepted", "Labels written.", "model")
        self.duplicates = counter("duplicates", "Labels that were there already.", "model")
        self.conflicts = counter("conflicts", "Labels that contradict an earlier one.", "model")
        self.future = counter("future", "Labels written that are dated ahead.", "model")
        self.rejected = counter("rejected", "Labels that were refused.", "model", "reason")
        self.overflows = counter("overflows", "Calls refused: queue full.")
        self.calls = counter("calls", "Calls answered, by gRPC's status.", "transport", "status")
        self.files = counter("files", "Files taken from the inbox.", "model", "outcome")
        self.pending = Gauge(
            "perennial_labels_pending", "Calls waiting for the disk.", registry=registry
        )


class Models:
    """The models under care, by name; one that is added or mended is found without a restart.

    A model whose `model.yaml` is broken is logged and left out: the others' labels are taken.
    """

    def __init__(self, models_dir: Path, profile: str = "") -> None:
        self._models_dir = models_dir
        self._profile = profile
        self._lock = threading.Lock()
        self._known: dict[str, ModelSpec] = {}
        self._broken: dict[str, int] = {}
        self._looked = -math.inf
        self.look()

    def find(self, name: str) -> ModelSpec:
        """The model's specification. Raises Permanent `labels.model`."""
        found = self._known.get(name)
        if found is None:
            self.look()
            found = self._known.get(name)
        if found is None:
            known = ", ".join(sorted(self._known)) or "none"
            raise Permanent(
                "labels.model",
                f"no model {name[:50]!r} under care; known: {known}",
                hint="a new folder in the models' directory is found within a second",
            )
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._known))

    def look(self) -> None:
        """Reads the models that were added or mended, at most once in `LOOK_S`."""
        with self._lock:
            if time.monotonic() - self._looked < LOOK_S:
                return
            added = {}
            for path in sorted(self._models_dir.glob("*/model.yaml")):
                if path.parent.name not in self._known and (spec := self._read(path)):
                    added[spec.name] = spec
            self._known = {**self._known, **added}
            self._looked = time.monotonic()

    def _read(self, path: Path) -> ModelSpec | None:
        name, changed = path.parent.name, path.stat().st_mtime_ns
        if self._broken.get(name) == changed:
            return None
        try:
            spec = load_spec(path.parent, self._profile)
        except PerennialError as error:
            self._broken[name] = changed
            logger.error("labels of %s are not taken: %s", name, error)
            return None
        logger.info("taking labels of %s", name)
        return spec


@dataclass(frozen=True)
class Taken:
    """What became of one call's labels.

    Attributes:
        accepted: written; `conflicts` and `future` are among them.
        rejected: (index in the call, reason).
    """

    accepted: int = 0
    duplicates: int = 0
    conflicts: int = 0
    future: int = 0
    rejected: tuple[tuple[int, str], ...] = ()


@dataclass
class _Pending:
    spec: ModelSpec
    source: str
    labels: Sequence[Label]
    done: futures.Future[Taken] = field(default_factory=futures.Future)


@dataclass
class _Group:
    """What one commit writes, before it is known to be on disk."""

    now: datetime
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    known: dict[Key, float] = field(default_factory=dict)

    def add(self, model: str, source: str, label: Label) -> None:
        rows = self.rows[model]
        self.known[model, label.request_id, label.row, source] = label.value
        rows.append(
            {
                "request_id": label.request_id,
                "row": label.row,
                "value": label.value,
                "time": label.time or self.now,
                # Later in the same group is later: the join takes the newest.
                "received": self.now + timedelta(microseconds=len(rows)),
                "source": source,
            }
        )


class Intake:
    """Validates labels and commits them in groups; one writer thread owns window and files."""

    def __init__(self, store: Store, models: Models, metrics: Metrics) -> None:
        self.models = models
        self.metrics = metrics
        self._store = store
        self._queue: queue.Queue[_Pending | None] = queue.Queue(MAX_PENDING)
        self._known: OrderedDict[Key, float] = OrderedDict()
        self._waiting = 0
        self._waiting_lock = threading.Lock()
        self._newest = datetime.min.replace(tzinfo=UTC)
        self._remembered: set[str] = set()
        for model in models:
            self._remember(model)
        self._writer = threading.Thread(target=self._write_until_closed, name="labels-writer")
        self._writer.start()

    def submit(self, model: str, source: str, labels: Sequence[Label]) -> futures.Future[Taken]:
        """Hands one call's labels to the writer; the future is done when they are on disk.

        Args:
            source: who says so; "" is "default".

        Raises:
            Permanent: `labels.model`, for a model that is not under care; `labels.call`, when the
                call as a whole is too large.
            Retryable: `labels.busy`, when too many calls wait already. The future raises
                `labels.disk` when they could not be written.
        """
        spec = self.models.find(model)
        if len(labels) > MAX_LABELS or len(source) > MAX_SOURCE:
            raise Permanent(
                "labels.call",
                f"at most {MAX_LABELS} labels a call and {MAX_SOURCE} characters of source; "
                f"got {len(labels)} and {len(source)}",
            )
        with self._waiting_lock:
            is_full = self._waiting + len(labels) > MAX_PENDING_LABELS
            if not is_full:
                self._waiting += len(labels)
        if is_full:
            raise self._busy(f"{MAX_PENDING_LABELS} labels")
        pending = _Pending(spec, source or "default", labels)
        # From here on nobody can cancel it: the writer always has somebody to answer.
        pending.done.set_running_or_notify_cancel()
        try:
            self._queue.put_nowait(pending)
        except queue.Full:
            self._release([pending])
            raise self._busy(f"{MAX_PENDING} calls") from None
        return pending.done

    def _busy(self, what: str) -> Retryable:
        self.metrics.overflows.inc()
        return Retryable("labels.busy", f"{what} wait for the disk", hint="send it again later")

    def _release(self, calls: list[_Pending]) -> None:
        with self._waiting_lock:
            self._waiting -= sum(len(pending.labels) for pending in calls)

    def close(self) -> None:
        """Writes what was submitted, then ends."""
        self._queue.put(None)
        self._writer.join()

    def _write_until_closed(self) -> None:
        closed = False
        while not closed:
            group = [self._queue.get()]
            deadline = time.monotonic() + GATHER_S
            while group[-1] is not None and len(group) < MAX_PENDING:
                try:
                    group.append(self._queue.get(timeout=max(0.0, deadline - time.monotonic())))
                except queue.Empty:
                    break
            closed = group[-1] is None
            self.metrics.pending.set(self._queue.qsize())
            calls = [pending for pending in group if pending is not None]
            self._commit(calls)
            self._release(calls)

    def _commit(self, calls: list[_Pending]) -> None:
        # A clock that steps back must not let an older label look newer than its correction.
        group = _Group(max(datetime.now(UTC), self._newest + timedelta(microseconds=1)))
        answers = [(pending, self._sort(pending, group)) for pending in calls]
        try:
            for model, found in group.rows.items():
                hour = f"date={group.now:%Y-%m-%d}/hour={group.now:%H}"
                name = f"{group.now:%H%M%S%f}-{secrets.token_hex(4)}.parquet"
                table = pa.Table.from_pylist(found, schema=LABEL_SCHEMA)
                write_parquet(table, self._store.labels(model) / hour / name)
        except (OSError, pa.ArrowException) as error:
            logger.error("labels could not be written: %s", error)
            for pending in calls:
                pending.done.set_exception(
                    Retryable("labels.disk", f"labels could not be written: {error}")
                )
            return
        longest = max(map(len, group.rows.values()), default=0)
        self._newest = group.now + timedelta(microseconds=longest)
        # Only what is on disk is known: a call that failed is sent again, and must be written then.
        self._known.update(group.known)
        self._forget()
        for pending, taken in answers:
            self._count(pending.spec.name, taken)
            pending.done.set_result(taken)

    def _sort(self, pending: _Pending, group: _Group) -> Taken:
        """Adds the call's good, new labels to the group."""
        model = pending.spec.name
        self._remember(model)
        binary = pending.spec.data.label.kind == "binary"
        accepted = duplicates = conflicts = future = 0
        rejected = []
        for index, label in enumerate(pending.labels):
            if reason := _fault(label, binary):
                rejected.append((index, reason))
                continue
            key = (model, label.request_id, label.row, pending.source)
            before = group.known.get(key, self._known.get(key))
            if before == label.value:
                duplicates += 1
                continue
            accepted += 1
            conflicts += before is not None
            future += label.time is not None and label.time > group.now + FUTURE_TOLERANCE
            group.add(model, pending.source, label)
        return Taken(accepted, duplicates, conflicts, future, tuple(rejected))

    def _count(self, model: str, taken: Taken) -> None:
        self.metrics.accepted.labels(model).inc(taken.accepted)
        self.metrics.duplicates.labels(model).inc(taken.duplicates)
        self.metrics.conflicts.labels(model).inc(taken.conflicts)
        self.metrics.future.labels(model).inc(taken.future)
        for _, reason in taken.rejected:
            self.metrics.rejected.labels(model, reason).inc()

    def _remember(self, model: str) -> None:
        """The newest labels on disk: what was taken before a restart is known after it."""
        if model in self._remembered:
            return
        self._remembered.add(model)
        files = sorted(self._store.labels(model).glob("date=*/hour=*/*.parquet"))[-_RECENT_FILES:]
        for path in files:
            try:
                self._remember_file(model, path)
            except (OSError, pa.ArrowException) as error:
                logger.error("%s can't be read, its labels may be written again: %s", path, error)

    def _remember_file(self, model: str, path: Path) -> None:
        """By and by: a file of imported history may hold far more rows than the window."""
        names = ["request_id", "row", "source", "value"]
        for batch in pq.ParquetFile(path).iter_batches(columns=names):
            columns = (batch.column(name).to_pylist() for name in names)
            for request_id, row, source, value in zip(*columns, strict=True):
                self._known[model, request_id, row, source] = value
            self._forget()

    def _forget(self) -> None:
        while len(self._known) > _WINDOW:
            self._known.popitem(last=False)


def _fault(label: Label, binary: bool) -> str | None:
    """Why a label is refused: one of few words, or None."""
    if not label.request_id or len(label.request_id) > 200:
        return "request_id"
    if not 0 <= label.row < 2**31:
        return "row"
    if not math.isfinite(label.value):
        return "not_finite"
    if binary and label.value not in (0.0, 1.0):
        return "not_binary"
    if label.time == OUTSIDE_THE_CALENDAR:
        return "time"
    return None
