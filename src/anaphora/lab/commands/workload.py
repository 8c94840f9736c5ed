"""`anaphora workload KIND...`."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from anaphora.lab.commands.options import fail, note, positive

_KINDS = ("chat", "shared-system", "document", "agent", "few-shot", "tree", "rag")


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.set_defaults(run=_workload)
    parser.add_argument("kinds", nargs="+", choices=_KINDS, metavar="KIND", help=f"one or more of {', '.join(_KINDS)}")
    parser.add_argument("--sessions", type=positive, default=100, metavar="N", help="of each kind (default: 100)")
    parser.add_argument(
        "--rate", type=_rate, default=1.0, metavar="R", help="sessions that begin a second (default: 1)"
    )
    parser.add_argument("--burst", type=_rate, default=1.0, metavar="B", help="1 is Poisson, above 1 in bursts")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="equal seeds, equal workloads (default: 1)")
    parser.add_argument("--as", dest="form", choices=["mooncake", "openai"], default="mooncake", help="what to write")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def _workload(args: argparse.Namespace) -> int:
    from anaphora.lab.workload import as_mooncake, as_openai, generate

    jobs = generate(args.kinds, args.sessions, args.rate, args.seed, args.burst)
    lines = as_mooncake(jobs) if args.form == "mooncake" else as_openai(jobs)
    try:
        if args.out is None:
            for line in lines:
                sys.stdout.write(line + "\n")
        else:
            with args.out.open("w", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in lines)
    except BrokenPipeError:
        return 0
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}")
    note(f"{len(jobs):,} requests, {sum(job.num_tokens for job in jobs):,} prompt tokens, {jobs[-1].time_s:,.0f} s")
    return 0
