"""RadixTree: a tree whose edges are runs of whole blocks, with pins and an order of eviction.

    lanes: Namespace -> root
                         |
              "You are a helpful ..."  blocks [7 8 9]        held by A and B
                   /            \\
       "What is ..." [4]     "Write ..." [12 13]             held by A          cached, held by nobody

Matching compares token bytes, so it is exact: there is no digest that could collide. A node is one edge: `key` holds
the tokens of its blocks as bytes, compared with one memcmp. Work is proportional to nodes, not to blocks.

`ref` of a node counts the holds on it itself (`lock`), and its children with ref > 0. So a node is pinned exactly when
something at or below it is, and locking stops at the first ancestor that was locked before. Unpinned nodes stand in an
order of eviction (`eviction`), children before their parents; only leaves go, so tails go before heads. Lanes share one
order, except those with a quota, which have one of their own: beyond the quota it gives up what it has, and below it
gives up only what the shared order cannot.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from anaphora.cache.eviction import make_order
from anaphora.cache.index import NO_HIT, NUM_GHOSTS, Hit, require
from anaphora.cache.node import Node, Root
from anaphora.cache.prefix import Prefix
from anaphora.cache.segments import Segments
from anaphora.tokens import TOKEN_BYTES, Buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anaphora.cache.eviction import EvictionPolicy
    from anaphora.cache.node import Key, LruOrder
    from anaphora.cache.residency import Residency
    from anaphora.cache.segments import Label
    from anaphora.cache.sequence import Sequence
    from anaphora.identity import Namespace

Tokens = bytes | bytearray
Ghost: TypeAlias = "tuple[int, Label, Node | None]"
"""Of an evicted node its depth, its label, and the node above it."""


class RadixTree:
    """Lanes of nodes. Sizes are in blocks; `width` is the size of a block's tokens in bytes.

    Cost, for p = nodes on a path and e = nodes evicted: match O(p) + one memcmp; lock and unlock O(nodes whose pin
    changes); split, add O(1) + one memcpy; evict O(e).
    """

    def __init__(
        self,
        block_size: int,
        policy: EvictionPolicy,
        residency: Residency | None = None,
    ) -> None:
        self.width = block_size * TOKEN_BYTES
        self.on_leave: Callable[[Node, int, bool], None] | None = None
        """Told of the blocks of a node, from a position on, that are about to leave the tree unpinned, and whether
        that is because their room is needed: otherwise they are to be forgotten."""
        self.ghosts: deque[Ghost] = deque(maxlen=NUM_GHOSTS)
        """Evicted nodes, the latest last. What was trimmed off a node's end, the node itself remembers."""
        self.lanes: dict[Namespace, Root] = {}
        self.order = make_order(policy)
        """Unpinned nodes of the lanes without a quota."""
        self.residency = residency
        self._policy = policy
        self.quotas: dict[Namespace, LruOrder] = {}
        """The orders of the lanes that have one of their own."""

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks of unpinned nodes."""
        return sum(order.num_blocks for order in self.orders()) if self.quotas else self.order.num_blocks

    def match(self, tokens: Tokens, namespace: Namespace, max_blocks: int, segments: Segments | None = None) -> Hit:
        """Find the longest known prefix, at most `max_blocks` long. Changes nothing. `where` is the last node reached,
        None where nothing matches."""
        node: Node | None = self.lanes.get(namespace)
        if node is None:
            return NO_HIT
        if type(tokens) is not bytes:
            tokens = bytes(tokens)
        width = self.width
        position = pinned_end = 0
        end = stop = max_blocks * width
        while position < end:
            first_block = tokens[position : position + width]
            label: Label = first_block
            if segments is not None:
                content, last = segments.at(position // width)
                stop = min(end, last * width)
                if content is not None:
                    label = (first_block, content)
            kid = node.kids.get(label)
            if kid is None:
                break
            node = kid
            key = node.key
            size = len(node.blocks) * width
            if position + size > stop or len(key) != size or not tokens.startswith(key, position):
                limit = min(stop - position, size)
                size_equal = width * count_equal_blocks(tokens, position, key, limit, width)
                position += size_equal
                if node.ref:
                    pinned_end = position
                if size_equal < size:
                    break
            else:
                position += size
                if node.ref:
                    pinned_end = position
        if not position:
            return NO_HIT
        num_blocks = position // width
        num_unpinned = (position - pinned_end) // width  # what is above a pinned node is pinned too
        # As `Hit(...)`, without its Python-level constructor.
        return tuple.__new__(Hit, (num_blocks, num_unpinned, node, num_blocks))

    def lane(self, namespace: Namespace) -> Root:
        """Return a namespace's root, made if need be. An empty one is dropped when its last hold goes."""
        root = self.lanes.get(namespace)
        if root is None:
            root = self.lanes[namespace] = Root(namespace, self.quotas.get(namespace, self.order))
        return root

    def set_quota(self, namespace: Namespace, max_blocks: int | None) -> None:
        """Give a lane an order of its own with this quota, or none. Cost: O(nodes)."""
        order = self.order
        if max_blocks is None:
            self.quotas.pop(namespace, None)
        else:
            order = self.quotas[namespace] = make_order(self._policy, max_blocks)
        root = self.lanes.get(namespace)
        if root is None:
            return
        old = root.order
        moving = {node for node in self.nodes(root) if not node.ref}
        for node in [node for node in old.idle if node in moving]:
            old.take_out(node)
            order.put_in(node)
        for node in [root, *self.nodes(root)]:
            node.order = order

    def orders(self) -> list[LruOrder]:
        """All orders, in which eviction goes through them: the shared one, then those with a quota, largest first."""
        if not self.quotas:
            return [self.order]
        return [self.order, *sorted(self.quotas.values(), key=lambda order: -order.num_blocks)]

    # -- pins ------------------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Hold a node, and with it the path to it."""
        order = node.order
        ref = node.ref = node.ref + 1
        while ref == 1:
            parent = node.parent
            if parent is None:
                return
            if node in order.idle:  # a node that was made just now is not
                order.take_out(node)
                if self.residency is not None:
                    self.residency.held(node, len(node.blocks))
            node = parent
            ref = node.ref = node.ref + 1

    def unlock(self, node: Node) -> None:
        """Let go one hold; what nobody holds any more becomes evictable, deepest first."""
        order = node.order
        ref = node.ref = node.ref - 1
        while not ref:
            parent = node.parent
            if parent is None:
                assert isinstance(node, Root)
                self._drop_if_unused(node)
                return
            order.put_in(node)
            if self.residency is not None:
                self.residency.let_go(node)
            node = parent
            ref = node.ref = node.ref - 1

    # -- shape -----------------------------------------------------------------------------------------------------

    def split(self, node: Node, num_blocks: int) -> Node:
        """Cut a node after `num_blocks` blocks and return the new upper part, which the caller locks at once.

        The lower part keeps its identity, so it stays the end of those who hold it, and its place in the order of
        eviction: nobody has read it.
        """
        size = num_blocks * self.width
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.order, node.label, node.key[:size], node.blocks[:num_blocks])
        parent.adopt(upper)
        node.key = node.key[size:]
        label = bytes(node.key[: self.width])
        node.label = label if isinstance(node.label, bytes) else (label, node.label[1].after(num_blocks))
        del node.blocks[:num_blocks]
        node.parent = upper
        node.depth += num_blocks
        upper.adopt(node)
        if node.digests:
            upper.digests = node.digests[:num_blocks]
            del node.digests[:num_blocks]
        if node.ref:
            upper.ref = 1
        else:
            node.order.num_blocks -= num_blocks
        node.order.split(upper, node)
        if self.residency is not None:
            self.residency.split(upper, node)
        return upper

    def add(self, parent: Node, label: Label, key: Key, blocks: array[int]) -> Node:
        """Hang a new leaf below a node that the caller holds: that hold moves to the leaf."""
        node = Node(parent, parent.order, label, key, blocks)
        node.ref = 1
        parent.adopt(node)
        if self.residency is not None:
            self.residency.stored(node)
        return node

    def evict(self, num_blocks: int, blank: array[int]) -> None:
        """Move exactly `num_blocks` unpinned blocks to `blank`, in the order of eviction, each node's tail before its
        head."""
        if num_blocks <= self.order.num_blocks:
            self.evict_from(self.order, num_blocks, blank)
            return
        for order in self.orders():
            num_here = min(num_blocks, order.num_blocks)
            self.evict_from(order, num_here, blank)
            num_blocks -= num_here

    def evict_from(self, order: LruOrder, num_blocks: int, blank: array[int]) -> None:
        """The same, from one order."""
        order.num_blocks -= num_blocks
        keeps_notes, on_leave, residency = order.keeps_notes, self.on_leave, self.residency
        while num_blocks:
            node = order.first() if keeps_notes else next(iter(order.idle))
            blocks = node.blocks
            size = len(blocks)
            num_left = size - num_blocks if size > num_blocks else 0
            if keeps_notes:
                order.evicted(node, num_left)
            if on_leave is not None:
                on_leave(node, num_left, True)
            if residency is not None:
                residency.evicted(node, size - num_left, is_whole=not num_left)
            if num_left:
                blank.extend(blocks[num_left:])
                self._trim(node, num_left)
                return
            blank.extend(blocks)
            num_blocks -= size
            del order.idle[node]
            self.ghosts.append((node.depth, node.label, node.parent))
            self._cut(node)
            node.key = b""  # a lookup that has lost its worth may still refer to the node

    def _trim(self, node: Node, num_blocks: int) -> None:
        del node.blocks[num_blocks:]
        if node.digests:
            del node.digests[num_blocks:]
        # A prefix in steps costs the length of the key once, if every cut halves it. One block more stays to tell what
        # stood there.
        size = (num_blocks + 1) * self.width
        if size * 2 <= len(node.key):
            node.key = node.key[:size]

    def tokens_of(self, node: Node) -> bytes:
        """Return the tokens of a node's blocks."""
        return bytes(node.key[: len(node.blocks) * self.width])

    def prefix_of(self, node: Node, num_blocks: int) -> Prefix:
        """Return all up to a node's first `num_blocks` blocks. Cost: O(nodes) + one memcpy."""
        path = node.path()
        root = path[0].parent
        assert isinstance(root, Root)
        tokens = b"".join(map(self.tokens_of, path))[: (node.depth + num_blocks) * self.width]
        labels = [part.label for part in path]
        if all(isinstance(label, bytes) for label in labels):
            return Prefix(tokens, root.namespace)
        pieces = [
            (len(part.blocks), None if isinstance(label, bytes) else label[1])
            for part, label in zip(path, labels, strict=True)
        ]
        return Prefix(tokens, root.namespace, Segments.joined(pieces))

    def cut_off(self, node: Node, num_blocks: int, blank: array[int]) -> dict[Node, None]:
        """Take everything after a node's first `num_blocks` blocks out of the tree, the blocks of unpinned nodes to
        `blank`.

        Pinned nodes are returned: they are no part of the tree any more, and their holders have to move to what is left
        of it. If there are any, the node's parent stays locked once for all of them; the caller unlocks it when they
        have moved.
        """
        if num_blocks:
            if node.ref:
                self.split(node, num_blocks)
            else:
                # Nobody would lock the upper part, so the node itself stays and loses its tail.
                for kid in list(node.kids.values()):
                    self.cut_off(kid, 0, blank)
                if self.on_leave is not None:
                    self.on_leave(node, num_blocks, False)
                blank.extend(node.blocks[num_blocks:])
                node.order.num_blocks -= len(node.blocks) - num_blocks
                self._trim(node, num_blocks)
                node.key = node.key[: num_blocks * self.width]  # what is forgotten leaves memory
                if node.order.keeps_notes:
                    node.order.became_leaf(node)
                return {}
        pinned: dict[Node, None] = {}
        stack = [node]
        while stack:
            lower = stack.pop()
            stack.extend(lower.kids.values())
            if self.residency is not None:
                self.residency.forgotten(lower)
            if lower.ref:
                pinned[lower] = None
            else:
                if self.on_leave is not None:
                    self.on_leave(lower, 0, False)
                blank.extend(lower.blocks)
                lower.order.take_out(lower)
        self._cut(node)
        return pinned

    def clear(self) -> None:
        """Forget everything."""
        if self.residency is not None:
            self.residency.clear()
        self.lanes.clear()
        self.ghosts.clear()
        self.order = make_order(self._policy)
        self.quotas = {name: make_order(self._policy, order.quota) for name, order in self.quotas.items()}

    def _cut(self, node: Node) -> None:
        """Take a node away from its parent, which may become a leaf, or an empty lane, by that."""
        parent = node.parent
        assert parent is not None
        kids = parent.kids
        del kids[node.label]
        if not kids:
            if isinstance(parent, Root):
                self._drop_if_unused(parent)
            elif node.order.keeps_notes:
                parent.order.became_leaf(parent)

    def _drop_if_unused(self, root: Root) -> None:
        if not root.kids and not root.ref:
            del self.lanes[root.namespace]

    # -- what was evicted ------------------------------------------------------------------------------------------

    def was_evicted(self, hit: Hit, sequence: Sequence) -> bool:
        """Whether the block after a sequence's hit is remembered as evicted."""
        label = sequence.label(hit.num_blocks, self.width)
        last: Node | None = hit.where
        if last is not None and hit.num_blocks == last.depth + len(last.blocks):
            size = len(last.blocks) * self.width
            if bytes(last.key[size : size + self.width]) == label:
                return True
        return any(
            depth == hit.num_blocks and ghost == label and self._is_above(parent, sequence)
            for depth, ghost, parent in self.ghosts
        )

    def _is_above(self, node: Node | None, sequence: Sequence) -> bool:
        """Whether the path to a node is the sequence's own, as far as first blocks tell."""
        while node is not None and node.parent is not None:
            if node.label != sequence.label(node.depth, self.width):
                return False
            node = node.parent
        return isinstance(node, Root) and node.namespace == sequence.namespace

    # -- the whole -------------------------------------------------------------------------------------------------

    def nodes(self, top: Node | None = None) -> Iterator[Node]:
        """Every node but the roots, or every node below `top`; parents before their children."""
        stack: list[Node] = list(self.lanes.values()) if top is None else [top]
        while stack:
            node = stack.pop()
            if node.parent is not None and node is not top:
                yield node
            stack.extend(node.kids.values())

    def check(self, num_locks: dict[Node, int]) -> None:
        """Assert every invariant of the tree, given how many holds there are on which nodes."""
        place = {node: i for order in self.orders() for i, node in enumerate(order.idle)}
        num_evictable = 0
        for root in self.lanes.values():
            require(bool(root.kids or root.ref), "an empty lane was kept")
            require(root.ref == num_locks.get(root, 0) + sum(kid.ref > 0 for kid in root.kids.values()), "a root's ref")
        seen = set()
        for node in self.nodes():
            seen.add(node)
            parent = node.parent
            assert parent is not None
            require(parent.kids.get(node.label) is node, "a node is not where its label says")
            label = node.label if isinstance(node.label, bytes) else node.label[0]
            require(label == node.key[: self.width], "a label is not the first block's tokens")
            require(len(node.key) >= len(node.blocks) * self.width > 0, "a key is shorter than its blocks")
            require(node.depth == parent.depth + len(parent.blocks), "a node is not as deep as it says")
            require(node.ref == num_locks.get(node, 0) + sum(kid.ref > 0 for kid in node.kids.values()), "a node's ref")
            require(node.order is parent.order, "a node stands in another order than its lane")
            require((node in node.order.idle) == (not node.ref), "evictable is not the same as unpinned")
            if not node.ref:
                num_evictable += len(node.blocks)
                require(parent not in place or place[node] < place[parent], "a parent stands before its child")
        require(seen.issuperset(place), "a node that is gone is still to be evicted")
        for order in self.orders():
            num_blocks = sum(len(node.blocks) for node in order.idle)
            require(order.num_blocks == num_blocks, "an order's count of blocks is wrong")
            require(not order.idle or not order.first().kids, "a node that is no leaf is to go next")
        require(num_evictable == self.num_evictable_blocks, "the count of evictable blocks is wrong")


def count_equal_blocks(tokens: Tokens, position: int, key: Buffer, limit: int, width: int) -> int:
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
