"""``python -m benchmarks.eviction TRACE.jsonl... [--capacities ...] [--policies ...] [--json] [--generated]``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .generated import WORKLOADS, generate
from .reference_policies import POLICIES
from .simulator import ReferenceCache, hit_rate
from .trace import Trace, read_trace

TRACE_CAPACITIES = (1_000, 3_000, 10_000, 30_000, 50_000)
GENERATED_CAPACITIES = (300, 1_000, 3_000, 10_000)
DEFAULT_POLICIES = tuple(name for name in POLICIES if name != "priority")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options; exits with a message that names the bad one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eviction", description=sys.modules[__package__].__doc__)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE.jsonl", help="traces in Mooncake's format")
    parser.add_argument("--generated", action="store_true", help="add the generated workloads")
    parser.add_argument("--seed", type=int, default=1, help="seed of the generated workloads")
    parser.add_argument("--capacities", nargs="+", type=int, metavar="BLOCKS", help="blocks of memory")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(DEFAULT_POLICIES))
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


def measure(trace: Trace, policy: str, capacities: Sequence[int]) -> list[float]:
    """Hit rates of one policy, with a line of progress on stderr."""
    rates = []
    for capacity in capacities:
        started = time.perf_counter()
        rates.append(hit_rate(trace, ReferenceCache(trace, capacity, POLICIES[policy])))
        taken_s = time.perf_counter() - started
        print(f"{trace.name} {policy} {capacity}: {rates[-1]:.4f} in {taken_s:.1f} s", file=sys.stderr, flush=True)
    return rates


def print_table(trace: Trace, capacities: Sequence[int], rates: dict[str, list[float]]) -> None:
    """One row a policy, one column a capacity."""
    print(f"\n{trace.name}: {len(trace.requests)} requests, {trace.num_lookups} blocks, {trace.num_blocks} distinct\n")
    print("| policy | " + " | ".join(f"{capacity:,}" for capacity in capacities) + " |")
    print("|---" * (len(capacities) + 1) + "|")
    for policy, row in rates.items():
        print(f"| {policy} | " + " | ".join(f"{rate:.4f}" for rate in row) + " |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures every policy on every trace and prints what was found."""
    options = parse_arguments(arguments)
    found = {}
    for trace, capacities in load(options):
        rates = {policy: measure(trace, policy, capacities) for policy in options.policies}
        found[trace.name] = {"capacities": list(capacities), "hit_rates": rates}
        if not options.json:
            print_table(trace, capacities, rates)
    if options.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
