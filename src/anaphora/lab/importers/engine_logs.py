"""Request logs of vLLM (`--enable-log-requests`) and SGLang (`--log-requests`)."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import TYPE_CHECKING

from anaphora.lab.importers.fields import FieldError, parse_time
from anaphora.lab.record import LoggedRequest, Part
from anaphora.tokens import pack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anaphora.lab.importers.source import ReadReport

_STAMP = re.compile(r"(?:(\d{4})-)?(\d{2})-(\d{2}) (\d{2}:\d{2}:\d{2})")
_VLLM = re.compile(r"Received request (\S+?): prompt: ")
_LITERAL = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|None)"""
_VLLM_PROMPT = re.compile(_LITERAL)
_VLLM_IDS = re.compile(r"prompt_token_ids: (\[[\d, ]*\]|None)")
_VLLM_ADAPTER = re.compile(r"lora_request: (None|LoRARequest\((.*?)\))")
_ADAPTER_NAME = re.compile(r"lora_name='((?:[^'\\]|\\.)*)'")
_SGLANG = re.compile(r"Receive: (?:rid=(\S+?), )?obj=\w+\(")
_SGLANG_FIELD = {
    "rid": re.compile(r"\brid='([^']*)'"),
    "text": re.compile(r"\btext=" + _LITERAL),
    "input_ids": re.compile(r"\binput_ids=(\[[\d, ]*\]|None)"),
    "lora_path": re.compile(r"\blora_path='([^']*)'"),
    "extra_key": re.compile(r"\bextra_key='([^']*)'"),
}


def read_vllm(numbered: Iterator[tuple[int, str]], report: ReadReport) -> Iterator[LoggedRequest]:
    """`Received request ID: prompt: 'REPR', params: ..., prompt_token_ids: [..]`; other lines are left out."""
    for number, line in numbered:
        head = _VLLM.search(line)
        if head is None:
            report.skipped["other lines"] += 1
            continue
        try:
            prompt = _VLLM_PROMPT.match(line, head.end())
            if prompt is None:
                raise FieldError("prompt: expected a quoted string, or the line is cut off")
            rest = line[prompt.end() :]
            ids = _VLLM_IDS.search(rest)
            adapter = _VLLM_ADAPTER.search(rest)
            name = _ADAPTER_NAME.search(adapter[2]) if adapter and adapter[2] else None
            yield _request(
                number,
                line,
                head[1],
                text=_literal(prompt[1]),
                ids=ids[1] if ids else None,
                adapter=name[1] if name else None,
                provider="vllm",
            )
        except FieldError as error:
            report.note_bad(number, str(error))


def read_sglang(numbered: Iterator[tuple[int, str]], report: ReadReport) -> Iterator[LoggedRequest]:
    """`Receive: obj=GenerateReqInput(rid='..', text='..', input_ids=[..], ...)`; other lines are left out."""
    for number, line in numbered:
        head = _SGLANG.search(line)
        if head is None:
            report.skipped["other lines"] += 1
            continue
        found = {name: pattern.search(line, head.end()) for name, pattern in _SGLANG_FIELD.items()}
        try:
            text, ids, rid = found["text"], found["input_ids"], found["rid"]
            request = _request(
                number,
                line,
                rid[1] if rid else head[1],
                text=_literal(text[1]) if text else None,
                ids=ids[1] if ids else None,
                adapter=found["lora_path"][1] if found["lora_path"] else None,
                provider="sglang",
            )
            request.salt = found["extra_key"][1] or None if found["extra_key"] else None
            yield request
        except FieldError as error:
            report.note_bad(number, str(error))


def _request(
    number: int,
    line: str,
    request_id: str | None,
    *,
    text: str | None,
    ids: str | None,
    adapter: str | None,
    provider: str,
) -> LoggedRequest:
    packed = None
    if ids is not None and ids != "None":
        try:
            packed = pack(json.loads(ids))
        except (ValueError, TypeError, RecursionError):
            raise FieldError("prompt_token_ids: expected token ids that fit int32") from None
    if text is None and not packed:
        raise FieldError("prompt: expected text or token ids; the log has neither")
    return LoggedRequest(
        number,
        time_s=_time_s(line),
        request_id=request_id,
        provider=provider,
        adapter=adapter,
        parts=(Part("prompt", "prompt", "", text),) if text else (),
        token_ids=packed or None,
        num_prompt_tokens=len(packed) // 4 if packed else None,
    )


def _literal(spelled: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that mean nothing
            value = ast.literal_eval(spelled)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise FieldError("prompt: expected a quoted string") from None
    return value if isinstance(value, str) else None


def _time_s(line: str) -> float | None:
    """The line's time. vLLM writes no year: 1970 stands in, so that differences are right within a year."""
    stamp = _STAMP.search(line)
    return parse_time(f"{stamp[1] or 1970}-{stamp[2]}-{stamp[3]}T{stamp[4]}") if stamp else None


def looks_vllm(line: str) -> bool:
    """A line of vLLM's request log."""
    return _VLLM.search(line) is not None or "Added request " in line


def looks_sglang(line: str) -> bool:
    """A line of SGLang's request log."""
    return _SGLANG.search(line) is not None
