"""A provider's rules as causes: the emulator with one rule after another in force, from none to all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from anaphora.lab.explain.fixes import Fix
from anaphora.lab.explain.volatile import FIXES
from anaphora.lab.importers.source import LogError
from anaphora.lab.providers.advice import AS_MARKED, markings
from anaphora.lab.providers.emulator import Emulator, check
from anaphora.lab.providers.segments import call_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anaphora.lab.explain.case import Case
    from anaphora.lab.explain.waterfall import Waterfall
    from anaphora.lab.providers.catalogue import Catalogue, Rules
    from anaphora.lab.providers.segments import Call

_NO_BOUND = 1 << 40
"""A life in seconds, a number of places: more than any log has."""


class ProviderCase:
    """A case under one provider's rules: each model's own minimum, each call's own marks.

    Raises LogError: a request without text, whose parts no provider could tell apart.
    """

    def __init__(self, case: Case, catalogue: Catalogue, provider: str) -> None:
        clock = 0.0
        self.calls: list[Call] = []
        for request in case.requests:
            clock = clock if request.time_s is None else request.time_s
            call = call_of(request, case.encoder, clock)
            if call is None:
                raise LogError(
                    f"--provider: line {request.line}: needs prompts as text, to see where they may be cached"
                )
            self.calls.append(call)
        self._catalogue = catalogue
        self.rules = catalogue.rules[provider]

    def levels(self) -> list[tuple[str, list[int]]]:
        """What would be read, request by request, with no rule in force, then with one more at a time; each under the
        name of the rule that came last."""
        rules, calls = self.rules, self.calls
        step = f"below the provider's step ({rules.step_tokens})"
        if rules.kind == "automatic":
            free = _changed(minimum_tokens=0, step_tokens=1, ttl_s=_NO_BOUND)
            return [
                ("last token", self._reads(calls, free)),
                *(
                    [(step, self._reads(calls, _changed(minimum_tokens=0, ttl_s=_NO_BOUND)))]
                    if rules.step_tokens > 1
                    else []
                ),
                (self._minimum(), self._reads(calls, _changed(ttl_s=_NO_BOUND))),
                (self._expired(), self._reads(calls, _changed())),
            ]
        everywhere = [_now(call.marked(lambda number, segment: _NO_BOUND)) for call in calls]
        lasting = [_now(call.marked(lambda n, segment: None if segment.ttl_s is None else _NO_BOUND)) for call in calls]
        refused = [bool(check(call, self._rules_of(call))) for call in calls]
        taken = [_unmarked(call) if is_refused else call for call, is_refused in zip(lasting, refused, strict=True)]
        at_once = [
            _unmarked(_now(call)) if is_refused else _now(call) for call, is_refused in zip(calls, refused, strict=True)
        ]
        unbounded = _changed(lookback=_NO_BOUND, max_marks=_NO_BOUND, ttl_s=_NO_BOUND)
        found = [
            ("not at the end of a content block", self._reads(everywhere, _changed(
                minimum_tokens=0, lookback=_NO_BOUND, max_marks=_NO_BOUND, ttl_s=_NO_BOUND))),
            (self._minimum(), self._reads(everywhere, unbounded)),
        ]  # fmt: skip
        if rules.kind == "breakpoints":
            found.append(("breakpoint missing", self._reads(lasting, unbounded)))
            if any(refused):
                found.append(("refused by the provider", self._reads(taken, unbounded)))
            found.append(
                (
                    f"beyond the lookback ({rules.lookback})",
                    self._reads(taken, _changed(max_marks=_NO_BOUND, ttl_s=_NO_BOUND)),
                )
            )
        else:
            found.append(
                ("not among the prefixes that are written and read", self._reads(taken, _changed(ttl_s=_NO_BOUND)))
            )
        found.append((self._expired(), self._reads(at_once, _changed())))
        if any(call.readable_s is not None for call in calls):
            found.append(("asked before the answer that writes it had begun", self._reads(calls, _changed())))
        return found

    def fixes(self, found: Waterfall) -> list[Fix]:
        """Other ways to mark the same log, the three that read most more, each a run under all rules; and what prompts
        lose by diverging, which is a bound."""
        marks = []
        for name, marked in markings(self.calls, self.rules).items():
            if name not in {AS_MARKED, "no marks", "none needed"}:
                marks.append(Fix(f"marks: {name}", sum(self._reads(marked, _changed())) - found.predicted))
        marks.sort(key=lambda fix: -fix.num_tokens)
        lost: dict[str, float] = {}
        for cause in found.causes:
            kind = cause.name.removeprefix("diverged: ").rpartition(" in ")[0]
            if kind in FIXES:
                lost[kind] = lost.get(kind, 0.0) + cause.num_tokens
        bounds = [Fix(FIXES[kind], num_tokens, is_bound=True) for kind, num_tokens in lost.items()]
        every = [*marks[:3], *bounds]
        return sorted((fix for fix in every if fix.num_tokens >= 1), key=lambda fix: -fix.num_tokens)

    def _rules_of(self, call: Call) -> Rules:
        return self._catalogue.rules_for(self.rules.name, call.scope)

    def _reads(self, calls: Sequence[Call], change: Callable[[Rules], Rules]) -> list[int]:
        emulators: dict[str, Emulator] = {}
        found = []
        for call in calls:
            emulator = emulators.get(call.scope)
            if emulator is None:
                emulator = emulators[call.scope] = Emulator(change(self._rules_of(call)))
            found.append(emulator.serve(call).read)
        return found

    def _minimum(self) -> str:
        minimums = {self._rules_of(call).minimum_tokens for call in self.calls}
        return f"below the provider's minimum ({', '.join(map(str, sorted(minimums)))})"

    def _expired(self) -> str:
        lives = {segment.ttl_s for call in self.calls for segment in call.segments if segment.ttl_s is not None}
        if self.rules.kind == "automatic" or not lives:
            lives = {self.rules.ttl_s}
        return f"expired by the provider's time to live ({', '.join(f'{life:g} s' for life in sorted(lives))})"


def _changed(**changes: int) -> Callable[[Rules], Rules]:
    return lambda rules: replace(rules, **changes)  # type: ignore[arg-type]


def _now(call: Call) -> Call:
    """The same, if what it writes could be read at once."""
    return replace(call, readable_s=None)


def _unmarked(call: Call) -> Call:
    return call.marked(lambda number, segment: None)
