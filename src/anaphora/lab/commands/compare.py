"""`anaphora compare A.json B.json`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from anaphora.lab.commands.options import fail

if TYPE_CHECKING:
    import argparse

    from anaphora.lab.record import LoggedRequest


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.set_defaults(run=_compare)
    parser.add_argument("one", metavar="A.json", type=Path, help="the request that comes first")
    parser.add_argument("other", metavar="B.json", type=Path, help="the request that is to reuse it")
    parser.add_argument("--tokenizer", metavar="PATH", help="a model here to count tokens with (default: estimate)")
    parser.add_argument("--rules", type=Path, metavar="FILE.toml", help="overrides the table of providers")
    parser.add_argument("--show", action="store_true", help="show the text on both sides of the difference")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _compare(args: argparse.Namespace) -> int:
    from anaphora.lab.compare import compare
    from anaphora.lab.encoding import EstimatingEncoder, ModelEncoder
    from anaphora.lab.importers import LogError
    from anaphora.lab.page import Table, percent
    from anaphora.lab.providers.catalogue import Catalogue

    try:
        encoder = ModelEncoder(args.tokenizer) if args.tokenizer else EstimatingEncoder()
        one, other = _only(args.one), _only(args.other)
        found = compare(one, other, encoder, Catalogue(args.rules))
    except LogError as error:
        return fail(str(error))
    except ValueError as error:
        return fail(f"{args.one}, {args.other}: {error}")
    if args.json:
        values = asdict(found)
        values["difference"] = None if found.difference is None else found.difference._asdict()
        values["providers"] = {name: billed._asdict() for name, billed in found.providers.items()}
        print(json.dumps(values, indent=2))
        return 0
    share = found.shared_tokens / found.num_tokens[1] if found.num_tokens[1] else None
    print(f"{found.shared_tokens:,} of B's {found.num_tokens[1]:,} tokens are A's too ({percent(share)}); A has "
          f"{found.num_tokens[0]:,}. Tokens by {encoder.name}.")  # fmt: skip
    if found.difference is None:
        print("One begins with the other.")
    else:
        where = found.difference
        print(f"They part at {where.path}, character {where.offset:,} ({where.kind}).")
        if args.show:
            for name, request in (("A", one), ("B", other)):
                text = next((part.text for part in request.parts if part.path == where.path), "")
                print(f"  {name}: {text[max(0, where.offset - 40) : where.offset + 40]!r}")
    if found.fixed_tokens > found.shared_tokens:
        print(f"Without changing times, identifiers, orders and white space: {found.fixed_tokens:,} tokens.")
    if found.boundaries:
        print(f"Different besides the text: {', '.join(found.boundaries)}.")
    rows = [[name, f"{num:,}"] for name, num in found.engines.items()]
    print("\n" + Table(["engine", "B's cached tokens after A"], rows).to_text())
    if found.providers:
        rows = [
            [name, f"{b.read:,}", f"{b.write:,}", f"{b.uncached:,}", b.problem[:70]]
            for name, b in found.providers.items()
        ]
        print("\n" + Table(["provider", "read", "written", "uncached", ""], rows).to_text())
    return 0


def _only(path: Path) -> LoggedRequest:
    """The request in a file. Raises LogError: it has none, or it cannot be read."""
    from anaphora.lab.importers import LogError, open_requests

    log = open_requests(path)
    request = next(log.requests(), None)
    if request is None:
        reason = log.report.bad[0][1] if log.report.bad else "it is empty"
        raise LogError(f"{path}: no request in it: {reason}")
    return request
