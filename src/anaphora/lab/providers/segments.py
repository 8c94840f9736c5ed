"""A request as a provider's cache sees it: segments in the order tools, system, messages, some of them marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anaphora.lab.encoding import encode_parts

if TYPE_CHECKING:
    from anaphora.lab.encoding import Encoder
    from anaphora.lab.record import LoggedRequest


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece that is equal or not, with its tokens.

    key: equal keys are equal content. kind: the content block's type. ends_message: a message, the system prompt or the
    tools end with it. ttl_s: a mark stands at its end and lasts so long.
    """

    key: str
    num_tokens: int
    path: str = ""
    section: str = "messages"
    kind: str = "text"
    ends_message: bool = True
    ttl_s: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A request: when it came, when what it writes can be read, its segments. `num_tail_tokens` follow the last one.

    scope: what its entries are shared within (model, workspace). ids: the prompt's tokens where they are known, for
    caches that find any prefix.
    """

    segments: tuple[Segment, ...]
    time_s: float = 0.0
    readable_s: float | None = None
    scope: str = ""
    num_tail_tokens: int = 0
    line: int = 0
    ids: bytes = b""

    @property
    def num_tokens(self) -> int:
        """The whole prompt."""
        return sum(segment.num_tokens for segment in self.segments) + self.num_tail_tokens

    def marked(self, at: Callable[[int, Segment], int | None]) -> Call:
        """The same with marks where `at(number, segment)` gives a time to live, and nowhere else."""
        return replace(self, segments=tuple(replace(s, ttl_s=at(number, s)) for number, s in enumerate(self.segments)))


def call_of(request: LoggedRequest, encoder: Encoder, clock: float) -> Call | None:
    """A logged request as a call; None for one without text. Encoded lengths are brought to the stated length."""
    parts = request.parts
    if not any(part.text for part in parts):
        return None
    encoded = encode_parts(parts, encoder)
    starts = encoded.part_starts
    whole = request.length or (len(request.token_ids) // 4 if request.token_ids else encoded.num_tokens)
    scale = whole / max(1, encoded.num_tokens)
    # The end of each segment, so that rounding moves no token from one to another twice.
    ends = [round(start * scale) for start in (*starts[1:],)]
    segments = []
    before = 0
    for number, part in enumerate(parts):
        following = parts[number + 1] if number + 1 < len(parts) else None
        segments.append(
            Segment(
                f"{part.section}\0{part.role}\0{part.kind}\0{part.text}",
                max(0, ends[number] - before),
                part.path,
                part.section,
                part.kind,
                following is None or _message(following.path) != _message(part.path),
                part.ttl_s,
            )
        )
        before = max(before, ends[number])
    if request.auto_ttl_s is not None and segments:
        segments[-1] = replace(segments[-1], ttl_s=segments[-1].ttl_s or request.auto_ttl_s)
    return Call(
        tuple(segments),
        clock if request.time_s is None else request.time_s,
        request.first_token_s,
        request.model or "",
        max(0, whole - before),
        request.line,
        request.token_ids or encoded.ids,
    )


def calls_of(requests: Sequence[LoggedRequest], encoder: Encoder) -> list[Call]:
    """All calls with text, in order of time."""
    clock = 0.0
    found = []
    for request in requests:
        clock = clock if request.time_s is None else request.time_s
        call = call_of(request, encoder, clock)
        if call is not None:
            found.append(call)
    return sorted(found, key=lambda call: call.time_s)


def _message(path: str) -> str:
    return path.partition("]")[0] if path.startswith(("messages[", "input[")) else path.partition("[")[0]
