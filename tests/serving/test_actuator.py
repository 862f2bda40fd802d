"""The actuator against started model servers: one replica, and two."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from perennial.errors import Permanent, Retryable
from serving import tfserving
from serving.protos import tfserving_pb2 as pb
from serving.replica import ReplicaClient
from serving.tfserving import Actuator, ModelAssignment, Pool, Replica
from tests.support.serving import ROOT, Server, free_port, wait_until

DEADLINE_S = 60.0


@pytest.fixture
def actuator(server: Server, tmp_path: Path) -> Actuator:
    """One replica that serves nothing, and a pool file that does not exist yet."""
    actuator = Actuator(Pool("stable", (Replica(server.target),), tmp_path / "models.config"))
    actuator.apply("nothing", None, deadline_s=DEADLINE_S)
    return actuator


def affine(exports: Path, *versions: int, **labels: int) -> ModelAssignment:
    return ModelAssignment(str(exports / "affine"), versions, labels)


def predict(target: str, label: str, model: str = "affine") -> int:
    """The version that answers a request for a label."""
    request = pb.PredictRequest(model_spec=pb.ModelSpec(name=model, version_label=label))
    tensor = request.inputs["x"]
    tensor.dtype = 1
    tensor.tensor_shape.dim.add().size = 1
    tensor.float_val.append(1.0)
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_unary(
            "/tensorflow.serving.PredictionService/Predict",
            request_serializer=pb.PredictRequest.SerializeToString,
            response_deserializer=pb.PredictResponse.FromString,
        )
        return int(call(request, timeout=10).model_spec.version.value)


def test_loads_labels_and_reads_back(actuator: Actuator, exports: Path, server: Server) -> None:
    wanted = affine(exports, 1, stable=1)

    (served,) = actuator.apply("affine", wanted, deadline_s=DEADLINE_S)

    assert served.available == (1,)
    assert served.labels == {"stable": 1}
    assert served.is_exactly(wanted)
    assert actuator.declared() == {"affine": wanted}
    assert actuator.served("affine") == (served,)
    assert predict(server.target, "stable") == 1


def test_a_candidate_comes_beside_the_champion_and_is_promoted(
    actuator: Actuator, exports: Path, server: Server
) -> None:
    actuator.apply("affine", affine(exports, 1, stable=1), deadline_s=DEADLINE_S)
    done = threading.Event()
    versions: list[int] = []

    def ask() -> None:
        while not done.is_set():
            versions.append(predict(server.target, "stable"))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for step in (
            affine(exports, 1, 2, stable=1, canary=2),
            affine(exports, 1, 2, stable=2, canary=2),
            affine(exports, 2, stable=2, canary=2),
            affine(exports, 3, stable=3),
        ):
            (served,) = actuator.apply("affine", step, deadline_s=DEADLINE_S)
            assert served.is_exactly(step)
        wait_until(lambda: versions[-1:] == [3])
    finally:
        done.set()
        thread.join()

    assert versions == sorted(versions)
    assert set(versions) == {1, 2, 3}


def test_other_models_stay(actuator: Actuator, exports: Path, server: Server) -> None:
    actuator.apply("affine", affine(exports, 1, stable=1), deadline_s=DEADLINE_S)
    mixed = ModelAssignment(str(exports / "mixed"), (1,), {"stable": 1})

    actuator.apply("mixed", mixed, deadline_s=DEADLINE_S)
    assert predict(server.target, "stable") == 1
    actuator.apply("affine", None, deadline_s=DEADLINE_S)

    assert actuator.declared() == {"mixed": mixed}
    assert actuator.served("mixed")[0].is_exactly(mixed)
    assert actuator.served("affine")[0].is_exactly(None)


def test_applying_twice_changes_nothing(actuator: Actuator, exports: Path) -> None:
    wanted = affine(exports, 1, 2, stable=1)

    first = actuator.apply("affine", wanted, deadline_s=DEADLINE_S)

    assert actuator.apply("affine", wanted, deadline_s=DEADLINE_S) == first


def test_a_corrupt_version_is_refused_and_everything_goes_back(
    actuator: Actuator, exports: Path, tmp_path: Path, server: Server
) -> None:
    shutil.copytree(exports / "affine" / "1", tmp_path / "v" / "1")
    shutil.copytree(exports / "corrupt", tmp_path / "v" / "2")
    good = ModelAssignment(str(tmp_path / "v"), (1,), {"stable": 1})
    bad = ModelAssignment(str(tmp_path / "v"), (1, 2), {"stable": 2})
    actuator.apply("affine", good, deadline_s=DEADLINE_S)

    for _ in range(2):
        with pytest.raises(Permanent, match="Read less bytes than requested") as caught:
            actuator.apply("affine", bad, deadline_s=DEADLINE_S)
        assert caught.value.code == "pool.load_failed"

    assert actuator.declared() == {"affine": good}
    wait_until(lambda: actuator.served("affine")[0].is_exactly(good))
    assert predict(server.target, "stable") == 1

    shutil.rmtree(tmp_path / "v" / "2")
    shutil.copytree(exports / "affine" / "2", tmp_path / "v" / "tmp")
    (tmp_path / "v" / "tmp").rename(tmp_path / "v" / "2")
    actuator.apply("affine", bad, deadline_s=DEADLINE_S)
    assert predict(server.target, "stable") == 2


def test_a_new_model_without_files_is_refused(actuator: Actuator, tmp_path: Path) -> None:
    missing = ModelAssignment(str(tmp_path / "nowhere"), (1,))

    with pytest.raises(Permanent) as caught:
        actuator.apply("missing", missing, deadline_s=DEADLINE_S)

    assert caught.value.code == "pool.load_failed"
    assert actuator.declared() == {}


def test_a_version_that_does_not_come_is_retryable_at_the_deadline(
    actuator: Actuator, exports: Path, tmp_path: Path
) -> None:
    shutil.copytree(exports / "affine" / "1", tmp_path / "v" / "1")
    base = str(tmp_path / "v")
    actuator.apply("late", ModelAssignment(base, (1,)), deadline_s=DEADLINE_S)

    with pytest.raises(Retryable) as caught:
        actuator.apply("late", ModelAssignment(base, (1, 2)), deadline_s=1.0)
    assert caught.value.code == "pool.not_available"

    shutil.copytree(exports / "affine" / "2", tmp_path / "v" / "tmp")
    (tmp_path / "v" / "tmp").rename(tmp_path / "v" / "2")
    (served,) = actuator.apply("late", ModelAssignment(base, (1, 2)), deadline_s=DEADLINE_S)
    assert served.available == (1, 2)


def test_reconcile_repairs_what_somebody_changed(
    actuator: Actuator, exports: Path, server: Server
) -> None:
    wanted = affine(exports, 1, stable=1)
    actuator.apply("affine", wanted, deadline_s=DEADLINE_S)
    assert actuator.reconcile(deadline_s=DEADLINE_S) == ()
    intruder = Actuator(
        Pool("intruder", actuator.pool.replicas, actuator.pool.config_file.with_name("other"))
    )
    intruder.apply("affine", affine(exports, 3, stable=3), deadline_s=DEADLINE_S)

    assert actuator.reconcile(deadline_s=DEADLINE_S) == ("affine",)

    assert actuator.served("affine")[0].is_exactly(wanted)
    assert predict(server.target, "stable") == 1


def test_two_replicas_both_load_before_either_moves(
    server: Server, second_server: Server, exports: Path, tmp_path: Path
) -> None:
    targets = server.target, second_server.target
    pool = Pool("two", tuple(Replica(target) for target in targets), tmp_path / "models.config")
    actuator = Actuator(pool)
    # It came up with what its configuration file says, label included.
    assert predict(second_server.target, "stable") == 1
    for version in (1, 2):
        served = actuator.apply(
            "affine", affine(exports, version, stable=version), deadline_s=DEADLINE_S
        )
        assert [one.replica for one in served] == list(targets)
        assert [predict(target, "stable") for target in targets] == [version, version]


class Killed(BaseException):
    """The actuator's process is gone at this point."""


