"""A SavedModel run as TF Serving runs it: a TF1 session and the signature, no code of the model."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import tensorflow as tf

from perennial.errors import Permanent

SIGNATURE = "serving_default"
WARM_UP = "assets.extra/tf_serving_warmup_requests"


class Served:
    """One loaded SavedModel.

    Raises:
        Permanent: `export.signature`, when it has no `serving_default`; what TensorFlow raises on
            a SavedModel that cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._graph = tf.Graph()
        self._session = tf.compat.v1.Session(graph=self._graph)
        with self._graph.as_default():
            meta = tf.compat.v1.saved_model.load(self._session, ["serve"], str(path))
        if SIGNATURE not in meta.signature_def:
            raise Permanent("export.signature", f"{path} has no signature {SIGNATURE}")
        signature = meta.signature_def[SIGNATURE]
        self._feeds = {name: info.name for name, info in signature.inputs.items()}
        self._fetches = {name: info.name for name, info in signature.outputs.items()}

    @property
    def inputs(self) -> list[str]:
        return sorted(self._feeds)

    def predict(
        self, tensors: dict[str, np.ndarray], output: str, *, batch: int = 4096
    ) -> np.ndarray:
        """The output [row], as float32, in calls of at most `batch` rows."""
        if missing := sorted(set(self._feeds) - set(tensors)):
            raise Permanent(
                "served.inputs",
                f"{self.path} wants {', '.join(missing)}, which the rows do not have",
                hint="a champion with other features cannot be compared; release from scratch",
            )
        if output not in self._fetches:
            raise Permanent(
                "served.output", f"{self.path} has no output {output!r}, only {list(self._fetches)}"
            )
        rows = len(next(iter(tensors.values())))
        parts = [
            self._session.run(
                self._fetches[output],
                {feed: tensors[name][i : i + batch] for name, feed in self._feeds.items()},
            ).reshape(-1)
            for i in range(0, rows, batch)
        ]
        return np.concatenate(parts).astype(np.float32) if parts else np.empty(0, np.float32)

    def warm_up(self) -> int:
        """Replays the warm-up file as the server does on loading; returns the number of records."""
        from tensorflow_serving.apis import prediction_log_pb2

        count = 0
        for record in tf.compat.v1.io.tf_record_iterator(str(self.path / WARM_UP)):
            logged = prediction_log_pb2.PredictionLog.FromString(record)
            request = logged.predict_log.request
            feeds = {
                self._feeds[name]: tf.make_ndarray(proto) for name, proto in request.inputs.items()
            }
            self._session.run(list(self._fetches.values()), feeds)
            count += 1
        return count

    def latency_ms(self, tensors: dict[str, np.ndarray], output: str, batch: int) -> float:
        """Median wall time of one call of `batch` rows."""
        few = {name: values[:batch] for name, values in tensors.items()}
        times = []
        for _ in range(30):
            started = time.perf_counter()
            self.predict(few, output)
            times.append(time.perf_counter() - started)
        return float(np.median(times[5:]) * 1000)
