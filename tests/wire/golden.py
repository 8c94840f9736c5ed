"""vLLM's golden KV events: a selection beside the tests, and the complete files where a checkout has them beside it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

STORED = Path(__file__).parents[1] / "golden" / "vllm"
COMPLETE = Path(__file__).parents[3] / "shared" / "golden" / "vllm"

VERSIONS = ("0.26", "0.32")
SOURCES = [pytest.param(source, id=name) for name, source in (("stored", STORED), ("complete", COMPLETE))]


@cache
def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        pytest.skip(f"no complete golden events at {path.parent}: the stored selection covers the same ground")
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def events(source: Path, version: str) -> dict[str, Any]:
    return _load(source / f"kv_events_v{version}.0.json")


def live(source: Path) -> dict[str, Any]:
    return _load(source / "kv_events_live_server_v0.32.0.json")


def parts(frames_hex: list[str]) -> list[bytes]:
    return [bytes.fromhex(part) for part in frames_hex]
