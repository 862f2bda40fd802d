"""The one form of a result: a table for people, `var/bench/<room>.json` for machines."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        value, peer: ours, and what stands beside it in the same run (None: a bare limit).
        ratio: what the goal is about; `value / peer` unless the figure is compared itself.
        goal: e.g. "<= 3", "> 0.9"; "" when the figure is for reading only.
    """

    name: str
    value: float
    unit: str
    peer_name: str = ""
    peer: float | None = None
    goal: str = ""

    @property
    def ratio(self) -> float:
        return self.value if self.peer is None else self.value / self.peer

    @property
    def holds(self) -> bool | None:
        if not self.goal:
            return None
        sign, _, bound = self.goal.partition(" ")
        limit = float(bound)
        return {
            "<=": self.ratio <= limit,
            ">=": self.ratio >= limit,
            "<": self.ratio < limit,
            ">": self.ratio > limit,
        }[sign]


def publish(room: str, rows: Sequence[Row]) -> int:
    """Prints the table and writes the JSON; returns 1 when a goal is missed, else 0."""
    heads = ("figure", "ours", "beside it", "ratio", "goal", "")
    body = [
        (
            row.name,
            f"{row.value:.4g} {row.unit}",
            f"{row.peer:.4g} {row.unit} ({row.peer_name})" if row.peer is not None else "-",
            f"{row.ratio:.3g}",
            row.goal or "-",
            {True: "ok", False: "MISSED", None: ""}[row.holds],
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [heads, *body]) for i in range(len(heads))]
    for line in [heads, *body]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    document = {
        "room": room,
        "host": fingerprint(),
        "rows": [{**asdict(row), "ratio": row.ratio, "holds": row.holds} for row in rows],
    }
    path = Path("var/bench") / f"{room}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1))
    print(f"written to {path}")
    return int(any(row.holds is False for row in rows))


def fingerprint() -> dict[str, Any]:
    """What the figures depend on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "tensorflow": version("tensorflow"),
        "load_1m": os.getloadavg()[0],
    }
