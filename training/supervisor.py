"""Runs the training of one episode to its end: starts workers, listens, restarts, publishes.

This side never imports TensorFlow. A worker that dies or falls silent stops the others; the group
starts again from the last checkpoint on new ports. Whatever ends this process ends the workers too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perennial.errors import Conflict, PerennialError, Permanent, Retryable
from perennial.records import Manifest
from perennial.spec import ModelSpec
from perennial.store import (
    Store,
    file_sha256,
    is_published,
    publishing,
    read_manifest,
    verify,
    write_atomic,
)
from training import checkpoint, snapshot
from training.health import Patience, find_hung
from training.hooks import Encoding
from training.pool import Pool
from training.process import dump_spec, error_from

log = logging.getLogger(__name__)

WEIGHTS, CURVE = "weights.npz", "curve.json"


@dataclass(frozen=True)
class Parent:
    """The champion that a candidate starts from: its version and the episode that trained it."""

    version: int
    episode_id: str


@dataclass(frozen=True)
class Progress:
    """A sign of life: `step` of `steps` is done; `pids` are the workers' by rank."""

    step: int
    steps: int
    loss: float
    generation: int
    pids: tuple[int, ...]


@dataclass(frozen=True)
class TrainResult:
    """What a run gave.

    Attributes:
        path: the artifact: `weights.npz` (every variable by path), `encoding.json`, `curve.json`.
        steps, examples: of the whole run, restarts not counted twice.
        loss: mean loss of the last few steps.
        wall_s: of this call, TensorFlow's import included.
        weights_sha256: equal exactly when the weights are.
        parent: version that was started from, or None.
    """

    path: Path
    steps: int
    examples: int
    loss: float
    wall_s: float
    workers: int
    restarts: int
    parent: int | None
    parameters: int
    weights_sha256: str
    curve: tuple[tuple[int, float], ...]


def train(
    spec: ModelSpec,
    store: Store,
    episode_id: str,
    *,
    parent: Parent | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    patience: Patience | None = None,
) -> TrainResult:
    """Trains on the episode's snapshot and publishes `runs/<episode>/checkpoint`.

    A published result is returned as it is; an interrupted run goes on from its last checkpoint.

    Args:
        parent: warm start: its weights and its encoding, a fresh optimizer and schedule. Ignored
            when `training.warm_start` is `scratch`.
        on_progress: called with each heartbeat of the chief, in this thread.

    Raises:
        Permanent: `train.parent_missing`, `train.parent_mismatch` (naming the variables),
            `train.loss_not_finite`, `train.max_duration`, `train.worker_error`, `hooks.*`,
            `store.*` (a changed snapshot).
        Retryable: `train.workers_died`, more than `training.max_restarts` times.
        Conflict: `train.running`, when another process trains this episode.
    """
    target = store.run(spec.name, episode_id) / "checkpoint"
    if is_published(target):
        return _result(target, read_manifest(target))
    folder = store.run(spec.name, episode_id) / "training"
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / "lock", f"{spec.name} {episode_id}"):
        if is_published(target):
            return _result(target, read_manifest(target))
        run = _Run(spec, store, episode_id, parent, folder, on_progress, patience or Patience())
        return run.to_the_end(target)


def _result(target: Path, manifest: Manifest) -> TrainResult:
    facts = manifest.facts
    curve = json.loads((target / CURVE).read_text())
    return TrainResult(
        path=target,
        steps=facts["steps"],
        examples=facts["examples"],
        loss=facts["loss"],
        wall_s=facts["wall_s"],
        workers=facts["workers"],
        restarts=facts["restarts"],
        parent=facts["parent"],
        parameters=facts["parameters"],
        weights_sha256=facts["weights_sha256"],
        curve=tuple((step, loss) for step, loss in curve),
    )


@contextlib.contextmanager
def _lock(path: Path, what: str) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict("train.running", f"{what} is being trained by another process") from None
        yield


