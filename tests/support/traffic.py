"""Real parts around the router: pools that stand in for TF Serving, processes, a small model."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from perennial.settings import Settings
from perennial.spec import ModelSpec, load_spec
from serving.protos import tfserving_pb2 as pb
from serving.router import envoy, routes

ROOT = Path(__file__).parents[2]
PREDICT = "/tensorflow.serving.PredictionService/Predict"

MODEL_YAML = """\
version: 1
name: {name}
owner: tests
data:
  features:
    city: {{type: string}}
    email: {{type: string, sensitive: hash}}
    secret: {{type: string, sensitive: drop}}
    distance: {{type: float}}
    stops: {{type: int}}
  label: {{name: late}}
  output: late
  routing_key: email
  label_horizon: {label_horizon}
{more}
evaluation:
  gates: [{{metric: log_loss}}]
"""


def eventually(
    condition: Callable[[], Any], what: str, deadline_s: float = 60.0, every_s: float = 0.05
) -> Any:
    """Waits until `condition` gives something true, and returns it."""
    deadline = time.monotonic() + deadline_s
    while True:
        if found := condition():
            return found
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {what}"
        time.sleep(every_s)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


_PORTS = [
    "router_port",
    "router_admin_port",
    "stable_port",
    "stable_rest_port",
    "canary_port",
    "canary_rest_port",
    "labels_port",
    "labels_rest_port",
    "recorder_metrics_port",
    "labels_metrics_port",
    "exporter_port",
    "prometheus_port",
]


def make_settings(home: Path, **given: Any) -> Settings:
    """Settings of an installation of its own: free ports, empty folders."""
    ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
    return Settings(home=home, models_dir=home / "models", **{**ports, **given})


def add_model(
    settings: Settings, name: str = "trips", *, label_horizon: str = "1h", more: str = ""
) -> ModelSpec:
    folder = settings.models_dir / name
    folder.mkdir(parents=True)
    text = MODEL_YAML.format(name=name, label_horizon=label_horizon, more=more)
    (folder / "model.yaml").write_text(text)
    return load_spec(folder)


def string_tensor(*values: str) -> pb.TensorProto:
    return pb.TensorProto(
        dtype=7, tensor_shape=_shape(len(values)), string_val=[v.encode() for v in values]
    )


def float_tensor(*values: float) -> pb.TensorProto:
    return pb.TensorProto(dtype=1, tensor_shape=_shape(len(values)), float_val=values)


def int_tensor(*values: int) -> pb.TensorProto:
    return pb.TensorProto(dtype=9, tensor_shape=_shape(len(values)), int64_val=values)


def _shape(count: int) -> pb.TensorShapeProto:
    return pb.TensorShapeProto(dim=[pb.TensorShapeProto.Dim(size=count)])


def predict_request(
    model: str = "trips", rows: int = 1, *, distance: float = 1.0, city: str = "Graz"
) -> pb.PredictRequest:
    """Row i has `stops` i; the pools answer with `distance` as the score."""
    return pb.PredictRequest(
        model_spec=pb.ModelSpec(name=model),
        inputs={
            "city": string_tensor(*[city] * rows),
            "email": string_tensor(*["someone@example.org"] * rows),
            "secret": string_tensor(*["do-not-write-me"] * rows),
            "distance": float_tensor(*[distance] * rows),
            "stops": int_tensor(*range(rows)),
        },
    )


@cache
def _bodies() -> tuple[bytes, bytes]:
    """A request and its reply as the router writes them."""
    reply = pb.PredictResponse(outputs={"late": float_tensor(0.25)})
    reply.model_spec.version.value = 3
    bodies = []
    for message in (predict_request(), reply):
        content = message.SerializeToString()
        frame = b"\0" + len(content).to_bytes(4, "big") + content
        bodies.append(b"%d:%s" % (len(frame), base64.b64encode(frame)))
    return bodies[0], bodies[1]


def spool_line(number: int, **fields: bytes) -> bytes:
    """A line as the router writes it, of a call of the small model; `fields` replace its own."""
    bodies = _bodies()
    values = {
        "time": b"%d.%06d" % divmod(time.time_ns() // 1000, 1_000_000),
        "duration": b"7",
        "arm": b"stable",
        "cluster": b"stable",
        "route": b"split",
        "model": b"trips",
        "versions": b"3:0",
        "http": b"200",
        "grpc": b"0",
        "flags": b"-",
        "attempt": b"1",
        "request": b"a1:%d:%s" % (number, bodies[0]),
        "reply": bodies[1],
        "path": PREDICT.encode(),
        "request_encoding": b"-",
        "reply_encoding": b"-",
        "request_id": b"r-%d" % number,
        "key": b"-",
        **fields,
    }
    return b"\t".join([envoy.LINE_VERSION.encode(), *values.values()]) + b"\n"


@dataclass
class Pool:
    """Speaks TF Serving's Predict over gRPC and REST; its score is the feature `distance`."""

    version: int
    fails_with: grpc.StatusCode | None = None
    rest_fails_with: int | None = None
    delay_s: float = 0.0
    calls: int = 0
    rest_paths: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    health: health.HealthServicer = field(default_factory=health.HealthServicer)

    def predict(self, request: pb.PredictRequest, context: grpc.ServicerContext) -> Any:
        self._count()
        if self.fails_with is not None:
            context.abort(self.fails_with, "told to")
        reply = pb.PredictResponse(outputs={"late": request.inputs["distance"]})
        reply.model_spec.name = request.model_spec.name
        reply.model_spec.version.value = self.version
        return reply

    def rest(self, path: str, body: Any) -> tuple[int, Any]:
        self._count()
        self.rest_paths.append(path)
        if self.rest_fails_with is not None:
            return self.rest_fails_with, {"error": "told to"}
        if body is None:
            return 200, {"model_version_status": [{"version": str(self.version)}]}
        if "instances" in body:
            return 200, {"predictions": [one["distance"] for one in body["instances"]]}
        return 200, {"outputs": body["inputs"]["distance"]}

    def _count(self) -> None:
        with self._lock:
            self.calls += 1
        if self.delay_s:
            time.sleep(self.delay_s)

    @contextmanager
    def serving(self, port: int, rest_port: int) -> Iterator[None]:
        handler = grpc.method_handlers_generic_handler(
            "tensorflow.serving.PredictionService",
            {
                "Predict": grpc.unary_unary_rpc_method_handler(
                    self.predict,
                    request_deserializer=pb.PredictRequest.FromString,
                    response_serializer=pb.PredictResponse.SerializeToString,
                )
            },
        )
        pool = futures.ThreadPoolExecutor(32)
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((handler,))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        web = ThreadingHTTPServer(("127.0.0.1", rest_port), _rest_handler(self))
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield
        finally:
            web.shutdown()
            web.server_close()
            thread.join()
            server.stop(None).wait()
            pool.shutdown()


