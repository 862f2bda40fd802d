"""A model server in a process of its own, and small SavedModels for it.

The server is the embedded one, or the command in `PERENNIAL_TFS_COMMAND`.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

ROOT = Path(__file__).parents[2]
START_S = 120.0
STOP_S = 30.0


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until(condition: Callable[[], Any], *, timeout_s: float = 30.0, what: str = "") -> Any:
    """Polls until the condition is true and returns its value; AssertionError at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        time.sleep(0.02)
    return value


@dataclass
class Server:
    """A started model server."""

    process: subprocess.Popen[bytes]
    port: int
    rest_port: int
    config_file: Path
    log_file: Path

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def rest_url(self) -> str:
        return f"http://127.0.0.1:{self.rest_port}"

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def is_open(self) -> bool:
        """Whether it listens; AssertionError once it has ended."""
        assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.log}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> int:
        """Sends SIGTERM and returns the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait(STOP_S)


def is_embedded() -> bool:
    return not os.environ.get("PERENNIAL_TFS_COMMAND")


def server_command() -> list[str]:
    """The command line of the server under test, without flags."""
    given = os.environ.get("PERENNIAL_TFS_COMMAND", "")
    return shlex.split(given) or [sys.executable, "-m", "serving.embedded"]


def spawn_server(folder: Path, *, config: str = "", flags: Sequence[str] = ()) -> Server:
    """Starts a server and does not wait for it.

    Args:
        folder: where its configuration files and its log go.
        config: text-format ModelServerConfig; empty: no models yet.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config_file = folder / "models.config"
    config_file.write_text(config or "model_config_list {}")
    monitoring_file = folder / "monitoring.config"
    monitoring_file.write_text("prometheus_config { enable: true }")
    port, rest_port = free_port(), free_port()
    log_file = folder / "server.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [
                *server_command(),
                f"--port={port}",
                f"--rest_api_port={rest_port}",
                f"--model_config_file={config_file}",
                f"--monitoring_config_file={monitoring_file}",
                "--enable_grpc_healthcheck_service",
                *flags,
            ],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    return Server(process, port, rest_port, config_file, log_file)


@contextmanager
def start_server(folder: Path, *, config: str = "", flags: Sequence[str] = ()) -> Iterator[Server]:
    """A server that is open, stopped at the end of the block."""
    server = spawn_server(folder, config=config, flags=flags)
    try:
        wait_until(server.is_open, timeout_s=START_S, what="the server opens its port")
        with grpc.insecure_channel(server.target) as channel:
            grpc.channel_ready_future(channel).result(START_S)
        yield server
    finally:
        server.stop()


def export_model(folder: Path, kind: str, *, scale: float = 2.0) -> Path:
    """Writes a small SavedModel by `tf.Module` and returns its folder.

    Args:
        kind: `affine` (x float [n] → y = scale * x), `mixed` (x float [n], k int64 [n],
            s string [n] → total float [n], echo string [n]), `examples` (inputs string [n]:
            serialised Examples with a float x; see `_examples_signatures`), `rows` (x float
            [n, m] → total float [n]; signatures scalar and short break the first dimension),
            `slow` (turns int64 [] → total int64 []: a loop of so many turns).
    """
    import tensorflow as tf

    class Affine(tf.Module):
        def __init__(self) -> None:
            self.scale = tf.Variable(scale)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, "x")])
        def serve(self, x: Any) -> Any:
            return {"y": x * self.scale}

    class Mixed(tf.Module):
        def __init__(self) -> None:
            self.scale = tf.Variable(scale)

        @tf.function(
            input_signature=[
                tf.TensorSpec([None], tf.float32, "x"),
                tf.TensorSpec([None], tf.int64, "k"),
                tf.TensorSpec([None], tf.string, "s"),
            ]
        )
        def serve(self, x: Any, k: Any, s: Any) -> Any:
            return {
                "total": x * self.scale + tf.cast(k, tf.float32),
                "echo": tf.strings.join([s, "!"]),
            }

    if kind == "examples":
        module = tf.Module()
        signatures = _examples_signatures(module, scale)
    elif kind == "rows":
        module = tf.Module()
        signatures = _rows_signatures()
    elif kind == "slow":
        module = tf.Module()
        signatures = {"serving_default": _loop()}
    else:
        module = {"affine": Affine, "mixed": Mixed}[kind]()
        signatures = {"serving_default": module.serve}
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f"tmp-{folder.name}")
    tf.saved_model.save(module, str(temporary), signatures=signatures)
    if kind == "examples":
        _name_methods(temporary)
    temporary.rename(folder)
    return folder


