"""The intake of labels, as a process: OK means on disk.

    python -m serving.labels

gRPC (`LabelService`, protos/labels.proto), REST (serving/labels_rest.py) and files dropped in
`<store>/<model>/inbox/labels/` (serving/inbox.py). What a label can be: serving/intake.py.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from datetime import UTC
from typing import Any, Final

import grpc
from prometheus_client import CollectorRegistry, start_http_server

from perennial.errors import PerennialError, Retryable
from perennial.service import run_service
from perennial.settings import Settings
from perennial.store import Store
from serving import labels_rest
from serving.access import ApiKeys, keys_for, presented_key
from serving.inbox import Inbox, Label
from serving.intake import MAX_PENDING, OUTSIDE_THE_CALENDAR, Intake, Metrics, Models
from serving.protos import labels_pb2 as pb
from serving.protos import labels_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = labels_rest.MAX_BODY_BYTES
_INBOX_S: Final = 2.0
_STATUS: Final = {
    "labels.model": grpc.StatusCode.NOT_FOUND,
    "labels.call": grpc.StatusCode.INVALID_ARGUMENT,
    "labels.busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "labels.disk": grpc.StatusCode.UNAVAILABLE,
}


class Service(pb_grpc.LabelServiceServicer):
    """`LabelService` over an intake.

    Args:
        keys: what callers must present; None: nobody is asked.
    """

    def __init__(self, intake: Intake, keys: ApiKeys | None) -> None:
        self._intake = intake
        self._keys = keys

    def RecordLabels(
        self, request: pb.RecordLabelsRequest, context: grpc.ServicerContext
    ) -> pb.RecordLabelsResponse:
        if self._keys and not self._keys.allow(_key(context)):
            self._abort(context, grpc.StatusCode.UNAUTHENTICATED, labels_rest.UNAUTHENTICATED)
        labels = [_label(label) for label in request.labels]
        try:
            taken = self._intake.submit(request.model, request.source, labels).result()
        except PerennialError as error:
            self._abort(context, _STATUS[error.code], error.message)
        self._intake.metrics.calls.labels("grpc", "OK").inc()
        return pb.RecordLabelsResponse(
            accepted=taken.accepted,
            duplicates=taken.duplicates,
            conflicts=taken.conflicts,
            future=taken.future,
            rejected=[pb.Rejected(index=i, reason=reason) for i, reason in taken.rejected],
        )

    def _abort(self, context: grpc.ServicerContext, code: grpc.StatusCode, message: str) -> None:
        self._intake.metrics.calls.labels("grpc", code.name).inc()
        context.abort(code, message)


def _key(context: grpc.ServicerContext) -> str:
    metadata = context.invocation_metadata()
    return presented_key({name: value for name, value in metadata if isinstance(value, str)})


def _label(label: pb.Label) -> Label:
    when = None
    if label.HasField("time"):
        try:
            when = label.time.ToDatetime(tzinfo=UTC)
        except (ValueError, OverflowError):
            when = OUTSIDE_THE_CALENDAR
    return Label(label.request_id, label.row, label.value, when)


def serve(settings: Settings, stop: threading.Event) -> None:
    """Takes labels until `stop` is set, then answers what was sent.

    Raises:
        Permanent: from `Store`, or `access.keys`.
        NeedsHuman: `access.open`, for a bind address beyond loopback without API keys.
        Retryable: `labels.port`, when a port is taken.
    """
    keys = keys_for(settings.bind, settings.labels_key_file, setting="PERENNIAL_LABELS_KEY_FILE")
    store = Store(settings.store)
    models = Models(settings.models_dir, settings.profile)
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    with ExitStack() as stack:
        with _port("metrics", settings.labels_metrics_port):
            web, thread = start_http_server(
                settings.labels_metrics_port, addr=settings.bind, registry=registry
            )
        stack.callback(thread.join)
        stack.callback(web.server_close)
        stack.callback(web.shutdown)
        intake = Intake(store, models, metrics)
        stack.callback(intake.close)
        with _port("REST", settings.labels_rest_port):
            rest = labels_rest.Server(intake, keys, settings.bind, settings.labels_rest_port)
        stack.callback(rest.stop)
        stack.enter_context(_grpc_server(settings, Service(intake, keys)))
        logger.info(
            "taking labels on %s, gRPC %d and REST %d, into %s",
            settings.bind,
            settings.labels_port,
            settings.labels_rest_port,
            store.root,
        )
        inboxes: dict[str, Inbox] = {}
        while not stop.wait(_INBOX_S):
            models.look()
            for name in models:
                folder = store.model_dir(name) / "inbox" / "labels"
                _empty(inboxes.setdefault(name, Inbox(folder)), name, intake)


@contextmanager
def _grpc_server(settings: Settings, service: Service) -> Iterator[None]:
    address = f"{settings.bind}:{settings.labels_port}"
    # Each waiting call holds a thread; gRPC refuses what exceeds them with RESOURCE_EXHAUSTED.
    with futures.ThreadPoolExecutor(MAX_PENDING, thread_name_prefix="labels") as pool:
        options: list[tuple[str, Any]] = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ]
        server = grpc.server(pool, options=options, maximum_concurrent_rpcs=MAX_PENDING)
        pb_grpc.add_LabelServiceServicer_to_server(service, server)
        with _port("gRPC", settings.labels_port):
            server.add_insecure_port(address)
        server.start()
        try:
            yield
        finally:
            server.stop(5.0).wait()


@contextmanager
def _port(what: str, port: int) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise Retryable("labels.port", f"{what} port {port}: {error}") from error


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
