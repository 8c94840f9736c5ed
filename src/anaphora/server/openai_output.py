"""OpenAI's answers: choices, chunks of a stream, usage. Built as plain objects, ready for JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.engine.request import Delta, TokenLogprob

Json = dict[str, Any]


class TokenNames(Protocol):
    """What a tokeniser tells of a single token."""

    def token_bytes(self, token_id: int) -> bytes:
        """The token's text as UTF-8; a part of a character where the token is one."""
        ...


@dataclass(slots=True)
class Choice:
    """One sample as far as it has come."""

    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: Delta | None = None
    num_logprob_chars: int = 0

    def add(self, delta: Delta) -> None:
        """Take in the next delta."""
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.last = delta


class Format(Protocol):
    """How one endpoint writes choices."""

    kind: str
    chunk_kind: str

    def choice(self, choice: Choice, tokens: TokenNames, *, has_logprobs: bool) -> Json:
        """A whole choice, of an answer in one piece."""
        ...

    def opening(self, index: int) -> Json | None:
        """The choice of a stream's first chunk, before there is text."""
        ...

    def piece(self, choice: Choice, delta: Delta, tokens: TokenNames, *, has_logprobs: bool) -> Json:
        """The choice of a chunk: what `delta`, already added to `choice`, brought."""
        ...


class ChatFormat:
    """/v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(self, choice: Choice, tokens: TokenNames, *, has_logprobs: bool) -> Json:
        """See Format."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": _chat_logprobs(choice.logprobs, tokens) if has_logprobs else None,
            "finish_reason": _finish_reason(choice.last),
        }

    def opening(self, index: int) -> Json | None:
        """See Format."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, choice: Choice, delta: Delta, tokens: TokenNames, *, has_logprobs: bool) -> Json:
        """See Format."""
        return {
            "index": choice.index,
            "delta": {"content": delta.text} if delta.text or delta.logprobs else {},
            "logprobs": _chat_logprobs(delta.logprobs, tokens) if has_logprobs and delta.logprobs else None,
            "finish_reason": _finish_reason(delta),
        }


class CompletionFormat:
    """/v1/completions."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def choice(self, choice: Choice, tokens: TokenNames, *, has_logprobs: bool) -> Json:
        """See Format."""
        return {
            "index": choice.index,
            "text": "".join(choice.texts),
            "logprobs": _completion_logprobs(choice, choice.logprobs, tokens) if has_logprobs else None,
            "finish_reason": _finish_reason(choice.last),
        }

    def opening(self, index: int) -> Json | None:
        """See Format."""
        return None

    def piece(self, choice: Choice, delta: Delta, tokens: TokenNames, *, has_logprobs: bool) -> Json:
        """See Format."""
        return {
            "index": choice.index,
            "text": delta.text,
            "logprobs": _completion_logprobs(choice, delta.logprobs, tokens) if has_logprobs else None,
            "finish_reason": _finish_reason(delta),
        }


def usage(choices: Sequence[Choice], num_samples_per_prompt: int) -> Json:
    """Token counts of a call. A prompt counts once, however many samples it has; cached are those of its first."""
    last = [choice.last for choice in choices if choice.last is not None]
    firsts = [c.last for c in choices if c.last is not None and c.index % num_samples_per_prompt == 0]
    num_prompt = sum(delta.num_prompt_tokens for delta in firsts)
    num_output = sum(delta.num_output_tokens for delta in last)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(delta.num_cached_tokens for delta in firsts)},
    }


def _finish_reason(delta: Delta | None) -> Literal["stop", "length"] | None:
    reason = delta.finish_reason if delta is not None else None
    return reason if reason in ("stop", "length") else None


def _chat_logprobs(logprobs: Sequence[TokenLogprob], tokens: TokenNames) -> Json:
    def entry(token_id: int, logprob: float) -> Json:
        raw = tokens.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    content = [
        {**entry(item.token_id, item.logprob), "top_logprobs": [entry(*alternative) for alternative in item.top]}
        for item in logprobs
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(choice: Choice, logprobs: Sequence[TokenLogprob], tokens: TokenNames) -> Json:
    """Offsets are in characters of the text, as if each token's text stood alone."""
    names, offsets = [], []
    for item in logprobs:
        names.append(_name(item.token_id, tokens))
        offsets.append(choice.num_logprob_chars)
        choice.num_logprob_chars += len(names[-1])
    return {
        "tokens": names,
        "token_logprobs": [item.logprob for item in logprobs],
        "top_logprobs": [{_name(token_id, tokens): lp for token_id, lp in item.top} for item in logprobs],
        "text_offset": offsets,
    }


def _name(token_id: int, tokens: TokenNames) -> str:
    return tokens.token_bytes(token_id).decode(errors="replace")
