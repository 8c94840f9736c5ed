"""A trace through whole engines on virtual clocks: the queue, the scheduler and the cache are the engine's own code; a
cost model stands in for the model. So what it tells of time is as good as the cost model, and what it tells of cached
tokens is what the engine would report for these arrivals."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal
from zlib import crc32

import numpy as np

from anaphora.cache import KVCacheManager
from anaphora.engine.loop import Engine
from anaphora.engine.replay import Arrival, Served, replay
from anaphora.engine.request import Request, SamplingParams
from anaphora.engine.virtual import VirtualClock, VirtualExecutor, scripted_sampler
from anaphora.lab.charts import draw_distribution
from anaphora.lab.page import Table, percent
from anaphora.tokens import MAX_TOKEN_ID

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.cache.options import IndexKind
    from anaphora.engine.cost_model import HardwareProfile
    from anaphora.lab.trace import Prompt, Trace
    from anaphora.model.shape import ModelShape

QueueOrderName = Literal["fcfs", "lpm", "dfs", "fair"]


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """One run. capacity_blocks: of each replica. host_blocks: of each, for what it evicts.

    has_cache: False computes every prompt anew.
    speed: arrivals come so many times sooner than in the trace; None: all at once.
    routing: round-robin or session, which do not depend on what the replicas hold.
    """

    capacity_blocks: int
    policy: str = "lru"
    replicas: int = 1
    block_size: int = 16
    routing: str = "round-robin"
    index: IndexKind = "radix"
    queue_order: QueueOrderName = "fcfs"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    speed: float | None = 1.0
    has_cache: bool = True
    host_blocks: int = 0


@dataclass(frozen=True, slots=True)
class EngineOutcome:
    """What a run tells. Times in virtual seconds. num_refused: prompts that do not fit a replica's memory.
    host_cached_tokens: of the cached ones those that came back from host memory."""

    setting: EngineSetting
    num_requests: int
    num_refused: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    duration_s: float
    ttft_s: list[float]
    host_cached_tokens: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Cached tokens over prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def output_tokens_per_s(self) -> float | None:
        """Tokens generated a second, over the whole run and all replicas."""
        return self.output_tokens / self.duration_s if self.duration_s else None

    def ttft_quantile(self, share: float) -> float | None:
        """The time to first token that this share of requests stays within."""
        if not self.ttft_s:
            return None
        return sorted(self.ttft_s)[min(len(self.ttft_s) - 1, int(share * len(self.ttft_s)))]

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON; of the times to first token only quantiles."""
        values = asdict(self)
        del values["ttft_s"]
        quantiles = {f"p{round(100 * q)}": self.ttft_quantile(q) for q in (0.5, 0.9, 0.99)}
        return values | {
            "hit_rate": self.hit_rate,
            "cached_tokens_by_tier": {
                "device": self.cached_tokens - self.host_cached_tokens,
                "host": self.host_cached_tokens,
            },
            "output_tokens_per_s": self.output_tokens_per_s,
            "ttft_s": quantiles,
        }


