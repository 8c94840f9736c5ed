"""`anaphora simulate TRACE`."""

from __future__ import annotations

import json
import os
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from anaphora.lab.commands.options import (
    add_log,
    add_pictures,
    capacity,
    fail,
    note,
    note_report,
    open_log,
    positive,
    share,
)

if TYPE_CHECKING:
    import argparse

    from anaphora.lab.encoding import Encoder
    from anaphora.lab.importers import Log
    from anaphora.lab.page import Table
    from anaphora.lab.simulate import Outcome, Setting
    from anaphora.lab.trace import Trace

_POLICIES = ("lru", "adaptive", "slru", "lfu", "fifo", "filo", "mru", "tlru", "optimum")


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.set_defaults(run=_simulate)
    add_log(parser, "TRACE")
    parser.add_argument("--capacity", type=capacity, nargs="+", default=None, metavar="SIZE",
                        help="of each replica: blocks (3000), tokens (3Mtokens), bytes (24GiB), or unbounded; "
                             "several for a sweep (default: unbounded)")  # fmt: skip
    parser.add_argument("--host-capacity", type=capacity, nargs="+", default=None, metavar="SIZE",
                        help="of host memory, for what each replica evicts, as --capacity has it; 0 for none; several "
                             "for a sweep (default: none)")  # fmt: skip
    parser.add_argument("--model", metavar="NAME", help="for sizes in bytes: a model's name in the table, or its path")
    parser.add_argument("--kv-bytes-per-token", type=positive, metavar="N", help="the same, as a number")
    parser.add_argument("--policy", nargs="+", choices=_POLICIES, default=["lru"], metavar="NAME",
                        help=f"{', '.join(_POLICIES)}; optimum knows the future (default: lru)")  # fmt: skip
    parser.add_argument("--block-size", type=positive, metavar="N", help="tokens (default: the trace's own, or 16)")
    parser.add_argument("--index", choices=["radix", "hash"], default="radix", help="how prefixes are found")
    parser.add_argument("--replicas", type=positive, nargs="+", default=[1], metavar="N", help="caches (default: 1)")
    parser.add_argument("--routing", choices=["round-robin", "session", "prefix"], default="round-robin",
                        help="which replica a request goes to (default: round-robin)")  # fmt: skip
    parser.add_argument("--count", choices=["engine", "listed"], default="engine",
                        help="engine: whole blocks, not the last token; listed: all that the trace lists")  # fmt: skip
    parser.add_argument("--measure-after", type=share, default=0.0, metavar="SHARE",
                        help="count only requests after this share of them, 0.5 for the last half")  # fmt: skip
    engine = parser.add_argument_group("whole engines on a virtual clock")
    engine.add_argument("--engine", action="store_true", help="queue, batches, time; needs --model, --capacity")
    engine.add_argument("--hardware", default="h100", metavar="NAME",
                        help="h100, a100 (data sheets), or a file of `anaphora calibrate` (default: h100)")  # fmt: skip
    engine.add_argument("--queue-order", choices=["fcfs", "lpm", "dfs", "fair"], default="fcfs", help="default: fcfs")
    engine.add_argument("--max-num-seqs", type=positive, default=64, metavar="N", help="in a step (default: 64)")
    engine.add_argument("--max-num-batched-tokens", type=positive, default=8192, metavar="N", help="default: 8192")
    engine.add_argument("--speed", default="1", metavar="X",
                        help="arrivals X times as fast as in the trace; max: all at once (default: 1)")  # fmt: skip
    engine.add_argument("--beside-no-cache", action="store_true", help="the same without a cache too")
    parser.add_argument("--jobs", type=positive, metavar="N", help="runs at a time (default: one a core)")
    parser.add_argument("--stream", action="store_true",
                        help="read the trace once and keep none of it: memory is that of the caches; needs --capacity, "
                             "and a trace in order of time")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_pictures(parser)
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write one HTML page that opens offline")


