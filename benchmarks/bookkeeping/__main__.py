"""`python -m benchmarks.bookkeeping [--vllm-python PATH] [--sglang-python PATH] [--quick] [--json] [--plot OUT.svg]`"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import chart, report, scaling
from .cycles import SCENARIOS, connect, measure

if TYPE_CHECKING:
    from collections.abc import Sequence


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options; exits with a message that names the bad one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bookkeeping", description=sys.modules[__package__].__doc__
    )
    parser.add_argument("--vllm-python", metavar="PATH", help="an interpreter that has vllm 0.32 installed")
    parser.add_argument("--sglang-python", metavar="PATH", help="an interpreter that has sglang 0.5.23 installed")
    parser.add_argument("--quick", action="store_true", help="2,048 tokens only, few rounds, small sizes: a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--plot", type=Path, metavar="OUT.svg", help="draw how the costs grow")
    options = parser.parse_args(arguments)
    for name in ("vllm_python", "sglang_python"):
        path = getattr(options, name)
        if path is not None and not Path(path).is_file():
            parser.error(f"--{name.replace('_', '-')}: no file at {path}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything and print it."""
    options = parse_arguments(arguments)
    num_rounds = 5 if options.quick else 15
    scenarios = [s for s in SCENARIOS if s.num_tokens <= 2_048 or not options.quick]
    processes = connect(options.vllm_python, options.sglang_python)
    try:
        cycles = []
        for scenario in scenarios:
            print(f"measuring {report.label(scenario)} ...", file=sys.stderr)
            cycles += measure(processes, scenario, num_rounds)
        versions = sorted({process.version for process in processes})
    finally:
        for process in processes:
            process.close()
    print("measuring growth ...", file=sys.stderr)
    powers = range(3, 5 if options.quick else 7)
    growth = {
        "pool": scaling.by_pool_size(tuple(10**power for power in powers if power > 3), num_rounds),
        "tree": scaling.by_tree_size(tuple(10**power for power in powers), num_rounds),
        "depth": scaling.by_depth((1, 10, 100, 1_000)),
    }
    lengths = (2_048, 32_768, 131_072)
    details = {
        "full match": scaling.full_match(lengths),
        "Python-level work": scaling.python_events(lengths),
        "memory": scaling.bytes_per_block((1, 8, 125)),
    }
    if options.plot:
        options.plot.write_text(
            chart.draw(
                [
                    ("A cycle of 2,048 tokens", "blocks in the pool", growth["pool"]),
                    ("Beside other nodes", "nodes in the tree", growth["tree"]),
                    ("A cached prompt of 16,000 tokens", "edges that it lies in", growth["depth"]),
                ]
            )
        )
    if options.json:
        everything: dict[str, Any] = {"versions": versions, "cycles": [asdict(c) for c in cycles], **growth, **details}
        print(json.dumps(everything))
        return
    print(report.render(versions, cycles, growth, details, options.vllm_python, options.sglang_python))


if __name__ == "__main__":
    main()
