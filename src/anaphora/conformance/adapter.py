"""What the kit asks of a block manager: the one class that a builder writes to have theirs tested.

    begin -> computed -> append -> allocate -> computed ... -> finish
                                                    \\-> preempt -> resume ...

Requests have names that the kit chooses; a name is used again once its request has ended. Only full-attention layers
are tested: one block table a request, every position filled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from anaphora.identity import DEFAULT_NAMESPACE, MediaSpan, Namespace, VllmAlgorithm

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request asks for.

    namespace: its salt, its LoRA adapter (name, path, digest of the weights), and so on; all that an engine has a
        notion of must keep prompts apart.
    media: images and the like, each a run of placeholder tokens with the digest of the item.
    reads_cache: False if every token must be computed, as prompt log-probabilities need it.
    """

    token_ids: tuple[int, ...]
    namespace: Namespace = DEFAULT_NAMESPACE
    media: tuple[MediaSpan, ...] = ()
    reads_cache: bool = True


class Counters(NamedTuple):
    """Tokens that were asked for and tokens that were found, since the start. Lookups of requests that come back after
    a preemption are not in it."""

    queries: int
    hits: int


class NotOfferedError(NotImplementedError):
    """The manager has no such operation; what needs it is not tested."""


class ManagerAdapter(ABC):
    """A fresh block manager behind the operations that every engine has in some form.

    The first seven are needed. Of the others override those that the manager offers: what is left out is reported as
    not applicable. The kit never calls an operation on a request in a state where it would make no sense, except
    `abort`.
    """

    digest_algorithm: VllmAlgorithm | None = None
    """If block names are vLLM's digests: by which algorithm, with the seed "0". They are then held against vectors."""

    # -- needed ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, request: str, prompt: Prompt, num_tokens: int | None) -> int | None:
        """Look the prompt up, hold what is found, and take blocks for the next `num_tokens` tokens after it (None: for
        all that are left; never for more than are left). Return the number of cached tokens, or None, with nothing
        changed, if there are not enough blocks."""

    @abstractmethod
    def allocate(self, request: str, num_tokens: int) -> bool:
        """Have blocks for the next `num_tokens` tokens after those computed, known or not yet known (drafts). False,
        with nothing changed, if there are not enough."""

    @abstractmethod
    def computed(self, request: str, num_tokens: int) -> None:
        """The KV of the next `num_tokens` tokens now exists. They are known, and blocks are held for them."""

    @abstractmethod
    def append(self, request: str, token_ids: Sequence[int]) -> None:
        """These tokens were generated and accepted; their KV does not exist yet."""

    @abstractmethod
    def block_ids(self, request: str) -> Sequence[int]:
        """Return the block table of a running request, in order; any distinct integers."""

    @abstractmethod
    def finish(self, request: str) -> None:
        """The request ends: it lets go of its blocks."""

    @abstractmethod
    def num_free_blocks(self) -> int:
        """Return how many blocks could be handed out now: blank ones, and cached ones that no request holds."""

    # -- optional --------------------------------------------------------------------------------------------------

    def match(self, prompt: Prompt) -> int:
        """Return how many tokens `begin` would find now, holding nothing."""
        raise NotOfferedError

    def preempt(self, request: str) -> None:
        """The request lets go of all blocks and will come back; its tokens, generated ones too, stay known."""
        raise NotOfferedError

    def resume(self, request: str, num_tokens: int | None) -> int | None:
        """`begin` for a preempted request."""
        raise NotOfferedError

    def abort(self, request: str) -> None:
        """The client is gone, whatever the state: running, preempted, or ended already (then nothing may change)."""
        raise NotOfferedError

    def evict(self, block_ids: Sequence[int]) -> None:
        """Make the content of these blocks unfindable; requests that hold them go on."""
        raise NotOfferedError

    def reset(self) -> bool:
        """Forget all cached content. False, with nothing changed, if that cannot be now."""
        raise NotOfferedError

    def invalidate(self) -> None:
        """The weights have changed while requests run: nothing computed so far is found any more, nor what the requests
        that run now compute on top of it."""
        raise NotOfferedError

    def counters(self) -> Counters:
        """Return the statistics of lookups since the start, without clearing them."""
        raise NotOfferedError

    def block_names(self, request: str) -> Sequence[bytes]:
        """Return the digests of a running request's computed full blocks, in order."""
        raise NotOfferedError

    def forge_digests(self) -> None:
        """Give every block the same digest from now on. For managers that find blocks by digests."""
        raise NotOfferedError

    def take_copies(self) -> Sequence[tuple[int, int]]:
        """Return the (from, to) block pairs to copy before the next tokens are computed, then forget them. For managers
        that share the beginning of a block."""
        raise NotOfferedError

    def offers(self, operation: str) -> bool:
        """Return whether this class overrides an optional operation."""
        return getattr(type(self), operation) is not getattr(ManagerAdapter, operation)


MakeManager = Callable[[int, int], ManagerAdapter]
"""Makes a fresh manager of `num_blocks` blocks, all of which requests can hold, of `block_size` tokens."""
