"""What every child process of this room needs: its environment, its specification, its leash."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from perennial.errors import PerennialError
from perennial.spec import ModelSpec

_PR_SET_PDEATHSIG = 1


def child_environment() -> dict[str, str]:
    """The environment of a child that imports this package and TensorFlow quietly."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root,
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        "KERAS_BACKEND": "tensorflow",
    }


def dump_spec(spec: ModelSpec) -> dict[str, Any]:
    """The specification as JSON, overlay and folder included: a child must not read it anew."""
    content = spec.model_dump(mode="json", by_alias=True)
    return {"spec": content, "folder": str(spec.folder.absolute())}


def restore_spec(content: dict[str, Any]) -> ModelSpec:
    return ModelSpec.model_validate({**content["spec"], "folder": content["folder"]})


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the parent dies (Linux; elsewhere nothing happens).

    The parent means the thread that started this process: it has to wait for it.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def send(descriptor: int, event: dict[str, Any]) -> None:
    """One event as a line of JSON; lines below PIPE_BUF from several processes do not mix."""
    line = json.dumps(event) + "\n"
    if len(line) > 4000:
        line = json.dumps({"event": event["event"], "rank": event.get("rank"), "cut": line[:1500]})
        line += "\n"
    os.write(descriptor, line.encode())


def error_from(content: dict[str, Any], *, hint: str = "") -> PerennialError:
    """The error that a child told by `as_dict`; `hint` where it had none."""
    kinds = {kind.__name__: kind for kind in PerennialError.__subclasses__()}
    kind, values = kinds[content["kind"]], content["values"]
    return kind(content["code"], content["message"], hint=content["hint"] or hint, **values)
