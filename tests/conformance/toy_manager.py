"""A block manager that is short and right, made of small steps so that each can be broken on its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from anaphora.conformance import Counters, ManagerAdapter, Profile, Prompt

Key = tuple[Hashable, ...]


@dataclass
class Request:
    """A request, running or preempted."""

    prompt: Prompt
    tokens: tuple[int, ...]
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_slots: int = 0
    generation: int = 0
    is_running: bool = False


class ToyManager(ManagerAdapter):
    """Blocks found by digests that are verified, copies kept, least recently released first, tails before heads."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))  # the next one to hand out is the first
        self.num_holders: Counter[int] = Counter()
        self.content: dict[int, Key] = {}  # of each block that can be found
        self.known: dict[Hashable, list[int]] = {}  # blocks by the digest of their content, oldest first
        self.requests: dict[str, Request] = {}
        self.generation = 0
        self.is_forged = False
        self.queries = self.hits = 0

    # -- what makes blocks equal -----------------------------------------------------------------------------------

    def identity(self, prompt: Prompt) -> Hashable:
        """What keeps equal tokens apart."""
        lora = prompt.namespace.adapter
        return prompt.namespace.salt, lora and lora.digest

    def media(self, prompt: Prompt, end: int) -> Hashable:
        """The media before a token."""
        return tuple((m.digest, m.offset, min(m.length, end - m.offset)) for m in prompt.media if m.offset < end)

    def key(self, request: Request, position: int) -> Key:
        """The content of a request's block."""
        end = (position + 1) * self.size
        prompt = request.prompt
        return request.generation, self.identity(prompt), self.media(prompt, end), request.tokens[:end]

    def digest(self, key: Key) -> Hashable:
        """The name of a content."""
        return 0 if self.is_forged else key

    # -- finding ---------------------------------------------------------------------------------------------------

    def block_of(self, key: Key) -> int | None:
        """The oldest block with this content."""
        return next((block for block in self.known.get(self.digest(key), ()) if self.content[block] == key), None)

    def longest(self, request: Request) -> int:
        """How many tokens a hit may cover."""
        return len(request.tokens) - 1

    def find(self, request: Request) -> list[int]:
        """The blocks of the longest known prefix."""
        hit: list[int] = []
        if request.prompt.reads_cache:
            while (len(hit) + 1) * self.size <= self.longest(request):
                block = self.block_of(self.key(request, len(hit)))
                if block is None:
                    break
                hit.append(block)
        return hit

    # -- blocks ----------------------------------------------------------------------------------------------------

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make a request's first full blocks findable."""
        for position in range(num_tokens // self.size):
            block = request.table[position]
            if block not in self.content:
                key = self.key(request, position)
                self.content[block] = key
                self.known.setdefault(self.digest(key), []).append(block)

    def forget(self, block: int) -> None:
        """Make a block's content unfindable."""
        key = self.content.pop(block, None)
        if key is not None:
            self.known[self.digest(key)].remove(block)

    def pin(self, blocks: Iterable[int]) -> None:
        """Count one more holder."""
        for block in blocks:
            if not self.num_holders[block]:
                self.free.remove(block)
            self.num_holders[block] += 1

    def take(self, num_blocks: int) -> list[int]:
        """Hand out blocks, evicting what they hold."""
        blocks, self.free = self.free[:num_blocks], self.free[num_blocks:]
        for block in blocks:
            self.forget(block)
            self.num_holders[block] = 1
        return blocks

    def order_of_release(self, table: list[int]) -> list[int]:
        """Blocks of a table, the first to be evicted first."""
        return table[::-1]

    def release(self, request: Request) -> None:
        """Count one holder less for each block of a request."""
        for block in self.order_of_release(request.table):
            self.num_holders[block] -= 1
            if not self.num_holders[block]:
                self.queue(block)
        request.table, request.num_computed, request.is_running = [], 0, False

    def queue(self, block: int) -> None:
        """A block that nobody holds takes its place in the order of eviction: blank ones first."""
        if block in self.content:
            self.free.append(block)
        else:
            self.free.insert(0, block)

    # -- the operations of the kit ---------------------------------------------------------------------------------

    def begin(self, request: str, prompt: Prompt, num_tokens: int | None) -> int | None:
        live = Request(prompt, prompt.token_ids)
        num_cached = self.admit(live, num_tokens)
        if num_cached is not None:
            self.requests[request] = live
            self.count(len(live.tokens), num_cached)
        return num_cached

    def resume(self, request: str, num_tokens: int | None) -> int | None:
        return self.admit(self.requests[request], num_tokens)

    def count(self, num_queries: int, num_hits: int) -> None:
        self.queries += num_queries
        self.hits += num_hits

    def admit(self, request: Request, num_tokens: int | None) -> int | None:
        request.generation = self.generation
        hit = self.find(request)
        num_cached = len(hit) * self.size
        num_left = len(request.tokens) - num_cached
        num_slots = num_cached + (num_left if num_tokens is None else min(num_tokens, num_left))
        num_new = -(-num_slots // self.size) - len(hit)
        num_idle = sum(not self.num_holders[block] for block in hit)
        if num_new > len(self.free) - num_idle:
            return self.refuse(request, hit)
        self.hold(request, hit, num_new)
        request.num_computed, request.num_slots, request.is_running = num_cached, num_slots, True
        self.reserved(request)
        return num_cached

    def refuse(self, request: Request, hit: list[int]) -> None:
        """A request does not fit."""

    def hold(self, request: Request, hit: list[int], num_new: int) -> None:
        """Give a request its hit and new blocks."""
        self.pin(hit)
        request.table = hit + self.take(num_new)

    def reserved(self, request: Request) -> None:
        """A request got blocks."""

    def allocate(self, request: str, num_tokens: int) -> bool:
        live = self.requests[request]
        num_slots = live.num_computed + num_tokens
        num_new = max(0, -(-num_slots // self.size) - len(live.table))
        if num_new > len(self.free):
            self.refuse(live, [])
            return False
        live.table += self.take(num_new)
        live.num_slots = num_slots
        self.reserved(live)
        return True

    def computed(self, request: str, num_tokens: int) -> None:
        live = self.requests[request]
        live.num_computed += num_tokens
        if live.generation == self.generation:
            self.publish(live, live.num_computed)

    def append(self, request: str, token_ids: Sequence[int]) -> None:
        self.requests[request].tokens += tuple(token_ids)

    def block_ids(self, request: str) -> Sequence[int]:
        return self.requests[request].table

    def finish(self, request: str) -> None:
        live = self.requests.pop(request)
        if live.is_running:
            self.release(live)

    def num_free_blocks(self) -> int:
        return len(self.free)

    def match(self, prompt: Prompt) -> int:
        return len(self.find(Request(prompt, prompt.token_ids, generation=self.generation))) * self.size

    def preempt(self, request: str) -> None:
        self.release(self.requests[request])

    def abort(self, request: str) -> None:
        if request in self.requests:
            self.finish(request)

    def evict(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self.forget(block)

    def reset(self) -> bool:
        if any(request.is_running for request in self.requests.values()):
            return False
        self.forget_all()
        return True

    def forget_all(self) -> None:
        self.content.clear()
        self.known.clear()

    def invalidate(self) -> None:
        self.generation += 1
        self.forget_all()

    def counters(self) -> Counters:
        return Counters(self.queries, self.hits)

    def block_names(self, request: str) -> Sequence[bytes]:
        live = self.requests[request]
        return [repr(self.key(live, position)).encode() for position in range(live.num_computed // self.size)]

    def forge_digests(self) -> None:
        self.is_forged = True


TOY = Profile(
    name="toy",
    shareable="at_commit",
    block_ids="append_only",
    duplicates="kept",
    granularity="block",
    last_token="recomputed",
    eviction="exact",
    order="lru",
    lookups="read_only",
    digests="verified",
    adapter_identity="content",
    counting="at_admission",
    unread="counted",
)
