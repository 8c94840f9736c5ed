"""`python -m benchmarks.scheduling.many [N]`: N requests (100,000) through the engine on the virtual executor."""

from __future__ import annotations

import random
import sys
import time
from array import array
from typing import TYPE_CHECKING

from anaphora import KVCacheManager
from anaphora.engine.loop import Engine
from anaphora.engine.replay import Arrival, replay
from anaphora.engine.request import Request, SamplingParams
from anaphora.engine.virtual import VirtualClock, VirtualExecutor, scripted_sampler

from .engine import PROFILE, SHAPE

if TYPE_CHECKING:
    from collections.abc import Iterator


def main(num_requests: int) -> None:
    """1,000 shared tokens of 50 kinds, 200 own, 50 out; 30 a second."""
    rng = random.Random(1)

    def tokens(num: int) -> bytes:
        return array("i", rng.choices(range(100_000), k=num)).tobytes()

    shared = [tokens(1000) for _ in range(50)]
    sampling = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)

    def arrivals() -> Iterator[Arrival]:
        time_s = 0.0
        for name in range(num_requests):
            time_s += rng.expovariate(30)
            yield Arrival(time_s, Request(str(name), rng.choice(shared) + tokens(200), sampling))

    clock = VirtualClock()
    engine = Engine(
        VirtualExecutor(SHAPE, PROFILE, clock),
        KVCacheManager(20_000, 16),
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        clock=clock,
        queue_order="fair",
        new_sampler=scripted_sampler({}),
    )
    started, began = time.perf_counter(), time.process_time()
    records = replay(engine, clock, arrivals())
    stats = engine.stats()
    print(
        f"{len(records):,} requests, {stats.output_tokens:,} output tokens, {stats.num_steps:,} steps: "
        f"{clock():,.0f} s of virtual time, {time.process_time() - began:,.0f} s of CPU, "
        f"{time.perf_counter() - started:,.0f} s by the wall; "
        f"{stats.cached_tokens / stats.prompt_tokens:.1%} of prompt tokens cached"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
