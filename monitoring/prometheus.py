"""A client of Prometheus' query API that keeps its answers apart.

no answer     Retryable `prometheus.unreachable`
no series     an empty tuple: no data, which is not "all is well"
NaN, Inf      samples with that value
a number      samples
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from perennial.errors import Permanent, Retryable
from perennial.settings import Settings


@dataclass(frozen=True)
class Sample:
    """One series of an instant query."""

    labels: Mapping[str, str]
    value: float


class Prometheus:
    """Asks one Prometheus server.

    Args:
        url: as `http://127.0.0.1:9090`.
        timeout_s: of each query.
    """

    def __init__(self, url: str, *, timeout_s: float = 10.0) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s

    @classmethod
    def of(cls, settings: Settings) -> Prometheus:
        return cls(f"http://{settings.bind}:{settings.prometheus_port}")

    def query(self, expression: str) -> tuple[Sample, ...]:
        """The samples of an instant query, now; a scalar is one sample without labels.

        Raises:
            Retryable: `prometheus.unreachable`: it did not answer, is starting, or is overloaded.
            Permanent: `prometheus.query`: it does not understand the expression.
        """
        try:
            reply = httpx.post(
                f"{self.url}/api/v1/query",
                data={"query": expression},
                timeout=self._timeout_s,
                trust_env=False,
            )
            content = reply.json()
            if content["status"] == "success":
                return _samples(content["data"])
            kind, said = str(content["errorType"]), str(content["error"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise self._unreachable(str(error) or type(error).__name__) from error
        if kind == "bad_data":
            raise Permanent("prometheus.query", f"Prometheus refused {expression!r}: {said}")
        raise self._unreachable(f"{kind}: {said}")

    def value(self, expression: str) -> float | None:
        """The value of an expression with at most one series; None without any.

        Raises:
            Permanent: `prometheus.query`, for several series; as `query`.
        """
        samples = self.query(expression)
        if len(samples) > 1:
            raise Permanent(
                "prometheus.query", f"{expression!r} has {len(samples)} series, not one"
            )
        return samples[0].value if samples else None

    def _unreachable(self, why: str) -> Retryable:
        return Retryable(
            "prometheus.unreachable",
            f"Prometheus at {self.url} did not answer: {why}",
            hint="is it running? `perennial up` starts it",
        )


def _samples(data: Any) -> tuple[Sample, ...]:
    if data["resultType"] == "scalar":
        return (Sample({}, float(data["result"][1])),)
    return tuple(Sample(one["metric"], float(one["value"][1])) for one in data["result"])
