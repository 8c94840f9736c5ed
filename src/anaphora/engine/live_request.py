"""A request on its way through the engine: what the queue, the scheduler and the loop know about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from anaphora.cache.sequence import Sequence
    from anaphora.engine.request import Request
    from anaphora.engine.sampling import TokenSource
    from anaphora.engine.stopping import OutputStream


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request between submission and its last delta.

    sequence: its tokens and blocks, owned by the KVCacheManager.
    arrival: position in the order of submission; the lower, the older.
    """

    request: Request
    sequence: Sequence
    arrival: int
    sampler: TokenSource
    output: OutputStream

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt) // TOKEN_BYTES

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first admission found in the cache; 0 before it."""
        return self.sequence.num_cached_tokens if self.sequence.was_admitted else 0
