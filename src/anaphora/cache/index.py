"""What the manager asks of an index: the one place that an author of another index needs to read.

An index owns every block: blank, cached, or held by sequences. It finds the longest known prefix, pins it, hands out
blocks (evicting what nobody holds), learns what has been computed, and takes everything back. Sizes here are in
blocks. `Hit` is what `find` found; the index that made it may keep what it likes in `where`.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Set
    from collections.abc import Sequence as SequenceOf

    from anaphora.cache.prefix import Prefix
    from anaphora.cache.sequence import Sequence
    from anaphora.identity import Namespace


class InvariantError(AssertionError):
    """`check()` found the books in disorder: a defect in this library, or memory that someone else wrote to."""


def require(is_true: bool, what: str) -> None:
    """Raise InvariantError(`what`) unless `is_true`. Unlike `assert` it also runs under `python -O`."""
    if not is_true:
        raise InvariantError(what)


def longest_part(rest: bytes | bytearray, blocks: Iterable[tuple[bytes, int]], unit: int) -> tuple[int, int]:
    """Of blocks given as (tokens, id), return the id of the one that begins most like `rest`, and how many tokens are
    equal, a multiple of `unit`; (0, 0) if not even one unit is."""
    step = unit * TOKEN_BYTES
    best, most = 0, 0
    for tokens, block in blocks:
        size = most + step
        while size <= len(rest) and rest.startswith(tokens[:size]):
            best, most, size = block, size, size + step
    return best, most // TOKEN_BYTES


def find_part(index: PrefixIndex, sequence: Sequence, hit: Hit, block_size: int, match_unit: int) -> tuple[int, int]:
    """Return the cached block that goes on where a sequence's hit ends, and for how many tokens, a multiple of
    `match_unit`; (0, 0) if there is none. At least one token is left to compute."""
    if not sequence.read_cache or sequence.recomputes_last_block:
        return 0, 0
    num_hit = hit.num_blocks * block_size
    size = min(sequence.num_tokens - 1 - num_hit, block_size) * TOKEN_BYTES
    tokens = sequence.tokens[num_hit * TOKEN_BYTES :][:size]
    return longest_part(tokens, index.continuations(sequence, hit), match_unit)


class Hit(NamedTuple):
    """A prefix that was found. `num_unpinned` of the blocks that hold it are held by nobody, so pinning them takes them
    away from what can be handed out. Full-attention layers alone could be served `num_full` blocks."""

    num_blocks: int
    num_unpinned: int
    where: Any
    num_full: int


NO_HIT = Hit(0, 0, None, 0)


NUM_GHOSTS = 4096
"""How many evictions an index remembers, so that `explain` can tell evicted from never cached."""


class NextTier(Protocol):
    """Where evicted blocks go."""

    def save(self, prefix: Prefix, blocks: array[int], names: SequenceOf[bytes], parent: bytes | None) -> None:
        """The last blocks of a prefix are about to be evicted. names: their digests, and `parent` that of the block
        before, if there are events."""
        ...

    def forget(self, prefix: Prefix) -> None:
        """The last block of a prefix is forgotten, and all that extends it."""
        ...


class PrefixIndex(Protocol):
    """Prefixes by their tokens, and the blocks that hold them."""

    num_evicted_blocks: int
    keeps_orphans: bool
    """Whether what extends explicitly forgotten content may be found again."""
    version: int
    """Grows with every change, so that a lookup can be kept for as long as it holds."""
    holders: dict[Sequence, None]
    """The sequences that hold blocks, from `pin` to `release`, in order of admission."""

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: blank ones, and cached ones that nobody holds."""
        ...

    @property
    def num_cached(self) -> int:
        """Cached blocks that nobody holds."""
        ...

    def room(self, hit: Hit, without: Iterable[Sequence]) -> int:
        """Return how many blocks could be handed out, besides those of a hit, if these holders let go what they hold
        (cached blocks only). Changes nothing. Cost: O(nodes, or blocks, that they hold)."""
        ...

    def find(self, sequence: Prefix, max_blocks: int) -> Hit:
        """Return the longest known prefix, at most `max_blocks` long. Changes nothing, not even recency."""
        ...

    def continuations(self, sequence: Sequence, hit: Hit) -> Iterable[tuple[bytes, int]]:
        """Yield the blocks without media that are cached where a hit ends, as (tokens, id), if the sequence's own next
        block has no media. Changes nothing. Cost: O(branches there)."""
        ...

    def was_evicted(self, sequence: Sequence, hit: Hit) -> bool:
        """Whether the block after a hit is among those that were evicted lately. Cost: O(what is remembered)."""
        ...

    def namespaces(self) -> Iterable[Namespace]:
        """Return the namespaces under which something is known."""
        ...

    def pin(self, sequence: Sequence, hit: Hit) -> None:
        """Make the sequence a holder of a hit found in the present state; put its block ids into the tables."""
        ...

    def count_use(self, sequence: Sequence) -> None:
        """The sequence goes on from its hit for the first time: for the policies of eviction, what it was served has
        been used."""
        ...

    def num_leaving(self, sequence: Sequence) -> int:
        """Return how many more blocks `slide` would make available."""
        ...

    def slide(self, sequence: Sequence) -> None:
        """Let go the blocks of tokens that the windows of layer groups have left; null blocks take their place."""
        ...

    def take(self, num_blocks: int) -> array[int]:
        """Hand out blocks for a sequence's table, evicting as needed. The caller checked `num_available`."""
        ...

    def spill_to(self, host: NextTier) -> None:
        """Let a host tier have every block that is evicted from now on, while its content is still there."""
        ...

    def insert(self, sequence: Sequence, num_blocks: int) -> None:
        """The first `num_blocks` blocks of the sequence are full and computed: make them findable."""
        ...

    def release(self, sequence: Sequence) -> None:
        """The sequence gives back its whole table: what is findable stays cached, the rest becomes blank."""
        ...

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Make `child`, whose table is a beginning of the parent's, a holder of its blocks too."""
        ...

    def is_shared(self, block: int) -> bool:
        """Whether a block that is not full is in more than one table."""
        ...

    def leave(self, block: int) -> None:
        """One holder of a shared block has replaced it by a copy of its own."""
        ...

    def forget(self, blocks: Set[int] | None) -> None:
        """Make the content of these blocks, or of all, unfindable, and so what extends it. Nobody loses a block that
        it holds; its holders find nothing of it again."""
        ...

    def names(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Return the digests of a holder's first blocks."""
        ...

    def stored(self) -> list[tuple[bytes, int]]:
        """Return name and layer group of every findable block, as often as it is stored. For tests; cost O(pool)."""
        ...

    def set_quota(self, namespace: Namespace, max_blocks: int | None) -> None:
        """Bound how many blocks that nobody holds stay cached under a namespace; None for no bound."""
        ...

    def clear(self) -> None:
        """Forget all content. The caller made sure that no sequence holds a block."""
        ...

    def check(self) -> None:
        """Assert every invariant of the index and its holders. Raises InvariantError. Cost: O(everything)."""
        ...
