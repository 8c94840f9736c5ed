"""Replicas as people write them: a URL and its options, on the command line or a line each in a file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from anaphora.router.replica import ReplicaSpec

if TYPE_CHECKING:
    from pathlib import Path

MAX_RANKS = 1024


def read_replicas(path: Path) -> list[ReplicaSpec]:
    """Read a file. Raises OSError, ValueError."""
    return parse_replicas(path.read_text(encoding="utf-8"))


def parse_replicas(text: str) -> list[ReplicaSpec]:
    """Read one replica a line, its URL and then its options, as `parse_replica` has them; # begins a comment.

    Raises ValueError with the line's number.
    """
    specs: list[ReplicaSpec] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            specs += parse_replica(words)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return specs


def parse_replica(words: list[str]) -> list[ReplicaSpec]:
    """Read `URL [kv-events=ENDPOINT] [kv-replay=ENDPOINT] [topic=TEXT] [ranks=N] [label:NAME=TEXT ...]`.

    Returns one replica, or one for each of its N data-parallel ranks. Raises ValueError.
    """
    url, *rest = words
    options: dict[str, str | None] = {}
    labels: list[tuple[str, str]] = []
    num_ranks = 0
    for word in rest:
        name, equals, value = word.partition("=")
        if equals and name.startswith("label:"):
            labels.append((name.removeprefix("label:"), value))
        elif equals and name in {"kv-events", "kv-replay", "topic"}:
            options[name.replace("-", "_")] = value
        elif equals and name == "ranks":
            if not value.isdecimal() or not 1 <= int(value) <= MAX_RANKS:
                raise ValueError(f"ranks: expected 1 to {MAX_RANKS}, got {value[:100]!r}")
            num_ranks = int(value)
        else:
            raise ValueError(f"expected kv-events=, kv-replay=, topic=, ranks= or label:NAME=, got {word[:100]!r}")
    spec = replace(ReplicaSpec.of(url, **options), labels=tuple(labels))
    return spec.of_ranks(num_ranks) if num_ranks else [spec]
