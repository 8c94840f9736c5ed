"""Hit rates over capacities as an SVG: one panel a trace, capacities on a logarithmic axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, log10

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
OTHER_COLOR = "#bbbbbb"

Panel = tuple[str, Sequence[int], Mapping[str, Sequence[float]]]
"""Title, capacities in blocks, and {policy: hit rates}."""


def draw(panels: Sequence[Panel]) -> str:
    """One SVG with the panels side by side. Each line is named at its right end."""
    body = "".join(f'<g transform="translate({n * WIDTH} 0)">{_panel(*panel)}</g>' for n, panel in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
    )


def _panel(title: str, capacities: Sequence[int], rates: Mapping[str, Sequence[float]]) -> str:
    low, high = log10(min(capacities)), log10(max(capacities))
    top = max(0.1, ceil(max(max(row) for row in rates.values()) * 10) / 10)

    def x_of(capacity: float) -> float:
        return LEFT + (log10(capacity) - low) / max(high - low, 0.01) * (WIDTH - LEFT - RIGHT)

    def y_of(rate: float) -> float:
        return HEIGHT - BOTTOM - rate / top * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 20, title, weight="bold"), _text(LEFT, HEIGHT - 8, "capacity in blocks; hit rate in blocks")]
    for tenth in range(round(top * 10) + 1):
        y = y_of(tenth / 10)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y) + _text(LEFT - 6, y + 4, f"{tenth / 10:.1f}", "end"))
    for capacity in capacities:
        x = x_of(capacity)
        parts.append(
            _line(x, TOP, x, HEIGHT - BOTTOM) + _text(x, HEIGHT - BOTTOM + 14, f"{capacity / 1000:g}k", "middle")
        )
    names_at = _spread({name: y_of(row[-1]) for name, row in rates.items()})
    for name, row in rates.items():
        color = COLORS.get(name, OTHER_COLOR)
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in zip(capacities, row, strict=True))
        dashes = ' stroke-dasharray="4 3"' if name == "optimum" else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"{dashes}/>')
        parts.append(_text(WIDTH - RIGHT + 5, names_at[name] + 4, name, color=color))
    return "".join(parts)


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
