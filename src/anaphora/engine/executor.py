"""What an engine asks of a model, whatever runs it: the executor protocol.

An executor owns the weights and the KV pages. It is told which spans of which sequences to compute and where their
blocks lie; it knows nothing of requests, queues or caching. Only added to, never changed: every executor, the virtual
one too, is held to it by the same tests.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from anaphora.model import LoraAdapter

Group: TypeAlias = tuple[tuple[int, ...], int]
"""Numbers of the members, ascending, at least two; how many leading blocks they have in common."""

MIN_SHARED_TOKENS = 256
"""What a group must have in common, beyond what the group around it has, to be worth the planning."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one block table: all with full attention, or all with one window.

    `kv_bytes_per_token` is what one token's keys and values take over all layers of the group.
    """

    layers: tuple[int, ...]
    kv_bytes_per_token: int
    window: int | None = None


@dataclass(slots=True)
class Span:
    """Consecutive tokens of one sequence, to be computed in this step.

    tokens: int32 [n], n >= 1, the ids at positions `start` .. `start` + n - 1.
    start: how many tokens of the sequence have their KV in the pages already.
    block_tables: per layer group the sequence's block ids, at least ceil((start + n) / block_size) of them.
    num_logits: how many of the span's last rows need logits: 0 (a chunk that is not the last), 1, up to n.
    adapter: the digest of one that the executor was given (`RunsAdapters`), None for the model as it is.
    """

    tokens: NDArray[np.int32]
    start: int
    block_tables: Sequence[array[int]]
    num_logits: int = 1
    adapter: str | None = None


@dataclass(slots=True)
class Batch:
    """One step's work.

    shared: groups of spans whose block tables begin with the same blocks (the first group's, if there are several layer
    groups), as `anaphora.engine.grouping` finds them: indices into `spans`, number of leading blocks in common. Two
    groups are apart or nested. An executor may attend to such blocks once for all, with the same bits, or look away.
    """

    spans: list[Span]
    shared: list[Group] = field(default_factory=list)


@dataclass(slots=True)
class Output:
    """Per span its logits, float32 [num_logits, vocab_size], or None where num_logits is 0."""

    logits: list[NDArray[np.float32] | None]


class Executor(Protocol):
    """Runs spans of tokens over paged KV.

    Exactness is part of the protocol: a row of logits depends on the tokens before it and on nothing else; not on how
    they were cut into spans, what else was in the batch, or whether their KV was computed now or long ago.
    """

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Block sizes it supports, ascending. The engine takes the smallest from 16 up."""
        ...

    @property
    def numerics_id(self) -> str:
        """Names kernel path and dtype. KV made under another id has other bits and must not be mixed in."""
        ...

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The model's layers by the block table that they share."""
        ...

    @property
    def vocab_size(self) -> int:
        """Length of a row of logits; valid token ids are 0 .. vocab_size - 1."""
        ...

    @property
    def max_context(self) -> int:
        """The longest sequence, in tokens, that the model was made for."""
        ...

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make the pages: ids 0 .. num_blocks (0 is the null block, so num_blocks + 1 of them)."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (from, to), in every layer, one pair after the other: a later pair may copy a copy."""
        ...

    def execute(self, batch: Batch) -> Output:
        """Compute the spans: write their KV into the pages, return the logits asked for."""
        ...


@runtime_checkable
class RunsAdapters(Protocol):
    """An executor that runs LoRA adapters too: in one batch, each span with its own or with none.

    Exactness holds among them: a span's bits are those that it has alone, and those of spans without an adapter are the
    bits of an executor that has none.
    """

    @property
    def adapters(self) -> Collection[str]:
        """The digests of those that it has, as it stands at any time."""
        ...

    def load_adapter(self, adapter: LoraAdapter) -> None:
        """Take an adapter in; of one that it has already, nothing. Between steps.

        Raises:
            MemoryError: there is not enough memory for it; nothing was taken in.
        """
        ...

    def unload_adapter(self, digest: str) -> None:
        """Forget an adapter, KeyError if there is none such. Between steps; no span may name it from now on."""
        ...


@runtime_checkable
class KeepsHostBlocks(Protocol):
    """An executor that also keeps whole blocks in host memory. What comes back is what went, bit for bit."""

    def allocate_host(self, num_blocks: int) -> None:
        """Make room for host blocks 1 .. num_blocks, each of a page in every layer. After `allocate_kv`, which drops
        them.

        Raises:
            MemoryError: there is not enough memory.
        """
        ...

    def save_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages to host blocks, (block, host block), one pair after the other."""
        ...

    def load_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy host blocks back to pages, (host block, block), one pair after the other."""
        ...
