"""Eviction: which prefix that nobody holds goes first.

Only a leaf can go, so that a prefix never goes before what extends it. `Lru` needs no more than the order in which
nodes were let go: children come before their parents in it, so its head is always a leaf. The other policies score each
leaf when it becomes one and take the lowest score; `adaptive` learns what a leaf is worth.

The names and rules of lfu, slru, fifo, filo, mru, priority and tlru are SGLang's (0.5.23), counted by requests: a
request counts once for each node that it was served or that it added.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from anaphora.cache.adaptive import Adaptive, AdaptiveOrder
from anaphora.cache.node import LruOrder

if TYPE_CHECKING:
    from collections.abc import Callable

    from anaphora.cache.node import Node

Score = tuple[float, ...]


class Note:
    """What scored policies remember of a node. Times are serial numbers of lettings go, not seconds.

    created, let_go: when it was made, when it was last let go. num_uses: requests that it was served to, or made by.
    priority: the highest of theirs. high_water: the depth in blocks of the deepest prefix that ever went through it.
    """

    __slots__ = ("created", "high_water", "let_go", "num_uses", "priority")

    def __init__(self, created: int, num_uses: int, priority: int, high_water: int) -> None:
        self.created = created
        self.let_go = created
        self.num_uses = num_uses
        self.priority = priority
        self.high_water = high_water


class ScoringPolicy(Protocol):
    """Scores a leaf: the lowest score goes first."""

    def score(self, node: Node, note: Note) -> Score:
        """Return the score of a leaf that nobody holds."""
        ...


@dataclass(frozen=True, slots=True)
class Lru:
    """Least recently let go first."""

    def score(self, node: Node, note: Note) -> Score:
        """Recency alone. (The order that is used for it needs no scores.)"""
        return (note.let_go,)


@dataclass(frozen=True, slots=True)
class Mru:
    """Most recently let go first."""

    def score(self, node: Node, note: Note) -> Score:
        """Recency, the other way round."""
        return (-note.let_go,)


@dataclass(frozen=True, slots=True)
class Fifo:
    """First made, first out."""

    def score(self, node: Node, note: Note) -> Score:
        """Time of making."""
        return (note.created,)


@dataclass(frozen=True, slots=True)
class Filo:
    """First made, last out."""

    def score(self, node: Node, note: Note) -> Score:
        """Time of making, the other way round."""
        return (-note.created,)


@dataclass(frozen=True, slots=True)
class Lfu:
    """Least often used first; among equals the least recently let go."""

    def score(self, node: Node, note: Note) -> Score:
        """Uses, then recency."""
        return (note.num_uses, note.let_go)


@dataclass(frozen=True, slots=True)
class Slru:
    """What was used less than `threshold` times goes before the rest; within each part least recently let go first."""

    threshold: int = 2

    def score(self, node: Node, note: Note) -> Score:
        """Part, then recency."""
        return (note.num_uses >= self.threshold, note.let_go)


@dataclass(frozen=True, slots=True)
class Priority:
    """Lowest priority first, as given to `KVCacheManager.start`; among equals the least recently let go."""

    def score(self, node: Node, note: Note) -> Score:
        """Priority, then recency."""
        return (note.priority, note.let_go)


@dataclass(frozen=True, slots=True)
class Tlru:
    """Tail-aware (arXiv 2510.15152): a leaf goes early if without it its branch would still be cached so far that a
    next prompt of the expected length leaves at most `threshold` tokens to compute.

    threshold, next_prompt: in tokens, next_prompt the smaller one. block_size: the manager's, filled in by it.
    """

    threshold: int
    next_prompt: int
    block_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.next_prompt < self.threshold:
            raise ValueError(
                f"next_prompt: expected 0 or more and less than threshold, {self.threshold}, got {self.next_prompt}"
            )

    def score(self, node: Node, note: Note) -> Score:
        """Whether the tail is needed, then recency."""
        budget = max(note.high_water * self.block_size + self.next_prompt - self.threshold, 0)
        is_safe = node.depth * self.block_size >= budget
        return (not is_safe, note.let_go)


EvictionPolicy = ScoringPolicy | Adaptive

POLICIES: dict[str, EvictionPolicy] = {
    "lru": Lru(),
    "mru": Mru(),
    "fifo": Fifo(),
    "filo": Filo(),
    "lfu": Lfu(),
    "slru": Slru(),
    "priority": Priority(),
    "adaptive": Adaptive(),
}
"""Policies that go by a name. `Tlru` has to be given its threshold."""


def resolve_policy(eviction: str | EvictionPolicy, block_size: int, clock: Callable[[], float]) -> EvictionPolicy:
    """Return a policy by its name, or as it was given, told the manager's block size and clock where it needs them."""
    policy = POLICIES.get(eviction) if isinstance(eviction, str) else eviction
    if isinstance(policy, Adaptive):
        return replace(policy, clock=clock)
    if isinstance(policy, Tlru):
        return replace(policy, block_size=block_size)
    if not hasattr(policy, "score"):
        raise ValueError(f"eviction: expected one of {', '.join(POLICIES)}, or a policy, got {eviction!r}")
    assert policy is not None
    return policy


