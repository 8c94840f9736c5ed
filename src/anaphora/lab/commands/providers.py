"""`anaphora providers LOG`."""

from __future__ import annotations

import json
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from anaphora.lab.commands.explain import price
from anaphora.lab.commands.options import PROVIDER_NAMES, add_log, fail, note_report, open_log

if TYPE_CHECKING:
    import argparse

    from anaphora.lab.page import Table
    from anaphora.lab.providers.advice import Bill
    from anaphora.lab.providers.catalogue import Catalogue, Prices


def add_providers(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.set_defaults(run=_providers)
    add_log(parser, "LOG")
    parser.add_argument("--provider", nargs="+", metavar="NAME", default=list(PROVIDER_NAMES),
                        help=f"whose rules (default: all of {', '.join(PROVIDER_NAMES)})")  # fmt: skip
    parser.add_argument("--rules", type=Path, metavar="FILE.toml", help="overrides the table of rules and prices")
    parser.add_argument("--price-input", type=price, metavar="USD", help="for 1M tokens, whatever the log's model")
    parser.add_argument("--all", action="store_true", help="list every way to mark, not the cheapest alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _providers(args: argparse.Namespace) -> int:
    from anaphora.lab.importers import LogError
    from anaphora.lab.providers.advice import markings, replay
    from anaphora.lab.providers.catalogue import Catalogue
    from anaphora.lab.providers.segments import calls_of

    try:
        catalogue = Catalogue(args.rules)
        unknown = [name for name in args.provider if name not in catalogue.rules]
        if unknown:
            return fail(f"--provider: expected one of {', '.join(catalogue.rules)}, got {unknown[0]!r}", code=2)
        log, encoder = open_log(args)
        requests = list(islice(log.requests(), args.limit))
    except LogError as error:
        return fail(str(error))
    note_report(log.report)
    calls = calls_of(requests, encoder)
    if not calls:
        return fail(f"{args.log}: {len(requests):,} requests, none with text: there is nothing to replay")
    bills: list[Bill] = []
    for name in args.provider:
        prices = _prices(args, catalogue, name)
        for marking, marked in markings(calls, catalogue.rules[name]).items():
            bills.append(replay(marked, name, catalogue, marking, prices))
    shown = bills if args.all else _cheapest(bills)
    if args.json:
        rules = {name: {"as_of": r.as_of, "source": r.source} for name, r in catalogue.rules.items()}
        tokens = encoder.name if any(request.token_ids is None for request in requests) else "the log's own"
        result = {"read": log.report.as_dict(), "tokens": tokens, "rules": rules, "bills": [b.as_dict() for b in shown]}
        print(json.dumps(result, indent=2))
        return 0
    print(
        f"{args.log.name}: {len(calls):,} calls, {sum(call.num_tokens for call in calls):,} prompt tokens; tokens by "
        f"{encoder.name}.\nCost is that of prompts, in dollars where prices are known, and beside no cache at all.\n"
    )
    print(_table(shown).to_text())
    for name in args.provider:
        rules_used = catalogue.rules[name]
        print(f"\n{name}: {rules_used.title}, as of {rules_used.as_of} ({rules_used.source})", end="")
    print()
    return 0


def _prices(args: argparse.Namespace, catalogue: Catalogue, name: str) -> Prices | None:
    return None if args.price_input is None else catalogue.rules[name].prices(Decimal(args.price_input))


def _cheapest(bills: list[Bill]) -> list[Bill]:
    """Of each provider the log as it is marked, if it is, and the cheapest way."""
    from anaphora.lab.providers.advice import AS_MARKED, best

    shown = []
    for provider in dict.fromkeys(bill.provider for bill in bills):
        own = [bill for bill in bills if bill.provider == provider]
        shown += [bill for bill in own if bill.marking == AS_MARKED]
        cheapest = best(own)
        if cheapest not in shown:
            shown.append(cheapest)
    return shown


def _table(bills: list[Bill]) -> Table:
    from anaphora.lab.page import Table, percent

    rows = []
    for bill in bills:
        problems = ", ".join(f"{count:,} x {text[:60]}" for text, count in bill.problems.most_common(2))
        rows.append(
            [
                f"{bill.provider}: {bill.marking}",
                f"{bill.read:,}",
                f"{bill.write:,}",
                f"{bill.uncached:,}",
                percent(bill.hit_rate),
                "unknown price" if bill.cost is None else f"{bill.cost:.6f}",
                percent(float(bill.relative_cost / bill.relative_without)) if bill.num_tokens else "",
                problems,
            ]
        )
    header = ["provider: marks at", "read", "written", "uncached", "hit rate", "dollars", "of no cache", "problems"]
    return Table(header, rows)
