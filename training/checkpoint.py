"""Checkpoints: one flat file with every variable by its path, and the step.

Every replica holds the same values between two steps, so the chief alone writes its own, without a
collective: the state at a step is whole even when another worker dies in that moment. Seed states
are variables too (Keras leaves them out of `tf.train.Checkpoint`), so a resumed run with dropout
goes on exactly.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import zipfile
from pathlib import Path

import numpy as np

from perennial.errors import Permanent

log = logging.getLogger(__name__)

STEP = "step"
OPTIMIZER = "optimizer/"
_NAME = re.compile(r"step-(\d{9})\.npz")

Values = dict[str, np.ndarray]


def save(folder: Path, step: int, values: Values, *, keep: int = 2) -> Path:
    """Writes `step-<step>.npz` atomically and removes all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step-{step:09d}.npz"
    temporary = folder / f".{target.name}.tmp"
    with temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **values, **{STEP: np.array(step, np.int64)})  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(target)
    for old in saved(folder)[:-keep]:
        old.unlink()
    return target


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the oldest first."""
    return sorted(path for path in folder.glob("step-*.npz") if _NAME.fullmatch(path.name))


def latest(folder: Path) -> Path | None:
    """The newest checkpoint that can be read; a broken one is passed over with a warning."""
    for path in reversed(saved(folder)):
        try:
            load(path)
        except Permanent as error:
            log.warning("%s is passed over: %s", path, error.message)
        else:
            return path
    return None


def load(path: Path) -> tuple[int, Values]:
    """(step, values).

    Raises:
        Permanent: `checkpoint.unreadable`.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            values = {name: arrays[name] for name in arrays.files}
        return int(values.pop(STEP)), values
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise Permanent("checkpoint.unreadable", f"{path} cannot be read: {error}") from error


def model_values(values: Values) -> Values:
    """The variables of the model, without the optimizer's."""
    return {name: value for name, value in values.items() if not name.startswith(OPTIMIZER)}


def weights_sha256(values: Values) -> str:
    """Over the model's variables by name: equal exactly when the weights are, bit by bit."""
    digest = hashlib.sha256()
    for name, value in sorted(model_values(values).items()):
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def check_shapes(expected: Values, given: Values, *, code: str, what: str) -> None:
    """Refuses values that are not those of the model.

    Raises:
        Permanent: `code`, naming the variables that are missing, left over, or of another shape.
    """
    problems = [f"{name} is missing" for name in sorted(set(expected) - set(given))]
    problems += [f"{name} is not in the model" for name in sorted(set(given) - set(expected))]
    problems += [
        f"{name} has shape {list(given[name].shape)}, the model's has {list(value.shape)}"
        for name, value in sorted(expected.items())
        if name in given and given[name].shape != value.shape
    ]
    if problems:
        raise Permanent(
            code,
            f"{what} does not fit the model: {'; '.join(problems[:8])}"
            + (f"; and {len(problems) - 8} more" if len(problems) > 8 else ""),
            hint="set training.warm_start: scratch after a change of the model's structure",
            variables=len(problems),
        )
