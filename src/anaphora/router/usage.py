"""What a replica reports of its cache, read from an answer as it passes by."""

from __future__ import annotations

import re
from collections import deque

_KEPT_BYTES = 16_384
# Inside a JSON string a quotation mark is escaped, so text of the model cannot imitate these.
_CACHED = re.compile(rb'(?<!\\)"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,12})')
_PROMPT = re.compile(rb'(?<!\\)"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,12})')


class UsageReader:
    """Keeps the first and last kilobytes of an answer; both APIs have the usage in one of them.

    Anthropic's streams open with it, everything else ends with it.
    """

    def __init__(self) -> None:
        self._head: list[bytes] = []
        self._head_bytes = 0
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes. Cost: under a microsecond; nothing is copied."""
        if self._head_bytes < _KEPT_BYTES:
            self._head.append(chunk)
            self._head_bytes += len(chunk)
        tail = self._tail
        tail.append(chunk)
        self._tail_bytes += len(chunk)
        while self._tail_bytes - len(tail[0]) > _KEPT_BYTES:
            self._tail_bytes -= len(tail.popleft())

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the replica had, None if it does not say."""
        return self._last(_CACHED)

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt, None if the replica does not say."""
        return self._last(_PROMPT)

    def _last(self, pattern: re.Pattern[bytes]) -> int | None:
        for chunks, part in ((self._tail, slice(-_KEPT_BYTES, None)), (self._head, slice(_KEPT_BYTES))):
            found = pattern.findall(b"".join(chunks)[part])
            if found:
                return int(found[-1])
        return None
