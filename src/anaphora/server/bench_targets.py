"""What `anaphora bench` measures: an engine in this process, or a server over HTTP."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from anaphora.engine.executor import Batch, Span
from anaphora.engine.request import Request, SamplingParams
from anaphora.tokens import pack

if TYPE_CHECKING:
    from anaphora.engine.loop import Engine
    from anaphora.server.client import TimingClient

ORDINARY_TOKEN_IDS = range(1_000, 10_000)
"""A server does not tell its vocabulary; these are in every one of today."""

GREEDY_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A prompt's time to first token. cached_tokens: None where the target does not say."""

    ttft_s: float
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Overhead:
    """Shares of the CPU time that the engine's thread spends in steps, 0 to 1, in which nothing can be reused.

    CPU time, since other programs on the machine lengthen the time by the clock of one part or another by chance.

    schedule: who is next, lookups and slots for them, groups. commit: what was computed, drawn and has ended.
    """

    schedule: float
    commit: float

    @property
    def total(self) -> float:
        """Scheduler and manager together."""
        return self.schedule + self.commit


class Target(ABC):
    """Something that continues prompts of token ids, one at a time."""

    name: str
    """Model and way of access."""
    ideal_is: str
    """What `ideal` measures, in words."""
    token_ids: range
    """Prompts are drawn from these."""

    def check(self, num_prompt_tokens: int, num_output_tokens: int) -> None:  # noqa: B027
        """Raise RequestError for more than it can hold, where it tells that beforehand."""

    @abstractmethod
    def first_token(self, prompt: list[int]) -> FirstToken:
        """Continue a prompt by one token."""

    @abstractmethod
    def ideal(self, prompt: list[int], num_suffix_tokens: int) -> float:
        """Return the seconds that the last tokens of a prompt take by themselves, its beginning being in the cache."""

    @abstractmethod
    def overhead(self, prompts: list[list[int]], num_output_tokens: int) -> Overhead | None:
        """Continue unrelated prompts together; return what that cost besides the model, None if unknown."""


class EngineTarget(Target):
    """An engine in this process: no HTTP, no threads; times are from `submit` to the step that gave the token."""

    ideal_is = "the suffix's span alone on the executor, its prefix's blocks in place; no scheduler, no sampling"

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.name = f"{model_name}, in process"
        self.token_ids = range(engine.executor.vocab_size)
        self._engine = engine
        self._num_requests = 0

    def check(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """See Target."""
        sampling = SamplingParams(max_tokens=num_output_tokens)
        self._engine.validate(self._request([self.token_ids[0]] * num_prompt_tokens, sampling))

    def first_token(self, prompt: list[int]) -> FirstToken:
        """See Target."""
        request = self._request(prompt, GREEDY_TOKEN)
        started = time.perf_counter()
        self._engine.submit(request)
        while not (deltas := self._engine.step()):
            pass
        return FirstToken(time.perf_counter() - started, deltas[0].num_cached_tokens)

    def ideal(self, prompt: list[int], num_suffix_tokens: int) -> float:
        """See Target. The span begins where the hit ends: the suffix, and what the prefix has beyond whole blocks."""
        manager = self._engine.manager
        sequence = manager.start(prompt)
        if not manager.allocate(sequence, len(prompt) - sequence.num_cached_tokens):
            raise ValueError("kv_memory: the pool is too small to hold a prompt of the benchmark")
        try:
            start = sequence.num_computed_tokens
            batch = Batch([Span(np.array(prompt[start:], np.int32), start, sequence.block_tables)])
            started = time.perf_counter()
            self._engine.executor.execute(batch)
            return time.perf_counter() - started
        finally:
            manager.abort(sequence)

    def overhead(self, prompts: list[list[int]], num_output_tokens: int) -> Overhead | None:
        """See Target."""
        before = self._engine.stats()
        sampling = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
        for prompt in prompts:
            self._engine.submit(self._request(prompt, sampling))
        while self._engine.has_work:
            self._engine.step()
        after = self._engine.stats()
        step_s = after.step_cpu_s - before.step_cpu_s
        return Overhead(
            (after.schedule_cpu_s - before.schedule_cpu_s) / step_s, (after.commit_cpu_s - before.commit_cpu_s) / step_s
        )

    def _request(self, prompt: list[int], sampling: SamplingParams) -> Request:
        self._num_requests += 1
        return Request(f"bench-{self._num_requests}", pack(prompt), sampling)


class ServerTarget(Target):
    """A server over HTTP, this one's or another's; times are those of a client, streaming /v1/completions."""

    ideal_is = "a prompt of the suffix's tokens alone, over HTTP"

    def __init__(self, client: TimingClient, url: str, token_ids: range | None = None) -> None:
        self._client = client
        self._model = client.model_name()
        self.name = f"{self._model} at {url}"
        self.token_ids = ORDINARY_TOKEN_IDS if token_ids is None else token_ids

    def first_token(self, prompt: list[int]) -> FirstToken:
        """See Target."""
        answer = self._client.stream("/v1/completions", self._body(prompt, 1))
        return FirstToken(answer.ttft_s, answer.cached_tokens)

    def ideal(self, prompt: list[int], num_suffix_tokens: int) -> float:
        """See Target."""
        return self.first_token(prompt[-num_suffix_tokens:]).ttft_s

    def overhead(self, prompts: list[list[int]], num_output_tokens: int) -> Overhead | None:
        """See Target. Known from servers that tell it at /metrics, as this one does."""
        before = self._cpu_seconds()
        body = {"model": self._model, "prompt": prompts, "max_tokens": num_output_tokens, "temperature": 0}
        self._client.stream("/v1/completions", body)
        after = self._cpu_seconds()
        if before is None or after is None:
            return None
        step_s, schedule_s, commit_s = (now - then for now, then in zip(after, before, strict=True))
        return Overhead(schedule_s / step_s, commit_s / step_s) if step_s else None

    def _body(self, prompt: list[int], max_tokens: int) -> dict[str, object]:
        return {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}

    def _cpu_seconds(self) -> list[float] | None:
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(self._client.metrics())
            for sample in family.samples
        }
        try:
            return [values[f"anaphora_engine_{part}_cpu_seconds_total"] for part in ("step", "schedule", "commit")]
        except KeyError:
            return None
