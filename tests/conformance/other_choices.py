"""Right managers that chose otherwise than the toy, each in one thing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from anaphora.conformance import Prompt
from tests.conformance.toy_manager import Key, Request, ToyManager

CHOICES: dict[type[ToyManager], dict[str, str]] = {}
"""Each manager, and in which fields of its profile it differs from the toy."""


def chooses(**fields: str):
    def register(manager: type[ToyManager]) -> type[ToyManager]:
        CHOICES[manager] = fields
        return manager

    return register


@chooses(shareable="at_finish")
class FindsBlocksOnceFinished(ToyManager):
    def computed(self, request: str, num_tokens: int) -> None:
        self.requests[request].num_computed += num_tokens

    def release(self, request: Request) -> None:
        if request.generation == self.generation:
            self.publish(request, request.num_computed)
        super().release(request)


@chooses(shareable="at_allocation")
class FindsBlocksOnceAllocated(ToyManager):
    """Breaks one rule, as all do that choose so and forget nothing when a request is given up: see the tests."""

    def reserved(self, request: Request) -> None:
        if request.generation == self.generation:
            self.publish(request, min(request.num_slots, len(request.tokens)))


@chooses(shareable="at_allocation")
class TakesPromisesBack(FindsBlocksOnceAllocated):
    def release(self, request: Request) -> None:
        for block in request.table[request.num_computed // self.size :]:
            self.forget(block)
        super().release(request)


@chooses(block_ids="rewritten", duplicates="swapped")
class SwapsCopies(ToyManager):
    """Gives a copy up at once and points its holder to the first one."""

    def publish(self, request: Request, num_tokens: int) -> None:
        super().publish(request, num_tokens)
        for position in range(num_tokens // self.size):
            own, first = request.table[position], self.block_of(self.key(request, position))
            if first is not None and first != own:
                self.forget(own)
                self.num_holders[own] = 0
                self.free.insert(0, own)
                self.pin([first])
                request.table[position] = first


@chooses(duplicates="dropped")
class DropsCopies(ToyManager):
    """Of copies that nobody holds only the last one stays."""

    def queue(self, block: int) -> None:
        key = self.content.get(block)
        for other in list(self.known[self.digest(key)]) if key is not None else ():
            if other != block and not self.num_holders[other] and self.content[other] == key:
                self.forget(other)
                self.free.remove(other)
                self.free.insert(0, other)
        super().queue(block)


@chooses(granularity="token")
class SharesPartOfABlock(ToyManager):
    """A request that begins as an ended one's last block gets a copy of it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.tails: dict[int, tuple[Key, int]] = {}
        self.copies: list[tuple[int, int]] = []

    def release(self, request: Request) -> None:
        num_tokens = request.num_computed
        if num_tokens % self.size and request.generation == self.generation:
            self.tails[request.table[num_tokens // self.size]] = (self.beginning(request, num_tokens), num_tokens)
        super().release(request)

    def beginning(self, request: Request, end: int) -> Key:
        return self.identity(request.prompt), self.media(request.prompt, end), request.tokens[:end]

    def num_in_tail(self, request: Request, num_cached: int) -> tuple[int, int]:
        """The longest useful tail after a hit: its block and its end."""
        ends = [
            (end, block)
            for block, (content, end) in self.tails.items()
            if num_cached < end < min(num_cached + self.size, len(request.tokens))
            and content == self.beginning(request, end)
        ]
        end, block = max(ends, default=(num_cached, -1))
        return block, end

    def take(self, num_blocks: int) -> list[int]:
        blocks = super().take(num_blocks)
        for block in blocks:
            self.tails.pop(block, None)
        return blocks

    def admit(self, request: Request, num_tokens: int | None) -> int | None:
        hit = self.find(request)
        tail, end = self.num_in_tail(request, len(hit) * self.size) if request.prompt.reads_cache else (-1, 0)
        num_cached = super().admit(request, num_tokens)
        if (
            num_cached is None
            or end <= num_cached
            or len(request.table) == len(hit)
            or tail in request.table[len(hit) + 1 :]
        ):
            return num_cached
        num_left = len(request.tokens) - end
        num_slots = end + (num_left if num_tokens is None else min(num_tokens, num_left))
        num_missing = -(-num_slots // self.size) - len(request.table)
        if num_missing > len(self.free):
            return num_cached
        self.copies.append((tail, request.table[len(hit)]))
        request.table += self.take(max(0, num_missing))
        request.num_computed, request.num_slots = end, num_slots
        return end

    def take_copies(self) -> Sequence[tuple[int, int]]:
        copies, self.copies = self.copies, []
        return copies

    def forget_all(self) -> None:
        super().forget_all()
        self.tails.clear()


@chooses(last_token="cached")
class ServesWholePrompts(ToyManager):
    def longest(self, request: Request) -> int:
        return len(request.tokens)


@chooses(eviction="may_take_more", order="other")
class EvictsWholeNamespaces(ToyManager):
    def take(self, num_blocks: int) -> list[int]:
        gone = [self.content[block][:-1] for block in self.free[:num_blocks] if block in self.content]
        for block, key in list(self.content.items()):
            if not self.num_holders[block] and key[:-1] in gone:
                self.forget(block)
        return super().take(num_blocks)


@chooses(lookups="refresh")
class LookupsCountAsUses(ToyManager):
    def match(self, prompt: Prompt) -> int:
        hit = self.find(Request(prompt, prompt.token_ids, generation=self.generation))
        for block in hit[::-1]:
            if not self.num_holders[block]:
                self.free.remove(block)
                self.free.append(block)
        return len(hit) * self.size


@chooses(digests="trusted")
class TrustsDigests(ToyManager):
    def block_of(self, key: Key) -> int | None:
        return next(iter(self.known.get(self.digest(key), ())), None)


@chooses(adapter_identity="name_and_path")
class TellsAdaptersByPath(ToyManager):
    def identity(self, prompt: Prompt) -> Hashable:
        lora = prompt.namespace.adapter
        return prompt.namespace.salt, lora and (lora.name, lora.path)


@chooses(counting="at_lookup")
class CountsRefusedRequests(ToyManager):
    def begin(self, request: str, prompt: Prompt, num_tokens: int | None) -> int | None:
        num_cached = super().begin(request, prompt, num_tokens)
        if num_cached is None:
            self.count(len(prompt.token_ids), 0)
        return num_cached


@chooses(unread="left_out")
class LeavesUnreadRequestsOut(ToyManager):
    def begin(self, request: str, prompt: Prompt, num_tokens: int | None) -> int | None:
        before = self.queries, self.hits
        num_cached = super().begin(request, prompt, num_tokens)
        if not prompt.reads_cache:
            self.queries, self.hits = before
        return num_cached
