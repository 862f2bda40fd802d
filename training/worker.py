"""The process group of a run: `python -m training.worker PLAN EVENTS_FD PARENT_PID`.

The first process, the pool, imports TensorFlow once and never runs an operation, so that it can
fork workers again and again: a restart costs no import. It obeys lines of JSON on stdin:

    {"start": generation, "ports": [...], "checkpoint": path or null}
    {"stop": true}          kills the workers

and dies with its workers when stdin closes, whatever the reason. Events go to EVENTS_FD: `ready`,
`started`, `exit` from the pool; `beat`, `failed`, `done` from the workers.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from perennial.errors import PerennialError, Permanent
from training.process import die_with_parent, restore_spec, send

log = logging.getLogger(__name__)

STEPS_PER_CALL = 10
# A peer died: the group is restarted, this worker has nothing to explain.
EXIT_PEER_LOST = 42
EXIT_FAILED = 43


def main(plan_path: str, events: int, parent: int) -> None:
    """The pool."""
    die_with_parent(parent)  # while TensorFlow is imported nobody reads stdin
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    plan = json.loads(Path(plan_path).read_text())
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    log.info("pool ready")
    send(events, {"event": "ready"})
    workers: dict[int, int] = {}
    generation = 0
    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.05)
        if readable:
            chunk = os.read(0, 65536)
            if not chunk:
                _kill(workers)
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                command = json.loads(line)
                _kill(workers)
                if "start" in command:
                    generation = command["start"]
                    workers = _fork(plan, command, events)
        for rank, pid in list(workers.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del workers[rank]
                code = os.waitstatus_to_exitcode(status)
                event = {"event": "exit", "generation": generation, "rank": rank, "code": code}
                send(events, event)


def _kill(workers: dict[int, int]) -> None:
    for pid in workers.values():
        os.kill(pid, signal.SIGKILL)
    for pid in workers.values():
        os.waitpid(pid, 0)
    workers.clear()


def _fork(plan: dict[str, Any], command: dict[str, Any], events: int) -> dict[int, int]:
    workers = {}
    pool = os.getpid()
    for rank in range(len(command["ports"])):
        pid = os.fork()
        if pid == 0:
            _be_worker(plan, command, rank, events, pool)
        workers[rank] = pid
    pids = [workers[rank] for rank in sorted(workers)]
    send(events, {"event": "started", "generation": command["start"], "pids": pids})
    return workers


def _be_worker(
    plan: dict[str, Any], command: dict[str, Any], rank: int, events: int, pool: int
) -> None:
    """Runs one worker and leaves by `os._exit`: a lost collective may block a normal exit."""
    code = 0
    try:
        die_with_parent(pool)
        os.close(0)
        _work(plan, command, rank, events)
    except Exception as error:  # noqa: BLE001 - everything is reported to the supervisor
        traceback.print_exc()
        code = EXIT_PEER_LOST if _peer_lost(error) else EXIT_FAILED
        if code == EXIT_FAILED:
            told = error if isinstance(error, PerennialError) else _unexpected(error)
            event = {"event": "failed", "generation": command["start"], "rank": rank}
            send(events, {**event, "error": told.as_dict()})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _peer_lost(error: Exception) -> bool:
    import tensorflow as tf

    lost = (
        tf.errors.UnavailableError,
        tf.errors.DeadlineExceededError,
        tf.errors.AbortedError,
        tf.errors.CancelledError,
    )
    return isinstance(error, lost) or "Collective ops is aborted" in str(error)


def _unexpected(error: Exception) -> Permanent:
    text = " ".join(str(error).split())[:1200]
    return Permanent("train.worker_error", f"a worker failed: {type(error).__name__}: {text}")


def _work(plan: dict[str, Any], command: dict[str, Any], rank: int, events: int) -> None:
    """One worker's whole run."""
    import keras
    import tensorflow as tf

    from training import checkpoint
    from training.hooks import Encoding, build_model, loss_function
    from training.input import load_rows
    from training.loop import Loop
    from training.strategy import make_strategy

    spec = restore_spec(plan)
    training, steps = spec.training, plan["steps"]
    ports, generation = command["ports"], command["start"]
    chief, workers = rank == 0, len(ports)

    threads = max(1, (os.cpu_count() or 1) // workers)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    keras.utils.set_random_seed(training.seed)
    tf.config.experimental.enable_op_determinism()
    strategy = make_strategy(training, rank, ports)
    rows = load_rows(spec, Path(plan["snapshot"]))
    log.info("rows loaded")
    with strategy.scope():
        model = build_model(spec, Encoding.read(Path(plan["encoding"])))
        loop = Loop(
            model,
            loss_function(spec),
            rows,
            training,
            strategy,
            steps=steps,
            rank=rank,
            workers=workers,
        )
        step = 0
        if command["checkpoint"]:
            step, values = checkpoint.load(Path(command["checkpoint"]))
            loop.restore(values, what=command["checkpoint"])
        elif plan["parent"]:
            _, values = checkpoint.load(Path(plan["parent"]))
            loop.warm_start(values, what=f"the champion's checkpoint {plan['parent']}")

    log.info("model built, starting at step %d", step)
    board = tf.summary.create_file_writer(plan["tensorboard"]) if chief else None
    every = training.checkpoint_every_steps
    while step < steps:
        count = min(STEPS_PER_CALL, steps - step, every - step % every)
        loss, norm = loop.run(tf.constant(step, tf.int64), tf.constant(count, tf.int64))
        step += count
        loss, norm = float(loss), float(norm)
        log.info("worker %d: step %d, loss %.5f", rank, step, loss)
        if not abs(loss) < float("inf"):
            raise Permanent(
                "train.loss_not_finite",
                f"{spec.name}: the loss is {loss} at step {step} of {steps}",
                hint="lower training.learning_rate, set training.clip_norm, or look for values in "
                "the data that the expectations let through",
                step=step,
            )
        if chief and (step % every == 0 or step == steps):
            checkpoint.save(Path(plan["checkpoints"]), step, loop.values())
        if board is not None:
            rate = loop.learning_rate(tf.constant(step))
            with board.as_default(step=step):
                _write_scalars(loss=loss, gradient_norm=norm, learning_rate=rate)
        event = {"event": "beat", "generation": generation, "rank": rank, "step": step}
        send(events, {**event, "loss": loss, "gradient_norm": norm})
    if board is not None:
        board.close()
    if chief:
        size = sum(loop.sizes)
        send(events, {"event": "done", "generation": generation, "rank": rank, "parameters": size})


def _write_scalars(**scalars: Any) -> None:
    """TensorBoard scalars, by the form that does not need the tensorboard package to write."""
    import tensorflow as tf

    metadata = tf.compat.v1.SummaryMetadata(
        plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
    )
    for name, value in scalars.items():
        tf.summary.write(name, tf.cast(value, tf.float32), metadata=metadata)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
