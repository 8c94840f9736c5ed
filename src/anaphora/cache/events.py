"""What happened to cached blocks, for whoever keeps a picture of this cache elsewhere: routers, tiers, peers.

Blocks have names here, not ids: an event carries digests. Replaying all events from the start gives exactly the
blocks that can be found (`Mirror` does it); a name that was stored twice has to be removed twice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from anaphora.identity import extra_keys
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from anaphora.identity import BlockDigests, Extras, Media, Namespace

DEVICE = "GPU"
"""The medium of the engine's own blocks, by the name that vLLM gives it on every backend."""
HOST = "CPU"
"""The medium of blocks in host memory, by vLLM's name."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one sequence became findable.

    digests: one per block, in order. parent: the digest of the block before the first, None at the head of a chain.
    tokens: packed ids of all the blocks. extras: per block what distinguishes it beside its tokens and namespace
    (media and their offsets), None where there is none at all.
    """

    digests: tuple[bytes, ...]
    parent: bytes | None
    tokens: bytes
    block_size: int
    namespace: Namespace
    extras: Sequence[Extras | None] | None = None
    medium: str = DEVICE
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks can no longer be found; one copy each, others of the same name may be left."""

    digests: tuple[bytes, ...]
    medium: str = DEVICE
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing can be found any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def require_names(digests: BlockDigests, namespace: Namespace, media: Sequence[Media], block_size: int) -> None:
    """Raise ValueError if the digests have no names for the blocks of such a prompt, as vLLM's have none under an
    adapter without a name. Cost: a digest for each block up to the end of the media."""
    num_blocks = -(-(media[-1].offset + media[-1].length) // block_size) if media else 1
    extras = extra_keys(namespace, media, 0, num_blocks, block_size)
    if extras is not None:
        # Whether there is a name does not depend on the ids.
        digests.chain(digests.root(namespace), bytes(num_blocks * block_size * TOKEN_BYTES), block_size, extras)


def stretches(is_stored: Iterable[bool]) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of consecutive blocks that are stored: one event tells of each."""
    start = 0
    for stored, group in groupby(is_stored):
        end = start + sum(1 for _ in group)
        if stored:
            yield start, end
        start = end


class Mirror:
    """The picture that events draw: how many findable blocks carry each (digest, group, medium)."""

    def __init__(self) -> None:
        self.blocks: Counter[tuple[bytes, int, str]] = Counter()

    def apply(self, events: Iterable[Event]) -> None:
        """Follow events in order. Raises ValueError for the removal of a block that was never stored."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                continue
            keys = [(digest, event.group, event.medium) for digest in event.digests]
            if isinstance(event, BlockStored):
                self.blocks.update(keys)
                continue
            for key in keys:
                if not self.blocks[key]:
                    raise ValueError(f"removed, but never stored: {key[0].hex()} (group {key[1]}, {key[2]})")
                self.blocks[key] -= 1
                if not self.blocks[key]:
                    del self.blocks[key]
