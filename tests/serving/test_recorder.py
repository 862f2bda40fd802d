"""The recorder behind a real Envoy: each captured call is in the log exactly once, masked."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from perennial.errors import Conflict, Permanent
from perennial.records import hash_key, prediction_schema
from perennial.settings import Settings
from perennial.spec import load_spec
from perennial.store import Store
from serving.recorder import Guard, Metrics, gather_turns
from serving.router import envoy
from serving.router.routes import ModelRouting
from serving.sequence import GRACE_S, SequenceGaps
from serving.spool import MAX_BATCH_BYTES, Spool, exclusive
from tests.support.traffic import (
    Pool,
    Process,
    Router,
    add_model,
    eventually,
    log_rows,
    make_settings,
    metric,
    predict_request,
    python_module,
    routing,
)


class Stack:
    """Pools, router and recorder of one installation."""

    def __init__(self, settings: Settings, enter: ExitStack) -> None:
        self.settings = settings
        self.store = Store(settings.store)
        self.stable, self.canary = Pool(version=1), Pool(version=2)
        enter.enter_context(self.stable.serving(settings.stable_port, settings.stable_rest_port))
        enter.enter_context(self.canary.serving(settings.canary_port, settings.canary_rest_port))
        self.router: Router = enter.enter_context(routing(settings))
        self.recorder: Process = enter.enter_context(python_module(settings, "serving.recorder"))
        eventually(lambda: self.metric("perennial_recorder_backlog_bytes") is not None, "it runs")

    def metric(self, name: str, **labels: str) -> float | None:
        return metric(self.settings.recorder_metrics_port, name, **labels)

    def rows(self, model: str = "trips") -> list[dict]:
        return log_rows(self.store.predictions(model))

    def rows_of(self, *ids: str) -> list[dict]:
        """Rows of these requests, once each request has some."""

        def found() -> list[dict] | None:
            rows = [row for row in self.rows() if row["request_id"] in ids]
            return rows if {row["request_id"] for row in rows} == set(ids) else None

        return eventually(found, f"rows of {ids}")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = make_settings(tmp_path_factory.mktemp("recorder"))
    add_model(settings)
    with ExitStack() as enter:
        running = Stack(settings, enter)
        running.router.declare({"trips": ModelRouting(0.5, "e1")})
        yield running


@pytest.fixture(autouse=True)
def _well(request: pytest.FixtureRequest) -> None:
    if "stack" in request.fixturenames:
        stack = request.getfixturevalue("stack")
        stack.stable.fails_with = stack.canary.fails_with = None
        stack.stable.delay_s = stack.canary.delay_s = 0.0


def test_a_call_is_a_row_with_all_that_is_known_of_it(stack: Stack) -> None:
    answer = stack.router.predict(predict_request(distance=2.5, city="Łódź"), key="user-7")
    [row] = stack.rows_of(answer.request_id)
    secret = stack.settings.key_secret()
    assert row["key_hash"] == hash_key(secret, "user-7")
    assert (row["arm"], row["assigned"], row["route"]) == (answer.arm, answer.arm, "split")
    assert row["version"] == {"stable": 1, "canary": 2}[answer.arm]
    assert (row["status"], row["score"], row["row"]) == (0, 2.5, 0)
    assert (row["feature_city"], row["feature_distance"], row["feature_stops"]) == ("Łódź", 2.5, 0)
    assert row["latency_ms"] >= 0
    spec = load_spec(stack.settings.models_dir / "trips")
    assert list(row) == prediction_schema(spec).names


def test_a_batch_is_one_row_per_example(stack: Stack) -> None:
    answer = stack.router.predict(predict_request(rows=5, distance=0.5))
    found = stack.rows_of(answer.request_id)
    assert [(row["row"], row["feature_stops"]) for row in found] == [(i, i) for i in range(5)]
    assert {row["score"] for row in found} == {0.5}


def test_sensitive_values_never_reach_the_lasting_disk(stack: Stack) -> None:
    answer = stack.router.predict(key="someone@example.org")
    [row] = stack.rows_of(answer.request_id)
    assert row["feature_secret"] is None
    assert row["feature_email"] == hash_key(stack.settings.key_secret(), "someone@example.org")
    for path in stack.settings.home.rglob("*"):
        if path.is_file() and "spool" not in path.parts:
            content = path.read_bytes()
            assert b"do-not-write-me" not in content, path
            assert b"someone@example.org" not in content, path


def test_gzip_is_unpacked(stack: Stack) -> None:
    answer = stack.router.predict(
        predict_request(rows=3, city="Graz" * 50), compression=grpc.Compression.Gzip
    )
    assert {row["feature_city"] for row in stack.rows_of(answer.request_id)} == {"Graz" * 50}


def test_rest_calls_are_rows_too(stack: Stack) -> None:
    one = {"city": "Graz", "email": "a@b", "secret": "x", "distance": 1.5, "stops": 3}
    first = stack.router.rest(
        "/v1/models/trips:predict", {"instances": [one, {**one, "distance": 2.5}]}
    )
    columns = {name: [value] for name, value in one.items()}
    second = stack.router.rest("/v1/models/trips/versions/2:predict", {"inputs": columns})
    ids = [reply.headers["x-request-id"] for reply in (first, second)]
    rows = stack.rows_of(*ids)
    assert [row["score"] for row in rows if row["request_id"] == ids[0]] == [1.5, 2.5]
    [row] = [row for row in rows if row["request_id"] == ids[1]]
    assert (row["score"], row["version"], row["status"]) == (1.5, 2, 0)
    status = stack.router.rest("/v1/models/trips").headers["x-request-id"]
    assert status not in {row["request_id"] for row in stack.rows()}


def test_shadowed_calls_are_two_rows_with_one_id(stack: Stack) -> None:
    stack.router.declare({"trips": ModelRouting(0.0, "e1", 100, 1, 2)})
    one = {"city": "Graz", "email": "a@b", "secret": "x", "distance": 1.5, "stops": 3}
    ids = {
        stack.router.predict(predict_request(distance=4.5), key="user-7").request_id: 4.5,
        stack.router.rest("/v1/models/trips:predict", {"instances": [one]}).headers[
            "x-request-id"
        ]: 1.5,
    }
    stack.router.declare({"trips": ModelRouting(0.5, "e1")})
    rows = eventually(
        lambda: found if len(found := stack.rows_of(*ids)) == 4 else None, "live and shadow rows"
    )
    for id_, score in ids.items():
        both = [row for row in rows if row["request_id"] == id_]
        live, shadow = sorted(both, key=lambda row: row["arm"] == "shadow")
        assert (live["route"], live["arm"], live["assigned"]) == ("split", "stable", "stable")
        assert {shadow["route"], shadow["arm"], shadow["assigned"]} == {"shadow"}
        same = ("row", "key_hash", "feature_city", "feature_distance", "feature_stops", "status")
        assert [live[name] for name in same] == [shadow[name] for name in same]
        assert live["score"] == shadow["score"] == score
        assert (live["version"], shadow["version"]) == (1, 2)
    counted = stack.metric("perennial_recorder_records_total", arm="shadow", route="shadow")
    assert counted == 2


def test_a_rest_row_has_the_version_that_the_routes_declare(stack: Stack) -> None:
    body = {"instances": [{"city": "a", "email": "b", "secret": "c", "distance": 1.5, "stops": 3}]}
    stack.router.declare({"trips": ModelRouting(0.0, "e1", 0, 1, 2)})
    ids = {
        stack.router.rest("/v1/models/trips:predict", body, x_perennial_arm=arm).headers[
            "x-request-id"
        ]: version
        for arm, version in (("stable", 1), ("canary", 2), ("", 1))
    }
    stack.router.declare({"trips": ModelRouting(0.5, "e1")})
    assert {row["request_id"]: row["version"] for row in stack.rows_of(*ids)} == ids


def test_failures_fallbacks_and_testers_are_told_apart(stack: Stack) -> None:
    stack.canary.fails_with = grpc.StatusCode.UNAVAILABLE
    fallen = eventually(
        lambda: (
            a if (a := stack.router.predict()).headers["x-envoy-attempt-count"] == "2" else None
        ),
        "a call falls back",
    )
    stack.canary.fails_with = grpc.StatusCode.INTERNAL
    forced = stack.router.predict(headers={"x-perennial-arm": "canary"})
    rows = {row["request_id"]: row for row in stack.rows_of(fallen.request_id, forced.request_id)}
    row = rows[fallen.request_id]
    assert (row["assigned"], row["arm"], row["status"], row["version"]) == (
        "canary",
        "stable",
        0,
        1,
    )
    row = rows[forced.request_id]
    assert (row["route"], row["arm"], row["status"]) == ("forced", "canary", 13)
    assert (row["score"], row["version"], row["feature_distance"]) == (None, 0, 1.0)


def test_a_client_that_leaves_is_a_row(stack: Stack) -> None:
    stack.stable.delay_s = stack.canary.delay_s = 0.5
    stack.router.predict(timeout_s=0.1, headers={"x-request-id": "left-1"})
    [row] = stack.rows_of("left-1")
    assert row["status"] in (-1, 4)
    assert row["score"] is None


def test_what_gives_no_row_is_counted_by_reason(stack: Stack) -> None:
    def count(reason: str) -> float:
        found = stack.metric("perennial_recorder_unparsable_total", reason=reason)
        assert found is not None
        return found

    before = {reason: count(reason) for reason in ("unknown_model", "features", "line", "over_cap")}
    stack.router.predict(predict_request("nobody"))
    lacking = predict_request()
    del lacking.inputs["city"]
    stack.router.predict(lacking)
    stack.router.predict(predict_request(city="x" * 300_000))
    with envoy.capture_log(stack.settings).open("ab") as file:
        file.write(b"1\tnot\tours\n\n")
    eventually(lambda: count("unknown_model") == before["unknown_model"] + 1, "unknown_model")
    eventually(lambda: count("features") == before["features"] + 1, "features")
    eventually(lambda: count("over_cap") == before["over_cap"] + 1, "over_cap")
    eventually(lambda: count("line") == before["line"] + 2, "line")
    kept = stack.settings.spool_dir / "unparsable.txt"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert b"line\t1\tnot\tours\n" in kept.read_bytes()


def test_a_second_recorder_is_refused(stack: Stack) -> None:
    with pytest.raises(Conflict, match=r"recorder\.running"), exclusive(stack.settings.spool_dir):
        pass


def files(stack: Stack) -> list[Path]:
    return list(stack.store.predictions("trips").glob("date=*/hour=*/*.parquet"))


def test_killed_at_any_time_nothing_is_lost_and_nothing_doubled(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    add_model(settings)
    with ExitStack() as enter:
        stack = Stack(settings, enter)
        stack.router.declare({"trips": ModelRouting(0.5, "e1")})
        stop, ids, lock = threading.Event(), [], threading.Lock()

        def load() -> None:
            while not stop.is_set():
                answer = stack.router.predict()
                with lock:
                    ids.append(answer.request_id)
                stop.wait(0.03)  # so little that the recorder writes each turn

        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(5):
                # The moment between the rows' file and the saved offset.
                before = len(files(stack))
                eventually(lambda n=before: len(files(stack)) > n, "it writes", every_s=0.001)
                stack.recorder.kill()
                stack.recorder.start()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        log = envoy.capture_log(settings)
        eventually(lambda: all(i.encode() in log.read_bytes() for i in ids[-3:]), "it is flushed")
        eventually(lambda: stack.metric("perennial_recorder_backlog_bytes") == 0, "all is taken")
        assert stack.recorder.stop() == 0
        counts = Counter(row["request_id"] for row in stack.rows())
    assert len(ids) > 300
    assert counts == Counter(ids)


def test_sigterm_drains(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    add_model(settings)
    with ExitStack() as enter:
        stack = Stack(settings, enter)
        ids = {stack.router.predict().request_id for _ in range(50)}
        log = envoy.capture_log(settings)
        eventually(lambda: all(i.encode() in log.read_bytes() for i in ids), "the log is flushed")
        assert stack.recorder.stop() == 0
        assert {row["request_id"] for row in stack.rows()} == ids


def line(number: int) -> bytes:
    return b"line-%06d\n" % number


def spool_at(tmp_path: Path, **given: object) -> Spool:
    return Spool(tmp_path / "spool" / "capture.log", tmp_path / "state.json", lambda: None, **given)


def take(spool: Spool) -> list[bytes]:
    lines = []
    for batch in spool.batches():
        lines += batch.lines
        spool.commit(batch)
    return lines


def test_an_uncommitted_batch_is_taken_again_under_the_same_name(tmp_path: Path) -> None:
    spool = spool_at(tmp_path)
    spool.active.write_bytes(line(1) + line(2))
    first = next(spool.batches())
    with spool.active.open("ab") as file:
        file.write(line(3) + b"torn")
    again = next(spool_at(tmp_path).batches())
    assert first.id == again.id
    assert again.lines == (line(1)[:-1], line(2)[:-1], line(3)[:-1])
    spool.commit(again)
    assert list(spool_at(tmp_path).batches()) == []
    assert spool.backlog_bytes() == len(b"torn")


def test_rotation_under_a_real_router_loses_no_line(stack: Stack, tmp_path: Path) -> None:
    """A second reader of the same stream, which renames the file under Envoy's hands."""
    settings = make_settings(
        tmp_path,
        stable_port=stack.settings.stable_port,
        stable_rest_port=stack.settings.stable_rest_port,
        canary_port=stack.settings.canary_port,
        canary_rest_port=stack.settings.canary_rest_port,
    )
    with routing(settings) as router:

        def reopen() -> None:
            httpx.post(envoy.admin_url(settings) + "/reopen_logs", trust_env=False)

        spool = Spool(
            envoy.capture_log(settings), tmp_path / "state.json", reopen, rotate_bytes=20_000
        )
        ids, taken, rotations = [], [], set()

        def turn() -> bool:
            taken.extend(take(spool))
            assert spool.rotate() == 0
            rotations.update(spool.active.parent.glob("capture.*.log"))
            return len(taken) >= len(ids)

        for _ in range(6):
            ids += [router.predict().request_id for _ in range(60)]
            turn()
        eventually(turn, "all lines are taken")
        eventually(
            lambda: turn() and not list(spool.active.parent.glob("capture.*.log")),
            "the renamed files are deleted",
        )
    assert len(rotations) >= 2
    assert sorted(one.split(b"\t")[17].decode() for one in taken) == sorted(ids)


