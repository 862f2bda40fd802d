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
class CounterCell:
    """One time series of a counter."""

    value: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, by: float = 1) -> None:
        with self._lock:
            self.value += by


class HistogramCell:
    """One time series of a histogram."""

    __slots__ = ("_lock", "bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        with self._lock:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.sum += value


@dataclass
class Counter:
    """One counter per combination of label values."""

    name: str
    labels: tuple[str, ...] = ()
    _cells: dict[Values, CounterCell] = field(default_factory=dict)

    def cell(self, *values: str) -> CounterCell:
        """The series with these label values; made when it is not there."""
        return self._cells.get(values) or self._cells.setdefault(values, CounterCell())

    def add(self, *values: str, by: float = 1) -> None:
        self.cell(*values).add(by)

    def total(self) -> float:
        """Sum over all cells."""
        return sum(cell.value for cell in list(self._cells.values()))

    def lines(self) -> Iterable[str]:
        yield f"# TYPE {self.name} counter"
        for values, cell in list(self._cells.items()):
            yield f"{self.name}{_braces(self.labels, values)} {cell.value:.17g}"


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
    labels: tuple[str, ...] = ()
    bounds: Sequence[float] = LATENCY_BOUNDS_US
    _cells: dict[Values, HistogramCell] = field(default_factory=dict)

    def cell(self, *values: str) -> HistogramCell:
        """The series with these label values; made when it is not there."""
        return self._cells.get(values) or self._cells.setdefault(values, HistogramCell(self.bounds))

    def observe(self, *values: str, value: float) -> None:
        self.cell(*values).observe(value)

    def lines(self) -> Iterable[str]:
        yield f"# TYPE {self.name} histogram"
        for values, cell in list(self._cells.items()):
            count = 0
            for bound, number in zip([*self.bounds, float("inf")], list(cell.counts), strict=True):
                count += number
                limit = "+Inf" if bound == float("inf") else f"{bound:g}"
                yield f"{self.name}_bucket{_braces((*self.labels, 'le'), (*values, limit))} {count}"
            yield f"{self.name}_sum{_braces(self.labels, values)} {cell.sum:.17g}"
            yield f"{self.name}_count{_braces(self.labels, values)} {count}"


class Meter:
    """Counts the answered requests of one version, interface and method, on the event loop."""

    def __init__(
        self,
        counts: Sequence[CounterCell],
        total_us: HistogramCell,
        run_us: HistogramCell,
        total_s: HistogramCell,
    ) -> None:
        self._counts = counts
        self._total_us = total_us
        self._run_us = run_us
        self._total_s = total_s

    def observe(self, total_s: float, run_s: float) -> None:
        for cell in self._counts:
            cell.add()
        self._total_us.observe(total_s * 1e6)
        self._run_us.observe(run_s * 1e6)
        self._total_s.observe(total_s)


class RunMeter:
    """Counts the runs of graphs, whatever they were for."""

    def __init__(
        self, runs: Sequence[CounterCell], run_us: CounterCell, run_histogram: HistogramCell
    ) -> None:
        self._runs = runs
        self._run_us = run_us
        self._run_histogram = run_histogram

    def observe(self, run_s: float) -> None:
        run_us = run_s * 1e6
        for cell in self._runs:
            cell.add()
        self._run_us.add(run_us)
        self._run_histogram.observe(run_us)


class Metrics:
    """All series of one server."""

    def __init__(self) -> None:
        serving, saved_model = ":tensorflow:serving:", ":tensorflow:cc:saved_model:"
        core, batching = ":tensorflow:core:", serving + "batching_session:"
        self.request_count = Counter(serving + "request_count", ("model_name", "status"))
        self.request_latency = Histogram(
            serving + "request_latency", ("model_name", "API", "entrypoint")
        )
        self.runtime_latency = Histogram(
            serving + "runtime_latency", ("model_name", "API", "runtime")
        )
        self.example_counts = Histogram(
            serving + "request_example_counts", ("model",), tuple(2.0**i for i in range(14))
        )
        self.example_count_total = Counter(serving + "request_example_count_total", ("model",))
        self.request_log_count = Counter(
            serving + "request_log_count", ("model_name", "status_code")
        )
        self.warmup_latency = Histogram(serving + "model_warmup_latency", ("model_path", "status"))
        self.warmup_records = Counter(
            serving + "model_warmup_records_read", ("model_path", "status")
        )
        self.load_attempts = Counter(saved_model + "load_attempt_count", ("model_path", "status"))
        self.load_latency = Counter(saved_model + "load_latency", ("model_path",))
        self.load_stages = Histogram(saved_model + "load_latency_by_stage", ("model_path", "stage"))
        self.session_runs = Counter(core + "direct_session_runs")
        self.graph_runs = Counter(core + "graph_runs")
        self.graph_run_us = Counter(core + "graph_run_time_usecs")
        self.graph_run_histogram = Histogram(core + "graph_run_time_usecs_histogram")
        self.runs = RunMeter(
            (self.session_runs.cell(), self.graph_runs.cell()),
            self.graph_run_us.cell(),
            self.graph_run_histogram.cell(),
        )
        self.queuing_latency = Histogram(batching + "queuing_latency")
        self.wrapped_runs = Counter(batching + "wrapped_run_count")
        sizes = tuple(2.0**i for i in range(14))
        session = serving + "BatchingSession:"
        self.input_batch_size = Histogram(session + "input_batch_size", (), sizes)
        self.processed_batch_size = Histogram(session + "processed_batch_size", (), sizes)
        self.padding_size = Histogram(session + "padding_size", (), sizes)
        self.requests = Counter("perennial_serving_requests_total", ("model", "version", "status"))
        self.request_seconds = Histogram(
            "perennial_serving_request_seconds", ("model", "version"), SECONDS_BOUNDS
        )
        self._all: list[Counter | Gauge | Histogram] = [
            metric for metric in vars(self).values() if isinstance(metric, Counter | Histogram)
        ]
        # Known by name and never filled, as in the stock binary without ML Metadata.
        self.gauge(serving + "mlmd_map", ("model_name", "version"), lambda: ())

    def gauge(
        self,
        name: str,
        labels: tuple[str, ...],
        read: Callable[[], Iterable[tuple[Values, float]]],
    ) -> None:
        """Adds a gauge that is read when the metrics are."""
        self._all.append(Gauge(name, labels, read))

    def meter(self, model: str, version: int, *, api: str, entrypoint: str) -> Meter:
        """What counts the answers to `api` ("Predict", "Classify", "Regress") of one version."""
        return Meter(
            (
                self.request_count.cell(model, "OK"),
                self.requests.cell(model, str(version), "OK"),
            ),
            self.request_latency.cell(
                model, api if entrypoint == "GRPC" else api.lower(), entrypoint
            ),
            self.runtime_latency.cell(model, api, "TF1"),
            self.request_seconds.cell(model, str(version)),
        )

    def multi_inference(self, model: str, examples: int) -> None:
        """Counts the examples of one answered MultiInference."""
        self.example_counts.observe(model, value=examples)
        self.example_count_total.add(model, by=examples)

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