class ScoredOrder(LruOrder):
    """The same nodes, with a heap of the leaves by a policy's score. Cost: O(log n) a leaf, amortised.

    Entries of the heap are left behind when a node is held again, and skipped when they come up; when they outnumber
    the nodes, the heap is built anew.
    """

    keeps_notes = True

    def __init__(self, policy: ScoringPolicy, quota: int | None = None) -> None:
        super().__init__(quota)
        self._policy = policy
        self._heap: list[tuple[Score, int, Node]] = []
        self._serial = 0

    def put_in(self, node: Node) -> None:
        """Take note of the time, and enter a leaf."""
        super().put_in(node)
        self._serial += 1
        _note(node).let_go = self._serial
        if not node.kids:
            self._push(node)

    def became_leaf(self, node: Node) -> None:
        """Enter it, if nobody holds it."""
        if node in self.idle:
            self._push(node)

    def first(self) -> Node:
        """The leaf with the lowest score."""
        while True:
            _, let_go, node = self._heap[0]
            if node in self.idle and not node.kids and _note(node).let_go == let_go:
                return node
            heapq.heappop(self._heap)

    def used(self, node: Node, priority: int) -> None:
        """Count the use."""
        note = _note(node)
        note.num_uses += 1
        note.priority = max(note.priority, priority)

    def made(self, node: Node, priority: int) -> None:
        """Begin a note, and tell the nodes above how deep their branch is now."""
        if node.note is None:
            self._serial += 1
            node.note = Note(self._serial, 1, priority, 0)
        depth = node.depth + len(node.blocks)
        above: Node | None = node
        while above is not None and above.note is not None and above.note.high_water < depth:
            above.note.high_water = depth
            above.note.priority = max(above.note.priority, priority)
            above = above.parent

    def split(self, upper: Node, lower: Node) -> None:
        """Both halves have been made and used alike."""
        note = _note(lower)
        upper.note = Note(note.created, note.num_uses, note.priority, note.high_water)
        upper.note.let_go = note.let_go

    def _push(self, node: Node) -> None:
        if len(self._heap) > 2 * len(self.idle) + 64:
            self._heap = [self._entry(leaf) for leaf in self.idle if not leaf.kids and leaf is not node]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, self._entry(node))

    def _entry(self, node: Node) -> tuple[Score, int, Node]:
        note = _note(node)
        return self._policy.score(node, note), note.let_go, node


def _note(node: Node) -> Note:
    note: Note | None = node.note
    assert note is not None
    return note


def make_order(policy: EvictionPolicy, quota: int | None = None) -> LruOrder:
    """Return an empty order for a policy."""
    if isinstance(policy, Lru):
        return LruOrder(quota)
    return AdaptiveOrder(policy, quota) if isinstance(policy, Adaptive) else ScoredOrder(policy, quota)