def _examples_signatures(module: Any, scale: float) -> dict[str, Any]:
    """Signatures that parse Examples (float x, float c = 0); y = scale * x + c.

    serving_default: regression of y [n, 1]; classify: labels "low" [n, 2] and "high" with scores
    -y and y; labels, scores: one of the two; flat: regression of y [n]; wide, short, number: break
    what a regression or classification promises; other: reads another input.
    """
    import tensorflow as tf

    module.scale = tf.Variable(scale)
    spec = {
        "x": tf.io.FixedLenFeature([], tf.float32),
        "c": tf.io.FixedLenFeature([], tf.float32, default_value=0.0),
    }

    def y(inputs: Any) -> Any:  # string [n] → float [n]
        parsed = tf.io.parse_example(inputs, spec)
        return parsed["x"] * module.scale + parsed["c"]

    def labels(inputs: Any) -> Any:  # string [n] → string [n, 2]
        return tf.tile([["low", "high"]], [tf.size(inputs), 1])

    def scores(inputs: Any) -> Any:  # string [n] → float [n, 2]
        return tf.stack([-y(inputs), y(inputs)], axis=1)

    outputs: dict[str, Callable[[Any], Any]] = {
        "serving_default": lambda inputs: {"outputs": y(inputs)[:, tf.newaxis]},
        "flat": lambda inputs: {"outputs": y(inputs)},
        "classify": lambda inputs: {"classes": labels(inputs), "scores": scores(inputs)},
        "labels": lambda inputs: {"classes": labels(inputs)},
        "scores": lambda inputs: {"scores": scores(inputs)},
        "wide": lambda inputs: {"outputs": scores(inputs)},
        "short": lambda inputs: {"outputs": y(inputs)[1:]},
        "number": lambda inputs: {"classes": scores(inputs)},
        "three": lambda inputs: {"classes": labels(inputs), "scores": scores(inputs), "z": inputs},
    }
    string = tf.TensorSpec([None], tf.string, "inputs")
    signatures = {
        name: tf.function(function, input_signature=[string]) for name, function in outputs.items()
    }
    signatures["other"] = tf.function(
        lambda examples: {"outputs": y(examples)},
        input_signature=[tf.TensorSpec([None], tf.string, "examples")],
    )
    return signatures


def _rows_signatures() -> dict[str, Any]:
    import tensorflow as tf

    outputs: dict[str, Callable[[Any], Any]] = {
        "serving_default": lambda x: {"total": tf.reduce_sum(x, axis=1)},
        "scalar": lambda x: {"total": tf.reduce_sum(x)},
        "short": lambda x: {"total": tf.reduce_sum(x, axis=1)[1:]},
    }
    matrix = tf.TensorSpec([None, None], tf.float32, "x")
    return {
        name: tf.function(function, input_signature=[matrix]) for name, function in outputs.items()
    }


def _loop() -> Any:
    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64, "turns")])
    def serve(turns: Any) -> Any:
        total = tf.while_loop(
            lambda turn, total: turn < turns,
            lambda turn, total: (turn + 1, total + turn),
            (tf.constant(0, tf.int64), tf.constant(0, tf.int64)),
        )[1]
        return {"total": total}

    return serve


def _name_methods(folder: Path) -> None:
    """Gives two signatures the method names that TF1's builder wrote; TF2 always says predict."""
    from tensorflow.core.protobuf import saved_model_pb2

    path = folder / "saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    signatures = saved.meta_graphs[0].signature_def
    signatures["serving_default"].method_name = "tensorflow/serving/regress"
    signatures["classify"].method_name = "tensorflow/serving/classify"
    path.write_bytes(saved.SerializeToString())
