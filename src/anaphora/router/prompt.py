"""The prompt of a request, as tokens: exact with the model's tokenizer, else an estimate from the text."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from anaphora.model.chat_template import ChatTemplateError
from anaphora.tokens import TOKEN_BYTES, pack

if TYPE_CHECKING:
    from collections.abc import Callable

    from anaphora.model import ChatTemplate, Tokenizer

_MAX_SEGMENTS_BYTES = 64 * 2**20
_PROBES = (("x", "x"), ("x ", " x"), ("\n", "\n"), ("x\n\n", "\n\nx"), ("x.", "1"))


class PromptBody(msgspec.Struct):
    """What the router reads of a body, OpenAI's or Anthropic's; the rest is the replica's business."""

    model: Any = None
    messages: Any = None
    prompt: Any = None
    input: Any = None
    instructions: Any = None
    system: Any = None
    tools: Any = None
    cache_salt: Any = None
    stream: Any = None
    chat_template_kwargs: Any = None


_decoder = msgspec.json.Decoder(PromptBody)
_encoder = msgspec.json.Encoder()


def read_body(body: bytes) -> PromptBody | None:
    """Return what the router needs of a body, None for one that is no JSON object: the replica will say so."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as packed int32 ids. is_exact: whether they are the engine's ids, or stand for about four bytes each."""

    tokens: bytes
    is_exact: bool

    @property
    def num_tokens(self) -> int:
        """Ids in the prompt."""
        return len(self.tokens) // TOKEN_BYTES


class PromptSource(Protocol):
    """Turns a body into a prompt. Raises nothing: what cannot be read is estimated or empty.

    is_slow: whether a long prompt takes milliseconds.
    """

    is_slow: bool

    def prompt(self, body: PromptBody) -> Prompt:
        """Return the body's prompt. May take milliseconds, and may be called from any thread."""
        ...


class TextEstimate:
    """Four bytes of text are one id: prompts that begin with the same text begin with the same ids."""

    is_slow = False

    def prompt(self, body: PromptBody) -> Prompt:
        """Return the estimate; token ids in the body are taken as they are."""
        ids = _given_ids(body.prompt)
        if ids is not None:
            return Prompt(ids, is_exact=True)
        text = _text(body)
        return Prompt(text + bytes(-len(text) % TOKEN_BYTES), is_exact=False)


class ModelPrompts:
    """The model's own tokenizer and chat template.

    The text is cut at special tokens, before which no tokenizer looks back, and each piece is remembered: of a growing
    conversation only the new turns are tokenised. Prompts that the template refuses, that hold images, or that do not
    come within `budget_s`, are estimated.
    """

    is_slow = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        budget_s: float = 0.2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._budget_s = budget_s
        self._clock = clock
        self._estimate = TextEstimate()
        self._pieces: OrderedDict[str, bytes] = OrderedDict()
        self._pieces_bytes = 0
        self._cut = _cutter(tokenizer)
        self._lock = threading.Lock()

    def prompt(self, body: PromptBody) -> Prompt:
        """Return the ids that an engine with this model would compute."""
        ids = _given_ids(body.prompt)
        if ids is not None:
            return Prompt(ids, is_exact=True)
        try:
            text = self._render(body)
            tokens = None if text is None else self._encode(text, adds_bos=body.messages is None)
        except (ChatTemplateError, ValueError, TypeError, AttributeError):
            tokens = None
        return self._estimate.prompt(body) if tokens is None else Prompt(tokens, is_exact=True)

    def _render(self, body: PromptBody) -> str | None:
        if body.messages is None:
            text = body.prompt[0] if isinstance(body.prompt, list) and body.prompt else body.prompt
            return text if isinstance(text, str) else None
        if self._template is None or body.input is not None:
            return None
        messages = _plain_messages(body)
        if messages is None:
            return None
        extra = body.chat_template_kwargs if isinstance(body.chat_template_kwargs, dict) else {}
        reserved = {"messages", "tools", "add_generation_prompt"}
        kwargs = {str(name): value for name, value in extra.items() if name not in reserved}
        return self._template.render(messages, tools=body.tools or None, **kwargs)

    def _encode(self, text: str, *, adds_bos: bool) -> bytes | None:
        deadline = self._clock() + self._budget_s
        head = self._tokenizer.encode("", add_bos=adds_bos and self._tokenizer.adds_bos)
        parts = [head]
        for piece in self._cut.split(text) if self._cut else [text]:
            if not piece:
                continue
            ids = self._pieces.get(piece)
            if ids is None:
                if self._clock() > deadline:
                    return None
                ids = self._tokenizer.encode(piece)
            parts.append(ids)
            self._keep(piece, ids)
        return b"".join(parts)

    def _keep(self, piece: str, ids: bytes) -> None:
        with self._lock:
            if self._pieces.pop(piece, None) is None:
                self._pieces_bytes += len(piece) + len(ids)
            self._pieces[piece] = ids
            while self._pieces_bytes > _MAX_SEGMENTS_BYTES:
                oldest, oldest_ids = self._pieces.popitem(last=False)
                self._pieces_bytes -= len(oldest) + len(oldest_ids)


