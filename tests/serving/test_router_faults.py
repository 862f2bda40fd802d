"""The router when it is replaced, when it ends, and when a canary hides behind its fallback."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from perennial.settings import Settings
from serving.recorder import Guard, Metrics
from serving.router import clusters, envoy
from serving.router.routes import ModelRouting
from tests.support.edge import private
from tests.support.traffic import (
    Pool,
    Router,
    eventually,
    make_settings,
    predict_request,
    router_service,
    routing,
)

OK = grpc.StatusCode.OK
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return make_settings(tmp_path_factory.mktemp("pools"))


@pytest.fixture(scope="module")
def pools(settings: Settings) -> Iterator[tuple[Pool, Pool]]:
    stable, canary = Pool(version=1), Pool(version=2)
    with (
        stable.serving(settings.stable_port, settings.stable_rest_port),
        canary.serving(settings.canary_port, settings.canary_rest_port),
    ):
        yield stable, canary


def beside(settings: Settings, home: Path, **given: Any) -> Settings:
    """Another router's settings before the same pools."""
    names = ("stable_port", "stable_rest_port", "canary_port", "canary_rest_port")
    return make_settings(home, **{name: getattr(settings, name) for name in names}, **given)


@contextmanager
def load(router: Router, threads: int = 3) -> Iterator[list[Any]]:
    """Calls, gRPC on one connection and REST on new ones; their outcomes."""
    stop, outcomes, pause_s = threading.Event(), [], 0.005

    def call_grpc() -> None:
        while not stop.wait(pause_s):
            answer = router.predict()
            outcomes.append(OK if answer.code == OK else f"{answer.code}: {answer.details}")

    def call_rest() -> None:
        while not stop.wait(pause_s):
            reply = router.rest("/v1/models/trips:predict", {"instances": [{"distance": 1.0}]})
            outcomes.append(OK if reply.status_code == 200 else reply.status_code)

    running = [threading.Thread(target=call_grpc) for _ in range(threads)]
    running.append(threading.Thread(target=call_rest))
    for thread in running:
        thread.start()
    try:
        yield outcomes
    finally:
        stop.set()
        for thread in running:
            thread.join()


def test_a_hot_restart_fails_no_call_and_loses_no_line(
    tmp_path: Path, settings: Settings, pools: tuple[Pool, Pool]
) -> None:
    keys = private(tmp_path / "token", "a-token-of-testers")
    mine = beside(settings, tmp_path, router_drain_s=1, router_tester_token=str(keys))
    with router_service(mine) as router:
        router.declare({"trips": ModelRouting(0.3, "e1")})
        with load(router) as outcomes:
            for epoch in (1, 2):
                before = len(outcomes)
                router.process.popen.send_signal(signal.SIGHUP)
                eventually(lambda e=epoch: epoch_of(mine) == e, "it has taken over")
                eventually(lambda n=before: len(outcomes) > n + 100, "calls go on")
            eventually(lambda: len(children(router)) == 1, "the old ones have ended")
        assert set(outcomes) == {OK}
        log = envoy.capture_log(mine)
        ids = eventually(
            lambda: found if len(found := captured(log)) >= len(outcomes) else None,
            "all is flushed",
        )
        assert len(ids) == len(set(ids)) == len(outcomes)
        # What Envoy would refuse is not taken over.
        keys.write_text("short")
        router.process.popen.send_signal(signal.SIGHUP)
        said = mine.home / "serving.router.log"
        eventually(lambda: "router.secret" in said.read_text(), "it says so")
        assert router.predict().code == OK
        assert epoch_of(mine) == 2
    assert not list(Path("/dev/shm").glob(f"envoy_shared_memory_{envoy.base_id(mine)}*"))


def epoch_of(settings: Settings) -> int | None:
    """The restart epoch of the running Envoy; None while there is none."""
    try:
        reply = httpx.get(envoy.admin_url(settings) + "/server_info", trust_env=False)
        return int(reply.json()["command_line_options"].get("restart_epoch", 0))
    except (httpx.HTTPError, ValueError):
        return None


def children(router: Router) -> list[int]:
    pid = router.process.popen.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def captured(log: Path) -> list[bytes]:
    return [line.split(b"\t")[17] for line in log.read_bytes().splitlines()]


def test_a_router_whose_envoy_is_killed_ends_and_leaves_nothing(
    tmp_path: Path, settings: Settings, pools: tuple[Pool, Pool]
) -> None:
    mine = beside(settings, tmp_path)
    with router_service(mine) as router:
        assert list(Path("/dev/shm").glob(f"envoy_shared_memory_{envoy.base_id(mine)}*"))
        [child] = children(router)
        os.kill(child, signal.SIGKILL)
        assert router.process.popen.wait(10) == 3
        assert not list(Path("/dev/shm").glob(f"envoy_shared_memory_{envoy.base_id(mine)}*"))


