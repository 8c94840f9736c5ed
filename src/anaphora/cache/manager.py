"""KVCacheManager: the contract that an engine programs against.

    start -> allocate (True or False) -> compute -> commit -> append -> allocate ... -> finish
                                                          \\-> preempt -> allocate ...

The manager decides which block ids hold which tokens of which sequence; the engine owns the memory behind the ids and
the computation. It is not thread-safe: one engine loop calls it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from anaphora.cache.admission import Admission
from anaphora.cache.copies import Copies
from anaphora.cache.events import require_names
from anaphora.cache.eviction import resolve_policy
from anaphora.cache.explain import Explanation, explain
from anaphora.cache.hash_index import HashIndex
from anaphora.cache.host_tier import HostTier
from anaphora.cache.index import NO_HIT, PrefixIndex, require
from anaphora.cache.options import check_block_ids, check_options
from anaphora.cache.radix_index import RadixIndex
from anaphora.cache.residency import Residency, ResidencyStats
from anaphora.cache.retention import Retention, RetentionBook
from anaphora.cache.segments import Segments
from anaphora.cache.sequence import NO_BLOCKS, Sequence
from anaphora.cache.stats import CacheStats
from anaphora.cache.transfers import Transfers
from anaphora.cache.windows import Windows
from anaphora.identity import DEFAULT_NAMESPACE, BlockDigests, Media, Namespace, validate_media
from anaphora.tokens import TOKEN_BYTES, TokenIds, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as SequenceOf

    from anaphora.cache.events import Event
    from anaphora.cache.eviction import EvictionPolicy
    from anaphora.cache.options import IndexKind
    from anaphora.cache.transfers import Transfer


class KVCacheManager:
    """Blocks of KV, shared by every sequence that begins with the same tokens under the same namespace.

    Args:
        num_blocks: blocks in the pool. Their ids are 1 .. num_blocks; 0 is the null block, so an executor holds
            num_blocks + 1 pages.
        block_size: tokens in a block. Hits are whole blocks.
        index: "radix" finds prefixes by their tokens in a tree; "hash" block by block, with vLLM's rules. By default
            "hash" where `windows` asks for several layer groups or for windows, which "radix" does not know, and
            "radix" everywhere else.
        eviction: what goes first of what nobody holds: a name in `eviction.POLICIES`, or a policy with its parameters.
            index="hash" knows "lru" alone.
        digests: how blocks are named (`block_digests`, events); by default with a secret of this process's own.
        match_unit: tokens by which hits may end inside a block: a divisor of `block_size`, by default the whole. The
            part of a block that matched is copied (`take_copies`), so the executor must be able to compute on from the
            middle of a block. Needs one layer group.
        windows: per layer group its attention window in tokens, None for full attention. Each group has a block table
            of its own in `Sequence.block_tables`; all take their blocks from the one pool.
        window_retention: which blocks of window groups stay findable: None all, 0 only those that the end of a prompt
            or a prefix shared with another needs, n those needed at every n tokens too.
        max_retained_share: how much of the pool `retain` may keep, 0 to 1.
        measure_residency: whether to keep the times of blocks, for `residency`.
        host_blocks: blocks of host memory for what the device evicts, to be found again and brought back; then the
            engine runs `take_transfers`. Their ids are 1 .. host_blocks. Needs one layer group with full attention.
        clock: seconds from any origin, never going back; times to live are measured by it.
        events: whether to record what becomes findable and what no longer is, for `take_events`.

    What always holds (`check` asserts it): every block is free, held (by as many holders as count), or cached and
    unreferenced; a block is found only after its KV has been committed, and only under its own namespace; a live block
    table only grows; a pinned block is never evicted; a refused `allocate` changed nothing; a prefix is never evicted
    before what extends it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        index: IndexKind | None = None,
        eviction: str | EvictionPolicy = "lru",
        digests: BlockDigests | None = None,
        match_unit: int | None = None,
        events: bool = False,
        windows: SequenceOf[int | None] = (None,),
        window_retention: int | None = None,
        max_retained_share: float = 0.5,
        measure_residency: bool = False,
        host_blocks: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.match_unit = block_size if match_unit is None else match_unit
        check_options(num_blocks, block_size, index, digests, self.match_unit, max_retained_share, host_blocks, clock)
        self.num_blocks = num_blocks
        self.block_size = block_size
        policy = resolve_policy(eviction, block_size, clock)
        self._windows = Windows(windows, block_size, window_retention)
        self._num_groups = self._windows.num_groups
        self._no_tables = [NO_BLOCKS] * self._num_groups
        if self.match_unit < block_size and self._num_groups > 1:
            raise ValueError("match_unit: several layer groups hit whole blocks only; leave it out")
        self._events: list[Event] | None = [] if events else None
        self._residency = Residency(clock) if measure_residency else None
        self._digests = digests or BlockDigests()
        if index is None:
            index = "radix" if self._windows.is_plain else "hash"
        self._index: PrefixIndex = (RadixIndex if index == "radix" else HashIndex)(
            num_blocks, block_size, self._digests, self._events, self._windows, policy, self._residency
        )
        self._retained = RetentionBook(self._index, self._num_groups, int(num_blocks * max_retained_share), clock)
        self._transfers = Transfers()
        self._copies = Copies(self._index, block_size, self._transfers)
        self._host: HostTier | None = None
        if host_blocks:
            if not self._windows.is_plain:
                raise ValueError("host_blocks: several layer groups, or windows, have no host tier; leave it out")
            self._host = HostTier(host_blocks, block_size, self._digests, self._events, self._transfers)
            self._index.spill_to(self._host)
        self._stats = CacheStats()
        self._admission = Admission(
            self._index,
            self._host,
            self._retained,
            self._copies,
            self._stats,
            block_size=block_size,
            match_unit=self.match_unit,
            num_groups=self._num_groups,
        )

    # -- a sequence's life -----------------------------------------------------------------------------------------

    def start(
        self,
        token_ids: TokenIds,
        namespace: Namespace = DEFAULT_NAMESPACE,
        *,
        media: SequenceOf[Media] = (),
        read_cache: bool = True,
        write_cache: bool = True,
        recompute_last_block: bool = False,
        priority: int = 0,
    ) -> Sequence:
        """Return a handle for a prompt. Changes nothing: no block is held until the first `allocate`.

        Args:
            token_ids: at least one id; int32 buffers are taken without conversion, `bytes` without a copy.
            media: images, audio and rows of embeddings in the prompt; blocks that they overlap match only where equal
                items lie at equal places.
            read_cache: False computes everything anew (prompt log-probabilities need it).
            recompute_last_block: a drafter needs the hidden states of the block before the first new token, so the last
                block of a hit is computed again.
            priority: for eviction="priority": what it is served and leaves goes later than that of lower priority.
            write_cache: False leaves nothing of this sequence for others to find.

        Raises ValueError or TypeError for ids that are no int32, and for a namespace or media that events could not
        name: then nothing could be committed.
        """
        tokens = pack(token_ids)
        if not tokens:
            raise ValueError("token_ids: expected at least one token, got none")
        if namespace.__class__ is not Namespace:
            raise TypeError(f"namespace: expected a Namespace, got {type(namespace).__name__}")
        sequence = Sequence(self, tokens, namespace, read_cache, write_cache)
        if media:
            sequence.media = validate_media(media, sequence.num_tokens)
            if sequence.media:
                sequence.segments = Segments(sequence.media, self.block_size)
        if self._events is not None and (sequence.media or namespace is not DEFAULT_NAMESPACE):
            require_names(self._digests, namespace, sequence.media, self.block_size)
        if recompute_last_block:
            sequence.recomputes_last_block = True
        if priority.__class__ is not int:
            raise ValueError(f"priority: expected an integer, got {priority!r}")
        if priority:
            sequence.priority = priority
        if self._num_groups > 1:
            sequence.block_tables = self._no_tables
        return sequence

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for the next `num_tokens` tokens after those computed. Return False, with nothing changed, if the
        pool cannot give it now: preempt someone, or wait.

        The first call that succeeds admits the sequence: it looks the prompt up, pins what it finds (so afterwards
        `num_computed_tokens` is the number of cached tokens), takes blocks for `num_tokens` more, and counts the
        statistics, all at once. The same after a preemption, counted apart. At least the last token is always left
        to compute. The slots may go beyond the known tokens (lookahead).
        """
        if sequence.manager is not self:
            raise _foreign()
        if num_tokens.__class__ is not int or num_tokens < 0:
            raise ValueError(f"num_tokens: expected an integer, 0 or more, got {num_tokens!r}")
        if sequence.state != "running":
            return self._admission.admit(sequence, num_tokens)
        return self._admission.extend(sequence, num_tokens)

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of the next `num_tokens` tokens is in the blocks now: those that became full can be shared.

        Raises ValueError beyond the tokens that are known, or the blocks that are allocated.
        """
        if sequence.manager is not self:
            raise _foreign()
        if sequence.state != "running":
            raise ValueError(f"sequence: only a running one can commit, this one is {sequence.state}")
        if num_tokens.__class__ is not int:
            raise ValueError(f"num_tokens: expected an integer, got {num_tokens!r}")
        num_computed = sequence.num_computed_tokens + num_tokens
        block_size = self.block_size
        if num_tokens < 0 or num_computed > sequence.num_tokens:
            raise ValueError(
                f"num_tokens: cannot commit {num_tokens} after {sequence.num_computed_tokens} computed ones; "
                f"the sequence knows {sequence.num_tokens}"
            )
        if num_computed > len(sequence.block_table) * block_size:
            raise ValueError(f"num_tokens: cannot commit {num_tokens}; allocate slots for them first")
        if self._copies.forked and num_tokens and self._copies.shared_tails(sequence):
            raise ValueError(f"num_tokens: cannot commit {num_tokens} into a shared block; allocate first")
        if not sequence.is_counted:
            sequence.is_counted = True
            self._index.count_use(sequence)
        sequence.num_computed_tokens = num_computed
        num_full = num_computed // block_size
        if num_full > sequence.num_indexed_blocks and sequence.publishes:
            self._index.insert(sequence, num_full)

    def append(self, sequence: Sequence, token_ids: TokenIds) -> None:
        """Add generated tokens; their KV is still to be computed. Cost: amortised O(new tokens)."""
        if sequence.manager is not self:
            raise _foreign()
        if sequence.state == "finished":
            raise ValueError("sequence: it is finished; start a new one")
        tokens = pack(token_ids)
        if type(sequence.tokens) is bytes:
            sequence.tokens = bytearray(sequence.tokens)
        sequence.tokens += tokens
        sequence.hit_version = -1
        sequence.num_tokens += len(tokens) // TOKEN_BYTES

    def finish(self, sequence: Sequence) -> None:
        """Give back its blocks; what was committed stays cached. Does nothing to a finished sequence."""
        if self._end(sequence):
            self._stats.finished += 1

    def abort(self, sequence: Sequence) -> None:
        """The same as `finish`, in any state, counted as aborted."""
        if self._end(sequence):
            self._stats.aborted += 1

    def preempt(self, sequence: Sequence) -> None:
        """Give back all blocks of a running sequence; its next `allocate` starts it again from what is cached then."""
        self._require_running(sequence, "can be preempted")
        self._give_back(sequence)
        sequence.state = "preempted"
        self._stats.preemptions += 1

    def fork(self, sequence: Sequence) -> Sequence:
        """Return another sequence with the same tokens that shares all computed blocks: parallel samples, beams.

        Nothing is copied until one of them writes into a block that both hold and that is not full: its `allocate`
        then takes a block of its own for it, and `take_copies` says what to copy.
        """
        self._require_running(sequence, "can be forked")
        child = sequence.branch(-(-sequence.num_computed_tokens // self.block_size))
        self._index.share(sequence, child)
        self._copies.forked |= {sequence, child}
        return child

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the (from, to) block pairs to copy, in this order, before the next step computes; then forget them.

        Raises ValueError with a host tier: then copies are among the transfers, in an order that matters.
        """
        if self._host is not None:
            raise ValueError("take_copies: with host_blocks, copies are among what take_transfers returns")
        return [pair for transfer in self._transfers.take() for pair in transfer.pairs]

    def take_transfers(self) -> list[Transfer]:
        """Return what to move between pages, in this order, before the next step computes; then forget it.

        Copies, and with a host tier what is saved to host blocks and loaded from them. If moving it fails,
        `fail_transfers`.
        """
        return self._transfers.take()

    def fail_transfers(self, transfers: Iterable[Transfer]) -> set[int]:
        """These have not been made, or not all of them: nothing that they were to bring is found again. Return the
        blocks that lack their content; their holders can only be aborted."""
        blocks = {target for kind, pairs in transfers if kind != "save" for _, target in pairs}
        if self._host is not None:
            self._host.forget_blocks(target for kind, pairs in transfers if kind == "save" for _, target in pairs)
        self.evict_blocks(blocks)
        return blocks

    def retain(
        self,
        token_ids: TokenIds,
        namespace: Namespace = DEFAULT_NAMESPACE,
        *,
        media: SequenceOf[Media] = (),
        ttl_s: float | None = None,
        priority: int = 0,
    ) -> Retention:
        """Keep what is cached of a prompt, its whole blocks, until `ttl_s` seconds have passed.

        The share of the pool bounds what is kept: a prefix that does not fit is kept in part. Running sequences come
        first: if nothing else can give them room, retained prefixes give way, lowest priority first, then those renewed
        longest ago.
        """
        return self._retained.add(self.start(token_ids, namespace, media=media), self.block_size, priority, ttl_s)

    # -- questions -------------------------------------------------------------------------------------------------

    def match(
        self, token_ids: TokenIds, namespace: Namespace = DEFAULT_NAMESPACE, *, media: SequenceOf[Media] = ()
    ) -> int:
        """Return how many leading tokens a sequence with this prompt would be served now. Changes nothing."""
        return self.lookup(self.start(token_ids, namespace, media=media))

    def lookup(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence that is not running its admission would find now. Changes nothing; an
        `allocate` that follows does not look again."""
        if sequence.manager is not self:
            raise _foreign()
        return self._admission.num_found_tokens(sequence)

    def num_to_load(self, sequence: Sequence) -> int:
        """Return how many blocks an admission of a sequence that is not running would bring back from host memory now.
        Changes nothing."""
        if self._host is None:
            return 0
        self.lookup(sequence)
        return len(sequence.host_blocks)

    def explain(
        self, token_ids: TokenIds, namespace: Namespace = DEFAULT_NAMESPACE, *, media: SequenceOf[Media] = ()
    ) -> Explanation:
        """Say where the match of a prompt ends now, and why. Changes nothing. Cost: a lookup in every namespace."""
        sequence = self.start(token_ids, namespace, media=media)
        num_cached = self.lookup(sequence)
        return explain(self._index, self._host, sequence, sequence.hit, num_cached, self.block_size)

    def block_digests(self, sequence: Sequence) -> list[bytes]:
        """Return the names of a running sequence's computed full blocks, in order. Cost: a digest for each block of a
        prefix that was never named before."""
        self._require_running(sequence, "has blocks to name")
        return self._index.names(sequence, sequence.num_computed_tokens // self.block_size)

    def take_events(self) -> list[Event]:
        """Return what has happened since the last call, in order; then forget it."""
        if self._events is None:
            raise ValueError("events: this manager records none; make it with events=True")
        events = self._events[:]
        self._events.clear()
        return events

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now: blank ones, cached ones that nobody holds, and those only retained."""
        if self._retained.active:
            return self._index.room(NO_HIT, self._retained.holders)
        return self._index.num_available

    @property
    def num_retained_blocks(self) -> int:
        """Blocks that `retain` keeps, each counted once."""
        return self._retained.num_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that are cached and held by nobody."""
        return self._index.num_cached

    @property
    def num_host_blocks(self) -> int:
        """Blocks of host memory, 0 without a host tier."""
        return 0 if self._host is None else self._host.num_blocks

    @property
    def num_cached_host_blocks(self) -> int:
        """Those of them that hold something."""
        return 0 if self._host is None else self._host.num_cached

    @property
    def usage(self) -> float:
        """Share of the pool that sequences hold, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks

    def stats(self) -> CacheStats:
        """Return the counters as they stand."""
        stats = self._stats.copy()
        stats.evicted_blocks = self._index.num_evicted_blocks
        if self._host is not None:
            stats.saved_blocks = self._host.num_saved
            stats.loaded_blocks = self._host.num_loaded
            stats.host_evicted_blocks = self._host.num_evicted
        return stats

    @property
    def measures_residency(self) -> bool:
        """Whether `residency` has something to tell."""
        return self._residency is not None

    def residency(self) -> ResidencyStats:
        """Return how long blocks stay, lie idle before they are evicted, and after how long they are used again."""
        if self._residency is None:
            raise ValueError("measure_residency: this manager keeps no times; make it with measure_residency=True")
        return self._residency.snapshot()

    def check(self) -> None:
        """Assert every invariant of the class. Raises InvariantError. Cost: O(pool + tokens); for tests and doubts."""
        for sequence in self._index.holders:
            require(sequence.state == "running", "a sequence that gave its blocks back is still on the books")
            num_slots = len(sequence.block_table) * self.block_size
            require(sequence.num_computed_tokens <= sequence.num_tokens, "more computed than known")
            require(sequence.num_computed_tokens <= num_slots, "more computed than allocated")
            require(sequence.num_indexed_blocks <= sequence.num_computed_tokens // self.block_size, "found too early")
        self._index.check()
        if self._host is not None:
            self._host.check(self._index)

    def set_quota(self, namespace: Namespace, max_blocks: int | None) -> None:
        """Bound what stays cached under a namespace when nobody holds it; None for no bound.

        A namespace with a quota can neither crowd out the others with what it leaves behind, nor be crowded out by
        them: its cached blocks are evicted by its own order, and for others only when those have none left.
        """
        if namespace.__class__ is not Namespace:
            raise TypeError(f"namespace: expected a Namespace, got {type(namespace).__name__}")
        if max_blocks is not None and (max_blocks.__class__ is not int or max_blocks < 0):
            raise ValueError(f"max_blocks: expected an integer, 0 or more, or None for no bound, got {max_blocks!r}")
        self._index.set_quota(namespace, max_blocks)

    # -- the whole -------------------------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Forget every cached prefix. Return False, with nothing changed, while sequences hold blocks."""
        if len(self._index.holders) > len(self._retained.holders):
            return False
        self._retained.release_all()
        if self._host is not None:
            self._host.clear()
            self._transfers.clear()
        self._index.clear()
        return True

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make the content of these blocks, and all that extends it, unfindable. Running sequences keep their blocks
        and go on, but nothing that builds on forgotten content is published again. Cost: O(tree)."""
        blocks = check_block_ids(block_ids, self.num_blocks)
        self._retained.release_those_with(blocks)
        if not self._index.keeps_orphans:
            for sequence in self._index.holders:
                if sequence.part_of in blocks or sequence.holds_any(blocks):
                    sequence.publishes = False
        self._index.forget(blocks)

    def invalidate(self) -> None:
        """The weights have changed: nothing cached so far is found again, whoever holds it. Running sequences go on
        with the KV that they have and publish nothing; waiting and preempted ones find only what is computed anew."""
        self._retained.release_all()
        for sequence in self._index.holders:
            sequence.publishes = False
        if self._host is not None:
            self._host.clear()
        self._index.forget(None)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _require_running(self, sequence: Sequence, what: str) -> None:
        if sequence.manager is not self:
            raise _foreign()
        if sequence.state != "running":
            raise ValueError(f"sequence: only a running one {what}, this one is {sequence.state}")

    def _end(self, sequence: Sequence) -> bool:
        """Whether it had not ended before."""
        if sequence.manager is not self:
            raise _foreign()
        if sequence.state == "finished":
            return False
        if sequence.state == "running":
            self._give_back(sequence)
        sequence.state = "finished"
        return True

    def _give_back(self, sequence: Sequence) -> None:
        self._index.release(sequence)
        if self._copies.forked:
            self._copies.forked.discard(sequence)
        sequence.block_table = NO_BLOCKS
        sequence.block_tables = self._no_tables
        sequence.num_computed_tokens = sequence.num_indexed_blocks = 0


def _foreign() -> ValueError:
    return ValueError("sequence: it was started by another manager")
