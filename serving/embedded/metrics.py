"""Counters and histograms under the real server's names, in its text form, and a few of our own.

The stock series carry no version. `perennial_serving_*` do; their model and version come from what
was served, never from what a client wrote, so that no client can make a series.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from serving.embedded.status import Code

# 10 * 1.8^i microseconds.
LATENCY_BOUNDS_US = tuple(10.0 * 1.8**i for i in range(33))
SECONDS_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
# A request for a model that is not configured is counted under this name.
UNKNOWN_MODEL = "_unknown"

Values = tuple[str, ...]


@dataclass
class Counter:
    """One counter per combination of label values."""

    name: str
    labels: tuple[str, ...]
    _cells: dict[Values, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *values: str, by: float = 1) -> None:
        with self._lock:
            self._cells[values] = self._cells.get(values, 0) + by

    def total(self) -> float:
        """Sum over all cells."""
        with self._lock:
            return sum(self._cells.values())

    def lines(self) -> Iterable[str]:
        with self._lock:
            cells = dict(self._cells)
        yield f"# TYPE {self.name} counter"
        for values, value in cells.items():
            yield f"{self.name}{_braces(self.labels, values)} {value:.17g}"


@dataclass
class Gauge:
    """A gauge whose cells are read when it is printed."""

    name: str
    labels: tuple[str, ...]
    read: Callable[[], Iterable[tuple[Values, float]]]

    def lines(self) -> Iterable[str]:
        yield f"# TYPE {self.name} gauge"
        for values, value in self.read():
            yield f"{self.name}{_braces(self.labels, values)} {value:.17g}"


@dataclass
class Histogram:
    """One histogram per combination of label values."""

    name: str
    labels: tuple[str, ...]
    bounds: Sequence[float] = LATENCY_BOUNDS_US
    _cells: dict[Values, tuple[list[int], list[float]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def observe(self, *values: str, value: float) -> None:
        with self._lock:
            cell = self._cells.get(values)
            if cell is None:
                cell = self._cells[values] = ([0] * (len(self.bounds) + 1), [0.0])
            cell[0][bisect_left(self.bounds, value)] += 1
            cell[1][0] += value

    def lines(self) -> Iterable[str]:
        with self._lock:
            cells = {v: (list(counts), total[0]) for v, (counts, total) in self._cells.items()}
        yield f"# TYPE {self.name} histogram"
        for values, (counts, total) in cells.items():
            count = 0
            for bound, number in zip([*self.bounds, float("inf")], counts, strict=True):
                count += number
                limit = "+Inf" if bound == float("inf") else f"{bound:g}"
                yield f"{self.name}_bucket{_braces((*self.labels, 'le'), (*values, limit))} {count}"
            yield f"{self.name}_sum{_braces(self.labels, values)} {total:.17g}"
            yield f"{self.name}_count{_braces(self.labels, values)} {count}"


class Metrics:
    """All series of one server."""

    def __init__(self) -> None:
        serving, saved_model = ":tensorflow:serving:", ":tensorflow:cc:saved_model:"
        self.request_count = Counter(serving + "request_count", ("model_name", "status"))
        self.request_latency = Histogram(
            serving + "request_latency", ("model_name", "API", "entrypoint")
        )
        self.runtime_latency = Histogram(
            serving + "runtime_latency", ("model_name", "API", "runtime")
        )
        self.warmup_latency = Histogram(serving + "model_warmup_latency", ("model_path", "status"))
        self.load_attempts = Counter(saved_model + "load_attempt_count", ("model_path", "status"))
        self.load_latency = Counter(saved_model + "load_latency", ("model_path",))
        self.requests = Counter("perennial_serving_requests_total", ("model", "version", "status"))
        self.request_seconds = Histogram(
            "perennial_serving_request_seconds", ("model", "version"), SECONDS_BOUNDS
        )
        self._all: list[Counter | Gauge | Histogram] = [
            self.request_count,
            self.request_latency,
            self.runtime_latency,
            self.warmup_latency,
            self.load_attempts,
            self.load_latency,
            self.requests,
            self.request_seconds,
        ]

    def gauge(
        self,
        name: str,
        labels: tuple[str, ...],
        read: Callable[[], Iterable[tuple[Values, float]]],
    ) -> None:
        """Adds a gauge that is read when the metrics are."""
        self._all.append(Gauge(name, labels, read))

    def predicted(
        self, model: str, version: int, *, entrypoint: str, total_s: float, run_s: float
    ) -> None:
        """Counts one answered Predict."""
        api = "Predict" if entrypoint == "GRPC" else "predict"
        self.request_count.add(model, "OK")
        self.request_latency.observe(model, api, entrypoint, value=total_s * 1e6)
        self.runtime_latency.observe(model, "Predict", "TF1", value=run_s * 1e6)
        self.requests.add(model, str(version), "OK")
        self.request_seconds.observe(model, str(version), value=total_s)

    def failed(self, model: str, version: int | None, code: Code) -> None:
        """Counts one refused or failed request; `model` is a configured name or UNKNOWN_MODEL."""
        self.request_count.add(model, code.name)
        self.requests.add(model, "" if version is None else str(version), code.name)

    def text(self) -> str:
        """The Prometheus text format as the real server prints it."""
        return "\n".join(line for metric in self._all for line in metric.lines()) + "\n"

    def value(self, name: str) -> int:
        """Sum over the cells of a counter by its TensorFlow name, `/tensorflow/...`; unknown: 0."""
        text_name = re.sub(r"[^A-Za-z0-9_]", ":", name)
        for metric in self._all:
            if isinstance(metric, Counter) and metric.name == text_name:
                return int(metric.total())
        return 0


def _braces(labels: Sequence[str], values: Sequence[str]) -> str:
    pairs = (f'{label}="{_escape(value)}"' for label, value in zip(labels, values, strict=True))
    return f"{{{','.join(pairs)}}}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