def run_engines(trace: Trace, setting: EngineSetting, shape: ModelShape, profile: HardwareProfile) -> EngineOutcome:
    """Run a trace. Replicas do not hear of one another, so each runs on a clock of its own. Cost: real engine steps,
    some 20 us a generated token."""
    longest = max(p.num_tokens + max(1, p.num_output_tokens) for p in trace.prompts)
    shape = replace(shape, max_context=longest + 1)
    dealt: list[list[tuple[int, Prompt]]] = [[] for _ in range(setting.replicas)]
    num_refused = 0
    for number, prompt in enumerate(trace.prompts):
        if -(-(prompt.num_tokens + max(1, prompt.num_output_tokens)) // setting.block_size) > setting.capacity_blocks:
            num_refused += 1
            continue
        is_sticky = setting.routing == "session" and prompt.session is not None
        key = crc32((prompt.session or "").encode("utf-8", "replace")) if is_sticky else number
        dealt[key % setting.replicas].append((number, prompt))
    served: list[Served] = []
    preemptions = host_cached_tokens = 0
    duration = 0.0
    for prompts in dealt:
        clock = VirtualClock()
        manager = KVCacheManager(
            setting.capacity_blocks,
            setting.block_size,
            index=setting.index,
            eviction=setting.policy,
            host_blocks=setting.host_blocks,
            clock=clock,
        )
        executor = VirtualExecutor(shape, profile, clock)
        # A trace's ids are names, not words: any int32 will do. Nobody looks at the logits.
        executor.vocab_size = MAX_TOKEN_ID
        engine = Engine(
            executor,
            manager,
            clock=clock,
            new_sampler=scripted_sampler({}),
            queue_order=setting.queue_order,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
        )
        served += replay(engine, clock, [_arrival(n, p, trace.unit, setting) for n, p in prompts])
        preemptions += engine.stats().num_preemptions
        host_cached_tokens += engine.stats().host_cached_tokens
        duration = max(duration, clock())
    return EngineOutcome(
        setting,
        len(served),
        num_refused,
        sum(each.num_prompt_tokens for each in served),
        sum(each.num_cached_tokens for each in served),
        sum(each.num_output_tokens for each in served),
        preemptions,
        duration,
        [each.ttft_s for each in served],
        host_cached_tokens,
    )


def _arrival(number: int, prompt: Prompt, unit: int, setting: EngineSetting) -> Arrival:
    request = Request(
        str(number),
        tokens_of(prompt, unit),
        SamplingParams(max_tokens=max(1, prompt.num_output_tokens), temperature=0.0, ignore_eos=True),
        prompt.namespace,
        read_cache=setting.has_cache,
        write_cache=setting.has_cache,
    )
    return Arrival(0.0 if setting.speed is None else prompt.time_s / setting.speed, request)


def tokens_of(prompt: Prompt, unit: int) -> bytes:
    """A prompt's tokens, one by one: a unit is spelled out as that many ids of its own.

    Raises ValueError: the ids do not fit int32.
    """
    ids = np.frombuffer(prompt.units, np.int32)
    if prompt.tail is not None:
        ids = np.append(ids, np.int32(prompt.tail))
    if unit == 1:
        return ids.tobytes()
    if len(ids) and int(ids.max()) > np.iinfo(np.int32).max // unit - 1:
        raise ValueError("more distinct tokens than int32 has ids")
    # From 1 up: 0 is what a virtual model says.
    spelled = ids[:, None] * np.int32(unit) + np.arange(1, unit + 1, dtype=np.int32)
    return spelled.ravel()[: prompt.num_tokens].astype(np.int32).tobytes()


def engine_table(outcomes: Sequence[EngineOutcome]) -> Table:
    """A row for each run; with host memory in one of them, its size and how much came from there."""
    has_host = any(outcome.setting.host_blocks for outcome in outcomes)
    header = ["policy", "order", "replicas", "blocks a replica", *(["host blocks"] if has_host else []), "hit rate",
              *(["from host"] if has_host else []), "TTFT p50 s", "p90 s", "p99 s", "output tokens/s", "preemptions",
              "refused"]  # fmt: skip
    rows = []
    for outcome in outcomes:
        s = outcome.setting
        times = [outcome.ttft_quantile(share) for share in (0.5, 0.9, 0.99)]
        rate = outcome.output_tokens_per_s
        from_host = outcome.host_cached_tokens / outcome.prompt_tokens if outcome.prompt_tokens else None
        rows.append(
            [
                s.policy if s.has_cache else "no cache",
                s.queue_order,
                f"{s.replicas}",
                f"{s.capacity_blocks:,}",
                *([f"{s.host_blocks:,}"] if has_host else []),
                percent(outcome.hit_rate),
                *([percent(from_host)] if has_host else []),
                *("unknown" if time_s is None else f"{time_s:,.3f}" for time_s in times),
                "unknown" if rate is None else f"{rate:,.0f}",
                f"{outcome.preemptions:,}",
                f"{outcome.num_refused:,}",
            ]
        )
    return Table(header, rows)


def _name(setting: EngineSetting) -> str:
    if not setting.has_cache:
        return "no cache"
    host = f", {setting.host_blocks:,} host" if setting.host_blocks else ""
    return f"{setting.capacity_blocks:,} {setting.policy}{host}"


def ttft_picture(outcomes: Sequence[EngineOutcome]) -> str | None:
    """The share of requests whose first token came within a time, a line for each run."""
    samples = {_name(o.setting): o.ttft_s for o in outcomes}
    return draw_distribution("time to first token", samples, "seconds; share of requests served within")
