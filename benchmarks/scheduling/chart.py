"""Times to first token as an SVG: what share of the requests has had its first token within how many seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, log10

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 48, 56, 36, 44
COLORS = {"fcfs": "#555555", "lpm": "#1b6ca8", "dfs": "#b08a3e", "fair": "#c8553d"}
LEAST_S = 0.05
"""Shorter times are drawn as this."""


def draw(ttft_s: Mapping[str, Sequence[float]]) -> str:
    """One SVG; a line for each order, named at its right end, over a logarithmic axis of seconds."""
    low = log10(LEAST_S)
    high = ceil(log10(max(max(times) for times in ttft_s.values())))

    def x_of(seconds: float) -> float:
        return LEFT + (log10(max(seconds, LEAST_S)) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y_of(share: float) -> float:
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<text x="{LEFT}" y="20" font-weight="bold">share of requests with a first token within ... seconds</text>'
    ]
    for quarter in range(5):
        y = y_of(quarter / 4)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y))
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{25 * quarter} %</text>')
    for power in range(ceil(low), high + 1):
        x = x_of(10.0**power)
        parts.append(_line(x, TOP, x, HEIGHT - BOTTOM))
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{10.0**power:g}</text>')
    for row, (name, times) in enumerate(ttft_s.items()):
        ordered = sorted(times)
        points = [(x_of(seconds), y_of((i + 1) / len(ordered))) for i, seconds in enumerate(ordered)]
        thinned = [*points[:: max(1, len(points) // 300)], points[-1]]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in thinned)
        color = COLORS.get(name, "#8a6fb0")
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        y = TOP + 14 * (row + 1)
        parts.append(_line(WIDTH - RIGHT + 4, y - 4, WIDTH - RIGHT + 18, y - 4, color, 1.8))
        parts.append(f'<text x="{WIDTH - RIGHT + 22}" y="{y}" fill="{color}">{name}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _line(x1: float, y1: float, x2: float, y2: float, color: str = "#dddddd", width: float = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"/>'