def _rest_handler(pool: Pool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _answer(self, body: Any) -> None:
            status, content = pool.rest(self.path, body)
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


class Wire:
    """Forwards a port to another, so that a test can cut what runs over it."""

    def __init__(self, port: int, to: int) -> None:
        self.to = to
        self._open: set[socket.socket] = set()
        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", port))
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """Resets every connection, as the kernel does for a process that is killed."""
        with self._lock:
            for one in self._open:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def hang(self) -> None:
        """Lets nothing through, as a process that is stopped; connections stay."""
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    def close(self) -> None:
        self._flows.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            outer = socket.create_connection(("127.0.0.1", self.to))
            for one, other in ((inner, outer), (outer, inner)):
                self._open.add(one)
                thread = threading.Thread(target=self._pump, args=(one, other))
                self._threads.append(thread)
                thread.start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                self._flows.wait()
                other.sendall(data)
        except OSError:
            pass
        with suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open.discard(one)
        one.close()


@dataclass
class Process:
    """A started process; killed by its id when the block ends."""

    command: list[str]
    environment: Mapping[str, str]
    log: Path
    popen: subprocess.Popen[bytes] = field(init=False)

    def __enter__(self) -> Process:
        self.start()
        return self

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env={**os.environ, **self.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    def stop(self) -> int:
        """Ends it in order; returns its exit code."""
        self.popen.terminate()
        return self.popen.wait(30)

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.kill()


def python_module(settings: Settings, module: str) -> Process:
    return Process(
        [sys.executable, "-m", module],
        settings.as_environment(),
        settings.home / f"{module}.log",
    )


@dataclass
class Router:
    """A running Envoy and a client of it."""

    settings: Settings
    process: Process
    channel: grpc.Channel

    def declare(self, models: Mapping[str, routes.ModelRouting]) -> None:
        version = routes.write_routes(routes.routes_path(self.settings), models)
        routes.wait_applied(envoy.admin_url(self.settings), version, 5.0)

    def predict(
        self,
        request: pb.PredictRequest | None = None,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        compression: grpc.Compression | None = None,
        timeout_s: float = 10.0,
    ) -> Answer:
        call = self.channel.unary_unary(
            PREDICT,
            request_serializer=pb.PredictRequest.SerializeToString,
            response_deserializer=pb.PredictResponse.FromString,
        )
        metadata = [*(headers or {}).items(), *([("x-routing-key", key)] if key else [])]
        try:
            reply, done = call.with_call(
                request or predict_request(),
                metadata=metadata,
                timeout=timeout_s,
                compression=compression,
            )
        except grpc.RpcError as error:
            received = {**dict(error.initial_metadata()), **dict(error.trailing_metadata())}
            return Answer(error.code(), None, received, error.details() or "")
        return Answer(grpc.StatusCode.OK, reply, dict(done.initial_metadata()))

    def rest(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        url = f"http://127.0.0.1:{self.settings.router_port}{path}"
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        method = "GET" if body is None else "POST"
        with httpx.Client(trust_env=False, timeout=20) as client:
            return client.request(method, url, json=body, headers=names)

    def stats(self, prefix: str) -> dict[str, str]:
        url = envoy.admin_url(self.settings) + "/stats"
        text = httpx.get(url, params={"filter": f"^{prefix}"}, trust_env=False).text
        return dict(line.split(": ", 1) for line in text.splitlines())


@dataclass(frozen=True)
class Answer:
    code: grpc.StatusCode
    reply: pb.PredictResponse | None
    headers: Mapping[str, Any]
    details: str = ""

    @property
    def arm(self) -> str:
        return str(self.headers.get("x-perennial-arm", ""))

    @property
    def request_id(self) -> str:
        return str(self.headers["x-request-id"])


@contextmanager
def routing(
    settings: Settings, credentials: grpc.ChannelCredentials | None = None
) -> Iterator[Router]:
    """Runs Envoy until its routes are in force."""
    envoy.write_bootstrap(settings)
    command = envoy.command(settings, drain_time_s=1)
    try:
        yield from _routing(
            settings, Process(command, {}, settings.home / "envoy.log"), credentials
        )
    finally:
        envoy.remove_shared_memory(settings)
        shutil.rmtree(settings.spool_dir)


@contextmanager
def router_service(settings: Settings) -> Iterator[Router]:
    """`python -m serving.router`, its routes in force; it's told to end at the end."""
    process = python_module(settings, "serving.router")
    try:
        for router in _routing(settings, process):
            yield router
            if process.popen.poll() is None:
                assert process.stop() == 0
    finally:
        shutil.rmtree(settings.spool_dir, ignore_errors=True)


def _routing(
    settings: Settings, process: Process, credentials: grpc.ChannelCredentials | None = None
) -> Iterator[Router]:
    target = f"127.0.0.1:{settings.router_port}"
    with (
        process,
        grpc.secure_channel(target, credentials)
        if credentials
        else grpc.insecure_channel(target) as channel,
    ):
        eventually(routes.routes_path(settings).exists, "the routes are written")
        declared = routes.read_routes(routes.routes_path(settings))
        routes.wait_applied(envoy.admin_url(settings), declared.version, 60.0)
        grpc.channel_ready_future(channel).result(60)
        yield Router(settings, process, channel)


def log_rows(folder: Path) -> list[dict[str, Any]]:
    """All rows of a prediction or label log."""
    files = sorted(folder.glob("date=*/hour=*/*.parquet"))
    if not files:
        return []
    return pa.concat_tables(pq.read_table(f, partitioning=None) for f in files).to_pylist()


def metric(port: int, name: str, **labels: str) -> float | None:
    """One sample of a process' metrics page; None while it isn't there."""
    try:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    except httpx.TransportError:
        return None
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        wanted = [f'{k}="{v}"' for k, v in labels.items()]
        if series.split("{")[0] == name and all(label in series for label in wanted):
            return float(value)
    return None
