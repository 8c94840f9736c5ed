"""A trace through caches, one request after another: what is asked of `KVCacheManager` is what an engine asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol
from zlib import crc32

from anaphora.cache import KVCacheManager
from anaphora.tokens import MAX_TOKEN_ID, TOKEN_BYTES, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.cache.eviction import EvictionPolicy
    from anaphora.cache.options import IndexKind
    from anaphora.lab.trace import Prompt

Counting = Literal["engine", "listed"]
"""engine: what an engine can serve: whole blocks, and never the last token. listed: every block that the trace lists
counts, the partial last one too, as published figures of such traces count."""

Routing = Literal["round-robin", "session", "prefix"]


class Cache(Protocol):
    """Serves requests one by one. last_host_tokens: of the last one's cached tokens those that were in host memory."""

    @property
    def last_host_tokens(self) -> int:
        """See there."""
        ...

    def serve(self, prompt: Prompt) -> int:
        """Serve one request to its end; return how many of its tokens were cached."""
        ...


class CacheReplay:
    """One replica's `KVCacheManager`, driven by a trace's requests, one at a time.

    num_blocks, block_size: of the cache, block_size in tokens. unit: tokens in a unit of the trace.
    host_blocks: of host memory, for what the cache evicts.
    A prompt that is longer than the whole cache is computed, and what fits of it is kept.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        unit: int,
        *,
        index: IndexKind = "radix",
        eviction: str | EvictionPolicy = "lru",
        counting: Counting = "engine",
        host_blocks: int = 0,
    ) -> None:
        if block_size % unit:
            raise ValueError(f"block_size: expected a multiple of the trace's unit, {unit}, got {block_size}")
        if counting == "listed" and block_size != unit:
            raise ValueError(f"counting: 'listed' needs the trace's own block size, {unit}, got {block_size}")
        self._now_s = 0.0
        self._unit = unit
        self._is_listed = counting == "listed"
        # A prompt of listed blocks gets one more token that nobody has, so that its last block may be a hit.
        num_blocks += self._is_listed
        self.manager = KVCacheManager(
            num_blocks,
            block_size // unit,
            index=index,
            eviction=eviction,
            host_blocks=host_blocks,
            clock=lambda: self._now_s,
        )
        self.last_host_tokens = 0
        self._max_units = num_blocks * (block_size // unit)
        self._next_unique = MAX_TOKEN_ID

    def match(self, prompt: Prompt) -> int:
        """Tokens of a prompt that are cached now. Changes nothing."""
        units, num_kept = self._units(prompt)
        return self._tokens(prompt, min(self.manager.match(units, prompt.namespace), num_kept))

    def serve(self, prompt: Prompt) -> int:
        """Serve one request to its end; return how many of its tokens were cached."""
        self._now_s = prompt.time_s
        manager = self.manager
        units, num_kept = self._units(prompt)
        sequence = manager.start(units, prompt.namespace)
        num_units = len(units) // TOKEN_BYTES
        is_admitted = manager.allocate(sequence, num_units - sequence.num_cached_tokens)
        assert is_admitted, "nobody holds a block, so there is room"
        num_cached = sequence.num_computed_tokens
        num_cached_tokens = self._tokens(prompt, num_cached)
        self.last_host_tokens = num_cached_tokens - self._tokens(prompt, num_cached - sequence.num_host_tokens)
        manager.take_transfers()  # there are no pages
        if num_kept > num_cached:
            manager.commit(sequence, num_kept - num_cached)
        manager.finish(sequence)
        return num_cached_tokens

    def _units(self, prompt: Prompt) -> tuple[bytes, int]:
        """The prompt in units as the cache sees it, and how many of them are computed and kept."""
        units = prompt.units
        if self._is_listed:
            if prompt.tail is not None:
                units += pack([prompt.tail])
            units = units[: (self._max_units - 1) * TOKEN_BYTES]
            num_kept = len(units) // TOKEN_BYTES
            self._next_unique -= 1
            return units + pack([self._next_unique]), num_kept
        num_kept = min(prompt.num_units, self._max_units)
        if num_kept < prompt.num_units:
            return units[: num_kept * TOKEN_BYTES], num_kept
        # The unit in which the prompt ends takes room, and cannot be shared.
        has_tail = prompt.tail is not None and num_kept < self._max_units
        return (units + pack([prompt.tail or 0]), num_kept) if has_tail else (units, num_kept)

    def _tokens(self, prompt: Prompt, num_units: int) -> int:
        return min(num_units * self._unit, prompt.num_tokens)


class Fleet:
    """Replicas behind a router.

    routing: round-robin deals in order of arrival; session keeps a session on one replica (without a session:
    round-robin); prefix sends each request where most of it is cached, among equals to the one with least work so far.
    """

    def __init__(self, replicas: Sequence[CacheReplay], routing: Routing = "round-robin") -> None:
        self.replicas = replicas
        self._routing = routing
        self._num_dealt = 0
        self.last_host_tokens = 0
        self._work = [0] * len(replicas)

    def serve(self, prompt: Prompt) -> int:
        """Serve one request where it is routed."""
        chosen = self._choose(prompt)
        num_cached = self.replicas[chosen].serve(prompt)
        self.last_host_tokens = self.replicas[chosen].last_host_tokens
        self._work[chosen] += prompt.num_tokens - num_cached
        return num_cached

    def _choose(self, prompt: Prompt) -> int:
        num = len(self.replicas)
        if num == 1:
            return 0
        if self._routing == "session" and prompt.session is not None:
            return crc32(prompt.session.encode("utf-8", "replace")) % num
        if self._routing == "prefix":
            return max(range(num), key=lambda n: (self.replicas[n].match(prompt), -self._work[n]))
        self._num_dealt += 1
        return (self._num_dealt - 1) % num

    @property
    def balance(self) -> float | None:
        """Most work of a replica over the average, in tokens computed; 1 is even. None before any work."""
        total = sum(self._work)
        return max(self._work) * len(self._work) / total if total else None


@dataclass(slots=True)
class Counts:
    """What was asked and what was found, in tokens and in blocks. num_host_tokens: of the cached ones those in host
    memory."""

    num_requests: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_host_tokens: int = 0
    num_blocks: int = 0
    num_cached_blocks: int = 0

    @property
    def token_hit_rate(self) -> float | None:
        """Cached tokens over all; None where there are none."""
        return self.num_cached_tokens / self.num_tokens if self.num_tokens else None

    @property
    def block_hit_rate(self) -> float | None:
        """Cached blocks over all; None where there are none."""
        return self.num_cached_blocks / self.num_blocks if self.num_blocks else None

    def add(self, prompt: Prompt, num_cached: int, block_size: int, counting: Counting, num_host: int = 0) -> None:
        """Count one request. Blocks are whole ones under "engine", all listed ones under "listed"."""
        self.num_requests += 1
        self.num_tokens += prompt.num_tokens
        self.num_cached_tokens += num_cached
        self.num_host_tokens += num_host
        num_listed = -(-prompt.num_tokens // block_size)
        self.num_blocks += num_listed if counting == "listed" else prompt.num_tokens // block_size
        self.num_cached_blocks += -(-num_cached // block_size)


def count(
    prompts: Sequence[Prompt],
    cache: Cache,
    block_size: int,
    *,
    counting: Counting = "engine",
    measure_after: float = 0.0,
) -> Counts:
    """Serve all prompts and count those after the first share `measure_after`, 0 to 1: the rest warms up."""
    first = int(len(prompts) * measure_after)
    counts = Counts()
    for number, prompt in enumerate(prompts):
        num_cached = cache.serve(prompt)
        if number >= first:
            counts.add(prompt, num_cached, block_size, counting, cache.last_host_tokens)
    return counts