def _cutter(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """What stands before each special token at which a text may be cut: where both sides, tokenised apart, are the
    whole's tokens. Some tokens swallow the space beside them, and are no place to cut."""
    texts = [tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in tokenizer.special_token_ids]

    def is_clean(token: str) -> bool:
        return bool(token) and all(
            tokenizer.encode(before + token + after) == tokenizer.encode(before) + tokenizer.encode(token + after)
            for before, after in _PROBES
        )

    clean = sorted(map(re.escape, filter(is_clean, texts)), key=len, reverse=True)
    return re.compile(f"(?={'|'.join(clean)})") if clean else None


def _given_ids(prompt: Any) -> bytes | None:
    """The prompt where the client sent token ids: one list of them, or several, of which the first counts."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and type(prompt[0]) is int:
        try:
            return pack(prompt)
        except (ValueError, TypeError):
            return None
    return None


def _text(body: PromptBody) -> bytes:
    """A prompt's text in the order in which templates write it: tools, system, then turn by turn."""
    parts: list[bytes] = []
    for part in (body.tools, body.system, body.instructions):
        if part:
            parts.append(_bytes(part))
    if isinstance(body.messages, list):
        parts.extend(_bytes(message) for message in body.messages)
    for part in (body.prompt[0] if isinstance(body.prompt, list) and body.prompt else body.prompt, body.input):
        if isinstance(part, list):
            parts.extend(map(_bytes, part))
        elif part is not None:
            parts.append(_bytes(part))
    return b"".join(parts)


def _bytes(part: Any) -> bytes:
    if isinstance(part, str):
        return part.encode("utf-8", "surrogatepass")
    if isinstance(part, dict) and isinstance(part.get("content"), str):
        rest = {name: value for name, value in part.items() if name not in {"role", "content"}}
        head = f"\n{part.get('role')}: {part['content']}".encode("utf-8", "surrogatepass")
        return head + (_encoder.encode(rest) if rest else b"")
    return _encoder.encode(part)


def _plain_messages(body: PromptBody) -> list[dict[str, Any]] | None:
    """Messages as templates take them, None where they hold more than text."""
    if not isinstance(body.messages, list):
        return None
    messages: list[Any] = [{"role": "system", "content": body.system}] if body.system else []
    messages += body.messages
    plain: list[dict[str, Any]] = []
    for message in messages:
        if not isinstance(message, dict):
            return None
        content = message.get("content")
        if isinstance(content, list):
            texts = [
                str(part.get("text", "")) for part in content if isinstance(part, dict) and part.get("type") == "text"
            ]
            if len(texts) != len(content):
                return None
            content = "\n".join(texts)
        role = "system" if message.get("role") == "developer" else message.get("role")
        plain.append({**message, "role": role, "content": content})
    return plain
