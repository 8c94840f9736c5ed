"""Every format that can be read, how it is told from the others, and the one way to read a log."""

from __future__ import annotations

import csv
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from anaphora.lab.importers import (
    arrivals,
    block_traces,
    conversations,
    engine_logs,
    gateway,
    kv_events,
    observability,
    openai,
    prometheus,
    transcripts,
)
from anaphora.lab.importers.fields import FieldError
from anaphora.lab.importers.source import Document, LogError, ReadReport, documents, lines, open_log, rows
from anaphora.lab.record import LoggedRequest, UsageError

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

Parsed = LoggedRequest | None
Layout = Literal["json", "csv", "lines"]
_SAMPLE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Format:
    """How one format is recognised and read.

    layout: "json" documents, "csv" rows or plain "lines"; `also_csv`: its documents come as CSV rows too.
    looks: whether the first document (or the first lines, one by one) is of this format.
    parse: a document's requests. new_parser: the same for formats that remember earlier documents.
    read: for plain lines, the requests of a file.
    """

    name: str
    title: str
    layout: Layout
    looks: Callable[[Any], bool]
    parse: Callable[[Document], Parsed | Iterator[Any]] | None = None
    new_parser: Callable[[ReadReport], Callable[[Document], Iterator[Any]]] | None = None
    read: Callable[[Iterator[tuple[int, str]], ReadReport], Iterator[LoggedRequest]] | None = None
    also_csv: bool = False
    has_requests: bool = True


FORMATS = {
    each.name: each
    for each in (
        Format("mooncake", "Mooncake trace", "json", block_traces.looks_mooncake, block_traces.parse_mooncake),
        Format("bailian", "Qwen-Bailian trace", "json", block_traces.looks_bailian, block_traces.parse_bailian),
        Format("weka", "WEKA agentic trace", "json", block_traces.looks_weka, block_traces.parse_weka),
        Format("openai-batch", "OpenAI batch", "json", openai.looks_batch, openai.parse_batch),
        Format(
            "litellm", "LiteLLM spend logs", "json", gateway.looks_spend_log, gateway.parse_spend_log, also_csv=True
        ),
        Format("gateway", "gateway CSV", "csv", gateway.looks_gateway_row, gateway.parse_gateway_row),
        Format(
            "claude-code",
            "Claude Code transcript",
            "json",
            transcripts.looks_claude_code,
            new_parser=lambda report: transcripts.ClaudeCode(report).parse,
        ),
        Format(
            "codex",
            "Codex rollout",
            "json",
            transcripts.looks_codex,
            new_parser=lambda report: transcripts.Codex(report).parse,
        ),
        Format("langfuse", "Langfuse export", "json", observability.looks_langfuse, observability.parse_langfuse),
        Format("otlp", "OpenTelemetry GenAI spans", "json", observability.looks_otlp, observability.parse_otlp),
        Format(
            "sharegpt", "ShareGPT conversations", "json", conversations.looks_sharegpt, conversations.parse_sharegpt
        ),
        Format(
            "kv-events",
            "KV-event capture",
            "json",
            kv_events.looks_kv_events,
            new_parser=lambda report: kv_events.KVEvents().parse,
            has_requests=False,
        ),
        Format("anthropic", "Anthropic bodies", "json", openai.looks_anthropic, openai.parse_anthropic),
        Format("openai", "OpenAI request log", "json", openai.looks_openai, openai.parse_openai),
        Format("burstgpt", "BurstGPT CSV", "csv", arrivals.looks_burstgpt, arrivals.parse_burstgpt),
        Format("azure", "Azure LLM trace CSV", "csv", arrivals.looks_azure, arrivals.parse_azure),
        Format("vllm", "vLLM request log", "lines", engine_logs.looks_vllm, read=engine_logs.read_vllm),
        Format("sglang", "SGLang request log", "lines", engine_logs.looks_sglang, read=engine_logs.read_sglang),
        Format("prometheus", "Prometheus text", "lines", prometheus.looks_prometheus, has_requests=False),
    )
}


