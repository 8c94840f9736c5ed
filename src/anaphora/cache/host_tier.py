"""HostTier: prefixes that the device had to give up, kept in host memory and found again.

    device   [b3][b7][b1]           evicted: save b1 -> h2           hit: load h2 -> b5
                       \\             tail before head      /
    host          [h4][h2]                                the device's hit goes on here

It is known by the same tokens as the device (`run_trie`), so it needs no names, and nothing can collide. Content is in
one of three places: on the device, here, or in both, since what was loaded stays for as long as nobody needs the room.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

from anaphora.cache.events import HOST, BlockRemoved, BlockStored, stretches
from anaphora.cache.ghosts import Ghosts
from anaphora.cache.index import NUM_GHOSTS, require
from anaphora.cache.run_trie import RunTrie, extending
from anaphora.identity import Extras, extra_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from anaphora.cache.events import Event
    from anaphora.cache.index import PrefixIndex
    from anaphora.cache.prefix import Prefix
    from anaphora.cache.run import Run
    from anaphora.cache.transfers import Transfers
    from anaphora.identity import BlockDigests


class HostTier:
    """Host blocks 1 .. num_blocks, which prefix each of them holds, and who goes first.

    What is evicted on the device comes in, unless it is here already; then it is only renewed. When there is no room,
    the host block goes that was saved or renewed longest ago; before all others those that were loaded, since the
    device has their content. So the two together hold more than either, and what a block extends is always on the
    device or here: everything here can be found.

    Cost: a lookup walks the runs of a prefix, as a device hit does; saving costs O(runs) + one memcpy of the prefix,
    and a few steps of Python a block.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        digests: BlockDigests,
        events: list[Event] | None,
        transfers: Transfers,
    ) -> None:
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._events = events
        self._transfers = transfers
        self._trie = RunTrie(block_size, 1, digests)
        self._ghosts = Ghosts(NUM_GHOSTS, self._trie)
        self._blank = list(range(num_blocks, 0, -1))
        self._places: dict[int, tuple[Run, int]] = {}
        """Per host block in use its run and position."""
        self._names: dict[int, bytes] = {}
        """Their digests, if there are events."""
        self._order: OrderedDict[int, None] = OrderedDict()
        """Those that may go, the first one next."""
        self._held: set[int] = set()
        """Those that must not: they are about to be loaded."""
        self.num_saved = self.num_loaded = self.num_evicted = 0

    @property
    def num_cached(self) -> int:
        """Host blocks in use."""
        return len(self._places)

    # -- finding and loading ---------------------------------------------------------------------------------------

    def find(self, prefix: Prefix, first: int, max_blocks: int) -> array[int]:
        """Return the host blocks that hold the blocks `first` .. of a prefix, up to block `max_blocks` - 1 or the first
        that is not here. Changes nothing."""
        found = array("i")
        root = self._trie.roots.get(prefix.namespace)
        if root is None or first >= max_blocks:
            return found
        at = 0
        for run, start, end in self._trie.walk(prefix, root, 0, max_blocks):
            skipped = min(max(0, first - at), end - start)
            at += end - start
            for block in run.columns[0][start + skipped : end]:
                if not block:
                    return found
                found.append(block)
        return found

    def was_evicted(self, prefix: Prefix, num_blocks: int) -> bool:
        """Whether the block after a prefix's first `num_blocks`, of which the last is here, was here lately."""
        root = self._trie.roots.get(prefix.namespace)
        path = self._trie.walk(prefix, root, 0, num_blocks) if root is not None else None
        return self._ghosts.has(prefix, path[-1].run if path else None, num_blocks)

    def continuations(self, prefix: Prefix, num_blocks: int) -> Iterable[tuple[bytes, int]]:
        """Return the blocks without media that are here after a prefix's first `num_blocks`, as (tokens, id)."""
        root = self._trie.roots.get(prefix.namespace)
        path = self._trie.walk(prefix, root, 0, num_blocks) if root is not None else None
        if not path or sum(end - start for _, start, end in path) < num_blocks:
            return ()
        return self._trie.continuations(path[-1].run, path[-1].end)

    def hold(self, host_blocks: array[int]) -> None:
        """Keep these where they are until they are loaded: others may come in before that."""
        self._held.update(host_blocks)
        for block in host_blocks:
            del self._order[block]

    def load(self, host_blocks: array[int], blocks: array[int]) -> None:
        """Bring held host blocks into blocks of the device. They are the first to go from here."""
        self._held.difference_update(host_blocks)
        for host_block, block in zip(host_blocks, blocks, strict=True):
            self._transfers.add("load", host_block, block)
            self._order[host_block] = None
            self._order.move_to_end(host_block, last=False)
        self.num_loaded += len(blocks)

    # -- coming and going ------------------------------------------------------------------------------------------

    def save(self, prefix: Prefix, blocks: array[int], names: Sequence[bytes], parent: bytes | None) -> None:
        """The device is about to give up the last blocks of a prefix.

        names: their digests, and `parent` that of the block before, if there are events.
        """
        num_here = len(prefix.tokens) // self._trie.width
        first = num_here - len(blocks)
        room = self.num_blocks - len(self._held)
        if len(blocks) > room:
            # Heads are worth more than tails; and nothing may stay here of what extends a block that is nowhere.
            self.num_evicted += len(blocks) - room
            self._forget_from(prefix, first + room)
            blocks, num_here = blocks[:room], first + room
            if not blocks:
                return
        places = self._make_known(prefix, first, num_here)
        present = [run.columns[0][position] for run, position in places]
        for host_block in filter(None, present):
            del self._order[host_block]
        claimed = self._claim(present.count(0))
        # The tail first, so that it goes before the head.
        for at in range(len(blocks) - 1, -1, -1):
            host_block = present[at]
            if not host_block:
                host_block = claimed.pop()
                run, position = self._places[host_block] = places[at]
                run.place(0, position, host_block)
                self._transfers.add("save", blocks[at], host_block)
                if self._events is not None:
                    self._names[host_block] = names[at]
            self._order[host_block] = None
        self._trie.leave(places[-1][0], places[-1][1] + 1)
        if self._events is not None:
            self._events.extend(self._stored_events(prefix, first, present, names, parent))

    def _make_known(self, prefix: Prefix, first: int, last: int) -> list[tuple[Run, int]]:
        """Return the places of a prefix's blocks first .. last - 1, made if need be; somebody stands at their end."""
        trie = self._trie
        path = trie.walk(prefix, trie.root(prefix.namespace), 0, last)
        known = sum(end - start for _, start, end in path)
        run = path[-1].run if path else trie.root(prefix.namespace)
        if known < last:
            new = trie.add(prefix, run, known, last)
            for run, start, end in new:
                run.columns[0].extend(array("i", bytes(4 * (end - start))))
            path += new
        trie.stand(path[-1].run, path[-1].end)
        places: list[tuple[Run, int]] = []
        for run, start, end in reversed(path):
            if run.depth + end <= first:
                break
            places += [(run, position) for position in range(end - 1, max(start, first - run.depth) - 1, -1)]
        places.reverse()
        return places

    def _claim(self, num_blocks: int) -> list[int]:
        """Make host blocks blank until there are so many, and take them."""
        while len(self._blank) < num_blocks:
            self.num_evicted += 1
            oldest = next(iter(self._order))
            run, position = self._places[oldest]
            self._ghosts.remember(run, position, position + 1)
            self._drop(oldest)
        self.num_saved += num_blocks
        return [self._blank.pop() for _ in range(num_blocks)]

    def _drop(self, host_block: int) -> None:
        run, position = self._places.pop(host_block)
        self._order.pop(host_block, None)
        self._blank.append(host_block)
        run.withdraw(0, position, host_block)
        if position + 1 == run.num_blocks:
            self._trie.trim(run)
        if self._events is not None:
            self._events.append(BlockRemoved((self._names.pop(host_block),), HOST))

    def _stored_events(
        self, prefix: Prefix, first: int, present: list[int], names: Sequence[bytes], parent: bytes | None
    ) -> Iterator[BlockStored]:
        """One event for each stretch of blocks that were not here."""
        before = [parent, *names]
        width = self._trie.width
        for start, end in stretches(not block for block in present):
            yield BlockStored(
                digests=tuple(names[start:end]),
                parent=before[start],
                tokens=bytes(prefix.tokens[(first + start) * width : (first + end) * width]),
                block_size=self._block_size,
                namespace=prefix.namespace,
                extras=self._extras(prefix, first + start, end - start),
                medium=HOST,
            )

    def _extras(self, prefix: Prefix, first: int, num_blocks: int) -> list[Extras | None] | None:
        namespace = prefix.namespace
        plain = extra_keys(namespace, (), first, num_blocks, self._block_size)
        if prefix.segments is None:
            return plain
        extras = plain or [None] * num_blocks
        for at in range(num_blocks):
            content = prefix.segments.at(first + at)[0]
            if content is not None:
                salt = None if first + at else namespace.salt
                extras[at] = Extras(namespace.adapter, content.media, salt, content.embeds or None)
        return extras if any(extras) else None

    # -- forgetting ------------------------------------------------------------------------------------------------

    def forget(self, prefix: Prefix) -> None:
        """Forget the last block of a prefix, and all that extends it."""
        self._forget_from(prefix, len(prefix.tokens) // self._trie.width - 1)

    def _forget_from(self, prefix: Prefix, position: int) -> None:
        root = self._trie.roots.get(prefix.namespace)
        path = self._trie.walk(prefix, root, 0, position + 1) if root is not None else None
        if path and sum(end - start for _, start, end in path) > position:
            self._drop_extending([(path[-1].run, path[-1].end - 1)])

    def forget_blocks(self, host_blocks: Iterable[int]) -> None:
        """Forget what these host blocks hold, and all that extends it."""
        self._drop_extending([self._places[block] for block in host_blocks if block in self._places])

    def _drop_extending(self, places: list[tuple[Run, int]]) -> None:
        for block in [block for run, first in extending(places).items() for block in run.blocks_from(first)]:
            self._drop(block)

    def clear(self) -> None:
        """Forget everything."""
        for block in list(self._places):
            self._drop(block)
        self._ghosts.clear()

    # -- the whole -------------------------------------------------------------------------------------------------

    def stored(self) -> list[bytes]:
        """The name of every host block in use, if there are events. For tests."""
        return list(self._names.values())

    def check(self, device: PrefixIndex) -> None:
        """Assert every invariant. Raises InvariantError. Cost: O(host blocks * their depth)."""
        self._trie.check({})
        require(not self._held, "a host block is held, though nobody loads it")
        require(self._order.keys() == self._places.keys(), "a host block in use is never to go, or a blank one is")
        ids = sorted([*self._blank, *self._places])
        require(ids == list(range(1, self.num_blocks + 1)), "a host block is lost, or has two owners")
        num_known = 0
        for run, position, _, blocks in self._trie.cached():
            num_known += 1
            require(len(blocks) == 1, "two host blocks hold the same")
            require(self._places.get(blocks[0]) == (run, position), "a host block stands elsewhere than it says")
            above, end = self._trie.place(run, run.depth + position)
            if run.depth + position and not above.columns[0][end - 1]:
                prefix = self._trie.prefix_of(above, end)
                hit = device.find(prefix, run.depth + position)
                require(hit.num_blocks == run.depth + position, "a host block extends what is nowhere")
        require(num_known == len(self._places), "a host block in use stands nowhere")
        require(self._events is None or self._names.keys() == self._places.keys(), "a host block without a name")
