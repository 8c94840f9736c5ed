"""The nodes that nobody holds, and what an order of eviction is told of them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from anaphora.cache.radix_tree import Node


class LruOrder:
    """The nodes that nobody holds, in the order in which they were let go, and how many blocks they have.

    Cost: O(1) for everything.
    """

    keeps_notes = False

    def __init__(self, quota: int | None = None) -> None:
        self.idle: OrderedDict[Node, None] = OrderedDict()
        self.num_blocks = 0
        self.quota = quota
        """The most blocks that may stay here; None for any number."""

    def add(self, node: Node) -> None:
        """A node was let go, after its children were."""
        self.idle[node] = None
        self.num_blocks += len(node.blocks)

    def remove(self, node: Node) -> None:
        """A node is held again, or gone."""
        del self.idle[node]
        self.num_blocks -= len(node.blocks)

    def first(self) -> Node:
        """The leaf to go next. There is one."""
        return next(iter(self.idle))

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
