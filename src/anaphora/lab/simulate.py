"""Simulate: what a trace would find in caches of other sizes, policies, block sizes, replicas."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from anaphora.lab.charts import Panel, draw
from anaphora.lab.optimum import Optimum
from anaphora.lab.page import Table, percent
from anaphora.lab.progress import ProgressBar
from anaphora.lab.replay import CacheReplay, Counting, Counts, Fleet, Routing, count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anaphora.cache.options import IndexKind
    from anaphora.lab.replay import Cache
    from anaphora.lab.trace import Prompt, Trace

OPTIMUM = "optimum"
"""A policy that knows the future; it takes the place of an eviction policy for one replica."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One run. capacity_blocks: of each replica; None: never evicts. host_blocks: of each, for what it evicts."""

    capacity_blocks: int | None = None
    policy: str = "lru"
    replicas: int = 1
    block_size: int = 16
    routing: Routing = "round-robin"
    index: IndexKind = "radix"
    counting: Counting = "engine"
    measure_after: float = 0.0
    host_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run found. Rates are None where nothing was asked. host_cached_tokens: of the cached ones those that were
    in host memory. balance: most work of a replica over the average."""

    setting: Setting
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    blocks: int
    cached_blocks: int
    evicted_blocks: int | None
    balance: float | None
    host_cached_tokens: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Cached tokens over prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def block_hit_rate(self) -> float | None:
        """Cached blocks over blocks."""
        return self.cached_blocks / self.blocks if self.blocks else None

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        values: dict[str, object] = asdict(self)
        by_tier = {"device": self.cached_tokens - self.host_cached_tokens, "host": self.host_cached_tokens}
        rates = {"hit_rate": self.hit_rate, "block_hit_rate": self.block_hit_rate}
        return values | rates | {"cached_tokens_by_tier": by_tier}


def settings_of(
    capacities: Sequence[int | None],
    policies: Sequence[str],
    replicas: Sequence[int],
    common: Setting,
    host_capacities: Sequence[int] = (0,),
) -> list[Setting]:
    """Every combination. A cache that never evicts needs no policy and no host memory, and runs once."""
    found = []
    for capacity, host, policy, num in product(capacities, host_capacities, policies, replicas):
        if capacity is None and (policy != policies[0] or host != host_capacities[0]):
            continue
        if policy == OPTIMUM and (num > 1 or capacity is None or host):
            continue
        host_blocks = 0 if capacity is None else host
        found.append(replace(common, capacity_blocks=capacity, policy=policy, replicas=num, host_blocks=host_blocks))
    return found


def run(trace: Trace, setting: Setting) -> Outcome:
    """One run of a trace. Cost: about 30 us a request, and as much memory as the distinct prompts."""
    per_replica = setting.capacity_blocks or max(1, trace.num_blocks(setting.block_size))
    fleet: Fleet | None = None
    cache: Cache
    if setting.policy == OPTIMUM and setting.capacity_blocks is not None:
        cache = Optimum(trace.prompts, per_replica, setting.block_size, trace.unit, setting.counting)
    else:
        cache = fleet = _fleet(setting, per_replica, trace.unit)
    counts = count(
        trace.prompts, cache, setting.block_size, counting=setting.counting, measure_after=setting.measure_after
    )
    return _outcome(setting, counts, fleet)


def run_stream(trace: Trace, prompts: Iterable[Prompt], settings: Sequence[Setting]) -> list[Outcome]:
    """All runs at once over prompts that come one by one: memory is that of the caches.

    trace: what the prompts' reader fills, `unit` before the first of them is given. Raises ValueError: a setting
    without a bound, with the optimum, or with `measure_after`, which need to know the whole trace beforehand.
    """
    for setting in settings:
        if setting.capacity_blocks is None or setting.policy == OPTIMUM or setting.measure_after:
            raise ValueError("--stream: needs --capacity with a bound; not with --policy optimum or --measure-after")
    fleets: list[Fleet] = []
    counted = [Counts() for _ in settings]
    for prompt in prompts:
        if not fleets:
            fleets = [_fleet(setting, setting.capacity_blocks or 0, trace.unit) for setting in settings]
        for setting, fleet, counts in zip(settings, fleets, counted, strict=True):
            num_cached = fleet.serve(prompt)
            counts.add(prompt, num_cached, setting.block_size, setting.counting, fleet.last_host_tokens)
    if not fleets:
        return []
    return [_outcome(*each) for each in zip(settings, counted, fleets, strict=True)]


def _fleet(setting: Setting, per_replica: int, unit: int) -> Fleet:
    policy = "lru" if setting.policy == OPTIMUM else setting.policy
    replicas = [
        CacheReplay(
            per_replica,
            setting.block_size,
            unit,
            index=setting.index,
            eviction=policy,
            counting=setting.counting,
            host_blocks=setting.host_blocks,
        )
        for _ in range(setting.replicas)
    ]
    return Fleet(replicas, setting.routing)


def _outcome(setting: Setting, counts: Counts, fleet: Fleet | None) -> Outcome:
    return Outcome(
        setting,
        counts.num_requests,
        counts.num_tokens,
        counts.num_cached_tokens,
        counts.num_blocks,
        counts.num_cached_blocks,
        None if fleet is None else sum(replica.manager.stats().evicted_blocks for replica in fleet.replicas),
        fleet.balance if fleet is not None and setting.replicas > 1 else None,
        counts.num_host_tokens,
    )


def sweep(trace: Trace, settings: Sequence[Setting], jobs: int = 1) -> list[Outcome]:
    """All runs, `jobs` at a time in processes of their own; in the order of the settings, with a bar on a terminal."""
    with ProgressBar(len(settings), "simulating") as bar:
        if jobs == 1 or len(settings) == 1:
            outcomes = []
            for setting in settings:
                outcomes.append(run(trace, setting))
                bar.advance()
            return outcomes
        # Here, so that a single run need not load them.
        import multiprocessing  # noqa: PLC0415
        from concurrent.futures import ProcessPoolExecutor, as_completed  # noqa: PLC0415

        found: dict[int, Outcome] = {}
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_take, initargs=(trace,)) as pool:
            futures = {pool.submit(_run_taken, setting): number for number, setting in enumerate(settings)}
            for future in as_completed(futures):
                found[futures[future]] = future.result()
                bar.advance()
    return [found[number] for number in range(len(settings))]


_taken: list[Trace] = []


def _take(trace: Trace) -> None:
    _taken[:] = [trace]


def _run_taken(setting: Setting) -> Outcome:
    return run(_taken[0], setting)


def table(outcomes: Sequence[Outcome], bytes_per_token: int | None = None) -> Table:
    """A row for each run; with host memory in one of them, its size and what came from there."""
    has_host = any(outcome.setting.host_blocks for outcome in outcomes)
    header = [
        "policy",
        "replicas",
        "blocks a replica",
        "tokens a replica",
        *(["GiB a replica"] if bytes_per_token else []),
        *(["host blocks"] if has_host else []),
    ]
    rows = []
    for outcome in outcomes:
        setting = outcome.setting
        blocks = setting.capacity_blocks
        tokens = None if blocks is None else blocks * setting.block_size
        sizes = ["unbounded", "unbounded"] if tokens is None else [f"{blocks:,}", f"{tokens:,}"]
        if bytes_per_token:
            sizes.append("unbounded" if tokens is None else f"{tokens * bytes_per_token / 2**30:,.2f}")
        if has_host:
            sizes.append(f"{setting.host_blocks:,}")
        rows.append(
            [
                "-" if blocks is None else setting.policy,
                f"{setting.replicas}",
                *sizes,
                f"{outcome.cached_tokens:,}",
                *([f"{outcome.host_cached_tokens:,}"] if has_host else []),
                f"{outcome.prompt_tokens:,}",
                percent(outcome.hit_rate),
                percent(outcome.block_hit_rate),
            ]
        )
    from_host = ["from host"] if has_host else []
    return Table([*header, "cached tokens", *from_host, "prompt tokens", "hit rate", "in blocks"], rows)


def _name(setting: Setting) -> str:
    return f"{setting.policy}, {setting.host_blocks:,} host" if setting.host_blocks else setting.policy


def pictures(outcomes: Sequence[Outcome], bytes_per_token: int | None = None) -> dict[str, str]:
    """SVGs by name: hit rate against memory (a line for each policy), against replicas (a line for each capacity)."""
    found: dict[str, str] = {}
    single = [o for o in outcomes if o.setting.replicas == outcomes[0].setting.replicas and o.setting.capacity_blocks]
    xs = sorted({o.setting.capacity_blocks for o in single if o.setting.capacity_blocks is not None})
    if xs:
        by_policy: dict[str, dict[int, float]] = {}
        for outcome in single:
            capacity = outcome.setting.capacity_blocks or 0
            by_policy.setdefault(_name(outcome.setting), {})[capacity] = outcome.hit_rate or 0.0
        block_size = outcomes[0].setting.block_size
        if bytes_per_token:
            scale, label = block_size * bytes_per_token / 2**30, "GiB of KV a replica; share of prompt tokens cached"
        else:
            scale, label = block_size, "tokens of KV a replica; share of prompt tokens cached"
        lines = {name: [row[x] for x in xs] for name, row in by_policy.items() if len(row) == len(xs)}
        if lines:
            found["memory"] = draw([Panel("hit rate against memory", [x * scale for x in xs], lines, label)])
    numbers = sorted({o.setting.replicas for o in outcomes})
    if len(numbers) > 1:
        by_capacity: dict[str, dict[int, float]] = {}
        for outcome in outcomes:
            setting = outcome.setting
            if setting.policy == OPTIMUM:
                continue
            blocks = setting.capacity_blocks
            name = "unbounded" if blocks is None else f"{blocks:,} {_name(setting)}"
            by_capacity.setdefault(name, {})[setting.replicas] = outcome.hit_rate or 0.0
        lines = {name: [row[n] for n in numbers] for name, row in by_capacity.items() if len(row) == len(numbers)}
        label = f"replicas, {outcomes[0].setting.routing}; share of prompt tokens cached"
        found["replicas"] = draw([Panel("hit rate against replicas", numbers, lines, label)])
    return found
