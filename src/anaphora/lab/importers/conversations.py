"""ShareGPT: conversations without times, each assistant turn of which is a request to produce it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.lab.importers.fields import FieldError, Fields
from anaphora.lab.record import LoggedRequest, Part

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anaphora.lab.importers.source import Document

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


def parse_sharegpt(document: Document) -> Iterator[LoggedRequest]:
    """{id, conversations: [{from, value}]}, or `items`. A last question without an answer is a request too."""
    record = Fields(document.value)
    session = record.label("id") or f"line {document.line}"
    name = "conversations" if record.has("conversations") else "items"
    parts: list[Part] = []
    has_question = False
    is_leading = True
    for number, item in enumerate(record.items(name)):
        turn = Fields(item, f"{name}[{number}]")
        role = _ROLES.get(turn.text("from") or "")
        if role is None:
            raise FieldError(f"{turn.path}.from: expected one of {', '.join(_ROLES)}")
        text = turn.text("value")
        if text is None:
            raise turn.wrong("value", "a string")
        is_leading = is_leading and role == "system"
        if role == "assistant" and has_question:
            yield _request(document.line, session, parts)
        has_question = role != "assistant"
        parts.append(Part(f"{turn.path}.value", "system" if is_leading else "messages", role, text))
    if has_question and not is_leading:
        yield _request(document.line, session, parts)


def _request(line: int, session: str, parts: list[Part]) -> LoggedRequest:
    return LoggedRequest(line, session=session, parts=tuple(parts))


def looks_sharegpt(value: object) -> bool:
    """A conversation of ShareGPT's."""
    if not isinstance(value, dict):
        return False
    turns = value.get("conversations", value.get("items"))
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and "from" in turns[0]