def test_a_killed_starter_takes_its_envoy_along(
    tmp_path: Path, settings: Settings, pools: tuple[Pool, Pool]
) -> None:
    """Else the next start would find the installation's Envoy still there."""
    mine = beside(settings, tmp_path)
    with router_service(mine) as router:
        [child] = children(router)
        router.process.kill()
        eventually(lambda: not Path(f"/proc/{child}/exe").exists(), "Envoy ends")
        router.process.start()
        eventually(lambda: epoch_of(mine) == 0, "it runs again")
        assert router.rest("/v1/models/trips").status_code == 200


def test_a_router_that_is_told_to_end_finishes_its_calls(
    tmp_path: Path, settings: Settings, pools: tuple[Pool, Pool]
) -> None:
    with router_service(beside(settings, tmp_path, router_drain_s=2)) as router:
        pools[0].delay_s, before = 1.0, pools[0].calls
        answers = []
        thread = threading.Thread(target=lambda: answers.append(router.predict()))
        thread.start()
        eventually(lambda: pools[0].calls > before, "the call is in flight")
        assert router.process.stop() == 0
        thread.join()
        pools[0].delay_s = 0.0
        assert answers[0].code == OK


def test_a_canary_that_is_left_alone_still_fails(
    tmp_path: Path, settings: Settings, pools: tuple[Pool, Pool]
) -> None:
    """Envoy stops asking a host that fails again and again; the log must not forget whose calls
    stable answers meanwhile."""
    mine = beside(settings, tmp_path)
    with routing(mine) as router:
        router.declare({"trips": ModelRouting(1.0, "e1")})
        pools[1].fails_with = grpc.StatusCode.INTERNAL
        try:
            answers = [router.predict(headers={"x-request-id": f"r-{n}"}) for n in range(30)]
        finally:
            pools[1].fails_with = None
        hidden = [answer.request_id for answer in answers if answer.code == OK]
        seen = [answer.request_id for answer in answers if answer.arm == "canary"]
        assert 5 <= len(seen) <= 10
        assert len(hidden) == 30 - len(seen)
        log = envoy.capture_log(mine)
        eventually(lambda: log.exists() and len(captured(log)) == 30, "all is flushed")
        lines = [line.split(b"\t") for line in log.read_bytes().splitlines()]
        fields = {line[17].decode(): line for line in lines}
        assert {fields[id_][4] for id_ in hidden + seen} == {b"canary_or_stable"}
        assert {fields[id_][3] for id_ in hidden} == {b"stable"}
        eventually(lambda: router.predict().arm == "canary", "it is asked again", deadline_s=20)


def test_a_full_disk_under_the_capture_fails_no_call_and_is_counted(
    tmp_path: Path, settings: Settings, pools: tuple[Pool, Pool]
) -> None:
    mine = beside(settings, tmp_path)
    mine.spool_dir.mkdir(mode=0o700)
    log = envoy.capture_log(mine)
    log.symlink_to("/dev/full")
    metrics = Metrics(CollectorRegistry())
    with routing(mine) as router, httpx.Client(base_url=envoy.admin_url(mine)) as client:
        guard = Guard(client, metrics, (), 100)
        assert {router.predict().code for _ in range(100)} == {OK}

        def dropped() -> float:
            guard.check(0)
            return metrics.dropped._value.get()

        eventually(dropped, "what was not written is counted")
        log.unlink()
        client.post("/reopen_logs").raise_for_status()
        again = router.predict().request_id.encode()
        eventually(lambda: log.exists() and again in captured(log), "there is room again")


def test_more_calls_than_a_pool_may_have_are_refused_at_once(
    tmp_path: Path, settings: Settings, pools: tuple[Pool, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "MAX_REQUESTS", 2)
    with routing(beside(settings, tmp_path)) as router:
        pools[0].delay_s, answers = 1.0, []
        threads = [
            threading.Thread(target=lambda: answers.append(router.predict())) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pools[0].delay_s = 0.0
        codes = [answer.code for answer in answers]
        assert codes.count(OK) == 2
        assert codes.count(grpc.StatusCode.UNAVAILABLE) == 4


def test_a_message_over_the_limit_is_refused(
    tmp_path: Path, settings: Settings, pools: tuple[Pool, Pool]
) -> None:
    with routing(beside(settings, tmp_path, router_max_bytes=4096)) as router:
        before = pools[0].calls
        assert router.predict(predict_request(city="x" * 5000)).code == EXHAUSTED
        body = {"instances": [{"distance": 1.0, "city": "x" * 5000}]}
        assert router.rest("/v1/models/trips:predict", body).status_code == 413
        assert pools[0].calls == before
        assert router.predict().code == OK
