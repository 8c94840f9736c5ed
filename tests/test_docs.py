"""What the documentation shows is what the code prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = ["docs/cache.md", "docs/engine.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_example_of_a_page_prints_what_the_page_says(page: str) -> None:
    text = (REPOSITORY / page).read_text()
    examples = re.findall(r"```python\n(.*?)```\n(?:```\n(.*?)```\n)?", text, re.DOTALL)
    assert examples
    scope: dict[str, Any] = {}
    for code, expected in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), scope)
        assert printed.getvalue().strip() == expected.strip(), code


def test_the_embedding_example_runs() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec((REPOSITORY / "examples/embed.py").read_text(), {"__name__": "__main__"})
    lines = printed.getvalue().splitlines()
    assert [line.split(" tokens cached")[0] for line in lines[:3]] == [
        "acme: 0 of 103",
        "acme: 96 of 103",
        "globex: 0 of 103",
    ]


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *sorted(p.name for p in (REPOSITORY / "docs").glob("*.md"))]
)
def test_every_link_to_a_file_leads_somewhere(page: str) -> None:
    path = REPOSITORY / page if (REPOSITORY / page).exists() else REPOSITORY / "docs" / page
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{page}: {target}"
