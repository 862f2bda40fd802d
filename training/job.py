"""Everything between a checkpoint and a decision that needs TensorFlow, in one short-lived child.

`run_job` starts `python -m training.job REQUEST PARENT_PID`. The child imports TensorFlow once and
forks two processes that never meet. The *model side* builds the Keras model from the checkpoint,
predicts and writes SavedModels. The *serving side* has seen neither Keras nor the model's code: it
loads SavedModels as TF Serving does, replays their warm-up and predicts. Decisions are taken by the
callers, without TensorFlow, on the arrays that come back.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from perennial.errors import PerennialError, Permanent
from perennial.spec import ModelSpec
from training import checkpoint
from training.process import (
    child_environment,
    die_with_parent,
    dump_spec,
    error_from,
    restore_spec,
)

log = logging.getLogger(__name__)

TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Request:
    """What a job does.

    Attributes:
        checkpoint: a published checkpoint.
        holdout: Parquet of the rows to predict.
        variants: SavedModels to write: `int8`, `none`.
        scope: unique prefix of resource names in the SavedModels.
        champion: a version's folder to predict with as well, or None.
    """

    checkpoint: Path
    holdout: Path
    variants: tuple[str, ...] = ()
    scope: str = ""
    champion: Path | None = None


@dataclass(frozen=True)
class Answer:
    """What came back; `folder` is removed when `run_job`'s block ends.

    Attributes:
        predictions: float32 [row] by source: `trained`, `champion`, and each variant.
        savedmodels: folder of each variant.
        facts: of each variant: `latency_ms` by batch size, `warm_up_records`, `inputs`.
    """

    folder: Path
    predictions: dict[str, np.ndarray]
    savedmodels: dict[str, Path]
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)


@contextmanager
def run_job(spec: ModelSpec, request: Request, folder: Path) -> Iterator[Answer]:
    """Runs a job in a child; `folder` is where its temporary folder is made.

    Raises:
        Permanent: what the child told (`hooks.*`, `served.*`, `export.*`), or `job.failed` with
            the end of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="tmp-job-", dir=folder))
    try:
        content = {
            **dump_spec(spec),
            "checkpoint": str(request.checkpoint),
            "holdout": str(request.holdout),
            "variants": request.variants,
            "scope": request.scope,
            "champion": str(request.champion) if request.champion else None,
            "work": str(work),
        }
        (work / "request.json").write_text(json.dumps(content))
        _run_child(work)
        predictions = {path.stem: np.load(path) for path in work.glob("*.npy")}
        facts = json.loads((work / "served.json").read_text())
        yield Answer(work, predictions, {name: work / name for name in request.variants}, facts)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_child(work: Path) -> None:
    output = work / "output.log"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "training.job", str(work / "request.json"), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            env=child_environment(),
        )
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise Permanent(
                "job.timeout", f"evaluation or export took longer than {TIMEOUT_S:.0f} s"
            ) from None
        finally:
            # The child and what it forked leave when stdin closes.
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if code == 0:
        return
    told = work / "error.json"
    if told.exists():
        raise error_from(json.loads(told.read_text()))
    tail = output.read_text(errors="replace").splitlines()[-12:]
    raise Permanent("job.failed", f"the job left with status {code}: {' | '.join(tail)}")


def main(request_path: str, parent: int) -> int:
    die_with_parent(parent)  # while TensorFlow is imported nobody reads stdin
    request = json.loads(Path(request_path).read_text())
    import tensorflow  # noqa: F401  (before the forks: once for both)

    for side in (_model_side, _serving_side):
        if code := _forked(side, request):
            return code
    return 0


def _forked(side: Callable[[dict[str, Any]], None], request: dict[str, Any]) -> int:
    """Runs one side in a fork; returns its exit code, or leaves when stdin closes."""
    stem = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with_parent(stem)
            side(request)
            code = 0
        except PerennialError as error:
            (Path(request["work"]) / "error.json").write_text(json.dumps(error.as_dict()))
        except Exception:  # noqa: BLE001 - the caller shows the end of the output
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if select.select([0], [], [], 0.05)[0] and not os.read(0, 1):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os._exit(1)


def _model_side(request: dict[str, Any]) -> None:
    """Writes `trained.npy` and the variants."""
    import keras
    import tensorflow as tf

    from training import savedmodel
    from training.hooks import Encoding, build_model, learnable
    from training.snapshot import ENCODING
    from training.supervisor import WEIGHTS
    from training.wire import tensors_of

    spec, work = restore_spec(request), Path(request["work"])
    trained = Path(request["checkpoint"])
    keras.utils.set_random_seed(spec.training.seed)
    model = build_model(spec, Encoding.read(trained / ENCODING))
    _, values = checkpoint.load(trained / WEIGHTS)
    values = checkpoint.model_values(values)
    own = {v.path: v.value.numpy() for v in model.variables}
    checkpoint.check_shapes(
        own, values, code="job.checkpoint_mismatch", what=f"the checkpoint {trained}"
    )
    for variable in model.variables:
        variable.assign(values[variable.path])

    tensors = tensors_of(spec, pq.read_table(request["holdout"]))
    used = {name: tf.constant(tensors[name]) for name in learnable(spec)}
    predict = tf.function(lambda inputs: model(inputs, training=False)[spec.data.output])
    np.save(work / "trained.npy", predict(used).numpy().reshape(-1).astype(np.float32))
    for variant in request["variants"]:
        scope = f"{request['scope']}/{variant}"
        savedmodel.write(work / variant, model, spec, tensors, int8=variant == "int8", scope=scope)


def _serving_side(request: dict[str, Any]) -> None:
    """Writes `<source>.npy` of the champion and each variant, and `served.json`."""
    from training.served import Served
    from training.wire import tensors_of

    spec, work = restore_spec(request), Path(request["work"])
    tensors = tensors_of(spec, pq.read_table(request["holdout"]))
    facts: dict[str, dict[str, Any]] = {}
    if request["champion"]:
        champion = Served(Path(request["champion"]))
        np.save(work / "champion.npy", champion.predict(tensors, spec.data.output))
    for variant in request["variants"]:
        served = Served(work / variant)
        facts[variant] = {"warm_up_records": served.warm_up(), "inputs": served.inputs}
        np.save(work / f"{variant}.npy", served.predict(tensors, spec.data.output))
        facts[variant]["latency_ms"] = {
            str(batch): round(served.latency_ms(tensors, spec.data.output, batch), 3)
            for batch in (1, 32)
        }
    (work / "served.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
