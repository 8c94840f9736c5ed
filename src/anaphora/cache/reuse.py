"""Reuse: how soon prefixes of a kind are used again, and what that makes one of them worth.

Each use of a prefix is of a *kind*, a tuple; what is known of a kind is blended with what is known of the kind without
its last part, up to (), of which every use is. Per kind, uses and reuses are counted by age, in bins that double. The
worth at an age is Gittins' index: over all times that one could still wait, the greatest ratio of the probability that
it is used again by then to the time that it is expected to hold memory until then.
"""

from __future__ import annotations

from collections import deque
from math import frexp

Kind = tuple[str | int, ...]

NUM_BINS = 17
"""Bin 0: ages under a second; bin b: from 2 ** (b - 1) seconds on; the last: nine hours and more."""
PRIOR_WEIGHT = 8.0
"""Uses after which a kind counts as much as the kind above it."""
HALF_LIFE = 16_384
"""Uses after which what was counted weighs half."""
RECKON_EVERY = 64
"""Uses between two reckonings of the worths, while there are many."""
NEW_SHARE = 16
"""A kind is reckoned again when the new uses are a 16th of those known."""

BIN_START_S = [0.0] + [2.0 ** (b - 1) for b in range(1, NUM_BINS)]
BIN_WIDTH_S = [1.0, *BIN_START_S[1:]]


def age_bin(age_s: float) -> int:
    """Return the bin of an age."""
    return min(max(frexp(age_s)[1], 0), NUM_BINS - 1)


class ReuseKind:
    """What has been learned about one kind. `worth[b]`: of a prefix of this kind at an age in bin b, per second.

    num_uses[b]: uses that are as old as bin b, followed by another one since or not. num_reuses[b]: next uses that came
    in bin b.
    """

    __slots__ = (
        "_aging",
        "_new_since_s",
        "_num_new",
        "_num_rounds",
        "num_reuses",
        "num_uses",
        "parent",
        "shares",
        "worth",
    )

    def __init__(self, parent: ReuseKind | None) -> None:
        self.parent = parent
        self.num_uses = [0.0] * NUM_BINS
        self.num_reuses = [0.0] * NUM_BINS
        self.shares: list[float] = list(parent.shares) if parent else [0.0] * NUM_BINS
        """Of all uses, those that are followed by the next in bin b."""
        self.worth: list[float] = list(parent.worth) if parent else [0.0] * NUM_BINS
        self._aging: list[deque[list[float]]] = [deque() for _ in range(NUM_BINS - 1)]
        """Uses in bin b as [time, number], the oldest first; none leaves the last bin."""
        self._num_new = 0
        self._new_since_s = 0.0
        """Uses since the last reckoning, and the time of the first of them."""
        self._num_rounds = 0

    def add_use(self, now_s: float) -> None:
        """Count one use."""
        if not self._num_new:
            self._new_since_s = now_s
        self._num_new += 1

    def _enter(self, b: int, time_s: float, num_uses: float) -> None:
        """Count uses in bin b. Memory is bounded: uses whose ages differ by less than an eighth become one entry."""
        self.num_uses[b] += num_uses
        if b + 1 < NUM_BINS:
            aging = self._aging[b]
            if aging and time_s - aging[-1][0] <= BIN_START_S[b + 1] / 8:
                aging[-1][1] += num_uses
            else:
                aging.append([time_s, num_uses])

    def reckon(self, now_s: float, num_rounds: int) -> None:
        """Let uses age, then reckon the worths, if there is enough new to reckon from. The parent comes first.

        Cost: O(NUM_BINS).
        """
        if self._num_new * NEW_SHARE <= self.num_uses[0]:
            return
        self._enter(0, self._new_since_s, self._num_new)
        self._num_new = 0
        for b, aging in enumerate(self._aging):
            while aging and aging[0][0] + BIN_START_S[b + 1] <= now_s:
                self._enter(b + 1, *aging.popleft())
        expected = self.parent.shares if self.parent else [0.0] * NUM_BINS
        self.shares = [
            (reuses + PRIOR_WEIGHT * prior) / (uses + PRIOR_WEIGHT)
            for reuses, uses, prior in zip(self.num_reuses, self.num_uses, expected, strict=True)
        ]
        decay = 0.5 ** ((num_rounds - self._num_rounds) / HALF_LIFE)
        self._num_rounds = num_rounds
        self.num_uses = [num * decay for num in self.num_uses]
        self.num_reuses = [num * decay for num in self.num_reuses]
        self.worth = gittins(self.shares)


def gittins(shares: list[float]) -> list[float]:
    """Return the index at the start of each bin, given which share of all uses is followed by the next in each.

    Let one point per bin's end be (expected time held so far, share reused so far): the index is the steepest slope
    from a bin's start to any later point, which leads along their upper hull. Cost: O(bins).
    """
    points = [(0.0, 0.0)]
    held_s = reused = 0.0
    waiting = 1.0
    for share, width_s in zip(shares, BIN_WIDTH_S, strict=True):
        still = max(waiting - share, 0.001)
        held_s += (waiting + still) / 2 * width_s
        reused += share
        waiting = still
        points.append((held_s, reused))
    hull = [(*points.pop(), -1.0)]  # with the slope from each point to the next, below all where there is none
    worth = []
    for held_s, reused in reversed(points):
        later_s, later, next_slope = hull[-1]
        slope = (later - reused) / (later_s - held_s)
        while slope <= next_slope:
            hull.pop()
            later_s, later, next_slope = hull[-1]
            slope = (later - reused) / (later_s - held_s)
        worth.append(slope)
        hull.append((held_s, reused, slope))
    worth.reverse()
    return worth


class Reuse:
    """All kinds. Cost: counting O(parts of a kind); `reckon` O(kinds), which spread over uses is a few microseconds."""

    def __init__(self) -> None:
        self.kinds: dict[Kind, ReuseKind] = {(): ReuseKind(None)}
        self._num_rounds = 0
        self._next_reckoning = 1

    def of(self, kind: Kind) -> ReuseKind:
        """Return what is known of a kind; of a new one, what is known of the one above it."""
        found = self.kinds.get(kind)
        if found is None:
            found = self.kinds[kind] = ReuseKind(self.of(kind[:-1]))
        return found

    def count_use(self, kind: Kind, now_s: float) -> None:
        """A prefix is of this kind from now on."""
        counted: ReuseKind | None = self.of(kind)
        while counted is not None:
            counted.add_use(now_s)
            counted = counted.parent

    def count_reuse(self, kind: Kind, age_s: float) -> None:
        """A prefix of this kind has been used again at this age, cached or not."""
        b = age_bin(age_s)
        counted: ReuseKind | None = self.of(kind)
        while counted is not None:
            counted.num_reuses[b] += 1.0
            counted = counted.parent

    def reckon(self, now_s: float) -> bool:
        """Count one round, and now and then reckon all worths. Returns whether they changed."""
        self._num_rounds += 1
        if self._num_rounds < self._next_reckoning:
            return False
        self._next_reckoning += min(self._num_rounds, RECKON_EVERY)
        for kind in sorted(self.kinds, key=len):
            self.kinds[kind].reckon(now_s, self._num_rounds)
        return True
