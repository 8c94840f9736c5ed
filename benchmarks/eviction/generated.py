"""Generated workloads, so that no policy is judged by two files alone. Seeded; times in seconds, blocks of any size."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from .trace import Trace

Prefixes = Sequence[list[int]]


class Generator:
    """Writes prompts as lists of fresh or shared block ids. Each method adds one kind of traffic to ``prompts``."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._next_id = 0
        self.prompts: list[tuple[float, list[int]]] = []

    def fresh(self, num_blocks: int) -> list[int]:
        """Blocks that nothing else has."""
        self._next_id += num_blocks
        return list(range(self._next_id - num_blocks, self._next_id))

    def prefixes(self, count: int, low: int, high: int) -> Prefixes:
        """``count`` system prompts of ``low`` to ``high`` blocks."""
        return [self.fresh(self._random.randint(low, high)) for _ in range(count)]

    def _popular(self, prefixes: Prefixes, exponent: float) -> list[int]:
        weights = [(rank + 1) ** -exponent for rank in range(len(prefixes))]
        return self._random.choices(prefixes, weights)[0]

    def _arrivals(self, start_s: float, end_s: float, rate: float) -> list[float]:
        times: list[float] = []
        time_s = start_s
        while time_s < end_s:
            time_s += self._random.expovariate(rate)
            times.append(time_s)
        return times

    def chats(self, start_s: float, end_s: float, rate: float, systems: Prefixes) -> None:
        """Conversations: each user has an own wish to go on; think times are log-normal around a minute."""
        for start in self._arrivals(start_s, end_s, rate):
            time_s, goes_on = start, self._random.betavariate(1, 1.5)
            history = self._popular(systems, 1.0) + self.fresh(max(1, int(self._random.lognormvariate(1.5, 1.2))))
            self.prompts.append((time_s, history + self.fresh(1)))
            while self._random.random() < goes_on:
                time_s += self._random.lognormvariate(4.2, 0.9)
                history = history + self.fresh(self._random.choice((1, 1, 1, 2)))
                self.prompts.append((time_s, history + self.fresh(1)))

    def scans(self, start_s: float, end_s: float, rate: float) -> None:
        """Long prompts that never return."""
        for time_s in self._arrivals(start_s, end_s, rate):
            self.prompts.append((time_s, self.fresh(self._random.randint(5, 60))))

    def single_shots(self, start_s: float, end_s: float, rate: float, systems: Prefixes) -> None:
        """One question each over a shared system prompt."""
        for time_s in self._arrivals(start_s, end_s, rate):
            self.prompts.append((time_s, self._popular(systems, 1.0) + self.fresh(self._random.randint(1, 4))))

    def agents(self, start_s: float, end_s: float, rate: float, systems: Prefixes) -> None:
        """Loops of many steps seconds apart, each a little longer; then silence."""
        for start in self._arrivals(start_s, end_s, rate):
            time_s = start
            history = self._popular(systems, 1.2) + self.fresh(self._random.randint(2, 10))
            for _ in range(int(self._random.expovariate(1 / 15)) + 1):
                self.prompts.append((time_s, history + self.fresh(1)))
                time_s += self._random.lognormvariate(1.8, 0.8)
                history = history + self.fresh(self._random.randint(1, 4))

    def few_shots(self, start_s: float, end_s: float, rate: float) -> None:
        """Bursts over one set of examples that is never used again."""
        for start in self._arrivals(start_s, end_s, rate):
            time_s, examples = start, self.fresh(self._random.randint(8, 40))
            for _ in range(self._random.randint(10, 80)):
                time_s += self._random.expovariate(1.0)
                self.prompts.append((time_s, examples + self.fresh(2)))

    def documents(self, start_s: float, end_s: float, rate: float) -> None:
        """Independent questions about one long document, about a minute apart."""
        for start in self._arrivals(start_s, end_s, rate):
            time_s, document = start, self.fresh(self._random.randint(20, 120))
            self.prompts.append((time_s, document + self.fresh(1)))
            while self._random.random() < 0.6:
                time_s += self._random.lognormvariate(4.0, 1.0)
                self.prompts.append((time_s, document + self.fresh(1)))


def _chat(g: Generator) -> None:
    g.chats(0, 1500, 1.0, g.prefixes(200, 1, 12))


def _shared(g: Generator) -> None:
    g.single_shots(0, 1500, 1.5, g.prefixes(200, 1, 12))
    g.scans(0, 1500, 0.5)


def _agent(g: Generator) -> None:
    g.agents(0, 1500, 0.15, g.prefixes(30, 10, 40))
    g.scans(0, 1500, 0.3)


def _few_shot(g: Generator) -> None:
    g.few_shots(0, 1500, 0.03)
    g.scans(0, 1500, 0.3)


def _document(g: Generator) -> None:
    g.documents(0, 2000, 0.7)
    g.chats(0, 2000, 0.5, g.prefixes(200, 1, 12))


def _shift(g: Generator) -> None:
    g.chats(0, 1000, 1.5, g.prefixes(200, 1, 12))
    g.scans(0, 1000, 0.3)
    g.agents(1000, 2000, 0.25, g.prefixes(30, 10, 40))
    g.few_shots(1000, 2000, 0.03)


def _mix(g: Generator) -> None:
    chat_systems, large_systems = g.prefixes(200, 1, 12), g.prefixes(30, 10, 40)
    g.chats(0, 1500, 0.5, chat_systems)
    g.single_shots(0, 1500, 0.4, large_systems)
    g.scans(0, 1500, 0.3)
    g.agents(0, 1500, 0.08, large_systems)
    g.few_shots(0, 1500, 0.01)
    g.documents(0, 1500, 0.2)


WORKLOADS: dict[str, Callable[[Generator], None]] = {
    "chat": _chat,
    "shared": _shared,
    "agent": _agent,
    "few-shot": _few_shot,
    "document": _document,
    "shift": _shift,
    "mix": _mix,
}


def generate(name: str, seed: int = 1) -> Trace:
    """The named workload of ``WORKLOADS``; the same trace for the same seed."""
    generator = Generator(seed)
    WORKLOADS[name](generator)
    return Trace(f"generated-{name}", generator.prompts)
