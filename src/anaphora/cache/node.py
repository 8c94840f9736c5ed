"""Nodes of a radix tree, and the order in which those that nobody holds stand."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from anaphora.cache.segments import Label
    from anaphora.identity import Namespace

Key = bytes | bytearray
NO_KIDS: dict[Label, Node] = {}
"""What every leaf has for children; never written to."""


class Node:
    """One edge: `blocks[i]` holds the tokens `key[i * width : (i + 1) * width]`. A lane's root has neither.

    key: may go on after the last block, with the tokens of blocks that were trimmed off.
    label: what its parent finds it by, the tokens of its first block, with that block's media if it has any. An edge
        holds blocks of one segment only: either plain ones, or blocks that lie in the same media items.
    depth: blocks before its first one.
    order: where it stands when nobody holds it. note: what its order remembers of it.
    digests: names of its first blocks, as many as have been asked for.
    """

    __slots__ = ("blocks", "depth", "digests", "key", "kids", "label", "note", "order", "parent", "ref")

    def __init__(self, parent: Node | None, order: LruOrder, label: Label, key: Key, blocks: array[int]) -> None:
        self.parent = parent
        self.order = order
        self.label = label
        self.key = key
        self.blocks = blocks
        self.kids = NO_KIDS
        self.ref = 0
        self.depth: int = 0 if parent is None else parent.depth + len(parent.blocks)
        self.digests: list[bytes] | None = None
        self.note: Any = None

    def adopt(self, kid: Node) -> None:
        """Make a node, which knows this one as its parent, one of the children."""
        if self.kids is NO_KIDS:
            self.kids = {kid.label: kid}
        else:
            self.kids[kid.label] = kid

    def path(self) -> list[Node]:
        """Nodes from below the root to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class Root(Node):
    """Where a lane begins: all that is known under one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace, order: LruOrder) -> None:
        super().__init__(None, order, b"", b"", array("i"))
        self.namespace = namespace


class LruOrder:
    """The nodes that nobody holds, in the order in which they were let go, and how many blocks they have.

    When nodes are split or evicted the tree itself keeps `idle` and `num_blocks` up. An order that goes by more than
    recency sets `keeps_notes`, and is told of everything below.
    """

    keeps_notes = False

    def __init__(self, quota: int | None = None) -> None:
        self.idle: OrderedDict[Node, None] = OrderedDict()
        self.num_blocks = 0
        self.quota = quota
        """The most blocks that may stay here; None for any number."""

    def first(self) -> Node:
        """The leaf to go next. There is one."""
        return next(iter(self.idle))

    def put_in(self, node: Node) -> None:
        """A node was let go, after its children were."""
        self.idle[node] = None
        self.num_blocks += len(node.blocks)

    def take_out(self, node: Node) -> None:
        """A node is held again, or gone."""
        del self.idle[node]
        self.num_blocks -= len(node.blocks)

    def became_leaf(self, node: Node) -> None:
        """The last child of a node is gone."""

    def used(self, node: Node, priority: int) -> None:
        """A request that was served all of a node has gone on from there."""

    def made(self, node: Node, priority: int) -> None:
        """A request made a node, or made one longer."""

    def split(self, upper: Node, lower: Node) -> None:
        """A node was cut in two."""

    def finished(self, tail: Node, num_prompt_blocks: int, split: Callable[[Node, int], Node]) -> None:
        """A request ends at `tail`, which it still holds; its prompt had so many whole blocks. `split` cuts a node."""

    def evicted(self, node: Node, num_left: int) -> None:
        """All blocks of a leaf but the first `num_left` are about to go."""
