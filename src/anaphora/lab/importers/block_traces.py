"""Traces that name blocks instead of showing text: Mooncake, Qwen-Bailian, WEKA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.lab.importers.fields import FieldError, Fields
from anaphora.lab.record import Blocks, LoggedRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anaphora.lab.importers.source import Document

MOONCAKE_BLOCK = 512
BAILIAN_BLOCK = 16


def parse_mooncake(document: Document) -> LoggedRequest:
    """{timestamp (ms), input_length, output_length, hash_ids}: an id per 512 tokens names the prefix up to there."""
    record = Fields(document.value)
    milliseconds = record.number("timestamp")
    delay = record.number("delay")
    return LoggedRequest(
        document.line,
        time_s=None if milliseconds is None and delay is None else ((milliseconds or 0) + (delay or 0)) / 1000,
        session=record.label("session_id"),
        blocks=_blocks(record, MOONCAKE_BLOCK, is_chained=True),
        num_prompt_tokens=record.need_count("input_length"),
        num_output_tokens=record.count("output_length"),
    )


def parse_bailian(document: Document) -> LoggedRequest:
    """{chat_id, parent_chat_id, timestamp (s), input_length, output_length, hash_ids}: an id per 16 tokens."""
    record = Fields(document.value)
    parent = record.values.get("parent_chat_id")
    return LoggedRequest(
        document.line,
        time_s=record.number("timestamp"),
        request_id=record.label("chat_id"),
        parent=None if parent is None or str(parent) == "-1" else record.label("parent_chat_id"),
        blocks=_blocks(record, BAILIAN_BLOCK, is_chained=False),
        num_prompt_tokens=record.need_count("input_length"),
        num_output_tokens=record.count("output_length"),
    )


def parse_weka(document: Document) -> Iterator[LoggedRequest]:
    """A session {id, block_size, requests: [{t, in, out, hash_ids}]}: ids mean something within the session only."""
    session = Fields(document.value)
    name = session.label("id") or f"line {document.line}"
    block_size = session.count("block_size") or 64
    for number, item in enumerate(session.items("requests")):
        record = Fields(item, f"requests[{number}]")
        length = record.count("in")
        if length is None:
            length = record.need_count("input_length")
        blocks = _blocks(record, block_size, is_chained=False, scope=name, length=length)
        request = LoggedRequest(
            document.line,
            time_s=record.number("t"),
            request_id=f"{name}/{number}",
            model=record.text("model"),
            session=name,
            blocks=blocks,
            num_prompt_tokens=length,
            num_output_tokens=record.count("out"),
        )
        duration = record.number("api_time")
        if duration is not None and request.time_s is not None:
            request.end_s = request.time_s + duration
        yield request


def _blocks(record: Fields, block_size: int, *, is_chained: bool, scope: str = "", length: int | None = None) -> Blocks:
    ids = record.ids("hash_ids")
    length = record.need_count("input_length") if length is None else length
    if len(ids) not in {length // block_size, -(-length // block_size)}:
        raise FieldError(
            f"hash_ids: expected one id for each {block_size} of the prompt's {length} tokens, got {len(ids)}"
        )
    return Blocks(ids, block_size, is_chained, scope)


def looks_mooncake(value: object) -> bool:
    """A line of Mooncake's."""
    return isinstance(value, dict) and "hash_ids" in value and "input_length" in value and "chat_id" not in value


def looks_bailian(value: object) -> bool:
    """A line of Qwen-Bailian's."""
    return isinstance(value, dict) and "hash_ids" in value and "chat_id" in value


def looks_weka(value: object) -> bool:
    """A session of WEKA's."""
    return isinstance(value, dict) and "requests" in value and "block_size" in value
