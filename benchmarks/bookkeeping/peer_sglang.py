"""SGLang's real radix trees, run by an interpreter that has sglang installed. Written against 0.5.23."""

from __future__ import annotations

from array import array
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from .contestant import Contestant, serve

if TYPE_CHECKING:
    from .workload import Scenario


class SlotCounter:
    """In place of SGLang's slot allocator: it counts and does nothing else, so that the trees alone are measured."""

    device = "cpu"

    def __init__(self, num_slots: int) -> None:
        self.num_free = num_slots

    def free(self, slots: torch.Tensor) -> None:
        """Take slots back."""
        self.num_free += len(slots)

    def free_segment(self, slots: torch.Tensor, start_pos: int = 0) -> None:
        """Take back an edge's slots."""
        self.num_free += len(slots)

    def available_size(self) -> int:
        """Slots that nobody has."""
        return self.num_free


class _Live(NamedTuple):
    node: Any
    receipt: Any
    num_hit: int
    num_ragged: int


class SglangTree(Contestant):
    """Match, lock, evict what is short, insert, move the lock; unlock at the end. Page size = block size."""

    def __init__(self, scenario: Scenario) -> None:
        self._page_size = scenario.block_size
        self._slots = SlotCounter(scenario.num_blocks * scenario.block_size)
        self._tree = self._make_tree()
        # What a request's row of slots would say; the trees do not look at the numbers.
        self._row = torch.arange(scenario.num_tokens, dtype=torch.int64)

    def _make_tree(self) -> Any:
        return RadixCache(self._params())

    def _params(self, backend: str | None = None) -> CacheInitParams:
        return CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self._slots,
            page_size=self._page_size,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=backend,
        )

    def prepare(self, tokens: bytes) -> array[int]:
        """The int64 array that SGLang's keys hold."""
        return array("q", array("i", tokens))

    def begin(self, prompt: array[int]) -> _Live:
        """See `Contestant.begin`."""
        tree, slots = self._tree, self._slots
        num_tokens = len(prompt)
        match = tree.match_prefix(MatchPrefixParams(key=RadixKey(prompt, limit=num_tokens - 1)))
        receipt = tree.inc_lock_ref(match.last_device_node)
        num_hit = match.device_prefix_len
        missing = num_tokens - num_hit - slots.num_free
        if missing > 0:
            tree.evict(EvictParams(num_tokens=missing))
        slots.num_free -= num_tokens - num_hit
        num_whole = num_tokens // self._page_size * self._page_size
        result = tree.insert(
            InsertParams(
                key=RadixKey(prompt),
                value=self._row[:num_whole].clone(),
                prev_prefix_len=num_hit,
                inserted_len=num_hit,
            )
        )
        moved = tree.inc_lock_ref(result.last_device_node)
        self._unlock(match.last_device_node, receipt)
        return _Live(result.last_device_node, moved, num_hit, num_tokens - num_whole)

    def _unlock(self, node: Any, receipt: Any) -> None:
        self._tree.dec_lock_ref(node)

    def end(self, request: _Live) -> None:
        """See `Contestant.end`."""
        self._unlock(request.node, request.receipt)
        self._slots.num_free += request.num_ragged

    def hit_tokens(self, request: _Live) -> int:
        """See `Contestant.hit_tokens`."""
        return request.num_hit


class SglangUnifiedTree(SglangTree):
    """The tree that engines use by default, with one of its two cores."""

    backend = "python"

    def _make_tree(self) -> Any:
        return UnifiedRadixCache(self._params(self.backend))

    def _unlock(self, node: Any, receipt: Any) -> None:
        self._tree.dec_lock_ref(node, receipt.to_dec_params())


class SglangRustTree(SglangUnifiedTree):
    """The core that SGLang takes unless told otherwise."""

    backend = "rust"


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(
        f"SGLang {version('sglang')}",
        {
            "SGLang RadixCache": SglangTree,
            "SGLang unified, Python": SglangUnifiedTree,
            "SGLang unified, Rust": SglangRustTree,
        },
    )
