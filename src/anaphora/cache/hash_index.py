"""HashIndex: digests -> blocks, by a map, with the rules of vLLM (version 0.32).

Every full block is named by a digest of everything before it. Equal content computed twice is kept twice; the earliest
copy is served. A freed block keeps its name until its id is handed out again.

A name is no proof. So a lookup does not go by names: it walks the prefixes that are known, block by block, comparing
tokens, and reads the names off them. That verifies every hit (a forged digest, or a collision, costs nothing), and no
prefix that is known is ever digested again.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from anaphora.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from anaphora.cache.eviction import Lru
from anaphora.cache.index import NUM_GHOSTS, Hit, require
from anaphora.cache.pool import FreeQueue
from anaphora.identity import extra_keys
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Set

    from anaphora.cache.events import Event
    from anaphora.cache.eviction import EvictionPolicy
    from anaphora.cache.residency import Residency
    from anaphora.cache.segments import BlockContent
    from anaphora.cache.sequence import Sequence
    from anaphora.cache.windows import Windows
    from anaphora.identity import BlockDigests, Namespace


Label: TypeAlias = "bytes | tuple[bytes, BlockContent]"
"""What tells a block from its siblings: its tokens, and its media if it has any."""


class _Prefix:
    """A prefix of whole blocks under one namespace, known because it, or one that extends it, is cached or in use.

    blocks: per layer group those that hold its last block's KV, in the order in which they were inserted. Where there
        are none, it is known for the sake of what extends it.
    num_standing: sequences whose indexed blocks end here.
    """

    __slots__ = ("blocks", "digest", "kids", "label", "num_standing", "parent")

    def __init__(self, parent: _Prefix | None, label: Label, digest: bytes, num_groups: int) -> None:
        self.parent = parent
        self.label = label
        self.digest = digest
        self.kids: dict[Label, _Prefix] = {}
        self.num_standing = 0
        self.blocks: tuple[list[int], ...] = tuple([] for _ in range(num_groups))

    @property
    def is_useless(self) -> bool:
        """Whether nothing is cached here or beyond, and nobody stands here."""
        return not (self.kids or self.num_standing or any(self.blocks))


class _Root(_Prefix):
    """The empty prefix of a namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace, digest: bytes) -> None:
        super().__init__(None, b"", digest, 0)
        self.namespace = namespace


