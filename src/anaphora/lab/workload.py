"""Workloads made to order: kinds of traffic, seeded, as prompts of named pieces; written as traces or as requests.

A prompt is a list of pieces; a piece is an id, a length in tokens and a role. Equal ids are equal text, so what two
prompts share is known beforehand: a generator's output is a test's expectation.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Role = Literal["tools", "system", "user", "assistant", "tool"]
_BLOCK = 512
_EPOCH_S = 1_777_629_600
"""Times of written requests count from 2026-05-01 10:00 UTC."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a prompt: equal ids are equal text."""

    id: int
    num_tokens: int
    role: Role = "user"


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it comes, in seconds; its prompt; how much it generates; the session that it belongs to."""

    time_s: float
    pieces: tuple[Piece, ...]
    num_output_tokens: int
    session: str

    @property
    def num_tokens(self) -> int:
        """The prompt's length."""
        return sum(piece.num_tokens for piece in self.pieces)


class Traffic:
    """Writes jobs of one kind or another into `jobs`. Everything comes from the seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._next_id = 0
        self._next_session = 0
        self.jobs: list[Job] = []

    def piece(self, num_tokens: float, role: Role = "user") -> Piece:
        """A piece that nothing else has."""
        self._next_id += 1
        return Piece(self._next_id, max(1, round(num_tokens)), role)

    def around(self, tokens: float, spread: float = 0.6) -> float:
        """A length around a median, log-normal."""
        return tokens * self._random.lognormvariate(0, spread)

    def arrivals(self, num: int, rate: float, burst: float = 1.0) -> list[float]:
        """Times of `num` arrivals at `rate` a second: a gamma process; burst 1 is Poisson, above 1 comes in bursts."""
        times, time_s = [], 0.0
        for _ in range(num):
            time_s += self._random.gammavariate(1 / burst, burst / rate)
            times.append(time_s)
        return times

    def add(self, time_s: float, pieces: Sequence[Piece], output: float, session: str) -> None:
        """One request."""
        self.jobs.append(Job(time_s, tuple(pieces), max(1, round(output)), session))

    def session(self) -> str:
        """A new session's name."""
        self._next_session += 1
        return f"s{self._next_session}"

    def chance(self, probability: float) -> bool:
        """Whether something happens."""
        return self._random.random() < probability

    def pick(self, pieces: Sequence[Piece]) -> Piece:
        """One of several, the first most often (Zipf)."""
        return self._random.choices(pieces, [1 / (rank + 1) for rank in range(len(pieces))])[0]


def _chat(traffic: Traffic, times: Sequence[float]) -> None:
    """Conversations over a few system prompts; a turn about a minute after the one before."""
    systems = [traffic.piece(traffic.around(600), "system") for _ in range(8)]
    for start in times:
        time_s, session, history = start, traffic.session(), [traffic.pick(systems)]
        while True:
            history.append(traffic.piece(traffic.around(80)))
            answer = traffic.piece(traffic.around(200), "assistant")
            traffic.add(time_s, history, answer.num_tokens, session)
            if not traffic.chance(0.7):
                break
            history.append(answer)
            time_s += traffic.around(60, 0.9)


def _shared_system(traffic: Traffic, times: Sequence[float]) -> None:
    """Single questions over one long system prompt."""
    system = traffic.piece(3000, "system")
    for start in times:
        traffic.add(start, [system, traffic.piece(traffic.around(120))], traffic.around(150), traffic.session())


def _document(traffic: Traffic, times: Sequence[float]) -> None:
    """A few independent questions about each of many long documents."""
    system = traffic.piece(200, "system")
    for start in times:
        time_s, session, document = start, traffic.session(), traffic.piece(traffic.around(12_000))
        while True:
            traffic.add(time_s, [system, document, traffic.piece(traffic.around(40))], traffic.around(200), session)
            if not traffic.chance(0.7):
                break
            time_s += traffic.around(50, 0.9)


def _agent(traffic: Traffic, times: Sequence[float]) -> None:
    """Loops of tool calls seconds apart over large tools and a large system prompt."""
    tools = [traffic.piece(6000, "tools") for _ in range(3)]
    system = traffic.piece(2500, "system")
    for start in times:
        time_s, session, history = start, traffic.session(), [traffic.pick(tools), system]
        history.append(traffic.piece(traffic.around(300)))
        while True:
            call = traffic.piece(traffic.around(120, 0.4), "assistant")
            traffic.add(time_s, history, call.num_tokens, session)
            if not traffic.chance(0.93):
                break
            history += [call, traffic.piece(traffic.around(700, 0.9), "tool")]
            time_s += traffic.around(6, 0.8)


def _few_shot(traffic: Traffic, times: Sequence[float]) -> None:
    """Batches over one set of examples each."""
    for start in times:
        session, examples = traffic.session(), traffic.piece(traffic.around(2500), "system")
        for number in range(20):
            traffic.add(start + 0.05 * number, [examples, traffic.piece(traffic.around(60))], 10, session)


