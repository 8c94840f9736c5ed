"""The experiments, for anything that orders a queue over a cache: ours and, in its own interpreter, SGLang's.

Requests are served one at a time and wholly, so that the order alone decides. Imports the standard library only.
"""

from __future__ import annotations

import random
import statistics
import time
from abc import ABC, abstractmethod
from array import array

BLOCK_SIZE = 16
NUM_SHARED, NUM_OWN = 800, 200
"""Tokens of a prompt that its group has in common, and that are its own."""
NUM_GROUPS, ROOM = 16, 9
"""Groups, and how many of their prefixes the cache holds beside one request."""
NUM_BLOCKS = ROOM * NUM_SHARED // BLOCK_SIZE + -(-(NUM_SHARED + NUM_OWN) // BLOCK_SIZE)


class Contestant(ABC):
    """A queue in some order, over an empty cache of `num_blocks` blocks of BLOCK_SIZE tokens."""

    @abstractmethod
    def push(self, name: int, tokens: bytes) -> None:
        """A request arrives: packed int32 ids."""

    @abstractmethod
    def serve(self) -> tuple[int, int]:
        """Put the queue in order and serve who is first, to its end; return its name and how many tokens were hits."""

    def order(self) -> None:  # noqa: B027
        """Put the queue in order; for those that do so apart from serving."""


class Prompts:
    """Prompts of groups, each with a tail that nobody shares."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._shared: dict[int, bytes] = {}

    def of(self, group: int) -> bytes:
        """Return a new prompt of a group."""
        shared = self._shared.setdefault(group, self._tokens(NUM_SHARED))
        return shared + self._tokens(NUM_OWN)

    def _tokens(self, num: int) -> bytes:
        return array("i", (self._rng.randrange(30_000) for _ in range(num))).tobytes()


def burst(contestant: Contestant, per_group: int = 20) -> float:
    """16 groups round-robin, all there at once, room for 9: the hit rate. The best possible: each prefix once."""
    prompts = Prompts()
    total = NUM_GROUPS * per_group
    for name in range(total):
        contestant.push(name, prompts.of(name % NUM_GROUPS))
    return sum(contestant.serve()[1] for _ in range(total)) / (total * (NUM_SHARED + NUM_OWN))


def best_burst(per_group: int = 20) -> float:
    """The hit rate that no order can exceed in `burst`."""
    return (per_group - 1) / per_group * NUM_SHARED / (NUM_SHARED + NUM_OWN)


def backlog(contestant: Contestant, num_waiting: int = 512, num_served: int = 600) -> float:
    """Groups at random, for each that is served another arrives: the hit rate."""
    prompts, rng = Prompts(), random.Random(1)
    for name in range(num_waiting):
        contestant.push(name, prompts.of(rng.randrange(NUM_GROUPS)))
    num_hits = 0
    for name in range(num_waiting, num_waiting + num_served):
        num_hits += contestant.serve()[1]
        contestant.push(name, prompts.of(rng.randrange(NUM_GROUPS)))
    return num_hits / (num_served * (NUM_SHARED + NUM_OWN))


def starvation(contestant: Contestant, hot_per_pass: int = 4, max_passes: int = 2000) -> int | None:
    """Hot requests keep arriving as fast as they are served; one cold request comes. After how many passes, of
    `hot_per_pass` served each, is it served? None if not within `max_passes`."""
    prompts = Prompts()
    name = 0
    for _ in range(8 * hot_per_pass):
        contestant.push(name, prompts.of(0))
        name += 1
    contestant.serve()
    cold = name
    contestant.push(cold, prompts.of(1))
    for num_passes in range(max_passes):
        for _ in range(hot_per_pass):
            name += 1
            contestant.push(name, prompts.of(0))
        for _ in range(hot_per_pass):
            if contestant.serve()[0] == cold:
                return num_passes
    return None


def pass_time_us(contestant: Contestant, num_waiting: int, num_passes: int) -> float:
    """Median microseconds of CPU that a pass spends on the queue: four arrive, all are in order, four leave."""
    prompts = Prompts()
    num_groups = max(NUM_GROUPS, num_waiting // 20)
    for name in range(num_waiting):
        contestant.push(name, prompts.of(name % num_groups))
    times = []
    name = num_waiting
    for _ in range(num_passes):
        arriving = [prompts.of((name + i) % num_groups) for i in range(4)]
        started = time.process_time()
        for tokens in arriving:
            contestant.push(name, tokens)
            name += 1
        contestant.order()
        pushed = time.process_time() - started
        served = _serve_timed(contestant)
        times.append(pushed + served)
    return 1e6 * statistics.median(times)


def _serve_timed(contestant: Contestant) -> float:
    before = getattr(contestant, "order_s", 0.0)
    for _ in range(4):
        contestant.serve()
    return float(getattr(contestant, "order_s", 0.0) - before)
