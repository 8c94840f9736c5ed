"""A prefix: all that decides which blocks are its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anaphora.cache.segments import Label, Segments
    from anaphora.identity import Namespace


class Prefix:
    """Tokens under a namespace, with where media lie in them.

    tokens: packed int32 ids. segments: None where there is no media.
    """

    __slots__ = ("namespace", "segments", "tokens")

    def __init__(self, tokens: bytes | bytearray, namespace: Namespace, segments: Segments | None = None) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.segments = segments

    def label(self, position: int, width: int) -> Label:
        """Return what tells the block at a position, of `width` bytes of tokens, from others in its place."""
        tokens = bytes(self.tokens[position * width : (position + 1) * width])
        content = None if self.segments is None else self.segments.at(position)[0]
        return tokens if content is None else (tokens, content)
