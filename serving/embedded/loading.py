"""Loads a version and makes it ready: session, warm-up, queues; counted."""

from __future__ import annotations

import time
from pathlib import Path

from tensorflow.core.protobuf import config_pb2

from serving.embedded.batching import Batcher
from serving.embedded.config import read_text_proto
from serving.embedded.flags import Flags
from serving.embedded.metrics import Metrics
from serving.embedded.servable import LoadOptions, Servable
from serving.embedded.status import StatusError
from serving.embedded.warmup import warm_up


class Loading:
    """The manager's loader, as the flags say.

    Raises:
        StatusError: the session configuration file cannot be read.
    """

    def __init__(self, flags: Flags, metrics: Metrics, batcher: Batcher) -> None:
        self._options = LoadOptions(
            tags=tuple(flags.saved_model_tags.split(",")),
            session=_session_config(flags),
            check_method_name=flags.enable_signature_method_name_check,
            on_run=metrics.runs.observe,
        )
        self._warms_up = flags.enable_model_warmup
        self._iterations = max(1, flags.num_request_iterations_for_warmup)
        self._metrics = metrics
        self._batcher = batcher

    def __call__(self, model: str, version: int, folder: Path) -> Servable:
        """Loads and warms up one version; raises StatusError."""
        path, metrics = str(folder), self._metrics
        started = time.perf_counter()
        try:
            servable = Servable.load(model, version, folder, self._options)
            restored = time.perf_counter()
            if self._warms_up:
                self._warm_up(servable, folder)
            self._batcher.batch(servable, folder)
        except StatusError:
            metrics.load_attempts.add(path, "fail")
            raise
        loaded = time.perf_counter()
        metrics.load_attempts.add(path, "success")
        metrics.load_latency.add(path, by=int((loaded - started) * 1e6))
        metrics.load_stages.observe(path, "restore_graph", value=(restored - started) * 1e6)
        metrics.load_stages.observe(path, "init_graph", value=(loaded - restored) * 1e6)
        return servable

    def _warm_up(self, servable: Servable, folder: Path) -> None:
        started = time.perf_counter()
        if records := warm_up(servable, folder, iterations=self._iterations):
            self._metrics.warmup_records.add(str(folder), "OK", by=records)
            elapsed_us = (time.perf_counter() - started) * 1e6
            self._metrics.warmup_latency.observe(str(folder), "OK", value=elapsed_us)


def _session_config(flags: Flags) -> config_pb2.ConfigProto:
    config = config_pb2.ConfigProto()
    if flags.tensorflow_session_config_file:
        path = Path(flags.tensorflow_session_config_file)
        read_text_proto(path, config, "tensorflow.ConfigProto")
    both = flags.tensorflow_session_parallelism
    if intra := flags.tensorflow_intra_op_parallelism or both:
        config.intra_op_parallelism_threads = intra
    if inter := flags.tensorflow_inter_op_parallelism or both:
        config.inter_op_parallelism_threads = inter
    return config
