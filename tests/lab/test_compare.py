"""Two requests: what one could take from the other, and where that ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anaphora.cli import main

STABLE = "The desk opens at noon and lends one toy to each child. " * 200


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "a.json", tmp_path / "b.json"


def body(system: str, *turns: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
    return {"model": "m", "messages": messages, **fields}


def compared(files: tuple[Path, Path], one: Any, other: Any, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    for path, value in zip(files, (one, other), strict=True):
        path.write_text(json.dumps(value, indent=2))
    assert main(["compare", *map(str, files), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_a_next_turn_begins_with_the_one_before(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(files, body(STABLE, "q"), body(STABLE, "q", "a", "r"), capsys)
    assert found["difference"] is None
    one, other = found["num_tokens"]
    # All of the first one's tokens, the opening of its answer included.
    assert found["shared_tokens"] == one < other
    assert found["engines"]["SGLang, llama.cpp (1 token)"] == one
    assert found["engines"]["vLLM, Anaphora (blocks of 16)"] == one // 16 * 16
    assert found["providers"]["anthropic"]["read"] > 2000


def test_where_they_part_and_what_would_be_shared(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(files, body(f"At 10:00. {STABLE}", "q"), body(f"At 11:30. {STABLE}", "q"), capsys)
    assert found["difference"] == {"kind": "timestamp", "path": "messages[0].content", "section": "system", "offset": 3}
    assert found["shared_tokens"] < 10
    assert found["fixed_tokens"] > found["num_tokens"][1] - 10
    assert found["providers"]["openai"]["read"] == 0


def test_what_keeps_them_apart_besides_the_text(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(files, body(STABLE, "q"), body(STABLE, "q", tool_choice="none", cache_salt="x"), capsys)
    assert found["boundaries"] == ["salt", "tool_choice"]
    assert set(found["engines"].values()) == {0}


def test_text_is_shown_only_when_asked_for(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for path, secret in zip(files, ("alpha", "omega"), strict=True):
        path.write_text(json.dumps(body(f"{secret} {STABLE}", "q")))
    assert main(["compare", *map(str, files)]) == 0
    assert "alpha" not in capsys.readouterr().out
    assert main(["compare", *map(str, files), "--show"]) == 0
    assert "alpha" in capsys.readouterr().out


def test_a_file_without_a_request_says_so(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    files[0].write_text(json.dumps({"messages": 3}))
    files[1].write_text(json.dumps(body("s", "q")))
    assert main(["compare", *map(str, files)]) == 1
    assert "no request in it: messages: expected a list" in capsys.readouterr().err
