"""A provider's cache on a log's own clock: what each call would read and write.

`breakpoints` is Anthropic's and Bedrock's: an entry is written at each mark and nowhere else; from each mark a read
tries `lookback` positions back, its own first, where a run of tool_use or of tool_result blocks is one position; the
longest live entry is read, and renewed; what lies between it and the last mark is written. `messages` is OpenAI's from
gpt-5.6 on: message ends and marks are read, the last message end and the latest marks are written, and a shorter
unmarked prefix is never found. `automatic` finds any prefix, in steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from anaphora.lab.expiry import Expiry
from anaphora.lab.trace import Prompt
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from anaphora.lab.providers.catalogue import Rules
    from anaphora.lab.providers.segments import Call, Segment

_HOUR_S = 3600
_RUNS = ("tool_use", "tool_result")


class Billed(NamedTuple):
    """One call in the provider's counts: tokens read, written (of these `write_1h` at the long price) and the rest."""

    read: int
    write: int
    write_1h: int
    uncached: int
    problem: str = ""
    """Why nothing could be cached: below_minimum, no_mark; or, for a call that is refused, the message."""


@dataclass(slots=True)
class _Entry:
    expires_s: float
    ttl_s: float
    readable_s: float


class _Place(NamedTuple):
    """Where a segment ends: the name of the prefix up to there, its tokens, its position, its mark."""

    name: int
    num_tokens: int
    position: int
    ttl_s: int | None
    ends_message: bool


