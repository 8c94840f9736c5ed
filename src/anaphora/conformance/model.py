"""The obvious model of a block manager: requests, their tables, and pages with what they hold.

It learns from the manager which blocks it gives to whom, and judges whether that may be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anaphora.conformance.pages import Pages, Prefix
from anaphora.conformance.violation import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anaphora.conformance.adapter import Prompt
    from anaphora.conformance.profile import Profile


@dataclass(eq=False)
class LiveRequest:
    """A request that has begun and not ended. `wanted` is its prompt and what was generated since."""

    prompt: Prompt
    wanted: Prefix
    table: tuple[int, ...] = ()
    num_computed: int = 0
    num_slots: int = 0
    """Leading tokens that it last asked blocks for."""
    publishes: bool = True
    """Whether what it computes can be found: not after the weights have changed under it."""
    must_be_found: bool = True
    """Whether it must be, too: not where it builds on a block that was evicted on purpose."""

    @property
    def num_tokens(self) -> int:
        """How many tokens are known."""
        return len(self.wanted.tokens)


class Model:
    """Every method named in the past tense takes what the manager has just done and raises Violation if it must not."""

    def __init__(self, profile: Profile, num_blocks: int, block_size: int) -> None:
        self.profile = profile
        self.pages = Pages(profile, num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.requests: dict[str, LiveRequest] = {}
        """Those that hold blocks."""
        self.digests_are_forged = False
        self._given_up: set[Prefix] = set()
        """Full blocks that were allocated and never computed."""

    def request(self, prompt: Prompt) -> LiveRequest:
        """Return a request for a prompt."""
        return LiveRequest(prompt, self.pages.prefix(prompt, prompt.token_ids))

    def held(self) -> set[int]:
        """Return the blocks in the tables of running requests."""
        return {block for request in self.requests.values() for block in request.table}

    def findable(self, request: LiveRequest) -> tuple[int, int]:
        """Return how many cached tokens a lookup must at least, and may at most, find."""
        return self.pages.findable(request.wanted) if request.prompt.reads_cache else (0, 0)

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
        if num_cached is None:
            if all(self._fits(request, hit, num_tokens) for hit in self.findable(request)):
                raise Violation("refused", f"{name} was refused though its blocks fit")
            return
        self.looked_up(request, num_cached)
        request.num_computed = num_cached
        request.num_slots = self._end(request, num_cached, num_tokens)
        self._took(name, request, table, num_cached // self.block_size, copies)
        self.requests[name] = request
        self._promise(request)
        self.verify()

    def looked_up(self, request: LiveRequest, num_cached: int) -> None:
        """A lookup found so many cached tokens."""
        least, most = self.findable(request)
        if num_cached and not request.prompt.reads_cache:
            raise Violation("reads not wanted", f"{num_cached} tokens found for a request that must not read the cache")
        if num_cached > self.pages.longest_hit(request.num_tokens):
            raise Violation(
                "whole prompt", f"{num_cached} of {request.num_tokens} tokens found: none is left to compute"
            )
        if num_cached % self.block_size and self.profile.granularity == "block":
            raise Violation("granularity", f"{num_cached} tokens found: no whole number of blocks of {self.block_size}")
        if num_cached > most:
            rule, why = self._why_too_much(request, num_cached, most)
            raise Violation(rule, f"{num_cached} tokens found, at most {most} can be: the rest {why}")
        if num_cached < least:
            raise Violation("lost", f"{num_cached} tokens found; {least} are cached and nothing has replaced them")

    def allocated(
        self, name: str, num_tokens: int, ok: bool, table: tuple[int, ...], copies: Iterable[tuple[int, int]]
    ) -> None:
        """A running request asked for blocks for `num_tokens` tokens after those computed, and got them or not."""
        request = self.requests[name]
        num_slots, num_held = request.num_computed + num_tokens, len(request.table)
        if not ok:
            if -(-num_slots // self.block_size) - num_held <= self.num_blocks - len(self.held()):
                raise Violation("refused", f"{name} was refused more blocks though there are enough")
            return
        request.num_slots = num_slots
        self._took(name, request, table, num_held, copies)
        self._promise(request)
        self.verify()

    def computed(self, name: str, num_tokens: int) -> None:
        """The KV of a request's next tokens was written through its table."""
        request = self.requests[name]
        end = request.num_computed + num_tokens
        self.pages.write(request.wanted, request.table, request.num_computed, end)
        if self.profile.shareable != "at_finish":
            # What was promised can be found already; known tokens in slots of drafts are named now or a step later.
            self._publish(request, end, is_sure=self.profile.shareable == "at_commit")
        request.num_computed = end
        self.verify()

    def num_computable(self, name: str) -> int:
        """Return how many more tokens can be computed now: known ones, with blocks. Where blocks can be found once they
        are allocated, those alone that were asked for last: no others were promised."""
        request = self.requests[name]
        num_slots = len(request.table) * self.block_size
        if self.profile.shareable == "at_allocation":
            num_slots = request.num_slots
        return min(request.num_tokens, num_slots) - request.num_computed

    def appended(self, request: LiveRequest, token_ids: tuple[int, ...]) -> None:
        """A request got more tokens."""
        request.wanted = request.wanted._replace(tokens=request.wanted.tokens + token_ids)

    def has_tables(self, tables: dict[str, tuple[int, ...]]) -> None:
        """These are the tables of all running requests now."""
        for name, table in tables.items():
            request = self.requests[name]
            if table == request.table:
                continue
            if self.profile.block_ids == "append_only" or len(table) != len(request.table):
                raise Violation("live table", f"{name}'s table was {list(request.table)}, now it is {list(table)}")
            request.table = table
        self.verify()

    def has_free(self, num_free: int) -> None:
        """So many blocks can be handed out, says the manager."""
        expected = self.num_blocks - len(self.held())
        if num_free != expected:
            what = "are lost" if num_free < expected else "are held and free at once"
            text = f"{num_free} free blocks where {expected} are right: {abs(num_free - expected)} {what}"
            raise Violation("free count", text)

    def ended(self, name: str, *, comes_back: bool = False) -> LiveRequest:
        """A request let go of its blocks, for good or until it resumes."""
        request = self.requests.pop(name)
        num_full = request.num_computed // self.block_size
        if self.profile.shareable == "at_finish":
            self._publish(request, request.num_computed, is_sure=not comes_back)
        num_written = num_full + (self.profile.granularity == "token" and request.num_computed % self.block_size > 0)
        for position, block in enumerate(request.table[num_written:], num_written):
            self.pages.blank(block)  # a tail that is of no use, or what was promised and never written
            self._given_up.add(request.wanted.cut((position + 1) * self.block_size))
        request.table, request.num_computed, request.num_slots = (), 0, 0
        request.publishes = request.must_be_found = True  # it will start anew
        self.verify()
        return request

    def evicted(self, block: int) -> None:
        """The content of a block was made unfindable on purpose."""
        evicted = self.pages.evict(block)
        for request in self.requests.values():
            if evicted is not None and request.wanted.extends(evicted):
                request.must_be_found = False

    def forgot(self, *, weights_changed: bool = False) -> None:
        """Everything cached was forgotten."""
        self.pages.known.clear()
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
                page = self.pages.holds.get(block)
                if page is None:
                    raise Violation("not computed", f"{name} reads block {block}, which nobody has written")
                if not page.extends(request.wanted.cut(end)):
                    text = (
                        f"{name} reads tokens up to {end} in block {block}, which holds the KV of {list(page.tokens)}"
                    )
                    raise Violation("content", text)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _why_too_much(self, request: LiveRequest, num_cached: int, most: int) -> tuple[str, str]:
        size, known = self.block_size, self.pages.known
        block = request.wanted.cut(most // size * size + size)
        if self.digests_are_forged:
            return "trusted digest", "has a forged digest and other tokens"
        if any(other.tokens == block.tokens and other != block for other in known):
            return "identity", "is cached under another namespace or with other media"
        if any(other.wanted.extends(block) for other in self.requests.values()) or block in self._given_up:
            return "not computed", "was allocated and not computed"
        if known.get(request.wanted.cut(num_cached)):
            return "past a gap", "comes after a block that is not cached"
        return "unknown", "was never computed, or is gone"

    @staticmethod
    def _end(request: LiveRequest, num_cached: int, num_tokens: int | None) -> int:
        num_left = request.num_tokens - num_cached
        return num_cached + (num_left if num_tokens is None else min(num_tokens, num_left))

    def _fits(self, request: LiveRequest, num_cached: int, num_tokens: int | None) -> bool:
        held = self.held()
        size = self.block_size
        num_new = -(-self._end(request, num_cached, num_tokens) // size) - num_cached // size
        for end in range(size, num_cached + 1, size):
            if not self.pages.known.get(request.wanted.cut(end), {}).keys() <= held:
                num_new += 1  # a hit that nobody holds is no longer free
        return num_new <= self.num_blocks - len(held)

    def _took(
        self, name: str, request: LiveRequest, table: tuple[int, ...], num_kept: int, copies: Iterable[tuple[int, int]]
    ) -> None:
        """A request has a table now; all but its first blocks were taken for it, those were hits or its own before."""
        kept, new = table[:num_kept], table[num_kept:]
        if len(set(table)) != len(table):
            raise Violation("table", f"{name}'s table has a block twice: {list(table)}")
        if len(table) * self.block_size < request.num_slots:
            raise Violation("table", f"{name} has {len(table)} blocks for {request.num_slots} tokens")
        if request.table != kept[: len(request.table)]:
            raise Violation("live table", f"{name}'s table was {list(request.table)}, now it is {list(table)}")
        held = self.held() | set(kept)
        if taken := held & set(new):
            raise Violation("pinned", f"{name} was given blocks that are held: {sorted(taken)}")
        copied = {target: self.pages.holds[source] for source, target in copies if source in self.pages.holds}
        self.pages.hand_out(new, held)
        self.pages.holds.update(copied)
        request.table = table

    def _promise(self, request: LiveRequest) -> None:
        """Where blocks can be found from allocation on, the engine will have written them before anyone reads."""
        if self.profile.shareable == "at_allocation":
            end = min(request.num_slots, request.num_tokens)
            self.pages.write(request.wanted, request.table, request.num_computed, end)
            self._publish(request, end)

    def _publish(self, request: LiveRequest, num_tokens: int, *, is_sure: bool = True) -> None:
        if request.publishes:
            num_full = num_tokens // self.block_size
            is_sure = is_sure and request.must_be_found
            self.pages.publish(request.wanted, request.table, num_full, must_be_found=is_sure)
