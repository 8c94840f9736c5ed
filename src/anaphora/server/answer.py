"""From the deltas of a generation to the objects that are sent."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from anaphora.server.openai_output import Choice, Format, Json, usage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anaphora.engine.request import Delta
    from anaphora.server.openai_api import Call
    from anaphora.server.served_model import ServedModel


class Answer:
    """One call's answer, whole or in chunks, in the words of `form`."""

    def __init__(self, call: Call, call_id: str, form: Format, model: ServedModel) -> None:
        self._call = call
        self._form = form
        self._tokenizer = model.tokenizer
        self._choices = [Choice(i) for i in range(len(call.prompts) * call.sampling.n)]
        adapter = call.namespace.adapter
        name = model.name if adapter is None else adapter.name
        self._head: Json = {"id": call_id, "created": int(time.time()), "model": name}

    async def whole(self, deltas: AsyncIterator[tuple[int, Delta]]) -> Json:
        """Wait for all deltas and return the answer."""
        async for index, delta in deltas:
            self._choices[index].add(delta)
        has_logprobs = self._call.has_logprobs
        choices = [self._form.choice(choice, self._tokenizer, has_logprobs=has_logprobs) for choice in self._choices]
        return {**self._head, "object": self._form.kind, "choices": choices, "usage": self._usage()}

    async def chunks(self, deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[Json]:
        """Yield a chunk for every delta that brings something, then the usage where it was asked for."""
        head = {**self._head, "object": self._form.chunk_kind}
        if self._call.includes_usage:
            head["usage"] = None
        async for index, delta in deltas:
            choice = self._choices[index]
            # With the first delta and not before, so that a client's time to its first chunk is that to a token.
            if choice.last is None and (opening := self._form.opening(index)) is not None:
                yield {**head, "choices": [opening]}
            choice.add(delta)
            if delta.text or delta.logprobs or delta.finish_reason:
                piece = self._form.piece(choice, delta, self._tokenizer, has_logprobs=self._call.has_logprobs)
                yield {**head, "choices": [piece]}
        if self._call.includes_usage:
            yield {**head, "choices": [], "usage": self._usage()}

    def _usage(self) -> Json:
        return usage(self._choices, self._call.sampling.n)
