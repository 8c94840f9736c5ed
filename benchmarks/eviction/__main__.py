"""``python -m benchmarks.eviction TRACE.jsonl... [--real] [--generated] [--policies ...] [--plot OUT.svg]``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from anaphora.lab.charts import Panel, draw

from .generated import WORKLOADS, generate
from .real import REAL_POLICIES, RealCache
from .reference_policies import POLICIES
from .simulator import Cache, ReferenceCache, hit_rate
from .trace import Trace, read_trace

TRACE_CAPACITIES = (1_000, 3_000, 10_000, 30_000, 50_000)
GENERATED_CAPACITIES = (300, 1_000, 3_000, 10_000)
DEFAULT_POLICIES = tuple(name for name in POLICIES if name != "priority")

Row = tuple[str, str]
"""Policy, and what ran it: "real", the library's own manager, or "reference", the simulator of this package."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options; exits with a message that names the bad one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eviction", description=sys.modules[__package__].__doc__)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE.jsonl", help="traces in Mooncake's format")
    parser.add_argument("--generated", action="store_true", help="add the generated workloads")
    parser.add_argument("--seed", type=int, default=1, help="seed of the generated workloads")
    parser.add_argument("--capacities", nargs="+", type=int, metavar="BLOCKS", help="blocks of memory")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(DEFAULT_POLICIES))
    parser.add_argument("--real", action="store_true", help="run the library's own cache manager too, where it can")
    parser.add_argument("--plot", type=Path, metavar="OUT.svg", help="draw the hit rates over the capacities")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args(arguments)
    if not options.traces and not options.generated:
        parser.error("give at least one trace, or --generated")
    if options.capacities and min(options.capacities) < 1:
        parser.error(f"--capacities must be at least 1, not {min(options.capacities)}")
    return options


def load(options: argparse.Namespace) -> Iterator[tuple[Trace, Sequence[int]]]:
    """Each trace with the capacities to try."""
    for path in options.traces:
        yield read_trace(path), options.capacities or TRACE_CAPACITIES
    if options.generated:
        for name in WORKLOADS:
            yield generate(name, options.seed), options.capacities or GENERATED_CAPACITIES


def rows(options: argparse.Namespace) -> list[Row]:
    """What to measure."""
    wanted = options.policies
    real = [(policy, "real") for policy in wanted if options.real and policy in REAL_POLICIES]
    return real + [(policy, "reference") for policy in wanted]


def measure(trace: Trace, row: Row, capacities: Sequence[int]) -> list[float]:
    """Hit rates of one policy, with a line of progress on stderr."""
    policy, core = row
    rates = []
    for capacity in capacities:
        is_real = core == "real"
        cache: Cache = (
            RealCache(trace, capacity, policy) if is_real else ReferenceCache(trace, capacity, POLICIES[policy])
        )
        started = time.perf_counter()
        rates.append(hit_rate(trace, cache))
        us = (time.perf_counter() - started) / len(trace.requests) * 1e6
        text = f"{trace.name} {policy} ({core}) {capacity}: {rates[-1]:.4f}, {us:.0f} us a request"
        print(text, file=sys.stderr, flush=True)
    return rates


def print_table(trace: Trace, capacities: Sequence[int], rates: dict[Row, list[float]]) -> None:
    """One row a policy, one column a capacity."""
    print(f"\n{trace.name}: {len(trace.requests)} requests, {trace.num_lookups} blocks, {trace.num_blocks} distinct\n")
    print("| policy | core | " + " | ".join(f"{capacity:,}" for capacity in capacities) + " |")
    print("|---" * (len(capacities) + 2) + "|")
    for (policy, core), row in rates.items():
        print(f"| {policy} | {core} | " + " | ".join(f"{rate:.4f}" for rate in row) + " |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures every policy on every trace and prints what was found."""
    options = parse_arguments(arguments)
    found = {}
    panels = []
    for trace, capacities in load(options):
        rates = {row: measure(trace, row, capacities) for row in rows(options)}
        by_core: dict[str, dict[str, list[float]]] = {}
        for (policy, core), row_rates in rates.items():
            by_core.setdefault(core, {})[policy] = row_rates
        found[trace.name] = {"capacities": list(capacities), "hit_rates": by_core}
        # The library's own figures where there are any.
        panels.append(Panel(trace.name, list(capacities), by_core.get("reference", {}) | by_core.get("real", {})))
        if not options.json:
            print_table(trace, capacities, rates)
    if options.plot:
        options.plot.write_text(draw(panels))
    if options.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
