"""Our own manager under the kit: `python -m anaphora.conformance anaphora.conformance.own:radix` (or `:hash_index`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.cache import KVCacheManager
from anaphora.conformance.adapter import Counters, ManagerAdapter, Prompt
from anaphora.identity import VllmAlgorithm, VllmDigests
from anaphora.identity.extras import Extras
from anaphora.tokens import TokenIds

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from anaphora.cache import Sequence
    from anaphora.cache.options import IndexKind


class ForgeableDigests(VllmDigests):
    """vLLM's digests, until they are told to collide."""

    collide = False

    def chain(
        self, parent: bytes, tokens: TokenIds, block_size: int, extras: SequenceOf[Extras | None] | None = None
    ) -> list[bytes]:
        """Return the digests of consecutive full blocks; see `BlockDigests.chain`."""
        digests = super().chain(parent, tokens, block_size, extras)
        return [bytes(self.digest_size)] * len(digests) if self.collide else digests


class OwnManager(ManagerAdapter):
    """`KVCacheManager`, with either index."""

    digest_algorithm: VllmAlgorithm = "sha256_cbor"

    def __init__(self, num_blocks: int, block_size: int, index: IndexKind) -> None:
        self._digests = ForgeableDigests(self.digest_algorithm, seed="0", allow_unsafe=True)
        self._manager = KVCacheManager(num_blocks, block_size, index=index, digests=self._digests)
        self._sequences: dict[str, Sequence] = {}

    def begin(self, request: str, prompt: Prompt, num_tokens: int | None) -> int | None:
        """Start a sequence and admit it."""
        sequence = self._manager.start(
            prompt.token_ids, prompt.namespace, media=prompt.media, read_cache=prompt.reads_cache
        )
        self._sequences[request] = sequence
        return self.resume(request, num_tokens)

    def resume(self, request: str, num_tokens: int | None) -> int | None:
        """Admit a sequence, with what is cached now."""
        sequence = self._sequences[request]
        num_left = sequence.num_tokens - self._manager.lookup(sequence)
        if not self._manager.allocate(sequence, num_left if num_tokens is None else min(num_tokens, num_left)):
            return None
        return sequence.num_computed_tokens

    def allocate(self, request: str, num_tokens: int) -> bool:
        """The manager's own."""
        return self._manager.allocate(self._sequences[request], num_tokens)

    def computed(self, request: str, num_tokens: int) -> None:
        """Commit."""
        self._manager.commit(self._sequences[request], num_tokens)

    def append(self, request: str, token_ids: SequenceOf[int]) -> None:
        """The manager's own."""
        self._manager.append(self._sequences[request], token_ids)

    def block_ids(self, request: str) -> SequenceOf[int]:
        """Return the block table."""
        return self._sequences[request].block_table

    def finish(self, request: str) -> None:
        """The manager's own."""
        self._manager.finish(self._sequences[request])

    def num_free_blocks(self) -> int:
        """The manager's own."""
        return self._manager.num_free_blocks

    def match(self, prompt: Prompt) -> int:
        """Look up without holding anything."""
        if not prompt.reads_cache:
            return 0
        return self._manager.match(prompt.token_ids, prompt.namespace, media=prompt.media)

    def preempt(self, request: str) -> None:
        """The manager's own."""
        self._manager.preempt(self._sequences[request])

    def abort(self, request: str) -> None:
        """The manager's own."""
        self._manager.abort(self._sequences[request])

    def evict(self, block_ids: SequenceOf[int]) -> None:
        """The manager's own."""
        self._manager.evict_blocks(block_ids)

    def reset(self) -> bool:
        """The manager's own."""
        return self._manager.reset()

    def invalidate(self) -> None:
        """The manager's own."""
        self._manager.invalidate()

    def counters(self) -> Counters:
        """The manager's own."""
        stats = self._manager.stats()
        return Counters(stats.queries, stats.hits)

    def block_names(self, request: str) -> SequenceOf[bytes]:
        """The manager's own."""
        return self._manager.block_digests(self._sequences[request])


class OwnHashManager(OwnManager):
    """With the index that finds blocks by digests, which can therefore be forged."""

    def forge_digests(self) -> None:
        """Give every block of a sequence that starts from now on one digest."""
        self._digests.collide = True


def radix(num_blocks: int, block_size: int) -> OwnManager:
    """A manager with the radix index."""
    return OwnManager(num_blocks, block_size, "radix")


def hash_index(num_blocks: int, block_size: int) -> OwnManager:
    """A manager with the hash index."""
    return OwnHashManager(num_blocks, block_size, "hash")
