"""Pictures as PNG: with what they show, or with a word on what is missing."""

from __future__ import annotations

import builtins
import struct
from pathlib import Path
from typing import Any

import pytest

from anaphora.cli import main
from anaphora.lab.charts import Panel, draw
from anaphora.lab.images import ImageError, to_png, write_pictures
from anaphora.lab.workload import as_mooncake, generate

SVG = draw([Panel("a title", [1.0, 10.0], {"lru": [0.1, 0.5]})])
PNG = b"\x89PNG\r\n\x1a\n"


def png_or_skip(svg: str) -> bytes:
    pytest.importorskip("resvg_py")
    try:
        return to_png(svg)
    except ImageError as error:
        pytest.skip(str(error))


def test_a_png_is_twice_as_large_and_shows_the_text() -> None:
    image = png_or_skip(SVG)
    assert image.startswith(PNG)
    assert struct.unpack(">II", image[16:24]) == (840, 600)
    assert image != to_png(SVG.replace("a title", ""))


def test_without_the_package_the_message_says_what_to_install_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def no_resvg(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "resvg_py":
            raise ModuleNotFoundError(name=name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_resvg)
    with pytest.raises(ImageError, match="pip install resvg-py"):
        write_pictures({"a": SVG}, tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_simulate_writes_png_beside_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png_or_skip(SVG)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(as_mooncake(generate(["chat"], 4, 1.0, seed=2))))
    options = ["simulate", str(trace), "--capacity", "10", "100", "--jobs", "1"]
    assert main([*options, "--svg", str(tmp_path / "svg"), "--png", str(tmp_path / "png")]) == 0
    assert (tmp_path / "svg/memory.svg").read_text().startswith("<svg")
    assert (tmp_path / "png/memory.png").read_bytes().startswith(PNG)
