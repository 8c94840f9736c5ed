"""The adapter in the documentation is one that works, and the table of choices is complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

from anaphora.conformance import ANAPHORA_RADIX, Profile, run

PAGE = (Path(__file__).parents[2] / "docs/conformance.md").read_text()


def test_the_example_keeps_every_rule_in_sixty_lines():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(code.splitlines()) <= 60
    scope: dict[str, Any] = {}
    exec(code, scope)
    report = run(scope["MyManager"], ANAPHORA_RADIX)
    assert report.failures == []
    assert sum(result.status == "passed" for result in report.results) >= 38


def test_the_table_of_choices_names_them_all():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    hints = get_type_hints(Profile)
    del hints["name"]
    assert rows.keys() == hints.keys()
    for name, hint in hints.items():
        values = {value for part in get_args(hint) for value in (get_args(part) or [part]) if isinstance(value, str)}
        assert all(f"`{value}`" in rows[name] for value in values), name
