"""`adaptive`: evict what is least worth the memory it holds, judged by how such blocks were reused so far.

Every use of a block puts it into a *class* that the tree itself tells: the turn of the conversation and how much that
turn added, or, for a prefix that several conversations share, how often it is asked for. Per class, reuses are counted
by age in bins that double. All reuses count, those of evicted blocks included, since a small cache never sees the late
ones. The worth of a block of a class at an age is Gittins' index: over all waiting times, the best ratio of the
probability that it is reused by then to the time it is expected to hold memory until then.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import pairwise
from math import frexp

from .simulator import Residency
from .trace import Request

NUM_BINS = 17  # bin 0: under a second; bin b: from 2**(b-1) s; the last: nine hours and more
NUM_GHOSTS = 4_096  # requests whose evicted blocks are remembered
REINDEX_EVERY = 64  # requests between two recomputations of the worths
PRIOR_WEIGHT = 8.0  # uses after which a class outweighs its family
HALF_LIFE = 16_384  # requests after which what was counted weighs half
GAP_SHARE = 0.25  # weight of the newest gap in the smoothed gap of a shared block

ClassKey = tuple[object, ...]


def age_bin(age_s: float) -> int:
    """The bin of an age: 0 below one second, then one per doubling."""
    return min(max(frexp(age_s)[1], 0), NUM_BINS - 1)


BIN_START_S = [0.0] + [2.0 ** (b - 1) for b in range(1, NUM_BINS)]
BIN_WIDTH_S = [1.0] + [2.0 ** (b - 1) for b in range(1, NUM_BINS)]


class ReuseClass:
    """What was learned about one class, and the leaves of that class by age.

    ``uses[b]`` counts uses that stayed in the class to the start of bin b, reused or not; ``reuses[b]`` those whose
    next use came in bin b. Both are smoothed toward the parent class while the class is young.
    """

    def __init__(self, key: ClassKey, parent: ReuseClass | None) -> None:
        self.key = key
        self.parent = parent
        self.uses = [0.0] * NUM_BINS
        self.reuses = [0.0] * NUM_BINS
        self.shares = [0.0] * NUM_BINS  # of the uses, smoothed: those reused in each bin
        self.worth: list[float] = list(parent.worth) if parent else [0.0] * NUM_BINS
        self.leaves: list[list[tuple[float, int, int]]] = [
            [] for _ in range(NUM_BINS)
        ]  # heaps of (time, -depth, block)
        self._aging: list[deque[list[float]]] = [deque() for _ in range(NUM_BINS)]  # [time, uses] on the way to bin b

    def add_use(self, time_s: float) -> None:
        """Counts one use. Memory is bounded: uses within an eighth of their age are counted as one."""
        self._enter(0, time_s, 1.0)

    def add_reuse(self, age_s: float) -> None:
        """Counts the next use of an earlier use."""
        self.reuses[age_bin(age_s)] += 1.0

    def _enter(self, b: int, time_s: float, uses: float) -> None:
        self.uses[b] += uses
        if b + 1 < NUM_BINS:
            aging = self._aging[b]
            if aging and time_s - aging[-1][0] <= BIN_START_S[b + 1] / 8:
                aging[-1][1] += uses
            else:
                aging.append([time_s, uses])

    def recompute(self, now_s: float, decay: float) -> None:
        """Lets uses age, then recomputes the worths. Parents first. O(NUM_BINS ** 2)."""
        for b, aging in enumerate(self._aging[:-1]):
            while aging and now_s - aging[0][0] >= BIN_START_S[b + 1]:
                self._enter(b + 1, *aging.popleft())
        prior = self.parent.shares if self.parent else [0.0] * NUM_BINS
        self.shares = [
            (reuses + PRIOR_WEIGHT * expected) / (uses + PRIOR_WEIGHT)
            for reuses, uses, expected in zip(self.reuses, self.uses, prior, strict=True)
        ]
        self.uses = [count * decay for count in self.uses]
        self.reuses = [count * decay for count in self.reuses]
        waiting = [1.0]
        for share in self.shares:
            waiting.append(max(waiting[-1] - share, 0.001))
        for b in range(NUM_BINS):
            reused = held = best = 0.0
            for later in range(b, NUM_BINS):
                reused += self.shares[later]
                held += (waiting[later] + waiting[later + 1]) / 2 * BIN_WIDTH_S[later]
                best = max(best, reused / held)
            self.worth[b] = best


class Adaptive:
    """Evicts the oldest leaf of the class and age whose worth is least. O(log n) per victim.

    The price per request: one step per run of blocks that were last used together (a node, in a radix tree).
    """

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        n = residency.trace.num_blocks
        self._now_s = 0.0
        self._last_use_s = [0.0] * n
        self._last_request = [-1] * n  # -1: not remembered
        self._class: list[ReuseClass | None] = [None] * n
        self._turn = [0] * n  # of the request that ended here; 0: none did
        self._extension = [-1] * n  # the one block known to extend this one; -1: none, -2: several
        self._num_conversations = [0] * n
        self._gap_s = [0.0] * n
        self._depth = [0] * n
        self._remembered: deque[tuple[int, tuple[int, ...]]] = deque()
        self._classes: dict[ClassKey, ReuseClass] = {}
        self._by_worth: list[tuple[float, int, int, ReuseClass]] = []  # heap of (worth, -bin, serial, class)
        self._by_due: list[tuple[float, int, int, ReuseClass]] = []  # heap of (when the oldest leaf outgrows, ...)
        self._serial = 0
        self._next_reindex = 8

    # -- classes ---------------------------------------------------------------------------------------------------

    def _class_of(self, *key: object) -> ReuseClass:
        """The class of a key; its parent is the key without the last part."""
        found = self._classes.get(key)
        if found is None:
            parent = self._class_of(*key[:-1]) if key else None
            found = self._classes[key] = ReuseClass(key, parent)
        return found

    def _turn_of(self, body: tuple[int, ...]) -> tuple[int, int]:
        """(turn, blocks added): the turn is one more than that of the prompt which this one is the first to extend."""
        num_known = 0
        for block in body:
            if self._last_request[block] < 0:
                break
            num_known += 1
        turn = 1
        if num_known and self._extension[body[num_known - 1]] == -1:
            turn += self._turn[body[num_known - 1]]
        return turn, len(body) - num_known

    # -- what requests teach -----------------------------------------------------------------------------------------

    def begin(self, request: Request, num_hits: int) -> None:
        """Counts the reuses that this request is, and the uses that it begins."""
        self._now_s = now_s = request.time_s
        index = self.residency.request_index
        body = request.chain[:-1] or request.chain  # a partial last block is never extended
        turn, num_added = self._turn_of(body)
        own = self._class_of("turn", min(turn.bit_length(), 4), num_added.bit_length())

        previous: tuple[int, ReuseClass | None] = (-1, None)
        current: ReuseClass | None = None
        for depth, block in enumerate(request.chain):
            is_tail = depth == len(body)
            if self._last_request[block] >= 0:
                use = (self._last_request[block], self._class[block])
                if use != previous:
                    previous = use
                    self._count_reuse(use[1], now_s - self._last_use_s[block])
                self._gap_s[block] += GAP_SHARE * (now_s - self._last_use_s[block] - self._gap_s[block])
            else:
                self._depth[block] = depth
            if turn == 1:
                self._num_conversations[block] += 1
            if is_tail:
                chosen = self._class_of("tail")
            elif self._num_conversations[block] <= 1:
                chosen = own
            else:
                chosen = self._class_of("shared", age_bin(self._gap_s[block]))
            if chosen is not current:
                current = chosen
                self._count_use(chosen)
            self._class[block] = chosen
            self._last_use_s[block] = now_s
            self._last_request[block] = index
        self._link(body, turn)
        self._forget_old(index, request.chain)
        if index + 1 >= self._next_reindex:
            num_new = min(index + 1, REINDEX_EVERY)
            self._next_reindex += num_new
            self._reindex(0.5 ** (num_new / HALF_LIFE))

    def _count_use(self, of: ReuseClass | None) -> None:
        while of is not None:
            of.add_use(self._now_s)
            of = of.parent

    def _count_reuse(self, of: ReuseClass | None, age_s: float) -> None:
        while of is not None:
            of.add_reuse(age_s)
            of = of.parent

    def _link(self, body: tuple[int, ...], turn: int) -> None:
        for block, extension in pairwise(body):
            known = self._extension[block]
            if known != extension:
                self._extension[block] = extension if known == -1 else -2
        if body:
            self._turn[body[-1]] = turn

    def _forget_old(self, index: int, chain: tuple[int, ...]) -> None:
        self._remembered.append((index, chain))
        if len(self._remembered) > NUM_GHOSTS:
            old_index, old_chain = self._remembered.popleft()
            for block in old_chain:
                if self._last_request[block] == old_index and not self.residency.resident[block]:
                    self._forget(block)

    def _forget(self, block: int) -> None:
        self._last_request[block] = -1
        self._turn[block] = self._num_conversations[block] = 0
        self._extension[block] = -1
        self._gap_s[block] = 0.0

    def _reindex(self, decay: float) -> None:
        for one in sorted(self._classes.values(), key=lambda one: len(one.key)):
            one.recompute(self._now_s, decay)
        self._by_worth = []
        for one in self._classes.values():
            for b, leaves in enumerate(one.leaves):
                if leaves:
                    self._list_by_worth(one, b)

    # -- victims -----------------------------------------------------------------------------------------------------

    def _list_by_worth(self, one: ReuseClass, b: int) -> None:
        self._serial += 1
        heapq.heappush(self._by_worth, (one.worth[b], -b, self._serial, one))

    def _add_leaf(self, block: int) -> None:
        one = self._class[block]
        assert one is not None
        self._put(one, (self._last_use_s[block], -self._depth[block], block))

    def _put(self, one: ReuseClass, entry: tuple[float, int, int], least_bin: int = 0) -> None:
        b = max(age_bin(self._now_s - entry[0]), least_bin)
        leaves = one.leaves[b]
        if not leaves:
            self._list_by_worth(one, b)
        if b + 1 < NUM_BINS and (not leaves or entry[0] < leaves[0][0]):
            self._serial += 1
            heapq.heappush(self._by_due, (entry[0] + BIN_START_S[b + 1], b, self._serial, one))
        heapq.heappush(leaves, entry)

    def _let_leaves_age(self) -> None:
        while self._by_due and self._by_due[0][0] <= self._now_s:
            _, b, _, one = heapq.heappop(self._by_due)
            leaves = one.leaves[b]
            # The same sum as the due time, not the age: `now - time` may round to just below the bin's end when
            # `time + end` is already due, and the entry would come back for ever.
            while leaves and leaves[0][0] + BIN_START_S[b + 1] <= self._now_s:
                entry = heapq.heappop(leaves)
                if self._is_current(entry, one):
                    self._put(one, entry, least_bin=b + 1)
            if leaves:
                self._serial += 1
                heapq.heappush(self._by_due, (leaves[0][0] + BIN_START_S[b + 1], b, self._serial, one))

    def _is_current(self, entry: tuple[float, int, int], one: ReuseClass) -> bool:
        time_s, _, block = entry
        is_last_use = self._last_use_s[block] == time_s and self._class[block] is one
        return is_last_use and self.residency.is_evictable(block)

    def victim(self) -> int | None:
        """The oldest leaf of the least worthy class and age."""
        self._let_leaves_age()
        while self._by_worth:
            worth, negative_b, _, one = self._by_worth[0]
            leaves = one.leaves[-negative_b]
            if worth == one.worth[-negative_b]:
                while leaves and not self._is_current(leaves[0], one):
                    heapq.heappop(leaves)
                if leaves:
                    block = heapq.heappop(leaves)[2]
                    if self.residency.request_index - self._last_request[block] > NUM_GHOSTS:
                        self._forget(block)
                    return block
            heapq.heappop(self._by_worth)
        return None

    def became_leaf(self, block: int) -> None:
        """Makes the block a candidate; one that is pinned becomes one again when its request ends."""
        if self.residency.pinned_by[block] != self.residency.request_index:
            self._add_leaf(block)

    def end(self, request: Request, num_hits: int, num_kept: int) -> None:
        """Makes the end of the chain a candidate unless something extends it."""
        if num_kept and not self.residency.num_extensions[request.chain[num_kept - 1]]:
            self._add_leaf(request.chain[num_kept - 1])
