"""A toy model for testing an engine: any mistake in block tables, commits, preemption or caching changes its output.

The "KV" of a token is a digest of all tokens up to it, computed from the KV of the token before it as found in the
pages. The logits at a position are a hash of every token, position and digest read back through the block table. So
a page that holds another prefix, a table in the wrong order, or a token that was never written gives other logits;
the last two are refused outright.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from anaphora.engine.executor import LayerGroup, Output
from anaphora.engine.sampling import Sampler
from anaphora.tokens import pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from anaphora.engine.executor import Batch
    from anaphora.engine.request import SamplingParams

VOCAB_SIZE = 48

Slot = tuple[int, int, bytes]
"""Position, token id, digest of the tokens up to here."""


class ToyExecutor:
    """Executor over pages of `Slot`s. The next calls of `execute` raise `failures`, with nothing written, and so do
    those that save or load blocks `transfer_failures`."""

    numerics_id = "toy"
    layer_groups = (LayerGroup(layers=(0,), kv_bytes_per_token=4),)
    vocab_size = VOCAB_SIZE

    def __init__(self, *, block_sizes: tuple[int, ...] = (1, 2, 4, 8, 16), max_context: int = 1024) -> None:
        self.block_sizes = block_sizes
        self.max_context = max_context
        self.num_computed_tokens = 0
        self.batches: list[list[tuple[int, int]]] = []
        """(start, number of tokens) of every span of every step."""
        self.failures: list[Exception] = []
        self.transfer_failures: list[Exception] = []
        self._pages: list[list[Slot | None]] = []
        self._host: list[list[Slot | None]] = []
        self._block_size = 0

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        self._pages = [[None] * block_size for _ in range(num_blocks + 1)]
        self._block_size = block_size

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._pages[target] = list(self._pages[source])

    def allocate_host(self, num_blocks: int) -> None:
        self._host = [[None] * self._block_size for _ in range(num_blocks + 1)]

    def save_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._move(pairs, self._pages, self._host)

    def load_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._move(pairs, self._host, self._pages)

    def _move(
        self, pairs: Sequence[tuple[int, int]], sources: list[list[Slot | None]], targets: list[list[Slot | None]]
    ) -> None:
        if self.transfer_failures:
            raise self.transfer_failures.pop(0)
        for source, target in pairs:
            assert None not in sources[source], "a block that is not full was moved"
            targets[target] = list(sources[source])

    def execute(self, batch: Batch) -> Output:
        if self.failures:
            raise self.failures.pop(0)
        logits: list[NDArray[np.float32] | None] = []
        self.batches.append([(span.start, len(span.tokens)) for span in batch.spans])
        for span in batch.spans:
            assert span.tokens.dtype == np.int32
            assert len(span.tokens) >= 1
            table = list(span.block_tables[0])
            for position, token in enumerate(span.tokens.tolist(), span.start):
                before = self._read(table, position - 1) if position else None
                digest = _digest(before[2] if before else b"", token)
                self._pages[self._page(table, position)][position % self._block_size] = (position, token, digest)
            self.num_computed_tokens += len(span.tokens)
        # After all writes: a block given to two spans at once shows up here.
        for span in batch.spans:
            end = span.start + len(span.tokens)
            rows = [self._logits(list(span.block_tables[0]), n) for n in range(end - span.num_logits + 1, end + 1)]
            logits.append(np.stack(rows) if rows else None)
        return Output(logits)

    def _page(self, table: list[int], position: int) -> int:
        page = table[position // self._block_size]
        assert 1 <= page < len(self._pages), f"page {page} does not exist"
        return page

    def _read(self, table: list[int], position: int) -> Slot:
        slot = self._pages[self._page(table, position)][position % self._block_size]
        assert slot is not None, f"position {position} was never written"
        assert slot[0] == position, f"position {position} holds position {slot[0]}"
        return slot

    def _logits(self, table: list[int], num_tokens: int) -> NDArray[np.float32]:
        return _hash_to_row([self._read(table, position) for position in range(num_tokens)])


def toy_logits(tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits after `tokens` as the model defines them, without pages: float32 [VOCAB_SIZE]."""
    slots: list[Slot] = []
    digest = b""
    for position, token in enumerate(tokens):
        digest = _digest(digest, token)
        slots.append((position, token, digest))
    return _hash_to_row(slots)


def toy_output(prompt: Sequence[int], sampling: SamplingParams, seed: int = 0) -> tuple[int, ...]:
    """What a request must produce whatever runs beside it: its tokens alone, without an engine, a cache or pages."""
    sampler = Sampler(sampling, seed if sampling.seed is None else sampling.seed, pack(list(prompt)))
    tokens = list(prompt)
    for position in range(sampling.max_tokens):
        tokens.append(sampler.sample(toy_logits(tokens), position))
        if tokens[-1] in sampling.stop_token_ids:
            break
    return tuple(tokens[len(prompt) :])


def _digest(before: bytes, token: int) -> bytes:
    return blake2b(before + token.to_bytes(4, "little"), digest_size=8).digest()


def _hash_to_row(slots: list[Slot]) -> NDArray[np.float32]:
    content = b"".join(digest + token.to_bytes(4, "little") for _, token, digest in slots)
    bits = blake2b(content, digest_size=VOCAB_SIZE).digest()
    return np.frombuffer(bits, dtype=np.uint8).astype(np.float32) / 32
