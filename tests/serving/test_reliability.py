"""What users notice when serving changes or a part of it fails: nothing, or a retry.

Real model servers (two stable replicas, one canary), Envoy and ledger, under 300 requests a second.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest

from perennial.ledger import Ledger
from perennial.settings import Settings
from perennial.spec import ModelSpec
from perennial.states import State
from serving.flow import roll_back
from serving.protos import tfserving_pb2 as pb
from serving.router.routes import ModelRouting
from serving.tfserving import Actuator, ModelAssignment
from serving.topology import config_file, stable_pool
from tests.serving.conftest import FLAGS
from tests.support.serving import ROOT, free_port, server_command, wait_until
from tests.support.story import Story, begin, quick
from tests.support.traffic import Router, make_settings, routing

RATE = 300.0
PREDICT = "/tensorflow.serving.PredictionService/Predict"
OK = grpc.StatusCode.OK


class Load:
    """A client that calls at `RATE` inside the block, whatever comes back."""

    def __init__(self, router: Router) -> None:
        self.codes: Counter[grpc.StatusCode] = Counter()
        self.errors: Counter[str] = Counter()
        self.versions: Counter[int] = Counter()
        self.slowest_s = 0.0
        self._call = router.channel.unary_unary(
            PREDICT,
            request_serializer=pb.PredictRequest.SerializeToString,
            response_deserializer=pb.PredictResponse.FromString,
        )
        self._stop = threading.Event()
        self._pending = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        self.wait_for(100)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        codes = {code.name: count for code, count in self.codes.items()}
        print(f"{codes}, by version {dict(self.versions)}, slowest {self.slowest_s * 1e3:.0f} ms")

    @property
    def answered(self) -> int:
        return self.codes.total()

    def wait_for(self, more: int) -> None:
        """Waits until so many more calls were answered."""
        wanted = self.answered + more
        wait_until(lambda: self.answered >= wanted, timeout_s=60, what=f"{more} more answers")

    def _run(self) -> None:
        request = pb.PredictRequest(model_spec=pb.ModelSpec(name="flights"))
        tensor = request.inputs["x"]
        tensor.dtype = 1
        tensor.tensor_shape.dim.add(size=1)
        tensor.float_val.append(1.0)
        begun, sent = time.monotonic(), 0
        while not self._stop.is_set():
            key = f"key-{sent % 500}"
            started = time.monotonic()
            future = self._call.future(
                request,
                timeout=20,
                metadata=(("x-routing-key", key), ("x-perennial-model", "flights")),
            )
            future.add_done_callback(lambda done, started=started: self._count(done, started))
            sent += 1
            self._stop.wait(max(0.0, begun + sent / RATE - time.monotonic()))
        for _ in range(sent):
            assert self._pending.acquire(timeout=30)

    def _count(self, done: grpc.Future, started: float) -> None:
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        code = done.code()
        if code is OK:
            self.versions[done.result().model_spec.version.value] += 1
        else:
            headers = {**dict(done.initial_metadata()), **dict(done.trailing_metadata())}
            attempts = headers.get("x-envoy-attempt-count")
            self.errors[f"{done.details()}, attempts {attempts}"] += 1
        self.codes[code] += 1
        self._pending.release()


@dataclass
class Pools:
    """The model servers of both pools, by name."""

    settings: Settings
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        pool, _, number = name.partition("-")
        address = self.settings.replicas(pool)[int(number or 1) - 1]
        with (self.settings.home / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [
                    *server_command(),
                    f"--port={address.port}",
                    f"--rest_api_port={address.rest_port}",
                    f"--model_config_file={config_file(self.settings, pool)}",
                    "--enable_grpc_healthcheck_service",
                    "--allow_version_labels_for_unavailable_models",
                    *FLAGS,
                ],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_open(self, name: str) -> None:
        pool, _, number = name.partition("-")
        address = self.settings.replicas(pool)[int(number or 1) - 1]
        with grpc.insecure_channel(f"127.0.0.1:{address.port}") as channel:
            grpc.channel_ready_future(channel).result(120)

    def stop(self, name: str) -> int:
        self.processes[name].terminate()
        return self.processes[name].wait(60)

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def rss_bytes(self, name: str) -> int:
        status = Path(f"/proc/{self.processes[name].pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024


NAMES = ("stable-1", "stable-2", "canary")


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    replicas = ",".join(f"127.0.0.1:{free_port()}:{free_port()}" for _ in range(2))
    home = tmp_path_factory.mktemp("reliability")
    pools = Pools(make_settings(home, stable_replicas=replicas, poll_s=1))
    for pool in ("stable", "canary"):
        path = config_file(pools.settings, pool)
        path.parent.mkdir(exist_ok=True)
        path.write_text("model_config_list {}\n")
    with ExitStack() as ending:
        for name in NAMES:
            pools.start(name)
        ending.callback(pools.kill)
        for name in NAMES:
            pools.wait_open(name)
        yield pools


@pytest.fixture(scope="module")
def router(pools: Pools) -> Iterator[Router]:
    with routing(pools.settings) as running:
        yield running


@pytest.fixture
def spec(flights: ModelSpec) -> ModelSpec:
    return quick(flights)


@pytest.fixture
def story(pools: Pools, router: Router, spec: ModelSpec, ledger: Ledger, exports: Path) -> Story:
    """A story with champion 1 served."""
    return begin(pools.settings, spec, ledger, exports).given_champion(1)


def test_a_promotion_and_its_withdrawal_are_not_noticed(story: Story, router: Router) -> None:
    story.given_candidate(2)
    with Load(router) as load:
        assert story.until(State.PROMOTED, candidate_loss=0.3).state is State.PROMOTED
        load.wait_for(300)
        roll_back(story.settings, story.spec, story.ledger, actor="test", reason="drill")
        load.wait_for(300)
    assert load.codes.keys() == {OK}, load.errors
    assert load.versions.keys() == {1, 2}
    assert story.served()[:2] == ([1], [])


def test_a_rollback_on_evidence_is_not_noticed(story: Story, router: Router) -> None:
    story.given_candidate(2)
    with Load(router) as load:
        done = story.until(State.ROLLED_BACK, candidate_loss=0.6)
        load.wait_for(100)
    assert done.state is State.ROLLED_BACK
    assert load.codes.keys() == {OK}, load.errors
    assert load.versions.keys() == {1, 2}


def test_changes_of_weight_are_not_noticed(story: Story, router: Router) -> None:
    story.given_candidate(2)
    story.until(State.RAMPING, candidate_loss=0.3)
    with Load(router) as load:
        for step in range(25):
            router.declare({"flights": ModelRouting(step % 5 / 4, "e1")})
            load.wait_for(20)
    assert load.codes.keys() == {OK}, load.errors
    assert load.versions.keys() == {1, 2}


def test_replicas_that_restart_in_turn_are_not_noticed(
    story: Story, router: Router, pools: Pools
) -> None:
    serving = story.flow().serving
    with Load(router) as load:
        for name in ("stable-1", "stable-2"):
            assert pools.stop(name) == 0
            load.wait_for(100)
            pools.start(name)
            pools.wait_open(name)
            wait_until(
                lambda: all(one.available == (1,) for one in serving._stable.served("flights")),
                timeout_s=60,
                what="it serves what is declared",
            )
            wait_until(lambda: router_sees(router, "stable") == 2, what="the router sees it")
    assert load.codes.keys() == {OK}, load.errors


def router_sees(router: Router, cluster: str) -> int:
    """How many healthy hosts a cluster has."""
    name = f"cluster.{cluster}.membership_healthy"
    return int(router.stats(name)[name])


def test_a_canary_that_hangs_is_answered_by_stable(
    story: Story, router: Router, pools: Pools
) -> None:
    story.given_candidate(2)
    story.until(State.RAMPING, candidate_loss=0.3)
    process = pools.processes["canary"]
    try:
        with Load(router) as load:
            router.declare({"flights": ModelRouting(0.5, "e1", hedge_after_ms=500)})
            load.wait_for(50)
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: router_sees(router, "canary") == 0, what="the router sees it")
    finally:
        process.send_signal(signal.SIGCONT)
    assert load.codes.keys() == {OK}, load.errors
    # The half second, and what a busy machine adds; the health check alone takes up to 5 s.
    assert load.slowest_s < 3


def test_a_canary_that_is_killed_is_answered_by_stable(
    story: Story, router: Router, pools: Pools
) -> None:
    story.given_candidate(2)
    story.until(State.RAMPING, candidate_loss=0.3)
    with Load(router) as load:
        router.declare({"flights": ModelRouting(0.5, "e1")})
        load.wait_for(50)
        pools.processes["canary"].kill()
        load.wait_for(300)
        pools.processes["canary"].wait()
        pools.start("canary")
        pools.wait_open("canary")
        versions = load.versions.copy()
        wait_until(lambda: load.versions[2] > versions[2], what="it answers again")
    assert load.codes.keys() == {OK}, load.errors


def test_thirty_swaps_keep_memory_flat(story: Story, pools: Pools) -> None:
    actuator = Actuator(stable_pool(pools.settings))
    base_path = str(story.store.versions("flights"))
    rss = []
    for swap in range(30):
        version = 1 + swap % 2
        wanted = ModelAssignment(base_path, (version,), {"stable": version})
        actuator.apply("flights", wanted, deadline_s=60)
        rss.append(pools.rss_bytes("stable-1"))
    assert max(rss[3:]) < rss[2] * 1.02


def test_malformed_calls_are_turned_away_and_memory_stays_flat(
    story: Story, router: Router, pools: Pools
) -> None:
    whole = pb.PredictRequest(model_spec=pb.ModelSpec(name="flights"))
    whole.inputs["x"].dtype = 1
    whole.inputs["x"].tensor_shape.dim.add(size=1)
    whole.inputs["x"].tensor_content = bytes(4)
    raw = whole.SerializeToString()
    nonsense = pb.PredictRequest()
    nonsense.CopyFrom(whole)
    nonsense.inputs["x"].tensor_shape.dim[0].size = 1 << 40
    bodies = {
        "truncated": (raw[:-3], {grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT}),
        "noise": (bytes(range(255, 0, -1)), {grpc.StatusCode.INTERNAL}),
        "empty": (b"", {grpc.StatusCode.INVALID_ARGUMENT}),
        "too many elements": (nonsense.SerializeToString(), {grpc.StatusCode.INVALID_ARGUMENT}),
    }
    call = router.channel.unary_unary(PREDICT)
    metadata = (("x-perennial-model", "flights"),)

    def send(count: int) -> None:
        for name, (body, expected) in bodies.items():
            pending = [call.future(body, timeout=20, metadata=metadata) for _ in range(count)]
            assert {one.code() for one in pending} <= expected, name

    send(250)
    before = pools.rss_bytes("stable-1"), envoy_bytes(router)
    for _ in range(9):
        send(250)
    assert pools.rss_bytes("stable-1") < before[0] * 1.02
    # What it captured waits for the disk, for a third of a second.
    wait_until(lambda: envoy_bytes(router) < before[1] * 1.1, what="Envoy's memory is flat")
    oversized = bytes(router.settings.router_max_bytes + 1)
    with pytest.raises(grpc.RpcError) as caught:
        call(oversized, timeout=20, metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for body, status in ((b"{", 400), (b'{"instances": "x"}', 400), (b"[" * 100_000, 400)):
        url = f"http://127.0.0.1:{router.settings.router_port}/v1/models/flights:predict"
        reply = httpx.post(url, content=body, trust_env=False)
        assert reply.status_code == status, reply.text[:200]
    with ExitStack() as wires:
        address = ("127.0.0.1", router.settings.router_port)
        opened = [wires.enter_context(socket.create_connection(address, 20)) for _ in range(100)]
        for wire in opened:
            wire.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(range(256)))
        for wire in opened:
            while wire.recv(4096):
                pass
    assert router.predict(whole, headers=dict(metadata)).code is OK


def envoy_bytes(router: Router) -> int:
    return int(router.stats("server.memory_allocated")["server.memory_allocated"])
