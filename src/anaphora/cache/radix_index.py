"""RadixIndex: tokens -> blocks, by a tree. Who holds what, and which blocks are blank; the tree is in `radix_tree`.

Who owns the blocks of a sequence's table:

    [ 0 .. num_indexed_blocks )    the tree's, pinned by the sequence's tail - or, where the tree holds another
                                   sequence's copy of the same content, its own: a private duplicate
    [ num_indexed_blocks .. end )  its own: not full yet, not computed yet, or not to be published

Duplicates: a table is never rewritten. If nobody holds the tree's copy, the sequence's blocks take its place; if
somebody does, the tree keeps that copy until its last user lets go, and only then the sequence's blocks take its
place (`duplicates`).
"""

from __future__ import annotations

from array import array
from itertools import chain
from typing import TYPE_CHECKING

from anaphora.cache.duplicates import Duplicates, own_blocks
from anaphora.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from anaphora.cache.index import require
from anaphora.cache.radix_tree import RadixTree, count_equal_blocks
from anaphora.identity import extra_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Set

    from anaphora.cache.events import Event
    from anaphora.cache.eviction import EvictionPolicy
    from anaphora.cache.index import Hit, NextTier
    from anaphora.cache.node import Key, LruOrder, Node
    from anaphora.cache.prefix import Prefix
    from anaphora.cache.residency import Residency
    from anaphora.cache.segments import Label
    from anaphora.cache.sequence import Sequence
    from anaphora.cache.windows import Windows
    from anaphora.identity import BlockDigests, Namespace


