"""Retention: prefixes kept on purpose, for a time, within a share of the pool.

A retained prefix is not evicted by the order of recency. It gives way in a defined order: when its time is over; then,
when a running sequence needs room that nothing else can give, lowest priority first, and among equals the one renewed
longest ago. What gives way stays cached, as recently used, until its blocks are taken.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from anaphora.cache.index import NO_HIT

if TYPE_CHECKING:
    from collections.abc import Callable

    from anaphora.cache.index import Hit, PrefixIndex
    from anaphora.cache.sequence import Sequence


class Retention:
    """The handle that `KVCacheManager.retain` returns.

    num_tokens: how much is kept: the whole blocks that were cached, as far as they fit the share. 0 if none.
    priority: higher gives way later.
    expires_at: by the manager's clock; None for never.
    """

    __slots__ = ("_book", "_holder", "_renewed", "expires_at", "num_tokens", "priority")

    def __init__(
        self, book: RetentionBook, holder: Sequence, num_tokens: int, priority: int, expires_at: float | None
    ) -> None:
        self._book = book
        self._holder = holder
        self._renewed = 0
        self.num_tokens = num_tokens
        self.priority = priority
        self.expires_at = expires_at

    @property
    def is_active(self) -> bool:
        """Whether the prefix is still kept."""
        return self._book.is_active(self)

    def renew(self, ttl_s: float | None) -> bool:
        """Start its time again, as when it was read. False if it has given way already."""
        return self._book.renew(self, ttl_s)

    def release(self) -> None:
        """Let it go now; it stays cached like anything else. Does nothing if it has given way already."""
        self._book.release(self)


class RetentionBook:
    """All retentions of one manager. Each holds its prefix like a sequence, through the index.

    Cost: retain and release O(blocks); finding out what giving way would bring O(retained nodes), only when the pool is
    short.
    """

    def __init__(self, index: PrefixIndex, num_groups: int, max_blocks: int, clock: Callable[[], float]) -> None:
        self.max_blocks = max_blocks
        self._num_groups = num_groups
        self._index = index
        self._clock = clock
        self.active: dict[Retention, None] = {}
        """What is kept now, the oldest first."""
        self._num_retentions: Counter[int] = Counter()
        """Per block how many retentions keep it."""
        self._serial = 0
        self._next_expiry = float("inf")

    @property
    def holders(self) -> list[Sequence]:
        """The sequences that stand for retentions among the index's holders."""
        return [retention._holder for retention in self.active]

    @property
    def num_blocks(self) -> int:
        """Blocks that are kept, each counted once."""
        return len(self._num_retentions)

    def add(self, holder: Sequence, block_size: int, priority: int, ttl_s: float | None) -> Retention:
        """Keep what is cached of the holder's tokens, as much of it as fits the share."""
        if priority.__class__ is not int:
            raise ValueError(f"priority: expected an integer, got {priority!r}")
        expires_at = self._expiry(ttl_s)
        self.expire()
        hit = self._index.find(holder, holder.num_tokens // block_size)
        if hit.num_blocks:
            self._pin(holder, hit)
            num_fitting = self._num_fitting(holder, hit.num_blocks)
            if num_fitting < hit.num_blocks:
                self._index.release(holder)
                hit = self._index.find(holder, num_fitting)
                if hit.num_blocks:
                    self._pin(holder, hit)
        holder.num_computed_tokens = hit.num_blocks * block_size
        retention = Retention(self, holder, holder.num_computed_tokens, priority, expires_at)
        if hit.num_blocks:
            holder.state = "running"
            self.active[retention] = None
            self._num_retentions.update(block for table in holder.block_tables for block in table if block)
            self._touch(retention)
        return retention

    def _pin(self, holder: Sequence, hit: Hit) -> None:
        holder.open_tables(self._num_groups)
        self._index.pin(holder, hit)

    def _num_fitting(self, holder: Sequence, num_blocks: int) -> int:
        """How many leading blocks of a pinned holder fit the share, beside what is kept already."""
        room = self.max_blocks - len(self._num_retentions)
        for position in range(num_blocks):
            for table in holder.block_tables:
                room -= table[position] > 0 and table[position] not in self._num_retentions
            if room < 0:
                return position
        return num_blocks

    def is_active(self, retention: Retention) -> bool:
        """Whether it has not given way, nor run out of time."""
        self.expire()
        return retention in self.active

    def renew(self, retention: Retention, ttl_s: float | None) -> bool:
        """See `Retention.renew`."""
        if not self.is_active(retention):
            return False
        retention.expires_at = self._expiry(ttl_s)
        self._touch(retention)
        return True

    def release(self, retention: Retention) -> None:
        """See `Retention.release`."""
        if retention not in self.active:
            return
        del self.active[retention]
        holder = retention._holder
        self._num_retentions.subtract(block for table in holder.block_tables for block in table if block)
        self._num_retentions = +self._num_retentions
        self._index.release(holder)
        holder.state = "finished"

    def release_all(self) -> None:
        """Let everything go."""
        for retention in list(self.active):
            self.release(retention)

    def release_those_with(self, blocks: set[int]) -> None:
        """Let go every prefix that has one of these blocks in it."""
        for retention in list(self.active):
            if retention._holder.holds_any(blocks):
                self.release(retention)

    def expire(self) -> None:
        """Let go what has run out of time. Cost: O(1) while nothing has."""
        if not self.active:
            return
        now = self._clock()
        if now < self._next_expiry:
            return
        for retention in list(self.active):
            if retention.expires_at is not None and retention.expires_at <= now:
                self.release(retention)
        times = [r.expires_at for r in self.active if r.expires_at is not None]
        self._next_expiry = min(times, default=float("inf"))

    def give_way(self, num_blocks: int, hit: Hit = NO_HIT) -> bool:
        """Let go as many prefixes as it takes to have room for `num_blocks` besides the hit's own. False, with nothing
        changed, if letting go all of them would not suffice."""
        if not self.active or num_blocks > self._index.room(hit, self.holders):
            return False
        for retention in sorted(self.active, key=lambda r: (r.priority, r._renewed)):
            if num_blocks <= self._index.room(hit, []):
                break
            self.release(retention)
        return True

    def _expiry(self, ttl_s: float | None) -> float | None:
        if ttl_s is None:
            return None
        if not isinstance(ttl_s, (int, float)) or not ttl_s > 0:
            raise ValueError(f"ttl_s: expected more than 0 seconds, or None for no limit, got {ttl_s!r}")
        return self._clock() + ttl_s

    def _touch(self, retention: Retention) -> None:
        self._serial += 1
        retention._renewed = self._serial
        if retention.expires_at is not None:
            self._next_expiry = min(self._next_expiry, retention.expires_at)