def _simulate(args: argparse.Namespace) -> int:
    from anaphora.lab.importers import LogError
    from anaphora.lab.model_files import kv_bytes_per_token
    from anaphora.lab.simulate import settings_of, sweep
    from anaphora.lab.trace import build_trace

    if args.index == "hash" and set(args.policy) - {"lru", "optimum"}:
        return fail("--index: hash knows the policy lru alone", code=2)
    try:
        bytes_per_token = args.kv_bytes_per_token or (kv_bytes_per_token(args.model) if args.model else None)
        log, encoder = open_log(args)
        if args.stream:
            return _simulate_stream(args, log, encoder, bytes_per_token)
        trace = build_trace(args.log.name, islice(log.requests(), args.limit), encoder, args.block_size)
    except LogError as error:
        return fail(str(error))
    note_report(log.report)
    if not trace.prompts:
        return fail(
            f"{args.log}: {trace.num_without_content:,} requests, none with content: lengths alone cannot tell what is "
            "shared"
        )
    if args.count == "listed" and trace.block_size != trace.listed_block:
        return fail("--count: listed needs a trace that names blocks, at its own block size", code=2)
    try:
        capacities = _capacities(args, trace, bytes_per_token)
        host_capacities = _host_capacities(args, trace, bytes_per_token)
    except ValueError as error:
        return fail(str(error), code=2)
    if args.engine:
        return _simulate_engines(args, trace, capacities, host_capacities)
    settings = settings_of(capacities, args.policy, args.replicas, _common(args, trace), host_capacities)
    outcomes = sweep(trace, settings, args.jobs or os.cpu_count() or 1)
    return _tell(args, trace, log, outcomes, bytes_per_token)


def _capacities(args: argparse.Namespace, trace: Trace, bytes_per_token: int | None) -> list[int | None]:
    sizes = args.capacity or [capacity("unbounded")]
    return [size.in_blocks(trace.block_size, bytes_per_token) for size in sizes]


def _host_capacities(args: argparse.Namespace, trace: Trace, bytes_per_token: int | None) -> list[int]:
    """Blocks. Raises ValueError."""
    found = []
    for size in args.host_capacity or []:
        if size.amount is None:
            raise ValueError("--host-capacity: needs a bound")
        found.append(size.in_blocks(trace.block_size, bytes_per_token, "--host-capacity") or 0 if size.amount else 0)
    if any(found) and "optimum" in args.policy:
        raise ValueError("--policy: optimum has no host memory")
    if any(found) and args.capacity is None:
        raise ValueError("--host-capacity: needs --capacity, since a cache without a bound evicts nothing")
    return found or [0]


def _common(args: argparse.Namespace, trace: Trace) -> Setting:
    from anaphora.lab.simulate import Setting

    return Setting(
        block_size=trace.block_size,
        routing=args.routing,
        index=args.index,
        counting=args.count,
        measure_after=args.measure_after,
    )


def _simulate_stream(args: argparse.Namespace, log: Log, encoder: Encoder, bytes_per_token: int | None) -> int:
    """Raises LogError."""
    from anaphora.lab.simulate import run_stream, settings_of
    from anaphora.lab.trace import Trace, stream_prompts

    if args.engine or args.count == "listed":
        return fail("--stream: not with --engine or --count listed", code=2)
    trace = Trace(args.log.name, 1)
    prompts = stream_prompts(trace, islice(log.requests(), args.limit), encoder, args.block_size)
    first = next(prompts, None)
    if first is None:
        return fail(f"{args.log}: no request with content")
    try:
        settings = settings_of(
            _capacities(args, trace, bytes_per_token),
            args.policy,
            args.replicas,
            _common(args, trace),
            _host_capacities(args, trace, bytes_per_token),
        )
        outcomes = run_stream(trace, chain([first], prompts), settings)
    except ValueError as error:
        return fail(str(error), code=2)
    note_report(log.report)
    return _tell(args, trace, log, outcomes, bytes_per_token)


def _tell(
    args: argparse.Namespace, trace: Trace, log: Log, outcomes: list[Outcome], bytes_per_token: int | None
) -> int:
    from anaphora.lab.images import ImageError, write_pictures
    from anaphora.lab.simulate import pictures, table

    drawn = pictures(outcomes, bytes_per_token)
    try:
        write_pictures(drawn, args.svg, args.png)
        if args.report:
            _write_report(args.report, trace, outcomes, drawn, bytes_per_token)
    except ImageError as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}")
    if args.json:
        result = {"trace": _described(trace), "read": log.report.as_dict(), "runs": [o.as_dict() for o in outcomes]}
        print(json.dumps(result, indent=2))
    else:
        print(f"{_sentence(trace)}\n\n{table(outcomes, bytes_per_token).to_text()}")
        if args.report:
            note(f"The report is in {args.report}.")
    return 0


