"""The figures as a Markdown table: measures down, contestants across."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .measures import Figure


def render(versions: Iterable[str], figures: Sequence[Figure]) -> str:
    """Return a title line and the table."""
    contestants = list(dict.fromkeys(figure.contestant for figure in figures))
    measures = list(dict.fromkeys((figure.measure, figure.unit) for figure in figures))
    cells = {(figure.measure, figure.contestant): figure for figure in figures}
    lines = [["", *contestants], ["---", *("---:" for _ in contestants)]]
    for measure, unit in measures:
        found = [cells.get((measure, contestant)) for contestant in contestants]
        lines.append([f"{measure}, {unit}", *("" if figure is None else _cell(figure) for figure in found)])
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{', '.join(versions)}. Medians of turns; in brackets (largest - smallest) / median.\n\n{table}"


def _cell(figure: Figure) -> str:
    median = figure.median
    number = f"{median:,.0f}" if median >= 100 else f"{median:.3g}"
    return number if figure.spread == 0 else f"{number} ({figure.spread:.0%})"
