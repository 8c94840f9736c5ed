"""docs/server.md knows every field of a request, every code of an error, every series of /metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anaphora.server.openai_api import (
    ChatCompletionRequest,
    CompletionRequest,
    ContentPart,
    Message,
    StreamOptions,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/server.md").read_text()


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.split(f"\n## {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("struct", [ChatCompletionRequest, CompletionRequest, ContentPart, Message, StreamOptions])
def test_every_field_that_is_known_is_documented(struct: type) -> None:
    named = set(re.findall(r"`(\w+)", section("Fields")))
    assert set(struct.__struct_fields__) - named == set()  # type: ignore[attr-defined]


def test_every_error_code_is_documented() -> None:
    sources = (ROOT / "src/anaphora/server").glob("*.py")
    given = {
        code for source in sources for code in re.findall(r'code(?:: str \| None)? ?= ?"(\w+)"', source.read_text())
    }
    assert {"invalid_value", "invalid_json", "unsupported_value"} <= given
    assert given - set(re.findall(r"`(\w+)`", section("Errors"))) == set()
