"""One HTML file with tables and pictures in it, which opens offline and asks the network for nothing."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from anaphora.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

_STYLE = """body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:64em;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .7em;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}p.note{color:#555}"""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a header; the first column names the row."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_text(self) -> str:
        """Aligned columns, the first to the left and the others to the right."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        out = []
        for line in lines:
            cells = [
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            out.append("  ".join(cells).rstrip())
        return "\n".join(out)

    def to_html(self) -> str:
        """The same as a table."""
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.header)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def page(title: str, pieces: Sequence[str | Table]) -> str:
    """An HTML page. Pieces are tables, SVG pictures (text that begins with <svg), or paragraphs."""
    body = []
    for piece in pieces:
        if isinstance(piece, Table):
            body.append(piece.to_html())
        elif piece.startswith("<svg"):
            body.append(piece)
        else:
            body.append(f'<p class="note">{escape(piece)}</p>')
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{''.join(body)}"
        f'<p class="note">Made by anaphora {__version__}.</p></body></html>\n'
    )


def percent(share: float | None, unknown: str = "unknown") -> str:
    """A share with two digits after the point; what is not known is never shown as 0 %."""
    return unknown if share is None else f"{share:.2%}"