def _tree(traffic: Traffic, times: Sequence[float]) -> None:
    """Tree of thought: three levels, three branches each, every node extending the path to it."""
    for start in times:
        session = traffic.session()
        level = [[traffic.piece(400, "system"), traffic.piece(traffic.around(200))]]
        for depth in range(3):
            following = []
            for path in level:
                for _ in range(3):
                    thought = traffic.piece(traffic.around(100), "assistant")
                    traffic.add(start + 8.0 * depth, path, thought.num_tokens, session)
                    following.append([*path, thought])
            level = following


def _rag(traffic: Traffic, times: Sequence[float]) -> None:
    """Questions with five retrieved passages in the order of their score: prefixes rarely agree."""
    system = traffic.piece(500, "system")
    passages = [traffic.piece(traffic.around(400)) for _ in range(300)]
    for start in times:
        found = [traffic.pick(passages) for _ in range(5)]
        question = traffic.piece(traffic.around(40))
        traffic.add(start, [system, *dict.fromkeys(found), question], traffic.around(180), traffic.session())


KINDS: dict[str, Callable[[Traffic, Sequence[float]], None]] = {
    "chat": _chat,
    "shared-system": _shared_system,
    "document": _document,
    "agent": _agent,
    "few-shot": _few_shot,
    "tree": _tree,
    "rag": _rag,
}


def generate(kinds: Sequence[str], num: int, rate: float, seed: int, burst: float = 1.0) -> list[Job]:
    """Jobs of these kinds in order of time: `num` sessions (or batches) of each, beginning at `rate` a second.

    Raises ValueError: an unknown kind, or a number that must be above 0.
    """
    for name, value in (("num", num), ("rate", rate), ("burst", burst)):
        if not value > 0:
            raise ValueError(f"{name}: expected a number above 0, got {value}")
    traffic = Traffic(seed)
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        KINDS[kind](traffic, traffic.arrivals(num, rate, burst))
    return sorted(traffic.jobs, key=lambda job: job.time_s)


def as_mooncake(jobs: Sequence[Job]) -> Iterator[str]:
    """Lines of a Mooncake trace: an id for each 512 tokens, equal where the whole prefix up to there is."""
    known: dict[tuple[int, tuple[tuple[int, int, int], ...]], int] = {}
    for job in jobs:
        ids = []
        before = -1
        for block in _blocks(job):
            before = known.setdefault((before, block), len(known))
            ids.append(before)
        line = {
            "timestamp": round(job.time_s * 1000),
            "input_length": job.num_tokens,
            "output_length": job.num_output_tokens,
            "hash_ids": ids,
            "session_id": job.session,
        }
        yield json.dumps(line)


def _blocks(job: Job) -> list[tuple[tuple[int, int, int], ...]]:
    """What each block of 512 tokens holds: (piece, from, to)."""
    blocks: list[tuple[tuple[int, int, int], ...]] = []
    held: list[tuple[int, int, int]] = []
    room = _BLOCK
    for piece in job.pieces:
        start = 0
        while start < piece.num_tokens:
            size = min(room, piece.num_tokens - start)
            held.append((piece.id, start, start + size))
            start, room = start + size, room - size
            if not room:
                blocks.append(tuple(held))
                held, room = [], _BLOCK
    return [*blocks, tuple(held)] if held else blocks


def as_openai(jobs: Sequence[Job], model: str = "m") -> Iterator[str]:
    """Lines of an OpenAI request log. Text comes from a piece's id, about a token a word; no two pieces begin alike."""
    for job in jobs:
        tools = [piece for piece in job.pieces if piece.role == "tools"]
        messages: list[dict[str, object]] = []
        for piece in job.pieces:
            if piece.role == "tool":
                messages.append({"role": "tool", "tool_call_id": f"c{piece.id}", "content": _text(piece)})
            elif piece.role != "tools":
                messages.append({"role": piece.role, "content": _text(piece)})
        body: dict[str, object] = {"model": model, "messages": messages, "max_tokens": job.num_output_tokens}
        if tools:
            body["tools"] = [
                {"type": "function", "function": {"name": f"t{piece.id}", "description": _text(piece)}}
                for piece in tools
            ]
        stamp = datetime.fromtimestamp(_EPOCH_S + job.time_s, UTC).isoformat(timespec="milliseconds")
        yield json.dumps({"timestamp": stamp, "session_id": job.session, "request": body})


_WORDS = [
    "river",
    "stone",
    "lamp",
    "green",
    "walk",
    "north",
    "table",
    "seven",
    "paper",
    "light",
    "door",
    "hand",
    "cold",
    "bridge",
    "apple",
    "yellow",
    "often",
    "market",
    "window",
    "garden",
    "letter",
    "train",
    "quiet",
    "branch",
    "metal",
    "story",
    "round",
    "under",
    "field",
    "water",
]


def _text(piece: Piece) -> str:
    rng = random.Random(piece.id)
    return f"P{piece.id} " + " ".join(rng.choices(_WORDS, k=max(0, piece.num_tokens - 3)))
