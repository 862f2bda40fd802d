"""The intake of labels, as its own process and over real gRPC."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent import futures
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from prometheus_client import CollectorRegistry

from perennial.errors import Retryable
from perennial.records import LABEL_SCHEMA
from perennial.settings import Settings
from perennial.store import Store
from serving import intake as intake_module
from serving.inbox import Label
from serving.intake import Intake, Metrics, Models, Taken
from serving.labels import MAX_MESSAGE_BYTES
from serving.protos import labels_pb2 as pb
from serving.protos import labels_pb2_grpc as pb_grpc
from tests.support.traffic import (
    Process,
    add_model,
    eventually,
    log_rows,
    make_settings,
    metric,
    python_module,
)


class Labels:
    """A running intake and a client of it."""

    def __init__(self, settings: Settings, process: Process) -> None:
        self.settings = settings
        self.process = process
        self.folder = Store(settings.store).labels("trips")
        self.inbox = Store(settings.store).model_dir("trips") / "inbox" / "labels"
        self.inbox.mkdir(parents=True, exist_ok=True)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{settings.labels_port}")
        self.ready()

    def ready(self) -> None:
        grpc.channel_ready_future(self.channel).result(60)

    def send(
        self, *labels: pb.Label, model: str = "trips", source: str = ""
    ) -> pb.RecordLabelsResponse:
        request = pb.RecordLabelsRequest(model=model, source=source, labels=labels)
        return pb_grpc.LabelServiceStub(self.channel).RecordLabels(request, timeout=20)

    def rows(self) -> list[dict]:
        return log_rows(self.folder)

    def rows_of(self, request_id: str) -> list[dict]:
        return [row for row in self.rows() if row["request_id"] == request_id]

    def metric(self, name: str, **labels: str) -> float:
        found = metric(self.settings.labels_metrics_port, f"perennial_labels_{name}", **labels)
        return found or 0.0

    def drop(self, name: str, content: bytes) -> None:
        hidden = self.inbox / f".{name}"
        hidden.write_bytes(content)
        hidden.rename(self.inbox / name)

    def taken(self, name: str, folder: str) -> Path:
        path = self.inbox / folder / name
        eventually(path.exists, f"{name} in {folder}")
        return path


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Labels]:
    settings = make_settings(tmp_path_factory.mktemp("labels"))
    add_model(settings)
    with python_module(settings, "serving.labels") as process:
        running = Labels(settings, process)
        yield running
        running.channel.close()
        assert process.stop() == 0


def label(request_id: str, value: float = 1.0, **given: object) -> pb.Label:
    return pb.Label(request_id=request_id, value=value, **given)


def at(moment: datetime) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(moment)
    return stamp


def test_ok_means_on_disk(service: Labels) -> None:
    known = datetime.now(UTC).replace(microsecond=5) - timedelta(hours=3)
    answer = service.send(label("disk-1", time=at(known)), label("disk-1", 0.0, row=1), source="s")
    assert (answer.accepted, answer.duplicates, len(answer.rejected)) == (2, 0, 0)
    first, second = service.rows_of("disk-1")
    assert (first["value"], first["row"], first["source"], first["time"]) == (1.0, 0, "s", known)
    assert (second["value"], second["row"]) == (0.0, 1)
    assert abs(second["time"] - datetime.now(UTC)) < timedelta(seconds=30)
    assert first["received"] < second["received"]


def test_the_same_label_again_is_counted_and_not_written(service: Labels) -> None:
    assert service.send(label("same-1"), label("same-1")).duplicates == 1
    before = service.metric("duplicates_total")
    assert service.send(label("same-1")).duplicates == 1
    assert len(service.rows_of("same-1")) == 1
    assert service.metric("duplicates_total") == before + 1
    assert service.send(label("same-1"), source="other").accepted == 1


def test_a_label_that_contradicts_is_counted_and_kept(service: Labels) -> None:
    service.send(label("conflict-1", 1.0))
    before = service.metric("conflicts_total")
    answer = service.send(label("conflict-1", 0.0))
    assert (answer.accepted, answer.conflicts) == (1, 1)
    assert service.metric("conflicts_total") == before + 1
    values = sorted(service.rows_of("conflict-1"), key=lambda row: row["received"])
    assert [row["value"] for row in values] == [1.0, 0.0]


def test_a_label_that_is_dated_ahead_is_counted_and_kept(service: Labels) -> None:
    ahead = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    before = service.metric("future_total")
    answer = service.send(label("future-1", time=at(ahead)), label("future-2"))
    assert (answer.accepted, answer.future) == (2, 1)
    assert service.metric("future_total") == before + 1
    assert service.rows_of("future-1")[0]["time"] == ahead


def test_each_bad_label_is_refused_with_its_reason_and_the_good_ones_are_taken(
    service: Labels,
) -> None:
    answer = service.send(
        label(""),
        label("bad-1", math.nan),
        label("bad-1", 0.5),
        label("bad-1", row=-1),
        label("bad-1", time=Timestamp(seconds=10**15)),
        label("x" * 201),
        label("good-1"),
    )
    assert answer.accepted == 1
    assert [(one.index, one.reason) for one in answer.rejected] == [
        (0, "request_id"),
        (1, "not_finite"),
        (2, "not_binary"),
        (3, "row"),
        (4, "time"),
        (5, "request_id"),
    ]
    assert service.rows_of("bad-1") == []


def test_a_model_that_is_not_under_care_is_not_found(service: Labels) -> None:
    with pytest.raises(grpc.RpcError) as error:
        service.send(label("r"), model="nobody")
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    assert "trips" in error.value.details()


def test_a_model_that_is_added_needs_no_restart(service: Labels) -> None:
    broken = service.settings.models_dir / "broken"
    broken.mkdir()
    (broken / "model.yaml").write_text("version: 1")
    add_model(service.settings, "later")
    eventually(lambda: _accepted(service, "later") == 1, "labels of the new model are taken")
    rows = log_rows(Store(service.settings.store).labels("later"))
    assert [row["request_id"] for row in rows] == ["added"]
    assert _accepted(service, "broken") is None


def _accepted(service: Labels, model: str) -> int | None:
    try:
        return service.send(label("added"), model=model).accepted
    except grpc.RpcError:
        return None


def test_a_call_that_is_too_large_is_refused(service: Labels) -> None:
    with pytest.raises(grpc.RpcError) as error:
        service.send(*[label("r")] * 10_001)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as error:
        service.send(label("r" * MAX_MESSAGE_BYTES))
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert service.rows_of("r") == []


def test_concurrent_calls_share_a_file(service: Labels) -> None:
    def files() -> int:
        return len(list(service.folder.glob("*/*/*.parquet")))

    before = files()
    with futures.ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda n: service.send(label(f"together-{n}")), range(400)))
    assert {answer.accepted for answer in answers} == {1}
    assert len([r for r in service.rows() if r["request_id"].startswith("together-")]) == 400
    assert files() - before < 200


def test_what_was_taken_before_a_restart_is_known_after_it(service: Labels) -> None:
    service.send(label("restart-1"))
    service.process.kill()
    service.process.start()
    service.ready()
    eventually(lambda: _sent(service, "restart-1") == 1, "it answers again")
    assert len(service.rows_of("restart-1")) == 1


def _sent(service: Labels, request_id: str) -> int | None:
    try:
        return service.send(label(request_id)).duplicates
    except grpc.RpcError:
        return None


def test_nothing_that_was_answered_is_lost_when_killed(service: Labels) -> None:
    answered, stop = set(), threading.Event()

    def load(thread: int) -> None:
        number = 0
        while not stop.is_set():
            name = f"killed-{thread}-{number}"
            try:
                service.send(label(name))
            except grpc.RpcError:
                return
            answered.add(name)
            number += 1

    threads = [threading.Thread(target=load, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(answered) > 200, "labels are taken")
    service.process.kill()
    stop.set()
    for thread in threads:
        thread.join()
    service.process.start()
    service.ready()
    assert answered <= {row["request_id"] for row in service.rows()}


def test_a_dropped_csv_is_taken(service: Labels) -> None:
    service.drop(
        "a.csv",
        b"request_id,row,value,time,extra\nfile-1,0,1,2024-05-01T10:00:00Z,x\n"
        b"file-1,1,0,2024-05-01T10:00:00.5Z,x\nfile-2,0,7,2024-05-01T10:00:00Z,x\n",
    )
    done = service.taken("a.csv", "done")
    rows = service.rows_of("file-1")
    assert [(r["row"], r["value"], r["source"]) for r in rows] == [
        (0, 1.0, "file"),
        (1, 0.0, "file"),
    ]
    assert rows[0]["time"] == datetime(2024, 5, 1, 10, tzinfo=UTC)
    rejected = done.with_name("a.csv.rejected.json")
    eventually(rejected.exists, "what was refused is said")
    assert rejected.read_text() == '{"not_binary": 1}'


def test_a_dropped_parquet_is_taken(service: Labels, tmp_path: Path) -> None:
    ids = [f"parquet-{n}" for n in range(25_000)]
    table = pa.table({"request_id": ids, "value": [1] * len(ids), "source": ["audit"] * len(ids)})
    pq.write_table(table, tmp_path / "b.parquet")
    service.drop("b.parquet", (tmp_path / "b.parquet").read_bytes())
    service.taken("b.parquet", "done")
    rows = [row for row in service.rows() if row["source"] == "audit"]
    assert len(rows) == len(ids)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("c.csv", b"request,value\nx,1\n", "no column request_id"),
        ("d.csv", b"request_id,value\nx,many\n", "many"),
        ("e.parquet", b"no parquet", "e.parquet"),
        ("f.xlsx", b"", "neither .csv nor .parquet"),
        ("g.csv", b"", "g.csv"),
    ],
)
def test_a_bad_file_is_moved_away_with_the_reason(
    service: Labels, name: str, content: bytes, reason: str
) -> None:
    service.drop(name, content)
    path = service.taken(name, "failed").with_name(f"{name}.reason.txt")
    eventually(path.exists, "the reason is said")
    assert reason in path.read_text()
    assert service.send(label(f"after-{name}")).accepted == 1


def test_more_than_can_wait_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk stands still: the queue fills, the next call is told to come again."""
    settings = make_settings(tmp_path)
    add_model(settings)
    still, go = threading.Event(), threading.Event()
    write = intake_module.write_parquet

    def slow(table: pa.Table, path: Path) -> None:
        still.set()
        assert go.wait(20)
        write(table, path)

    monkeypatch.setattr(intake_module, "write_parquet", slow)
    store, registry = Store(settings.store), CollectorRegistry()
    intake = Intake(store, Models(settings.models_dir), Metrics(registry))
    try:
        waiting = [intake.submit("trips", "s", [Label("first", 0, 1.0)])]
        assert still.wait(10)
        for number in range(intake_module.MAX_PENDING):
            waiting.append(intake.submit("trips", "s", [Label(f"r-{number}", 0, 1.0)]))
        with pytest.raises(Retryable, match=r"labels\.busy"):
            intake.submit("trips", "s", [Label("one too many", 0, 1.0)])
        go.set()
        assert sum(one.result(20).accepted for one in waiting) == intake_module.MAX_PENDING + 1
    finally:
        go.set()
        intake.close()
    assert registry.get_sample_value("perennial_labels_overflows_total") == 1


