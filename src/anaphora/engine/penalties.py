"""Changes to a request's logits that depend on its tokens: a bias by id, penalties for what was there already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from anaphora.engine.request import SamplingParams

_FIRST_CAPACITY = 64


class Penalties:
    """What one request's `logit_bias` and penalties do to its logits, in the order and with the definitions of vLLM
    0.10 (`vllm/v1/sample/sampler.py`, `vllm/model_executor/layers/utils.py`):

    1. logit_bias: the bias is added.
    2. repetition_penalty r, for each token of prompt or output: a positive logit is divided by r, another multiplied
       (CTRL, arXiv 1909.05858, section 4.1).
    3. frequency_penalty: subtracted once for each time that the token is in the output.
    4. presence_penalty: subtracted if it is in the output at all. These two are OpenAI's.

    Cost of `apply`: proportional to the biased tokens and the distinct ones seen, not to the vocabulary.
    """

    __slots__ = ("_bias", "_biased_ids", "_counts", "_frequency", "_ids", "_num_seen", "_places", "_presence",
                 "_repetition")  # fmt: skip

    def __init__(self, params: SamplingParams, prompt: bytes) -> None:
        """prompt: packed int32 ids."""
        self._biased_ids = np.fromiter(params.logit_bias.keys(), dtype=np.intp)
        self._bias = np.fromiter(params.logit_bias.values(), dtype=np.float32)
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        # Distinct tokens seen, and how often each is in the output: the first `_num_seen` of two arrays that grow.
        seen = np.empty(0, dtype=np.intp)
        if params.repetition_penalty != 1.0:
            seen = np.unique(np.frombuffer(prompt, dtype=np.int32)).astype(np.intp)
        self._num_seen = len(seen)
        self._places = {int(token_id): place for place, token_id in enumerate(seen)}
        unused = np.zeros(_FIRST_CAPACITY, dtype=np.intp)
        self._ids = np.concatenate((seen, unused))
        self._counts = np.zeros(len(self._ids), dtype=np.float32)

    @staticmethod
    def are_needed(params: SamplingParams) -> bool:
        """Whether anything of it would change a logit."""
        return bool(
            params.logit_bias or params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
        )

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Change the logits, float32 [vocab_size], in place."""
        if len(self._biased_ids):
            logits[self._biased_ids] += self._bias
        if not self._num_seen:
            return
        ids, counts = self._ids[: self._num_seen], self._counts[: self._num_seen]
        values = logits[ids]
        values = np.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._frequency * counts
        values -= self._presence * (counts > 0)
        logits[ids] = values

    def add(self, token_id: int) -> None:
        """The token was drawn."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = self._num_seen
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token_id
            self._num_seen += 1
        self._counts[place] += 1
