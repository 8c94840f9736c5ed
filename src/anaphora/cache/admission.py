"""Admission: a sequence is looked up, what is found is pinned, and blocks are taken for the rest, all at once; later
it is given more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.cache.index import find_part
from anaphora.cache.sequence import NO_BLOCKS

if TYPE_CHECKING:
    from array import array

    from anaphora.cache.copies import Copies
    from anaphora.cache.host_tier import HostTier
    from anaphora.cache.index import Hit, PrefixIndex
    from anaphora.cache.retention import RetentionBook
    from anaphora.cache.sequence import Sequence
    from anaphora.cache.stats import CacheStats


class Admission:
    """Lookups, and `allocate`: the first of a sequence, or that after a preemption, admits it, later ones extend it.

    A lookup is kept with its sequence for as long as the index does not change, so asking before admitting costs
    nothing.
    """

    def __init__(
        self,
        index: PrefixIndex,
        host: HostTier | None,
        retained: RetentionBook,
        copies: Copies,
        stats: CacheStats,
        *,
        block_size: int,
        match_unit: int,
        num_groups: int,
    ) -> None:
        self._index = index
        self._host = host
        self._retained = retained
        self._copies = copies
        self._stats = stats
        self._block_size = block_size
        self._match_unit = match_unit
        self._hits_parts = match_unit < block_size
        self._num_groups = num_groups

    def find(self, sequence: Sequence) -> Hit:
        """Look up what the index has of a sequence, and keep it as `sequence.hit` for as long as the index does not
        change; `sequence.host_blocks` is then what host memory has after that."""
        index = self._index
        # At least one token is left to compute, or there would be no logits to go on from.
        max_blocks = (sequence.num_tokens - 1) // self._block_size if sequence.read_cache else 0
        hit = index.find(sequence, max_blocks)
        host_blocks = NO_BLOCKS
        if self._host is not None:
            host_blocks = sequence.host_blocks = self._host.find(sequence, hit.num_blocks, max_blocks)
        if sequence.recomputes_last_block and host_blocks:
            host_blocks.pop()
        elif sequence.recomputes_last_block and hit.num_blocks:
            hit = index.find(sequence, hit.num_blocks - 1)
        sequence.hit = hit
        sequence.hit_version = index.version
        return hit

    def num_found_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens an admission would find now. Changes nothing."""
        hit: Hit = sequence.hit if sequence.hit_version == self._index.version else self.find(sequence)
        num_tokens = hit.num_blocks * self._block_size
        if self._host is not None and sequence.host_blocks:
            num_tokens += len(sequence.host_blocks) * self._block_size
        elif self._hits_parts:
            num_tokens += find_part(self._index, sequence, hit, self._block_size, self._match_unit)[1]
        return num_tokens

    def admit(self, sequence: Sequence, num_tokens: int) -> bool:
        """Let a sequence in, with room for `num_tokens` tokens after what is found. False, with nothing changed, if
        there is not as much room."""
        if sequence.state == "finished":
            raise ValueError("sequence: it is finished; start a new one")
        index = self._index
        if self._retained.active:
            self._retained.expire()
        hit: Hit = sequence.hit if sequence.hit_version == index.version else self.find(sequence)
        block_size = self._block_size
        host_blocks = NO_BLOCKS if self._host is None else sequence.host_blocks
        part_of = num_part_tokens = 0
        if self._hits_parts and not host_blocks:
            part_of, num_part_tokens = find_part(index, sequence, hit, block_size, self._match_unit)
        num_hit_blocks = hit.num_blocks
        missing = -(-(num_part_tokens + num_tokens) // block_size) * self._num_groups + len(host_blocks)
        if missing > index.num_available - hit.num_unpinned:
            if not self._retained.give_way(missing, hit):
                return False
            # Looked up again: what gave way may be part of the hit, and is not pinned any more.
            return self.admit(sequence, num_tokens)
        sequence.open_tables(self._num_groups)
        index.pin(sequence, hit)
        if host_blocks:
            num_hit_blocks = self._load(sequence, host_blocks, missing)
        elif missing:
            sequence.extend_tables(index.take(missing))
        sequence.part_of = part_of
        if part_of:
            self._copies.add(part_of, sequence.block_table[num_hit_blocks])
        sequence.num_computed_tokens = num_hit_tokens = num_hit_blocks * block_size + num_part_tokens
        sequence.publishes = sequence.write_cache
        sequence.num_shared_blocks = hit.num_full
        sequence.state = "running"
        stats = self._stats
        if sequence.was_admitted:
            stats.preempted_requests += 1
            stats.preempted_queries += sequence.num_tokens
            stats.preempted_hits += num_hit_tokens
            if host_blocks:
                stats.preempted_host_hits += len(host_blocks) * block_size
        else:
            sequence.was_admitted = True
            sequence._num_cached_tokens = num_hit_tokens
            stats.requests += 1
            stats.queries += sequence.num_tokens
            stats.hits += num_hit_tokens
            if host_blocks:
                sequence.num_host_tokens = len(host_blocks) * block_size
                stats.host_hits += sequence.num_host_tokens
        return True

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a running sequence room for `num_tokens` tokens after those computed. False, with nothing changed, if
        there is not as much room."""
        index = self._index
        num_blocks = -(-(sequence.num_computed_tokens + num_tokens) // self._block_size)
        missing = (num_blocks - len(sequence.block_table)) * self._num_groups
        copies = self._copies.shared_tails(sequence) if num_tokens and self._copies.forked else ()
        if missing > 0 or copies:
            num_new = max(0, missing) + len(copies) - index.num_leaving(sequence)
            if num_new > index.num_available and not self._retained.give_way(num_new):
                return False
        index.slide(sequence)
        if copies:
            self._copies.copy_tails(sequence, copies)
        if missing > 0:
            sequence.extend_tables(index.take(missing))
        return True

    def _load(self, sequence: Sequence, host_blocks: array[int], num_new: int) -> int:
        """Take `num_new` blocks for a pinned sequence, the first of them for what host memory has of it, which can be
        found on the device from here on. Return how many blocks it has been served."""
        assert self._host is not None
        num_device = len(sequence.block_table)
        num_served = num_device + len(host_blocks)
        self._host.hold(host_blocks)
        sequence.extend_tables(self._index.take(num_new))
        self._host.load(host_blocks, sequence.block_table[num_device:num_served])
        self._index.insert(sequence, num_served)
        return num_served
