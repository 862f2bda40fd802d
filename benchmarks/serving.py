"""The embedded server against the obvious one: grpc.aio that calls `signatures["serving_default"]`.

    python -m benchmarks.serving

All servers of one comparison run at once, each in a process of its own, and are measured in turns:
what else the machine does then falls on all of them alike. A figure is the median over the turns.
CPU is the server's per request. Rows go to var/bench/serving.json and to stdout.

Models, one row per request: `small` is an MLP of 30-256-256-1, `large` one of 256-2048-2048-10,
`heavy` has 150 MB of variables and is only loaded.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc

from benchmarks._report import Row, publish

ROOT = Path(__file__).parents[1]
SIZES = {
    "small": (30, 256, 256, 1),
    "large": (256, 2048, 2048, 10),
    "heavy": (30, 6000, 6000, 1),
}
TURNS = 5
START_S = 180.0
EMBEDDED, BATCHING, PLAIN = "embedded", "embedded, batching", "grpc.aio + signatures"
PREDICT = "/tensorflow.serving.PredictionService/Predict"
STATUS = "/tensorflow.serving.ModelService/GetModelStatus"


def main() -> int:
    """Runs the benchmark; exit code 1 when a goal is missed."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        _run("export", str(base))
        rows = [*_against_plain(base), *_batching(base), *_beside_a_load(base)]
    return publish("serving", rows)


# Comparisons


def _against_plain(base: Path) -> Iterator[Row]:
    """CPU, latency and throughput on the small model."""
    commands = {
        EMBEDDED: _embedded(base, "small"),
        BATCHING: [*_embedded(base, "small"), "--enable_batching"],
        PLAIN: ["-m", "benchmarks.serving", "serve", str(base / "small" / "1")],
    }
    with _all_started(commands) as servers:
        for concurrency, count in ((1, 1000), (16, 2000), (64, 2000)):
            measured = _in_turns(
                servers, lambda server, c=concurrency, n=count: server.measure("small", c, n)
            )
            at = f"concurrency {concurrency}"
            plain = measured[PLAIN]
            for name in (EMBEDDED, BATCHING):
                ours, what = measured[name], "" if name == EMBEDDED else " (batching)"
                if concurrency == 1:
                    yield Row(f"p50, {at}{what}", ours.p50_us, "us", PLAIN, plain.p50_us, "<= 0.5")
                    goal = ""
                else:
                    goal = "<= 0.333"
                yield Row(
                    f"server CPU per request, {at}{what}",
                    ours.cpu_us,
                    "us",
                    PLAIN,
                    plain.cpu_us,
                    goal,
                )
            yield Row(f"throughput, {at}", measured[EMBEDDED].rate, "1/s", PLAIN, plain.rate)
            yield Row(
                f"throughput of batching on the small model, {at}",
                measured[BATCHING].rate,
                "1/s",
                "without",
                measured[EMBEDDED].rate,
                ">= 0.95",
            )


def _batching(base: Path) -> Iterator[Row]:
    """Throughput on the large model."""
    commands = {
        EMBEDDED: _embedded(base, "large"),
        BATCHING: [*_embedded(base, "large"), "--enable_batching"],
    }
    with _all_started(commands) as servers:
        measured = _in_turns(servers, lambda server: server.measure("large", 64, 600))
    yield Row(
        "throughput of batching on the large model, concurrency 64",
        measured[BATCHING].rate,
        "1/s",
        "without",
        measured[EMBEDDED].rate,
        ">= 4",
    )


def _beside_a_load(base: Path) -> Iterator[Row]:
    """p99 of the small model while versions of the heavy one come and go, against before."""
    (base / "coming").mkdir()
    config = base / "beside.config"
    config.write_text(
        f"model_config_list {{ {_model_config(base, 'small')} "
        f'config {{ name: "heavy" base_path: "{base / "heavy"}" model_platform: "tensorflow" '
        "model_version_policy { latest { num_versions: 1 } } } }"
    )
    command = ["-m", "serving.embedded", f"--model_config_file={config}"]
    undisturbed, disturbed = [], []
    with _all_started({EMBEDDED: command}) as servers:
        server = servers[EMBEDDED]
        for version in range(2, 2 + TURNS):
            undisturbed.append(server.measure("small", 1, 2000).p99_us)
            shutil.copytree(base / "heavy" / "1", base / "heavy" / f"tmp-{version}")
            (base / "heavy" / f"tmp-{version}").rename(base / "heavy" / str(version))
            disturbed.append(
                server.measure_until("small", lambda v=version: server.has("heavy", v))
            )
    yield Row(
        "p99, concurrency 1, while 150 MB load",
        statistics.median(disturbed),
        "us",
        "undisturbed",
        statistics.median(undisturbed),
        "<= 2",
    )


# Servers and their clients


@dataclass(frozen=True)
class Figures:
    cpu_us: float
    rate: float
    p50_us: float
    p99_us: float


