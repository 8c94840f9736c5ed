"""`anaphora bench --trace TRACE --url URL`: a trace as load on a server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from anaphora.lab.commands.options import FORMAT_NAMES, add_pictures, fail, note, note_report, open_log, positive

if TYPE_CHECKING:
    import argparse

    from anaphora.lab.load.endpoint import Endpoint
    from anaphora.lab.load.generator import Load
    from anaphora.lab.load.prediction import Prediction, ServerCache
    from anaphora.lab.load.probe import Speed
    from anaphora.lab.load.prompts import Prompts
    from anaphora.lab.trace import Trace

_RANGE = re.compile(r"(\d+)-(\d+)")


def add_load(parser: argparse.ArgumentParser) -> None:
    """Options that only `--trace` uses."""
    group = parser.add_argument_group("a trace as load on a server (--trace with --url)")
    group.add_argument("--trace", dest="log", metavar="TRACE", help="send this trace's or log's traffic to --url")
    group.add_argument("--format", choices=FORMAT_NAMES, metavar="NAME", help="of the trace, instead of detecting it")
    group.add_argument("--tokenizer", metavar="PATH", help="for logs of text: a model here to count tokens with")
    group.add_argument("--limit", type=positive, metavar="N", help="the first N requests only")
    group.add_argument("--speed", type=_above_0, default=1.0, metavar="X", help="arrivals X times as fast (default: 1)")
    group.add_argument("--rate", type=_above_0, metavar="R", help="instead: Poisson arrivals, R a second")
    group.add_argument("--as-fast-as-possible", action="store_true", help="instead: all are due at once")
    group.add_argument("--concurrency", type=positive, metavar="N",
                       help="at most N at a time; others wait, and are late (default: nobody waits)")  # fmt: skip
    group.add_argument("--max-output-tokens", type=positive, metavar="N", help="ask for no more than N")
    group.add_argument("--send", choices=["ids", "text", "chat"],
                       help="as token ids, text, or a chat message (default: what the server takes)")  # fmt: skip
    group.add_argument("--token-ids", type=_id_range, metavar="A-B", help="ids to make prompts of (default: 1000-8999)")
    group.add_argument("--served-model", default="", metavar="NAME", help="(default: the first that the server lists)")
    group.add_argument("--api-key-env", metavar="NAME", help="the environment variable that holds the server's key")
    group.add_argument("--timeout", type=_above_0, default=600.0, metavar="S", help="(default: 600)")
    group.add_argument("--seed", type=int, metavar="N",
                       help="of contents and --rate (default: a new one: no prompt is known yet)")  # fmt: skip
    group.add_argument("--block-size", type=positive, metavar="N", help="of the server's cache, if it does not tell")
    group.add_argument("--capacity-blocks", type=positive, metavar="N", help="the same: how many blocks")
    group.add_argument("--hardware", metavar="NAME",
                       help="predict times by h100, a100 or a file of `anaphora calibrate`, with MODEL "
                            "(default: by probes of the server)")  # fmt: skip
    group.add_argument("--no-prediction", action="store_true", help="measure only")
    group.add_argument("--records", type=Path, metavar="FILE.jsonl", help="write a line for each request")
    add_pictures(group)
    group.add_argument("--report", type=Path, metavar="FILE.html", help="write one HTML page that opens offline")


def run_load_command(args: argparse.Namespace) -> int:
    """Send the load, compare, print."""
    from anaphora.lab.images import ImageError
    from anaphora.lab.importers import LogError

    if args.url is None:
        return fail("--trace: needs --url, the server to send it to", code=2)
    if args.as_fast_as_possible and (args.rate is not None or args.speed != 1.0):
        return fail("--as-fast-as-possible: not with --rate or --speed", code=2)
    if args.rate is not None and args.speed != 1.0:
        return fail("--rate: not with --speed", code=2)
    if args.hardware and args.model is None:
        return fail("--hardware: needs MODEL, a name in the table or a path, for its shape", code=2)
    key = None
    if args.api_key_env:
        key = os.environ.get(args.api_key_env)
        if not key:
            return fail(f"--api-key-env: the variable {args.api_key_env} is not set", code=2)
    seed = secrets.randbits(31) if args.seed is None else args.seed
    try:
        trace = _trace(args)
        return asyncio.run(_run(args, trace, seed, key))
    except (LogError, ImageError) as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}")


def _trace(args: argparse.Namespace) -> Trace:
    from anaphora.lab.importers import LogError
    from anaphora.lab.load.prompts import LengthsAsPrompts
    from anaphora.lab.trace import build_trace

    log, encoder = open_log(args)
    requests = LengthsAsPrompts(islice(log.requests(), args.limit))
    trace = build_trace(args.log.name, requests, encoder)
    note_report(log.report)
    if not trace.prompts:
        raise LogError(f"{args.log}: no request with content or a length")
    if requests.num:
        note(f"{requests.num:,} requests tell their length only: their prompts are made to share nothing.")
    if trace.num_without_content:
        note(f"{trace.num_without_content:,} requests with neither content nor length are left out.")
    if trace.is_estimate:
        note(f"Lengths of text are those of {trace.encoder}; --tokenizer PATH counts as the model does.")
    return trace


async def _run(args: argparse.Namespace, trace: Trace, seed: int, key: str | None) -> int:
    from anaphora.lab.load.endpoint import Endpoint
    from anaphora.lab.load.generator import run_load
    from anaphora.lab.load.probe import find_vocabulary, measure_speed
    from anaphora.lab.load.prompts import ORDINARY_TOKEN_IDS, Prompts
    from anaphora.lab.load.schedule import due_times

    async with Endpoint(args.url, args.served_model, key=key, timeout_s=args.timeout) as endpoint:
        await endpoint.choose_model()
        vocabulary = await find_vocabulary(endpoint, args.send, args.token_ids or ORDINARY_TOKEN_IDS)
        prompts = Prompts(vocabulary, trace.unit, seed)
        cache, speed = None, None
        if not args.no_prediction:
            cache = _cache(args)
            if not args.hardware:
                note("probing how fast the server is")
                longest = sorted(prompt.num_tokens for prompt in trace.prompts)[len(trace.prompts) // 2]
                speed = await measure_speed(endpoint, prompts, longest, cache.max_num_batched_tokens)
        before = _hits(args.url)
        due = due_times(trace.prompts, speed=args.speed, rate=args.rate, at_once=args.as_fast_as_possible, seed=seed)
        load = await run_load(
            endpoint, prompts, trace.prompts, due,
            max_output_tokens=args.max_output_tokens, concurrency=args.concurrency,
        )  # fmt: skip
    after = _hits(args.url)
    counted = None if before is None or after is None else after - before
    prediction = None if cache is None else _predict(args, load, prompts, cache, speed)
    return _show(args, trace, endpoint, load, prompts, prediction, seed, counted)


def _cache(args: argparse.Namespace) -> ServerCache:
    from anaphora.lab.importers import LogError
    from anaphora.lab.live.server import Config, fetch_config, fetch_metrics
    from anaphora.lab.load.prediction import server_cache

    try:
        config = fetch_config(args.url, fetch_metrics(args.url))
    except LogError:
        config = Config()
    return server_cache(
        config,
        block_size=args.block_size,
        num_blocks=args.capacity_blocks,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )


def _hits(url: str) -> float | None:
    """What the server's own counter of cached tokens shows; None where it has none."""
    from anaphora.lab.importers import LogError
    from anaphora.lab.live.server import fetch_metrics

    try:
        metrics = fetch_metrics(url)
    except LogError:
        return None
    return None if metrics is None else metrics.hit_tokens


