"""Pictures on disk: SVG as it is, and PNG of it for where SVG is not shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_ZOOM = 2
"""Pixels for each unit of an SVG: sharp on today's screens."""
_FAMILIES = ("DejaVu Sans", "Liberation Sans", "Noto Sans", "Arial", "Helvetica", "Segoe UI", "Roboto")


class ImageError(Exception):
    """A PNG cannot be made here; the message says what is missing."""


def to_png(svg: str) -> bytes:
    """The picture as PNG, twice as large. Raises ImageError: resvg-py is not installed, or the machine has no font.

    Cost: about 0.3 s, most of it for looking through the machine's fonts.
    """
    try:
        import resvg_py  # noqa: PLC0415  (an optional package)
    except ModuleNotFoundError:
        raise ImageError("--png: needs the package resvg-py: pip install resvg-py, or use --svg") from None
    family = _font()
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=_ZOOM, sans_serif_family=family))


def _font() -> str:
    """A sans-serif font of this machine: what it draws is not empty."""
    import resvg_py  # noqa: PLC0415

    def drawn(text: str, family: str) -> bytes:
        svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 20"><text y="15">{text}</text></svg>'
        return bytes(resvg_py.svg_to_bytes(svg_string=svg, font_family=family))

    for family in _FAMILIES:
        if drawn("A", family) != drawn("", family):
            return family
    raise ImageError(f"--png: this machine has none of the fonts {', '.join(_FAMILIES)}; install one, or use --svg")


def write_pictures(pictures: Mapping[str, str], svg_folder: Path | None, png_folder: Path | None) -> None:
    """Write pictures by their names into these folders, which are made if they are not there.

    Raises OSError, and ImageError before anything is written.
    """
    images = {} if png_folder is None else {name: to_png(svg) for name, svg in pictures.items()}
    if svg_folder is not None:
        svg_folder.mkdir(parents=True, exist_ok=True)
        for name, svg in pictures.items():
            (svg_folder / f"{name}.svg").write_text(svg)
    if png_folder is not None:
        png_folder.mkdir(parents=True, exist_ok=True)
        for name, image in images.items():
            (png_folder / f"{name}.png").write_bytes(image)
