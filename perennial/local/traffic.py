"""Replays real flights as live clients: gRPC Predict through the router, labels later by id.

    python -m perennial.local.traffic --plan FILE --stats FILE --rate 150

The plan file holds `{"from": "2013-03-10", "to": "2013-05-01", "stride": 4}` and may be replaced
while it runs: the replay then goes on with the new part. A flight is asked about in the order of
scheduled departure; its outcome is sent once its arrival has passed on the replay's clock. The
stats file is replaced every half second. SIGTERM sends what labels are due, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

from perennial.settings import Settings
from perennial.spec import FeatureType, ModelSpec, load_spec
from perennial.store import write_atomic
from training.hooks import load_history

DT_FLOAT, DT_STRING, DT_INT64, DT_BOOL = 1, 7, 9, 10
PREDICT = "/tensorflow.serving.PredictionService/Predict"
LABEL_BATCH = 200
LABEL_EVERY_S = 0.5
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Part:
    """Which flights are replayed: scheduled in [start, end), every `stride`-th of them per pass."""

    start: datetime
    end: datetime
    stride: int

    @classmethod
    def read(cls, path: Path) -> Part:
        plan = json.loads(path.read_text())
        return cls(
            datetime.fromisoformat(plan["from"]).replace(tzinfo=UTC),
            datetime.fromisoformat(plan["to"]).replace(tzinfo=UTC),
            int(plan["stride"]),
        )


@dataclass
class Stats:
    """Counts from the first call on."""

    sent: int = 0
    failed: int = 0
    labels_sent: int = 0
    labels_failed: int = 0
    by_version: Counter[str] = field(default_factory=Counter)
    by_arm: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    latency_ms: list[float] = field(default_factory=list)
    position: str = ""
    passes: int = 0

    def document(self) -> dict[str, Any]:
        recent = sorted(self.latency_ms[-2000:])
        return {
            "sent": self.sent,
            "failed": self.failed,
            "labels_sent": self.labels_sent,
            "labels_failed": self.labels_failed,
            "by_version": dict(self.by_version),
            "by_arm": dict(self.by_arm),
            "errors": dict(self.errors),
            "latency_ms_p50": recent[len(recent) // 2] if recent else None,
            "latency_ms_p99": recent[int(len(recent) * 0.99)] if recent else None,
            "position": self.position,
            "passes": self.passes,
        }


@dataclass(frozen=True)
class _Call:
    request: Any
    key: str
    scheduled: datetime
    known: datetime
    label: float


@dataclass(frozen=True)
class _Pending:
    """A label that is not sent yet: due on the wall clock, known on the replay's clock."""

    due: float
    known: tuple[int, datetime]
    request_id: str
    label: float


