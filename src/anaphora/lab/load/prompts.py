"""What is sent: made-up prompts that share exactly what the trace's prompts share, and are exactly as long.

Each token of the trace becomes a word of the server's vocabulary by a hash of its id, so equal beginnings stay equal
and unequal ones do not, whatever the log's contents were; nothing of those leaves the machine. The words are token ids
where the server takes them, else words of text that are one token each for the served model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from anaphora.identity import DEFAULT_NAMESPACE
from anaphora.lab.engine_run import tokens_of
from anaphora.tokens import pack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from anaphora.identity import Namespace
    from anaphora.lab.record import LoggedRequest
    from anaphora.lab.trace import Prompt

Form = Literal["ids", "text", "chat"]
"""How a prompt is sent: token ids or text to /v1/completions, one user message to /v1/chat/completions."""

ORDINARY_TOKEN_IDS = range(1_000, 9_000)
"""A server does not tell its vocabulary; these are in every one of today."""

_UNIQUE_FROM = 1 << 29
"""Where ids of prompts that share nothing begin; a log's own are smaller by far."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What prompts are made of. form: how they are sent.

    token_ids: for the form ids. words: for text, each one token with the space before it.
    num_added: tokens that the server puts around a text by itself (a beginning of sequence, a chat template).
    """

    form: Form
    token_ids: range = ORDINARY_TOKEN_IDS
    words: tuple[str, ...] = ()
    num_added: int = 0

    @property
    def size(self) -> int:
        """How many different ones there are."""
        return len(self.token_ids) if self.form == "ids" else len(self.words)

    def spell(self, indices: NDArray[np.int32]) -> list[int] | str:
        """The prompt of these words, as the server takes it."""
        if self.form == "ids":
            return (indices + self.token_ids.start).tolist()  # type: ignore[no-any-return]
        words = self.words
        return "".join([words[index] for index in indices.tolist()])


class Prompts:
    """Makes the prompts of a trace. seed: another one gives other contents with the same sharing, which a server that
    still has those of an earlier run does not know.
    """

    def __init__(self, vocabulary: Vocabulary, unit: int, seed: int) -> None:
        self.vocabulary = vocabulary
        self._unit = unit
        self._seed = seed
        self._namespaces: dict[Namespace, int] = {DEFAULT_NAMESPACE: 0}

    def indices(self, prompt: Prompt) -> NDArray[np.int32]:
        """The words of a prompt: one for each of its tokens, less those that the server adds.

        Prompts that a salt, an adapter or a model keeps apart get other words, so that any server keeps them apart.
        Cost: about 10 ns a token.
        """
        ids = np.frombuffer(tokens_of(prompt, self._unit), np.int32)
        apart = self._namespaces.setdefault(prompt.namespace, len(self._namespaces))
        wanted = max(1, len(ids) - self.vocabulary.num_added)
        return self._hashed(ids[:wanted], apart)

    def unique(self, number: int, num_tokens: int) -> NDArray[np.int32]:
        """The words of a prompt that shares nothing with any other: number `number` of such."""
        return self._hashed(np.arange(num_tokens, dtype=np.int32), 0x9E3779B9 + number)

    def spell(self, indices: NDArray[np.int32]) -> list[int] | str:
        """See Vocabulary."""
        return self.vocabulary.spell(indices)

    def cached_as(self, indices: NDArray[np.int32]) -> bytes:
        """The packed ids by which the server's cache tells this prompt from others: what the simulator is given.

        What the server adds stands in front, where a beginning of sequence is; of a chat template a part stands behind,
        which shifts blocks by less than one.
        """
        added = np.full(self.vocabulary.num_added, self.vocabulary.size, np.int32)
        return np.concatenate([added, indices]).astype(np.int32).tobytes()

    def _hashed(self, ids: NDArray[np.int32], apart: int) -> NDArray[np.int32]:
        """SplitMix64's finish, modulo the vocabulary."""
        with np.errstate(over="ignore"):
            x = ids.astype(np.uint64) + np.uint64((self._seed * 0x9E3779B97F4A7C15 + (apart << 32)) % 2**64)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x ^= x >> np.uint64(31)
        return (x % np.uint64(self.vocabulary.size)).astype(np.int32)


class LengthsAsPrompts:
    """Requests of which only the length is known get contents that nobody shares. num: how many there were."""

    def __init__(self, requests: Iterable[LoggedRequest]) -> None:
        self._requests = requests
        self.num = 0

    def __iter__(self) -> Iterator[LoggedRequest]:
        """The requests, in their order."""
        following = _UNIQUE_FROM
        for request in self._requests:
            if not (request.parts or request.blocks or request.token_ids) and request.length:
                self.num += 1
                request.token_ids = pack(range(following, following + request.length))
                following += request.length
                if following > 2**31 - 2**22:
                    following = _UNIQUE_FROM
            yield request