def test_more_labels_than_memory_is_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few calls, many labels: they wait for the disk up to a bound, and are let go after it."""
    settings = make_settings(tmp_path)
    add_model(settings)
    still, go = threading.Event(), threading.Event()
    write = intake_module.write_parquet

    def slow(table: pa.Table, path: Path) -> None:
        still.set()
        assert go.wait(20)
        write(table, path)

    monkeypatch.setattr(intake_module, "write_parquet", slow)
    monkeypatch.setattr(intake_module, "MAX_PENDING_LABELS", 10)
    models, metrics = Models(settings.models_dir), Metrics(CollectorRegistry())
    intake = Intake(Store(settings.store), models, metrics)

    def call(name: str, labels: int) -> futures.Future[Taken]:
        return intake.submit("trips", "s", [Label(f"{name}-{n}", 0, 1.0) for n in range(labels)])

    try:
        first = call("first", 6)
        assert still.wait(10)
        with pytest.raises(Retryable, match="10 labels wait for the disk"):
            call("too-many", 5)
        second = call("second", 4)
        go.set()
        assert (first.result(20).accepted, second.result(20).accepted) == (6, 4)
        eventually(lambda: intake._waiting == 0, "nothing waits")
        assert call("again", 10).result(20).accepted == 10
    finally:
        go.set()
        intake.close()


def test_the_window_is_bounded_and_holds_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that can't be read, one with more rows than the window: what is newest is known."""
    settings = make_settings(tmp_path)
    add_model(settings)
    store = Store(settings.store)

    def taken(names: list[str]) -> Taken:
        intake = Intake(store, Models(settings.models_dir), Metrics(CollectorRegistry()))
        try:
            assert len(intake._known) <= 5
            labels = [Label(name, 0, 1.0) for name in names]
            return intake.submit("trips", "s", labels).result(10)
        finally:
            intake.close()

    monkeypatch.setattr(intake_module, "_WINDOW", 5)
    assert taken([f"r{n}" for n in range(20)]).accepted == 20
    folder = next(store.labels("trips").glob("date=*/hour=*"))
    (folder / "broken.parquet").write_text("no parquet")
    assert taken(["r19", "r15"]).duplicates == 2
    assert taken(["r0"]).accepted == 1


