"""Duplicates: sequences that computed at the same time what the tree holds one copy of."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from anaphora.cache.index import require

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable

    from anaphora.cache.node import Node
    from anaphora.cache.sequence import Sequence


class _Copies:
    """Of one node: the holders that have a copy of their own, and how many use the tree's.

    holders: first come first, by the first block of their copy. Only forks have that in common.
    """

    __slots__ = ("holders", "node", "num_users")

    def __init__(self, node: Node, num_users: int) -> None:
        self.node = node
        self.holders: dict[int, dict[Sequence, None]] = {}
        self.num_users = num_users

    def add(self, sequence: Sequence) -> None:
        self.holders.setdefault(sequence.block_table[self.node.depth], {})[sequence] = None

    def has(self, sequence: Sequence) -> bool:
        return sequence in self.holders.get(sequence.block_table[self.node.depth], ())

    def remove(self, sequence: Sequence) -> None:
        first = sequence.block_table[self.node.depth]
        del self.holders[first][sequence]
        if not self.holders[first]:
            del self.holders[first]


class Duplicates:
    """Per node of the tree the holders whose table has other blocks there than the node.

    A table is never rewritten. So while one holder still uses the tree's copy, the others' are private; when its last
    user is gone, the first of the others takes its place.

    Cost: O(path) for whoever comes or goes while there are copies at all; O(holders x path) once for a node, when its
    first copy appears.
    """

    def __init__(self, replace: Callable[[Node, array[int]], None]) -> None:
        self.at: dict[Node, _Copies] = {}
        """The nodes of which there are copies; mostly none."""
        self._replace = replace
        """Puts other blocks into a node whose own nobody uses any more."""

    def own(self, sequence: Sequence) -> list[Node]:
        """Return the nodes on a holder's path of which it has a copy of its own."""
        at = self.at
        return [node for node in sequence.index_state.path() if node in at and at[node].has(sequence)]

    def add(self, sequence: Sequence, node: Node, holders: Iterable[Sequence]) -> None:
        """A sequence whose tail is above a held node has a copy of that node's blocks. `holders` are all there are."""
        copies = self.at.get(node)
        if copies is None:
            copies = self.at[node] = _Copies(node, sum(_passes(other, node) for other in holders))
        copies.add(sequence)

    def pinned(self, sequence: Sequence) -> None:
        """A sequence was admitted; it uses the tree's blocks all along its path."""
        for node in sequence.index_state.path():
            if node in self.at:
                self.at[node].num_users += 1

    def shared(self, parent: Sequence, child: Sequence) -> None:
        """A sequence was forked: the child has the same blocks."""
        for node in parent.index_state.path():
            copies = self.at.get(node)
            if copies is None:
                continue
            if copies.has(parent):
                copies.add(child)
            else:
                copies.num_users += 1

    def leave(self, sequence: Sequence) -> None:
        """A holder lets go. Where it was the last user of the tree's copy, another's takes its place."""
        for node in sequence.index_state.path():
            copies = self.at.get(node)
            if copies is None:
                continue
            if copies.has(sequence):
                copies.remove(sequence)
            else:
                copies.num_users -= 1
                if not copies.num_users:
                    self._settle(node, copies)
            if not copies.holders:
                del self.at[node]

    def _settle(self, node: Node, copies: _Copies) -> None:
        alike = list(next(iter(copies.holders.values())))
        blocks = own_blocks(alike[0], node)
        self._replace(node, blocks)
        for holder in alike:
            if own_blocks(holder, node) == blocks:
                copies.remove(holder)
                copies.num_users += 1

    def split(self, upper: Node, lower: Node) -> None:
        """A node was cut in two; who passes one passes both."""
        copies = self.at.get(lower)
        if copies is not None:
            self.at[upper] = _Copies(upper, copies.num_users)
            self.at[lower] = _Copies(lower, copies.num_users)
            for holder in chain.from_iterable(copies.holders.values()):
                self.at[upper].add(holder)
                self.at[lower].add(holder)

    def recount(self, holders: Iterable[Sequence]) -> None:
        """Begin anew from the tables, after the tree was cut. Cost: O(holders x path)."""
        self.at = _count(holders)

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert that the records are what the tables say. Raises InvariantError."""
        counted = _count(holders)
        require(counted.keys() == self.at.keys(), "a duplicate is not on record, or one that is gone still is")
        for node, copies in counted.items():
            require(copies.holders == self.at[node].holders, "the holders of copies are wrong")
            require(copies.num_users == self.at[node].num_users, "the count of users of the tree's copy is wrong")


def own_blocks(sequence: Sequence, node: Node) -> array[int]:
    """Return the blocks that a sequence's table has where a node on its path stands."""
    return sequence.block_table[node.depth : node.depth + len(node.blocks)]


def _passes(sequence: Sequence, node: Node) -> bool:
    """Whether a node is on a sequence's path."""
    at: Node | None = sequence.index_state
    while at is not None and at.depth > node.depth:
        at = at.parent
    return at is node


def _count(holders: Iterable[Sequence]) -> dict[Node, _Copies]:
    users: dict[Node, int] = {}
    counted: dict[Node, _Copies] = {}
    for sequence in holders:
        for node in sequence.index_state.path():
            if own_blocks(sequence, node) == node.blocks:
                users[node] = users.get(node, 0) + 1
            else:
                counted.setdefault(node, _Copies(node, 0)).add(sequence)
    for node, copies in counted.items():
        copies.num_users = users.get(node, 0)
    return counted
