"""A prefix cache that is slow and obvious: the truth that the real one is compared with.

One page of tokens is one entry of a plain dict, under everything that leads to it: its namespace and all tokens from
the first one to its last. So two prefixes are one entry exactly if they are equal, and there are no edges to get wrong.
Whatever can be computed from these entries is computed anew each time it is asked for.

`ReferenceTree` has two sets of rules. `like_sglang=False` states ours:

- a lookup changes nothing;
- a page's place in the order of eviction is when its last holder let go of it, deeper pages before those above them;
- eviction takes single pages, always one that nothing extends.

`like_sglang=True` states those of SGLang 0.5.23's RadixCache. There, pages lie on edges that are evicted as a whole and
used as a whole, so a lookup that ends inside an edge cuts it in two and renews both parts, the unread one too.

`ReferenceManager` states the contract of KVCacheManager over a tree with our rules.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

Key = tuple[Hashable, tuple[int, ...]]
"""A page's name: its namespace, and all tokens up to its end."""


@dataclass
class Page:
    """One page of one prefix. `used` and `born` are readings of the tree's counter of events."""

    value: Any
    used: int
    born: int
    hits: int = 1
    priority: int = 0
    locks: int = 0
    longest: int = 0
    """Tokens of the longest prefix that ever went through here."""
    ends_edge: bool = False
    """SGLang only: whether an edge ends with this page."""