class Emulator:
    """One provider's cache. `serve` calls in order of time. Memory: the distinct prefixes of the log."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._names: dict[tuple[object, str], int] = {}
        self._entries: dict[int, _Entry] = {}
        self._expiry = Expiry(rules.ttl_s, rules.step_tokens, 1)

    def serve(self, call: Call) -> Billed:
        """Serve one call."""
        refusal = check(call, self._rules)
        if refusal:
            return Billed(0, 0, 0, call.num_tokens, refusal)
        places = self._places(call)
        kind = self._rules.kind
        if kind == "automatic":
            return self._serve_automatic(call, places)
        return self._serve_messages(call, places) if kind == "messages" else self._serve_marks(call, places)

    def _places(self, call: Call) -> list[_Place]:
        places: list[_Place] = []
        before: object = call.scope
        num_tokens, position, kind = 0, 0, ""
        for segment in call.segments:
            name = self._names.setdefault((before, segment.key), len(self._names))
            num_tokens += segment.num_tokens
            if not (segment.kind in _RUNS and segment.kind == kind):
                position += 1
            kind, before = segment.kind, name
            places.append(_Place(name, num_tokens, position, segment.ttl_s, segment.ends_message))
        return places

    def _serve_marks(self, call: Call, places: list[_Place]) -> Billed:
        marks = [place for place in places if place.ttl_s is not None]
        if not marks:
            return Billed(0, 0, 0, call.num_tokens, "no_mark")
        marks = [mark for mark in marks if mark.num_tokens >= self._rules.minimum_tokens]
        if not marks:
            return Billed(0, 0, 0, call.num_tokens, "below_minimum")
        read = 0
        for mark in marks:
            within = mark.position - self._rules.lookback
            candidates = [p for p in places if within < p.position <= mark.position and p.num_tokens <= mark.num_tokens]
            read = max(read, self._read(call, candidates))
        last = marks[-1].num_tokens
        hours = [m.num_tokens for m in marks if (m.ttl_s or 0) >= _HOUR_S and m.num_tokens > read]
        to_hour = max(hours, default=read)
        for mark in marks:
            self._write(call, mark, float(mark.ttl_s or self._rules.ttl_s))
        write_1h = max(0, to_hour - read)
        write = max(0, last - max(read, to_hour))
        return Billed(read, write + write_1h, write_1h, call.num_tokens - max(last, read))

    def _serve_messages(self, call: Call, places: list[_Place]) -> Billed:
        rules = self._rules
        explicit = [place for place in places if place.ttl_s is not None]
        ends = [place for place in places if place.ends_message]
        read = self._read(call, sorted({*explicit, *ends}, key=lambda p: p.num_tokens)[-rules.lookback :])
        written = [*explicit[-(rules.max_marks - 1) :], *ends[-1:]]
        written = [place for place in written if place.num_tokens >= rules.minimum_tokens]
        if not written:
            return Billed(0, 0, 0, call.num_tokens, "below_minimum")
        for place in written:
            self._write(call, place, float(place.ttl_s or rules.ttl_s))
        last = max(place.num_tokens for place in written)
        write = max(0, last - read)
        return Billed(read, write, 0, call.num_tokens - max(last, read))

    def _serve_automatic(self, call: Call, places: list[_Place]) -> Billed:
        rules = self._rules
        if call.ids:
            prompt = Prompt(call.ids, None, len(call.ids) // TOKEN_BYTES, call.time_s, session=call.scope)
            shared = round(self._expiry.use(prompt, call.scope) * call.num_tokens / prompt.num_tokens)
        else:
            shared = self._shared_places(call, places)
        shared = min(shared, call.num_tokens - 1)
        shared -= shared % rules.step_tokens
        problem = "" if call.num_tokens >= rules.minimum_tokens else "below_minimum"
        read = shared if shared >= rules.minimum_tokens else 0
        return Billed(read, 0, 0, call.num_tokens - read, problem)

    def _shared_places(self, call: Call, places: list[_Place]) -> int:
        """Where only lengths are known: whole segments that an earlier call began with."""
        shared = 0
        for place in places:
            entry = self._entries.get(place.name)
            if entry is None or not _is_live(entry, call):
                break
            shared = place.num_tokens
        for place in places:
            self._write(call, place, float(self._rules.ttl_s))
        return shared

    def _read(self, call: Call, candidates: list[_Place]) -> int:
        """The longest live entry among these, renewed."""
        for place in reversed(candidates):
            entry = self._entries.get(place.name)
            if entry is not None and _is_live(entry, call):
                entry.expires_s = call.time_s + entry.ttl_s
                return place.num_tokens
        return 0

    def _write(self, call: Call, place: _Place, ttl_s: float) -> None:
        """Make or renew an entry. It can be read when the answer has begun; its life counts from the request."""
        readable_s = call.time_s if call.readable_s is None else call.readable_s
        entry = self._entries.get(place.name)
        if entry is not None and _is_live(entry, call):
            entry.expires_s = max(entry.expires_s, call.time_s + ttl_s)
            entry.ttl_s = max(entry.ttl_s, ttl_s)
        else:
            self._entries[place.name] = _Entry(call.time_s + ttl_s, ttl_s, readable_s)


def _is_live(entry: _Entry, call: Call) -> bool:
    return entry.readable_s <= call.time_s <= entry.expires_s


def check(call: Call, rules: Rules) -> str:
    """Why a provider refuses a call's marks, as its error says it; '' if it does not. Tools count like the rest."""
    if rules.kind != "breakpoints":
        return ""
    marked: list[Segment] = [segment for segment in call.segments if segment.ttl_s is not None]
    if len(marked) > rules.max_marks:
        return f"A maximum of {rules.max_marks} blocks with cache_control may be provided. Found {len(marked)}."
    for number, segment in enumerate(marked[1:], 1):
        if (segment.ttl_s or 0) > (marked[number - 1].ttl_s or 0):
            return (
                f"{_dotted(segment.path)}.cache_control.ttl: a ttl='1h' cache_control block must not come after a "
                "ttl='5m' cache_control block. Note that blocks are processed in the following order: tools, system, "
                "messages."
            )
    return ""


def _dotted(path: str) -> str:
    return path.replace("[", ".").replace("]", "").removesuffix(".text")
