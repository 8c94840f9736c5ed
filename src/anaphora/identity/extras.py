"""What a block holds besides its token ids."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from anaphora.identity.media import Media, MediaSpan, PromptEmbeds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anaphora.identity.namespace import Adapter, Namespace


class MediaKey(NamedTuple):
    """An item that overlaps a block. `offset` is where it begins, counted from the block's first token: negative if it
    began earlier."""

    digest: str
    offset: int
    length: int


class EmbedsKey(NamedTuple):
    """The embedding rows inside a block: where they begin, counted from the block's first token, how many they are, and
    their SHA-256."""

    offset: int
    num_rows: int
    digest: bytes


Content: TypeAlias = tuple[tuple[MediaKey, ...], tuple[EmbedsKey, ...]]


@dataclass(frozen=True, slots=True)
class Extras:
    """What a block's identity holds besides its token ids and its predecessors.

    media: the items that overlap the block, in prompt order.
    embeds: None in a prompt without embeddings; in a prompt with some, those in this block, possibly none.
    adapter, salt: repeated from the namespace on the blocks where vLLM's digests want them: the adapter on every
        block, the salt on a prompt's first. Whoever compares namespaces apart needs `content` alone.
    """

    adapter: Adapter | None = None
    media: tuple[MediaKey, ...] = ()
    salt: str | None = field(default=None, repr=False)
    embeds: tuple[EmbedsKey, ...] | None = None

    @property
    def content(self) -> Content | None:
        """What the block itself holds, or None if that is token ids alone."""
        return (self.media, self.embeds or ()) if self.media or self.embeds else None


def extra_keys(
    namespace: Namespace, media: Sequence[Media], first_block: int, num_blocks: int, block_size: int
) -> list[Extras | None] | None:
    """Return the extras of the blocks first_block .. first_block + num_blocks - 1, or None if none of them has any.

    media: as `validate_media` returns it: in prompt order, without overlaps.

    Cost: O(1) for text under no adapter; otherwise O(num_blocks + len(media)).
    """
    has_embeds = any(isinstance(item, PromptEmbeds) for item in media)
    salt = namespace.salt if first_block == 0 else None
    plain = Extras(namespace.adapter, embeds=() if has_embeds else None) if namespace.adapter or has_embeds else None
    if plain is None and salt is None and not media:
        return None
    keys: list[Extras | None] = [plain] * num_blocks
    items: defaultdict[int, list[MediaKey]] = defaultdict(list)
    rows: defaultdict[int, list[EmbedsKey]] = defaultdict(list)
    for block, item in _overlaps(media, first_block, first_block + num_blocks, block_size):
        start = block * block_size
        if isinstance(item, MediaSpan):
            items[block].append(MediaKey(item.digest, item.offset - start, item.length))
        else:
            first = max(start, item.offset)
            end = min(start + block_size, item.offset + item.length)
            digest = item.digest(first - item.offset, end - item.offset)
            rows[block].append(EmbedsKey(first - start, end - first, digest))
    salted = {0} if salt is not None and num_blocks else set()
    for block in salted | items.keys() | rows.keys():
        keys[block - first_block] = Extras(
            namespace.adapter,
            tuple(items[block]),
            salt if block == 0 else None,
            tuple(rows[block]) if has_embeds else None,
        )
    return keys if any(keys) else None


def _overlaps(media: Sequence[Media], first_block: int, end_block: int, block_size: int) -> Iterator[tuple[int, Media]]:
    """Yield (block, item) for every item that reaches into a block of the range, in prompt order."""
    # Items do not overlap, so at most one that begins before the range reaches into it.
    nearest = bisect_right(media, first_block * block_size, key=lambda item: item.offset) - 1
    for item in media[max(nearest, 0) :]:
        first = max(first_block, item.offset // block_size)
        if first >= end_block:
            return
        for block in range(first, min(end_block, (item.offset + item.length - 1) // block_size + 1)):
            yield block, item
