"""Anaphora's KVCacheManager, with the kinds of input and the indexes that are compared."""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy

from anaphora.cache import KVCacheManager
from anaphora.identity import VllmDigests
from anaphora.version import __version__

from .contestant import Contestant, serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from anaphora.cache import Sequence

    from .workload import Scenario


class AnaphoraManager(Contestant):
    """start, allocate, commit, finish; a token at a time while decoding. If asked to, the names of all blocks before
    the end, or the events."""

    def __init__(
        self, scenario: Scenario, pack: Callable[[bytes], Any], names_blocks: bool = False, **options: Any
    ) -> None:
        self.manager = KVCacheManager(scenario.num_blocks, scenario.block_size, **options)
        self.prepare = pack  # type: ignore[method-assign]
        self.end = self.manager.finish  # type: ignore[method-assign]
        self._names_blocks = names_blocks
        self._records_events = options.get("events", False)
        self._decode = [array("i", [token]) for token in range(scenario.num_decode_tokens)]

    def prepare(self, tokens: bytes) -> Any:
        """See `Contestant.prepare`."""
        raise NotImplementedError

    def begin(self, prompt: Any) -> Sequence:
        """See `Contestant.begin`."""
        manager = self.manager
        sequence = manager.start(prompt)
        num_new = sequence.num_tokens - sequence.num_cached_tokens
        if not manager.allocate(sequence, num_new):
            raise RuntimeError("Anaphora: no blocks left")
        manager.commit(sequence, num_new)
        for token in self._decode:
            manager.append(sequence, token)
            manager.allocate(sequence, 1)
            manager.commit(sequence, 1)
        if self._names_blocks:
            manager.block_digests(sequence)
        if self._records_events:
            manager.take_events()
        return sequence

    def end(self, request: Sequence) -> None:
        """See `Contestant.end`."""
        raise NotImplementedError

    def hit_tokens(self, request: Sequence) -> int:
        """See `Contestant.hit_tokens`."""
        return request.num_cached_tokens


def as_bytes(tokens: bytes) -> bytes:
    """Packed ids as they are."""
    return tokens


def as_array(tokens: bytes) -> Any:
    """An int32 numpy array."""
    return numpy.frombuffer(tokens, dtype=numpy.int32).copy()


def as_list(tokens: bytes) -> list[int]:
    """A Python list of ints."""
    return array("i", tokens).tolist()


def _with_vllms_digests(scenario: Scenario, **options: Any) -> AnaphoraManager:
    return AnaphoraManager(scenario, as_array, digests=VllmDigests("sha256"), **options)


CONTESTANTS: dict[str, Callable[[Scenario], AnaphoraManager]] = {
    "radix, bytes": partial(AnaphoraManager, pack=as_bytes),
    "radix, int32": partial(AnaphoraManager, pack=as_array),
    "radix, list": partial(AnaphoraManager, pack=as_list),
    "hash, int32": partial(AnaphoraManager, pack=as_array, index="hash"),
    **{
        f"{index}, int32, vLLM's {what}": partial(_with_vllms_digests, index=index, **{option: True})
        for what, option in (("names", "names_blocks"), ("events", "events"))
        for index in ("radix", "hash")
    },
}

if __name__ == "__main__":
    serve(f"Anaphora {__version__}", CONTESTANTS)
