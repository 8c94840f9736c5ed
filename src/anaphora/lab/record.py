"""One logged request, whichever tool wrote it: what every importer yields and everything else reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Section = Literal["tools", "system", "messages", "prompt"]


class UsageError(ValueError):
    """Counts that contradict one another. The message names the field, never content."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a server said it did, in one meaning whoever said it. All in tokens.

    prompt: the whole prompt, cached tokens included.
    cached: read from a cache. None: the server did not say, which is not 0.
    written: written to a cache at a price; of these `written_1h` for an hour. None: not said.
    output: generated.

    Raises UsageError, naming the field, for parts that are larger than their whole.
    """

    prompt: int
    cached: int | None = None
    written: int | None = None
    written_1h: int = 0
    output: int | None = None

    def __post_init__(self) -> None:
        if (self.cached or 0) + (self.written or 0) > self.prompt:
            raise UsageError("usage: cached and written tokens are more than the whole prompt")
        if self.written_1h > (self.written or 0):
            raise UsageError("usage: tokens written for an hour are more than all that were written")

    @property
    def uncached(self) -> int:
        """Prompt tokens that were neither read from a cache nor written to one at a price."""
        return self.prompt - (self.cached or 0) - (self.written or 0)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a prompt, in the order in which a model reads it: tools, system, messages.

    path: where it stands in the request's body, say `messages[2].content[0]`.
    role: system, user, assistant, tool; empty for tools.
    kind: the content block's type where it has one (text, tool_use, tool_result, image ...).
    ttl_s: a cache breakpoint stands at its end, and lasts for so many seconds. None: no breakpoint.
    """

    path: str
    section: Section
    role: str
    text: str = field(repr=False)
    kind: str = "text"
    ttl_s: int | None = None


@dataclass(frozen=True, slots=True)
class Blocks:
    """A prompt of which only the names of its blocks are known. Equal ids are equal blocks.

    is_chained: whether an id stands for the whole prefix up to its block, or for the block's content alone. Either
    way two prompts share what their leading ids have in common.
    scope: ids are compared within it only.
    """

    ids: tuple[int, ...]
    block_size: int
    is_chained: bool
    scope: str = ""


@dataclass(slots=True)
class LoggedRequest:
    """One request of a log.

    line: the line of the file on which it begins, from 1.
    time_s: when it arrived, seconds since 1970 or since the trace's start; None where the log does not say.
    end_s, first_token_s: when it ended, when its first token came.
    salt, adapter, tenant: what may keep prompts apart, as far as the log tells.
    replica: what served it.
    parts, token_ids, blocks: the prompt, in as many of these forms as the log has. `token_ids` is packed int32.
    num_prompt_tokens: the prompt's length, where the log states it. num_output_tokens: what was generated.
    parameters: settings that some caches split by (tool_choice, thinking ...), as digests.
    """

    line: int
    time_s: float | None = None
    end_s: float | None = None
    first_token_s: float | None = None
    request_id: str | None = None
    model: str | None = None
    provider: str | None = None
    session: str | None = None
    parent: str | None = None
    salt: str | None = None
    adapter: str | None = None
    tenant: str | None = None
    replica: str | None = None
    parts: tuple[Part, ...] = ()
    token_ids: bytes | None = None
    blocks: Blocks | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    usage: Usage | None = None
    parameters: dict[str, str] = field(default_factory=dict)
    auto_ttl_s: int | None = None
    """The request asks for a breakpoint at its end (Anthropic's automatic mode), with this time to live."""

    @property
    def length(self) -> int | None:
        """The prompt's length in tokens as the log states it, in one place or another."""
        if self.usage is not None:
            return self.usage.prompt
        if self.num_prompt_tokens is not None:
            return self.num_prompt_tokens
        return None if self.token_ids is None else len(self.token_ids) // 4