class Fuse:
    """Kills the actuator at its nth outward act: writing the file, or a reload of a replica.

    A reload is two acts, since it may be done and its answer not be heard. Without `left` it burns
    no more.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        write, reload = tfserving.write_atomic, ReplicaClient.reload

        def written(*given: Any) -> None:
            self.burn()
            write(*given)

        def reloaded(*given: Any) -> str:
            self.burn()
            refusal = reload(*given)
            self.burn()
            return refusal

        monkeypatch.setattr(tfserving, "write_atomic", written)
        monkeypatch.setattr(ReplicaClient, "reload", reloaded)

    def burn(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Killed


def test_an_actuator_that_is_killed_at_any_act_is_taken_up_by_the_next(
    server: Server,
    second_server: Server,
    exports: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas = Replica(server.target), Replica(second_server.target)
    pool = Pool("stable", replicas, tmp_path / "models.config")
    fuse, kills = Fuse(monkeypatch), 0
    done, failed = threading.Event(), []

    def ask() -> None:
        while not done.is_set():
            for replica in replicas:
                try:
                    predict(replica.grpc, "stable")
                except grpc.RpcError as error:
                    failed.append(error)

    Actuator(pool).apply("affine", affine(exports, 1, stable=1), deadline_s=DEADLINE_S)
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        while True:
            version = 1 + kills % 2
            wanted = affine(exports, 3 - version, stable=3 - version)
            fuse.left = kills
            try:
                Actuator(pool).apply("affine", wanted, deadline_s=DEADLINE_S)
                break
            except Killed:
                kills += 1
            served = Actuator(pool).apply("affine", wanted, deadline_s=DEADLINE_S)
            assert all(one.is_exactly(wanted) for one in served)
    finally:
        done.set()
        thread.join()
    assert kills >= 9, "the file, and two reloads of two replicas, each before and after"
    assert failed == []


def test_an_unreachable_replica_is_retryable(exports: Path, tmp_path: Path) -> None:
    nobody = Replica(f"127.0.0.1:{free_port()}")
    actuator = Actuator(Pool("gone", (nobody,), tmp_path / "models.config"))

    for call in (
        lambda: actuator.apply("affine", affine(exports, 1), deadline_s=1),
        lambda: actuator.served("affine"),
        lambda: actuator.reconcile(deadline_s=1),
    ):
        with pytest.raises(Retryable) as caught:
            call()
        assert caught.value.code == "pool.unreachable"
    # What is declared is what a later reconcile makes true.
    assert set(actuator.declared()) == {"affine"}


def test_one_change_at_a_time(actuator: Actuator, exports: Path) -> None:
    with actuator._locked(time.monotonic() + 1):
        with pytest.raises(Retryable) as caught:
            actuator.apply("affine", affine(exports, 1), deadline_s=0.3)

    assert caught.value.code == "pool.busy"
    assert actuator.declared() == {}


@pytest.mark.parametrize(
    "make",
    [
        lambda: ModelAssignment("relative", (1,)),
        lambda: ModelAssignment("/m", ()),
        lambda: ModelAssignment("/m", (-1,)),
        lambda: ModelAssignment("/m", (1,), {"stable": 2}),
    ],
)
def test_an_assignment_that_cannot_be_served_is_refused(
    make: Callable[[], ModelAssignment],
) -> None:
    with pytest.raises(Permanent) as caught:
        make()
    assert caught.value.code == "pool.assignment"


@pytest.mark.parametrize(
    "text", ["model_config_list {", "model_config_list { config { name: 'm' } }"]
)
def test_a_file_that_somebody_else_wrote_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "models.config"
    path.write_text(text)

    with pytest.raises(Permanent) as caught:
        Actuator(Pool("p", (), path)).declared()

    assert caught.value.code == "pool.config"
    assert path.read_text() == text


def test_the_actuator_imports_no_tensorflow() -> None:
    code = "import sys, serving.tfserving; sys.exit('tensorflow' in sys.modules)"

    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
