"""Nodes of the fleet's tree of tokens."""

from __future__ import annotations

NODE_BYTES = 700
"""What a node takes beside its tokens: the object, its entries in the tables."""


class Node:
    """A run of `size` blocks that begins `start` blocks after the root. `lower`: what was split off its end.

    unread: what was stored at its end since its tokens were last looked at. Most of it never is, and is never copied.
    full: bit b is set where holder b has all the blocks. partial: holder -> bits of the blocks that it has, never all.
    """

    __slots__ = (
        "_tokens", "full", "kids", "lower", "node_id", "parent", "partial", "sealed", "size", "start", "unread",
    )  # fmt: skip

    def __init__(self, node_id: int, parent: Node | None, start: int, tokens: bytes | bytearray, size: int) -> None:
        self.node_id = node_id
        self.parent = parent
        self.start = start
        self._tokens = bytearray()
        self.unread = [tokens]
        self.size = size
        self.kids: dict[bytes, Node] = {}
        self.full = 0
        self.partial: dict[int, int] = {}
        self.lower: Node | None = None
        self.sealed = False  # cut by force: places beyond its end may still be known, so it must not grow again

    @property
    def tokens(self) -> bytearray:
        """Its tokens. Cost: a copy of those that are looked at for the first time."""
        if self.unread:
            for piece in self.unread:
                self._tokens += piece
            self.unread.clear()
        return self._tokens
