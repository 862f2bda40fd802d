"""What a recorder survives: full disks, kills at any byte, garbage, and being away."""

from __future__ import annotations

import resource
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perennial.settings import Settings
from perennial.store import Store
from serving.capture import Reason
from serving.router import envoy
from serving.spool import Spool
from tests.support.traffic import (
    Process,
    add_model,
    eventually,
    make_settings,
    metric,
    python_module,
    spool_line,
)


class Recording:
    """A recorder alone: what a router would write is appended by the test."""

    def __init__(self, settings: Settings, process: Process) -> None:
        self.settings, self.process, self.number = settings, process, 0
        self.log = envoy.capture_log(settings)
        self.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)

    def append(self, count: int, **fields: bytes) -> list[str]:
        """Calls; returns their request ids."""
        numbers = range(self.number, self.number + count)
        self.number += count
        with self.log.open("ab") as file:
            file.writelines(spool_line(number, **fields) for number in numbers)
        return [f"r-{number}" for number in numbers]

    def metric(self, name: str, **labels: str) -> float:
        port = self.settings.recorder_metrics_port
        return metric(port, f"perennial_recorder_{name}", **labels) or 0.0

    def wait_taken(self) -> None:
        # The gauge is as old as the last turn.
        done = eventually(
            lambda: self.metric("records_total") + self.unparsable() >= self.number, "all is taken"
        )
        assert done

    def unparsable(self) -> float:
        return sum(self.metric("unparsable_total", reason=reason) for reason in Reason)

    def ids(self) -> Counter[str]:
        return Counter(
            id_
            for file in self.files()
            for id_ in pq.read_table(file, columns=["request_id"], partitioning=None)[0].to_pylist()
        )

    def files(self) -> list[Path]:
        return list(Store(self.settings.store).predictions("trips").rglob("*.parquet"))

    def memory_bytes(self) -> int:
        status = Path(f"/proc/{self.process.popen.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) << 10


@contextmanager
def recording(home: Path) -> Iterator[Recording]:
    settings = make_settings(home)
    add_model(settings)
    try:
        with python_module(settings, "serving.recorder") as process:
            port, gauge = settings.recorder_metrics_port, "perennial_recorder_backlog_bytes"
            eventually(lambda: metric(port, gauge) is not None, "it runs")
            yield Recording(settings, process)
    finally:
        shutil.rmtree(settings.spool_dir)


def test_after_a_minute_away_all_is_taken_in_few_files_and_memory_stays(tmp_path: Path) -> None:
    """300 calls a second for a minute, then as many again."""
    with recording(tmp_path) as recorder:
        recorder.process.kill()
        ids = recorder.append(18_000)
        recorder.process.start()
        recorder.wait_taken()
        first = recorder.memory_bytes()
        assert recorder.ids() == Counter(ids)
        assert len(recorder.files()) <= 4
        ids += recorder.append(18_000)
        recorder.wait_taken()
        assert recorder.ids() == Counter(ids)
        assert recorder.memory_bytes() - first < 32 << 20


def test_ten_thousand_bad_lines_are_counted_each_with_its_reason_and_memory_stays(
    tmp_path: Path,
) -> None:
    frame = b"AAAAAAL//w=="  # flag 0, 2 bytes: no protobuf
    kinds: dict[Reason, dict[str, bytes]] = {
        Reason.LINE: {"time": b"soon"},
        Reason.BODY: {"request": b"a1:1:7:" + frame},
        Reason.OVER_CAP: {"request": b"a1:1:999999:"},
        Reason.REQUEST_ID: {"request_id": b"a b"},
        Reason.SCORE: {"reply": b"5:AAAAAAA="},
    }
    with recording(tmp_path) as recorder:
        ids, memory = [], []
        for turn in (1, 2):
            for fields in kinds.values():
                recorder.append(2_000, **fields)
                ids += recorder.append(1)
            recorder.wait_taken()
            memory.append(recorder.memory_bytes())
            for reason in kinds:
                assert recorder.metric("unparsable_total", reason=reason) == 2_000 * turn, reason
        assert recorder.ids() == Counter(ids)
        assert memory[1] - memory[0] < 32 << 20
        kept = recorder.log.with_name("unparsable.txt").read_bytes()
        assert kept.count(b"over_cap\t") == 4_000


def test_a_log_disk_that_takes_nothing_loses_nothing(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder:
        ids = recorder.append(10)
        recorder.wait_taken()
        pid = recorder.process.popen.pid
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        ids += recorder.append(500)
        eventually(lambda: recorder.metric("write_failures_total") >= 2, "it says so")
        assert recorder.metric("backlog_bytes") > 0
        assert recorder.process.popen.poll() is None
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        recorder.wait_taken()
        eventually(lambda: recorder.metric("backlog_bytes") == 0, "nothing waits")
        assert recorder.ids() == Counter(ids)
        assert not list(Path(recorder.settings.store.removeprefix("file://")).rglob("*.tmp"))


LINES = [b"%04d-%s\n" % (n, b"x" * (n * 7 % 60)) for n in range(60)]
STREAM = b"".join(LINES)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["append", "take", "killed before", "killed after", "rename"]),
            st.integers(1, 400),
        ),
        max_size=30,
    )
)
def test_killed_at_any_byte_each_line_is_in_the_log_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    """`killed before`: rows are on disk, the offset isn't. `killed after`: both are.

    What is appended ends at any byte; after a kill another process reads the saved state.
    """
    folder = tmp_path_factory.mktemp("spool")
    active, state = folder / "spool" / "capture.log", folder / "state.json"
    log: dict[str, tuple[bytes, ...]] = {}
    written = renames = 0

    def spool() -> Spool:
        return Spool(active, state, lambda: None)

    reader = spool()
    for step, size in [*steps, ("append", len(STREAM)), ("take", 0)]:
        if step == "append":
            with active.open("ab") as file:
                file.write(STREAM[written : written + size])
            written = min(len(STREAM), written + size)
        elif step == "rename":
            # Envoy renames nothing within a line: the reader does, and Envoy reopens.
            if active.exists() and STREAM[:written].endswith(b"\n"):
                renames += 1
                active.rename(active.with_name(f"capture.{renames:03d}.log"))
        else:
            for batch in reader.batches():
                log[batch.id] = batch.lines
                if step != "killed before":
                    reader.commit(batch)
                if step != "take":
                    reader = spool()
                    break
    lines = [line for lines in log.values() for line in lines]
    assert sorted(lines) == [line[:-1] for line in LINES]


def test_an_offset_that_cannot_be_saved_is_no_progress(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool" / "capture.log", tmp_path / "state" / "s.json", lambda: None)
    spool.active.write_bytes(LINES[0])
    (tmp_path / "state").write_text("no folder")
    batch = next(spool.batches())
    with pytest.raises(OSError, match="state"):
        spool.commit(batch)
    with spool.active.open("ab") as file:
        file.write(LINES[1])
    assert next(spool.batches()).id == batch.id
