"""A log under a provider's rules: what it costs as it is marked, and where marks would make it cheapest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING

from anaphora.lab.providers.emulator import Emulator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from anaphora.lab.providers.catalogue import Catalogue, Prices, Rules
    from anaphora.lab.providers.segments import Call, Segment

_5M, _1H = 300, 3600
AS_MARKED = "as marked"


@dataclass(slots=True)
class Bill:
    """A log's prompts under one provider and one way to mark them. Tokens, and dollars where prices are known.

    relative_cost: the cost in input tokens at full price, which needs no price. problems: calls by what went wrong.
    """

    provider: str
    marking: str
    num_calls: int = 0
    num_tokens: int = 0
    read: int = 0
    write: int = 0
    write_1h: int = 0
    uncached: int = 0
    relative_cost: Decimal = Decimal(0)
    cost: Decimal | None = None
    problems: Counter[str] = field(default_factory=Counter)

    @property
    def hit_rate(self) -> float | None:
        """Tokens read over all."""
        return self.read / self.num_tokens if self.num_tokens else None

    @property
    def relative_without(self) -> Decimal:
        """The same without a cache: every token at full price."""
        return Decimal(self.num_tokens)

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            "provider": self.provider,
            "marking": self.marking,
            "calls": self.num_calls,
            "prompt_tokens": self.num_tokens,
            "read": self.read,
            "write": self.write,
            "write_1h": self.write_1h,
            "uncached": self.uncached,
            "hit_rate": self.hit_rate,
            "cost_in_input_tokens": str(self.relative_cost),
            "cost_usd": None if self.cost is None else f"{self.cost:.6f}",
            "problems": dict(self.problems),
        }


def replay(calls: Sequence[Call], provider: str, catalogue: Catalogue, marking: str, prices: Prices | None) -> Bill:
    """Serve all calls. prices: for all models; None looks each model up, and leaves the cost out if one is unknown."""
    bill = Bill(provider, marking)
    emulators: dict[str, tuple[Emulator, Rules, Prices | None]] = {}
    cost: Decimal | None = Decimal(0)
    for call in calls:
        if call.scope not in emulators:
            rules = catalogue.rules_for(provider, call.scope)
            row = catalogue.find_model(call.scope)
            own = catalogue.prices_of(call.scope) if row is not None and row["provider"] == provider else None
            emulators[call.scope] = Emulator(rules), rules, prices or own
        emulator, rules, known = emulators[call.scope]
        billed = emulator.serve(call)
        bill.num_calls += 1
        bill.num_tokens += call.num_tokens
        bill.read += billed.read
        bill.write += billed.write
        bill.write_1h += billed.write_1h
        bill.uncached += billed.uncached
        if billed.problem:
            bill.problems[billed.problem] += 1
        write_5m = billed.write - billed.write_1h
        unit = rules.prices(Decimal(1_000_000))
        bill.relative_cost += unit.cost(billed.uncached, billed.read, write_5m, billed.write_1h)
        if known is None:
            cost = None
        elif cost is not None:
            cost += known.cost(billed.uncached, billed.read, write_5m, billed.write_1h)
    bill.cost = cost
    return bill


def markings(calls: Sequence[Call], rules: Rules) -> dict[str, list[Call]]:
    """Ways to mark a log for a provider, each with the calls so marked. Automatic caches take no marks."""
    if rules.kind == "automatic":
        return {"none needed": list(calls)}
    repeated = _repeated(calls)
    found: dict[str, list[Call]] = {}
    if any(segment.ttl_s is not None for call in calls for segment in call.segments):
        found[AS_MARKED] = list(calls)
    if rules.kind == "breakpoints":
        found["no marks"] = [call.marked(lambda number, segment: None) for call in calls]
    lives = {"5 min": _5M, "1 h": _1H} if rules.write_1h != rules.write else {"": rules.ttl_s}
    for label, ttl_s in lives.items():
        for name, places in (
            ("end of system", [{_last_of(call, {"tools", "system"})} for call in calls]),
            ("end of prompt", [{len(call.segments) - 1} for call in calls]),
            ("end of system and of prompt", [_system_and_end(call) for call in calls]),
            ("last part that comes again", [{_last(flags)} for flags in repeated]),
        ):  # fmt: skip
            title = f"{name}, {label}" if label else name
            found[title] = [call.marked(_at(each, ttl_s)) for call, each in zip(calls, places, strict=True)]
    return found


def best(bills: Iterable[Bill]) -> Bill:
    """The cheapest, the simplest first among equals."""
    return min(bills, key=lambda bill: bill.relative_cost)


def _at(places: set[int], ttl_s: int) -> Callable[[int, Segment], int | None]:
    return lambda number, segment: ttl_s if number in places else None


def _last_of(call: Call, sections: set[str]) -> int:
    return max((n for n, segment in enumerate(call.segments) if segment.section in sections), default=-1)


def _system_and_end(call: Call) -> set[int]:
    return {_last_of(call, {"tools", "system"}), len(call.segments) - 1}


def _repeated(calls: Sequence[Call]) -> list[list[bool]]:
    """For each call, whether the prefix up to each segment is that of another call too."""
    names: dict[tuple[object, str], int] = {}
    paths: list[list[int]] = []
    for call in calls:
        before: object = call.scope
        path = []
        for segment in call.segments:
            before = names.setdefault((before, segment.key), len(names))
            path.append(before)
        paths.append(path)
    counts = Counter(name for path in paths for name in path)
    return [[counts[name] > 1 for name in path] for path in paths]


def _last(flags: Sequence[bool]) -> int:
    return max((number for number, flag in enumerate(flags) if flag), default=-1)
