"""What each replica is doing for us, and how fast it is: counted as requests go by."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_SMOOTHING = 0.2
_MIN_SAMPLE_TOKENS = 32
_MIN_OVERDUE_S = 0.5
_SURE_SAMPLES = 10
_SURE_RATIO = 1.5


@dataclass(slots=True)
class Load:
    """One replica's load and measured speed.

    prefill_tokens_per_s: moving mean over requests that found no queue. service_s: moving mean of a request's life.
    """

    prefill_tokens_per_s: float = 5000.0
    num_samples: int = 0
    service_s: float = 2.0
    inflight: set[Flight] = field(default_factory=set)
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0

    def inflight_tokens(self, now: float) -> int:
        """Prompt tokens of unfinished requests that are still to compute.

        A streamed answer's first byte says that its prompt is done. Of others nothing is seen before their end, so
        after twice the time that it should have taken, a prompt is taken to be done.
        """
        return sum(flight.tokens for flight in self.inflight if now < flight.overdue)

    def depart(self, uncached_tokens: int, now: float) -> Flight:
        """A request is sent. `now`: seconds, of any clock that does not go back."""
        queued = self.inflight_tokens(now)
        overdue = now + _MIN_OVERDUE_S + 2 * (queued + uncached_tokens) / self.prefill_tokens_per_s
        flight = Flight(self, uncached_tokens, now, overdue, found_queue=queued > 0)
        self.inflight.add(flight)
        return flight


def pooled_speed(loads: Iterable[Load]) -> float:
    """Return the median speed of the replicas that have shown theirs; any replica's where none has."""
    loads = list(loads)
    shown = [load.prefill_tokens_per_s for load in loads if load.num_samples]
    return median(shown) if shown else Load().prefill_tokens_per_s


def believed_speed(load: Load, pooled: float) -> float:
    """Return a replica's own speed where it is surely another than its fellows', else theirs.

    Noise must not steer: of equal replicas the one that once seemed fastest would get every cold prompt.
    """
    own = load.prefill_tokens_per_s
    is_other = load.num_samples >= _SURE_SAMPLES and not pooled / _SURE_RATIO < own < pooled * _SURE_RATIO
    return own if is_other else pooled


@dataclass(slots=True, eq=False)
class Flight:
    """A request on its way. tokens: of its prompt, still to compute, until the time `overdue`."""

    load: Load
    tokens: int
    departed: float
    overdue: float
    found_queue: bool

    def arrive(self, now: float, *, is_stream: bool = True) -> None:
        """The first byte of the answer came: the prompt is computed. Only a stream's tells how fast."""
        uncached, self.tokens = self.tokens, 0
        took = now - self.departed
        if is_stream and not self.found_queue and uncached >= _MIN_SAMPLE_TOKENS and took > 0:
            speed = min(max(uncached / took, 10.0), 1e6)
            self.load.num_samples += 1
            self.load.prefill_tokens_per_s += _SMOOTHING * (speed - self.load.prefill_tokens_per_s)

    def end(self, now: float, *, succeeded: bool = True) -> None:
        """The answer is complete, or will not come. Idempotent."""
        if self not in self.load.inflight:
            return
        self.load.inflight.discard(self)
        if succeeded:
            self.load.service_s += _SMOOTHING * (now - self.departed - self.load.service_s)
