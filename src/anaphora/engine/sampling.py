"""Sampler: from a row of logits to a token, and the log-probabilities that go with it.

Everything here works on one row at a time, so what a request draws depends on its logits, its seed and its own tokens;
not on the batch, and not on whether the request was preempted in between. Weights are float32, as exact as the logits
that they come from; sums of some hundred are float32 too, and their sums float64.
"""

from __future__ import annotations

import math
from operator import index
from typing import TYPE_CHECKING, Protocol

import numpy as np

from anaphora.engine.penalties import Penalties
from anaphora.engine.request import TokenLogprob

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from anaphora.engine.grammars import Constraint
    from anaphora.engine.request import SamplingParams

_NUM_SEED_BITS = 128
_WORDS_PER_COUNTER = 4
_CHUNK = 256
"""Weights are summed in so many pieces: a running sum of all would add one number at a time."""
_NUM_GROUPS = 1024
"""The largest values are looked for among the largest of so many groups first."""
_NUCLEUS_GUESSES = (2.0**-6, 2.0**-9, 2.0**-12)
"""Relative to the likeliest token: a nucleus among those above is found without looking at the rest of them."""


class LogitsRule(Protocol):
    """Changes one request's logits before each draw, and is told what was drawn."""

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Change the logits, float32 [vocab_size], in place."""
        ...

    def add(self, token_id: int) -> None:
        """The token was drawn."""
        ...


class TokenSource(Protocol):
    """What gives a request its tokens."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow what was drawn, so that the output ends with it."""
        ...

    def sample(self, logits: NDArray[np.float32], position: int) -> int:
        """Return output token number `position` (from 0) given its logits, float32 [vocab_size]."""
        ...


class Sampler:
    """Draws the tokens of one request, each once and in the order of their positions.

    seed: any integer, taken modulo 2**128. Output token i is drawn with the first 53 of the random bits that the
    counter-based generator Philox4x64-10 ("Parallel random numbers: as easy as 1, 2, 3", SC 2011) gives at key `seed`
    and counter i + 1.
    prompt: packed int32 ids, which the repetition penalty counts.
    constraint: allows some tokens only, and says when the output is whole; None allows all.

    Raises TypeError for a seed that is no integer.
    """

    __slots__ = ("_constraint", "_generator", "_min_p", "_next_position", "_rules", "_seed", "_temperature", "_top_k",
                 "_top_p")  # fmt: skip

    def __init__(
        self, params: SamplingParams, seed: int, prompt: bytes = b"", constraint: Constraint | None = None
    ) -> None:
        self._temperature = params.temperature
        self._top_k = params.top_k
        self._top_p = params.top_p
        self._min_p = params.min_p
        self._seed = index(seed) % 2**_NUM_SEED_BITS
        self._generator = np.random.Philox(key=self._seed, counter=0)
        self._next_position = 0
        self._constraint = constraint
        self._rules: list[LogitsRule] = []
        if Penalties.are_needed(params):
            self._rules.append(Penalties(params, prompt))
        if constraint is not None:
            self._rules.append(constraint)

    @property
    def is_complete(self) -> bool:
        """Whether the constraint, if there is one, lets nothing follow what was drawn."""
        return self._constraint is not None and self._constraint.is_complete

    def sample(self, logits: NDArray[np.float32], position: int) -> int:
        """Draw output token number `position` (from 0) given its logits, float32 [vocab_size], which stay as they are.

        The order is vLLM's (`vllm/v1/sample/sampler.py`): logit_bias, penalties, temperature, min_p, top_k, top_p;
        each counts within what the one before it left. Greedy takes the lowest id among equals.

        Raises:
            ValueError: the largest logit is not finite, so there is no distribution to draw from.
        """
        if not self._rules:
            return self._draw(logits, position)
        logits = logits.copy()
        for rule in self._rules:
            rule.apply(logits)
        token_id = self._draw(logits, position)
        for rule in self._rules:
            rule.add(token_id)
        return token_id

    def _draw(self, logits: NDArray[np.float32], position: int) -> int:
        best = int(logits.argmax())
        highest = float(logits[best])
        # argmax finds a NaN wherever there is one.
        if not np.isfinite(highest):
            raise ValueError(f"logits: the largest is {highest}, so no token can be drawn")
        if self._temperature == 0.0:
            return best
        ids: NDArray[np.intp] | None = None
        if 0 < self._top_k < len(logits):
            ids = _largest(logits, self._top_k)
            logits = logits[ids]
        weights = _weights(logits, highest, self._temperature)
        if self._min_p > 0.0:  # commutes with top_k: both keep the likeliest
            weights, ids = _select(weights, ids, np.flatnonzero(weights >= np.float32(self._min_p)))
        if self._top_p < 1.0:
            weights, ids = _select(weights, ids, _nucleus(weights, self._top_p))
        drawn = _pick(weights, self._uniform(position))
        return drawn if ids is None else int(ids[drawn])

    def _uniform(self, position: int) -> float:
        """Return a number in [0, 1) made of the generator's raw bits, whose stream numpy keeps fixed."""
        if position != self._next_position:
            self._generator = np.random.Philox(key=self._seed, counter=position)
        self._next_position = position + 1
        bits = int(self._generator.random_raw(_WORDS_PER_COUNTER)[0])
        return (bits >> 11) * 2.0**-53


