"""A sequence: one request's tokens, how far its KV is computed, and the blocks that hold it."""

from __future__ import annotations

from array import array
from typing import Any, Literal

from anaphora.identity import Namespace
from anaphora.tokens import TOKEN_BYTES

State = Literal["waiting", "running", "preempted", "finished"]


class Sequence:
    """The handle that `KVCacheManager.start` returns. Read its attributes; only the manager changes them.

    tokens: packed int32 ids, prompt and generated ones. bytes until the first append, then a bytearray.
    num_tokens: how many.
    num_computed_tokens: how many leading tokens have their KV in `block_table`'s blocks.
    state: waiting (not admitted yet), running, preempted (gave its blocks back), finished.
    read_cache, write_cache: whether it may use, and whether it may leave, cached blocks.
    """

    __slots__ = (
        "_lookup",
        "_num_cached_tokens",
        "block_tables",
        "index_state",
        "namespace",
        "num_computed_tokens",
        "num_indexed_blocks",
        "num_tokens",
        "read_cache",
        "state",
        "tokens",
        "was_admitted",
        "write_cache",
    )

    def __init__(
        self,
        tokens: bytes,
        namespace: Namespace,
        *,
        num_groups: int,
        read_cache: bool,
        write_cache: bool,
        lookup: Any,
    ) -> None:
        self.tokens: bytes | bytearray = tokens
        self.num_tokens = len(tokens) // TOKEN_BYTES
        self.namespace = namespace
        self.read_cache = read_cache
        self.write_cache = write_cache
        self.state: State = "waiting"
        self.was_admitted = False
        self.block_tables: list[array[int]] = [array("i") for _ in range(num_groups)]
        self.num_computed_tokens = 0
        self.num_indexed_blocks = 0
        """Leading blocks whose content the index knows, whether the index serves this sequence's copy or another's."""
        self.index_state: Any = None
        """What the index remembers of this sequence; no one else looks at it."""
        self._num_cached_tokens = 0
        self._lookup = lookup

    @property
    def block_table(self) -> array[int]:
        """`array('i')`, one block id per block, in order. A buffer view of it expires at the next allocate."""
        return self.block_tables[0]

    @property
    def is_admitted(self) -> bool:
        """Whether it holds blocks: admitted, and neither preempted nor finished since."""
        return self.state == "running"

    @property
    def num_cached_tokens(self) -> int:
        """Tokens served from the cache: before the first admission what a lookup finds now, final from then on."""
        if self.was_admitted or self.state == "finished":
            return self._num_cached_tokens
        return int(self._lookup(self))

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.state}: {self.num_tokens} tokens, {self.num_computed_tokens} computed, "
            f"{len(self.block_table)} blocks>"
        )
