"""The chain of effects: more of the prompts cached -> more requests fit at once -> more tokens a second, and the first
token sooner; and where it stops, when generating takes the time and not the prompts.

Traffic whose prompts share a known part goes through the engine, all of it at once, on the same memory: through the
virtual engine, and through a real one beside it. Only the shared part changes from point to point.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Literal

from anaphora.cache import KVCacheManager
from anaphora.engine.loop import Engine
from anaphora.engine.replay import Arrival, WallClock, replay
from anaphora.engine.request import Request, SamplingParams
from anaphora.engine.virtual import VirtualClock, VirtualExecutor
from anaphora.lab.charts import Curves, draw
from anaphora.lab.page import Table, percent
from anaphora.tokens import pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.engine.cost_model import HardwareProfile
    from anaphora.engine.executor import Executor
    from anaphora.engine.replay import Clock
    from anaphora.model.shape import ModelShape

Machine = Literal["simulated", "real"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests that come all at once. name: what takes their time. Lengths in tokens."""

    name: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int

    def arrivals(self, shared: float, vocab_size: int, seed: int = 0) -> list[Arrival]:
        """The requests: this share of each prompt, from its beginning, is the same in all of them. The first one comes
        before the others, so that they find its part.
        """
        rng = random.Random(seed)

        def fresh(num_tokens: int) -> bytes:
            return pack([rng.randrange(vocab_size) for _ in range(num_tokens)])

        num_shared = round(shared * self.prompt_tokens)
        prefix = fresh(num_shared)
        sampling = SamplingParams(max_tokens=self.output_tokens, temperature=0.0, ignore_eos=True)
        return [
            Arrival(0.0, Request(f"{self.name}-{n}", prefix + fresh(self.prompt_tokens - num_shared), sampling))
            for n in range(self.num_requests + 1)
        ]


@dataclass(frozen=True, slots=True)
class Memory:
    """The KV pool and the limits of a step: the same at every point."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class Point:
    """One run. batch: requests that generate in a step, on average. TTFT: the median over the requests, seconds."""

    machine: Machine
    traffic: str
    shared: float
    hit_rate: float
    batch: float
    output_tokens_per_s: float
    ttft_s: float
    duration_s: float

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self)


def simulated(
    traffic: Traffic, shared: Sequence[float], memory: Memory, shape: ModelShape, profile: HardwareProfile
) -> list[Point]:
    """A point for each share, on a virtual clock. Raises RequestError: the pool does not hold one request."""
    shape = replace(shape, max_context=max(shape.max_context, traffic.prompt_tokens + traffic.output_tokens + 1))
    points = []
    for each in shared:
        clock = VirtualClock()
        points.append(_run("simulated", traffic, each, memory, VirtualExecutor(shape, profile, clock), clock))
    return points


def real(traffic: Traffic, shared: float, memory: Memory, executor: Executor) -> Point:
    """One point on a real executor, with pages for all of `memory`; what they held is overwritten."""
    return _run("real", traffic, shared, memory, executor, WallClock())


def _run(machine: Machine, traffic: Traffic, shared: float, memory: Memory, executor: Executor, clock: Clock) -> Point:
    engine = Engine(
        executor,
        KVCacheManager(memory.num_blocks, memory.block_size),
        clock=clock,
        max_num_seqs=memory.max_num_seqs,
        max_num_batched_tokens=memory.max_num_batched_tokens,
    )
    first, *rest = traffic.arrivals(shared, executor.vocab_size)
    replay(engine, clock, [first])
    num_steps_before = engine.stats().num_steps
    served = replay(engine, clock, rest)
    duration_s = max(each.finished_s for each in served)
    num_output = sum(each.num_output_tokens for each in served)
    return Point(
        machine,
        traffic.name,
        shared,
        sum(each.num_cached_tokens for each in served) / sum(each.num_prompt_tokens for each in served),
        num_output / (engine.stats().num_steps - num_steps_before),
        num_output / duration_s,
        median(each.ttft_s for each in served),
        duration_s,
    )


def table(points: Sequence[Point]) -> Table:
    """A row for each run; each effect also as times of the run of the same traffic with the lowest hit rate."""
    header = ["traffic", "engine", "hit rate", "batch", "", "output tokens/s", "", "TTFT p50 ms", ""]
    rows = []
    for point in points:
        first = _first(points, point)
        rows.append(
            [
                point.traffic,
                point.machine,
                percent(point.hit_rate),
                f"{point.batch:,.1f}",
                f"x {point.batch / first.batch:.2f}",
                f"{point.output_tokens_per_s:,.0f}",
                f"x {point.output_tokens_per_s / first.output_tokens_per_s:.2f}",
                f"{1000 * point.ttft_s:,.1f}",
                f"x {point.ttft_s / first.ttft_s:.2f}",
            ]
        )
    return Table(header, rows)


def sentences(points: Sequence[Point]) -> list[str]:
    """What the last point of each traffic brought over its first."""
    said = []
    for last in points:
        if any(p.shared > last.shared and (p.machine, p.traffic) == (last.machine, last.traffic) for p in points):
            continue
        first = _first(points, last)
        said.append(
            f"{last.traffic}, {last.machine}: from {percent(first.hit_rate)} to {percent(last.hit_rate)} cached, the "
            f"batch grows {last.batch / first.batch:.2f} times, throughput "
            f"{last.output_tokens_per_s / first.output_tokens_per_s - 1:+.0%}, the median first token comes after "
            f"{last.ttft_s / first.ttft_s:.0%} of the time."
        )
    return said


def _first(points: Sequence[Point], like: Point) -> Point:
    return min((p for p in points if (p.machine, p.traffic) == (like.machine, like.traffic)), key=lambda p: p.shared)


def picture(points: Sequence[Point]) -> str:
    """The chain from left to right, each effect over the hit rate, as times of what it is without reuse."""
    panels = []
    for title, attribute in (
        ("1. larger batch", "batch"),
        ("2. higher throughput", "output_tokens_per_s"),
        ("3. sooner first token", "ttft_s"),
    ):
        lines: dict[str, list[tuple[float, float]]] = {}
        for point in points:
            value = getattr(point, attribute) / getattr(_first(points, point), attribute)
            short = point.traffic.partition("-")[0]
            name = short if point.machine == "simulated" else f"{short}, {point.machine}"
            lines.setdefault(name, []).append((point.hit_rate, value))
        dashed = frozenset(name for name in lines if name.endswith(", real"))
        panels.append(Curves(title, lines, "hit rate; times of what it is without reuse", dashed))
    return draw(panels)
