"""What should be equal and is not: times, identifiers, white space, order. How to take it out, and how to tell it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anaphora.lab.record import Part

Volatile = Literal["timestamp", "uuid", "identifier", "whitespace", "key order", "tool order"]
VOLATILES: tuple[Volatile, ...] = ("timestamp", "uuid", "identifier", "key order", "tool order", "whitespace")

FIXES: dict[str, str] = {
    "timestamp": "move the time behind what is stable, or round it to the day",
    "uuid": "move the identifier behind what is stable, or leave it out of the prompt",
    "identifier": "strip the changing identifier (a billing or trace header, say), or move it to the end",
    "key order": "write JSON with sorted keys",
    "tool order": "send tools in a fixed order, sorted by name",
    "whitespace": "build prompts from one template; let nothing strip or indent them on the way",
    "tools": "keep the list of tools fixed for a conversation; load further ones behind the messages",
    "system": "keep the system prompt fixed for a conversation; put what changes into the last message",
    "hoisted system": "leave a later system message where it stands instead of moving it to the front",
    "history": "append to the history; do not edit or drop earlier messages of a conversation",
}

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:tember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)"
)
_PATTERNS: dict[str, re.Pattern[str]] = {
    "timestamp": re.compile(
        r"\b\d{4}[-/]\d\d[-/]\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d))?)?"
        r"|\b\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?(?: ?[AaPp][Mm])?\b"
        rf"|\b(?:\w+day,? )?(?:{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}|\d{{1,2}} {_MONTH} \d{{4}})\b"
        r"|\b1[5-9]\d{8}(?:\.\d+|\d{3}|\d{6}|\d{9})?\b"
    ),
    "uuid": re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"),
    "identifier": re.compile(
        r"(?<=[=:_-])(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{4,}\b"
        r"|\b(?=[0-9a-fA-F]*\d)(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{8,}\b"
        r"|(?<=[_-])(?=\w*\d)(?=\w*[A-Za-z])\w{12,}\b"
    ),
}
_SPACE = re.compile(r"\s+")


def without(parts: Sequence[Part], kinds: Iterable[Volatile]) -> tuple[Part, ...]:
    """The prompt with these kinds of change taken out: what two prompts then share, they could have shared."""
    wanted = tuple(kind for kind in VOLATILES if kind in set(kinds))
    changed = [replace(part, text=_clean(part.text, wanted)) for part in parts]
    if "tool order" in wanted:
        tools = sorted((part for part in changed if part.section == "tools"), key=lambda part: part.text)
        changed = tools + [part for part in changed if part.section != "tools"]
    return tuple(changed)


@lru_cache(maxsize=1 << 16)
def _clean(text: str, kinds: tuple[Volatile, ...]) -> str:
    if "key order" in kinds:
        text = canonical_json(text)
    for kind, pattern in _PATTERNS.items():
        if kind in kinds:
            text = pattern.sub("0", text)
    return _SPACE.sub(" ", text).strip() if "whitespace" in kinds else text


def canonical_json(text: str) -> str:
    """JSON with its objects' keys sorted, and `required`, whose order means nothing; other text as it is. Arrays whose
    order a model may read (enum, prefixItems, examples) stay as they are."""
    if text[:1] not in {"{", "["}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return json.dumps(_ordered(value), ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _ordered(value: object) -> object:
    if isinstance(value, dict):
        return {name: _as_set(item) if name == "required" else _ordered(item) for name, item in value.items()}
    return [_ordered(item) for item in value] if isinstance(value, list) else value


def _as_set(value: object) -> object:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return sorted(value)
    return _ordered(value)


def common_length(one: str, other: str) -> int:
    """How many leading characters two texts share. Cost: a few comparisons at memory speed."""
    if one == other:
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Difference(NamedTuple):
    """Where two prompts part. kind: a Volatile, or "text". path, section: in the first of them. offset: in characters,
    of the time or identifier where it is one."""

    kind: str
    path: str
    section: str
    offset: int


def tell(one: Sequence[Part], other: Sequence[Part]) -> Difference | None:
    """The first difference of two prompts; None if one is the beginning of the other."""
    for number, (part, its) in enumerate(zip(one, other, strict=False)):
        if part.text == its.text and part.section == its.section:
            continue
        offset = common_length(part.text, its.text)
        if part.section == its.section == "tools":
            tools, theirs = _tools(one), _tools(other)
            if sorted(tools) == sorted(theirs) and tools != theirs:
                return Difference("tool order", part.path, part.section, offset)
            if sorted(map(canonical_json, tools)) == sorted(map(canonical_json, theirs)):
                is_same_tool = canonical_json(part.text) == canonical_json(its.text)
                return Difference("key order" if is_same_tool else "tool order", part.path, part.section, offset)
        kind, start = _kind(one[number].text, its.text, offset)
        return Difference(kind, part.path, part.section, start)
    return None


def _tools(parts: Sequence[Part]) -> list[str]:
    return [part.text for part in parts if part.section == "tools"]


def _kind(text: str, its: str, offset: int) -> tuple[str, int]:
    if canonical_json(text) == canonical_json(its):
        return "key order", offset
    if _SPACE.sub("", text) == _SPACE.sub("", its):
        return "whitespace", offset
    for kind, pattern in _PATTERNS.items():
        start = _covering(pattern, text, offset)
        if start is not None and _covering(pattern, its, offset) is not None:
            return kind, start
    if text[offset : offset + 1].isspace() or its[offset : offset + 1].isspace():
        rest, its_rest = text[offset:].lstrip(), its[offset:].lstrip()
        if rest[:32] == its_rest[:32]:
            return "whitespace", offset
    return "text", offset


def _covering(pattern: re.Pattern[str], text: str, offset: int) -> int | None:
    """Where the match begins that an offset lies in, or at the end of."""
    found = pattern.finditer(text, max(0, offset - 64), offset + 64)
    return next((m.start() for m in found if m.start() <= offset <= m.end()), None)