class RadixIndex:
    """The tree, the holders and the blank blocks. Implements `PrefixIndex`.

    What it keeps on a sequence (`index_state`): its tail, the deepest node that it pins. All nodes from the root to the
    tail spell the sequence's first `num_indexed_blocks` blocks.

    Cost: that of the tree; nothing at the level of Python grows with the number of blocks of a hit.
    """

    keeps_orphans = False

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
        if not windows.is_plain:
            raise ValueError("windows: several layer groups, or windows, need index='hash'")
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._digests = digests
        self._events = events
        self._tree = RadixTree(block_size, policy, residency)
        if events is not None:
            self._tree.on_leave = self._on_leave
        self._blank = array("i", range(1, num_blocks + 1))
        """Blocks without content, last in first out, so that a small working set stays small."""
        self._duplicates = Duplicates(self._replace_blocks)
        self._extra_holders: dict[int, int] = {}
        """Blocks outside the tree that several sequences hold: how many more than one."""
        self._host: NextTier | None = None
        self.holders: dict[Sequence, None] = {}
        self.num_evicted_blocks = 0
        self.version = 0

    @property
    def num_available(self) -> int:
        """Blank blocks and those of unpinned nodes."""
        return len(self._blank) + self._tree.num_evictable_blocks

    @property
    def num_cached(self) -> int:
        """Blocks of unpinned nodes."""
        return self._tree.num_evictable_blocks

    def room(self, hit: Hit, without: Iterable[Sequence]) -> int:
        """What would be available, counted on a copy of the pins that are concerned."""
        refs: dict[Node, int] = {}
        room = self.num_available
        for sequence in without:
            node: Node = sequence.index_state
            refs[node] = refs.get(node, node.ref) - 1
            while not refs[node] and node.parent is not None:
                room += len(node.blocks)
                node = node.parent
                refs[node] = refs.get(node, node.ref) - 1
        if hit.where is not None:
            for node in hit.where.path():
                if not refs.get(node, node.ref):
                    room -= min(len(node.blocks), hit.num_blocks - node.depth)
        return room

    # -- finding and holding ---------------------------------------------------------------------------------------

    def find(self, sequence: Prefix, max_blocks: int) -> Hit:
        """Walk down from the lane's root. `where` is the last node reached, None where nothing is found."""
        return self._tree.match(sequence.tokens, sequence.namespace, max_blocks, sequence.segments)

    def continuations(self, sequence: Sequence, hit: Hit) -> Iterable[tuple[bytes, int]]:
        """The next block of the last node, or the first ones of its children."""
        node: Node | None = hit.where or self._tree.lanes.get(sequence.namespace)
        if node is None or not isinstance(sequence.label(hit.num_blocks, self._tree.width), bytes):
            return
        num_matched = hit.num_blocks - node.depth
        if num_matched < len(node.blocks):
            if isinstance(node.label, bytes):
                width = self._tree.width
                yield bytes(node.key[num_matched * width : (num_matched + 1) * width]), node.blocks[num_matched]
            return
        for label, kid in node.kids.items():
            if isinstance(label, bytes):
                yield label, kid.blocks[0]

    def was_evicted(self, sequence: Sequence, hit: Hit) -> bool:
        """Compare with what is remembered of evicted blocks: their depth and tokens, and the nodes above them."""
        return self._tree.was_evicted(hit, sequence)

    def namespaces(self) -> Iterable[Namespace]:
        """The lanes."""
        return list(self._tree.lanes)

    def pin(self, sequence: Sequence, hit: Hit) -> None:
        """Lock the path to the hit's end, splitting its last node if it matched in part."""
        self.version += 1
        self.holders[sequence] = None
        sequence.num_indexed_blocks = hit.num_blocks
        node: Node | None = hit.where
        if node is None:
            root = self._tree.lane(sequence.namespace)
            root.ref += 1
            sequence.index_state = root
            return
        num_matched = hit.num_blocks - node.depth
        if num_matched < len(node.blocks):
            node = self._split(node, num_matched)
        self._tree.lock(node)
        sequence.index_state = node
        if self._duplicates.at:
            self._duplicates.pinned(sequence)
        table = sequence.block_table
        if num_matched == hit.num_blocks:
            table.extend(node.blocks)
        else:
            for part in node.path():
                table.extend(part.blocks)

    def count_use(self, sequence: Sequence) -> None:
        """Tell the order of eviction what the sequence was served."""
        tail: Node = sequence.index_state
        if tail.order.keeps_notes:
            for node in tail.path():
                tail.order.used(node, sequence.priority)

    def num_leaving(self, sequence: Sequence) -> int:
        """None: every layer attends to the whole sequence."""
        return 0

    def slide(self, sequence: Sequence) -> None:
        """Nothing to do: every layer attends to the whole sequence."""

    def release(self, sequence: Sequence) -> None:
        """Unlock the path, leaf first; blocks that are the sequence's own become blank."""
        self.version += 1
        del self.holders[sequence]
        if len(sequence.block_table) > sequence.num_indexed_blocks:
            self._give_back(sequence.block_table[sequence.num_indexed_blocks :])
        if self._duplicates.at:
            for node in self._duplicates.own(sequence):
                self._give_back(own_blocks(sequence, node))
            self._duplicates.leave(sequence)
        tail: Node = sequence.index_state
        order = tail.order
        sequence.index_state = None
        if order.keeps_notes and sequence.is_counted:
            order.finished(tail, sequence.num_prompt_tokens // self._block_size, self._split)
        self._tree.unlock(tail)
        if order.quota is not None:
            self._respect_quota(order)

    def set_quota(self, namespace: Namespace, max_blocks: int | None) -> None:
        """Bound how many blocks that nobody holds stay cached under a namespace."""
        self.version += 1
        self._tree.set_quota(namespace, max_blocks)
        root = self._tree.lanes.get(namespace)
        if root is not None:
            self._respect_quota(root.order)

    def _respect_quota(self, order: LruOrder) -> None:
        if order.quota is not None and order.num_blocks > order.quota:
            excess = order.num_blocks - order.quota
            self.num_evicted_blocks += excess
            self._tree.evict_from(order, excess, self._blank)

    def _give_back(self, blocks: array[int]) -> None:
        if not self._extra_holders:
            self._blank.extend(blocks)
            return
        for block in blocks:
            if block in self._extra_holders:
                self.leave(block)
            else:
                self._blank.append(block)

    # -- blocks ----------------------------------------------------------------------------------------------------

    def take(self, num_blocks: int) -> array[int]:
        """Blank blocks, after evicting as many unpinned ones as are missing."""
        blank = self._blank
        missing = num_blocks - len(blank)
        if missing > 0:
            self.version += 1
            self.num_evicted_blocks += missing
            self._tree.evict(missing, blank)
            self._blank = array("i")
            return blank
        cut = -missing
        blocks = blank[cut:]
        del blank[cut:]
        return blocks

    def spill_to(self, host: NextTier) -> None:
        """Evicted blocks go there."""
        self._host = host
        self._tree.on_leave = self._on_leave

    def _on_leave(self, node: Node, first: int, is_evicted: bool) -> None:
        if self._events is not None:
            self._events.append(BlockRemoved(tuple((node.digests or ())[first:])))
        if self._host is not None and is_evicted:
            self._save(self._host, node, first)

    def _save(self, host: NextTier, node: Node, first: int) -> None:
        names: list[bytes] = []
        parent = None
        if self._events is not None:
            digests = node.digests or []
            above = node.parent.digests if node.parent else None
            names = digests[first:]
            parent = digests[first - 1] if first else above[-1] if above else None
        host.save(self._tree.prefix_of(node, len(node.blocks)), node.blocks[first:], names, parent)

    # -- learning --------------------------------------------------------------------------------------------------

    def insert(self, sequence: Sequence, num_blocks: int) -> None:
        """Hang the sequence's newly full blocks below its tail, or line up with what the tree holds there already."""
        self.version += 1
        width = self._tree.width
        tokens = sequence.tokens
        segments = sequence.segments
        first = sequence.num_indexed_blocks
        while first < num_blocks:
            tail: Node = sequence.index_state
            last = num_blocks
            start = first * width
            first_block = bytes(tokens[start : start + width])
            label: Label = first_block
            if segments is not None:
                content, end = segments.at(first)
                last = min(last, end)
                if content is not None:
                    label = (first_block, content)
            kid = tail.kids.get(label)
            if kid is not None:
                self._line_up(sequence, kid, last)
                first = sequence.num_indexed_blocks
                continue
            names = self._names_of_new(sequence, first, last) if self._events is not None else None
            blocks = sequence.block_table[first:last]
            key: Key = tokens[start : last * width]
            if not tail.kids and type(tail.key) is bytearray and tail.ref == 1 and segments is None:
                # A leaf that only this sequence holds grows in place.
                del tail.key[len(tail.blocks) * width :]
                tail.key += key
                tail.blocks.extend(blocks)
            else:
                if type(key) is bytes and last < len(tokens) // width:
                    key = bytearray(key)  # more of the prompt will follow, in place
                tail = sequence.index_state = self._tree.add(tail, label, key, blocks)
            first = sequence.num_indexed_blocks = last
            if tail.order.keeps_notes:
                tail.order.made(tail, sequence.priority)
            if names is not None:
                tail.digests = tail.digests or []
                tail.digests += names

    def _line_up(self, sequence: Sequence, node: Node, end: int) -> None:
        """Move the sequence's tail along a node whose content it has computed again."""
        width = self._tree.width
        first = sequence.num_indexed_blocks
        limit = min(len(node.blocks), end - first) * width
        num_equal = count_equal_blocks(sequence.tokens, first * width, node.key, limit, width)
        if num_equal < len(node.blocks):
            node = self._split(node, num_equal)
        if node.ref:
            self._duplicates.add(sequence, node, self.holders)
        else:
            self._replace_blocks(node, sequence.block_table[first : first + num_equal])
        self._tree.lock(node)
        self._tree.unlock(sequence.index_state)
        if node.order.keeps_notes:
            node.order.used(node, sequence.priority)
        sequence.index_state = node
        sequence.num_indexed_blocks = first + num_equal

    def _replace_blocks(self, node: Node, blocks: array[int]) -> None:
        """Serve a node's content from other blocks; nobody uses the old ones."""
        self._blank.extend(node.blocks)
        node.blocks = blocks
        if self._extra_holders:
            for block in blocks:
                self._extra_holders.pop(block, None)

    def _split(self, node: Node, num_blocks: int) -> Node:
        upper = self._tree.split(node, num_blocks)
        if self._duplicates.at:
            self._duplicates.split(upper, node)
        return upper

    # -- names -----------------------------------------------------------------------------------------------------

    def names(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Digests of a holder's first blocks. What the tree holds is digested once, whoever asks."""
        names: list[bytes] = []
        for node in sequence.index_state.path():
            digests = node.digests = node.digests or []
            first = len(names)
            names += digests
            if len(digests) < len(node.blocks):
                names += self._chain(sequence, names, len(names), first + len(node.blocks))
                digests += names[first + len(digests) :]
        return (names + self._chain(sequence, names, len(names), num_blocks))[:num_blocks]

    def _chain(self, sequence: Sequence, before: list[bytes], first: int, last: int) -> list[bytes]:
        if first >= last:
            return []
        parent = before[-1] if before else self._digests.root(sequence.namespace)
        extras = extra_keys(sequence.namespace, sequence.media, first, last - first, self._block_size)
        width = self._tree.width
        return self._digests.chain(
            parent, bytes(sequence.tokens[first * width : last * width]), self._block_size, extras
        )

    def _names_of_new(self, sequence: Sequence, first: int, last: int) -> list[bytes]:
        """Name blocks that go below the sequence's tail, all of whose blocks have names, and report them stored."""
        assert self._events is not None
        before = sequence.index_state.digests or []
        names = self._chain(sequence, before, first, last)
        width = self._tree.width
        self._events.append(
            BlockStored(
                digests=tuple(names),
                parent=before[-1] if before else None,
                tokens=bytes(sequence.tokens[first * width : last * width]),
                block_size=self._block_size,
                namespace=sequence.namespace,
                extras=extra_keys(sequence.namespace, sequence.media, first, last - first, self._block_size),
            )
        )
        return names

    # -- sharing and forgetting ------------------------------------------------------------------------------------

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Lock the parent's tail once more; count one more holder for blocks outside the tree."""
        self.version += 1
        self.holders[child] = None
        tail: Node = parent.index_state
        tail.ref += 1
        child.index_state = tail
        private = child.block_table[child.num_indexed_blocks :]
        if self._duplicates.at:
            self._duplicates.shared(parent, child)
            for node in self._duplicates.own(parent):
                private.extend(own_blocks(parent, node))
        for block in private:
            self._extra_holders[block] = self._extra_holders.get(block, 0) + 1

    def is_shared(self, block: int) -> bool:
        """Whether several sequences hold a block outside the tree."""
        return block in self._extra_holders

    def leave(self, block: int) -> None:
        """One holder less for a shared block."""
        rest = self._extra_holders.pop(block) - 1
        if rest:
            self._extra_holders[block] = rest

    def forget(self, blocks: Set[int] | None) -> None:
        """Cut the tree above these blocks. What nobody holds becomes blank; the rest becomes its holders' own."""
        self.version += 1
        if blocks is not None:
            # A private duplicate would be found once it takes the place of the tree's copy.
            blocks = blocks | {
                served
                for sequence in self.holders
                for node in self._duplicates.own(sequence)
                for own, served in zip(own_blocks(sequence, node), node.blocks, strict=True)
                if own in blocks
            }
        above: list[Node] = list(self._tree.lanes.values())
        while above:
            for node in list(above.pop().kids.values()):
                first = next((i for i, block in enumerate(node.blocks) if blocks is None or block in blocks), None)
                if first is None:
                    above.append(node)
                    continue
                if self._host is not None:
                    self._host.forget(self._tree.prefix_of(node, first + 1))
                cut_off = self._tree.cut_off(node, first, self._blank)
                if cut_off:
                    self._let_go(cut_off)
                    assert node.parent is not None
                    self._tree.unlock(node.parent)

    def _let_go(self, cut_off: dict[Node, None]) -> None:
        """Make the blocks of pinned nodes that are no part of the tree any more their holders' own."""
        if self._events is not None:
            self._events.extend(BlockRemoved(tuple(node.digests or ())) for node in cut_off)
        for sequence in self.holders:
            node, last = sequence.index_state, sequence.num_indexed_blocks
            if node not in cut_off:
                continue
            while node in cut_off:
                first = last - len(node.blocks)
                if sequence.block_table[first:last] == node.blocks:
                    for block in node.blocks:
                        self._extra_holders[block] = self._extra_holders.get(block, -1) + 1
                node, last = node.parent, first
            sequence.publishes = False
            sequence.num_indexed_blocks = last
            sequence.index_state = node
            self._tree.lock(node)
        self._extra_holders = {block: extra for block, extra in self._extra_holders.items() if extra}
        if self._duplicates.at:
            self._duplicates.recount(self.holders)

    # -- the whole -------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Start again with every block blank."""
        self.version += 1
        self._tree.clear()
        self._blank = array("i", range(1, self._num_blocks + 1))
        if self._events is not None:
            self._events.append(AllBlocksCleared())

    def stored(self) -> list[tuple[bytes, int]]:
        """The name of every findable block; an index without events has not named all of them."""
        return [(name, 0) for node in self._tree.nodes() for name in node.digests or ()]

    def check(self) -> None:
        """Walk the whole tree and every table; see `PrefixIndex.check`."""
        num_tails: dict[Node, int] = {}
        num_private: dict[int, int] = {}
        for sequence in self.holders:
            tail: Node = sequence.index_state
            num_tails[tail] = num_tails.get(tail, 0) + 1
            path = tail.path()
            top = path[0].parent if path else tail
            require(top is self._tree.lanes.get(sequence.namespace), "a sequence hangs in another namespace's lane")
            spelled = b"".join(map(self._tree.tokens_of, path))
            require(
                len(spelled) == sequence.num_indexed_blocks * self._tree.width, "a path is not as long as it counts"
            )
            require(sequence.tokens.startswith(spelled), "a path spells other tokens than its sequence")
            copies = [own_blocks(sequence, node) for node in self._duplicates.own(sequence)]
            for block in chain(sequence.block_table[sequence.num_indexed_blocks :], *copies):
                num_private[block] = num_private.get(block, 0) + 1
        extra = {block: num - 1 for block, num in num_private.items() if num > 1}
        require(extra == self._extra_holders, "the counts of holders are wrong")
        self._duplicates.check(self.holders)
        self._tree.check(num_tails)
        owned = [*self._blank, *num_private]
        for node in self._tree.nodes():
            owned.extend(node.blocks)
        require(len(owned) == self._num_blocks, "a block is lost, or has two owners")
        require(set(owned) == set(range(1, self._num_blocks + 1)), "a block is none of the pool's, or has two owners")
