"""The obvious model: what each page of memory holds, and so what a right manager may and must find.

KV of a token depends on everything before it, so what a page holds is a whole prefix: identity, media and all tokens
up to the page's last one. The model learns block ids from the manager, writes pages when tokens are computed, and
knows nothing of trees, digests or queues. Which block is evicted is the manager's choice; the model sees it by the id
that is handed out again. From then on that content is gone, and until then it has to be found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from anaphora.conformance.adapter import Prompt
    from anaphora.conformance.profile import Profile


class Violation(Exception):  # noqa: N818 - it is a finding, reported, not an error of the kit
    """A manager did what no manager of its profile may do. `rule` names what was broken."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule
        self.text = text


class Prefix(NamedTuple):
    """Everything that the KV of its last token depends on."""

    identity: Hashable
    media: tuple[tuple[int, int, str], ...]
    tokens: tuple[int, ...]


@dataclass(eq=False)
class LiveRequest:
    """A request that has begun and not ended."""

    prompt: Prompt
    tokens: tuple[int, ...]
    table: tuple[int, ...] = ()
    num_computed: int = 0
    num_slots: int = 0
    """Leading tokens that it asked blocks for."""
    publishes: bool = True
    """Whether what it computes can be found: not after the weights have changed under it."""
    must_be_found: bool = True
    """Whether it must be, too: not where it builds on a block that has been evicted on purpose."""


