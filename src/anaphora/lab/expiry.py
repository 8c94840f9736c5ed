"""Time to live: a cached prefix that nobody used for so long is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from anaphora.lab.trace import Prompt


class Expiry:
    """Remembers when each block of each prefix was last used. Memory: the distinct blocks."""

    def __init__(self, ttl_s: float, block_size: int, unit: int) -> None:
        self._ttl_s = ttl_s
        self._block_size = block_size
        self._size = block_size // unit * TOKEN_BYTES
        self._known: dict[tuple[object, bytes], int] = {}
        self._used_s: list[float] = []

    def use(self, prompt: Prompt, where: object = None) -> int:
        """Use a prompt at its time, in one of several caches; return how many tokens of it had not expired."""
        before: object = (where, prompt.namespace)
        now, num_live, is_live = prompt.time_s, 0, True
        for start in range(0, len(prompt.units) // self._size * self._size, self._size):
            edge = (before, prompt.units[start : start + self._size])
            block = self._known.get(edge)
            if block is None:
                block = self._known[edge] = len(self._used_s)
                self._used_s.append(now)
                is_live = False
            elif is_live and now - self._used_s[block] <= self._ttl_s:
                num_live += 1
            else:
                is_live = False
            self._used_s[block] = now
            before = block
        return num_live * self._block_size
