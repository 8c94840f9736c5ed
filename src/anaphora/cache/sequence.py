"""A sequence: one request's tokens, how far its KV is computed, and the blocks that hold it."""

from __future__ import annotations

from array import array
from copy import copy
from typing import TYPE_CHECKING, Any, Literal, Protocol

from anaphora.cache.prefix import Prefix
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from anaphora.cache.segments import Segments
    from anaphora.identity import Media, Namespace

State = Literal["waiting", "running", "preempted", "finished"]


NO_BLOCKS = array("i")
NO_TABLES = [NO_BLOCKS]
"""What every sequence without blocks has for tables; never written to."""


class Manager(Protocol):
    """Who made a sequence: all that the sequence itself asks of it."""

    def lookup(self, sequence: Sequence) -> int:
        """Return how many of its tokens an admission would find now."""
        ...


class Sequence(Prefix):
    """The handle that `KVCacheManager.start` returns. Read its attributes; only the manager changes them.

    tokens: packed int32 ids, prompt and generated ones. bytes until the first append, then a bytearray.
    num_tokens: how many.
    num_computed_tokens: how many leading tokens have their KV in `block_table`'s blocks.
    num_host_tokens: of the tokens that its first admission found cached, those that came back from host memory.
    state: waiting (not admitted yet), running, preempted (gave its blocks back), finished.
    read_cache, write_cache: whether it may use, and whether it may leave, cached blocks.
    """

    __slots__ = (
        "_num_cached_tokens",
        "block_table",
        "block_tables",
        "hit",
        "hit_version",
        "host_blocks",
        "index_state",
        "is_counted",
        "manager",
        "media",
        "num_computed_tokens",
        "num_host_tokens",
        "num_indexed_blocks",
        "num_prompt_tokens",
        "num_shared_blocks",
        "num_tokens",
        "part_of",
        "priority",
        "publishes",
        "read_cache",
        "recomputes_last_block",
        "state",
        "was_admitted",
        "write_cache",
    )

    # What has no value before the first lookup, and the first admission.
    hit: Any
    """The last lookup."""
    host_blocks: array[int]
    """Where it goes on in host memory, if the manager has such a tier."""
    publishes: bool
    """Whether what it commits becomes findable: as asked, until something that it builds on has been forgotten."""
    num_shared_blocks: int
    """Leading blocks that full-attention layers could have been served at admission."""

    def __init__(
        self,
        manager: Manager,
        tokens: bytes,
        namespace: Namespace,
        read_cache: bool,
        write_cache: bool,
    ) -> None:
        self.manager = manager
        self.tokens: bytes | bytearray = tokens
        self.num_tokens = self.num_prompt_tokens = len(tokens) // TOKEN_BYTES
        self.namespace = namespace
        self.media: tuple[Media, ...] = ()
        self.segments: Segments | None = None
        self.read_cache = read_cache
        self.write_cache = write_cache
        self.state: State = "waiting"
        self.was_admitted = self.is_counted = self.recomputes_last_block = False
        self.block_table = NO_BLOCKS
        """One block id per block, in order. A buffer view of it expires at the next allocate."""
        self.block_tables = NO_TABLES
        """One table per layer group, `block_table` first. A window group's has 0 where the window has left."""
        self.num_computed_tokens = self.priority = self._num_cached_tokens = self.num_host_tokens = 0
        self.part_of = 0
        """The block whose beginning was copied at admission, for a hit inside a block."""
        self.index_state: Any = None
        """What the index remembers of this sequence; no one else looks at it."""
        self.num_indexed_blocks = 0
        """Leading blocks whose content the index knows, whether the index serves this sequence's copy or another's."""
        self.hit_version = -1
        """The state of the index that `hit` is valid for."""

    def open_tables(self, num_groups: int) -> None:
        """Start with new, empty tables; who looks at the old ones keeps them."""
        self.block_table = table = array("i")
        self.block_tables = [table]
        if num_groups > 1:
            self.block_tables += [array("i") for _ in range(1, num_groups)]

    def extend_tables(self, blocks: array[int]) -> None:
        """Append newly taken blocks to the tables, the same number to each."""
        num_tables = len(self.block_tables)
        if num_tables == 1:
            self._extend_table(0, blocks)
            return
        share = len(blocks) // num_tables
        for group in range(num_tables):
            self._extend_table(group, blocks[group * share : (group + 1) * share])

    def _extend_table(self, group: int, blocks: array[int]) -> None:
        tables = self.block_tables
        try:
            tables[group].extend(blocks)
        except BufferError:  # someone still looks at the old buffer; leave it to them
            tables[group] = tables[group] + blocks
            self.block_table = tables[0]

    def holds_any(self, blocks: set[int]) -> bool:
        """Whether one of these blocks is in a table."""
        return any(not blocks.isdisjoint(table) for table in self.block_tables)

    def branch(self, num_blocks: int) -> Sequence:
        """Return a sequence like this one, with its first `num_blocks` blocks, of which the index knows nothing yet."""
        branch = copy(self)
        branch.tokens = bytes(self.tokens)
        branch.block_tables = [table[:num_blocks] for table in self.block_tables]
        branch.block_table = branch.block_tables[0]
        branch.index_state = None
        return branch

    @property
    def is_admitted(self) -> bool:
        """Whether it holds blocks: admitted, and neither preempted nor finished since."""
        return self.state == "running"

    @property
    def num_cached_tokens(self) -> int:
        """Tokens served from the cache: before the first admission what a lookup finds now, final from then on."""
        is_final = self.was_admitted or self.state == "finished"
        return self._num_cached_tokens if is_final else self.manager.lookup(self)

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.state}: {self.num_tokens} tokens, {self.num_computed_tokens} computed, "
            f"{len(self.block_table)} blocks>"
        )
