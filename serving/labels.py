"""The intake of labels: OK means on disk.

    python -m serving.labels

gRPC (`LabelService`, protos/labels.proto) and files dropped in `<store>/<model>/inbox/labels/`.
Concurrent calls are committed together: all labels that arrive while one Parquet file is being
synced, or within `GATHER_S`, go into the next. A call is answered after its file is on disk.

The same (request_id, row, source) with the same value, within a bounded window, is a duplicate: it
is counted and not written again. With another value it is a conflict: counted and written, the join
takes the one that was received last. A request id that no prediction has can't be known here, since
the recorder may lag; the join counts it.
"""

from __future__ import annotations

import logging
import math
import queue
import secrets
import sys
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from perennial.errors import PerennialError, Retryable
from perennial.records import LABEL_SCHEMA
from perennial.service import run_service
from perennial.settings import Settings
from perennial.spec import ModelSpec, load_specs
from perennial.store import Store
from serving.inbox import Inbox, Label
from serving.parquet import write_parquet
from serving.protos import labels_pb2 as pb
from serving.protos import labels_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

GATHER_S: Final = 0.02
MAX_PENDING: Final = 256
"""Calls that wait for the disk; more are refused with RESOURCE_EXHAUSTED."""
MAX_LABELS: Final = 10_000
"""Per call."""
FUTURE_TOLERANCE: Final = timedelta(minutes=5)
_WINDOW: Final = 1_000_000
_RECENT_FILES: Final = 1000
_INBOX_S: Final = 2.0


class Metrics:
    """What the intake tells Prometheus."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"perennial_labels_{name}", text, ["model", *labels], registry=registry)

        self.accepted = counter("accepted", "Labels written.")
        self.duplicates = counter("duplicates", "Labels that were there already.")
        self.conflicts = counter("conflicts", "Labels that contradict an earlier one.")
        self.rejected = counter("rejected", "Labels that were refused.", "reason")
        self.overflows = Counter(
            "perennial_labels_overflows", "Calls refused: queue full.", registry=registry
        )
        self.files = counter("files", "Files taken from the inbox.", "outcome")
        self.pending = Gauge(
            "perennial_labels_pending", "Calls waiting for the disk.", registry=registry
        )


@dataclass(frozen=True)
class Taken:
    """What became of one call's labels."""

    accepted: int
    duplicates: int
    rejected: tuple[tuple[int, str], ...]


@dataclass
class _Pending:
    model: str
    source: str
    labels: Sequence[Label]
    done: futures.Future[Taken] = field(default_factory=futures.Future)


class Intake:
    """Validates labels and commits them in groups; one writer thread owns window and files."""

    def __init__(self, store: Store, specs: Mapping[str, ModelSpec], metrics: Metrics) -> None:
        self.specs = specs
        self.metrics = metrics
        self._store = store
        self._queue: queue.Queue[_Pending | None] = queue.Queue(MAX_PENDING)
        self._known = _recent(store, specs)
        self._writer = threading.Thread(target=self._write_until_closed, name="labels-writer")
        self._writer.start()

    def submit(self, model: str, source: str, labels: Sequence[Label]) -> futures.Future[Taken]:
        """Hands labels of a known model to the writer; the future is done when they are on disk.

        Raises:
            Retryable: `labels.busy`, when too many calls wait already.
        """
        pending = _Pending(model, source, labels)
        try:
            self._queue.put_nowait(pending)
        except queue.Full:
            self.metrics.overflows.inc()
            raise Retryable(
                "labels.busy", f"{MAX_PENDING} calls wait for the disk", hint="send it again later"
            ) from None
        return pending.done

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
            self._commit([pending for pending in group if pending is not None])

    def _commit(self, group: list[_Pending]) -> None:
        now = datetime.now(UTC)
        rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        known: dict[tuple[str, str, int, str], float] = {}
        answers = []
        for pending in group:
            answers.append((pending, self._sort(pending, now, rows, known)))
        try:
            for model, found in rows.items():
                hour = f"date={now:%Y-%m-%d}/hour={now:%H}"
                name = f"{now:%H%M%S%f}-{secrets.token_hex(4)}.parquet"
                table = pa.Table.from_pylist(found, schema=LABEL_SCHEMA)
                write_parquet(table, self._store.labels(model) / hour / name)
        except (OSError, pa.ArrowException) as error:
            logger.error("labels could not be written: %s", error)
            for pending in group:
                pending.done.set_exception(
                    Retryable("labels.disk", f"labels could not be written: {error}")
                )
            return
        # Only what is on disk is known: a call that failed is sent again, and must be written then.
        self._known.update(known)
        while len(self._known) > _WINDOW:
            self._known.popitem(last=False)
        for pending, taken in answers:
            self._count(pending, taken)
            pending.done.set_result(taken)

    def _sort(
        self,
        pending: _Pending,
        now: datetime,
        rows: dict[str, list[dict[str, Any]]],
        known: dict[tuple[str, str, int, str], float],
    ) -> Taken:
        """Adds the call's good, new labels to `rows` and `known`."""
        binary = self.specs[pending.model].data.label.kind == "binary"
        accepted = duplicates = 0
        rejected = []
        for index, label in enumerate(pending.labels):
            if reason := _fault(label, binary, now):
                rejected.append((index, reason))
                continue
            key = (pending.model, label.request_id, label.row, pending.source)
            before = known.get(key, self._known.get(key))
            if before == label.value:
                duplicates += 1
                continue
            if before is not None:
                self.metrics.conflicts.labels(pending.model).inc()
            known[key] = label.value
            accepted += 1
            rows[pending.model].append(
                {
                    "request_id": label.request_id,
                    "row": label.row,
                    "value": label.value,
                    "time": label.time or now,
                    # Later in the same group is later: the join takes the newest.
                    "received": now + timedelta(microseconds=len(rows[pending.model])),
                    "source": pending.source,
                }
            )
        return Taken(accepted, duplicates, tuple(rejected))

    def _count(self, pending: _Pending, taken: Taken) -> None:
        self.metrics.accepted.labels(pending.model).inc(taken.accepted)
        self.metrics.duplicates.labels(pending.model).inc(taken.duplicates)
        for _, reason in taken.rejected:
            self.metrics.rejected.labels(pending.model, reason).inc()


