"""`python -m benchmarks.scheduling.groups [--real]`: what it is worth to keep sequences with one prefix together.

Requests of several groups wait in random order. Measured is how long it takes to serve all of them, how many read their
prefix together, and how long the last one waits: with no overtakes, and with the default. Every prefix has room, so it
is not a matter of hits. On the virtual executor (a large GPU and a model of 8 billion weights), or on the real one with
the default model, in CPU seconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from typing import TYPE_CHECKING

from anaphora import KVCacheManager
from anaphora.engine.build import choose_block_size
from anaphora.engine.loop import Engine
from anaphora.engine.request import Request, SamplingParams
from anaphora.engine.virtual import VirtualClock, VirtualExecutor

from .engine import PROFILE, SHAPE

if TYPE_CHECKING:
    from collections.abc import Callable

    from anaphora.engine.executor import Executor


def measure(
    executor: Executor,
    clock: Callable[[], float],
    max_overtakes: int,
    *,
    num_groups: int,
    num_shared: int,
    num_output: int,
    num_requests: int,
    max_num_seqs: int,
) -> tuple[float, float, float, float]:
    """Return seconds for all, sequences a group in a step, milliseconds a step, and seconds of the longest wait."""
    rng = random.Random(0)

    def tokens(num: int) -> bytes:
        return array("i", (rng.randrange(1_000, 40_000) for _ in range(num))).tobytes()

    block_size = choose_block_size(executor)
    num_own = 20
    num_tokens = num_groups * num_shared + (max_num_seqs + num_requests) * (num_own + num_output)
    engine = Engine(
        executor,
        KVCacheManager(num_tokens // block_size + 2 * max_num_seqs, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2048,
        max_group_overtakes=max_overtakes,
        clock=clock,
    )
    prefixes = [tokens(num_shared) for _ in range(num_groups)]
    for i, prefix in enumerate(prefixes):
        engine.submit(Request(f"warm {i}", prefix + tokens(1), SamplingParams(max_tokens=1)))
        while engine.has_work:
            engine.step()
    for i in range(num_requests):
        num = num_output // 2 + rng.randrange(num_output)  # so that they do not all end at once
        sampling = SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True)
        engine.submit(Request(str(i), rng.choice(prefixes) + tokens(num_own), sampling))
    began, num_steps = clock(), 0
    sizes: list[int] = []
    first_s: dict[str, float] = {}
    while engine.has_work:
        deltas = engine.step()
        num_steps += 1
        first_s |= {delta.request_id: clock() - began for delta in deltas if delta.num_output_tokens == 1}
        heads = [live.request.prompt[:1024] for live, _, _ in engine.last_batch]
        sizes += [heads.count(head) for head in set(heads)]
    seconds = clock() - began
    return seconds, statistics.mean(sizes), 1000 * seconds / num_steps, max(first_s.values())


def main() -> None:
    """Print one line for each bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true", help="the default model on this machine")
    is_real = parser.parse_args().real
    print("overtakes   all done s   members a group   ms a step   longest wait s")
    for max_overtakes in (0, 16):
        if is_real:
            from anaphora.engine.native import NativeExecutor
            from anaphora.model import load_model

            model = load_model(None)
            figures = measure(
                NativeExecutor(model.shape, model.weights), time.process_time, max_overtakes,
                num_groups=4, num_shared=1500, num_output=32, num_requests=40, max_num_seqs=8,
            )  # fmt: skip
        else:
            clock = VirtualClock()
            figures = measure(
                VirtualExecutor(SHAPE, PROFILE, clock), clock, max_overtakes,
                num_groups=16, num_shared=8000, num_output=200, num_requests=512, max_num_seqs=32,
            )  # fmt: skip
        print("{:9}   {:10.1f}   {:15.2f}   {:9.2f}   {:14.1f}".format(max_overtakes, *figures))


if __name__ == "__main__":
    main()
