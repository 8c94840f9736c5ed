"""Requests that arrive at given times, through an engine, on whichever clock it runs: a wall's or a virtual one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anaphora.engine.loop import Engine
    from anaphora.engine.request import FinishReason, Request


class Clock(Protocol):
    """Tells the time and lets it pass. The engine must have been given the same one."""

    def __call__(self) -> float:
        """Return seconds from any origin."""
        ...

    def wait_until(self, time_s: float) -> None:
        """Return when it is `time_s`, at once if that is past."""
        ...


class WallClock:
    """The machine's own time, from 0 at its making."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()

    def __call__(self) -> float:
        """Return the seconds since it was made."""
        return time.perf_counter() - self._origin

    def wait_until(self, time_s: float) -> None:
        """Sleep."""
        time.sleep(max(0.0, time_s - self()))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it comes, in seconds from the start of the replay."""

    time_s: float
    request: Request


@dataclass(slots=True)
class Served:
    """What became of one arrival. Times are in seconds from the start of the replay, -1 for what did not happen."""

    request_id: str
    arrived_s: float
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    first_token_s: float = -1.0
    finished_s: float = -1.0
    finish_reason: FinishReason | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token, from arrival."""
        return self.first_token_s - self.arrived_s


def replay(
    engine: Engine, clock: Clock, arrivals: Iterable[Arrival], *, concurrency: int | None = None
) -> list[Served]:
    """Submit each request at its time and step the engine until all have ended; return their records in order.

    A request arrives between two steps at the earliest, as it does in a server; its wait counts from its own time.
    arrivals: in order of time.
    concurrency: clients, each of which sends nothing while it waits for an answer: a request whose time has come
        arrives when one of them is free. None: nobody waits for anybody.

    Raises:
        RequestError: the engine can never serve one of them.
        ValueError: the times go back.
    """
    origin = clock()
    records: dict[str, Served] = {}
    upcoming = iter(arrivals)
    following = next(upcoming, None)
    num_free = concurrency or 0
    freed_s = 0.0
    while following is not None or engine.has_work:
        if following is not None and not engine.has_work:
            clock.wait_until(origin + following.time_s)
        now = clock() - origin
        while following is not None and following.time_s <= now and (concurrency is None or num_free):
            request = following.request
            engine.submit(request)
            num_free -= 1
            records[request.request_id] = Served(request.request_id, max(following.time_s, freed_s))
            before, following = following.time_s, next(upcoming, None)
            if following is not None and following.time_s < before:
                raise ValueError(f"arrivals: {following.request.request_id!r} comes before the one ahead of it")
        deltas = engine.step()
        now = clock() - origin
        for delta in deltas:
            record = records[delta.request_id]
            if record.first_token_s < 0 and delta.token_ids:
                record.first_token_s = now
                record.num_prompt_tokens = delta.num_prompt_tokens
                record.num_cached_tokens = delta.num_cached_tokens
            if delta.finish_reason is not None:
                num_free += 1
                freed_s = 0.0 if concurrency is None else now
                record.finished_s = now
                record.num_output_tokens = delta.num_output_tokens
                record.finish_reason = delta.finish_reason
    return list(records.values())