class HashIndex:
    """The known prefixes, the map of names, and the free queue. Implements `PrefixIndex`.

    What it keeps on a sequence (`index_state`): the prefix of its first `num_indexed_blocks` blocks.
    Cost: O(1) a block for everything; a digest for each block of a prefix that was not known.
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
        self._width = block_size * TOKEN_BYTES
        self._digests = digests
        self._events = events
        self._windows = windows
        self._residency = residency
        self._free = FreeQueue(num_blocks)
        self._num_holders = [0] * (num_blocks + 1)
        self._prefixes: list[_Prefix | None] = [None] * (num_blocks + 1)
        """Per block the prefix that it ends, None for a block without a name."""
        self._group = bytearray(num_blocks + 1)
        """Per named block its layer group."""
        self._roots: dict[Namespace, _Root] = {}
        self._num_named_free = 0
        self._ghosts: deque[bytes] = deque(maxlen=NUM_GHOSTS)
        """Names of blocks that were evicted."""
        self.holders: dict[Sequence, None] = {}
        self.num_evicted_blocks = 0
        self.version = 0

    @property
    def num_available(self) -> int:
        """Length of the free queue: blank blocks, and cached ones that nobody holds."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Named blocks in the free queue."""
        return self._num_named_free

    def room(self, hit: Hit, without: Iterable[Sequence]) -> int:
        """What would be available, counted block by block."""
        num_holders: dict[int, int] = {}
        for sequence in without:
            for table in sequence.block_tables:
                for block in filter(None, table):
                    num_holders[block] = num_holders.get(block, self._num_holders[block]) - 1
        room = self.num_available + sum(not count for count in num_holders.values())
        for group, first in enumerate(self._windows.first_needed(hit.num_blocks)):
            for prefix in (hit.where or ())[first:]:
                block = prefix.blocks[group][0]
                room -= not num_holders.get(block, self._num_holders[block])
        return room

    # -- finding and holding ---------------------------------------------------------------------------------------

    def find(self, sequence: Sequence, max_blocks: int) -> Hit:
        """Walk down the known prefixes for as long as every full-attention group has them cached, then shorten to what
        every window group can serve. `where` is the path of prefixes."""
        path: list[_Prefix] = []
        prefix: _Prefix | None = self._roots.get(sequence.namespace)
        full = self._windows.full_groups
        if prefix is not None:
            for position in range(max_blocks):
                prefix = prefix.kids.get(self._label(sequence, position))
                if prefix is None:
                    break
                for group in full:
                    if not prefix.blocks[group]:
                        break
                else:
                    path.append(prefix)
                    continue
                break
        num_full = len(path)
        num_hit = self._windows.fit(num_full, lambda group, position: bool(path[position].blocks[group]))
        del path[num_hit:]
        num_holders = self._num_holders
        num_unpinned = 0
        for group, first in enumerate(self._windows.first_needed(num_hit)):
            for position in range(first, num_hit):
                num_unpinned += not num_holders[path[position].blocks[group][0]]
        return Hit(num_hit, num_unpinned, path, num_full if full else num_hit)

    def continuations(self, sequence: Sequence, hit: Hit) -> Iterable[tuple[bytes, int]]:
        """Every cached block that extends the last prefix."""
        prefix = hit.where[-1] if hit.where else self._roots.get(sequence.namespace)
        if prefix is None or not isinstance(self._label(sequence, hit.num_blocks), bytes):
            return
        for label, kid in prefix.kids.items():
            if isinstance(label, bytes) and kid.blocks[0]:
                yield label, kid.blocks[0][0]

    def was_evicted(self, sequence: Sequence, hit: Hit) -> bool:
        """Whether the name that the next block would have is remembered."""
        before = hit.where[-1].digest if hit.where else self._digests.root(sequence.namespace)
        return self._chain(sequence, before, hit.num_blocks, hit.num_blocks + 1)[0] in self._ghosts

    def namespaces(self) -> Iterable[Namespace]:
        """The roots."""
        return list(self._roots)

    def pin(self, sequence: Sequence, hit: Hit) -> None:
        """Count the sequence as one more holder of each block found."""
        self.version += 1
        self.holders[sequence] = None
        path: list[_Prefix] = hit.where
        for group, first in enumerate(self._windows.first_needed(hit.num_blocks)):
            table = sequence.block_tables[group]
            table.extend([0] * first)
            for prefix in path[first:]:
                block = prefix.blocks[group][0]
                table.append(block)
                if not self._num_holders[block]:
                    self._free.remove(block)
                    self._num_named_free -= 1
                    if self._residency is not None:
                        self._residency.held(block, 1)
                self._num_holders[block] += 1
        sequence.num_indexed_blocks = hit.num_blocks
        self._stand(sequence, path[-1] if path else self._root(sequence.namespace))

    def _root(self, namespace: Namespace) -> _Root:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Root(namespace, self._digests.root(namespace))
        return root

    def release(self, sequence: Sequence) -> None:
        """Count one holder less, last block first: named blocks go to the tail of the queue, the others to its head."""
        self.version += 1
        del self.holders[sequence]
        self._stand(sequence, None)
        for table in sequence.block_tables:
            self._let_go(table)

    def _let_go(self, blocks: array[int]) -> None:
        named, blank = array("i"), array("i")
        for block in reversed(blocks):
            if not block:
                continue
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                (named if self._prefixes[block] else blank).append(block)
        self._free.prepend(blank)
        self._free.append(named)
        if self._residency is not None:
            for block in named:
                self._residency.let_go(block)
        self._num_named_free += len(named)

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
                self._let_go(table[:first])
                table[:first] = array("i", [0] * first)

    # -- blocks ----------------------------------------------------------------------------------------------------

    def take(self, num_blocks: int) -> array[int]:
        """The first blocks of the queue; those with a name lose it."""
        self.version += 1
        blocks = self._free.take(num_blocks)
        for block in blocks:
            self._num_holders[block] = 1
            prefix = self._prefixes[block]
            if prefix:
                self._ghosts.append(prefix.digest)
                if self._residency is not None:
                    self._residency.evicted(block, 1)
                self._unname(block)
                self._num_named_free -= 1
                self.num_evicted_blocks += 1
        return blocks

    def _unname(self, block: int) -> None:
        prefix = self._prefixes[block]
        assert prefix is not None
        self._prefixes[block] = None
        group = self._group[block]
        prefix.blocks[group].remove(block)
        if self._events is not None:
            self._events.append(BlockRemoved((prefix.digest,), group=group))
        self._prune(prefix)

    # -- learning --------------------------------------------------------------------------------------------------

    def insert(self, sequence: Sequence, num_blocks: int) -> None:
        """Name the sequence's newly full blocks."""
        self.version += 1
        prefix: _Prefix = sequence.index_state
        first = sequence.num_indexed_blocks
        path: list[_Prefix] = []
        for position in range(first, num_blocks):
            kid = prefix.kids.get(self._label(sequence, position))
            if kid is None:
                break
            path.append(kid)
            prefix = kid
        num_known = first + len(path)
        for position, digest in enumerate(self._chain(sequence, prefix.digest, num_known, num_blocks), num_known):
            label = self._label(sequence, position)
            kid = prefix.kids[label] = _Prefix(prefix, label, digest, self._windows.num_groups)
            path.append(kid)
            prefix = kid
        for group, table in enumerate(sequence.block_tables):
            self._name(sequence, group, table, path)
        self._stand(sequence, prefix)
        sequence.num_indexed_blocks = num_blocks

    def _name(self, sequence: Sequence, group: int, table: array[int], path: list[_Prefix]) -> None:
        """Give the blocks of one group that have become full, from `num_indexed_blocks` on, to their prefixes."""
        first = sequence.num_indexed_blocks
        keeps = self._windows.retained(group, sequence, first, first + len(path))
        named = [
            (position, prefix) for position, prefix in enumerate(path, first) if table[position] and position in keeps
        ]
        for position, prefix in named:
            block = table[position]
            prefix.blocks[group].append(block)
            self._prefixes[block] = prefix
            self._group[block] = group
            if self._residency is not None:
                self._residency.stored(block)
        if self._events is not None:
            for run in _consecutive(named):
                self._events.append(self._stored_event(sequence, group, run))

    def _stored_event(self, sequence: Sequence, group: int, run: list[tuple[int, _Prefix]]) -> BlockStored:
        start, prefix = run[0]
        end = start + len(run)
        return BlockStored(
            digests=tuple(prefix.digest for _, prefix in run),
            parent=prefix.parent.digest if prefix.parent is not None and prefix.parent.parent is not None else None,
            tokens=bytes(sequence.tokens[start * self._width : end * self._width]),
            block_size=self._block_size,
            namespace=sequence.namespace,
            extras=extra_keys(sequence.namespace, sequence.media, start, end - start, self._block_size),
            group=group,
        )

    def _label(self, sequence: Sequence, position: int) -> Label:
        start = position * self._width
        label = bytes(sequence.tokens[start : start + self._width])
        if sequence.segments is not None:
            content, _ = sequence.segments.at(position)
            if content is not None:
                return label, content
        return label

    def _stand(self, sequence: Sequence, prefix: _Prefix | None) -> None:
        """Move the sequence to another prefix, or away; the one that it leaves may be of no use any more."""
        left: _Prefix | None = sequence.index_state
        if prefix is not None:
            prefix.num_standing += 1
        sequence.index_state = prefix
        if left is not None:
            left.num_standing -= 1
            self._prune(left)

    def _prune(self, prefix: _Prefix) -> None:
        while prefix.is_useless:
            if prefix.parent is None:
                if isinstance(prefix, _Root):
                    del self._roots[prefix.namespace]
                return
            del prefix.parent.kids[prefix.label]
            prefix = prefix.parent

    # -- names -----------------------------------------------------------------------------------------------------

    def names(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Digests of a holder's first blocks; known prefixes carry theirs."""
        names: list[bytes] = []
        prefix: _Prefix = sequence.index_state
        while prefix.parent is not None:
            names.append(prefix.digest)
            prefix = prefix.parent
        names.reverse()
        parent = names[-1] if names else prefix.digest
        return (names + self._chain(sequence, parent, len(names), num_blocks))[:num_blocks]

    def _chain(self, sequence: Sequence, parent: bytes, first: int, last: int) -> list[bytes]:
        if first >= last:
            return []
        extras = extra_keys(sequence.namespace, sequence.media, first, last - first, self._block_size)
        tokens = bytes(sequence.tokens[first * self._width : last * self._width])
        return self._digests.chain(parent, tokens, self._block_size, extras)

    # -- sharing and forgetting ------------------------------------------------------------------------------------

    def share(self, parent: Sequence, child: Sequence) -> None:
        """One more holder for each block."""
        self.version += 1
        self.holders[child] = None
        self._stand(child, parent.index_state)
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
        """Names go; the queue and the counts stay as they are. With the last copy of a prefix goes what extends it."""
        self.version += 1
        forgotten: list[_Prefix] = []
        for block in range(1, self._num_blocks + 1) if blocks is None else sorted(blocks):
            prefix = self._prefixes[block]
            if prefix is not None:
                self._forget(block)
                forgotten.append(prefix)
        if self.keeps_orphans:
            return
        lost: set[_Prefix] = set()
        stack = [prefix for prefix in forgotten if not any(prefix.blocks)]
        while stack:
            prefix = stack.pop()
            if prefix not in lost:
                lost.add(prefix)
                stack.extend(prefix.kids.values())
        for prefix in lost:
            for block in [block for copies in prefix.blocks for block in copies]:
                self._forget(block)
        for sequence in self.holders:
            if sequence.index_state in lost:
                sequence.publishes = False

    def _forget(self, block: int) -> None:
        if self._residency is not None:
            self._residency.forgotten(block)
        self._unname(block)
        self._num_named_free -= not self._num_holders[block]

    # -- the whole -------------------------------------------------------------------------------------------------

    def set_quota(self, namespace: Namespace, max_blocks: int | None) -> None:
        """Not to be had: vLLM's free queue is one for all."""
        raise ValueError("max_blocks: quotas need index='radix'")

    def clear(self) -> None:
        """Forget every name; the order of the queue stays."""
        self.version += 1
        self._roots.clear()
        self._ghosts.clear()
        if self._residency is not None:
            self._residency.clear()
        self._prefixes = [None] * (self._num_blocks + 1)
        self._num_named_free = 0
        if self._events is not None:
            self._events.append(AllBlocksCleared())

    def stored(self) -> list[tuple[bytes, int]]:
        """Name and group of every named block."""
        return [(prefix.digest, self._group[block]) for block, prefix in enumerate(self._prefixes) if prefix]

    def check(self) -> None:
        """Count everything again; see `PrefixIndex.check`."""
        num_holders = [0] * (self._num_blocks + 1)
        num_standing: dict[_Prefix, int] = {}
        for sequence in self.holders:
            prefix: _Prefix = sequence.index_state
            num_standing[prefix] = num_standing.get(prefix, 0) + 1
            held = [block for table in sequence.block_tables for block in table if block]
            require(len(set(held)) == len(held), "a block stands twice in a sequence's tables")
            for block in held:
                require(1 <= block <= self._num_blocks, f"block {block} is none of the pool's")
                num_holders[block] += 1
            for position in range(sequence.num_indexed_blocks - 1, -1, -1):
                for table in sequence.block_tables:
                    block = table[position]
                    require(not block or self._prefixes[block] in {prefix, None}, "a block with another prefix")
                require(self._label(sequence, position) == prefix.label, "a prefix of other tokens")
                assert prefix.parent is not None
                prefix = prefix.parent
            require(prefix is self._roots.get(sequence.namespace), "a sequence stands under another namespace")
            for table in sequence.block_tables:
                for block in table[sequence.num_indexed_blocks :]:
                    require(not block or self._prefixes[block] is None, "named, but not committed")
        require(num_holders == self._num_holders, "the counts of holders are wrong")
        free = list(self._free)
        require(len(free) == len(set(free)) == len(self._free), "the free queue is out of order")
        require(set(free) == {b for b in range(1, self._num_blocks + 1) if not num_holders[b]}, "free is not unheld")
        require(sum(self._prefixes[b] is not None for b in free) == self._num_named_free, "the count of cached blocks")
        num_named = 0
        stack: list[_Prefix] = list(self._roots.values())
        while stack:
            prefix = stack.pop()
            stack.extend(prefix.kids.values())
            for group, blocks in enumerate(prefix.blocks):
                num_named += len(blocks)
                for block in blocks:
                    require(self._prefixes[block] is prefix, "a block has another prefix")
                    require(self._group[block] == group, "a block is another group's")
            require(prefix.num_standing == num_standing.get(prefix, 0), "the count of those who stand here")
            require(not prefix.is_useless, "a prefix of no use was kept")
        require(num_named == sum(prefix is not None for prefix in self._prefixes), "a named block is in no prefix")


def _consecutive(named: list[tuple[int, _Prefix]]) -> Iterator[list[tuple[int, _Prefix]]]:
    """Cut a list of (position, prefix) where positions are left out."""
    start = 0
    for i in range(1, len(named) + 1):
        if i == len(named) or named[i][0] != named[i - 1][0] + 1:
            yield named[start:i]
            start = i