@dataclass
class _Run:
    spec: ModelSpec
    store: Store
    episode_id: str
    parent: Parent | None
    folder: Path
    on_progress: Callable[[Progress], None] | None
    patience: Patience
    curve: dict[int, float] = field(default_factory=dict)
    restarts: int = 0
    parameters: int = 0

    def __post_init__(self) -> None:
        self.training = self.spec.training
        self.workers = 1 if self.training.strategy == "one_device" else self.training.workers
        self.checkpoints = self.folder / "checkpoints"
        if self.training.warm_start == "scratch":
            self.parent = None

    def to_the_end(self, target: Path) -> TrainResult:
        started = time.monotonic()
        source = self.store.snapshot(self.spec.name, self.episode_id)
        rows = verify(source).facts["train_rows"]
        start_from = self._parent_checkpoint()
        encoding = (start_from or source) / snapshot.ENCODING
        steps = max(1, math.ceil(rows * self.training.epochs / self.training.global_batch))
        plan = {
            **dump_spec(self.spec),
            "steps": steps,
            "snapshot": str(source),
            "encoding": str(encoding),
            "parent": str(start_from / WEIGHTS) if start_from else None,
            "checkpoints": str(self.checkpoints),
            "tensorboard": str(self.store.run(self.spec.name, self.episode_id) / "tensorboard"),
        }
        self._keep_only_own_checkpoints(plan, source)
        write_atomic(self.folder / "plan.json", json.dumps(plan).encode())
        if (done := checkpoint.latest(self.checkpoints)) is None or checkpoint.load(done)[
            0
        ] < steps:
            self._run_group(steps, started + self.training.max_duration.total_seconds())
        return self._publish(target, steps, encoding, time.monotonic() - started)

    def _parent_checkpoint(self) -> Path | None:
        if self.parent is None:
            return None
        path = self.store.run(self.spec.name, self.parent.episode_id) / "checkpoint"
        if not is_published(path):
            raise Permanent(
                "train.parent_missing",
                f"{self.spec.name}: version {self.parent.version} has no checkpoint at {path}",
                hint="set training.warm_start: scratch, or restore the champion's run",
                version=self.parent.version,
            )
        verify(path)
        return path

    def _keep_only_own_checkpoints(self, plan: dict[str, Any], source: Path) -> None:
        """Drops what an earlier call left behind under another plan, code, snapshot or parent."""
        identity = hashlib.sha256(json.dumps(plan, sort_keys=True).encode())
        identity.update(file_sha256(self.spec.folder / "model.py").encode())
        identity.update((source / "manifest.json").read_bytes())
        mark = self.folder / "identity"
        if not mark.exists() or mark.read_text() != identity.hexdigest():
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            shutil.rmtree(plan["tensorboard"], ignore_errors=True)
            (self.folder / CURVE).unlink(missing_ok=True)
            write_atomic(mark, identity.hexdigest().encode())
        elif (self.folder / CURVE).exists():
            self.curve = dict(json.loads((self.folder / CURVE).read_text()))

    def _run_group(self, steps: int, deadline: float) -> None:
        """Generations of workers until one is through."""
        while True:
            with Pool(self.folder) as pool:
                while (reason := self._generation(pool, steps, deadline)) is not None:
                    self.restarts += 1
                    log.warning("%s %s: %s", self.spec.name, self.episode_id, reason)
                    if self.restarts > self.training.max_restarts:
                        raise Retryable(
                            "train.workers_died",
                            f"{self.spec.name}: {reason}, after {self.training.max_restarts} "
                            "restarts",
                            hint=f"see {pool.log_path}; a new call resumes from the checkpoint",
                        )
                    if pool.dead:
                        break
                else:
                    return

    def _generation(self, pool: Pool, steps: int, deadline: float) -> str | None:
        """Starts the workers and listens until they are through (None) or one is lost (why)."""
        number = self.restarts + 1
        newest = checkpoint.latest(self.checkpoints)
        started = time.monotonic()
        pool.command(
            {
                "start": number,
                "ports": _free_ports(self.workers),
                "checkpoint": str(newest) if newest else None,
            }
        )
        beats: dict[int, float] = {}
        pids: tuple[int, ...] = ()
        left: set[int] = set()
        while True:
            now = time.monotonic()
            if now > deadline:
                raise Permanent(
                    "train.max_duration",
                    f"{self.spec.name}: training took longer than training.max_duration",
                    hint="raise training.max_duration, or lower training.epochs",
                )
            if reason := find_hung(beats, started, now, self.workers, self.patience):
                pool.command({"stop": True})
                return reason
            for event in pool.events(timeout_s=0.2):
                if event.get("generation", number) != number:
                    continue
                kind = event["event"]
                if kind == "ready":
                    started = time.monotonic()
                elif kind == "started":
                    pids = tuple(event["pids"])
                elif kind == "beat":
                    beats[event["rank"]] = time.monotonic()
                    if event["rank"] == 0:
                        self._note(event, steps, number, pids)
                elif kind == "done":
                    self.parameters = event["parameters"]
                elif kind == "failed":
                    pool.command({"stop": True})
                    raise _as_error(event, pool.log_path)
                elif kind == "exit":
                    if event["code"] != 0:
                        pool.command({"stop": True})
                        return f"worker {event['rank']} left with status {event['code']}"
                    left.add(event["rank"])
                    if len(left) == self.workers:
                        return None
            if pool.dead:
                return "the process that holds the workers is gone"

    def _note(
        self, event: dict[str, Any], steps: int, generation: int, pids: tuple[int, ...]
    ) -> None:
        self.curve[event["step"]] = event["loss"]
        if event["step"] % self.training.checkpoint_every_steps == 0:
            curve = json.dumps(sorted(self.curve.items()))
            write_atomic(self.folder / CURVE, curve.encode())
        if self.on_progress is not None:
            progress = Progress(event["step"], steps, event["loss"], generation, pids)
            self.on_progress(progress)

    def _publish(self, target: Path, steps: int, encoding: Path, wall_s: float) -> TrainResult:
        path = checkpoint.latest(self.checkpoints)
        if path is None:
            raise Retryable("train.no_checkpoint", f"{self.checkpoints} holds no checkpoint")
        _, values = checkpoint.load(path)
        curve = sorted(self.curve.items())
        parents = {"snapshot": self.episode_id}
        if self.parent is not None:
            parents["checkpoint"] = self.parent.episode_id
        with publishing(
            target, kind="checkpoint", model=self.spec.name, id=self.episode_id, parents=parents
        ) as (folder, facts):
            shutil.copyfile(path, folder / WEIGHTS)
            Encoding.read(encoding).write(folder / snapshot.ENCODING)
            (folder / CURVE).write_text(json.dumps(curve))
            facts.update(
                steps=steps,
                examples=steps * self.training.global_batch,
                loss=curve[-1][1] if curve else math.nan,
                wall_s=round(wall_s, 3),
                workers=self.workers,
                restarts=self.restarts,
                parent=self.parent.version if self.parent else None,
                parameters=self.parameters,
                weights_sha256=checkpoint.weights_sha256(values),
                spec_hash=self.spec.spec_hash,
            )
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        return _result(target, read_manifest(target))


def _as_error(event: dict[str, Any], log_path: Path) -> PerennialError:
    if "error" not in event:
        return Permanent("train.worker_error", f"a worker failed: {event['cut']}; see {log_path}")
    return error_from(event["error"], hint=f"see {log_path}")


def _free_ports(count: int) -> list[int]:
    """Free ports of the loopback address, held together so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
