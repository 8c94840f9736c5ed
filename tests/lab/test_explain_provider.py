"""A provider's rules as causes: each on the smallest log that has it; and the causes add up to the token."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from anaphora.cli import main
from anaphora.lab.commands.options import PROVIDER_NAMES
from anaphora.lab.providers.catalogue import Catalogue
from anaphora.lab.workload import as_openai, generate

MARK = {"cache_control": {"type": "ephemeral"}}


def words(num: int, seed: str = "river") -> str:
    return f"{seed} " + "stone " * (num - 1)


def block(num: int, seed: str = "river", **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words(num, seed), **more}


def call(second: int, system: list[dict[str, Any]], *content: dict[str, Any]) -> dict[str, Any]:
    stamp = datetime.fromtimestamp(1_780_000_000 + second, UTC).isoformat()
    body = {
        "model": "claude-sonnet-5",
        "max_tokens": 5,
        "system": system,
        "messages": [{"role": "user", "content": list(content) or [block(5, "question")]}],
    }
    return {"timestamp": stamp, "request": body}


def explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], calls: list[dict[str, Any]], provider: str = "anthropic"
) -> dict[str, Any]:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in calls))
    assert main(["explain", str(path), "--provider", provider, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def lost(found: dict[str, Any], name: str) -> int:
    return sum(cause["tokens"] for cause in found["causes"] if cause["name"].startswith(name))


ENOUGH = block(2000, **MARK)


class TestCauses:
    def test_nothing_is_lost_where_every_rule_is_kept(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        found = explained(tmp_path, capsys, [call(0, [ENOUGH]), call(60, [ENOUGH], block(9, "another"))])
        assert found["predicted_tokens"] > 1900
        for name in ("below", "breakpoint", "beyond", "expired"):
            assert lost(found, name) == 0

    def test_a_prefix_below_the_minimum(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        found = explained(tmp_path, capsys, [call(0, [block(300, **MARK)]), call(60, [block(300, **MARK)])])
        assert found["predicted_tokens"] == 0
        assert lost(found, "below the provider's minimum (1024)") > 290

    def test_no_mark(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        found = explained(tmp_path, capsys, [call(0, [block(2000)]), call(60, [block(2000)])])
        assert found["predicted_tokens"] == 0
        assert lost(found, "breakpoint missing") > 1900
        assert found["fixes"][0]["action"].startswith("marks: ")
        assert found["fixes"][0]["tokens"] > 1900

    def test_idle_for_longer_than_the_time_to_live(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        found = explained(tmp_path, capsys, [call(0, [ENOUGH]), call(301, [ENOUGH])])
        assert lost(found, "expired by the provider's time to live (300 s)") > 1900
        hour = block(2000, cache_control={"type": "ephemeral", "ttl": "1h"})
        found = explained(tmp_path, capsys, [call(0, [hour]), call(301, [hour])])
        assert lost(found, "expired") == 0

    def test_a_mark_too_far_behind_the_last_one(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        system = [block(2000)]
        first = [block(10, "opening", **MARK)]
        many = [block(10, "opening"), *(block(10, f"n{n}") for n in range(25)), block(10, "end", **MARK)]
        found = explained(tmp_path, capsys, [call(0, system, *first), call(60, system, *many)])
        assert lost(found, "beyond the lookback (20)") > 1900
        few = [block(10, "opening"), *(block(10, f"n{n}") for n in range(5)), block(10, "end", **MARK)]
        found = explained(tmp_path, capsys, [call(0, system, *first), call(60, system, *few)])
        assert lost(found, "beyond the lookback") == 0

    def test_too_many_marks_are_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        marked = [block(2000, f"m{n}", **MARK) for n in range(5)]
        found = explained(tmp_path, capsys, [call(0, marked), call(60, marked)])
        assert lost(found, "refused by the provider") > 9000

    def test_a_cache_that_needs_no_marks_has_minimum_step_and_life(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = explained(tmp_path, capsys, [call(0, [block(300)]), call(60, [block(300)])], "openai")
        assert lost(found, "below the provider's minimum (1024)") > 200
        found = explained(tmp_path, capsys, [call(0, [block(2000)]), call(301, [block(2000)])], "openai")
        assert lost(found, "expired") > 1900


@pytest.mark.parametrize("provider", PROVIDER_NAMES)
def test_causes_add_up(provider: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(as_openai(generate(["chat", "agent"], 4, 0.02, seed=3))))
    assert main(["explain", str(path), "--provider", provider, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    total = sum(cause["tokens"] for cause in found["causes"]) + found["predicted_tokens"]
    assert total == pytest.approx(found["prompt_tokens"], abs=len(found["causes"]) + 1)
    assert all(cause["tokens"] >= 0 for cause in found["causes"])
    assert main(["providers", str(path), "--provider", provider, "--all", "--json"]) == 0
    bills = json.loads(capsys.readouterr().out)["bills"]
    (as_is,) = [bill for bill in bills if bill["marking"] in {"no marks", "none needed"}] or [None]
    if as_is is not None:
        assert found["predicted_tokens"] == as_is["read"]


def test_the_names_are_those_of_the_rules() -> None:
    assert set(PROVIDER_NAMES) == set(Catalogue().rules)


def test_prompts_that_are_no_text_cannot_be_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n')
    assert main(["explain", str(path), "--provider", "anthropic"]) == 1
    assert "needs prompts as text" in capsys.readouterr().err
