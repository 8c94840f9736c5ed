"""HashIndex: digests -> blocks, with the rules of vLLM (version 0.32).

Every full block is named by a digest of everything before it. Equal content computed twice is kept twice; the earliest
copy is served. A freed block keeps its name until its id is handed out again.

A name is no proof. So a lookup does not go by names: it compares tokens with the prefixes that are known (`run_trie`),
and names are read off those. That verifies every hit (a forged digest, or a collision, costs nothing). No prefix that
is known is ever digested again, and none is digested before somebody asks for its name.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from anaphora.cache.events import BlockStored, stretches
from anaphora.cache.eviction import Lru
from anaphora.cache.index import NO_HIT, Hit, require
from anaphora.cache.named_blocks import NamedBlocks
from anaphora.cache.pool import FreeQueue
from anaphora.cache.quota_lanes import QuotaLanes
from anaphora.cache.run import Run
from anaphora.cache.run_trie import RunTrie
from anaphora.identity import extra_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Set

    from anaphora.cache.events import Event
    from anaphora.cache.eviction import EvictionPolicy
    from anaphora.cache.index import NextTier
    from anaphora.cache.prefix import Prefix
    from anaphora.cache.quota_lanes import QuotaLane
    from anaphora.cache.residency import Residency
    from anaphora.cache.sequence import Sequence
    from anaphora.cache.windows import Windows
    from anaphora.identity import BlockDigests, Namespace


class Found(NamedTuple):
    """Where a hit ends, per layer group the blocks that it needs (its last ones, of full attention all), and those of
    them that nobody holds."""

    run: Run
    position: int
    blocks: list[array[int]]
    idle: list[int]


class HashIndex:
    """The known prefixes, who holds which block, and the free queue. Implements `PrefixIndex`.

    What it keeps on a sequence (`index_state`): the run and the position where its first `num_indexed_blocks` blocks
    end, None while it holds nothing.

    Cost: finding compares memory and copies slices; the rest does a few steps of Python a block, 0.2 us for its whole
    life. With events a digest for each block of a prefix that was not known.
    """

    keeps_orphans = False
    """Whether what extends explicitly forgotten content stays named, to be found once that is computed anew. vLLM does
    so; here only its golden traces do, since content is forgotten on purpose."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        digests: BlockDigests,
        events: list[Event] | None,
        windows: Windows,
        policy: EvictionPolicy,
        residency: Residency | None,
    ) -> None:
        if not isinstance(policy, Lru):
            raise ValueError("eviction: index='hash' evicts as vLLM does, 'lru'; others need index='radix'")
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._digests = digests
        self._events = events
        self._windows = windows
        self._residency = residency
        self._trie = RunTrie(block_size, windows.num_groups, digests)
        self._named = NamedBlocks(num_blocks, self._trie, events, windows, residency)
        self._free = FreeQueue(num_blocks)
        self._lanes = QuotaLanes()
        self._num_holders = [0] * (num_blocks + 1)
        self._num_named_free = 0
        self.holders: dict[Sequence, None] = {}
        self.num_evicted_blocks = 0
        self.version = 0

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds: blank ones, and cached ones."""
        return len(self._free) + len(self._lanes) if self._lanes else len(self._free)

    @property
    def num_cached(self) -> int:
        """Named blocks that nobody holds."""
        return self._num_named_free

    def room(self, hit: Hit, without: Iterable[Sequence]) -> int:
        """What would be available, counted block by block."""
        num_holders: dict[int, int] = {}
        for sequence in without:
            for table in sequence.block_tables:
                for block in filter(None, table):
                    num_holders[block] = num_holders.get(block, self._num_holders[block]) - 1
        room = self.num_available + sum(not count for count in num_holders.values())
        if hit.where is not None:
            for blocks in hit.where.blocks:
                room -= sum(not num_holders.get(block, self._num_holders[block]) for block in blocks)
        return room

    # -- finding and holding ---------------------------------------------------------------------------------------

    def find(self, sequence: Prefix, max_blocks: int) -> Hit:
        """Walk down the known prefixes for as long as every full-attention group has them cached, then shorten to what
        every window group can serve. `where` is a `Found`, None where nothing is found."""
        root = self._trie.roots.get(sequence.namespace)
        path = self._trie.walk(sequence, root, 0, max_blocks) if root is not None else None
        if not path:
            return NO_HIT
        windows = self._windows
        blocks: list[array[int]] = [array("i") for _ in range(windows.num_groups)]
        num_full = 0
        for run, first, end in path:
            last = end
            for group in windows.full_groups:
                if run.num_cached[group] < run.num_blocks:
                    last = _first_hole(run.columns[group], first, last)
            for served, column in zip(blocks, run.columns, strict=True):
                served.extend(column[first:last])
            num_full += last - first
            if last < end:
                break
        num_hit = num_full
        if windows.window_groups:
            num_hit = windows.fit(num_full, lambda group, position: blocks[group][position] > 0)
        for group, first in enumerate(windows.first_needed(num_hit)):
            blocks[group] = blocks[group][first:num_hit]
        num_holders = self._num_holders
        idle = [block for needed in blocks for block in needed if not num_holders[block]]
        found = Found(*self._trie.place(run, num_hit), blocks, idle)
        return Hit(num_hit, len(idle), found, num_full if windows.full_groups else num_hit)

    def continuations(self, sequence: Sequence, hit: Hit) -> Iterable[tuple[bytes, int]]:
        """Every cached block that extends the last prefix."""
        run, position = hit.where[:2] if hit.where else (self._trie.roots.get(sequence.namespace), 0)
        if run is None or not isinstance(sequence.label(hit.num_blocks, self._trie.width), bytes):
            return ()
        return self._trie.continuations(run, position)

    def was_evicted(self, sequence: Sequence, hit: Hit) -> bool:
        """Whether the block after a hit is remembered."""
        return self._named.ghosts.has(sequence, hit.where and hit.where.run, hit.num_blocks)

    def namespaces(self) -> Iterable[Namespace]:
        """The roots."""
        return list(self._trie.roots)

    def pin(self, sequence: Sequence, hit: Hit) -> None:
        """Count the sequence as one more holder of each block found."""
        self.version += 1
        self.holders[sequence] = None
        if hit.where is None:
            self._stand(sequence, self._trie.root(sequence.namespace), 0)
            return
        num_holders = self._num_holders
        for table, needed in zip(sequence.block_tables, hit.where.blocks, strict=True):
            table.extend([0] * (hit.num_blocks - len(needed)))
            table.extend(needed)
            for block in needed:
                num_holders[block] += 1
        idle = hit.where.idle
        if idle:
            (self._lanes.get(sequence.namespace) or self._free).remove(idle)
            self._num_named_free -= len(idle)
            if self._residency is not None:
                for block in idle:
                    self._residency.held(block, 1)
        sequence.num_indexed_blocks = hit.num_blocks
        self._stand(sequence, hit.where.run, hit.where.position)

    def release(self, sequence: Sequence) -> None:
        """Count one holder less, last block first: named blocks go to the tail of the queue, the others to its head."""
        self.version += 1
        del self.holders[sequence]
        for table in sequence.block_tables:
            self._let_go(sequence.namespace, table)
        self._trie.leave(*sequence.index_state)
        sequence.index_state = None

    def _let_go(self, namespace: Namespace, blocks: array[int]) -> None:
        named: list[int] = []
        blank: list[int] = []
        num_holders, runs = self._num_holders, self._named.runs
        for block in reversed(blocks):
            rest = num_holders[block] - 1
            if not rest:
                num_holders[block] = 0
                (blank if runs[block] is None else named).append(block)
            elif block:
                num_holders[block] = rest
        if blank:
            self._free.prepend(array("i", blank))
        lane = self._lanes.get(namespace)
        (lane or self._free).append(array("i", named))
        if self._residency is not None:
            for block in named:
                self._residency.let_go(block)
        self._num_named_free += len(named)
        if lane is not None:
            self._evict_excess(lane)

    def count_use(self, sequence: Sequence) -> None:
        """Nothing to do: recency is all that counts."""

    def num_leaving(self, sequence: Sequence) -> int:
        """Blocks of tokens that the windows have left and that nobody else holds."""
        num_leaving = 0
        for group, first in self._windows.left_behind(sequence.num_computed_tokens):
            for block in sequence.block_tables[group][:first]:
                num_leaving += block > 0 and self._num_holders[block] == 1
        return num_leaving

    def slide(self, sequence: Sequence) -> None:
        """Let go the blocks of tokens that the windows have left; the null block takes their place."""
        for group, first in self._windows.left_behind(sequence.num_computed_tokens):
            table = sequence.block_tables[group]
            if any(table[:first]):
                self.version += 1
                self._let_go(sequence.namespace, table[:first])
                table[:first] = array("i", [0] * first)

    # -- blocks ----------------------------------------------------------------------------------------------------

    def take(self, num_blocks: int) -> array[int]:
        """The first blocks of the queue, then those that quotas keep; those with a name lose it."""
        self.version += 1
        num_shared = min(num_blocks, len(self._free)) if self._lanes else num_blocks
        blocks = self._free.take(num_shared)
        if num_shared < num_blocks:
            blocks += self._lanes.take(num_blocks - num_shared)
        num_holders = self._num_holders
        for block in blocks:
            num_holders[block] = 1
        self._evict(blocks)
        return blocks

    def _evict(self, blocks: array[int]) -> None:
        """Take their names from blocks that left the queue, or a lane."""
        num_evicted = self._named.evict(blocks)
        self._num_named_free -= num_evicted
        self.num_evicted_blocks += num_evicted

    def _evict_excess(self, lane: QuotaLane) -> None:
        excess = lane.take_excess()
        if excess:
            self._evict(excess)
            self._free.prepend(excess)

    def spill_to(self, host: NextTier) -> None:
        """Evicted blocks go there."""
        self._named.host = host

    # -- learning --------------------------------------------------------------------------------------------------

    def insert(self, sequence: Sequence, num_blocks: int) -> None:
        """Name the sequence's newly full blocks."""
        self.version += 1
        trie = self._trie
        run: Run = sequence.index_state[0]
        first = sequence.num_indexed_blocks
        path = trie.walk(sequence, run, first, num_blocks)
        if path:
            run = path[-1].run
        new = trie.add(sequence, run, first + sum(end - start for _, start, end in path), num_blocks)
        path += new
        columns = [self._findable(sequence, group, first, num_blocks) for group in range(self._windows.num_groups)]
        for group, blocks in enumerate(columns):
            done = 0
            for run, start, end in path:
                self._named.name(group, run, start, blocks[done : done + end - start])
                done += end - start
        if sequence.media:
            for run, _, end in new:
                trie.names(run, end, sequence.media)
        if self._events is not None:
            before = trie.path_names(*sequence.index_state)[-1:]
            names = [name for run, start, end in path for name in trie.names(run, end)[start:end]]
            for group, blocks in enumerate(columns):
                self._events.extend(self._stored_events(sequence, group, blocks, before + names))
        self._stand(sequence, path[-1].run, path[-1].end)
        sequence.num_indexed_blocks = num_blocks

    def _findable(self, sequence: Sequence, group: int, first: int, last: int) -> array[int]:
        """A group's blocks first .. last - 1, those that are to have a name; 0 for the others."""
        blocks = sequence.block_tables[group][first:last]
        keeps = self._windows.retained(group, sequence, first, last)
        if isinstance(keeps, range):
            return blocks
        return array("i", [block if at in keeps else 0 for at, block in enumerate(blocks, first)])

    def _stored_events(
        self, sequence: Sequence, group: int, blocks: array[int], names: list[bytes]
    ) -> Iterator[BlockStored]:
        """One event for each stretch of a group's newly full blocks that got a name. `names` are those of all of them,
        and before them, unless they begin the prompt, that of the block before."""
        first = sequence.num_indexed_blocks
        names_before = len(names) - len(blocks)
        width = self._trie.width
        for start, end in stretches(map(bool, blocks)):
            own = names_before + start
            yield BlockStored(
                digests=tuple(names[own : own + end - start]),
                parent=names[own - 1] if own else None,
                tokens=bytes(sequence.tokens[(first + start) * width : (first + end) * width]),
                block_size=self._block_size,
                namespace=sequence.namespace,
                extras=extra_keys(sequence.namespace, sequence.media, first + start, end - start, self._block_size),
                group=group,
            )

    def _stand(self, sequence: Sequence, run: Run, position: int) -> None:
        """Move the sequence to another place; the one that it leaves may be of no use any more."""
        left = sequence.index_state
        self._trie.stand(run, position)
        sequence.index_state = run, position
        if left is not None:
            self._trie.leave(*left)

    def names(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Digests of a holder's first blocks; known prefixes carry theirs once they have been asked for."""
        names = self._trie.path_names(*sequence.index_state)
        first = len(names)
        if first < num_blocks:
            parent = names[-1] if names else self._digests.root(sequence.namespace)
            extras = extra_keys(sequence.namespace, sequence.media, first, num_blocks - first, self._block_size)
            tokens = bytes(sequence.tokens[first * self._trie.width : num_blocks * self._trie.width])
            names += self._digests.chain(parent, tokens, self._block_size, extras)
        return names[:num_blocks]

    # -- sharing and forgetting ------------------------------------------------------------------------------------

    def share(self, parent: Sequence, child: Sequence) -> None:
        """One more holder for each block."""
        self.version += 1
        self.holders[child] = None
        self._stand(child, *parent.index_state)
        for table in child.block_tables:
            for block in filter(None, table):
                self._num_holders[block] += 1

    def is_shared(self, block: int) -> bool:
        """Whether several sequences hold it."""
        return self._num_holders[block] > 1

    def leave(self, block: int) -> None:
        """One holder less; at least one remains."""
        self._num_holders[block] -= 1

    def forget(self, blocks: Set[int] | None) -> None:
        """Names go; the queue and the counts of holders stay. With the last copy of a prefix goes what extends it."""
        self.version += 1
        chosen = range(1, self._num_blocks + 1) if blocks is None else sorted(blocks)
        gone, lost = self._named.forget(chosen, self.keeps_orphans)
        self._num_named_free -= sum(not self._num_holders[block] for block in gone)
        if self._lanes:
            self._free.prepend(self._lanes.remove_if_here(gone))
        for sequence in self.holders:
            run, position = sequence.index_state
            if run in lost and position > lost[run]:
                sequence.publishes = False

    # -- the whole -------------------------------------------------------------------------------------------------

    def set_quota(self, namespace: Namespace, max_blocks: int | None) -> None:
        """Keep a namespace's free blocks in a lane of their own. vLLM has one queue for all."""
        self.version += 1
        if max_blocks is None:
            self._free.append(self._lanes.close(namespace))
            return
        is_new = self._lanes.get(namespace) is None
        lane = self._lanes.open(namespace, max_blocks)
        root = self._trie.roots.get(namespace)
        if is_new and root is not None:
            runs = self._named.runs
            own = [block for block in self._free if (run := runs[block]) is not None and run.root is root]
            self._free.remove(own)
            lane.append(own)
        self._evict_excess(lane)

    def clear(self) -> None:
        """Forget every name; the order of the queue, and the quotas, stay."""
        self.version += 1
        self._free.prepend(self._lanes.clear())
        self._named.clear()
        self._num_named_free = 0

    def stored(self) -> list[tuple[bytes, int]]:
        """Name and group of every named block."""
        return self._named.stored()

    def check(self) -> None:
        """Count everything again; see `PrefixIndex.check`."""
        num_holders = [0] * (self._num_blocks + 1)
        standing: dict[tuple[Run, int], int] = {}
        for sequence in self.holders:
            self._check_holder(sequence)
            standing[sequence.index_state] = standing.get(sequence.index_state, 0) + 1
            for block in (block for table in sequence.block_tables for block in table if block):
                num_holders[block] += 1
        require(num_holders == self._num_holders, "the counts of holders are wrong")
        self._free.check()
        self._lanes.check()
        free = set(self._free)
        lanes = set(self._lanes)
        require(not free & lanes, "a block stands in the queue and in a lane")
        require(all(self._named.runs[b] is not None for b in lanes), "a block without a name stands in a lane")
        free |= lanes
        require(free == {b for b in range(1, self._num_blocks + 1) if not num_holders[b]}, "free is not unheld")
        require(
            sum(self._named.runs[b] is not None for b in free) == self._num_named_free, "the count of cached blocks"
        )
        self._trie.check(standing)
        self._named.check()

    def _check_holder(self, sequence: Sequence) -> None:
        tables = sequence.block_tables
        held = [block for table in tables for block in table if block]
        require(len(set(held)) == len(held), "a block stands twice in a sequence's tables")
        require(all(1 <= block <= self._num_blocks for block in held), "a block is none of the pool's")
        run, position = sequence.index_state
        require(run.root is self._trie.roots.get(sequence.namespace), "a sequence stands under another namespace")
        require(run.depth + position == sequence.num_indexed_blocks, "a sequence stands elsewhere than it counts")
        require(self._trie.place(run, run.depth + position) == (run, position), "a place goes by two names")
        for at in range(sequence.num_indexed_blocks - 1, -1, -1):
            run, end = self._trie.place(run, at + 1)
            label = sequence.label(at, self._trie.width)
            require(label == self._trie.label_at(run, end - 1), "a prefix of other tokens")
            for table in tables:
                has_name = self._named.runs[table[at]] is not None
                require(not has_name or self._named.is_at(table[at], run, end - 1), "a block with another prefix")
        for table in tables:
            unnamed = all(self._named.runs[block] is None for block in table[sequence.num_indexed_blocks :])
            require(unnamed, "named, but not committed")


def _first_hole(column: array[int], first: int, end: int) -> int:
    """Return the first position, at most `end`, where nothing is cached."""
    try:
        return column.index(0, first, end)
    except ValueError:
        return end