class ReferenceTree:
    """Pages by prefix.

    Args:
        page_size: tokens in a page; a rest that fills no page is ignored.
        like_sglang: whose rules.
        policy: lru, lfu, slru, fifo, filo, mru, priority or tlru: what is evicted first among the pages (SGLang:
            edges) that nobody holds and nothing extends.
        policy_config: `protected_threshold` for slru; `threshold` and `next_prompt_estimate` for tlru.
    """

    def __init__(
        self,
        page_size: int,
        *,
        like_sglang: bool = False,
        policy: str = "lru",
        policy_config: dict[str, int] | None = None,
    ) -> None:
        self.page_size = page_size
        self.like_sglang = like_sglang
        self.pages: dict[Key, Page] = {}
        self._rank = getattr(self, f"_{policy}_rank")
        self._config = policy_config or {}
        self._now = 0

    # -- what is there ---------------------------------------------------------------------------------------------

    def path(self, namespace: Hashable, tokens: Iterable[int]) -> list[Key]:
        """Return the names of the whole pages of `tokens`, first page first, known or not."""
        ids = tuple(tokens)
        return [(namespace, ids[:end]) for end in range(self.page_size, len(ids) + 1, self.page_size)]

    def known(self, namespace: Hashable, tokens: Iterable[int]) -> list[Key]:
        """Return the longest known beginning of that path. Changes nothing."""
        return list(takewhile(self.pages.__contains__, self.path(namespace, tokens)))

    def parent(self, key: Key) -> Key:
        """Return the name of the page before this one; without tokens if there is none."""
        namespace, tokens = key
        return namespace, tokens[: -self.page_size]

    def kids(self, key: Key) -> list[Key]:
        """Return the pages that follow this one, oldest first."""
        return [kid for kid in self.pages if self.parent(kid) == key]

    def leaves(self) -> list[Key]:
        """Return the pages that may be evicted now: nobody holds them, nothing extends them."""
        extended = {self.parent(key) for key in self.pages}
        return [key for key, page in self.pages.items() if not page.locks and key not in extended]

    def sizes(self) -> dict[str, int]:
        """Return the number of tokens that are known, held by nobody, and held."""
        num_held = sum(page.locks > 0 for page in self.pages.values())
        pages = {"total": len(self.pages), "evictable": len(self.pages) - num_held, "protected": num_held}
        return {name: number * self.page_size for name, number in pages.items()}

    # -- what changes it -------------------------------------------------------------------------------------------

    def match(self, namespace: Hashable, tokens: Iterable[int]) -> list[Key]:
        """Look up a prefix. Ours: the same as `known`. SGLang's: use it, and cut the edge that it ends in."""
        found = self.known(namespace, tokens)
        if self.like_sglang and found:
            now = self._tick()
            for key in {*found, *self.edge(found[-1])}:
                self.pages[key].used = now
            self._cut_edge(found[-1], now)
        return found

    def insert(self, namespace: Hashable, tokens: Iterable[int], values: Sequence[Any], priority: int = 0) -> list[Key]:
        """Add a prefix, `values[i]` for its page i; return the pages that were known, which keep their own values.

        Ours: its user then lets go of all of it.
        """
        path = self.path(namespace, tokens)
        found = self.match(namespace, tokens)
        for key in found:
            page = self.pages[key]
            page.hits += 1
            page.priority = max(page.priority, priority)
        now = self._tick()
        for key, value in list(zip(path, values, strict=True))[len(found) :]:
            self.pages[key] = Page(value, used=now, born=now, priority=priority)
        for key in path:
            self.pages[key].longest = max(self.pages[key].longest, len(path[-1][1]))
        if not self.like_sglang:
            self.let_go(path)
        elif len(path) > len(found):
            self.pages[path[-1]].ends_edge = True
        return found

    def lock(self, path: Iterable[Key]) -> None:
        """Count one more holder for each page."""
        for key in path:
            self.pages[key].locks += 1

    def unlock(self, path: Sequence[Key]) -> None:
        """Count one holder less. Ours: those that nobody holds any more take their place in the order of eviction."""
        for key in path:
            self.pages[key].locks -= 1
            assert self.pages[key].locks >= 0
        if not self.like_sglang:
            self.let_go(path)

    def let_go(self, path: Sequence[Key]) -> None:
        """Our recency: what nobody holds was used last when it was let go; the deepest page first."""
        for key in reversed(path):
            if not self.pages[key].locks:
                self.pages[key].used = self._tick()

    def evict(self, num_tokens: int) -> list[Key]:
        """Forget at least `num_tokens` tokens, if so many can go; return the pages in the order in which they went.

        Ours: page by page. SGLang's: edge by edge.
        """
        gone: list[Key] = []
        while len(gone) * self.page_size < num_tokens:
            leaves = self.leaves()
            if not leaves:
                break
            victim = min(leaves, key=self._rank)
            for key in self.edge(victim) if self.like_sglang else [victim]:
                del self.pages[key]
                gone.append(key)
        return gone

    def _tick(self) -> int:
        self._now += 1
        return self._now

    # -- what goes first: the smallest rank ------------------------------------------------------------------------

    def _lru_rank(self, key: Key) -> tuple[int, ...]:
        return (self.pages[key].used,)

    def _lfu_rank(self, key: Key) -> tuple[int, ...]:
        return self.pages[key].hits, self.pages[key].used

    def _slru_rank(self, key: Key) -> tuple[int, ...]:
        return self.pages[key].hits >= self._config.get("protected_threshold", 2), self.pages[key].used

    def _priority_rank(self, key: Key) -> tuple[int, ...]:
        return self.pages[key].priority, self.pages[key].used

    def _fifo_rank(self, key: Key) -> tuple[int, ...]:
        return (self.pages[key].born,)

    def _filo_rank(self, key: Key) -> tuple[int, ...]:
        return (-self.pages[key].born,)

    def _mru_rank(self, key: Key) -> tuple[int, ...]:
        return (-self.pages[key].used,)

    def _tlru_rank(self, key: Key) -> tuple[int, ...]:
        """What the next prompt could do without under the latency target goes first (arXiv 2510.15152)."""
        page = self.pages[key]
        budget = max(page.longest + self._config["next_prompt_estimate"] - self._config["threshold"], 0)
        top = self.edge(key)[0] if self.like_sglang else key
        rest = len(self.parent(top)[1])
        return -1 if rest >= budget else 0, page.used

    # -- SGLang's edges --------------------------------------------------------------------------------------------

    def edge(self, key: Key) -> list[Key]:
        """Return all pages of the edge that this page lies on, top down."""
        pages = [key]
        while (above := self.parent(pages[0])) in self.pages and not self.pages[above].ends_edge:
            pages.insert(0, above)
        while not self.pages[pages[-1]].ends_edge:
            (below,) = self.kids(pages[-1])
            pages.append(below)
        return pages

    def _cut_edge(self, key: Key, now: int) -> None:
        """Let the edge end with this page. The upper part counts as new, the lower one as what it was."""
        if not self.pages[key].ends_edge:
            self.pages[key].ends_edge = True
            for upper in self.edge(key):
                self.pages[upper].born = now

    def edges(self) -> list[list[Key]]:
        """Return all edges, each before those below it, siblings in the order in which they came."""
        edges: list[list[Key]] = []
        tops = [key for key in self.pages if not self.parent(key)[1]]
        while tops:
            edges.append(self.edge(tops.pop(0)))
            tops = self.kids(edges[-1][-1]) + tops
        return edges


@dataclass(eq=False)
class ReferenceSequence:
    """A request: what it asks for, how far it is computed, and what it holds."""

    tokens: list[int]
    namespace: Hashable
    read_cache: bool = True
    write_cache: bool = True
    is_running: bool = False
    num_computed_tokens: int = 0
    table: list[int] = field(default_factory=list)
    """Its blocks, in order."""
    path: list[Key] = field(default_factory=list)
    """The pages of the tree that it holds, from the first on. Of each it has a copy in `table`, its own or shared."""


