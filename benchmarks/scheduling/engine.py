"""The orders in the whole engine, on the virtual executor: hit rate, and how long first tokens take."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anaphora import KVCacheManager
from anaphora.engine.cost_model import HardwareProfile
from anaphora.engine.loop import Engine
from anaphora.engine.replay import Arrival, replay
from anaphora.engine.request import Request, SamplingParams
from anaphora.engine.virtual import VirtualClock, VirtualExecutor
from anaphora.model.shape import ModelShape

if TYPE_CHECKING:
    from anaphora.engine.order import QueueOrderChoice

SHAPE = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 5e5, 1e-5)
PROFILE = HardwareProfile("a large GPU, by its data sheet, at 40 %", 5e-6, 2e12, 3e14, 1.5e14, 2e12)
NUM_GROUPS, ROOM = 16, 9
NUM_SHARED, NUM_OWN, NUM_OUTPUT = 8000, 200, 50
MAX_NUM_SEQS = 16
NUM_BLOCKS = (ROOM * NUM_SHARED + MAX_NUM_SEQS * (NUM_OWN + NUM_OUTPUT + 16)) // 16


@dataclass(frozen=True, slots=True)
class EngineResult:
    """Of one order. TTFTs in seconds, ascending; duration in virtual seconds."""

    hit_rate: float
    ttft_s: list[float]
    duration_s: float

    def ttft(self, share: float) -> float:
        """The TTFT that a share of the requests stays within."""
        return self.ttft_s[min(len(self.ttft_s) - 1, int(share * len(self.ttft_s)))]


def arrivals(num_requests: int, rate_per_s: float) -> list[Arrival]:
    """Requests of 16 groups at random, at random (Poisson) times."""
    rng = random.Random(0)

    def tokens(num: int) -> bytes:
        return array("i", (rng.randrange(100_000) for _ in range(num))).tobytes()

    shared = [tokens(NUM_SHARED) for _ in range(NUM_GROUPS)]
    sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True)
    made, time_s = [], 0.0
    for name in range(num_requests):
        time_s += rng.expovariate(rate_per_s)
        made.append(Arrival(time_s, Request(str(name), rng.choice(shared) + tokens(NUM_OWN), sampling)))
    return made


def run(order: QueueOrderChoice, made: list[Arrival]) -> EngineResult:
    """Serve them all."""
    clock = VirtualClock()
    engine = Engine(
        VirtualExecutor(SHAPE, PROFILE, clock),
        KVCacheManager(NUM_BLOCKS, 16),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=2048,
        clock=clock,
        queue_order=order,
    )
    records = replay(engine, clock, made)
    stats = engine.stats()
    return EngineResult(stats.cached_tokens / stats.prompt_tokens, sorted(record.ttft_s for record in records), clock())
