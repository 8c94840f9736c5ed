"""Pickers: from scores to an order of replicas, the choice first. The names and rules are llm-d's (v0.9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping


class Picker(Protocol):
    """Orders replicas by their total scores."""

    def pick(self, totals: Mapping[str, float], rng: random.Random) -> list[str]:
        """Return the choice and its fallbacks, in order; `totals` has at least one."""
        ...


@dataclass(frozen=True, slots=True)
class MaxScorePicker:
    """max-score-picker: the best, drawn among equals."""

    max_num_of_endpoints: int = 1

    def pick(self, totals: Mapping[str, float], rng: random.Random) -> list[str]:
        """See Picker."""
        names = list(totals)
        rng.shuffle(names)
        names.sort(key=lambda name: -totals[name])
        return names[: self.max_num_of_endpoints]


@dataclass(frozen=True, slots=True)
class RandomPicker:
    """random-picker: any."""

    max_num_of_endpoints: int = 1

    def pick(self, totals: Mapping[str, float], rng: random.Random) -> list[str]:
        """See Picker."""
        names = list(totals)
        rng.shuffle(names)
        return names[: self.max_num_of_endpoints]


@dataclass(frozen=True, slots=True)
class WeightedRandomPicker:
    """weighted-random-picker: drawn with chances in proportion to the scores, without replacement."""

    max_num_of_endpoints: int = 1

    def pick(self, totals: Mapping[str, float], rng: random.Random) -> list[str]:
        """See Picker. The largest of U^(1/score) each (algorithm A-Res)."""
        names = list(totals)
        rng.shuffle(names)
        keys = {name: rng.random() ** (1 / score) if (score := totals[name]) > 0 else 0.0 for name in names}
        names.sort(key=lambda name: -keys[name])
        return names[: self.max_num_of_endpoints]


PICKERS: dict[str, Callable[..., Picker]] = {
    "max-score-picker": MaxScorePicker,
    "random-picker": RandomPicker,
    "weighted-random-picker": WeightedRandomPicker,
}
"""By the type that a configuration file names."""