class ReferenceManager:
    """What KVCacheManager promises with `index="radix"`, over a tree with our rules. A page's value is its block.

    Two things are the real manager's affair: which of the blank blocks a request gets, and which of several live copies
    of a page is served once nobody holds the one that was. So `allocate` is told the real block table and asserts that
    it can be one. All else follows: which prefixes are known, which blocks are held, cached and blank, who is evicted.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tree = ReferenceTree(block_size)
        self.running: list[ReferenceSequence] = []
        self.num_evicted_blocks = 0

    # -- what is where ---------------------------------------------------------------------------------------------

    def held_blocks(self) -> set[int]:
        """Return the blocks in the tables of running requests."""
        return {block for sequence in self.running for block in sequence.table}

    def cached_blocks(self) -> set[int]:
        """Return the blocks of known pages that nobody holds."""
        return {page.value for page in self.tree.pages.values() if not page.locks}

    def blank_blocks(self) -> set[int]:
        """Return all others."""
        return set(range(1, self.num_blocks + 1)) - self.held_blocks() - self.cached_blocks()

    def copies(self, key: Key) -> set[int]:
        """Return the blocks that the holders of a page have for it."""
        position = len(key[1]) // self.block_size - 1
        return {sequence.table[position] for sequence in self.running if key in sequence.path}

    def hits(self, sequence: ReferenceSequence) -> list[Key]:
        """Return what a request would be served now: never its last token."""
        return self.tree.known(sequence.namespace, sequence.tokens[:-1]) if sequence.read_cache else []

    # -- a request's life ------------------------------------------------------------------------------------------

    def num_missing(self, sequence: ReferenceSequence, num_tokens: int) -> int:
        """Return how many more blocks it takes to have slots for the next `num_tokens` tokens."""
        num_known_pages = len(sequence.table) if sequence.is_running else len(self.hits(sequence))
        num_computed = sequence.num_computed_tokens if sequence.is_running else num_known_pages * self.block_size
        return max(0, -(-(num_computed + num_tokens) // self.block_size) - num_known_pages)

    def can_allocate(self, sequence: ReferenceSequence, num_tokens: int) -> bool:
        """Return whether so many blocks can be had: those that nobody will hold once it holds its hits."""
        hits = [] if sequence.is_running else self.hits(sequence)
        num_unheld_hits = sum(not self.tree.pages[key].locks for key in hits)
        num_free = self.num_blocks - len(self.held_blocks())
        return self.num_missing(sequence, num_tokens) <= num_free - num_unheld_hits

    def allocate(self, sequence: ReferenceSequence, num_tokens: int, table: Sequence[int]) -> None:
        """The request has got slots for the next `num_tokens` tokens; `table` is all that it holds now."""
        num_missing = self.num_missing(sequence, num_tokens)
        if not sequence.is_running:
            hits = self.hits(sequence)
            sequence.table = list(table[: len(hits)])
            for key, block in zip(hits, sequence.table, strict=True):
                page = self.tree.pages[key]
                assert block in ({page.value} if page.value else self.copies(key))
                page.value = block
            self.tree.lock(hits)
            sequence.path = hits
            sequence.num_computed_tokens = len(hits) * self.block_size
            sequence.is_running = True
            self.running.append(sequence)
        num_victims = max(0, num_missing - len(self.blank_blocks()))
        assert len(self.tree.evict(num_victims * self.block_size)) == num_victims
        self.num_evicted_blocks += num_victims
        new = list(table[len(sequence.table) :])
        assert len(new) == len(set(new)) == num_missing
        assert set(new) <= self.blank_blocks()
        sequence.table += new
        assert sequence.table == list(table)

    def commit(self, sequence: ReferenceSequence, num_tokens: int) -> None:
        """The next `num_tokens` tokens are computed. Pages that are full become known, with this request's block unless
        somebody holds another."""
        sequence.num_computed_tokens += num_tokens
        if sequence.write_cache:
            path = self.tree.path(sequence.namespace, sequence.tokens[: sequence.num_computed_tokens])
            for key, block in list(zip(path, sequence.table, strict=False))[len(sequence.path) :]:
                page = self.tree.pages.setdefault(key, Page(block, used=0, born=0))
                if not page.locks:
                    page.value = block
                self.tree.lock([key])
                sequence.path.append(key)

    def give_back(self, sequence: ReferenceSequence) -> None:
        """The request ends or is preempted; what it made known stays so."""
        self.running.remove(sequence)
        for key, block in zip(sequence.path, sequence.table, strict=False):
            page, copies = self.tree.pages[key], self.copies(key)
            if not copies:
                assert page.value in {block, None}
                page.value = block
            elif page.value not in copies:
                page.value = None  # one of them; the next hit will tell
        self.tree.unlock(sequence.path)
        sequence.is_running = False
        sequence.num_computed_tokens = 0
        sequence.table, sequence.path = [], []

    def reset(self) -> None:
        """Forget everything. Nobody holds anything."""
        assert not self.running
        self.tree.pages.clear()
