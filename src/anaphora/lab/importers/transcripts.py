"""Transcripts of coding agents: Claude Code and Codex. Their system prompts and tools are not in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.lab.importers.bodies import anthropic_parts
from anaphora.lab.importers.fields import Fields
from anaphora.lab.importers.usage import read_usage
from anaphora.lab.record import LoggedRequest, Part, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from anaphora.lab.importers.source import Document, ReadReport


class ClaudeCode:
    """Lines of Claude Code. 2 to 10 assistant lines share one request and repeat its usage; lines are written twice;
    errors are written as messages of a model named <synthetic>."""

    def __init__(self, report: ReadReport) -> None:
        self._report = report
        self._requests: set[str] = set()
        self._seen: set[str] = set()
        self._parts: dict[str, list[Part]] = {}

    def parse(self, document: Document) -> Iterator[LoggedRequest]:
        """The request that a line stands for, if it is the first line of one."""
        line = Fields(document.value)
        kind = line.text("type")
        if kind not in {"user", "assistant"}:
            self._report.skipped[str(kind)] += 1
            return
        uuid = line.label("uuid")
        if uuid is not None:
            if uuid in self._seen:
                self._report.num_duplicates += 1
                return
            self._seen.add(uuid)
        message = line.child("message") or Fields({}, "message")
        if message.text("model") == "<synthetic>":
            self._report.skipped["synthetic"] += 1
            return
        session = f"{line.label('sessionId')}/side" if line.values.get("isSidechain") else line.label("sessionId")
        history = self._parts.setdefault(str(session), [])
        usage = message.child("usage")
        if kind == "assistant" and usage is not None:
            call = line.label("requestId") or message.label("id") or f"line {document.line}"
            if call in self._requests:
                self._report.skipped["further lines of a request"] += 1
            else:
                self._requests.add(call)
                read = read_usage(usage)
                yield LoggedRequest(
                    document.line,
                    time_s=line.time_s("timestamp"),
                    request_id=call,
                    model=message.text("model"),
                    provider="anthropic",
                    session=session,
                    parent=line.label("parentUuid"),
                    parts=tuple(history),
                    num_prompt_tokens=read.prompt if read else None,
                    num_output_tokens=read.output if read else None,
                    usage=read,
                )
        role = message.text("role") or kind
        content = message.values.get("content")
        if content:
            history += _renamed(
                anthropic_parts(Fields({"messages": [{"role": role, "content": content}]})), len(history)
            )


def _renamed(parts: Iterable[Part], first: int) -> list[Part]:
    """Parts of one message, with the place that they have in the conversation."""
    return [
        Part(f"transcript[{first + n}]", "messages", part.role, part.text, part.kind) for n, part in enumerate(parts)
    ]


class Codex:
    """A rollout of Codex: usage comes as snapshots, which repeat; one with the same running total is the same."""

    def __init__(self, report: ReadReport) -> None:
        self._report = report
        self._totals: set[tuple[int | None, ...]] = set()
        self._session: str | None = None
        self._model: str | None = None

    def parse(self, document: Document) -> Iterator[LoggedRequest]:
        """The request that a line stands for, if it stands for one."""
        line = Fields(document.value)
        payload = line.child("payload") or line
        kind = line.text("type")
        if kind == "session_meta":
            self._session = payload.label("id")
        if kind == "turn_context":
            self._model = payload.text("model")
        if payload.text("type") != "token_count" or payload.values.get("info") is None:
            self._report.skipped[str(payload.text("type") or kind)] += 1
            return
        info = payload.child("info") or Fields({})
        total = info.child("total_token_usage") or Fields({}, "total_token_usage")
        names = ("input_tokens", "cached_input_tokens", "output_tokens", "total_tokens")
        key = tuple(total.count(name) for name in names)
        if key in self._totals:
            self._report.num_duplicates += 1
            return
        self._totals.add(key)
        last = info.child("last_token_usage") or total
        usage = Usage(
            last.need_count("input_tokens"), last.count("cached_input_tokens"), output=last.count("output_tokens")
        )
        yield LoggedRequest(
            document.line,
            time_s=line.time_s("timestamp"),
            model=self._model,
            provider="openai",
            session=self._session,
            num_prompt_tokens=usage.prompt,
            num_output_tokens=usage.output,
            usage=usage,
        )


def looks_claude_code(value: object) -> bool:
    """A line of Claude Code."""
    return isinstance(value, dict) and "sessionId" in value and ("uuid" in value or "leafUuid" in value)


def looks_codex(value: object) -> bool:
    """A line of a Codex rollout."""
    if not isinstance(value, dict):
        return False
    kinds = {"session_meta", "event_msg", "response_item", "turn_context"}
    return str(value.get("type")) in kinds and "payload" in value
