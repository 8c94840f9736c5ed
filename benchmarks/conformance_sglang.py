"""The conformance kit on SGLang's radix tree, the real one of an installed SGLang.

    python benchmarks/conformance_sglang.py --python ENVIRONMENT/bin/python [--profile sglang] [--json]

SGLANG_PYTHON in the environment does as well. Made for SGLang 0.5.23 (class RadixCache); no model and no GPU needed.

SGLang's tree does not hold blocks for requests: its scheduler, request objects and slot allocator do that around it. So
the adapter below does what they do: lock what a lookup found, evict what is short, after each computed chunk insert
what is new, give copies back and point the request's row at the tree's slots.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from anaphora.conformance import ManagerAdapter, Prompt

if TYPE_CHECKING:
    from collections.abc import Sequence


class Pages:
    """In place of SGLang's slot allocator: free pages, in order."""

    device = "cpu"

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.free_pages = list(range(1, num_pages + 1))  # page 0 is for padding

    def free(self, slots: Any) -> None:
        """Take slots back, whole pages."""
        self.free_pages += (slots[:: self.page_size] // self.page_size).tolist()

    def free_segment(self, slots: Any, start_pos: int = 0) -> None:
        """Take back the slots of an edge."""
        self.free(slots)

    def available_size(self) -> int:
        """Return the number of free slots."""
        return len(self.free_pages) * self.page_size


@dataclass(eq=False)
class Row:
    """What SGLang keeps on a request: its slots' pages, and the locked node that owns the first of them."""

    prompt: Prompt
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_protected: int = 0
    node: Any = None


class SglangManager(ManagerAdapter):
    """SGLang's RadixCache and what the engine does around it; a block is a page."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache

        self._size = block_size
        self._pages = Pages(num_blocks, block_size)
        self._tree = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self._pages,
                page_size=block_size,
            )
        )
        self._rows: dict[str, Row] = {}

    def begin(self, request: str, prompt: Prompt, num_tokens: int | None) -> int | None:
        """Make a request and admit it."""
        self._rows[request] = Row(prompt, self._ids(prompt))
        return self.resume(request, num_tokens)

    def resume(self, request: str, num_tokens: int | None) -> int | None:
        """Match up to the last token, lock, and take pages for the rest."""
        row = self._rows[request]
        found = self._lookup(row) if row.prompt.reads_cache else None
        num_cached = found.device_prefix_len if found else 0
        num_left = len(row.tokens) - num_cached
        end = num_cached + (num_left if num_tokens is None else min(num_tokens, num_left))
        row.node = found.last_device_node if found else self._tree.root_node
        self._tree.inc_lock_ref(row.node)
        row.pages = self._pages_of(row.node)
        if not self._take(row, end):
            self._tree.dec_lock_ref(row.node)
            row.pages, row.node = [], None
            return None
        row.num_computed = row.num_protected = num_cached
        return num_cached

    def allocate(self, request: str, num_tokens: int) -> bool:
        """Take pages, evicting what is short."""
        row = self._rows[request]
        return self._take(row, row.num_computed + num_tokens)

    def computed(self, request: str, num_tokens: int) -> None:
        """Insert what is new, give copies back, go on with the tree's slots (the engine's checkpoint)."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams

        row = self._rows[request]
        row.num_computed += num_tokens
        num_whole = row.num_computed // self._size * self._size
        if num_whole <= row.num_protected:
            return
        key = self._key(row, num_whole)
        slots = torch.tensor([page * self._size + i for page in row.pages for i in range(self._size)])[:num_whole]
        known = self._tree.insert(
            InsertParams(
                key=key, value=slots, prev_prefix_len=row.num_protected, inserted_len=row.num_protected, priority=0
            )
        ).prefix_len
        self._pages.free(slots[row.num_protected : known])
        node = self._tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
        self._tree.dec_lock_ref(row.node)
        self._tree.inc_lock_ref(node)
        row.node, row.num_protected = node, num_whole
        row.pages[: num_whole // self._size] = self._pages_of(node)

    def append(self, request: str, token_ids: Sequence[int]) -> None:
        """Add output tokens."""
        self._rows[request].tokens += token_ids

    def block_ids(self, request: str) -> Sequence[int]:
        """Return the pages of the request's row."""
        return list(self._rows[request].pages)

    def finish(self, request: str) -> None:
        """Free what the tree does not own, unlock the rest."""
        self._release(self._rows.pop(request))

    def num_free_blocks(self) -> int:
        """Return free pages and those that can be evicted."""
        return len(self._pages.free_pages) + self._tree.evictable_size() // self._size

    def match(self, prompt: Prompt) -> int:
        """Look up, as a scheduling pass does for a waiting request."""
        row = Row(prompt, self._ids(prompt))
        return int(self._lookup(row).device_prefix_len) if prompt.reads_cache else 0

    def preempt(self, request: str) -> None:
        """Retract: release without inserting what no chunk has inserted yet."""
        self._release(self._rows[request])

    def abort(self, request: str) -> None:
        """The same as the end of a request."""
        if request in self._rows:
            self.finish(request)

    def reset(self) -> bool:
        """Flush the cache, which the engine does when it is idle alone."""
        if any(row.node is not None for row in self._rows.values()):
            return False
        num_pages = self.num_free_blocks()
        self._tree.reset()
        self._pages.free_pages = list(range(1, num_pages + 1))
        return True

    # -- inside ----------------------------------------------------------------------------------------------------

    def _ids(self, prompt: Prompt) -> list[int]:
        """Return the ids with those of an image replaced by one that is made of the image's digest."""
        tokens = list(prompt.token_ids)
        for item in prompt.media:
            pad = (1 << 40) + int.from_bytes(sha256(item.digest.encode()).digest()[:4], "little")
            tokens[item.offset : item.offset + item.length] = [pad] * item.length
        return tokens

    def _key(self, row: Row, num_tokens: int) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        space = row.prompt.namespace
        lora = space.adapter.digest if space.adapter else None  # the engine gives each loaded adapter an id of its own
        return RadixKey(array("q", row.tokens[:num_tokens]), extra_key=lora, cache_salt=space.salt)

    def _lookup(self, row: Row) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        return self._tree.match_prefix(MatchPrefixParams(key=self._key(row, len(row.tokens) - 1)))

    def _pages_of(self, node: Any) -> list[int]:
        slots = self._tree.path_device_indices(node)
        return (slots[:: self._size] // self._size).tolist() if len(slots) else []

    def _take(self, row: Row, end: int) -> bool:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        num_missing = -(-end // self._size) - len(row.pages)
        if num_missing > self.num_free_blocks():
            return False
        short = num_missing - len(self._pages.free_pages)
        if short > 0:
            self._tree.evict(EvictParams(num_tokens=short * self._size))
        if num_missing > 0:
            row.pages += self._pages.free_pages[:num_missing]
            del self._pages.free_pages[:num_missing]
        return True

    def _release(self, row: Row) -> None:
        if row.node is not None:
            self._pages.free_pages += row.pages[row.num_protected // self._size :]
            self._tree.dec_lock_ref(row.node)
        row.pages, row.node, row.num_computed, row.num_protected = [], None, 0, 0


if __name__ == "__main__":
    from conformance_peer import run_peer

    sys.exit(run_peer("sglang", "conformance_sglang:SglangManager", {}))
