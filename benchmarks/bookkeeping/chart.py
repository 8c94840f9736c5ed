"""Line charts with logarithmic axes, as SVG."""

from __future__ import annotations

from html import escape
from math import ceil, floor, log10
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 32, 40, 60
COLORS = ("#1b6ca8", "#c8553d", "#3a7d44")

Panel = tuple[str, str, "Mapping[int, Mapping[str, float]]"]
"""Title, name of the x axis, and {x: {series: microseconds}}."""


def draw(panels: Sequence[Panel]) -> str:
    """Return one SVG with the panels side by side. All y axes are microseconds."""
    body = [f'<g transform="translate({number * WIDTH} 0)">{_panel(*panel)}</g>' for number, panel in enumerate(panels)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(body)}</svg>\n'
    )


def _panel(title: str, x_name: str, points: Mapping[int, Mapping[str, float]]) -> str:
    ys = [y for series in points.values() for y in series.values()]
    x_low, x_high = _decades(list(points))
    y_low, y_high = _decades(ys)

    def x_of(value: float) -> float:
        return LEFT + (log10(value) - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - (log10(value) - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 20, title, weight="bold"), _text(LEFT, HEIGHT - 24, x_name), _text(LEFT, TOP - 6, "us")]
    for power in range(x_low, x_high + 1):
        x = x_of(10**power)
        parts.append(_line(x, TOP, x, HEIGHT - BOTTOM) + _text(x, HEIGHT - BOTTOM + 14, f"{10**power:,}", "middle"))
    for power in range(y_low, y_high + 1):
        y = y_of(10.0**power)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y) + _text(LEFT - 6, y + 4, f"{10.0**power:,g}", "end"))
    names = list(next(iter(points.values())))
    for number, name in enumerate(names):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{x_of(x):.1f},{y_of(series[name]):.1f}" for x, series in points.items())
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(_text(LEFT + 120 * number, HEIGHT - 8, name, color=color))
    return "".join(parts)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return low, max(high, low + 1)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal", color: str = "#222") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{color}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
