"""Pages of KV memory, what each holds, and so what a lookup must and may find.

KV of a token depends on everything before it, so what a page holds is a whole prefix: identity, media and all tokens
up to the page's last one. Nothing here knows of trees, digests or queues. Which block is evicted is the manager's
choice; it shows by the id that is handed out again. From then on that content is gone, and until then it is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from anaphora.conformance.violation import Violation

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from anaphora.conformance.adapter import Prompt
    from anaphora.conformance.profile import Profile


class Prefix(NamedTuple):
    """Everything that the KV of its last token depends on."""

    identity: Hashable
    media: tuple[tuple[int, int, str], ...]
    tokens: tuple[int, ...]

    def cut(self, end: int) -> Prefix:
        """Return its first `end` tokens, with what is left of the media."""
        media = tuple(
            (offset, min(length, end - offset), digest) for offset, length, digest in self.media if offset < end
        )
        return Prefix(self.identity, media, self.tokens[:end])

    def extends(self, other: Prefix) -> bool:
        """Return whether it begins with the other prefix or is the same."""
        return self.tokens[: len(other.tokens)] == other.tokens and self.cut(len(other.tokens)) == other


@dataclass
class Pages:
    """The pages of one pool under one profile's rules."""

    profile: Profile
    num_blocks: int
    block_size: int
    holds: dict[int, Prefix] = field(default_factory=dict)
    """What each page holds."""
    known: dict[Prefix, dict[int, bool]] = field(default_factory=dict)
    """Full blocks that may be found: the pages that hold each, and whether such a page must be found."""
    was_evicted_on_purpose: bool = False

    # -- questions -------------------------------------------------------------------------------------------------

    def prefix(self, prompt: Prompt, tokens: tuple[int, ...]) -> Prefix:
        """Return what a request with this prompt depends on once its tokens are these."""
        space = prompt.namespace
        lora = space.adapter
        weights: Hashable = lora and lora.digest
        if lora and self.profile.adapter_identity == "name_and_path":
            weights = (lora.name, lora.path)
        media = tuple((item.offset, item.length, item.digest) for item in prompt.media)
        return Prefix((space.model, space.salt, space.generation, weights), media, tokens)

    def longest_hit(self, num_tokens: int) -> int:
        """Return how many of a request's tokens a hit may cover at most, whatever is cached."""
        return num_tokens - (self.profile.last_token == "recomputed")

    def findable(self, wanted: Prefix) -> tuple[int, int]:
        """Return how many of the tokens that are wanted a lookup must at least, and may at most, find."""
        size, by_token = self.block_size, self.profile.granularity == "token"
        num_tokens = len(wanted.tokens)
        longest = self.longest_hit(num_tokens)
        least = most = 0
        for end in range(size, (num_tokens if by_token else longest) + 1, size):
            copies = self.known.get(wanted.cut(end))
            if not copies:
                break
            if least == most and any(copies.values()):
                least = end
            most = end
        if by_token:
            most = min(longest, most + self._num_begun(wanted, most))
            least = min(least, longest // size * size)
        return least, most

    def _num_begun(self, wanted: Prefix, start: int) -> int:
        """Return how many tokens of the block from `start` on some page holds the beginning of."""
        ends = range(start + 1, min(start + self.block_size, len(wanted.tokens)) + 1)
        pages = [
            page for page in self.holds.values() if len(page.tokens) > start and page.cut(start) == wanted.cut(start)
        ]
        return max((end - start for end in ends if any(page.extends(wanted.cut(end)) for page in pages)), default=0)

    # -- what happens to them --------------------------------------------------------------------------------------

    def write(self, wanted: Prefix, table: Sequence[int], start: int, end: int) -> None:
        """The KV of a request's tokens `start` .. `end` - 1 is written through its table."""
        for position in range(start // self.block_size, -(-end // self.block_size)):
            self.holds[table[position]] = wanted.cut(min(end, (position + 1) * self.block_size))

    def publish(self, wanted: Prefix, table: Sequence[int], num_blocks: int, *, must_be_found: bool) -> None:
        """A request's first full blocks may be found from now on."""
        for position in range(num_blocks):
            prefix = wanted.cut((position + 1) * self.block_size)
            if self.holds.get(table[position]) == prefix:
                pages = self.known.setdefault(prefix, {})
                pages[table[position]] = must_be_found or pages.get(table[position], False)

    def blank(self, block: int) -> None:
        """What a page holds is of no use any more."""
        prefix = self.holds.pop(block, None)
        if prefix is not None and block in self.known.get(prefix, {}):
            del self.known[prefix][block]
            if not self.known[prefix]:
                del self.known[prefix]

    def hand_out(self, new: Sequence[int], held: set[int]) -> None:
        """Blocks are handed out, beside those that are held; what they hold is gone.

        Raises Violation if cached blocks go while blank ones are left, or a prefix before what extends it.
        """
        cached = {page for pages in self.known.values() for page in pages}
        # Where copies are not kept some of these are blank too; which, and since when, only the manager knows.
        num_blank = self.num_blocks - len(held | cached)
        num_needed = max(0, len(new) - num_blank)
        if num_needed and self.profile.eviction == "may_take_more":
            for pages in self.known.values():
                if not pages.keys() & held:
                    pages.update(dict.fromkeys(pages, False))
        must_stay = {prefix for prefix, pages in self.known.items() if any(pages.values())}
        sure = {page for pages in self.known.values() for page, must_be_found in pages.items() if must_be_found}
        for block in new:
            self.blank(block)
        if self.was_evicted_on_purpose:
            return  # what was made unfindable may still stand in line for eviction, before what is blank
        lost = must_stay - self.known.keys()
        num_lost = len(sure & set(new)) if self.profile.duplicates == "kept" else len(lost)
        if num_lost > num_needed:
            text = f"{num_lost} cached blocks went and {num_needed} had to: {num_blank} were blank"
            raise Violation("evicted early", text)
        for prefix in lost:
            for other in must_stay & self.known.keys():
                if other.extends(prefix):
                    text = f"the block of {list(prefix.tokens)} went before that of {list(other.tokens)}"
                    raise Violation("head first", text)

    def evict(self, block: int) -> Prefix | None:
        """A page's content is made unfindable on purpose; what extends it, and where copies are not kept, its copies,
        may go with it. Return the content."""
        self.was_evicted_on_purpose = True
        evicted = self.holds.get(block)
        if evicted is not None:
            self.known.get(evicted, {}).pop(block, None)
            for prefix, pages in self.known.items():
                if prefix.extends(evicted) and (prefix != evicted or self.profile.duplicates != "kept"):
                    pages.update(dict.fromkeys(pages, False))
        return evicted
