"""`python -m benchmarks.scheduling [--sglang-python PATH] [--plot OUT.svg] [--rate R] [--requests N]`"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import chart, engine
from .contest import backlog, best_burst, burst, pass_time_us, starvation
from .ours import OurOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

ORDERS = ("fcfs", "lpm", "dfs", "fair")
QUEUES = (128, 1024, 10_000)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options; exits with a message that names the bad one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduling", description=sys.modules[__package__].__doc__
    )
    parser.add_argument("--sglang-python", metavar="PATH", help="an interpreter that has sglang 0.5.23 installed")
    parser.add_argument("--plot", type=Path, metavar="OUT.svg", help="draw times to first token")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=3000, help="how many of them (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.sglang_python is not None and not Path(options.sglang_python).is_file():
        parser.error(f"--sglang-python: no file at {options.sglang_python}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything and print it."""
    options = parse_arguments(arguments)
    print(f"{'order':<16}  {'burst':>6}  {'backlog':>7}  {'cold waits':>10}  " + "  ".join(f"{n:>9,}" for n in QUEUES))
    print(f"{'':<16}  {'hits':>6}  {'hits':>7}  {'passes':>10}  " + "  ".join(f"{'us a pass':>9}" for _ in QUEUES))
    for order in ORDERS:
        _print_row(order, _contest(order))
    if options.sglang_python is not None:
        for policy, row in _sglang(options.sglang_python).items():
            _print_row(policy, row)
    print(f"{'best possible':<16}  {best_burst():>6.1%}")
    print()
    print(f"{'engine':<16}  {'hits':>6}  {'TTFT s p50':>10}  {'p90':>7}  {'p99':>7}  {'max':>7}  {'all done s':>10}")
    made = engine.arrivals(options.requests, options.rate)
    results = {order: engine.run(order, made) for order in ORDERS}
    for order, result in results.items():
        times = "  ".join(f"{result.ttft(share):>7.2f}" for share in (0.9, 0.99, 1.0))
        print(f"{order:<16}  {result.hit_rate:>6.1%}  {result.ttft(0.5):>10.2f}  {times}  {result.duration_s:>10,.0f}")
    if options.plot is not None:
        options.plot.write_text(chart.draw({order: result.ttft_s for order, result in results.items()}))


def _contest(order: Any) -> dict[str, Any]:
    return {
        "burst": burst(OurOrder(order)),
        "backlog": backlog(OurOrder(order)),
        "starvation": starvation(OurOrder(order)),
        "pass_us": {num: pass_time_us(OurOrder(order, num_blocks=20_000), num, 50) for num in QUEUES},
    }


def _sglang(python: str) -> dict[str, dict[str, Any]]:
    command = [python, "-m", "benchmarks.scheduling.peer_sglang"]
    told = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    return {f"sglang {policy}": row for policy, row in told["results"].items()}


def _print_row(name: str, row: dict[str, Any]) -> None:
    waits = "for ever" if row["starvation"] is None else f"{row['starvation']}"
    times = "  ".join(f"{time_us:>9,.0f}" for time_us in row["pass_us"].values())
    print(f"{name:<16}  {row['burst']:>6.1%}  {row['backlog']:>7.1%}  {waits:>10}  {times}", flush=True)


if __name__ == "__main__":
    main()
