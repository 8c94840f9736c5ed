"""A request on its way through the engine: what the queue, the scheduler and the loop know about it."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from anaphora.engine.executor import Span
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from anaphora.cache.manager import KVCacheManager
    from anaphora.cache.sequence import Sequence
    from anaphora.engine.request import Request
    from anaphora.engine.sampling import TokenSource
    from anaphora.engine.stopping import OutputStream


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request between submission and its last delta.

    sequence: its tokens and blocks, owned by the KVCacheManager.
    arrival: position in the order of submission; the lower, the older.
    seed: of the request; its samples draw with those that follow.
    index: which of the request's samples this is, from 0.
    num_unborn: samples besides this one that share its prefill and begin when that is done.
    deadline_s: when it must have ended, by the engine's clock; infinite if it may take its time.
    half_time_s: when half of the time up to there has passed.
    position: of the next token to be computed, while it is below
    end_of_slots: up to where tokens are computed one by one, in the rest of a block, without asking the manager.
    drawn: ids that the manager has not been told of. While the last block fills up nothing in it can be shared,
        so the manager is told when it is full, or given back. For each of these ids one token was computed, too.
    """

    request: Request
    sequence: Sequence
    arrival: int
    seed: int
    sampler: TokenSource
    output: OutputStream
    index: int = 0
    num_unborn: int = 0
    deadline_s: float = math.inf
    half_time_s: float = math.inf
    position: int = 0
    end_of_slots: int = 0
    drawn: list[int] = field(default_factory=list)
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt) // TOKEN_BYTES

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def rank(self) -> tuple[int, int, int]:
        """Who goes first where not all can: the more urgent, then the older, then the lower sample."""
        return (self.request.priority, self.arrival, self.index)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first admission found in the cache; 0 before it."""
        return self.sequence.num_cached_tokens if self.sequence.was_admitted else 0

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose KV is in its blocks."""
        return self.sequence.num_computed_tokens + len(self.drawn)

    def commit(self, manager: KVCacheManager, num_tokens: int) -> None:
        """Tell the manager of `num_tokens` more that were computed, after all that it has not been told of."""
        if self.drawn:
            num_tokens += len(self.drawn)
            manager.append(self.sequence, array("i", self.drawn))
            self.drawn.clear()
        if num_tokens:
            manager.commit(self.sequence, num_tokens)

    def span(self, start: int, num_tokens: int) -> Span:
        """Return the executor's span of so many tokens from `start` on, where its KV ends."""
        if not self.drawn:
            return span_of(self.sequence, start, num_tokens)
        sequence = self.sequence
        adapter = sequence.namespace.adapter
        return Span(
            np.array(self.drawn[-1:], np.int32),
            start,
            sequence.block_tables,
            1,
            None if adapter is None else adapter.digest,
        )


def span_of(sequence: Sequence, start: int, num_tokens: int) -> Span:
    """Return the executor's span of so many tokens; with a row of logits if it reaches the last known token."""
    end = start + num_tokens
    adapter = sequence.namespace.adapter
    # A copy: a view of the sequence's tokens would keep it from growing.
    tokens = sequence.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]
    return Span(
        tokens=np.frombuffer(tokens, dtype=np.int32),
        start=start,
        block_tables=sequence.block_tables,
        num_logits=int(end == sequence.num_tokens),
        adapter=None if adapter is None else adapter.digest,
    )