@dataclass(slots=True)
class Log:
    """A log that is about to be read. `report` fills while `requests` is iterated."""

    path: Path
    format: Format
    report: ReadReport = field(default_factory=ReadReport)

    def requests(self) -> Iterator[LoggedRequest]:
        """The requests, in the file's order, as a stream; a bad line is counted in the report and left out.

        Raises LogError: the file cannot be read, or its format has no requests.
        """
        if not self.format.has_requests:
            raise LogError(f"{self.path}: {self.format.title} has no requests in it")
        for record in self.records():
            if isinstance(record, LoggedRequest):
                yield record

    def records(self) -> Iterator[Any]:
        """Everything that the format has, requests or not. Raises LogError: the file cannot be read."""
        with open_log(self.path) as stream:
            yield from read_records(stream, self.format, self.report)


def open_requests(path: Path, name: str | None = None) -> Log:
    """A log by its path, its format detected or named.

    Raises LogError: it cannot be opened, `name` is no format, or the format is none that is known.
    """
    if name is None:
        found = detect(path)
    elif name in FORMATS:
        found = FORMATS[name]
    else:
        raise LogError(f"format: expected one of {', '.join(FORMATS)}, got {name!r}")
    return Log(path, found, ReadReport(found.name))


def detect(path: Path) -> Format:
    """The format of a file, by its first document or lines. Raises LogError where none fits."""
    with open_log(path) as stream:
        sample = stream.read(_SAMPLE_BYTES)
    found = detect_in(sample)
    if found is None:
        raise LogError(f"{path}: its format is none that is known; name it with --format: {', '.join(FORMATS)}")
    return found


def detect_in(sample: bytes) -> Format | None:
    """The format of a file that begins with these bytes."""
    text = sample.decode("utf-8-sig", "replace")
    head = [line for line in text.splitlines()[:200] if line.strip()]
    if not head:
        return None
    for value in _first_documents(text, head):
        for each in FORMATS.values():
            if each.layout == "json" and each.looks(value):
                return each
    header = next(csv.reader([head[0]]), [])
    columns = dict.fromkeys((name.strip() for name in header), "")
    for each in FORMATS.values():
        if (each.layout == "csv" or each.also_csv) and each.looks(columns):
            return each
    for each in FORMATS.values():
        if each.layout == "lines" and any(each.looks(line) for line in head):
            return each
    return None


def _first_documents(text: str, head: Iterable[str]) -> Iterator[object]:
    """A few JSON values that the file begins with; the file may be cut anywhere."""
    start = text.lstrip()
    if start[:1] in {"[", "{"}:
        with suppress(ValueError, RecursionError):
            yield json.JSONDecoder().raw_decode(start[1:].lstrip() if start[0] == "[" else start)[0]
    for line in list(head)[:20]:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            continue


def read_records(stream: io.BufferedReader, form: Format, report: ReadReport) -> Iterator[Any]:
    """Records of a stream in one format, duplicates by request id left out."""
    seen: set[str] = set()
    for record in _records(stream, form, report):
        name = getattr(record, "request_id", None)
        if name is not None:
            if name in seen:
                report.num_duplicates += 1
                continue
            seen.add(name)
        report.num_records += 1
        yield record


def _records(stream: io.BufferedReader, form: Format, report: ReadReport) -> Iterator[Any]:
    report.format = form.name
    if form.layout == "lines":
        if form.read is None:
            raise LogError(f"{form.title} has no requests in it")
        yield from form.read(lines(stream, report), report)
        return
    parse = form.new_parser(report) if form.new_parser else form.parse
    assert parse is not None, "a format of documents has a parser"
    for document in _documents(stream, form, report):
        try:
            parsed = parse(document)
            if parsed is None:
                report.skipped["not a model's request"] += 1
            elif isinstance(parsed, LoggedRequest):
                yield parsed
            else:
                yield from parsed
        except (FieldError, UsageError) as error:
            report.note_bad(document.line, str(error))
        except RecursionError:
            report.note_bad(document.line, "nested too deeply")


def _documents(stream: io.BufferedReader, form: Format, report: ReadReport) -> Iterator[Document]:
    is_csv = form.layout == "csv"
    if form.also_csv:
        is_csv = stream.peek(64).lstrip()[:1] not in {b"{", b"["}
    if is_csv:
        for number, row in rows(stream, report):
            yield Document(number, row)
    else:
        yield from documents(stream, report)
