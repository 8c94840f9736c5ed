"""Beam search: the likeliest continuations of a prompt, as far as a bounded search finds them.

Beams share the blocks that they have in common (`KVCacheManager.fork`); one whose continuations are all dropped gives
its blocks back, one with several is forked. All beams of a step are one batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from anaphora.engine.executor import Batch
from anaphora.engine.live_request import span_of
from anaphora.engine.request import RequestError
from anaphora.engine.transfers import make_transfers
from anaphora.tokens import pack

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from anaphora.cache.manager import KVCacheManager
    from anaphora.cache.sequence import Sequence as CachedSequence
    from anaphora.engine.executor import Executor
    from anaphora.identity import Namespace


class Beam(NamedTuple):
    """One continuation. token_ids: with the token that ended it, if one did; logprobs: natural, one for each.

    score: sum(logprobs) / len(token_ids) ** length_penalty.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float
    has_ended: bool


@dataclass(slots=True, eq=False)
class _Live:
    sequence: CachedSequence
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


class _Candidate(NamedTuple):
    total: float
    parent: int
    token_id: int
    logprob: float


class BeamSearch:
    """Beam search over an executor and a manager that nobody else uses meanwhile.

    width: continuations kept a step, at least 1. length_penalty: 0 favours short outputs, 1 ranks by the mean.
    end_token_ids: a continuation ends with any of them. max_num_batched_tokens: of the prompt in one step.
    """

    def __init__(
        self,
        executor: Executor,
        manager: KVCacheManager,
        *,
        width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        end_token_ids: Collection[int] = (),
        max_num_batched_tokens: int = 512,
    ) -> None:
        for name, value in (("width", width), ("max_tokens", max_tokens)):
            if value < 1:
                raise RequestError(name, f"{name}: {value} is not allowed; it must be at least 1")
        if not length_penalty >= 0:
            raise RequestError(
                "length_penalty", f"length_penalty: {length_penalty} is not allowed; it must be 0 or more"
            )
        self._executor = executor
        self._manager = manager
        self._width = width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._end_token_ids = frozenset(end_token_ids)
        self._max_num_batched_tokens = max_num_batched_tokens

    def run(self, prompt: bytes, namespace: Namespace) -> tuple[int, list[Beam]]:
        """Return how many tokens of the prompt were cached, and the `width` best continuations that were found, best
        first.

        Raises:
            RequestError: the pool cannot hold the beams; every block is given back.
        """
        live = [_Live(self._manager.start(prompt, namespace=namespace))]
        ended: list[Beam] = []
        try:
            logits = [self._prefill(live[0].sequence)]
            num_cached = live[0].sequence.num_cached_tokens
            for num_tokens in range(1, self._max_tokens + 1):
                live = self._branch(live, self._best(live, logits), ended)
                if num_tokens == self._max_tokens or not live or self._is_decided(live, ended):
                    break
                logits = self._step([beam.sequence for beam in live], [1] * len(live))
        finally:
            for beam in live:
                self._manager.finish(beam.sequence)
        found = ended + [self._beam(beam.token_ids, beam.logprobs, has_ended=False) for beam in live]
        found.sort(key=lambda beam: -beam.score)
        return num_cached, found[: self._width]

    def _prefill(self, sequence: CachedSequence) -> NDArray[np.float32]:
        logits: list[NDArray[np.float32]] = []
        while not logits:
            # What the lookup finds now is what the admission finds: nobody else uses the manager.
            found = sequence.num_computed_tokens if sequence.is_admitted else sequence.num_cached_tokens
            logits = self._step([sequence], [min(sequence.num_tokens - found, self._max_num_batched_tokens)])
        return logits[0]

    def _step(self, sequences: Sequence[CachedSequence], nums: Sequence[int]) -> list[NDArray[np.float32]]:
        """Compute the next tokens of each; return the logits of those whose last token that was."""
        manager = self._manager
        for sequence, num in zip(sequences, nums, strict=True):
            if not manager.allocate(sequence, num):
                raise RequestError(
                    "width",
                    f"width: {self._width} beams need more KV blocks than can be had; "
                    f"the pool has {manager.num_blocks}",
                )
        transfers = manager.take_transfers()
        try:
            make_transfers(self._executor, transfers)
        except Exception:
            manager.fail_transfers(transfers)
            raise
        spans = [span_of(each, each.num_computed_tokens, num) for each, num in zip(sequences, nums, strict=True)]
        outputs = self._executor.execute(Batch(spans)).logits
        for sequence, num in zip(sequences, nums, strict=True):
            manager.commit(sequence, num)
        return [rows[0] for rows in outputs if rows is not None and len(rows)]

    def _best(self, live: Sequence[_Live], logits: Sequence[NDArray[np.float32]]) -> list[_Candidate]:
        """The best 2 * width continuations by one token, of which at least width go on if few tokens end an output."""
        count = 2 * self._width
        candidates: list[_Candidate] = []
        for parent, (beam, row) in enumerate(zip(live, logits, strict=True)):
            logprobs = row.astype(np.float64)
            logprobs -= logprobs.max()
            logprobs -= np.log(np.exp(logprobs).sum())
            total = sum(beam.logprobs)
            # Equals by ascending id, so that the result does not depend on how they are sorted.
            for token_id in np.argsort(-logprobs, kind="stable")[:count].tolist():
                logprob = float(logprobs[token_id])
                candidates.append(_Candidate(total + logprob, parent, token_id, logprob))
        candidates.sort(key=lambda each: (-each.total, each.parent, each.token_id))
        return candidates[:count]

    def _branch(self, live: list[_Live], candidates: Sequence[_Candidate], ended: list[Beam]) -> list[_Live]:
        """Let the chosen go on, and those that end be `ended`; `live` itself keeps what is to be given back."""
        manager = self._manager
        chosen: list[_Candidate] = []
        for each in candidates:
            if each.token_id in self._end_token_ids:
                parent = live[each.parent]
                token_ids, logprobs = (*parent.token_ids, each.token_id), (*parent.logprobs, each.logprob)
                ended.append(self._beam(token_ids, logprobs, has_ended=True))
            elif len(chosen) < self._width:
                chosen.append(each)
        after: list[_Live] = []
        used: set[int] = set()
        for each in chosen:
            parent = live[each.parent]
            # One continuation takes the parent's place, the others fork from it before that has grown.
            if each.parent in used:
                sequence = manager.fork(parent.sequence)
            else:
                used.add(each.parent)
                sequence = parent.sequence
            after.append(_Live(sequence, (*parent.token_ids, each.token_id), (*parent.logprobs, each.logprob)))
        for beam in after:
            manager.append(beam.sequence, pack([beam.token_ids[-1]]))
        for parent_number, beam in enumerate(live):
            if parent_number not in used:
                manager.finish(beam.sequence)
        return after

    def _is_decided(self, live: Sequence[_Live], ended: list[Beam]) -> bool:
        """Whether `width` have ended that none of the live ones can beat: their sums can only fall."""
        if len(ended) < self._width:
            return False
        ended.sort(key=lambda beam: -beam.score)
        longest: float = self._max_tokens**self._length_penalty
        best_to_come = max(sum(beam.logprobs) for beam in live) / longest
        return best_to_come <= ended[self._width - 1].score

    def _beam(self, token_ids: tuple[int, ...], logprobs: tuple[float, ...], *, has_ended: bool) -> Beam:
        return Beam(token_ids, logprobs, sum(logprobs) / len(token_ids) ** self._length_penalty, has_ended)
