"""Whatever bytes a file holds, reading it ends, and what was wrong is counted."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.lab.importers import FORMATS, ReadReport, detect_in, read_records
from anaphora.lab.importers.prometheus import read_metrics
from anaphora.lab.importers.source import lines

from .samples import SAMPLES

NAMES = [name for name in FORMATS if name != "prometheus"]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "content", "role", "usage", "id", "value", "key", "ttl"]), inner
        )
    ),
    max_leaves=6,
)


def read(data: bytes, name: str) -> ReadReport:
    report = ReadReport()
    stream = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]
    if name == "prometheus":
        read_metrics(lines(stream, report), report)
    else:
        for _ in read_records(stream, FORMATS[name], report):
            pass
    return report


def _spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] + [spot for key, child in children for spot in _spots(child, (*path, key))]


def _replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    if not path:
        return by
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replaced(value[path[0]], path[1:], by)
    return copy


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_at_worst_bad_lines(name: str, data: bytes) -> None:
    detect_in(data)
    read(data, name)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 3000), flip=st.integers(0, 3000), byte=st.integers(0, 255))
def test_a_damaged_sample_is_at_worst_bad_lines(name: str, cut: int, flip: int, byte: int) -> None:
    sample = bytearray(SAMPLES[name])
    sample[flip % len(sample)] = byte
    damaged = bytes(sample[: cut % len(sample) + 1])
    detect_in(damaged)
    read(damaged, name)


@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name].layout == "json"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_field_may_hold_anything(name: str, data: st.DataObject) -> None:
    text = SAMPLES[name].decode()
    documents = json.loads(text) if name == "sharegpt" else [json.loads(text)] if name == "otlp" else None
    documents = documents or [json.loads(line) for line in text.splitlines()]
    document = data.draw(st.sampled_from(documents))
    changed = _replaced(document, data.draw(st.sampled_from(_spots(document))), data.draw(VALUES))
    detect_in(json.dumps(changed).encode())
    report = read(json.dumps(changed).encode(), name)
    assert all(isinstance(reason, str) and line >= 1 for line, reason in report.bad)


def test_deep_nesting_is_a_bad_line() -> None:
    report = read(b'{"messages": ' + b"[" * 100_000 + b"\n" + SAMPLES["openai"], "openai")
    assert report.bad[0] == (1, "no JSON")
    assert report.num_records == 3
