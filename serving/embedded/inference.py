"""`Core` answers one call for both interfaces, so that gRPC and REST find, count and fail alike.

It runs on the event loop. A quick model runs there too; a slow one or a large request in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2, model_pb2

from serving.embedded.manager import Manager
from serving.embedded.metrics import UNKNOWN_MODEL, Metrics
from serving.embedded.servable import Call, Servable
from serving.embedded.status import StatusError, invalid
from serving.embedded.versions import Version

# A request of more bytes is read in a thread, so that it does not hold up the small ones.
LARGE_BYTES = 256 * 1024
# Counted by its examples only, as by the real server.
MULTI_INFERENCE = "MultiInference"


class Asked(NamedTuple):
    """Which servable a request means."""

    model: str
    version: int | None = None
    label: str | None = None

    @classmethod
    def by(cls, request: Any) -> Asked | None:
        """What the ModelSpec of a request, or of a task, says; None without one."""
        if not request.HasField("model_spec"):
            return None
        spec: model_pb2.ModelSpec = request.model_spec
        kind = spec.WhichOneof("version_choice")
        if kind is None:
            return cls(spec.name)
        if kind == "version":
            return cls(spec.name, spec.version.value)
        return cls(spec.name, None, spec.version_label)


class Answer(NamedTuple):
    """What a call gave: `result` is what its `Call.finish` returned."""

    servable: Servable
    signature: str
    result: Any


class Core:
    """Finds the servable, runs it where it is cheapest, counts the result."""

    def __init__(
        self, manager: Manager, metrics: Metrics, *, grpc_threads: int, rest_threads: int
    ) -> None:
        self.manager = manager
        self.metrics = metrics
        self._threads = {
            "GRPC": ThreadPoolExecutor(grpc_threads, thread_name_prefix="inference"),
            "REST": ThreadPoolExecutor(rest_threads, thread_name_prefix="rest"),
        }

    async def answer(
        self,
        asked: Asked | None,
        prepare: Callable[[Servable], Call],
        *,
        api: str,
        entrypoint: str,
        timeout_s: float | None = None,
        size_bytes: int = 0,
    ) -> Answer:
        """Answers one request.

        Args:
            asked: None when the request has no ModelSpec.
            prepare: reads and checks the request for the servable found; raises StatusError.
            entrypoint: "GRPC" or "REST".
            api: "Predict", "Classify", "Regress" or MULTI_INFERENCE.
            timeout_s: when the client stops waiting.
            size_bytes: how large the request is.

        Raises:
            StatusError: after it was counted.
        """
        started = time.perf_counter()
        servable = None
        try:
            servable = self.find(asked)
            with servable:
                if size_bytes > LARGE_BYTES:
                    call = await self.in_thread(entrypoint, prepare, servable)
                else:
                    call = prepare(servable)
                run_started = time.perf_counter()
                program = call.program
                if program.queue is not None:
                    values = await program.queue.run(call.arrays, timeout_s)
                elif program.is_quick(call.arrays):
                    values = program.run(call.arrays)
                else:
                    values = await self.in_thread(entrypoint, program.run, call.arrays, timeout_s)
                finished = time.perf_counter()
                result = call.finish(values)
        except StatusError as error:
            if api != MULTI_INFERENCE:
                self.failed(asked, None if servable is None else servable.version, error)
            raise
        if api == MULTI_INFERENCE:
            self.metrics.multi_inference(servable.model, call.examples)
        else:
            meter = servable.meters.get((api, entrypoint)) or self._meter(servable, api, entrypoint)
            meter.observe(finished - started, finished - run_started)
        return Answer(servable, call.signature, result)

    async def in_thread(self, entrypoint: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Runs `work` beside the event loop, in a thread of this interface."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads[entrypoint], work, *arguments)

    def find(self, asked: Asked | None) -> Servable:
        """The servable that a request means.

        Raises:
            StatusError: no ModelSpec, no name, unknown model, version or label.
        """
        if asked is None:
            raise invalid("Missing ModelSpec")
        if not asked.model:
            raise invalid("ModelSpec has no name specified.")
        return self.manager.find(asked.model, asked.version, asked.label)

    def failed(self, asked: Asked | None, version: int | None, error: StatusError) -> None:
        """Counts a failed call under a bounded name."""
        model = "" if asked is None else asked.model
        known = model if not model or self.manager.knows(model) else UNKNOWN_MODEL
        self.metrics.failed(known, version, error.code)

    def metadata(
        self, asked: Asked | None
    ) -> tuple[Servable, get_model_metadata_pb2.SignatureDefMap]:
        """The signatures of one version; raises as `find` does."""
        servable = self.find(asked)
        signatures = get_model_metadata_pb2.SignatureDefMap()
        for name, signature in servable.signatures.items():
            signatures.signature_def[name].CopyFrom(signature)
        return servable, signatures

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def _meter(self, servable: Servable, api: str, entrypoint: str) -> Any:
        meter = self.metrics.meter(servable.model, servable.version, api=api, entrypoint=entrypoint)
        servable.meters[api, entrypoint] = meter
        return meter


def version_status(version: Version) -> get_model_status_pb2.ModelVersionStatus:
    """One version's state as GetModelStatus says it."""
    message = get_model_status_pb2.ModelVersionStatus(
        version=version.number, state=int(version.state)
    )
    message.status.SetInParent()
    if version.error is not None:
        message.status.error_code = int(version.error.code)
        message.status.error_message = version.error.message
    return message