def token_logprob(logits: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprob:
    """Return the log-probability of `token_id` and the `num_top` likeliest tokens under softmax(logits).

    That is the model's own distribution, before penalties, temperature and filters. Equals are listed by ascending id.
    """
    highest = float(logits.max())
    log_total = highest + math.log(float(_sums(_weights(logits, highest, 1.0)).sum()))
    top = _largest(logits, num_top) if num_top else np.arange(0)
    top = top[np.argsort(-logits[top], kind="stable")]
    return TokenLogprob(
        token_id, float(logits[token_id]) - log_total, tuple((int(i), float(logits[i]) - log_total) for i in top)
    )


def _weights(logits: NDArray[np.float32], highest: float, temperature: float) -> NDArray[np.float32]:
    """Return exp((logits - highest) / temperature): relative to the likeliest token, whose weight is 1."""
    weights = logits - np.float32(highest)
    if temperature != 1.0:
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
            # At least the smallest normal number, and not 0.
            weights /= np.float32(max(temperature, float(np.finfo(np.float32).tiny)))
    np.exp(weights, out=weights)
    return weights


def _select(
    weights: NDArray[np.float32], ids: NDArray[np.intp] | None, kept: NDArray[np.intp]
) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
    return weights[kept], kept if ids is None else ids[kept]


def _pick(weights: NDArray[np.float32], uniform: float) -> int:
    """Return the place at which the running sum of the weights passes `uniform` of the total, which is in [0, 1)."""
    ends = np.cumsum(_sums(weights))
    wanted = uniform * float(ends[-1])
    chunk = min(int(np.searchsorted(ends, wanted, side="right")), len(ends) - 1)
    within = weights[chunk * _CHUNK : (chunk + 1) * _CHUNK]
    before = float(ends[chunk - 1]) if chunk else 0.0
    drawn = int(np.searchsorted(before + np.cumsum(within, dtype=np.float64), wanted, side="right"))
    if drawn < len(within):
        return chunk * _CHUNK + drawn
    # Rounding took the product up to the total, or the chunk's sum past its running one.
    return int(np.flatnonzero(weights[: chunk * _CHUNK + drawn])[-1])


def _sums(weights: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the sum of each _CHUNK of the weights, the last perhaps of fewer or none."""
    whole = len(weights) // _CHUNK * _CHUNK
    chunks = weights[:whole].reshape(-1, _CHUNK).sum(axis=1)
    return np.append(chunks, weights[whole:].sum()).astype(np.float64)


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.intp]:
    """Return the smallest set of likeliest tokens that holds `top_p` of the weight, as ascending indices."""
    total = float(_sums(weights).sum())
    wanted = top_p * total
    # Tokens below this weight hold less than 1 - top_p even all together, so none of them is needed or sorted.
    least = (1.0 - top_p) * total / len(weights)
    for bound in (*(guess for guess in _NUCLEUS_GUESSES if guess > least), least):
        candidates = np.flatnonzero(weights >= np.float32(bound))
        values = weights[candidates]
        if bound == least or float(values.sum()) >= wanted:
            break
    ordered = np.sort(values)[::-1]
    num_kept = int(np.searchsorted(np.cumsum(ordered, dtype=np.float64), wanted, side="left")) + 1
    num_kept = min(num_kept, len(values))
    return candidates[_reaching(values, ordered[num_kept - 1], num_kept)]


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Return the ascending indices of the `count` largest values; of equals, the lowest indices."""
    num_values = len(values)
    if count >= num_values:
        return np.arange(num_values)
    candidates = np.arange(0)
    if count <= _NUM_GROUPS and num_values >= 4 * _NUM_GROUPS:
        # As many groups as are wanted have a value that reaches this bound, so no smaller value is among the largest.
        leaders = values[: num_values // _NUM_GROUPS * _NUM_GROUPS].reshape(-1, _NUM_GROUPS).max(axis=0)
        candidates = np.flatnonzero(values >= np.partition(leaders, -count)[-count])
        values = values[candidates]
    kept = _reaching(values, np.partition(values, -count)[-count], count)
    return candidates[kept] if len(candidates) else kept


def _reaching(values: NDArray[np.float32], least: np.float32, count: int) -> NDArray[np.intp]:
    """Return the ascending indices of `count` values that reach `least`, leaving out the last of its equals."""
    indices = np.flatnonzero(values >= least)
    if len(indices) > count:
        equals = np.flatnonzero(values[indices] == least)
        indices = np.delete(indices, equals[count - len(indices) :])
    return indices
