"""What no policy can beat: a cache that knows the future and evicts the block that is asked for again latest (Belady).

A head is asked for again no later than what extends it, so the block to evict is always a leaf, and the rule that a
prefix never goes before its extensions costs nothing. It must still take in every request's blocks, as an engine must.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.lab.replay import Counting
    from anaphora.lab.trace import Prompt

_NEVER = 1 << 60


class Optimum:
    """Serves the prompts that it was given, in that order, with `num_blocks` blocks of `block_size` tokens."""

    last_host_tokens = 0
    """It has no host memory."""

    def __init__(
        self, prompts: Sequence[Prompt], num_blocks: int, block_size: int, unit: int, counting: Counting = "engine"
    ) -> None:
        self._block_size = block_size
        self._chains = _chains(prompts, block_size // unit, counting)
        self._next_uses = _next_uses(self._chains)
        self._num_free = num_blocks
        self._is_listed = counting == "listed"
        self._resident: dict[int, int] = {}
        """Block -> the request that asks for it next."""
        self._latest: list[tuple[int, int, int]] = []
        """Heap of (minus next use, minus depth, block); entries that no longer hold are dropped when met."""
        self._now = -1

    def serve(self, prompt: Prompt) -> int:
        """Serve the next request; return how many of its tokens were cached."""
        self._now += 1
        chain, next_uses = self._chains[self._now], self._next_uses[self._now]
        num_hits = 0
        for block in chain:
            if block not in self._resident:
                break
            num_hits += 1
        num_kept = len(chain)
        pinned = set(chain)
        for block in chain[num_hits:]:
            if not self._num_free and not self._evict(pinned):
                num_kept = chain.index(block)
                break
            self._num_free -= 1
            self._resident[block] = self._now
        for depth in range(num_kept):
            self._resident[chain[depth]] = next_uses[depth]
            heapq.heappush(self._latest, (-next_uses[depth], -depth, chain[depth]))
        num_tokens = num_hits * self._block_size
        if self._is_listed:
            return min(num_tokens, prompt.num_tokens)
        return min(num_tokens, (prompt.num_tokens - 1) // self._block_size * self._block_size)

    def _evict(self, pinned: set[int]) -> bool:
        """Free the block that is asked for again latest; False if all that is left is the request's own."""
        held = []
        found = False
        while self._latest and not found:
            entry = heapq.heappop(self._latest)
            block = entry[2]
            if self._resident.get(block) != -entry[0]:
                continue
            if block in pinned:
                held.append(entry)
                continue
            del self._resident[block]
            self._num_free += 1
            found = True
        for entry in held:
            heapq.heappush(self._latest, entry)
        return found


def _chains(prompts: Sequence[Prompt], per_block: int, counting: Counting) -> list[list[int]]:
    """Each prompt's blocks as indices: equal ones are equal prefixes of one namespace."""
    known: dict[tuple[object, bytes], int] = {}
    chains = []
    size = per_block * TOKEN_BYTES
    for prompt in prompts:
        chain: list[int] = []
        before: object = prompt.namespace
        for start in range(0, len(prompt.units) // size * size, size):
            before = known.setdefault((before, prompt.units[start : start + size]), len(known))
            chain.append(before)
        if counting == "listed" and prompt.tail is not None:
            chain.append(known.setdefault((before, prompt.tail.to_bytes(TOKEN_BYTES, "little")), len(known)))
        chains.append(chain)
    return chains


def _next_uses(chains: Sequence[Sequence[int]]) -> list[list[int]]:
    upcoming: dict[int, int] = {}
    found: list[list[int]] = []
    for number in range(len(chains) - 1, -1, -1):
        found.append([upcoming.get(block, _NEVER) for block in chains[number]])
        upcoming.update(dict.fromkeys(chains[number], number))
    found.reverse()
    return found
