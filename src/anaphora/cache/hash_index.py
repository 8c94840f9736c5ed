"""HashIndex: digests -> blocks, by a map, with the rules of vLLM (version 0.32).

Every full block is named by a digest of everything before it. A lookup walks the names of a prompt and stops at the
first that is unknown. Equal content computed twice is kept twice; the earliest copy is served. A freed block keeps its
name until its id is handed out again.

A name is no proof, so a hit is verified: each distinct prefix that the index has seen has a number, and a block
remembers its tokens, its own prefix's number and the number of the prefix before it. A forged digest, or a collision,
costs a miss.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from anaphora.cache.index import Hit, require
from anaphora.cache.pool import FreeQueue
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Set

    from anaphora.cache.sequence import Sequence
    from anaphora.identity import BlockDigests, Namespace


class _Content(NamedTuple):
    """What a named block holds. `prefix` numbers the distinct prefix that ends with it, `before` the one it extends;
    the empty prefix is 0."""

    digest: bytes
    namespace: Namespace
    before: int
    tokens: bytes
    prefix: int


class HashIndex:
    """The map, the blocks in it, and the free queue. Implements `PrefixIndex`.

    What it keeps on a sequence (`index_state`): the digests of its blocks, made when first needed and never again.
    Cost: O(1) a block for everything; a digest for each block not seen by this sequence before.
    """

    def __init__(self, num_blocks: int, block_size: int, digests: BlockDigests) -> None:
        self._num_blocks = num_blocks
        self._width = block_size * TOKEN_BYTES
        self._digests = digests
        self._free = FreeQueue(num_blocks)
        self._num_holders = [0] * (num_blocks + 1)
        self._content: list[_Content | None] = [None] * (num_blocks + 1)
        self._blocks: dict[bytes, list[int]] = {}
        """Digest -> blocks that carry it, in the order in which they were inserted."""
        self._num_named_free = 0
        self._last_prefix = 0
        self.num_evicted_blocks = 0
        self.version = 0
        self.holders: set[Sequence] = set()

    @property
    def num_available(self) -> int:
        """Length of the free queue: blank blocks, and cached ones that nobody holds."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Named blocks in the free queue."""
        return self._num_named_free

    # -- finding ---------------------------------------------------------------------------------------------------

    def find(self, sequence: Sequence, max_blocks: int) -> Hit:
        """Look up block after block until one is unknown. `where` is the list of block ids found."""
        found = array("i")
        num_unpinned = 0
        prefix = 0
        for position in range(max_blocks):
            block = self._lookup(sequence, position, prefix)
            if block is None:
                break
            content = self._content[block]
            assert content is not None
            prefix = content.prefix
            found.append(block)
            num_unpinned += not self._num_holders[block]
        return Hit(len(found), num_unpinned, found)

    def _lookup(self, sequence: Sequence, position: int, before: int) -> int | None:
        digest = self._digest(sequence, position)
        for block in self._blocks.get(digest, ()):
            content = self._content[block]
            if (
                content is not None
                and content.before == before
                and content.namespace == sequence.namespace
                and sequence.tokens.startswith(content.tokens, position * self._width)
            ):
                return block
        return None

    def _digest(self, sequence: Sequence, position: int) -> bytes:
        names: list[bytes] | None = sequence.index_state
        if names is None:
            names = sequence.index_state = []
        while len(names) <= position:
            parent = names[-1] if names else self._digests.root(sequence.namespace)
            start = len(names) * self._width
            names.append(self._digests.block(parent, bytes(sequence.tokens[start : start + self._width])))
        return names[position]

    # -- holding ---------------------------------------------------------------------------------------------------

    def pin(self, sequence: Sequence, hit: Hit) -> array[int]:
        """Count the sequence as one more holder of each block found."""
        self.version += 1
        self.holders.add(sequence)
        for block in hit.where:
            if not self._num_holders[block]:
                self._free.remove(block)
                self._num_named_free -= 1
            self._num_holders[block] += 1
        sequence.num_indexed_blocks = hit.num_blocks
        table: array[int] = hit.where[:]
        return table

    def release(self, sequence: Sequence) -> None:
        """Count one holder less, last block first: named blocks go to the tail of the queue, the others to its head."""
        self.version += 1
        self.holders.remove(sequence)
        named, blank = array("i"), array("i")
        for block in reversed(sequence.block_table):
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                (named if self._content[block] else blank).append(block)
        self._free.prepend(blank)
        self._free.append(named)
        self._num_named_free += len(named)

    # -- blocks ----------------------------------------------------------------------------------------------------

    def take(self, num_blocks: int) -> array[int]:
        """The first blocks of the queue; those with a name lose it."""
        self.version += 1
        ids = self._free.take(num_blocks)
        for block in ids:
            self._num_holders[block] = 1
            if self._content[block]:
                self._forget(block)
                self._num_named_free -= 1
                self.num_evicted_blocks += 1
        return ids

    def _forget(self, block: int) -> None:
        content = self._content[block]
        assert content is not None
        self._content[block] = None
        copies = self._blocks[content.digest]
        copies.remove(block)
        if not copies:
            del self._blocks[content.digest]

    # -- learning --------------------------------------------------------------------------------------------------

    def insert(self, sequence: Sequence, num_blocks: int) -> None:
        """Name the sequence's newly full blocks."""
        self.version += 1
        table, width = sequence.block_table, self._width
        first = sequence.num_indexed_blocks
        before = 0
        if first:
            content = self._content[table[first - 1]]
            # What extends a forgotten block extends a prefix that no lookup will ever arrive at.
            before = content.prefix if content else -1
        for position in range(first, num_blocks):
            digest = self._digest(sequence, position)
            twin = self._lookup(sequence, position, before)
            if twin is None:
                self._last_prefix += 1
                tokens = bytes(sequence.tokens[position * width : (position + 1) * width])
                content = _Content(digest, sequence.namespace, before, tokens, self._last_prefix)
            else:
                content = self._content[twin]
                assert content is not None
            block = table[position]
            self._content[block] = content
            self._blocks.setdefault(digest, []).append(block)
            before = content.prefix
        sequence.num_indexed_blocks = num_blocks

    # -- sharing and forgetting ------------------------------------------------------------------------------------

    def share(self, parent: Sequence, child: Sequence) -> None:
        """One more holder for each block; the digests known so far go along."""
        self.version += 1
        self.holders.add(child)
        child.index_state = list(parent.index_state or ())
        for block in child.block_table:
            self._num_holders[block] += 1

    def is_shared(self, block: int) -> bool:
        """Whether several sequences hold it."""
        return self._num_holders[block] > 1

    def leave(self, block: int) -> None:
        """One holder less; at least one remains."""
        self._num_holders[block] -= 1

    def forget(self, blocks: Set[int] | None) -> None:
        """Names go; the queue and the counts stay as they are. What extends a forgotten block is an orphan: the walk
        of a lookup ends before it, and if the forgotten content comes back, it is another prefix by number."""
        self.version += 1
        for block in range(1, self._num_blocks + 1) if blocks is None else blocks:
            if self._content[block]:
                self._forget(block)
                self._num_named_free -= not self._num_holders[block]

    # -- the whole -------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget every name; the order of the queue stays."""
        self.version += 1
        self._blocks.clear()
        self._content = [None] * (self._num_blocks + 1)
        self._num_named_free = 0

    def check(self) -> None:
        """Count everything again; see `PrefixIndex.check`."""
        num_holders = [0] * (self._num_blocks + 1)
        for sequence in self.holders:
            table = sequence.block_table
            require(len(set(table)) == len(table), "a block stands twice in a table")
            for position, block in enumerate(table):
                require(1 <= block <= self._num_blocks, f"block {block} is none of the pool's")
                num_holders[block] += 1
                content = self._content[block]
                require(position < sequence.num_indexed_blocks or content is None, "named but not computed")
                if content is not None:
                    require(content.namespace == sequence.namespace, "a block of another namespace in a table")
                    require(sequence.tokens.startswith(content.tokens, position * self._width), "other tokens")
        require(num_holders == self._num_holders, "the counts of holders are wrong")
        free = list(self._free)
        require(len(free) == len(set(free)) == len(self._free), "the free queue is out of order")
        require(set(free) == {b for b in range(1, self._num_blocks + 1) if not num_holders[b]}, "free is not unheld")
        require(sum(self._content[b] is not None for b in free) == self._num_named_free, "the count of cached blocks")
        named = {block: digest for digest, copies in self._blocks.items() for block in copies}
        known = {block: content.digest for block, content in enumerate(self._content) if content}
        require(named == known, "the map and the blocks disagree on names")
        require(all(self._blocks.values()), "a name without a block was kept")