def _simulate_engines(
    args: argparse.Namespace, trace: Trace, capacities: list[int | None], host_capacities: list[int]
) -> int:
    from dataclasses import replace

    from anaphora.lab.engine_run import EngineSetting, engine_table, run_engines, ttft_picture
    from anaphora.lab.images import ImageError, write_pictures
    from anaphora.lab.importers import LogError
    from anaphora.lab.model_files import hardware, model_shape
    from anaphora.lab.page import page
    from anaphora.lab.progress import ProgressBar

    speed = _speed(args.speed)
    bounded = [size for size in capacities if size is not None]
    if args.model is None or len(bounded) < len(capacities):
        return fail("--engine: needs --model and --capacity, and no unbounded one", code=2)
    if speed == 0:
        return fail(f"--speed: expected a number above 0, or max, got {args.speed!r}", code=2)
    if args.routing == "prefix" or "optimum" in args.policy or args.count == "listed" or args.measure_after:
        return fail("--engine: not with --routing prefix, --policy optimum, --count listed, --measure-after", code=2)
    if trace.block_size > 512:
        return fail("--engine: blocks of 512 tokens at most", code=2)
    settings = [
        EngineSetting(
            size, policy, num, trace.block_size, args.routing, args.index, args.queue_order,
            args.max_num_seqs, args.max_num_batched_tokens, speed, host_blocks=host,
        )
        for size in bounded
        for host in host_capacities
        for policy in args.policy
        for num in args.replicas
    ]  # fmt: skip
    if args.beside_no_cache:
        settings.append(replace(settings[-1], has_cache=False, host_blocks=0))
    try:
        shape, profile = model_shape(args.model), hardware(args.hardware)
        outcomes = []
        with ProgressBar(len(settings), "simulating engines") as bar:
            for setting in settings:
                outcomes.append(run_engines(trace, setting, shape, profile))
                bar.advance()
        picture = ttft_picture(outcomes)
        write_pictures({"ttft": picture} if picture else {}, args.svg, args.png)
        if args.report:
            pieces: list[str | Table] = [_sentence(trace), engine_table(outcomes), picture or ""]
            args.report.write_text(page(f"Simulated: {trace.name}", pieces))
    except (LogError, ImageError, ValueError) as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}")
    if args.json:
        print(json.dumps({"trace": _described(trace), "runs": [o.as_dict() for o in outcomes]}, indent=2))
    else:
        print(f"{_sentence(trace)}\n{args.model} on {profile.name}\n\n{engine_table(outcomes).to_text()}")
    return 0


def _speed(text: str) -> float | None:
    """Times as fast; None for all at once; 0 for what is neither."""
    if text == "max":
        return None
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < float("inf") else 0.0


def _described(trace: Trace) -> dict[str, object]:
    return {
        "name": trace.name,
        "requests": trace.num_requests,
        "without_content": trace.num_without_content,
        "prompt_tokens": trace.num_tokens,
        "block_size": trace.block_size,
        "blocks": trace.num_blocks(trace.block_size) if trace.prompts else None,
        "tokens_are_estimates": trace.is_estimate,
        "tokenizer": trace.encoder,
    }


def _sentence(trace: Trace) -> str:
    text = (
        f"{trace.name}: {trace.num_requests:,} requests, {trace.num_tokens:,} prompt tokens, "
        + (f"{trace.num_blocks(trace.block_size):,} " if trace.prompts else "streamed, ")
        + f"blocks of {trace.block_size}"
    )
    if trace.encoder is not None:
        text += f"; tokens by {trace.encoder}"
    if trace.num_without_content:
        text += f"; {trace.num_without_content:,} requests without content left out"
    return text


def _write_report(
    path: Path, trace: Trace, outcomes: list[Outcome], drawn: dict[str, str], bytes_per_token: int | None
) -> None:
    from anaphora.lab.page import page
    from anaphora.lab.simulate import table

    path.write_text(
        page(f"Simulated: {trace.name}", [_sentence(trace), table(outcomes, bytes_per_token), *drawn.values()])
    )
