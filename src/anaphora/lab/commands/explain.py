"""`anaphora explain LOG|URL`."""

from __future__ import annotations

import argparse
import json
from decimal import Decimal, InvalidOperation
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from anaphora.lab.commands.live import explain_metrics, explain_url
from anaphora.lab.commands.options import (
    PROVIDER_NAMES,
    add_log,
    capacity,
    fail,
    note,
    note_report,
    open_log,
    positive,
    share,
)

if TYPE_CHECKING:
    from anaphora.lab.encoding import Encoder
    from anaphora.lab.explain.case import Case
    from anaphora.lab.explain.provider import ProviderCase
    from anaphora.lab.explain.report import Worth
    from anaphora.lab.explain.waterfall import Reality
    from anaphora.lab.importers import Log, ReadReport
    from anaphora.lab.page import Table
    from anaphora.lab.record import LoggedRequest

BELOW, UNKNOWN = 3, 4
"""Exit codes with --fail-under: the hit rate is below it; it is not known."""
_DEFAULT_TTL_S = 300.0


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.set_defaults(run=_explain)
    parser.epilog = (
        "exit codes: 0 done, 1 cannot be done, 2 wrong usage, 3 below --fail-under, 4 --fail-under and not known"
    )
    add_log(parser, "LOG|URL")
    parser.add_argument("--block-size", type=positive, metavar="N", help="tokens (default: the log's own, or 16)")
    parser.add_argument("--split-by", nargs="*", choices=["salt", "adapter", "tenant"], default=["salt", "adapter"],
                        help="what keeps prompts apart (default: salt adapter)")  # fmt: skip
    parser.add_argument("--replicas", type=positive, metavar="N", help="dealt round-robin (default: as the log says)")
    parser.add_argument("--ttl", type=float, metavar="S", help="time to live in s (default: none; Anthropic's: 300)")
    parser.add_argument("--capacity", type=capacity, metavar="SIZE", help="of each replica (default: not known)")
    parser.add_argument("--model", metavar="NAME", help="for a capacity in bytes: a model's name in the table, or path")
    parser.add_argument("--kv-bytes-per-token", type=positive, metavar="N", help="the same, as a number")
    parser.add_argument("--price-input", type=price, metavar="USD", help="for 1M uncached tokens")
    parser.add_argument("--price-cached", type=price, metavar="USD", help="for 1M cached tokens (default: 0)")
    parser.add_argument("--rules", type=Path, metavar="FILE.toml", help="overrides the table of providers and prices")
    parser.add_argument("--provider", choices=PROVIDER_NAMES, metavar="NAME",
                        help=f"whose rules, in place of an engine's cache: {', '.join(PROVIDER_NAMES)}")  # fmt: skip
    parser.add_argument("--prefill-rate", type=positive, metavar="N", help="tokens a second, for milliseconds lost")
    parser.add_argument("--interval", type=float, default=0.0, metavar="S",
                        help="for a URL: scrape twice, so far apart, and tell the present rate")  # fmt: skip
    parser.add_argument("--kv-events", nargs="?", const="auto", metavar="ENDPOINT",
                        help="for a URL: its KV events too (without ENDPOINT: where it says they are)")  # fmt: skip
    parser.add_argument("--kv-events-replay", metavar="ENDPOINT", help="where earlier ones can be asked for")
    parser.add_argument("--since", type=Path, metavar="FILE", help="for a file of metrics: an earlier scrape")
    parser.add_argument("--top", type=positive, default=10, metavar="N", help="offenders to list (default: 10)")
    parser.add_argument("--fail-under", type=share, metavar="SHARE", help="exit with 3 if the hit rate is below it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--svg", type=Path, metavar="FILE.svg", help="write the waterfall as a picture")
    parser.add_argument("--png", type=Path, metavar="FILE.png", help="the same as PNG (needs resvg-py)")
    parser.add_argument("--report", type=Path, metavar="FILE.html", help="write one HTML page that opens offline")


