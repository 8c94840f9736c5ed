"""What is measured. Everything is made of one call: continue these prompts by so many tokens."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DECODE_STEPS = 16
SUFFIX_TOKENS = 20
SEED = 0


class Engine(Protocol):
    """What can continue prompts and says how many seconds that took."""

    name: str

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Continue prompts by `num_tokens` each."""


class Prompts:
    """Random ordinary tokens, so that no two prompts begin alike unless they are made to."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        """Return new ones."""
        return [self._random.randrange(1_000, 40_000) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure: its name, its unit, and how to take it once from an engine."""

    name: str
    unit: str
    take: Callable[[Engine, Prompts], float]


def prefill(num_tokens: int) -> Measure:
    """A prompt that nobody has seen, up to its first token."""

    def take(engine: Engine, prompts: Prompts) -> float:
        return num_tokens / engine.run([prompts.tokens(num_tokens)], 1)

    return Measure(f"prefill {num_tokens}", "tokens/s", take)


def decode(num_sequences: int, context: int, *, is_shared: bool = False) -> Measure:
    """A step that adds a token to each sequence: DECODE_STEPS + 1 of them after cached prompts, less 1 after them."""

    def take(engine: Engine, prompts: Prompts) -> float:
        common = prompts.tokens(context - 1) if is_shared else None
        batch = [[*(common or prompts.tokens(context - 1)), *prompts.tokens(1)] for _ in range(num_sequences)]
        if is_shared:
            engine.run(batch[:1], 1)
        engine.run(batch, 1)
        first = engine.run(batch, 1)
        return max(0.0, engine.run(batch, 1 + DECODE_STEPS) - first) / DECODE_STEPS * 1e3

    kind = " shared" if is_shared else ""
    return Measure(f"decode {num_sequences} x {context}{kind}", "ms a step", take)


def first_token(num_tokens: int, *, is_warm: bool) -> Measure:
    """A prompt and SUFFIX_TOKENS after it, up to the first token: all of it new, or the prompt cached."""

    def take(engine: Engine, prompts: Prompts) -> float:
        prompt = prompts.tokens(num_tokens)
        if is_warm:
            engine.run([prompt], 1)
        return engine.run([[*prompt, *prompts.tokens(SUFFIX_TOKENS)]], 1) * 1e3

    return Measure(f"TTFT {num_tokens}+{SUFFIX_TOKENS} {'warm' if is_warm else 'cold'}", "ms", take)


def requests(num_requests: int, shared: int, own: int, num_tokens: int) -> Measure:
    """Many requests at once over a shared prefix that nobody has seen."""

    def take(engine: Engine, prompts: Prompts) -> float:
        common = prompts.tokens(shared)
        batch = [[*common, *prompts.tokens(own)] for _ in range(num_requests)]
        return num_requests / engine.run(batch, num_tokens)

    return Measure(f"{num_requests} x ({shared} shared + {own} -> {num_tokens})", "requests/s", take)


def measures(*, quick: bool) -> list[Measure]:
    """All of them, or those that take a minute."""
    if quick:
        return [prefill(128), prefill(1000), decode(1, 128), decode(8, 128), first_token(1000, is_warm=True)]
    return [
        *(prefill(n) for n in (128, 1000, 4000)),
        *(decode(n, 128) for n in (1, 8, 32)),
        *(first_token(n, is_warm=warm) for n in (1000, 4000) for warm in (False, True)),
        decode(16, 4000, is_shared=True),
        decode(16, 4000),
        requests(64, 1500, 50, 32),
    ]


@dataclass(frozen=True, slots=True)
class Figure:
    """Medians, and how far the values were apart: (largest - smallest) / median."""

    contestant: str
    measure: str
    unit: str
    median: float
    spread: float


def take_turns(engines: Sequence[Engine], chosen: Sequence[Measure], num_rounds: int) -> Iterator[Figure]:
    """Measure each with all engines, one after the other, round by round; a round before is thrown away.

    In a round every engine gets the same prompts.
    """
    for number, measure in enumerate(chosen):
        values: dict[str, list[float]] = {engine.name: [] for engine in engines}
        for turn in range(num_rounds + 1):
            for engine in engines:
                value = measure.take(engine, Prompts(hash((SEED, number, turn))))
                if turn:
                    values[engine.name].append(value)
        for name, of_engine in values.items():
            median = statistics.median(of_engine)
            spread = (max(of_engine) - min(of_engine)) / median if median else 0.0
            yield Figure(name, measure.name, measure.unit, median, spread)