def test_a_disk_that_fails_is_said_and_the_label_can_be_sent_again(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    add_model(settings)
    store = Store(settings.store)
    intake = Intake(store, Models(settings.models_dir), Metrics(CollectorRegistry()))
    try:
        store.labels("trips").parent.mkdir(parents=True)
        store.labels("trips").write_text("in the way")
        with pytest.raises(Retryable, match=r"labels\.disk"):
            intake.submit("trips", "s", [Label("r", 0, 1.0)]).result(10)
        store.labels("trips").unlink()
        assert intake.submit("trips", "s", [Label("r", 0, 1.0)]).result(10).accepted == 1
    finally:
        intake.close()


def test_a_clock_that_steps_back_keeps_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A correction is always received after what it corrects: the join takes the newest."""
    settings = make_settings(tmp_path)
    add_model(settings)
    store = Store(settings.store)
    moments = [datetime(2030, 1, 1, 12, tzinfo=UTC), datetime(2030, 1, 1, 11, tzinfo=UTC)]

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return moments.pop(0) if len(moments) > 1 else moments[0]

    monkeypatch.setattr(intake_module, "datetime", Clock)
    intake = Intake(store, Models(settings.models_dir), Metrics(CollectorRegistry()))
    try:
        for value in (1.0, 0.0):
            intake.submit("trips", "s", [Label("r", 0, value)]).result(10)
    finally:
        intake.close()
    rows = sorted(log_rows(store.labels("trips")), key=lambda row: row["received"])
    assert [row["value"] for row in rows] == [1.0, 0.0]


def test_the_log_has_the_schema_of_the_records(service: Labels) -> None:
    service.send(label("schema-1"))
    path = sorted(service.folder.glob("*/*/*.parquet"))[-1]
    assert pq.read_schema(path) == LABEL_SCHEMA