def _recent(
    store: Store, specs: Mapping[str, ModelSpec]
) -> OrderedDict[tuple[str, str, int, str], float]:
    """The newest labels on disk: what was taken before a restart is known after it."""
    known: OrderedDict[tuple[str, str, int, str], float] = OrderedDict()
    for model in specs:
        files = sorted(store.labels(model).glob("date=*/hour=*/*.parquet"))[-_RECENT_FILES:]
        for path in files:
            table = pq.read_table(path, schema=LABEL_SCHEMA, partitioning=None)
            columns = (table[name].to_pylist() for name in ("request_id", "row", "source", "value"))
            for request_id, row, source, value in zip(*columns, strict=True):
                known[model, request_id, row, source] = value
    while len(known) > _WINDOW:
        known.popitem(last=False)
    return known


def _fault(label: Label, binary: bool, now: datetime) -> str | None:
    """Why a label is refused: one of few words, or None."""
    if not label.request_id or len(label.request_id) > 200:
        return "request_id"
    if not 0 <= label.row < 2**31:
        return "row"
    if not math.isfinite(label.value):
        return "not_finite"
    if binary and label.value not in (0.0, 1.0):
        return "not_binary"
    if label.time is not None and label.time > now + FUTURE_TOLERANCE:
        return "future"
    return None


class Service(pb_grpc.LabelServiceServicer):
    """`LabelService` over an intake."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    def RecordLabels(
        self, request: pb.RecordLabelsRequest, context: grpc.ServicerContext
    ) -> pb.RecordLabelsResponse:
        if request.model not in self._intake.specs:
            known = ", ".join(sorted(self._intake.specs)) or "none"
            context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no model {request.model[:50]!r} under care; known: {known}",
            )
        if len(request.labels) > MAX_LABELS or len(request.source) > 50:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"at most {MAX_LABELS} labels a call and 50 characters of source",
            )
        labels = [_label(label) for label in request.labels]
        try:
            taken = self._intake.submit(request.model, request.source or "default", labels).result()
        except Retryable as error:
            busy = error.code == "labels.busy"
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED if busy else grpc.StatusCode.UNAVAILABLE,
                error.message,
            )
        return pb.RecordLabelsResponse(
            accepted=taken.accepted,
            duplicates=taken.duplicates,
            rejected=[pb.Rejected(index=i, reason=reason) for i, reason in taken.rejected],
        )


def _label(label: pb.Label) -> Label:
    when = None
    if label.HasField("time"):
        try:
            when = label.time.ToDatetime(tzinfo=UTC)
        except (ValueError, OverflowError):
            # Outside the calendar; refused as "future".
            when = datetime.max.replace(tzinfo=UTC)
    return Label(label.request_id, label.row, label.value, when)


def serve(settings: Settings, stop: threading.Event) -> None:
    """Takes labels until `stop` is set, then answers what was sent.

    Raises:
        Permanent: from `load_specs` or `Store`.
        Retryable: `labels.port`, when a port is taken.
    """
    store = Store(settings.store)
    specs = load_specs(settings.models_dir, settings.profile)
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    address = f"{settings.bind}:{settings.labels_port}"
    try:
        web, thread = start_http_server(
            settings.labels_metrics_port, addr=settings.bind, registry=registry
        )
    except OSError as error:
        raise Retryable(
            "labels.port", f"metrics port {settings.labels_metrics_port}: {error}"
        ) from error
    intake = Intake(store, specs, metrics)
    # Each waiting call holds a thread; gRPC refuses what exceeds them with RESOURCE_EXHAUSTED.
    pool = futures.ThreadPoolExecutor(MAX_PENDING, thread_name_prefix="labels")
    server = grpc.server(
        pool, options=[("grpc.so_reuseport", 0)], maximum_concurrent_rpcs=MAX_PENDING
    )
    try:
        pb_grpc.add_LabelServiceServicer_to_server(Service(intake), server)
        try:
            server.add_insecure_port(address)
        except RuntimeError as error:
            raise Retryable("labels.port", f"{address}: {error}") from error
        server.start()
        logger.info("taking labels on %s into %s", address, store.root)
        inboxes = [Inbox(store.model_dir(name) / "inbox" / "labels") for name in specs]
        while not stop.wait(_INBOX_S):
            for name, inbox in zip(specs, inboxes, strict=True):
                _empty(inbox, name, intake)
    finally:
        server.stop(5.0).wait()
        intake.close()
        pool.shutdown()
        web.shutdown()
        web.server_close()
        thread.join()


def _empty(inbox: Inbox, model: str, intake: Intake) -> None:
    """Takes every file of a model's inbox."""
    for path in inbox.files():
        try:
            taken = []
            for source, labels in inbox.read(path):
                taken.append(intake.submit(model, source, labels).result())
        except PerennialError as error:
            if isinstance(error, Retryable):
                logger.warning("%s is left for later: %s", path, error)
                return
            outcome = "failed"
            inbox.fail(path, str(error))
        else:
            rejected = [reason for one in taken for _, reason in one.rejected]
            outcome = "done"
            inbox.finish(path, rejected)
        intake.metrics.files.labels(model, outcome).inc()
        logger.info("%s: %s", path, outcome)


if __name__ == "__main__":
    sys.exit(run_service(serve))