@dataclass(frozen=True)
class Server:
    """A started server: asked over one channel by a client in this process."""

    pid: int
    channel: grpc.Channel

    def measure(self, model: str, concurrency: int, count: int) -> Figures:
        """Sends `count` requests of one row, `concurrency` at a time, after a tenth to warm up."""
        self._ask(model, concurrency, count // 10)
        before, started = _cpu_s(self.pid), time.perf_counter()
        latencies_s = self._ask(model, concurrency, count)
        elapsed_s = time.perf_counter() - started
        return Figures(
            cpu_us=(_cpu_s(self.pid) - before) / count * 1e6,
            rate=count / elapsed_s,
            p50_us=_quantile(latencies_s, 0.5) * 1e6,
            p99_us=_quantile(latencies_s, 0.99) * 1e6,
        )

    def measure_until(self, model: str, condition: Callable[[], bool]) -> float:
        """p99 in microseconds of requests sent one by one until the condition holds."""
        latencies_s: list[float] = []
        while not condition():
            latencies_s += self._ask(model, 1, 100)
        return _quantile(latencies_s, 0.99) * 1e6

    def has(self, model: str, version: int) -> bool:
        """Whether the version is available."""
        from serving.protos import tfserving_pb2 as pb

        request = pb.GetModelStatusRequest(model_spec=pb.ModelSpec(name=model))
        status = self.channel.unary_unary(
            STATUS,
            request_serializer=pb.GetModelStatusRequest.SerializeToString,
            response_deserializer=pb.GetModelStatusResponse.FromString,
        )(request)
        available = pb.ModelVersionStatus.State.AVAILABLE
        return any(
            one.version == version and one.state == available for one in status.model_version_status
        )

    def _ask(self, model: str, concurrency: int, count: int) -> list[float]:
        raw = _request(model)
        predict = self.channel.unary_unary(PREDICT)
        latencies_s: list[float] = []
        if concurrency == 1:
            for _ in range(count):
                sent = time.perf_counter()
                predict(raw)
                latencies_s.append(time.perf_counter() - sent)
            return latencies_s
        pending: deque[tuple[float, Any]] = deque()

        def receive() -> None:
            sent, future = pending.popleft()
            future.result()
            latencies_s.append(time.perf_counter() - sent)

        for _ in range(count):
            if len(pending) == concurrency:
                receive()
            pending.append((time.perf_counter(), predict.future(raw)))
        while pending:
            receive()
        return latencies_s


@contextmanager
def _all_started(commands: dict[str, list[str]]) -> Iterator[dict[str, Server]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(_started(command)) for name, command in commands.items()}


@contextmanager
def _started(command: list[str]) -> Iterator[Server]:
    """A server process that is ready; stopped at the end."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, *command, f"--port={port}"], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(START_S)
            yield Server(process.pid, channel)
    finally:
        process.terminate()
        process.wait(30)


def _in_turns(
    servers: dict[str, Server], measure: Callable[[Server], Figures]
) -> dict[str, Figures]:
    """Medians over TURNS turns, in each of which every server is measured once."""
    turns: dict[str, list[Figures]] = {name: [] for name in servers}
    for _ in range(TURNS):
        for name, server in servers.items():
            turns[name].append(measure(server))
    return {name: _medians(figures) for name, figures in turns.items()}


def _medians(figures: Sequence[Figures]) -> Figures:
    return Figures(
        *(statistics.median(getattr(one, name) for one in figures) for name in vars(figures[0]))
    )


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _request(model: str) -> bytes:
    from serving.protos import tfserving_pb2 as pb

    width = SIZES[model][0]
    request = pb.PredictRequest(model_spec=pb.ModelSpec(name=model))
    tensor = request.inputs["x"]
    tensor.dtype = 1
    for size in (1, width):
        tensor.tensor_shape.dim.add().size = size
    tensor.float_val.extend([0.5] * width)
    return bytes(request.SerializeToString())


def _embedded(base: Path, model: str) -> list[str]:
    config = base / f"{model}.config"
    config.write_text(f"model_config_list {{ {_model_config(base, model)} }}")
    return ["-m", "serving.embedded", f"--model_config_file={config}"]


def _model_config(base: Path, model: str) -> str:
    return f'config {{ name: "{model}" base_path: "{base / model}" model_platform: "tensorflow" }}'


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Processes of their own


def _run(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "benchmarks.serving", *arguments],
        cwd=ROOT,
        check=True,
        stderr=subprocess.DEVNULL,
    )


def export(base: Path) -> None:
    """Writes version 1 of each model."""
    import tensorflow as tf

    class Mlp(tf.Module):
        def __init__(self, sizes: Sequence[int]) -> None:
            self.layers = [
                (tf.Variable(tf.random.normal((a, b)) / a**0.5), tf.Variable(tf.zeros(b)))
                for a, b in pairwise(sizes)
            ]

        def __call__(self, x: Any) -> Any:  # [batch, sizes[0]]
            for weights, bias in self.layers[:-1]:
                x = tf.nn.relu(x @ weights + bias)
            weights, bias = self.layers[-1]
            return {"y": tf.sigmoid(x @ weights + bias)}  # [batch, sizes[-1]]

    for name, sizes in SIZES.items():
        model = Mlp(sizes)
        serve = tf.function(
            model, input_signature=[tf.TensorSpec([None, sizes[0]], tf.float32, "x")]
        )
        path = str(base / name / "1")
        tf.saved_model.save(model, path, signatures={"serving_default": serve})


async def serve(folder: str, port: int) -> None:
    """The plain server: what one writes in an afternoon."""
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    function = tf.saved_model.load(folder).signatures["serving_default"]

    class Service(prediction_service_pb2_grpc.PredictionServiceServicer):
        async def Predict(self, request: Any, context: Any) -> Any:
            inputs = {k: tf.constant(tf.make_ndarray(v)) for k, v in request.inputs.items()}
            response = predict_pb2.PredictResponse()
            for name, value in function(**inputs).items():
                response.outputs[name].CopyFrom(tf.make_tensor_proto(value.numpy()))
            return response

    server = grpc.aio.server()
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(Service(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["export", base_path]:
            export(Path(base_path))
        case ["serve", folder, port_flag]:
            asyncio.run(serve(folder, int(port_flag.removeprefix("--port="))))
        case []:
            sys.exit(main())
        case _:
            sys.exit(__doc__)