@dataclass
class Model:
    """Pages, and who holds them. Every method named in the past tense takes what the manager has just done and raises
    Violation if it must not."""

    profile: Profile
    num_blocks: int
    block_size: int
    pages: dict[int, Prefix] = field(default_factory=dict)
    """What each page holds."""
    known: dict[Prefix, dict[int, bool]] = field(default_factory=dict)
    """Full blocks that may be found, the pages that hold each, and whether such a page must be found."""
    requests: dict[str, LiveRequest] = field(default_factory=dict)
    was_evicted_on_purpose: bool = False
    digests_are_forged: bool = False

    # -- questions -------------------------------------------------------------------------------------------------

    def prefix(self, prompt: Prompt, tokens: Sequence[int], end: int) -> Prefix:
        """Return what a page whose last token is `end - 1` holds for a request."""
        space = prompt.namespace
        lora = space.adapter
        weights: Hashable = lora and lora.digest
        if lora and self.profile.adapter_identity == "name_and_path":
            weights = (lora.name, lora.path)
        media = tuple((m.offset, min(m.length, end - m.offset), m.digest) for m in prompt.media if m.offset < end)
        return Prefix((space.model, space.salt, space.generation, weights), media, tuple(tokens[:end]))

    def held(self) -> set[int]:
        """Return the blocks in the tables of running requests."""
        return {block for request in self.requests.values() for block in request.table}

    def findable(self, prompt: Prompt, tokens: Sequence[int]) -> tuple[int, int]:
        """Return how many cached tokens a lookup must at least, and may at most, find."""
        if not prompt.reads_cache:
            return 0, 0
        size, by_token = self.block_size, self.profile.granularity == "token"
        cap = self.cap(tokens)
        least = most = 0
        for end in range(size, len(tokens) + 1, size):
            copies = self.known.get(self.prefix(prompt, tokens, end))
            if not copies or (end > cap and not by_token):
                break
            if least == most and any(copies.values()):
                least = end
            most = end
        if by_token:
            most = min(cap, most + self._begun(prompt, tokens, most))
            least = min(least, cap // size * size)
        return least, most

    def cap(self, tokens: Sequence[int]) -> int:
        """Return how long a hit may be at most, whatever is cached."""
        return len(tokens) - (self.profile.last_token == "recomputed")

    def _begun(self, prompt: Prompt, tokens: Sequence[int], start: int) -> int:
        """Return how many tokens of the block from `start` on some page holds the beginning of."""
        longest = 0
        for page in self.pages.values():
            if start < len(page.tokens) <= start + self.block_size:
                pairs = zip(page.tokens, tokens, strict=False)
                num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                if self._holds(page, self.prefix(prompt, tokens, num_common)):
                    longest = max(longest, num_common - start)
        return longest

    def _holds(self, page: Prefix | None, prefix: Prefix) -> bool:
        if page is None or page.identity != prefix.identity:
            return False
        end = len(prefix.tokens)
        media = tuple((offset, min(length, end - offset), name) for offset, length, name in page.media if offset < end)
        return page.tokens[:end] == prefix.tokens and media == prefix.media

    # -- what happened ---------------------------------------------------------------------------------------------

    def began(
        self,
        name: str,
        request: LiveRequest,
        num_tokens: int | None,
        num_cached: int | None,
        table: tuple[int, ...],
        copies: Iterable[tuple[int, int]],
    ) -> None:
        """A request was admitted with a hit and a table, or refused (`num_cached` is None)."""
        tokens = request.tokens
        least, most = self.findable(request.prompt, tokens)
        if num_cached is None:
            if all(self._fits(request, hit, num_tokens) for hit in (least, most)):
                raise Violation("refused", f"{name} was refused though its blocks fit")
            return
        self.looked_up(request.prompt, tokens, num_cached)
        request.num_computed = num_cached
        num_left = len(tokens) - num_cached
        request.num_slots = num_cached + (num_left if num_tokens is None else min(num_tokens, num_left))
        num_hit_blocks = num_cached // self.block_size
        self._took(name, request, table[:num_hit_blocks], table[num_hit_blocks:], copies)
        self.requests[name] = request
        self._promise(request)
        self.verify()

    def looked_up(self, prompt: Prompt, tokens: Sequence[int], num_cached: int) -> None:
        """A lookup found so many cached tokens."""
        least, most = self.findable(prompt, tokens)
        if num_cached and not prompt.reads_cache:
            raise Violation("reads not wanted", f"{num_cached} tokens found for a request that must not read the cache")
        if num_cached > self.cap(tokens):
            raise Violation("whole prompt", f"{num_cached} of {len(tokens)} tokens found: nothing is left to compute")
        if num_cached % self.block_size and self.profile.granularity == "block":
            raise Violation("granularity", f"{num_cached} tokens found: no whole number of blocks of {self.block_size}")
        if num_cached > most:
            raise Violation(*self._too_much(prompt, tokens, num_cached, most))
        if num_cached < least:
            raise Violation("lost", f"{num_cached} tokens found; {least} are cached and nothing has replaced them")

    def _too_much(self, prompt: Prompt, tokens: Sequence[int], num_cached: int, most: int) -> tuple[str, str]:
        """Say why a hit is too long."""
        size = self.block_size
        wanted = self.prefix(prompt, tokens, most // size * size + size)
        found = f"{num_cached} tokens found, at most {most} can be: "
        if self.digests_are_forged:
            return "trusted digest", found + "the rest has a forged digest and other tokens"
        if any(other.tokens == wanted.tokens and other != wanted for other in self.known):
            return "identity", found + "the rest is cached under another namespace or with other media"
        if any(self._is_promised(request, wanted) for request in self.requests.values()):
            return "not computed", found + "the rest is allocated and not computed yet"
        if self.known.get(self.prefix(prompt, tokens, num_cached)):
            return "past a gap", found + "the block after it is not cached, though a later one is"
        return "unknown", found + "the rest was never computed under this identity, or is gone"

    def _is_promised(self, request: LiveRequest, wanted: Prefix) -> bool:
        end = len(wanted.tokens)
        return end > request.num_computed and self.prefix(request.prompt, request.tokens, end) == wanted

    def allocated(
        self, name: str, num_slots: int, ok: bool, table: tuple[int, ...], copies: Iterable[tuple[int, int]]
    ) -> None:
        """A running request asked for blocks up to its token `num_slots`, and got them or not."""
        request = self.requests[name]
        num_held = len(request.table)
        if not ok:
            if -(-num_slots // self.block_size) - num_held <= self.num_blocks - len(self.held()):
                raise Violation("refused", f"{name} was refused more blocks though there are enough")
            return
        request.num_slots = max(request.num_slots, num_slots)
        self._took(name, request, table[:num_held], table[num_held:], copies)
        self._promise(request)
        self.verify()

    def computed(self, name: str, num_tokens: int) -> None:
        """The KV of a request's next tokens was written through its table."""
        request = self.requests[name]
        end = request.num_computed + num_tokens
        self._write(request, end)
        if self.profile.shareable == "at_commit":
            self._publish(request, end // self.block_size, request.must_be_found)
        request.num_computed = end
        self.verify()

    def tables(self, tables: dict[str, tuple[int, ...]]) -> None:
        """These are the tables of all running requests now."""
        for name, table in tables.items():
            request = self.requests[name]
            if table == request.table:
                continue
            if self.profile.block_ids == "append_only" or len(table) != len(request.table):
                raise Violation("live table", f"{name}'s table was {list(request.table)}, now it is {list(table)}")
            request.table = table
        self.verify()

    def ended(self, name: str, *, comes_back: bool = False) -> LiveRequest:
        """A request let go of its blocks, for good or until it resumes."""
        request = self.requests.pop(name)
        num_full = request.num_computed // self.block_size
        if self.profile.shareable == "at_finish":
            self._publish(request, num_full, request.must_be_found and not comes_back)
        for block in request.table[num_full:]:
            self._blank(block)  # a tail that is no full block, or what was promised and never written
        request.table, request.num_computed, request.num_slots = (), 0, 0
        self.verify()
        return request

    def evicted(self, block: int) -> None:
        """The content of a block was made unfindable on purpose; what extends it may go with it."""
        self.was_evicted_on_purpose = True
        prefix = self.pages.get(block)
        if prefix is None:
            return
        copies = self.known.get(prefix, {})
        copies.pop(block, None)
        for other, pages in self.known.items():
            is_copy = other == prefix and self.profile.duplicates != "kept"
            if is_copy or (other != prefix and self._holds(other, prefix)):
                pages.update(dict.fromkeys(pages, False))
        for request in self.requests.values():
            if block in request.table or self._holds(self.prefix(request.prompt, request.tokens, 10**9), prefix):
                request.must_be_found = False

    def forgot(self, *, weights_changed: bool = False) -> None:
        """Everything cached was forgotten."""
        self.known.clear()
        for request in self.requests.values():
            request.must_be_found = False
            request.publishes = request.publishes and not weights_changed

    # -- what always holds -----------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Raise Violation unless every running request reads its own prefix through its table."""
        size = self.block_size
        for name, request in self.requests.items():
            for position in range(-(-request.num_computed // size)):
                end = min(request.num_computed, (position + 1) * size)
                block = request.table[position]
                page = self.pages.get(block)
                if page is None:
                    raise Violation("not computed", f"{name} reads block {block}, which nobody has written")
                if not self._holds(page, self.prefix(request.prompt, request.tokens, end)):
                    text = (
                        f"{name} reads tokens up to {end} in block {block}, which holds the KV of {list(page.tokens)}"
                    )
                    raise Violation("content", text)

    def count(self, num_free: int) -> None:
        """`num_free` blocks can be handed out, says the manager."""
        expected = self.num_blocks - len(self.held())
        if num_free != expected:
            what = "are lost" if num_free < expected else "are held and free at once"
            text = f"{num_free} free blocks, {expected} expected: {abs(num_free - expected)} {what}"
            raise Violation("free count", text)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _fits(self, request: LiveRequest, num_cached: int, num_tokens: int | None) -> bool:
        num_left = len(request.tokens) - num_cached
        end = num_cached + (num_left if num_tokens is None else min(num_tokens, num_left))
        num_new = -(-end // self.block_size) - num_cached // self.block_size
        held = self.held()
        for stop in range(self.block_size, num_cached + 1, self.block_size):
            if not self.known.get(self.prefix(request.prompt, request.tokens, stop), {}).keys() <= held:
                num_new += 1  # a hit that nobody holds is no longer free
        return num_new <= self.num_blocks - len(held)

    def _took(
        self,
        name: str,
        request: LiveRequest,
        kept: tuple[int, ...],
        new: tuple[int, ...],
        copies: Iterable[tuple[int, int]],
    ) -> None:
        """A table now has these blocks: hits or those held before, and newly taken ones."""
        table = kept + new
        if len(set(table)) != len(table):
            raise Violation("table", f"{name}'s table has a block twice: {list(table)}")
        if len(table) * self.block_size < request.num_slots:
            raise Violation("table", f"{name} has {len(table)} blocks for {request.num_slots} tokens")
        if request.table != kept[: len(request.table)]:
            raise Violation("live table", f"{name}'s table was {list(request.table)}, now it is {list(table)}")
        held = self.held() | set(kept)
        if taken := held & set(new):
            raise Violation("pinned", f"{name} was given blocks that are held: {sorted(taken)}")
        copied = {target: self.pages[source] for source, target in copies if source in self.pages}
        self._evict_for(new, held)
        self.pages.update(copied)
        request.table = table

    def _evict_for(self, new: tuple[int, ...], held: set[int]) -> None:
        """Blocks were handed out; what they held is gone."""
        idle = {prefix: pages.keys() - held for prefix, pages in self.known.items() if not pages.keys() & held}
        if self.profile.duplicates == "kept":
            num_cached = len({page for pages in self.known.values() for page in pages} - held)
        else:
            num_cached = len(idle)
        num_blank = self.num_blocks - len(held) - num_cached
        num_needed = max(0, len(new) - num_blank)
        if num_needed and self.profile.eviction == "may_take_more":
            for prefix in idle:
                self.known[prefix] = dict.fromkeys(self.known[prefix], False)
        must_stay = {prefix for prefix, pages in self.known.items() if any(pages.values())}
        num_lost_pages = len({page for pages in self.known.values() for page in pages} & set(new))
        for block in new:
            self._blank(block)
        lost = must_stay - {prefix for prefix, pages in self.known.items() if pages}
        num_lost = num_lost_pages if self.profile.duplicates == "kept" else len(lost)
        if num_lost > num_needed and not self.was_evicted_on_purpose:
            raise Violation(
                "evicted early", f"{num_lost} cached blocks went, {num_needed} had to: {num_blank} were blank"
            )
        for prefix in lost:
            for other in self.known:
                if other in must_stay and self._holds(other, prefix) and not self.was_evicted_on_purpose:
                    text = f"the block of {list(prefix.tokens)} went before that of {list(other.tokens)}"
                    raise Violation("head first", text)

    def _blank(self, block: int) -> None:
        prefix = self.pages.pop(block, None)
        pages = self.known.get(prefix) if prefix is not None else None
        if prefix is not None and pages is not None:
            pages.pop(block, None)
            if not pages:
                del self.known[prefix]

    def _promise(self, request: LiveRequest) -> None:
        """Where blocks are shared from allocation on, the engine will have written them before anyone reads."""
        if self.profile.shareable == "at_allocation":
            end = min(request.num_slots, len(request.tokens))
            self._write(request, end)
            self._publish(request, end // self.block_size, request.must_be_found)

    def _write(self, request: LiveRequest, end: int) -> None:
        size = self.block_size
        for position in range(request.num_computed // size, -(-end // size)):
            stop = min(end, (position + 1) * size)
            self.pages[request.table[position]] = self.prefix(request.prompt, request.tokens, stop)

    def _publish(self, request: LiveRequest, num_blocks: int, must_be_found: bool) -> None:
        if not request.publishes:
            return
        for position in range(num_blocks):
            block = request.table[position]
            prefix = self.prefix(request.prompt, request.tokens, (position + 1) * self.block_size)
            if self.pages.get(block) == prefix:
                self.known.setdefault(prefix, {}).setdefault(block, must_be_found)
