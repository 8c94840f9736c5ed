"""What a replica reports of its cache, read from an answer as it passes by."""

from __future__ import annotations

import re

_KEPT_BYTES = 16_384
# Inside a JSON string a quotation mark is escaped, so text of the model cannot imitate these.
_CACHED = re.compile(rb'(?<!\\)"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,12})')
_PROMPT = re.compile(rb'(?<!\\)"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,12})')


class UsageReader:
    """Keeps the first and last kilobytes of an answer; both APIs have the usage in one of them.

    Anthropic's streams open with it, everything else ends with it.
    """

    def __init__(self) -> None:
        self._head = b""
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes. Cost: a copy of at most 16 KB."""
        if len(self._head) < _KEPT_BYTES:
            self._head += chunk[: _KEPT_BYTES - len(self._head)]
        self._tail = (self._tail + chunk)[-_KEPT_BYTES:]

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the replica had, None if it does not say."""
        return self._last(_CACHED)

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt, None if the replica does not say."""
        return self._last(_PROMPT)

    def _last(self, pattern: re.Pattern[bytes]) -> int | None:
        for text in (self._tail, self._head):
            found = pattern.findall(text)
            if found:
                return int(found[-1])
        return None
