"""Logs that tell usage and no text: what a session's own earlier requests say about what should have been cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anaphora.lab.explain.waterfall import Cause

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anaphora.lab.record import LoggedRequest

_HOUR_S = 3600.0
_SHRUNK = 0.9
"""A prompt shorter than this share of the one before is taken to have lost history on purpose."""

NAMES = (
    "first of a session",
    "new in this request",
    "expired: idle for longer than the time to live",
    "model changed",
    "history was cut or compacted",
    "lost for a reason that the log does not tell",
)


@dataclass(slots=True)
class SessionReport:
    """Where uncached tokens come from. Only requests that report cached tokens are in it.

    not_reported: requests that say nothing of their cache, and their prompt tokens.
    """

    num_sessions: int
    num_requests: int
    num_tokens: int
    cached: int
    causes: list[Cause]
    not_reported: tuple[int, int]

    @property
    def reported_rate(self) -> float | None:
        """Cached over prompt tokens; None where nothing was reported."""
        return self.cached / self.num_tokens if self.num_tokens else None


def explain_sessions(requests: Iterable[LoggedRequest], ttl_s: float) -> SessionReport:
    """A session's next prompt begins with the one before, so as much should have been cached, if it was in time.

    ttl_s: of entries; an hour for what was written for an hour.
    """
    causes = {name: Cause(name) for name in NAMES}
    latest: dict[str | None, LoggedRequest] = {}
    num_requests = num_tokens = cached = silent = silent_tokens = 0
    for request in sorted(requests, key=lambda each: each.time_s or 0.0):
        usage = request.usage
        if usage is None or usage.cached is None:
            silent += 1
            silent_tokens += request.length or 0
            continue
        num_requests += 1
        num_tokens += usage.prompt
        cached += usage.cached
        uncached = usage.prompt - usage.cached
        before = latest.get(request.session) if request.session is not None else None
        if before is None or before.usage is None:
            causes[NAMES[0]].add(uncached)
        else:
            lost = max(0, min(before.usage.prompt, usage.prompt) - usage.cached)
            causes[_reason(before, request, ttl_s)].add(lost)
            causes[NAMES[1]].add(uncached - lost)
        latest[request.session] = request
    kept = [cause for cause in causes.values() if cause.num_requests]
    return SessionReport(len(latest), num_requests, num_tokens, cached, kept, (silent, silent_tokens))


def _reason(before: LoggedRequest, request: LoggedRequest, ttl_s: float) -> str:
    earlier, usage = before.usage, request.usage
    assert earlier is not None, "only requests with usage are compared"
    assert usage is not None, "only requests with usage are compared"
    life_s = max(ttl_s, _HOUR_S) if earlier.written_1h else ttl_s
    if before.model != request.model:
        return NAMES[3]
    if usage.prompt < earlier.prompt * _SHRUNK:
        return NAMES[4]
    if before.time_s is not None and request.time_s is not None and request.time_s - before.time_s > life_s:
        return NAMES[2]
    return NAMES[5]
