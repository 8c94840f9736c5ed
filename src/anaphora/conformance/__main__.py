"""`python -m anaphora.conformance MODULE:FACTORY`: run the kit on a manager; exit code 1 if a check fails."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import TYPE_CHECKING

from anaphora.conformance.profile import PROFILES
from anaphora.conformance.report import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.conformance.adapter import MakeManager


def main(argv: Sequence[str] | None = None) -> int:
    """Run the kit and print its report; return 0, or 1 if a check failed."""
    parser = argparse.ArgumentParser(
        prog="python -m anaphora.conformance", description="Try out a block manager against rules and golden answers."
    )
    parser.add_argument("factory", type=_factory, metavar="MODULE:FACTORY",
                        help="a function of (num_blocks, block_size) that returns a ManagerAdapter")  # fmt: skip
    parser.add_argument("--profile", choices=[*PROFILES], help="what the manager chose (default: found by trying)")
    parser.add_argument("--block-size", type=_positive, default=4, metavar="N", help="tokens in a block (default: 4)")
    parser.add_argument("--scripts", type=int, default=40, metavar="N", help="generated scripts (default: 40)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the generated scripts (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(argv)
    profile = PROFILES[args.profile] if args.profile else None
    report = run(args.factory, profile, block_size=args.block_size, num_scripts=args.scripts, seed=args.seed)
    print(json.dumps(report.as_json(), indent=1) if args.json else report)
    return 1 if report.failures else 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, got {text!r}")
    return int(text)


def _factory(text: str) -> MakeManager:
    module, _, name = text.partition(":")
    if not name:
        raise argparse.ArgumentTypeError(f"expected MODULE:FACTORY, got {text!r}")
    try:
        factory: MakeManager = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return factory


if __name__ == "__main__":
    sys.exit(main())