class Replay:
    """One client of the router and of the label intake.

    Args:
        table: from the model's `data.py`: features, routing key, `scheduled`, `known`, the label.
        rate: requests per second.
        label_delay_s: least time between the answer and its label, on the wall clock; the rest of
            the delay is the flight's own, on the replay's clock.
    """

    def __init__(
        self, settings: Settings, spec: ModelSpec, table: Any, rate: float, label_delay_s: float
    ) -> None:
        self.spec = spec
        self.table = table
        self.rate = rate
        self.label_delay_s = label_delay_s
        self.stats = Stats()
        self.stopping = asyncio.Event()
        self._target = f"{settings.bind}:{settings.router_port}"
        self._labels_target = f"{settings.bind}:{settings.labels_port}"
        self._labels_metadata = _labels_metadata(settings)
        self._pending: list[_Pending] = []
        # The replay's clock: (round, scheduled departure of the newest call). A new part or a new
        # pass over it is a new round, so that a jump back in time strands no label.
        self._clock = (0, datetime(1970, 1, 1, tzinfo=UTC))

    async def run(self, plan: Path, stats: Path) -> None:
        """Replays until `stopping`; then sends the labels that are due, and returns."""
        from serving.protos import tfserving_pb2

        async with (
            grpc.aio.insecure_channel(self._target) as channel,
            grpc.aio.insecure_channel(self._labels_target) as labels,
        ):
            predict = channel.unary_unary(
                PREDICT,
                request_serializer=tfserving_pb2.PredictRequest.SerializeToString,
                response_deserializer=tfserving_pb2.PredictResponse.FromString,
            )
            side = [
                asyncio.create_task(self._send_labels(labels)),
                asyncio.create_task(self._write_stats(stats)),
            ]
            try:
                await self._send(plan, predict)
            finally:
                self.stopping.set()
                await asyncio.gather(*side)

    async def _send(self, plan: Path, predict: Any) -> None:
        part = Part.read(plan)
        rows = self._rows(part, 0)
        index, passes = 0, 0
        running: set[asyncio.Task[None]] = set()
        begun, sent, round_ = time.monotonic(), 0, 0
        while not self.stopping.is_set():
            if index % 50 == 0 and (newer := Part.read(plan)) != part:
                part, index, passes = newer, 0, 0
                rows = await asyncio.to_thread(self._rows, part, passes)
                round_ += 1
            if index >= len(rows):
                self.stats.passes += 1
                index, passes = 0, passes + 1
                rows = await asyncio.to_thread(self._rows, part, passes)
                round_ += 1
            row = self._request(rows[index])
            index += 1
            self._clock = (round_, row.scheduled)
            self.stats.position = f"{row.scheduled:%Y-%m-%d}"
            task = asyncio.create_task(self._call(predict, row, round_))
            running.add(task)
            task.add_done_callback(running.discard)
            sent += 1
            ahead = begun + sent / self.rate - time.monotonic()
            if ahead > 0:
                await asyncio.sleep(ahead)
            elif ahead < -1:
                # The machine was slower than the rate: no burst to catch up.
                begun, sent = time.monotonic(), 0
                await asyncio.sleep(0)
        if running:
            await asyncio.wait(running)

    def _rows(self, part: Part, passes: int) -> list[dict[str, Any]]:
        """The part's rows; each pass over it takes others, until all were taken."""
        import numpy as np

        scheduled = self.table["scheduled"].to_numpy()
        first, last = (
            np.searchsorted(scheduled, np.datetime64(moment.replace(tzinfo=None), "us"))
            for moment in (part.start, part.end)
        )
        rows: list[dict[str, Any]] = self.table.take(
            np.arange(int(first) + passes % part.stride, int(last), part.stride)
        ).to_pylist()
        return rows

    def _request(self, row: dict[str, Any]) -> _Call:
        from serving.protos import tfserving_pb2 as pb

        request = pb.PredictRequest(model_spec=pb.ModelSpec(name=self.spec.name))
        for name, feature in self.spec.data.features.items():
            tensor = request.inputs[name]
            tensor.tensor_shape.dim.add(size=1)
            value = row[name]
            match feature.type:
                case FeatureType.STRING:
                    tensor.dtype = DT_STRING
                    tensor.string_val.append(value.encode())
                case FeatureType.INT:
                    tensor.dtype = DT_INT64
                    tensor.int64_val.append(value)
                case FeatureType.BOOL:
                    tensor.dtype = DT_BOOL
                    tensor.bool_val.append(value)
                case FeatureType.FLOAT:
                    tensor.dtype = DT_FLOAT
                    tensor.float_val.append(value)
        data = self.spec.data
        label = float(row[data.label.name])
        return _Call(request, row[data.routing_key], row["scheduled"], row["known"], label)

    async def _call(self, predict: Any, row: _Call, round_: int) -> None:
        begun = time.monotonic()
        metadata = (("x-routing-key", row.key), ("x-perennial-model", self.spec.name))
        self.stats.sent += 1
        call = predict(row.request, timeout=TIMEOUT_S, metadata=metadata)
        try:
            answer = await call
            headers = dict(await call.initial_metadata())
        except grpc.aio.AioRpcError as error:
            self.stats.failed += 1
            self.stats.errors[f"{error.code().name}: {(error.details() or '')[:100]}"] += 1
            return
        self.stats.latency_ms.append((time.monotonic() - begun) * 1e3)
        self.stats.by_version[str(answer.model_spec.version.value)] += 1
        self.stats.by_arm[str(headers.get("x-perennial-arm", ""))] += 1
        self._pending.append(
            _Pending(
                time.monotonic() + self.label_delay_s,
                (round_, row.known),
                str(headers["x-request-id"]),
                row.label,
            )
        )

    def _take_due(self, *, everything: bool) -> list[_Pending]:
        now, clock = time.monotonic(), self._clock
        due = [p for p in self._pending if everything or (p.due <= now and p.known <= clock)]
        taken = {id(p) for p in due}
        self._pending = [p for p in self._pending if id(p) not in taken]
        return due

    async def _send_labels(self, channel: Any) -> None:
        from google.protobuf.timestamp_pb2 import Timestamp

        from serving.protos import labels_pb2 as pb
        from serving.protos import labels_pb2_grpc

        stub = labels_pb2_grpc.LabelServiceStub(channel)  # type: ignore[no-untyped-call]
        waiting: list[_Pending] = []
        while True:
            last = self.stopping.is_set()
            waiting += self._take_due(everything=last)
            batch, waiting = waiting[:LABEL_BATCH], waiting[LABEL_BATCH:]
            if batch:
                moment = Timestamp()
                moment.FromDatetime(datetime.now(UTC))
                labels = [
                    pb.Label(request_id=p.request_id, value=p.label, time=moment) for p in batch
                ]
                message = pb.RecordLabelsRequest(
                    model=self.spec.name, source="replay", labels=labels
                )
                try:
                    answer = await stub.RecordLabels(
                        message, timeout=TIMEOUT_S, metadata=self._labels_metadata
                    )
                    self.stats.labels_sent += answer.accepted + answer.duplicates
                    self.stats.labels_failed += len(answer.rejected)
                except grpc.aio.AioRpcError as error:
                    if last:
                        self.stats.labels_failed += len(batch)
                        self.stats.errors[f"labels {error.code().name}"] += 1
                    else:
                        # Sending a label again is harmless: the intake is idempotent.
                        waiting = batch + waiting
                        await asyncio.sleep(LABEL_EVERY_S)
            elif last:
                return
            if not waiting:
                await asyncio.sleep(0 if last else LABEL_EVERY_S)

    async def _write_stats(self, path: Path) -> None:
        while not self.stopping.is_set():
            write_atomic(path, json.dumps(self.stats.document()).encode())
            try:
                await asyncio.wait_for(self.stopping.wait(), 0.5)
            except TimeoutError:
                continue

    def final(self, path: Path) -> None:
        """Writes the stats of the whole run, once everything was sent."""
        write_atomic(path, json.dumps({**self.stats.document(), "ended": True}).encode())


def _labels_metadata(settings: Settings) -> tuple[tuple[str, str], ...]:
    if not settings.labels_key_file:
        return ()
    from serving.access import first_key

    return (("x-api-key", first_key(Path(settings.labels_key_file))),)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="flights")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--stats", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=150.0)
    parser.add_argument("--label-delay", type=float, default=2.0, help="seconds")
    options = parser.parse_args()
    settings = Settings.from_environment()
    spec = load_spec(settings.models_dir / options.model, settings.profile)
    table = load_history(spec).combine_chunks()

    async def run() -> None:
        replay = Replay(settings, spec, table, options.rate, options.label_delay)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, replay.stopping.set)
        await replay.run(options.plan, options.stats)
        replay.final(options.stats)

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
