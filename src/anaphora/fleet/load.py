"""What each replica is doing for us, and how fast it is: counted as requests go by."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_SMOOTHING = 0.2
_MIN_SAMPLE_TOKENS = 32
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

    @property
    def inflight_tokens(self) -> int:
        """Prompt tokens of unfinished requests that are still to compute."""
        return sum(flight.tokens for flight in self.inflight)

    def depart(self, uncached_tokens: int, now: float) -> Flight:
        """A request is sent. `now`: seconds, of any clock that does not go back."""
        flight = Flight(self, uncached_tokens, now, found_queue=any(other.tokens for other in self.inflight))
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
    """A request on its way. `tokens`: of its prompt, still to compute."""

    load: Load
    tokens: int
    departed: float
    found_queue: bool
    first_byte: float | None = None

    def __post_init__(self) -> None:
        self._uncached = self.tokens

    _uncached: int = field(init=False, default=0)

    def arrive(self, now: float) -> None:
        """The first byte of a streamed answer came: the prompt is computed."""
        if self.first_byte is not None:
            return
        self.first_byte = now
        self.tokens = 0
        took = now - self.departed
        if not self.found_queue and self._uncached >= _MIN_SAMPLE_TOKENS and took > 0:
            speed = min(max(self._uncached / took, 10.0), 1e6)
            self.load.num_samples += 1
            self.load.prefill_tokens_per_s += _SMOOTHING * (speed - self.load.prefill_tokens_per_s)

    def end(self, now: float, *, succeeded: bool = True) -> None:
        """The answer is complete, or will not come. Idempotent."""
        if self not in self.load.inflight:
            return
        self.load.inflight.discard(self)
        if succeeded:
            self.load.service_s += _SMOOTHING * (now - self.departed - self.load.service_s)
