"""The embedded server against the obvious one: grpc.aio that calls `signatures["serving_default"]`.

    python -m benchmarks.serving

Both run the same small model (30 floats, two hidden layers of 256) in a process of their own, on
the same machine, in the same run. What counts is CPU time of the server per request, which other
load on the machine moves less than latency. Rows go to var/bench/serving.json and to stdout.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc

from benchmarks._report import Row, publish

ROOT = Path(__file__).parents[1]
MODEL = "mlp"
REQUESTS = 3000
START_S = 180.0
# The embedded server may cost at most this share of the plain one's CPU time.
MAX_CPU_RATIO = 0.6


def main() -> int:
    """Runs the benchmark; exit code 1 when a goal is missed."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        _run("export", str(base / MODEL))
        config = base / "models.config"
        config.write_text(
            f'model_config_list {{ config {{ name: "{MODEL}" base_path: "{base / MODEL}" '
            'model_platform: "tensorflow" } }'
        )
        measured = {}
        for name, command in (
            ("embedded", ["-m", "serving.embedded", f"--model_config_file={config}"]),
            ("plain", ["-m", "benchmarks.serving", "serve", str(base / MODEL / "1")]),
        ):
            with _started(command) as (process, port):
                for concurrency in (1, 16):
                    measured[name, concurrency] = _measure(process.pid, port, concurrency)
    rows = []
    for concurrency in (1, 16):
        ours, plain = measured["embedded", concurrency], measured["plain", concurrency]
        at = f"concurrency {concurrency}"
        rows += [
            Row(
                f"server CPU per request, {at}",
                ours["cpu_us"],
                "us",
                "grpc.aio + signatures",
                plain["cpu_us"],
                f"<= {MAX_CPU_RATIO}",
            ),
            Row(f"throughput, {at}", ours["rate"], "1/s", "grpc.aio + signatures", plain["rate"]),
        ]
    return publish("serving", rows)


@contextmanager
def _started(command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server process, ready, and its port; stopped at the end."""
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
        yield process, port
    finally:
        process.terminate()
        process.wait(30)


def _measure(pid: int, port: int, concurrency: int) -> dict[str, float]:
    """Server CPU time per request in microseconds, and requests per second."""
    from serving.protos import tfserving_pb2 as pb

    request = pb.PredictRequest(model_spec=pb.ModelSpec(name=MODEL))
    tensor = request.inputs["x"]
    tensor.dtype = 1
    for size in (1, 30):
        tensor.tensor_shape.dim.add().size = size
    tensor.float_val.extend([0.5] * 30)
    raw = request.SerializeToString()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        predict = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")

        def ask(count: int) -> None:
            pending: deque[Any] = deque()
            for _ in range(count):
                if len(pending) == concurrency:
                    pending.popleft().result()
                pending.append(predict.future(raw))
            while pending:
                pending.popleft().result()

        ask(300)
        before, started = _cpu_s(pid), time.perf_counter()
        ask(REQUESTS)
        elapsed_s = time.perf_counter() - started
        return {
            "cpu_us": (_cpu_s(pid) - before) / REQUESTS * 1e6,
            "rate": REQUESTS / elapsed_s,
        }


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _run(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "benchmarks.serving", *arguments],
        cwd=ROOT,
        check=True,
        stderr=subprocess.DEVNULL,
    )


def export(base_path: str) -> None:
    """Writes version 1 of the model."""
    import tensorflow as tf

    class Mlp(tf.Module):
        def __init__(self) -> None:
            sizes = (30, 256, 256, 1)
            self.layers = [
                (tf.Variable(tf.random.normal((a, b)) / a**0.5), tf.Variable(tf.zeros(b)))
                for a, b in pairwise(sizes)
            ]

        @tf.function(input_signature=[tf.TensorSpec([None, 30], tf.float32, "x")])
        def serve(self, x: Any) -> Any:  # [batch, 30]
            for weights, bias in self.layers[:-1]:
                x = tf.nn.relu(x @ weights + bias)  # [batch, 256]
            weights, bias = self.layers[-1]
            return {"y": tf.sigmoid(x @ weights + bias)}  # [batch, 1]

    model = Mlp()
    tf.saved_model.save(model, f"{base_path}/1", signatures={"serving_default": model.serve})


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
            export(base_path)
        case ["serve", folder, port_flag]:
            asyncio.run(serve(folder, int(port_flag.removeprefix("--port="))))
        case []:
            sys.exit(main())
        case _:
            sys.exit(__doc__)
