"""One request cycle, ours and the peers' in interleaved rounds of one run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from .contestant import Process
from .workload import TOKEN_BYTES, Scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUND_US = 30_000
MAX_ROUND_BYTES = 16 * 2**20  # of packed ids; as lists of ints they take nine times as much
OURS = (
    "radix, bytes",
    "radix, int32",
    "radix, list",
    "hash, int32",
    "radix, int32, vLLM's names",
    "hash, int32, vLLM's names",
    "radix, int32, vLLM's events",
    "hash, int32, vLLM's events",
)
VLLM = "vLLM"
SGLANG = ("SGLang RadixCache", "SGLang unified, Python", "SGLang unified, Rust")
SCENARIOS = (
    *(Scenario(num_tokens, hit) for num_tokens in (2_048, 32_768, 131_072) for hit in (0, 90)),
    *(Scenario(2_048, hit, num_decode_tokens=64) for hit in (0, 90)),
)

# How many times fewer microseconds than vLLM's manager: what has to be reached, and what is aimed at.
_RADIX = {2_048: (50, 70), 32_768: (160, 250), 131_072: (150, 250)}


def target(contestant: str, scenario: Scenario) -> tuple[int, int] | None:
    """Return how many times cheaper than vLLM a contestant has to be, and should be; None where nothing is set."""
    if scenario.num_decode_tokens:
        return None
    if contestant in {"radix, bytes", "radix, int32"}:
        return _RADIX[scenario.num_tokens]
    if contestant == "radix, int32, vLLM's names":
        return (8, 8) if scenario.hit_percent else None
    floor = {"radix, list": 14, "hash, int32, vLLM's names": 3, "hash, int32": 5}.get(contestant)
    return (floor, floor) if floor else None


@dataclass(frozen=True)
class Cycle:
    """What one contestant did in one scenario: thread CPU microseconds a request (median, lowest and highest round),
    the share of tokens that were hits, and how much the process grew while its pool filled."""

    contestant: str
    scenario: Scenario
    us: float
    us_min: float
    us_max: float
    hit: float
    resident_bytes: int


def connect(vllm_python: str | None, sglang_python: str | None) -> list[Process]:
    """Start a process for each contestant and wait until all can run."""
    processes = [Process(sys.executable, "benchmarks.bookkeeping.peer_anaphora", name) for name in OURS]
    if vllm_python:
        processes.append(Process(vllm_python, "benchmarks.bookkeeping.peer_vllm", VLLM))
    if sglang_python:
        processes += [Process(sglang_python, "benchmarks.bookkeeping.peer_sglang", name) for name in SGLANG]
    for process in processes:
        process.connect()
    return processes


def measure(processes: Sequence[Process], scenario: Scenario, num_rounds: int) -> list[Cycle]:
    """Fill every pool, then let the contestants take turns."""
    # SGLang's trees do nothing while a request decodes.
    taking_part = [p for p in processes if not (scenario.num_decode_tokens and p.name in SGLANG)]
    resident = {p.name: p.set_up(scenario)["resident_bytes"] for p in taking_part}
    most = max(2, MAX_ROUND_BYTES // (scenario.num_tokens * TOKEN_BYTES))
    sizes = {p.name: max(1, min(most, int(ROUND_US / p.round(2)["us"]))) for p in taking_part}
    rounds: dict[str, list[dict[str, float]]] = {p.name: [] for p in taking_part}
    for _ in range(num_rounds):
        for process in taking_part:
            rounds[process.name].append(process.round(sizes[process.name]))
    return [
        Cycle(
            name,
            scenario,
            us=median(r["us"] for r in results),
            us_min=min(r["us"] for r in results),
            us_max=max(r["us"] for r in results),
            hit=median(r["hit"] for r in results),
            resident_bytes=resident[name],
        )
        for name, results in rounds.items()
    ]
