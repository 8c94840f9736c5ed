"""LLM: text in, text out, in one process: the library face of the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from anaphora.engine.beam_search import BeamSearch
from anaphora.engine.build import build_engine
from anaphora.engine.request import Request, SamplingParams, TokenLogprob
from anaphora.identity import Namespace
from anaphora.model import Model, load_model, read_lora
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from anaphora.engine.build import EngineOptions
    from anaphora.engine.request import Delta, FinishReason
    from anaphora.engine.stats import EngineStats
    from anaphora.model.progress import Progress


@dataclass(slots=True)
class Completion:
    """What a prompt was continued with.

    token_ids: with the token that ended it, if one did. text: without it, and without a stop string.
    num_cached_tokens: prompt tokens whose KV was found in the cache.
    logprobs: one per token if they were asked for.
    error: what went wrong, if finish_reason is "error".
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None

    def add(self, delta: Delta) -> None:
        """Join what a step added."""
        self.num_prompt_tokens = delta.num_prompt_tokens
        self.num_cached_tokens = delta.num_cached_tokens
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.finish_reason = delta.finish_reason
        self.logprobs += delta.logprobs
        self.error = delta.error


def _mean_logprob(completion: Completion) -> float:
    """What ranks samples, whatever their lengths; one that failed before its first token is the last."""
    logprobs = [token.logprob for token in completion.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


class LLM:
    """A model, and an engine whose cache lives as long as this object does. Not safe to be called from two threads.

    model: what `load_model` takes (a path, a name on the hub, None for the default model), or a loaded `Model`.
    options: as `build_engine` has them.

    Raises:
        ModelError: the model cannot be fetched, read or run.
        ValueError: an option with a value that is not allowed.
    """

    def __init__(
        self,
        model: str | Path | Model | None = None,
        *,
        progress: Progress | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        any_architecture = options.get("executor") == "torch"
        self.model = (
            model if isinstance(model, Model) else load_model(model, progress, any_architecture=any_architecture)
        )
        self._engine = build_engine(self.model, **options)
        self._num_requests = 0

    def generate(
        self,
        prompts: str | bytes | Iterable[str | bytes],
        sampling: SamplingParams | None = None,
        *,
        best_of: int | None = None,
        adapter: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> list[Completion]:
        """Continue one prompt or several together; return completions in the order of the prompts, `sampling.n` each.

        prompts: text, or packed int32 ids (`bytes`). sampling: for all of them, `SamplingParams()` by default.
        best_of: draw so many samples of each prompt and return the `sampling.n` likeliest, by mean log-probability
            per token, best first.
        adapter: the name of a loaded one, None for the model as it is; prefixes are shared only within one.
        cache_salt: prefixes are shared only between calls with the same one.
        priority, deadline_s: as `Request` has them.

        Raises:
            RequestError: a prompt can never be served, or the adapter is not loaded; then none of them is.
            ValueError: an empty `cache_salt`, a `best_of` below `sampling.n`, or text with lone surrogates.
        """
        sampling = sampling or SamplingParams()
        num_asked = sampling.n
        if best_of is not None:
            if best_of < num_asked:
                raise ValueError(f"best_of: {best_of} is not allowed; it must be at least n, {num_asked}")
            logprobs = 0 if sampling.logprobs is None else sampling.logprobs
            sampling = replace(sampling, n=best_of, logprobs=logprobs)
        if isinstance(prompts, (str, bytes)):
            prompts = [prompts]
        namespace = self._namespace(adapter, cache_salt)
        requests = [
            Request(self._new_id(), self._encode(prompt), sampling, namespace, priority=priority, deadline_s=deadline_s)
            for prompt in prompts
        ]
        samples = {request.request_id: [Completion() for _ in range(sampling.n)] for request in requests}
        try:
            for request in requests:
                self._engine.submit(request)
            while self._engine.has_work:
                for delta in self._engine.step():
                    samples[delta.request_id][delta.index].add(delta)
        finally:
            for request_id in samples:
                self._engine.abort(request_id)
        if best_of is not None:
            for of_prompt in samples.values():
                of_prompt.sort(key=_mean_logprob, reverse=True)
        return [completion for of_prompt in samples.values() for completion in of_prompt[:num_asked]]

    def beam_search(
        self,
        prompt: str | bytes,
        width: int = 4,
        *,
        max_tokens: int = 16,
        length_penalty: float = 1.0,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> list[Completion]:
        """Return the `width` likeliest continuations that a search of that width finds, best first.

        They are ranked by sum of log-probabilities / length ** length_penalty; `logprobs` has them token by token.

        Raises:
            RequestError: an option that is not allowed, a prompt that cannot be served, or too many beams for the pool.
            ValueError: an empty `cache_salt`, or text with lone surrogates.
        """
        namespace = self._namespace(adapter, cache_salt)
        tokenizer, packed = self.model.tokenizer, self._encode(prompt)
        ends = frozenset(tokenizer.eos_token_ids)
        search = BeamSearch(
            self._engine.executor,
            self._engine.manager,
            width=width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            end_token_ids=ends,
        )
        self._engine.validate(Request("beam", packed, SamplingParams(max_tokens=max_tokens), namespace))
        num_cached_tokens, beams = search.run(packed, namespace)
        return [
            Completion(
                num_prompt_tokens=len(packed) // TOKEN_BYTES,
                num_cached_tokens=num_cached_tokens,
                token_ids=beam.token_ids,
                text=tokenizer.decode(beam.token_ids[:-1] if beam.has_ended else beam.token_ids),
                finish_reason="stop" if beam.has_ended else "length",
                logprobs=tuple(map(TokenLogprob, beam.token_ids, beam.logprobs)),
            )
            for beam in beams
        ]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> Completion:
        """Answer a conversation: messages with "role" and "content", as the model's chat template takes them.

        Raises:
            ValueError: the model has no chat template, or it refuses the messages.
            RequestError: the prompt can never be served.
        """
        template = self.model.chat_template
        if template is None:
            raise ValueError(f"messages: {self.model.name} has no chat template; use generate()")
        text = template.render(messages, tools=tools)
        (completion,) = self.generate(
            self.model.tokenizer.encode(text), sampling, adapter=adapter, cache_salt=cache_salt
        )
        return completion

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter in PEFT's format; under a name that is taken, in place of what has it.

        With other weights than before, no block that was computed under this name is found any more.

        Raises:
            ModelError: it cannot be read, or not run on this model; what was loaded stays.
            ValueError: the name is empty or the model's, or the executor runs no adapters.
        """
        if name == self.model.name:
            raise ValueError(f"name: {name!r} is the model's own; choose another")
        self._engine.adapters.load(name, read_lora(Path(path), self.model.shape))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. KeyError if there is none of that name."""
        self._engine.adapters.unload(name)

    def stats(self) -> EngineStats:
        """Return the engine's counters as they stand."""
        return self._engine.stats()

    def _namespace(self, adapter: str | None, cache_salt: str | None) -> Namespace:
        return Namespace(model=self.model.revision, adapter=self._engine.adapters.named(adapter), salt=cache_salt)

    def _encode(self, prompt: str | bytes) -> bytes:
        if isinstance(prompt, bytes):
            return prompt
        tokenizer = self.model.tokenizer
        return tokenizer.encode(prompt, add_bos=tokenizer.adds_bos)

    def _new_id(self) -> str:
        self._num_requests += 1
        return f"llm-{self._num_requests}"
