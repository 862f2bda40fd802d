"""The router: a real Envoy between real clients and two pools that stand in for TF Serving."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from perennial.errors import Permanent, Retryable
from perennial.settings import Settings
from serving.router import envoy
from serving.router.routes import (
    ModelRouting,
    read_routes,
    route_configuration,
    routes_path,
    wait_applied,
    write_routes,
)
from tests.support.traffic import (
    Pool,
    Router,
    Wire,
    eventually,
    free_ports,
    make_settings,
    predict_request,
    routing,
)

KEYS = [f"key-{number}" for number in range(400)]
OK = grpc.StatusCode.OK


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return make_settings(tmp_path_factory.mktemp("router"))


@pytest.fixture(scope="module")
def wires(settings: Settings) -> Iterator[dict[str, Wire]]:
    """What the router reaches the canary by: `grpc` and `rest`."""
    grpc_port, rest_port = free_ports(2)
    wires = {
        "grpc": Wire(settings.canary_port, grpc_port),
        "rest": Wire(settings.canary_rest_port, rest_port),
    }
    yield wires
    for wire in wires.values():
        wire.close()


@pytest.fixture(scope="module")
def _pools(settings: Settings, wires: dict[str, Wire]) -> Iterator[tuple[Pool, Pool]]:
    stable, canary = Pool(version=1), Pool(version=2)
    with (
        stable.serving(settings.stable_port, settings.stable_rest_port),
        canary.serving(wires["grpc"].to, wires["rest"].to),
    ):
        yield stable, canary


@pytest.fixture
def pools(_pools: tuple[Pool, Pool]) -> tuple[Pool, Pool]:
    for pool in _pools:
        pool.fails_with = pool.rest_fails_with = None
        pool.delay_s, pool.calls, pool.rest_paths = 0.0, 0, []
    return _pools


@pytest.fixture(scope="module")
def router(settings: Settings, _pools: tuple[Pool, Pool]) -> Iterator[Router]:
    with routing(settings) as running:
        yield running


def arms(router: Router) -> dict[str, str]:
    return {key: router.predict(key=key).arm for key in KEYS}


def on_canary(router: Router) -> set[str]:
    return {key for key, arm in arms(router).items() if arm == "canary"}


def test_envoy_accepts_the_bootstrap(settings: Settings) -> None:
    path = envoy.write_bootstrap(settings)
    binary = envoy.command(settings)[0]
    done = subprocess.run(
        [binary, "--mode", "validate", "-c", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert settings.spool_dir.stat().st_mode & 0o777 == 0o700


def test_a_share_of_zero_gives_the_canary_nothing(router: Router, pools: tuple[Pool, Pool]) -> None:
    router.declare({"trips": ModelRouting(0.0, "e1")})
    assert set(arms(router).values()) == {"stable"}
    assert pools[1].calls == 0


def test_a_key_keeps_its_arm_and_a_growing_share_keeps_its_keys(
    router: Router, pools: tuple[Pool, Pool]
) -> None:
    router.declare({"trips": ModelRouting(0.1, "e1")})
    ten = on_canary(router)
    assert ten == on_canary(router)
    assert 15 <= len(ten) <= 70
    router.declare({"trips": ModelRouting(0.4, "e1")})
    forty = on_canary(router)
    assert ten < forty
    assert 110 <= len(forty) <= 210


def test_another_salt_draws_anew(router: Router, pools: tuple[Pool, Pool]) -> None:
    router.declare({"trips": ModelRouting(0.5, "e1")})
    first = on_canary(router)
    router.declare({"trips": ModelRouting(0.5, "e2")})
    second = on_canary(router)
    assert 0.35 < len(first & second) / len(first) < 0.65


def test_calls_without_a_key_split_by_request_id_whatever_is_captured(
    router: Router, pools: tuple[Pool, Pool]
) -> None:
    """Sampling and an unkeyed split once drew the same number: all captured calls were stable."""
    router.declare({"trips": ModelRouting(0.5, "e1")})
    log = envoy.capture_log(router.settings)
    router.predict(headers={"x-request-id": "all-before"})
    eventually(lambda: log.exists() and b"all-before" in log.read_bytes(), "the log is flushed")
    before = log.stat().st_size
    with_percent(router, 30)
    try:
        answers = [router.predict() for _ in range(400)]
        router.predict(headers={"x-request-id": "the-last"})
    finally:
        with_percent(router, 100)
    router.predict(headers={"x-request-id": "captured-for-sure"})
    eventually(lambda: b"captured-for-sure" in log.read_bytes()[before:], "the log is flushed")
    lines = log.read_bytes()[before:].decode().splitlines()
    captured = [line.split("\t")[4] for line in lines]
    assert 130 < sum(answer.arm == "canary" for answer in answers) < 270
    assert 60 < len(captured) < 190
    assert 0.25 < captured.count("canary_or_stable") / len(captured) < 0.75


def test_a_call_that_is_sent_again_with_its_id_meets_the_same_arm(
    router: Router, pools: tuple[Pool, Pool]
) -> None:
    router.declare({"trips": ModelRouting(0.5, "e1")})
    for number in range(20):
        headers = {"x-request-id": f"again-{number}"}
        assert len({router.predict(headers=headers).arm for _ in range(4)}) == 1


def with_percent(router: Router, percent: int) -> None:
    import httpx

    with httpx.Client(base_url=envoy.admin_url(router.settings), trust_env=False) as client:
        envoy.set_capture_percent(client, percent)


def test_the_client_learns_arm_and_request_id(router: Router, pools: tuple[Pool, Pool]) -> None:
    router.declare({"trips": ModelRouting(0.0, "e1")})
    first, second = router.predict(), router.predict()
    assert first.arm == "stable"
    assert len(first.request_id) == 36
    assert first.request_id != second.request_id
    assert router.predict(headers={"x-request-id": "mine-1"}).request_id == "mine-1"


def test_a_tester_names_the_arm(router: Router, pools: tuple[Pool, Pool]) -> None:
    router.declare({"trips": ModelRouting(0.0, "e1")})
    answer = router.predict(headers={"x-perennial-arm": "canary"})
    assert answer.arm == "canary"
    assert answer.reply is not None
    assert answer.reply.model_spec.version.value == 2
    pools[1].fails_with = grpc.StatusCode.UNAVAILABLE
    assert router.predict(headers={"x-perennial-arm": "canary"}).code == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND])
def test_a_canary_that_refuses_falls_back_and_is_counted(
    router: Router, pools: tuple[Pool, Pool], code: grpc.StatusCode
) -> None:
    router.declare({"trips": ModelRouting(1.0, "e1")})
    pools[1].fails_with = code
    name = "perennial.requests"
    counted = fallbacks(router)
    # Fewer than lead to its ejection.
    answers = [router.predict() for _ in range(3)]
    assert {answer.code for answer in answers} == {OK}
    assert {answer.arm for answer in answers} == {"stable"}
    assert {answer.headers["x-envoy-attempt-count"] for answer in answers} == {"2"}
    eventually(lambda: fallbacks(router) == counted + 3, f"{name} counts them")


def test_a_canary_that_dies_under_a_call_falls_back(
    router: Router, pools: tuple[Pool, Pool], wires: dict[str, Wire]
) -> None:
    router.declare({"trips": ModelRouting(1.0, "e1")})
    pools[1].delay_s = 2.0
    answers: list[Any] = []

    def rest() -> None:
        body = {"instances": [{"distance": 4.0}]}
        answers.append(router.rest("/v1/models/trips:predict", body))

    for call, wire in ((lambda: answers.append(router.predict()), "grpc"), (rest, "rest")):
        calls = pools[1].calls
        thread = threading.Thread(target=call)
        thread.start()
        eventually(lambda calls=calls: pools[1].calls > calls, "the call is in flight")
        wires[wire].cut()
        thread.join()
    assert (answers[0].code, answers[0].arm) == (OK, "stable")
    assert (answers[1].status_code, answers[1].headers["x-perennial-arm"]) == (200, "stable")


def test_a_replica_of_several_may_die(tmp_path: Path, settings: Settings) -> None:
    ports = [free_ports(2) for _ in range(2)]
    replicas = ",".join(f"127.0.0.1:{grpc_port}:{rest_port}" for grpc_port, rest_port in ports)
    both = Pool(version=1), Pool(version=1)
    with (
        ExitStack() as first,
        both[1].serving(*ports[1]),
        routing(make_settings(tmp_path, stable_replicas=replicas)) as router,
    ):
        first.enter_context(both[0].serving(*ports[0]))
        router.declare({"trips": ModelRouting(0.0, "e1")})
        eventually(lambda: router.predict().code == OK and both[0].calls, "both are found")
        dying = threading.Timer(0.2, first.close)
        dying.start()
        codes = []
        while dying.is_alive() or len(codes) < 100:
            codes.append(router.predict().code)
        calls = both[0].calls
        codes += [router.predict().code for _ in range(50)]
        dying.join()
        assert set(codes) == {OK}
        assert both[0].calls == calls


@pytest.mark.parametrize("fault", ["hangs", "is slow"])
@pytest.mark.parametrize("form", ["grpc", "rest"])
def test_a_call_that_a_canary_hangs_on_is_answered_by_stable(
    router: Router, pools: tuple[Pool, Pool], wires: dict[str, Wire], form: str, fault: str
) -> None:
    router.declare({"trips": ModelRouting(1.0, "e1", hedge_after_ms=500)})

    def arm() -> str:
        if form == "grpc":
            answer = router.predict(timeout_s=20)
            assert answer.code == OK
            return answer.arm
        reply = router.rest("/v1/models/trips:predict", {"instances": [{"distance": 1.0}]})
        assert reply.status_code == 200
        return reply.headers["x-perennial-arm"]

    eventually(lambda: arm() == "canary", "the canary answers")
    if fault == "hangs":
        wires[form].hang()
    else:
        pools[1].delay_s = 2.0
    try:
        started = time.monotonic()
        assert arm() == "stable"
        assert 0.4 < time.monotonic() - started < 2
    finally:
        wires[form].flow()
        pools[1].delay_s = 0.0
    eventually(lambda: arm() == "canary", "it is asked again")


def fallbacks(router: Router) -> int:
    return sum(
        int(value)
        for name, value in router.stats("perennial.requests").items()
        if ".assigned.canary_or_stable." in name and ".arm.stable." in name
    )


def test_a_wrong_answer_of_the_canary_is_the_answer(
    router: Router, pools: tuple[Pool, Pool]
) -> None:
    router.declare({"trips": ModelRouting(1.0, "e1")})
    pools[1].fails_with = grpc.StatusCode.INTERNAL
    answer = router.predict()
    assert (answer.code, answer.arm) == (grpc.StatusCode.INTERNAL, "canary")
    assert pools[0].calls == 0


def test_an_unhealthy_canary_gets_nothing(router: Router, pools: tuple[Pool, Pool]) -> None:
    router.declare({"trips": ModelRouting(1.0, "e1")})
    pools[1].health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    try:
        eventually(lambda: router.predict().arm == "stable", "the health check sees it")
        calls = pools[1].calls
        assert {router.predict().arm for _ in range(20)} == {"stable"}
        assert pools[1].calls == calls
    finally:
        pools[1].health.set("", health_pb2.HealthCheckResponse.SERVING)
    eventually(lambda: router.predict().arm == "canary", "the health check sees it again")


def test_weights_change_under_load_and_no_call_fails(
    router: Router, pools: tuple[Pool, Pool]
) -> None:
    stop, outcomes, lock = threading.Event(), [], threading.Lock()

    def load() -> None:
        while not stop.is_set():
            code = router.predict().code
            with lock:
                outcomes.append(code)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        took = []
        for step in range(20):
            started = time.monotonic()
            router.declare({"trips": ModelRouting((step % 10) / 10, f"e{step % 3}")})
            took.append(time.monotonic() - started)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert len(outcomes) > 100
    assert set(outcomes) == {OK}
    assert max(took) < 2


def test_shadowed_calls_are_copied_and_stable_answers(
    router: Router, pools: tuple[Pool, Pool]
) -> None:
    router.declare({"trips": ModelRouting(0.0, "e1", 100), "fares": ModelRouting(0.0, "e1")})
    trips = {"x-perennial-model": "trips"}
    assert {router.predict(headers=trips).arm for _ in range(10)} == {"stable"}
    body = {"instances": [{"distance": 3.5}]}
    assert router.rest("/v1/models/trips/versions/1:predict", body).json() == {"predictions": [3.5]}
    eventually(lambda: pools[1].calls == 11, "the copies arrive")
    assert pools[1].rest_paths[-1] == "/v1/models/trips:predict"
    router.predict(headers={**trips, "x-perennial-arm": "stable"})
    router.predict(headers={"x-perennial-model": "fares"})
    router.rest("/v1/models/fares:predict", body)
    with_percent(router, 0)
    router.predict(headers=trips)
    with_percent(router, 100)
    router.predict(headers=trips)
    eventually(lambda: pools[1].calls == 12, "of these only the last one is copied")
    assert pools[0].calls == 16


def test_a_part_of_the_calls_is_shadowed(router: Router, pools: tuple[Pool, Pool]) -> None:
    router.declare({"trips": ModelRouting(0.0, "e1", 30)})
    for _ in range(300):
        router.predict()
    eventually(lambda: pools[1].calls > 50, "copies arrive")
    assert pools[0].calls == 300
    assert pools[1].calls < 130


@pytest.mark.parametrize("fault", ["fails", "slow"])
def test_a_bad_shadow_leaves_live_calls_alone(
    router: Router, pools: tuple[Pool, Pool], fault: str
) -> None:
    router.declare({"trips": ModelRouting(0.0, "e1", 100)})
    before = shadow_overflow(router)
    if fault == "fails":
        pools[1].fails_with = grpc.StatusCode.UNAVAILABLE
    else:
        pools[1].delay_s = 2.0
    answers, took = [], []

    def load() -> None:
        for _ in range(40):
            started = time.monotonic()
            answers.append(router.predict())
            took.append(time.monotonic() - started)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(answer.code, answer.arm) for answer in answers} == {(OK, "stable")}
    assert max(took) < 1.8
    assert pools[0].calls == 160
    if fault == "slow":
        # 64 are in flight, the rest is dropped.
        assert shadow_overflow(router) > before
        eventually(lambda: stat(router, "cluster.shadow.upstream_rq_active") == 0, "they end")
        pools[1].delay_s = 0.0
        router.declare({"trips": ModelRouting(1.0, "e1")})
        eventually(lambda: router.predict().arm == "canary", "the health check met a free thread")


def shadow_overflow(router: Router) -> int:
    stats = router.stats("cluster.shadow.upstream_rq_")
    return sum(int(value) for name, value in stats.items() if name.endswith("overflow"))


def stat(router: Router, name: str) -> int:
    return int(router.stats(name)[name])


def test_a_dead_shadow_leaves_live_calls_alone(
    tmp_path: Path, pools: tuple[Pool, Pool], settings: Settings
) -> None:
    shared = {name: getattr(settings, name) for name in ("stable_port", "stable_rest_port")}
    with routing(make_settings(tmp_path, **shared)) as router:
        router.declare({"trips": ModelRouting(0.0, "e1", 100)})
        assert {router.predict().arm for _ in range(20)} == {"stable"}
        log = envoy.capture_log(router.settings)
        eventually(
            lambda: log.exists() and log.read_bytes().count(b"\tshadow\t") >= 20,
            "each copy that failed has its line",
        )


def test_several_models_are_told_apart_by_header(router: Router, pools: tuple[Pool, Pool]) -> None:
    router.declare({"trips": ModelRouting(1.0, "e1"), "fares": ModelRouting(0.0, "e1")})
    assert router.predict(headers={"x-perennial-model": "trips"}).arm == "canary"
    assert router.predict(headers={"x-perennial-model": "fares"}).arm == "stable"
    assert router.predict(headers={"x-perennial-model": "unknown"}).arm == "stable"
    assert router.predict().arm == "stable"


def test_an_unknown_model_is_not_split_by_the_only_one(
    router: Router, pools: tuple[Pool, Pool]
) -> None:
    router.declare({"trips": ModelRouting(1.0, "e1")})
    assert router.predict().arm == "canary"
    assert router.predict(headers={"x-perennial-model": "unknown"}).arm == "stable"


def test_rest_is_split_by_path(router: Router, pools: tuple[Pool, Pool]) -> None:
    router.declare({"trips": ModelRouting(1.0, "e1"), "fares": ModelRouting(0.0, "e1")})
    body = {"instances": [{"distance": 3.5}]}
    trips = router.rest("/v1/models/trips:predict", body)
    assert trips.json() == {"predictions": [3.5]}
    assert trips.headers["x-perennial-arm"] == "canary"
    assert router.rest("/v1/models/fares:predict", body).headers["x-perennial-arm"] == "stable"
    forced = router.rest("/v1/models/trips:predict", body, x_perennial_arm="stable")
    assert forced.headers["x-perennial-arm"] == "stable"
    assert router.rest("/v1/models/trips").headers["x-perennial-arm"] == "stable"
    pools[1].rest_fails_with = 503
    fallen = router.rest("/v1/models/trips:predict", body)
    assert (fallen.status_code, fallen.headers["x-perennial-arm"]) == (200, "stable")


def test_the_pools_administration_cannot_be_reached(
    router: Router, pools: tuple[Pool, Pool]
) -> None:
    call = router.channel.unary_unary("/tensorflow.serving.ModelService/HandleReloadConfigRequest")
    with pytest.raises(grpc.RpcError) as error:
        call(b"", timeout=5)
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_a_request_over_the_limit_is_refused(router: Router, pools: tuple[Pool, Pool]) -> None:
    answer = router.predict(predict_request(city="x" * (9 << 20)))
    assert answer.code != OK
    assert pools[0].calls == pools[1].calls == 0


def test_refused_routes_leave_the_old_ones_in_force(
    router: Router, pools: tuple[Pool, Pool]
) -> None:
    router.declare({"trips": ModelRouting(1.0, "e1")})
    path = routes_path(router.settings)
    content = json.loads(path.read_text())
    content["version_info"] = str(int(content["version_info"]) + 1)
    resource = content["resources"][0]
    resource["virtual_hosts"][0]["routes"][0]["route"]["cluster"] = "nowhere"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content))
    temporary.rename(path)
    with pytest.raises(Retryable) as error:
        wait_applied(envoy.admin_url(router.settings), content["version_info"], 1.0)
    assert error.value.code == "router.rejected"
    assert router.predict().arm == "canary"


def test_a_router_that_is_away_is_said_so(settings: Settings) -> None:
    with pytest.raises(Retryable) as error:
        wait_applied("http://127.0.0.1:9", "1", 0.2)
    assert error.value.code == "router.unreachable"


def test_what_is_declared_can_be_read(tmp_path: Path) -> None:
    models = {"trips": ModelRouting(0.05, "e1"), "fares": ModelRouting(0.0, "e-2", 40)}
    version = write_routes(tmp_path / "routes.json", models)
    declared = read_routes(tmp_path / "routes.json")
    assert (declared.version, declared.models) == (version, models)


@pytest.mark.parametrize("content", [None, "", "[]", '{"resources": []}'])
def test_a_file_that_declares_nothing_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "routes.json").write_text(content)
    with pytest.raises(Permanent, match=r"router\.routes"):
        read_routes(tmp_path / "routes.json")


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), 1e-9])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(Permanent, match=r"router\.share"):
        ModelRouting(share, "e1")


@pytest.mark.parametrize("percent", [-1, 101, 0.5])
def test_a_shadow_that_is_no_percentage_is_refused(percent: float) -> None:
    with pytest.raises(Permanent, match=r"router\.shadow"):
        ModelRouting(0.1, "e1", percent)  # type: ignore[arg-type]


@pytest.mark.parametrize("salt", ["", "a b", "\\1", "x" * 81])
def test_a_salt_that_could_be_a_pattern_is_refused(salt: str) -> None:
    with pytest.raises(Permanent, match=r"router\.salt"):
        ModelRouting(0.1, salt)


@pytest.mark.parametrize("name", ["", "../x", "a.*", "Trips"])
def test_a_name_that_could_be_a_pattern_is_refused(name: str) -> None:
    with pytest.raises(Permanent, match=r"router\.model"):
        route_configuration({name: ModelRouting(0.1, "e1")})


def test_a_router_that_drains_finishes_what_is_in_flight(
    tmp_path: Path, pools: tuple[Pool, Pool], settings: Settings
) -> None:
    pools[0].delay_s = 0.5
    shared = {
        name: getattr(settings, name)
        for name in ("stable_port", "stable_rest_port", "canary_port", "canary_rest_port")
    }
    with routing(make_settings(tmp_path, **shared)) as other:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(other.predict()))
        thread.start()
        eventually(lambda: pools[0].calls == 1, "the call is in flight")
        envoy.drain(other.settings)
        thread.join()
        assert answers[0].code == OK
        assert other.process.stop() == 0
