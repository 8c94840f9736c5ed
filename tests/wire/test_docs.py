"""The examples in docs/events.md print what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anaphora.cache.events import BlockStored
from anaphora.identity import DEFAULT_NAMESPACE
from anaphora.tokens import pack

PAGE = Path(__file__).parents[2] / "docs" / "events.md"


def example(title: str) -> list[str]:
    """The code blocks of a section."""
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)


def test_the_example_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = example("One event in both forms")
    exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == output


def test_the_example_of_a_subscriber_follows_a_publisher(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zmq")
    from anaphora.wire.publisher import EventPublisher

    (code,) = example("Following a publisher")
    with EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher:
        publisher.publish([BlockStored((b"a" * 8, b"b" * 8), None, pack([1, 2]), 1, DEFAULT_NAMESPACE)])
        for named, actual in (("5557", publisher.port), ("5558", publisher.replay_port)):
            code = code.replace(f"tcp://127.0.0.1:{named}", f"tcp://127.0.0.1:{actual}")
        exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == "2 blocks can be found\n"
