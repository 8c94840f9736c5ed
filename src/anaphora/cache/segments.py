"""Segments: where in a sequence the blocks hold more than token ids, and what.

Blocks that lie in the same media items, one after another, form one segment: the content of its first block says what
all of them hold. So a long image is one edge of a tree, not one for each block.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from anaphora.identity import DEFAULT_NAMESPACE, extra_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anaphora.identity import EmbedsKey, Media, MediaKey


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What one block holds besides token ids: media items and embedding rows, with their offsets inside the block."""

    media: tuple[MediaKey, ...]
    embeds: tuple[EmbedsKey, ...]
    block_size: int

    def after(self, num_blocks: int) -> BlockContent:
        """Return the content of the block that many further on in the same segment."""
        shift = num_blocks * self.block_size
        media = tuple(item._replace(offset=item.offset - shift) for item in self.media)
        return BlockContent(media, self.embeds, self.block_size)


Label: TypeAlias = bytes | tuple[bytes, BlockContent]
"""What tells a block from others that follow the same prefix: its tokens, and its media if it has any."""


class Segments:
    """A sequence's segments in order. Blocks between and after those with media are plain.

    Cost: O(blocks that media overlap) to make, O(log segments) to ask.
    """

    def __init__(self, media: Sequence[Media], block_size: int) -> None:
        self._starts: list[int] = []
        self._contents: list[BlockContent | None] = []
        first = min(item.offset for item in media) // block_size
        last = (max(item.offset + item.length for item in media) - 1) // block_size + 1
        self._open(0, None)
        expected: BlockContent | None = None
        for position, extras in enumerate(extra_keys(DEFAULT_NAMESPACE, media, first, last - first, block_size) or ()):
            held = extras.content if extras else None
            content = BlockContent(*held, block_size) if held else None
            # Rows of embeddings have a digest for each block, so such a block is a segment of its own.
            if content != expected or (content and content.embeds):
                self._open(first + position, content)
            expected = content.after(1) if content else None
        self._open(last, None)

    @classmethod
    def joined(cls, pieces: Iterable[tuple[int, BlockContent | None]]) -> Segments | None:
        """Return the segments of a prefix made of pieces, each so many blocks that lie in the same media as its first
        one does; None if there is no media at all."""
        segments = cls.__new__(cls)
        segments._starts, segments._contents = [], []
        position, expected = 0, None
        for num_blocks, content in pieces:
            if not position or content != expected or (content and content.embeds):
                segments._open(position, content)
            position += num_blocks
            expected = content and content.after(num_blocks)
        segments._open(position, None)
        return segments if any(segments._contents) else None

    def _open(self, block: int, content: BlockContent | None) -> None:
        if self._starts and self._starts[-1] == block:
            self._contents[-1] = content
        else:
            self._starts.append(block)
            self._contents.append(content)

    def at(self, block: int) -> tuple[BlockContent | None, int]:
        """Return a block's content, None if it is plain, and the block at which its segment ends."""
        position = bisect_right(self._starts, block) - 1
        content = self._contents[position]
        end = self._starts[position + 1] if position + 1 < len(self._starts) else NEVER
        return (content.after(block - self._starts[position]) if content else None), end


NEVER = 2**31
"""A block that no sequence reaches: the end of the last segment."""
