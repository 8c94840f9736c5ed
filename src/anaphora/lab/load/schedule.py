"""When requests are due: as the trace has it, at a rate, or at once."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.lab.trace import Prompt


def due_times(
    prompts: Sequence[Prompt], *, speed: float = 1.0, rate: float | None = None, at_once: bool = False, seed: int = 0
) -> list[float]:
    """Seconds from the start at which each request is due, in order.

    speed: the trace's own times, so many times as fast; without times in the trace all are due at once.
    rate: instead, Poisson arrivals of so many a second on average, by `seed`. at_once: all at 0.
    """
    if at_once or not prompts:
        return [0.0] * len(prompts)
    if rate is not None:
        rng = random.Random(seed)
        times, time_s = [], 0.0
        for _ in prompts:
            times.append(time_s)
            time_s += rng.expovariate(rate)
        return times
    first = prompts[0].time_s
    return [(prompt.time_s - first) / speed for prompt in prompts]
