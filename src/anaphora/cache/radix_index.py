"""RadixIndex: tokens -> blocks, by a tree whose edges are runs of whole blocks.

    lanes: Namespace -> root
                         |
              "You are a helpful ..."  blocks [7 8 9]        held by A and B
                   /            \\
       "What is ..." [4]     "Write ..." [12 13]             held by A          cached, held by nobody

Matching compares token bytes, so it is exact: there is no digest that could collide. A node is one edge: `key` holds
the tokens of its blocks as bytes, compared with one memcmp. Work is proportional to nodes, not to blocks.

Who holds what: `ref` of a node counts the sequences whose tail it is, and its children with ref > 0. So a node is
pinned exactly when something at or below it is, and locking stops at the first ancestor that was locked before.
Unpinned nodes stand in `_evictable` in the order in which they were let go, children before their parents; so its head
is always a leaf, tails go before heads, and evicting costs O(1) a node.

Duplicates: a sequence may have computed what the tree holds already, in blocks of its own. Its table is never
rewritten. If nobody holds the tree's copy, the sequence's blocks take its place; if somebody does, the tree keeps that
copy until its last holder lets go, and only then the sequence's blocks take its place (`_settle_duplicates`).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

from anaphora.cache.index import Hit, require
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Set

    from anaphora.cache.sequence import Sequence
    from anaphora.identity import Namespace

Key = bytes | bytearray | memoryview

NOTHING = Hit(0, 0, None)


class _Node:
    """One edge: `blocks[i]` holds the tokens `key[i * width : (i + 1) * width]`. A lane's root has neither.

    `label` is what its parent finds it by: the tokens of its first block.
    """

    __slots__ = ("blocks", "key", "kids", "label", "parent", "ref")

    def __init__(self, parent: _Node | None, label: bytes, key: Key, blocks: array[int]) -> None:
        self.parent = parent
        self.label = label
        self.key = key
        self.blocks = blocks
        self.kids: dict[bytes, _Node] = {}
        self.ref = 0

    def path(self) -> list[_Node]:
        """Nodes from below the root to this one."""
        nodes: list[_Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class _Root(_Node):
    """Where a lane begins: all that is known under one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, b"", b"", array("i"))
        self.namespace = namespace


