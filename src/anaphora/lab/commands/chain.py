"""`anaphora chain`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from anaphora.lab.commands.options import add_pictures, capacity, fail, note, positive, share

if TYPE_CHECKING:
    import argparse

    from anaphora.lab.chain import Point, Traffic

_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95)


def add_chain(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.set_defaults(run=_chain)
    parser.description = (
        "Higher hit rate, larger batch, higher throughput, sooner first token: prompts that share more and more, on "
        "equal memory; and traffic whose time goes into generating, where that brings little."
    )
    parser.add_argument("--model", default="Llama-3.1-8B", metavar="NAME", help="simulated (default: %(default)s)")
    parser.add_argument("--hardware", default="h100", metavar="NAME",
                        help="h100, a100, or a file of `anaphora calibrate` (default: h100)")  # fmt: skip
    parser.add_argument("--capacity", type=capacity, default=None, metavar="SIZE",
                        help="of KV: blocks, tokens, bytes (default: a quarter of the prompt-bound need)")  # fmt: skip
    parser.add_argument("--shared", type=share, nargs="+", default=_SHARES, metavar="SHARE",
                        help="of each prompt, the same in all (default: 0 25%% 50%% 75%% 90%% 95%%)")  # fmt: skip
    parser.add_argument("--requests", type=positive, default=128, metavar="N", help="at once (default: 128)")
    parser.add_argument("--prefill", type=positive, nargs=2, default=(4096, 32), metavar=("PROMPT", "OUTPUT"),
                        help="tokens of prompt-bound requests (default: 4096 32)")  # fmt: skip
    parser.add_argument("--decode", type=positive, nargs=2, default=(320, 512), metavar=("PROMPT", "OUTPUT"),
                        help="tokens of decode-bound requests (default: 320 512)")  # fmt: skip
    parser.add_argument("--real", nargs="?", const="", metavar="MODEL",
                        help="beside a real engine: a model here, or the default one")  # fmt: skip
    parser.add_argument("--executor", choices=["auto", "native", "native-q8", "reference"], default="auto",
                        help="with --real: what runs it (default: native if it builds)")  # fmt: skip
    parser.add_argument("--repeats", type=positive, default=3, metavar="N",
                        help="with --real: the fastest of N runs, the one least disturbed (default: 3)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_pictures(parser)
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write one HTML page that opens offline")


def _chain(args: argparse.Namespace) -> int:
    from anaphora.engine.request import RequestError
    from anaphora.lab import chain
    from anaphora.lab.images import ImageError, write_pictures
    from anaphora.lab.importers import LogError
    from anaphora.lab.page import page

    shared = sorted(set(args.shared))
    traffics = [
        chain.Traffic("prompt-bound", args.requests, *args.prefill),
        chain.Traffic("decode-bound", args.requests, *args.decode),
    ]
    try:
        name, points = _simulated(args, traffics, shared) if args.real is None else _real(args, traffics, shared)
        drawn = chain.picture(points)
        write_pictures({"chain": drawn}, args.svg, args.png)
        if args.report:
            args.report.write_text(page("The chain of effects", [*name.splitlines(), drawn, chain.table(points)]))
    except (LogError, RequestError, ImageError, ValueError) as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}")
    if args.json:
        print(json.dumps({"what": name, "points": [point.as_dict() for point in points]}, indent=2))
    else:
        print(f"{name}\n\n{chain.table(points).to_text()}\n\n" + "\n".join(chain.sentences(points)))
    return 0


def _blocks(args: argparse.Namespace, traffic: Traffic, block_size: int, bytes_per_token: int) -> int:
    if args.capacity is None:
        tokens = traffic.num_requests * (traffic.prompt_tokens + traffic.output_tokens) // 4
        return max(2, tokens // block_size)
    blocks: int | None = args.capacity.in_blocks(block_size, bytes_per_token)
    if blocks is None:
        raise ValueError("--capacity: unbounded memory has no chain of effects; give a bound")
    return blocks


def _simulated(args: argparse.Namespace, traffics: list[Traffic], shared: list[float]) -> tuple[str, list[Point]]:
    from anaphora.lab.chain import Memory, simulated
    from anaphora.lab.model_files import hardware, kv_bytes_per_token, model_shape
    from anaphora.lab.progress import ProgressBar

    shape, profile = model_shape(args.model), hardware(args.hardware)
    points: list[Point] = []
    sizes = []
    memory = Memory(_blocks(args, traffics[0], 16, kv_bytes_per_token(args.model)))
    with ProgressBar(len(traffics) * len(shared), "simulating") as bar:
        for traffic in traffics:
            sizes.append(_described(traffic))
            for each in shared:
                points += simulated(traffic, [each], memory, shape, profile)
                bar.advance()
    return f"{args.model} on {profile.name}, {memory.num_blocks:,} blocks of 16 tokens\n" + "\n".join(sizes), points


def _real(args: argparse.Namespace, traffics: list[Traffic], shared: list[float]) -> tuple[str, list[Point]]:
    from anaphora.engine.build import build_engine
    from anaphora.engine.calibration import StepTimer, fit_profile
    from anaphora.lab.chain import Memory, real, simulated
    from anaphora.lab.importers import LogError
    from anaphora.lab.progress import ProgressBar
    from anaphora.model import ModelError, load_model
    from anaphora.model.progress import PrintedProgress

    try:
        model = load_model(args.real or None, PrintedProgress())
    except ModelError as error:
        raise LogError(str(error)) from None
    shape = model.shape
    per_token = 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    wanted = _blocks(args, traffics[0], 16, per_token)
    engine = build_engine(model, executor=args.executor, kv_memory_bytes=2 * max(wanted, 512) * 16 * per_token)
    executor, block_size = engine.executor, engine.manager.block_size
    note("timing steps of the real engine")
    timer = StepTimer(executor, shape, num_blocks=engine.manager.num_blocks, block_size=block_size)
    timer.run(4)
    profile = fit_profile(executor.numerics_id, timer.steps)
    points: list[Point] = []
    sizes = []
    memory = Memory(_blocks(args, traffics[0], block_size, per_token), block_size, max_num_batched_tokens=512)
    with ProgressBar(len(traffics) * len(shared), "running") as bar:
        for traffic in traffics:
            sizes.append(_described(traffic))
            points += simulated(traffic, shared, memory, shape, profile)
            for each in shared:
                runs = [real(traffic, each, memory, executor) for _ in range(args.repeats)]
                points.append(min(runs, key=lambda point: point.duration_s))
                bar.advance()
    name = f"{model.name}, {executor.numerics_id}, {memory.num_blocks:,} blocks of {block_size} tokens\n" + "\n".join(
        sizes
    )
    return name, sorted(points, key=lambda point: (point.traffic != "prompt-bound", point.machine != "simulated"))


def _described(traffic: Traffic) -> str:
    lengths = f"{traffic.prompt_tokens:,} + {traffic.output_tokens:,} tokens"
    return f"{traffic.name}: {traffic.num_requests} requests of {lengths}, all at once"