def test_a_file_that_follows_under_the_same_name_starts_at_its_beginning(tmp_path: Path) -> None:
    spool = spool_at(tmp_path)
    spool.active.write_bytes(line(1))
    assert take(spool) == [line(1)[:-1]]
    spool.active.write_bytes(line(2) + line(3))  # the same inode
    assert take(spool_at(tmp_path)) == [line(2)[:-1], line(3)[:-1]]


def test_garbage_without_an_end_is_given_up(tmp_path: Path) -> None:
    spool = spool_at(tmp_path)
    spool.active.write_bytes(b"x" * (2 * MAX_BATCH_BYTES + 5) + b"\n" + line(1))
    torn = 0
    lines: list[bytes] = []
    for batch in spool.batches():
        torn += batch.torn
        lines += batch.lines
        spool.commit(batch)
    assert torn == 2
    assert lines == [b"xxxxx", line(1)[:-1]]


def test_a_state_that_cannot_be_read_stops_the_recorder(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("[1]")
    with pytest.raises(Permanent, match=r"recorder\.state"):
        spool_at(tmp_path)


def test_little_traffic_is_seen_soon_and_much_makes_few_files() -> None:
    assert [gather_turns(lines, 1) for lines in (0, 50, 99)] == [1, 1, 1]
    assert [gather_turns(lines, 1) for lines in (100, 1500, 5000, 10_000, 90_000)] == [
        5,
        5,
        2,
        1,
        1,
    ]
    assert gather_turns(400, 5) == 1


def test_lost_lines_are_counted_after_a_grace() -> None:
    now = 0.0
    gaps = SequenceGaps(lambda: now)
    assert [gaps.see(b"a", n) for n in (5, 6, 9, 8, 12)] == [0] * 5  # 7, 10, 11 are late or lost
    assert gaps.see(b"b", 1) == 0
    now = GRACE_S - 1
    assert gaps.see(b"a", 10) == 0
    now = GRACE_S + 1
    assert gaps.see(b"a", 13) == 2
    assert gaps.see(b"a", 14) == 0


def test_capture_is_suspended_by_a_backlog_and_resumed(stack: Stack) -> None:
    metrics = Metrics(CollectorRegistry())
    with httpx.Client(base_url=envoy.admin_url(stack.settings), trust_env=False) as client:

        def percent() -> str:
            entries = client.get("/runtime").json()["entries"]
            return entries["perennial.capture_percent"]["final_value"]

        guard = Guard(client, metrics, (stack.settings.home,), 100, max_backlog_bytes=1000)
        guard.check(0)
        assert percent() == "100"
        guard.check(1001)
        assert percent() == "0"
        assert stack.router.predict().code == grpc.StatusCode.OK
        guard.check(900)
        assert percent() == "0"
        guard.check(10)
        assert percent() == "100"
        guard.min_free_bytes, guard.min_free_share = 1 << 60, 1.1
        guard.check(0)
        assert percent() == "0"
        guard.min_free_bytes = 0
        guard.check(0)
        assert percent() == "100"
    assert metrics.suspended_s._value.get() > 0
