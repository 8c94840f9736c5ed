"""Request traces as chains of blocks, in the Mooncake FAST'25 format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


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
    """Reads a Mooncake trace: one JSON object a line with ``timestamp`` (ms) and ``hash_ids`` (one per block).

    Raises ValueError naming the line and field that are missing or malformed.
    """
    prompts: list[tuple[float, list[int]]] = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                prompts.append((record["timestamp"] / 1000, record["hash_ids"]))
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}:{number}: expected an object with timestamp (ms) and hash_ids (list of ints): {error}"
                ) from error
    return Trace(path.stem, prompts)
