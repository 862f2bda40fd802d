"""Training: whatever dies or hangs, the weights are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perennial.errors import Conflict, Permanent
from perennial.store import is_published, read_manifest, verify
from tests.support.training import wait_until_gone, write_model
from tests.training.conftest import World
from training import checkpoint
from training.health import Patience
from training.process import child_environment, dump_spec
from training.supervisor import Parent, Progress, TrainResult, train

PATIENCE = Patience(start_s=120, beat_s=4)
TRAIN = """
import json, sys
from perennial.store import Store
from training.process import restore_spec
from training.supervisor import train
content = json.loads(sys.argv[1])
train(restore_spec(content), Store(content["store"]), content["episode"],
      on_progress=lambda p: print(p.step, *p.pids, flush=True))
"""


def test_two_workers_train_and_publish_a_checkpoint(world: World, undisturbed: TrainResult) -> None:
    assert (undisturbed.workers, undisturbed.restarts, undisturbed.parent) == (2, 0, None)
    assert undisturbed.steps == -(-2550 * 2 // 64)
    assert undisturbed.examples == undisturbed.steps * 64
    first, last = undisturbed.curve[0], undisturbed.curve[-1]
    assert last[0] == undisturbed.steps
    assert last[1] == undisturbed.loss < first[1] - 0.02
    manifest = verify(undisturbed.path)
    assert manifest.parents == {"snapshot": "first"}
    step, values = checkpoint.load(undisturbed.path / "weights.npz")
    assert step == undisturbed.steps
    assert any("seed_generator" in name for name in values)
    assert checkpoint.weights_sha256(values) == undisturbed.weights_sha256
    assert list((world.store.run("clicks", "first") / "tensorboard").iterdir())
    again = train(world.spec, world.store, "first")
    assert again == undisturbed


def test_weights_are_bitwise_those_of_an_undisturbed_run_after_every_kind_of_death(
    world: World, undisturbed: TrainResult
) -> None:
    """The supervisor is killed, then a worker is killed, then one hangs."""
    world.prepare("second")
    content = {**dump_spec(world.spec), "store": f"file://{world.store.root}", "episode": "second"}
    with subprocess.Popen(
        [sys.executable, "-c", TRAIN, json.dumps(content)],
        stdout=subprocess.PIPE,
        env=child_environment(),
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None
        for line in supervisor.stdout:
            step, *pids = [int(part) for part in line.split()]
            if step >= 20:
                break
        with pytest.raises(Conflict) as caught:
            train(world.spec, world.store, "second")
        assert caught.value.code == "train.running"
        supervisor.kill()
    assert len(pids) == 2
    wait_until_gone(pids)
    assert not is_published(world.store.run("clicks", "second") / "checkpoint")

    seen: list[Progress] = []

    def disturb(progress: Progress) -> None:
        if progress.generation == 1 and progress.step >= 30:
            os.kill(progress.pids[1], signal.SIGKILL)
        if progress.generation == 2 and progress.step >= 50:
            os.kill(progress.pids[1], signal.SIGSTOP)
        seen.append(progress)

    result = train(world.spec, world.store, "second", on_progress=disturb, patience=PATIENCE)
    assert seen[0].step > 20
    assert result.restarts == 2
    assert next(p.step for p in seen if p.generation == 3) in (50, 60)
    wait_until_gone([pid for progress in seen for pid in progress.pids])
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert result.curve == undisturbed.curve


def test_a_candidate_starts_from_its_champion_and_keeps_its_encoding(
    world: World, undisturbed: TrainResult
) -> None:
    world.prepare("warm")
    snapshot = world.store.snapshot("clicks", "warm")
    result = train(world.spec, world.store, "warm", parent=Parent(1, "first"))
    assert result.parent == 1
    assert read_manifest(result.path).parents == {"snapshot": "warm", "checkpoint": "first"}
    assert result.curve[0][1] < undisturbed.curve[0][1] - 0.01
    encoding = (undisturbed.path / "encoding.json").read_text()
    assert (result.path / "encoding.json").read_text() == encoding
    assert snapshot.exists()


def test_a_parent_of_another_shape_is_refused_by_variable(world: World, tmp_path: Path) -> None:
    wider = write_model(tmp_path, width=32, training={"strategy": "one_device"})
    world.prepare("wider", wider)
    with pytest.raises(Permanent, match=r"hidden/kernel has shape \[8, 64\], .* \[8, 32\]") as e:
        train(wider, world.store, "wider", parent=Parent(1, "first"))
    assert e.value.code == "train.parent_mismatch"
    assert "warm_start: scratch" in e.value.hint
    assert not is_published(world.store.run("clicks", "wider") / "checkpoint")


def test_a_parent_without_a_checkpoint_is_refused(world: World) -> None:
    world.prepare("orphan")
    with pytest.raises(Permanent, match="version 7 has no checkpoint") as caught:
        train(world.spec, world.store, "orphan", parent=Parent(7, "unheard-of"))
    assert caught.value.code == "train.parent_missing"


def test_a_loss_that_is_not_finite_stops_the_run(world: World, tmp_path: Path) -> None:
    training = {"strategy": "one_device", "learning_rate": 1e30, "clip_norm": None}
    wild = write_model(tmp_path, training=training)
    world.prepare("wild", wild)
    with pytest.raises(Permanent, match="the loss is nan at step") as caught:
        train(wild, world.store, "wild")
    assert caught.value.code == "train.loss_not_finite"
    assert not is_published(world.store.run("clicks", "wild") / "checkpoint")