def _predict(
    args: argparse.Namespace, load: Load, prompts: Prompts, cache: ServerCache, speed: Speed | None
) -> Prediction:
    from anaphora.lab.load.prediction import predict
    from anaphora.lab.model_files import hardware, model_shape

    note("simulating the same requests")
    if speed is None:
        return predict(load, prompts, cache, model_shape(args.model), hardware(args.hardware))
    return predict(load, prompts, cache, *speed.model(), speed.overhead_s)


def _show(
    args: argparse.Namespace, trace: Trace, endpoint: Endpoint, load: Load, prompts: Prompts,
    prediction: Prediction | None, seed: int, counted: float | None,
) -> int:  # fmt: skip
    from dataclasses import asdict

    from anaphora.lab.images import write_pictures
    from anaphora.lab.load import report
    from anaphora.lab.load.generator import LATE_S
    from anaphora.lab.page import Table, page

    real = report.measured(load)
    virtual = None if prediction is None else report.predicted(prediction)
    title = f"{trace.name} at {endpoint.url}, {endpoint.model}"
    said = report.sentences(load, prompts.vocabulary)
    if endpoint.refused_fields:
        said.append(f"The server refuses {', '.join(sorted(endpoint.refused_fields))}; left out.")
    closing = []
    cached = None
    if prediction is not None:
        cached = report.compare_cached(load, prediction)
        closing += [f"Predicted for {prediction.cache.sentence()}.", f"{cached.sentence().capitalize()}."]
    if counted is not None:
        closing.append(f"The server's own counter of cached tokens rose by {counted:,.0f}.")
    table = report.comparison_table(real, virtual)
    drawn = report.pictures(real, virtual)
    write_pictures(drawn, args.svg, args.png)
    if args.report:
        pieces: list[str | Table] = [*said, table, *closing, *drawn.values()]
        args.report.write_text(page(f"Load: {title}", pieces))
    if args.records:
        with args.records.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in report.records(load, prediction))
    if args.json:
        error = report.length_error(load)
        result = {
            "trace": {"name": trace.name, "requests": len(trace.prompts), "prompt_tokens": trace.num_tokens},
            "server": {"url": endpoint.url, "model": endpoint.model, "refused_fields": sorted(endpoint.refused_fields)},
            "sent": {
                "form": prompts.vocabulary.form,
                "seed": seed,
                "concurrency": args.concurrency,
                "late": sum(each > LATE_S for each in load.lateness_s),
                "latest_s": max(load.lateness_s, default=0.0),
                "length_error": None if error is None else {"share": error[0], "worst_tokens": error[1]},
            },
            "errors": dict(report.errors(load)),
            "measured": real.as_dict(),
            "server_counted_cached_tokens": counted,
            "predicted": None if virtual is None else virtual.as_dict(),
            "assumed_cache": None if prediction is None else asdict(prediction.cache),
            "cached_tokens_by_request": None if cached is None else asdict(cached),
        }
        print(json.dumps(result, indent=2))
    else:
        print(f"{title}\n" + "\n".join(said) + f"\n\n{table.to_text()}\n")
        print("\n".join([*closing, f"Seed {seed}."]))
    return 0 if real.num_answered else fail("no request was answered")


def _above_0(text: str) -> float:
    import argparse

    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def _id_range(text: str) -> range:
    import argparse

    match = _RANGE.fullmatch(text)
    if match is None or int(match[2]) - int(match[1]) < 15:
        raise argparse.ArgumentTypeError(f"expected at least 16 ids like 1000-8999, got {text!r}")
    return range(int(match[1]), int(match[2]) + 1)
