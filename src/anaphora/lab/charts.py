"""Pictures as SVG text: lines over a logarithmic axis, and a waterfall. Nothing is needed to make or to show them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from html import escape
from math import ceil, log10
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 44, 84, 36, 44
COLORS = {
    "adaptive": "#c8553d",
    "lru": "#1b6ca8",
    "slru": "#3a7d44",
    "lfu": "#8a6fb0",
    "arc": "#b08a3e",
    "optimum": "#555555",
}
_PALETTE = ("#1b6ca8", "#c8553d", "#3a7d44", "#8a6fb0", "#b08a3e", "#2a9d8f", "#bbbbbb")
OTHER_COLOR = "#bbbbbb"


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart of lines: x values (above 0, rising), and {name: a share from 0 to 1 at each x}."""

    title: str
    xs: Sequence[float]
    lines: Mapping[str, Sequence[float]]
    x_label: str = "capacity in blocks; hit rate in blocks"


@dataclass(frozen=True, slots=True)
class Curves:
    """A chart of curves through points on plain axes from 0: {name: [(x, y)]}, x a share from 0 to 1. dashed: names."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    x_label: str
    dashed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Step:
    """One bar of a waterfall. kind: total (from 0), loss or gain (from where the one before ended)."""

    label: str
    value: float
    kind: str = "loss"


def draw(panels: Sequence[Panel | Curves]) -> str:
    """One SVG with the panels side by side. Each line is named at its right end."""
    body = "".join(
        f'<g transform="translate({n * WIDTH} 0)">{_panel(panel) if isinstance(panel, Panel) else _curves(panel)}</g>'
        for n, panel in enumerate(panels)
    )
    return _svg(WIDTH * len(panels), HEIGHT, body)


def draw_distribution(title: str, samples: Mapping[str, Sequence[float]], x_label: str) -> str | None:
    """One SVG: the share of each group of samples that is at most so large. None where nothing is above 0."""
    every = [value for values in samples.values() for value in values if value > 0]
    if not every:
        return None
    low, high = min(every), max(every)
    xs = [low * (high / low) ** (n / 60) for n in range(61)] if high > low else [low]
    lines = {}
    for name, values in samples.items():
        ordered = sorted(values)
        if ordered:
            lines[name] = [bisect_right(ordered, x * (1 + 1e-9)) / len(ordered) for x in xs]
    return draw([Panel(title, xs, lines, x_label)])


def draw_waterfall(title: str, steps: Sequence[Step], unit: str) -> str:
    """One SVG with a bar for each step, from left to right as text goes: label, bar, value and share of the first."""
    row, left, width = 22, 230, 760
    height = TOP + row * len(steps) + 16
    first = max(steps[0].value, 1e-9)
    scale = (width - left - 150) / first
    parts = [_text(16, 20, title, weight="bold")]
    end = 0.0
    colors = {"total": "#1b6ca8", "loss": "#c8553d", "gain": "#3a7d44"}
    for number, step in enumerate(steps):
        y = TOP + row * number
        if step.kind == "total":
            start, end = 0.0, step.value
        else:
            start, end = end, end + (step.value if step.kind == "gain" else -step.value)
        low, high = min(start, end), max(start, end)
        x = left + max(0.0, low) * scale
        parts.append(_text(left - 8, y + 14, step.label, "end"))
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 3}" width="{max(1.0, (high - max(0.0, low)) * scale):.1f}" height="{row - 7}" '
            f'fill="{colors[step.kind]}"/>'
        )
        sign = {"total": "", "loss": "\u2212", "gain": "+"}[step.kind]
        share = f"{sign}{step.value:,.0f} ({step.value / first:.1%})"
        parts.append(_text(left + max(low, high) * scale + 6, y + 14, share))
    parts.append(_text(left, height - 4, unit))
    return _svg(width, height, "".join(parts))


def _svg(width: float, height: float, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
    )


def _panel(panel: Panel) -> str:
    xs, lines = panel.xs, panel.lines
    low, high = log10(min(xs)), log10(max(xs))
    top = max(0.1, ceil(max(max(row) for row in lines.values()) * 10) / 10)

    def x_of(value: float) -> float:
        return LEFT + (log10(value) - low) / max(high - low, 0.01) * (WIDTH - LEFT - RIGHT)

    def y_of(rate: float) -> float:
        return HEIGHT - BOTTOM - rate / top * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 20, panel.title, weight="bold"), _text(LEFT, HEIGHT - 8, panel.x_label)]
    for tenth in range(round(top * 10) + 1):
        y = y_of(tenth / 10)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y) + _text(LEFT - 6, y + 4, f"{tenth / 10:.1f}", "end"))
    last_label = float("-inf")
    for value in xs:
        x = x_of(value)
        parts.append(_line(x, TOP, x, HEIGHT - BOTTOM))
        if x - last_label > 30:
            parts.append(_text(x, HEIGHT - BOTTOM + 14, _short(value), "middle"))
            last_label = x
    names_at = _spread({name: y_of(row[-1]) for name, row in lines.items()})
    for number, (name, row) in enumerate(lines.items()):
        color = COLORS.get(name) or (OTHER_COLOR if lines.keys() & COLORS.keys() else _PALETTE[number % len(_PALETTE)])
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in zip(xs, row, strict=True))
        dashes = ' stroke-dasharray="4 3"' if name == "optimum" else ""
        if len(xs) == 1:
            parts.append(f'<circle cx="{x_of(xs[0]):.1f}" cy="{y_of(row[0]):.1f}" r="3" fill="{color}"/>')
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"{dashes}/>')
        parts.append(_text(WIDTH - RIGHT + 5, names_at[name] + 4, name, color=color))
    return "".join(parts)


def _curves(panel: Curves) -> str:
    lines = panel.lines
    step = _step(max(y for points in lines.values() for _, y in points))
    top = step * ceil(max(y for points in lines.values() for _, y in points) / step - 1e-9)

    def x_of(x: float) -> float:
        return LEFT + x * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 20, panel.title, weight="bold"), _text(LEFT, HEIGHT - 8, panel.x_label)]
    for number in range(round(top / step) + 1):
        y = y_of(number * step)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y) + _text(LEFT - 6, y + 4, f"{number * step:g}", "end"))
    for tenth in range(0, 11, 2):
        x = x_of(tenth / 10)
        parts.append(_line(x, TOP, x, HEIGHT - BOTTOM))
        parts.append(_text(x, HEIGHT - BOTTOM + 14, f"{tenth / 10:g}", "middle"))
    names_at = _spread({name: y_of(points[-1][1]) for name, points in lines.items()})
    for number, (name, points) in enumerate(lines.items()):
        color = _PALETTE[number % len(_PALETTE)]
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        dashes = ' stroke-dasharray="4 3"' if name in panel.dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"{dashes}/>')
        parts += [f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2.5" fill="{color}"/>' for x, y in points]
        parts.append(_text(WIDTH - RIGHT + 5, names_at[name] + 4, name, color=color))
    return "".join(parts)


def _step(largest: float) -> float:
    """A round distance of grid lines, so that there are at most eight of them."""
    for size in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500):
        if largest <= 8 * size:
            return size
    return 10.0 ** ceil(log10(largest / 8))


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"


def _spread(wanted: Mapping[str, float]) -> dict[str, float]:
    """Places for the names, as wanted but at least a line apart, top down."""
    places: dict[str, float] = {}
    last = float("-inf")
    shift = min(0.0, HEIGHT - BOTTOM - max(wanted.values()) - 12 * len(wanted) / 2)
    for name, y in sorted(wanted.items(), key=lambda item: item[1]):
        last = places[name] = max(y + shift, last + 12)
    return places


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal", color: str = "#222") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{color}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