class RadixIndex:
    """The tree, the blocks in it, and the blank ones. Implements `PrefixIndex`.

    What it keeps on a sequence (`index_state`): its tail, the deepest node that it pins. All nodes from the root to the
    tail spell the sequence's first `num_indexed_blocks` blocks.

    Cost, for p = nodes on the path and e = nodes evicted: find O(p) + one memcmp of the match; pin O(newly pinned
    nodes); take O(e); insert O(1) + one memcpy of the new tokens; release O(newly unpinned nodes).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._width = block_size * TOKEN_BYTES
        self._blank = array("i", range(1, num_blocks + 1))
        """Blocks without content, last in first out, so that a small working set stays small."""
        self._lanes: dict[Namespace, _Root] = {}
        self._evictable: OrderedDict[_Node, None] = OrderedDict()
        self._num_evictable = 0
        self._duplicating: set[Sequence] = set()
        """Holders whose table differs from the tree somewhere on the path to their tail."""
        self._extra_holders: dict[int, int] = {}
        """Blocks outside the tree that several sequences hold: how many more than one."""
        self.holders: set[Sequence] = set()
        self.num_evicted_blocks = 0
        self.version = 0

    @property
    def num_available(self) -> int:
        """Blank blocks and those of unpinned nodes."""
        return len(self._blank) + self._num_evictable

    @property
    def num_cached(self) -> int:
        """Blocks of unpinned nodes."""
        return self._num_evictable

    # -- finding ---------------------------------------------------------------------------------------------------

    def find(self, sequence: Sequence, max_blocks: int) -> Hit:
        """Walk down from the lane's root. `where` is the last node reached and how many of its blocks match."""
        node: _Node | None = self._lanes.get(sequence.namespace)
        if node is None:
            return NOTHING
        tokens, width = sequence.tokens, self._width
        position, end = 0, max_blocks * width
        num_matched = 0  # of the last node's blocks
        num_unpinned = 0
        while position < end:
            kid = node.kids.get(bytes(tokens[position : position + width]))
            if kid is None:
                break
            node = kid
            key = node.key
            num_matched = len(node.blocks)
            if position + len(key) > end or not tokens.startswith(key, position):
                num_matched = _count_equal_blocks(tokens, position, key, min(end - position, len(key)), width)
            if not node.ref:
                num_unpinned += num_matched
            position += num_matched * width
            if num_matched < len(node.blocks):
                break
        if not position:
            return NOTHING
        return Hit(position // width, num_unpinned, (node, num_matched))

    # -- holding ---------------------------------------------------------------------------------------------------

    def pin(self, sequence: Sequence, hit: Hit) -> array[int]:
        """Lock the path to the hit's end, splitting its last node if it matched in part."""
        self.version += 1
        self.holders.add(sequence)
        sequence.num_indexed_blocks = hit.num_blocks
        if hit.where is None:
            root = self._lanes.get(sequence.namespace)
            if root is None:
                root = self._lanes[sequence.namespace] = _Root(sequence.namespace)
            root.ref += 1
            sequence.index_state = root
            return array("i")
        node, num_matched = hit.where
        if num_matched < len(node.blocks):
            node = self._split(node, num_matched)
        self._lock(node)
        sequence.index_state = node
        table: array[int] = node.blocks[:]
        if num_matched < hit.num_blocks:
            table = array("i")
            for part in node.path():
                table.extend(part.blocks)
        return table

    def release(self, sequence: Sequence) -> None:
        """Unlock the path, leaf first; blocks of the table that the tree does not hold become blank."""
        self.version += 1
        self.holders.remove(sequence)
        self._give_back(sequence.block_table[sequence.num_indexed_blocks :])
        if sequence in self._duplicating:
            self._duplicating.remove(sequence)
            for _, first, last in self._duplicated(sequence):
                self._give_back(sequence.block_table[first:last])
        tail: _Node = sequence.index_state
        sequence.index_state = None
        self._unlock(tail)
        if tail.parent is None:
            self._drop_if_empty(tail)
        if self._duplicating:
            self._settle_duplicates()

    def _give_back(self, blocks: array[int]) -> None:
        if not self._extra_holders:
            self._blank.extend(blocks)
            return
        for block in blocks:
            if block in self._extra_holders:
                self.leave(block)
            else:
                self._blank.append(block)

    def _drop_if_empty(self, root: _Node) -> None:
        if isinstance(root, _Root) and not root.kids and not root.ref:
            del self._lanes[root.namespace]

    def _lock(self, node: _Node) -> None:
        node.ref += 1
        while node.ref == 1 and node.parent is not None:
            if node in self._evictable:  # a node that was made just now is not
                del self._evictable[node]
                self._num_evictable -= len(node.blocks)
            node = node.parent
            node.ref += 1

    def _unlock(self, node: _Node) -> None:
        node.ref -= 1
        while not node.ref and node.parent is not None:
            self._evictable[node] = None
            self._num_evictable += len(node.blocks)
            node = node.parent
            node.ref -= 1

    def _split(self, node: _Node, num_blocks: int) -> _Node:
        """Cut a node after `num_blocks` blocks and return the new upper part, which the caller locks at once.

        The lower part keeps its identity, so it stays the tail of those who hold it, and its place in the order of
        eviction: nobody has read it.
        """
        size = num_blocks * self._width
        parent = node.parent
        assert parent is not None
        upper = _Node(parent, node.label, node.key[:size], node.blocks[:num_blocks])
        parent.kids[node.label] = upper
        node.key = node.key[size:]
        node.label = bytes(node.key[: self._width])
        del node.blocks[:num_blocks]
        node.parent = upper
        upper.kids[node.label] = node
        if node.ref:
            upper.ref = 1
        else:
            self._num_evictable -= num_blocks
        return upper

    # -- blocks ----------------------------------------------------------------------------------------------------

    def take(self, num_blocks: int) -> array[int]:
        """Blank blocks, after evicting as many unpinned ones as are missing."""
        self.version += 1
        blank = self._blank
        if len(blank) < num_blocks:
            self._evict(num_blocks - len(blank))
        cut = len(blank) - num_blocks
        blocks = blank[cut:]
        del blank[cut:]
        return blocks

    def _evict(self, num_blocks: int) -> None:
        """Let go exactly `num_blocks` blocks: least recently held first, each node's tail before its head."""
        self.num_evicted_blocks += num_blocks
        self._num_evictable -= num_blocks
        evictable, blank = self._evictable, self._blank
        while num_blocks:
            node = next(iter(evictable))
            rest = len(node.blocks) - num_blocks
            if rest > 0:
                blank.extend(node.blocks[rest:])
                del node.blocks[rest:]
                node.key = _shortened(node.key, rest * self._width)
                return
            del evictable[node]
            blank.extend(node.blocks)
            num_blocks -= len(node.blocks)
            parent = node.parent
            assert parent is not None
            del parent.kids[node.label]
            if parent.parent is None:
                self._drop_if_empty(parent)

    # -- learning --------------------------------------------------------------------------------------------------

    def insert(self, sequence: Sequence, num_blocks: int) -> None:
        """Hang the sequence's newly full blocks below its tail, or line up with what the tree holds there already."""
        self.version += 1
        width = self._width
        tokens = sequence.tokens
        while sequence.num_indexed_blocks < num_blocks:
            tail: _Node = sequence.index_state
            first = sequence.num_indexed_blocks
            start = first * width
            label = bytes(tokens[start : start + width])
            kid = tail.kids.get(label)
            if kid is not None:
                self._line_up(sequence, kid, num_blocks)
                continue
            blocks = sequence.block_table[first:num_blocks]
            key: Key = tokens[start : num_blocks * width]
            sequence.num_indexed_blocks = num_blocks
            if type(tail.key) is bytearray and tail.ref == 1 and not tail.kids:
                # A leaf that only this sequence holds grows in place.
                tail.key += key
                tail.blocks.extend(blocks)
                return
            if type(key) is bytes and num_blocks < len(tokens) // width:
                key = bytearray(key)  # more of the prompt will follow, in place
            node = _Node(tail, label, key, blocks)
            tail.kids[label] = node
            # The sequence's hold on the old tail becomes the new one's.
            node.ref = 1
            sequence.index_state = node

    def _line_up(self, sequence: Sequence, node: _Node, num_blocks: int) -> None:
        """Move the sequence's tail along a node whose content it has computed again."""
        width = self._width
        first = sequence.num_indexed_blocks
        limit = min(len(node.key), (num_blocks - first) * width)
        num_equal = _count_equal_blocks(sequence.tokens, first * width, node.key, limit, width)
        if num_equal < len(node.blocks):
            node = self._split(node, num_equal)
        if node.ref:
            self._duplicating.add(sequence)
        else:
            self._replace_blocks(node, sequence.block_table[first : first + num_equal])
        self._lock(node)
        self._unlock(sequence.index_state)
        sequence.index_state = node
        sequence.num_indexed_blocks = first + num_equal

    # -- duplicates ------------------------------------------------------------------------------------------------

    def _replace_blocks(self, node: _Node, blocks: array[int]) -> None:
        self._blank.extend(node.blocks)
        node.blocks = blocks
        if self._extra_holders:
            for block in blocks:
                self._extra_holders.pop(block, None)

    def _duplicated(self, sequence: Sequence) -> Iterator[tuple[_Node, int, int]]:
        """Nodes on the path to the sequence's tail that hold other blocks than its table, with their range in it."""
        table = sequence.block_table
        last = sequence.num_indexed_blocks
        node: _Node = sequence.index_state
        while node.parent is not None:
            first = last - len(node.blocks)
            if table[first:last] != node.blocks:
                yield node, first, last
            node, last = node.parent, first

    def _settle_duplicates(self) -> None:
        """Where the tree's copy has lost its last holder, put the copy of a sequence that still lives in its place.

        Runs after a release while there are duplicates, which is rare; cost O(holders x path).
        """
        held: set[_Node] = set()
        duplicated: dict[_Node, tuple[Sequence, int, int]] = {}
        for sequence in self.holders:
            own = {node: (sequence, first, last) for node, first, last in self._duplicated(sequence)}
            held.update(node for node in sequence.index_state.path() if node not in own)
            duplicated |= own
        for node, (sequence, first, last) in duplicated.items():
            if node not in held:
                self._replace_blocks(node, sequence.block_table[first:last])
        self._duplicating = {s for s in self._duplicating if next(self._duplicated(s), None) is not None}

    # -- sharing and forgetting ------------------------------------------------------------------------------------

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Lock the parent's tail once more; count one more holder for blocks outside the tree."""
        self.version += 1
        self.holders.add(child)
        tail: _Node = parent.index_state
        tail.ref += 1
        child.index_state = tail
        private = child.block_table[child.num_indexed_blocks :]
        if parent in self._duplicating:
            self._duplicating.add(child)
            for _, first, last in self._duplicated(parent):
                private.extend(parent.block_table[first:last])
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
        stack: list[_Node] = list(self._lanes.values())
        while stack:
            node = stack.pop()
            for kid in list(node.kids.values()):
                cut = next((i for i, block in enumerate(kid.blocks) if blocks is None or block in blocks), None)
                if cut is None:
                    stack.append(kid)
                    continue
                if cut:
                    upper = self._split(kid, cut)
                    if not kid.ref:  # nobody will lock the upper part, so it keeps the lower one's place
                        self._take_place(upper, kid)
                self._cut_off(kid)
        for root in list(self._lanes.values()):
            self._drop_if_empty(root)

    def _take_place(self, upper: _Node, lower: _Node) -> None:
        """Enter an unpinned upper part into the order of eviction right behind its lower part."""
        self._num_evictable += len(upper.blocks)
        order = list(self._evictable)
        order.insert(order.index(lower) + 1, upper)
        self._evictable = OrderedDict.fromkeys(order)

    def _cut_off(self, top: _Node) -> None:
        parent = top.parent
        assert parent is not None
        cut_off: set[_Node] = set()
        stack = [top]
        while stack:
            node = stack.pop()
            cut_off.add(node)
            stack.extend(node.kids.values())
            if not node.ref:
                del self._evictable[node]
                self._num_evictable -= len(node.blocks)
                self._blank.extend(node.blocks)
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
            sequence.index_state = parent
            parent.ref += 1
        self._extra_holders = {block: extra for block, extra in self._extra_holders.items() if extra}
        del parent.kids[top.label]
        if top.ref:
            self._unlock(parent)
        self._duplicating = {s for s in self._duplicating if next(self._duplicated(s), None) is not None}

    # -- the whole -------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Start again with every block blank."""
        self.version += 1
        self._lanes.clear()
        self._evictable.clear()
        self._num_evictable = 0
        self._blank = array("i", range(1, self._num_blocks + 1))

    def check(self) -> None:
        """Walk the whole tree and every table; see `PrefixIndex.check`."""
        owner: dict[int, str] = {}

        def claim(blocks: Iterable[int], who: str) -> None:
            for block in blocks:
                require(1 <= block <= self._num_blocks, f"block {block} is none of the pool's")
                require(block not in owner, f"block {block} is {who} and {owner.get(block)}")
                owner[block] = who

        claim(self._blank, "blank")
        num_tails: dict[_Node, int] = {}
        num_private: dict[int, int] = {}
        for sequence in self.holders:
            tail: _Node = sequence.index_state
            num_tails[tail] = num_tails.get(tail, 0) + 1
            path = tail.path()
            top = path[0].parent if path else tail
            require(top is self._lanes.get(sequence.namespace), "a sequence hangs in another namespace's lane")
            spelled = b"".join(bytes(node.key) for node in path)
            require(len(spelled) == sequence.num_indexed_blocks * self._width, "a path is not as long as it counts")
            require(sequence.tokens.startswith(spelled), "a path spells other tokens than its sequence")
            duplicated = list(self._duplicated(sequence))
            require(not duplicated or sequence in self._duplicating, "a duplicate is not on record")
            for first, last in [(sequence.num_indexed_blocks, None), *((f, e) for _, f, e in duplicated)]:
                for block in sequence.block_table[first:last]:
                    num_private[block] = num_private.get(block, 0) + 1
        claim(num_private, "private")
        extra = {block: num - 1 for block, num in num_private.items() if num > 1}
        require(extra == self._extra_holders, "the counts of holders are wrong")
        place = {node: i for i, node in enumerate(self._evictable)}
        num_evictable = 0
        for root in self._lanes.values():
            require(bool(root.kids or root.ref), "an empty lane was kept")
            stack: list[_Node] = [root]
            while stack:
                node = stack.pop()
                require(node.ref == num_tails.get(node, 0) + sum(kid.ref > 0 for kid in node.kids.values()), "ref")
                stack.extend(node.kids.values())
                for label, kid in node.kids.items():
                    require(kid.parent is node and kid.label == label == kid.key[: self._width], "a wrong label")
                    require(bool(kid.ref) or node is root or bool(node.ref) or place[kid] < place[node], "order")
                if node is root:
                    continue
                require(len(node.key) == len(node.blocks) * self._width > 0, "key and blocks differ in length")
                require((node in place) == (not node.ref), "evictable is not the same as unpinned")
                num_evictable += 0 if node.ref else len(node.blocks)
                claim(node.blocks, "in the tree")
        require(num_evictable == self._num_evictable, "the count of evictable blocks is wrong")
        require(len(owner) == self._num_blocks, "a block is lost")


def _count_equal_blocks(tokens: bytes | bytearray, position: int, key: Key, limit: int, width: int) -> int:
    """Return how many whole blocks of `key[:limit]` equal the tokens from byte `position` on.

    Gallops in growing steps, then bisects the step that differs; each probe is one memcmp. Cost: O(log) probes.
    """
    view = memoryview(key)
    num_equal, step = 0, 4
    differs = limit // width + 1
    while num_equal + 1 < differs:
        upto = min(num_equal + step, differs - 1)
        if tokens.startswith(view[num_equal * width : upto * width], position + num_equal * width):
            num_equal, step = upto, step * 4
        else:
            differs, step = upto, max(1, (upto - num_equal) // 2)
    return num_equal


def _shortened(key: Key, size: int) -> Key:
    """Return the first `size` bytes of a key; without a copy unless that would keep much unused memory alive."""
    if type(key) is bytearray:
        del key[size:]
        return key
    view = memoryview(key)
    whole = view.obj if isinstance(view.obj, bytes) else key
    return bytes(view[:size]) if size * 2 < len(whole) else view[:size]
