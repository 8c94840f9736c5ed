"""Request traces as chains of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anaphora.lab.importers import open_requests


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: when it arrived, in seconds, and its blocks from the head as indices into the trace's trie."""

    time_s: float
    chain: tuple[int, ...]


class Trace:
    """Requests in order of arrival, over the trie of all their blocks.

    A block is an index from 0; ``parent[block]`` is the block before it in its prefix, -1 for a first block. Equal
    indices mean equal prefixes, so everything a policy keeps about a block fits in lists of ``num_blocks`` entries.
    """

    def __init__(self, name: str, prompts: Iterable[tuple[float, Sequence[int]]]) -> None:
        self.name = name
        self.parent: list[int] = []
        self.requests: list[Request] = []
        known: dict[tuple[int, int], int] = {}
        for time_s, hash_ids in sorted(prompts, key=lambda prompt: prompt[0]):
            chain: list[int] = []
            block = -1
            for hash_id in hash_ids:
                edge = (block, hash_id)
                if edge not in known:
                    known[edge] = len(self.parent)
                    self.parent.append(block)
                block = known[edge]
                chain.append(block)
            self.requests.append(Request(time_s, tuple(chain)))

    @property
    def num_blocks(self) -> int:
        """Distinct blocks."""
        return len(self.parent)

    @property
    def num_lookups(self) -> int:
        """Blocks asked for, over all requests: what a hit rate is a share of."""
        return sum(len(request.chain) for request in self.requests)


def read_trace(path: Path) -> Trace:
    """Reads a trace that names blocks (Mooncake, Qwen-Bailian, WEKA). Raises ValueError naming the first bad line."""
    log = open_requests(path)
    prompts = [(request.time_s or 0.0, request.blocks.ids) for request in log.requests() if request.blocks]
    if log.report.bad or not prompts:
        line, reason = log.report.bad[0] if log.report.bad else (1, "no request with named blocks")
        raise ValueError(f"{path}:{line}: {reason}")
    return Trace(path.stem, prompts)