def price(text: str) -> Decimal:
    """Dollars for a million tokens."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal(-1)
    if not (value.is_finite() and value >= 0):
        raise argparse.ArgumentTypeError(f"expected dollars for a million tokens, like 2.50, got {text!r}")
    return value


def _explain(args: argparse.Namespace) -> int:
    from anaphora.lab.images import ImageError
    from anaphora.lab.importers import LogError

    try:
        if args.log.startswith(("http://", "https://")):
            code, rate = explain_url(args, args.log)
            return code or _judge(args.fail_under, rate)
        log, encoder = open_log(args)
        if log.format.name == "prometheus":
            code, rate = explain_metrics(args)
            return code or _judge(args.fail_under, rate)
        if log.format.name == "kv-events":
            return _explain_events(args, log)
        requests = list(islice(log.requests(), args.limit))
        note_report(log.report)
        return _explain_requests(args, requests, encoder, log.report)
    except (LogError, ImageError) as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}")


def _explain_requests(
    args: argparse.Namespace, requests: list[LoggedRequest], encoder: Encoder, read: ReadReport
) -> int:
    from anaphora.lab.explain.case import prepare
    from anaphora.lab.explain.waterfall import Reality

    has_whole_prompts = read.format not in {"claude-code", "codex"}
    case = prepare(args.log.name, requests if has_whole_prompts else [], encoder, args.block_size)
    if not case.requests:
        return _explain_usage(args, requests, read)
    if args.provider is not None and (not case.has_text):
        return fail("--provider: needs prompts as text, to see where they may be cached", code=1)
    reality = Reality(
        case.trace.block_size,
        tuple(args.split_by),
        args.replicas,
        _ttl_s(args, requests, read.format),
        _capacity(args, case.trace.block_size),
    )
    return _explain_case(args, case, reality, read)


def _explain_case(args: argparse.Namespace, case: Case, reality: Reality, read: ReadReport) -> int:
    from anaphora.lab.explain.fixes import fixes as find_fixes
    from anaphora.lab.explain.provider import ProviderCase
    from anaphora.lab.explain.report import (
        NOT_REPORTED,
        as_dict,
        fixes_table,
        offenders_table,
        picture,
        waterfall_table,
    )
    from anaphora.lab.explain.waterfall import explain
    from anaphora.lab.images import to_png
    from anaphora.lab.page import page, percent
    from anaphora.lab.providers.catalogue import Catalogue

    provider = None if args.provider is None else ProviderCase(case, Catalogue(args.rules), args.provider)
    found = explain(case, reality, provider)
    fixes = find_fixes(case, reality, found) if provider is None else provider.fixes(found)
    worth = _worth(args, case.requests)
    said = [_sentence(args, case, reality, provider)]
    if case.num_without_content:
        said.append(f"{case.num_without_content:,} requests without content are left out.")
    if found.estimate_error is not None:
        total, typical = found.estimate_error
        said.append(
            f"Estimated lengths beside stated ones: {total:+.1%} in total, {typical:.1%} off in the median request; "
            "counts are brought to the stated lengths."
        )
    silent = found.num_requests - found.reporting_requests
    if silent and case.trace.listed_block is None:
        said.append(f"{silent:,} of {found.num_requests:,} requests: {NOT_REPORTED}.")
    tables: list[Table] = [waterfall_table(found, worth)]
    tables += [t for t in (offenders_table(found, args.top), fixes_table(fixes, found, worth)) if t is not None]
    if args.svg:
        args.svg.write_text(picture(found))
    if args.png:
        args.png.write_bytes(to_png(picture(found)))
    if args.report:
        args.report.write_text(page(f"Explained: {case.trace.name}", [*said, picture(found), *tables]))
    if args.json:
        print(json.dumps({"read": read.as_dict(), "assumed": said[0]} | as_dict(found, fixes, worth), indent=2))
    else:
        print("\n".join(said) + "\n\n" + "\n\n".join(table.to_text() for table in tables))
        print(f"\nhit rate: predicted {percent(found.predicted_rate)}, reported {percent(found.reported_rate)}")
    rate = found.reported_rate if found.reported_rate is not None else found.predicted_rate
    return _judge(args.fail_under, rate)


def _explain_usage(args: argparse.Namespace, requests: list[LoggedRequest], read: ReadReport) -> int:
    from anaphora.lab.explain.report import NOT_REPORTED, sessions_table
    from anaphora.lab.explain.sessions import explain_sessions
    from anaphora.lab.page import page, percent

    if not any(request.usage for request in requests):
        return fail(f"{args.log}: {len(requests):,} requests, with neither content nor usage: nothing can be told")
    report = explain_sessions(requests, _DEFAULT_TTL_S if args.ttl is None else args.ttl)
    table = sessions_table(report)
    said = (
        f"{args.log.name}: {len(requests):,} requests that tell usage and not the whole prompt, in "
        f"{report.num_sessions:,} sessions. Each should find what the one before it in its session had."
    )
    if args.report:
        args.report.write_text(page(f"Explained: {args.log.name}", [said, table]))
    if args.json:
        causes = [{"name": c.name, "tokens": round(c.num_tokens), "requests": c.num_requests} for c in report.causes]
        result = {
            "read": read.as_dict(),
            "requests": report.num_requests,
            "prompt_tokens": report.num_tokens,
            "cached_tokens": report.cached if report.num_requests else None,
            "hit_rate": report.reported_rate,
            "causes": causes,
            "not_reported_requests": report.not_reported[0],
        }
        print(json.dumps(result, indent=2))
    else:
        print(f"{said}\n\n{table.to_text()}\n\nhit rate: reported {percent(report.reported_rate)}")
        if report.not_reported[0]:
            note(NOT_REPORTED)
    return _judge(args.fail_under, report.reported_rate)


def _explain_events(args: argparse.Namespace, log: Log) -> int:
    """What each replica held at the end of a capture, and what was missed on the way."""
    from anaphora.lab.importers.kv_events import ReplicaState
    from anaphora.lab.page import Table

    latest: dict[str, ReplicaState] = {}
    missed: dict[str, int] = {}
    unknown: dict[str, int] = {}
    for state in islice(log.records(), args.limit):
        if isinstance(state, ReplicaState):
            latest[state.replica] = state
            missed[state.replica] = missed.get(state.replica, 0) + state.num_missed
            unknown[state.replica] = unknown.get(state.replica, 0) + state.num_unknown_removed
    note_report(log.report)
    if args.json:
        replicas = [
            {"replica": name, "model": s.model, "blocks": s.num_blocks, "missed_batches": missed[name],
             "removed_but_unknown": unknown[name]}
            for name, s in latest.items()
        ]  # fmt: skip
        print(json.dumps({"read": log.report.as_dict(), "replicas": replicas}, indent=2))
        return 0
    rows = [
        [name, s.model, f"{s.sequence:,}", f"{s.num_blocks:,}", f"{missed[name]:,}", f"{unknown[name]:,}"]
        for name, s in latest.items()
    ]
    header = ["replica", "model", "last batch", "blocks held", "missed batches", "removed but unknown"]
    print(Table(header, rows).to_text())
    return 0


def _judge(threshold: float | None, rate: float | None) -> int:
    if threshold is None:
        return 0
    if rate is None:
        return fail("--fail-under: the hit rate is not known", UNKNOWN)
    return fail(f"the hit rate is {rate:.2%}, below {threshold:.2%}", BELOW) if rate < threshold else 0


def _ttl_s(args: argparse.Namespace, requests: list[LoggedRequest], format_name: str) -> float | None:
    if args.ttl is not None or format_name != "anthropic":
        return None if args.ttl is None else float(args.ttl)
    marks = [part.ttl_s for request in requests for part in request.parts if part.ttl_s]
    return float(max(marks, default=_DEFAULT_TTL_S))


def _capacity(args: argparse.Namespace, block_size: int) -> int | None:
    from anaphora.lab.importers import LogError
    from anaphora.lab.model_files import kv_bytes_per_token

    if args.capacity is None:
        return None
    per_token = args.kv_bytes_per_token or (kv_bytes_per_token(args.model) if args.model else None)
    try:
        blocks: int | None = args.capacity.in_blocks(block_size, per_token)
    except ValueError as error:
        raise LogError(str(error)) from None
    return blocks


def _worth(args: argparse.Namespace, requests: list[LoggedRequest]) -> Worth:
    """What a cached token saves: at the given prices, or at those of the log's only model."""
    from anaphora.lab.explain.report import Worth
    from anaphora.lab.providers.catalogue import Catalogue

    seconds = 1 / args.prefill_rate if args.prefill_rate else None
    if args.price_input is not None:
        return Worth((args.price_input - (args.price_cached or Decimal(0))) / 1_000_000, seconds)
    models = {request.model for request in requests}
    prices = Catalogue(args.rules).prices_of(models.pop()) if len(models) == 1 else None
    return Worth(None if prices is None else (prices.input - prices.read) / 1_000_000, seconds)


def _sentence(args: argparse.Namespace, case: Case, reality: Reality, provider: ProviderCase | None) -> str:
    trace = case.trace
    tokens = f"; tokens by {trace.encoder}" if trace.encoder else ""
    if provider is not None:
        rules = provider.rules
        source = f"{rules.title}, as of {rules.as_of} ({rules.source})"
        return f"{trace.name}: {len(case.requests):,} requests under the rules of {source}{tokens}."
    assumed = [f"blocks of {reality.block_size} tokens"]
    assumed.append("memory not known" if reality.capacity_blocks is None else f"{reality.capacity_blocks:,} blocks")
    if reality.ttl_s is not None:
        assumed.append(f"a time to live of {reality.ttl_s:g} s")
    if reality.replicas is not None:
        assumed.append(f"{reality.replicas} replicas, round-robin")
    text = f"{trace.name}: {len(case.requests):,} requests; taken: {', '.join(assumed)}"
    return f"{text}{tokens}."
