"""The report's charts as SVG text. Colours are CSS classes: light and dark follow the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 760.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 12.0, 14.0, 34.0
_TIME_STEPS_S = tuple(
    unit * count
    for unit, counts in (
        (1, (1, 2, 5, 10, 15, 30)),
        (60, (1, 2, 5, 10, 15, 30)),
        (3600, (1, 2, 3, 6, 12)),
        (86400, (1, 2, 5, 10, 30)),
    )
    for count in counts
)


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [start, end] pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)


def sequence_chart(
    looks: Sequence[Mapping[str, Any]],
    stages: Sequence[Mapping[str, Any]],
    *,
    required_bound: float,
    decided_at_s: float | None,
    end_s: float,
) -> str:
    """The confidence sequence over time.

    Args:
        looks: `elapsed_s`, `theta`, `lower`, `upper`, `fixed_lower`, `fixed_upper` of each look.
        stages: `from_s`, `to_s`, `share` of each stage.
        decided_at_s: where the decision mark goes; None: no decision yet.
    """
    if not looks:
        return '<p class="empty">No look had labels of both arms yet.</p>'
    newest = looks[-1]
    # Early intervals are huge; the plot shows what the last ones need, and cuts the rest off.
    spread = 4 * max(newest["upper"] - newest["theta"], abs(newest["theta"]), required_bound)
    low, high = -spread, spread
    low = max(low, min(-required_bound, *(look["lower"] for look in looks)) * 1.1)
    high = min(high, max(required_bound, *(look["upper"] for look in looks)) * 1.1)
    low, high = min(low, newest["lower"]), max(high, newest["upper"])
    x = Scale(0, max(end_s, 1.0), LEFT, WIDTH - RIGHT)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP)

    def clamped(value: float) -> float:
        return y(min(max(value, low), high))

    parts = [_open(HEIGHT, "Difference of the loss over time with its always-valid interval")]
    for index, stage in enumerate(stages):
        left, right = x(stage["from_s"]), x(min(stage["to_s"], end_s))
        width = round(max(right - left, 0), 2)
        parts.append(
            f'<rect class="stage{index % 2}" x="{left}" y="{TOP}" width="{width}"'
            f' height="{HEIGHT - TOP - BOTTOM}"/>'
            f'<text class="label" x="{left + 4}" y="{TOP + 12}">{stage["share"]:.0%}</text>'
        )
    for value in ticks(low, high):
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>'
            f'<text class="axis end" x="{LEFT - 6}" y="{y(value) + 4}">{signed(value)}</text>'
        )
    for value in time_ticks(max(end_s, 1.0)):
        parts.append(
            f'<text class="axis mid" x="{x(value)}" y="{HEIGHT - 12}">{duration(value)}</text>'
        )
    for name, top, bottom in (("band", "upper", "lower"), ("fixed", "fixed_upper", "fixed_lower")):
        points = [(x(look["elapsed_s"]), clamped(look[top])) for look in looks]
        points += [(x(look["elapsed_s"]), clamped(look[bottom])) for look in reversed(looks)]
        parts.append(f'<polygon class="{name}" points="{_points(points)}"/>')
    line = [(x(look["elapsed_s"]), clamped(look["theta"])) for look in looks]
    parts.append(f'<polyline class="theta" points="{_points(line)}"/>')
    parts.append(_level("zero", x, y(0), "no difference"))
    if required_bound > 0:
        parts.append(_level("margin", x, y(required_bound), f"margin {required_bound:+g}"))
    if decided_at_s is not None:
        at = x(decided_at_s)
        parts.append(
            f'<line class="decision" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<circle class="decision" cx="{at}" cy="{clamped(newest["theta"])}" r="4"/>'
        )
    return "".join([*parts, "</svg>"])


def forest_chart(rows: Sequence[Mapping[str, Any]], *, required_bound: float) -> str:
    """Point estimates with intervals, one row each.

    Args:
        rows: `name`, `theta`, `lower`, `upper`; the combined one last.
    """
    if not rows:
        return ""
    row_height = 30.0
    bottom = TOP + row_height * len(rows)
    height = bottom + BOTTOM
    low = min(0.0, -required_bound, *(row["lower"] for row in rows))
    high = max(0.0, required_bound, *(row["upper"] for row in rows))
    pad = 0.05 * (high - low) or 1.0
    x = Scale(low - pad, high + pad, LEFT + 60, WIDTH - RIGHT)
    parts = [_open(height, "Difference by stage and combined")]
    for value in ticks(low, high):
        parts.append(
            f'<line class="grid" x1="{x(value)}" x2="{x(value)}" y1="{TOP}" y2="{bottom}"/>'
            f'<text class="axis mid" x="{x(value)}" y="{height - 12}">{signed(value)}</text>'
        )
    levels = [("zero", 0.0)] + ([("margin", required_bound)] if required_bound > 0 else [])
    for name, value in levels:
        parts.append(
            f'<line class="{name}" x1="{x(value)}" x2="{x(value)}" y1="{TOP}" y2="{bottom}"/>'
        )
    for index, row in enumerate(rows):
        middle = TOP + row_height * (index + 0.5)
        name = "combined" if index == len(rows) - 1 else "single"
        parts.append(
            f'<text class="axis end" x="{LEFT + 52}" y="{middle + 4}">{row["name"]}</text>'
            f'<line class="{name}" x1="{x(row["lower"])}" x2="{x(row["upper"])}" y1="{middle}"'
            f' y2="{middle}"/><circle class="{name}" cx="{x(row["theta"])}" cy="{middle}" r="4.5"/>'
        )
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float, *, count: int = 6) -> list[float]:
    """Round values between `low` and `high`, about `count` of them."""
    from math import ceil, floor, log10

    rough = (high - low) / count
    if rough <= 0:
        return [low]
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [i * step for i in range(ceil(low / step), floor(high / step) + 1)]


def time_ticks(end_s: float) -> list[float]:
    """Round times from 0 to `end_s`, at most six."""
    step = next((step for step in _TIME_STEPS_S if end_s / step <= 6), end_s / 5)
    return [i * step for i in range(int(end_s / step) + 1)]


def signed(value: float) -> str:
    return f"{value:+.3g}" if abs(value) > 1e-12 else "0"


def duration(seconds: float) -> str:
    """`90s`, `15m`, `6h`, `3d`: the largest unit that reads well."""
    if not seconds:
        return "0"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size or (seconds >= size and seconds % size == 0):
            return f"{seconds / size:.3g}{unit}"
    return f"{seconds:.3g}s"


def _open(height: float, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{title}"'
        ' xmlns="http://www.w3.org/2000/svg">'
    )


def _level(name: str, x: Scale, at: float, text: str) -> str:
    return (
        f'<line class="{name}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'
        f'<text class="label end {name}-text" x="{WIDTH - RIGHT - 4}" y="{at - 5}">{text}</text>'
    )


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)
