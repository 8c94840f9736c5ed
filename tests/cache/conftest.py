from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from anaphora import KVCacheManager, Namespace, Sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BLOCK_SIZE = 4


@pytest.fixture(params=["radix", "hash"])
def make(request: pytest.FixtureRequest) -> Callable[..., KVCacheManager]:
    """Make a manager of either kind: everything in the contract holds for both."""

    def make_manager(num_blocks: int, block_size: int = BLOCK_SIZE, **options: Any) -> KVCacheManager:
        return KVCacheManager(num_blocks, block_size, index=request.param, **options)

    return make_manager


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tokens(first: int, last: int) -> list[int]:
    """Return the ids from `first` to `last`, both included."""
    return list(range(first, last + 1))


def admit(
    manager: KVCacheManager, tokens: Iterable[int], namespace: Namespace | None = None, **options: Any
) -> Sequence:
    """Start a sequence and compute all of its prompt; it must fit."""
    sequence = manager.start(list(tokens), namespace or Namespace(), **options)
    assert manager.allocate(sequence, sequence.num_tokens - sequence.num_cached_tokens)
    manager.commit(sequence, sequence.num_tokens - sequence.num_computed_tokens)
    manager.check()
    return sequence


def run(manager: KVCacheManager, tokens: Iterable[int], namespace: Namespace | None = None, **options: Any) -> int:
    """Admit, compute, finish; return how many tokens were cached."""
    sequence = admit(manager, tokens, namespace, **options)
    manager.finish(sequence)
    manager.check()
    return sequence.num_cached_tokens
