"""Engine: requests in, deltas out, one step at a time.

    submit -> Scheduler -> Executor.execute -> commit -> Sampler -> OutputStream -> Delta
                 ^                                                        |
                 +---- append: the token that was drawn is known now -----+

It runs in whatever thread calls it and is not safe to be called from two; `EngineService` gives it a thread of its own.
"""

from __future__ import annotations

import math
import random
import struct
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from anaphora.engine.adapters import Adapters
from anaphora.engine.executor import Batch, KeepsHostBlocks
from anaphora.engine.grammars import Grammars, form_of
from anaphora.engine.grouping import Groups
from anaphora.engine.hit_report import HitReports
from anaphora.engine.joiners import DEFAULT_MAX_OVERTAKES
from anaphora.engine.live_request import LiveRequest
from anaphora.engine.order.lazy_heap import LazyHeap
from anaphora.engine.prefixes_in_progress import DEFAULT_MIN_HELD_TOKENS
from anaphora.engine.request import Delta, RequestError, check_token_ids
from anaphora.engine.sampling import Sampler, token_logprob
from anaphora.engine.scheduler import Scheduler
from anaphora.engine.stats import EngineStats
from anaphora.engine.stopping import OutputStream
from anaphora.engine.transfers import make_transfers
from anaphora.engine.validation import check_fit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from numpy.typing import NDArray

    from anaphora.cache.events import Event
    from anaphora.cache.manager import KVCacheManager
    from anaphora.engine.executor import Executor, Group
    from anaphora.engine.order import QueueOrderChoice
    from anaphora.engine.request import FinishReason, Request, SamplingParams, TokenLogprob
    from anaphora.engine.sampling import TokenSource
    from anaphora.engine.scheduler import ScheduledSpan
    from anaphora.engine.stopping import Detokenizer
    from anaphora.model.tokenizer import Tokenizer


_pack_id = struct.Struct("=i").pack


class Engine:
    """Continuous batching of requests over an executor and a KVCacheManager, both of which it takes over.

    tokenizer: makes text; without one `Delta.text` stays empty and requests with stop strings are refused.
    eos_token_ids: end an output unless the request ignores them.
    max_num_seqs, max_num_batched_tokens: limits of one step, in requests and in tokens.
    max_context: longest sequence in tokens, the executor's own limit by default.
    seed: makes the seeds of requests that bring none; random by default.
    clock: returns seconds. cpu_clock: seconds of CPU time of the thread that calls it, for the statistics.
    queue_order: who of those that wait is admitted next: "fcfs", "lpm", "dfs", "fair", or a function that makes a
        QueueOrder for a KVCacheManager. See `anaphora.engine.order`.
    max_group_overtakes: how often a request may be passed over for one that joins a group that runs (`Joiners`).
    min_held_tokens: a request sits out a step that computes a prefix of its own if that saves so many tokens.
    new_sampler: makes what draws a request's tokens, given its seed; the default draws from the logits.

    Raises:
        ValueError: a limit below 1, an unknown order, a block size that the executor does not support, or a manager
            that keeps tables for another number of layer groups.
    """

    def __init__(
        self,
        executor: Executor,
        manager: KVCacheManager,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Collection[int] = (),
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_context: int | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
        queue_order: QueueOrderChoice = "fcfs",
        min_held_tokens: int = DEFAULT_MIN_HELD_TOKENS,
        max_group_overtakes: int = DEFAULT_MAX_OVERTAKES,
        new_sampler: Callable[[Request, int], TokenSource] | None = None,
    ) -> None:
        check_fit(executor, manager)
        self._num_groups = len(executor.layer_groups)
        if max_context is not None and max_context < 1:
            raise ValueError(f"max_context: {max_context} is not allowed; it must be at least 1")
        self.max_context = min(executor.max_context, max_context or executor.max_context)
        """Longest sequence, prompt and output, that the model may see."""
        self._executor = executor
        self._manager = manager
        self._block_size = manager.block_size
        self._new_detokenizer: Callable[[], Detokenizer] | None = None
        if tokenizer is not None:
            # Here, so that an engine without text (a simulation) needs no tokenizer library.
            from anaphora.model.tokenizer import Detokenizer  # noqa: PLC0415

            self._new_detokenizer = partial(Detokenizer, tokenizer)
        self.grammars = None if tokenizer is None else Grammars(tokenizer, eos_token_ids, executor.vocab_size)
        """Compiles the forms that requests ask for; without a tokenizer there are none. For any thread."""
        self._eos_token_ids = frozenset(eos_token_ids)
        self._scheduler = Scheduler(
            manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            queue_order=queue_order,
            min_held_tokens=min_held_tokens,
            max_group_overtakes=max_group_overtakes,
        )
        self._seeds = random.Random(seed)
        self._clock, self._cpu_clock = clock, cpu_clock
        self._groups = Groups(manager.block_size)
        self._new_sampler = new_sampler or self._new_logits_sampler
        self._live: dict[str, list[LiveRequest]] = {}
        """By request, its samples."""
        self._deadlines: LazyHeap[tuple[float], LiveRequest] = LazyHeap()
        self._reports = HitReports(manager)
        self.last_batch: list[ScheduledSpan] = []
        """What the last step computed."""
        self._num_arrivals = 0
        self._stats = EngineStats()
        self.adapters = Adapters(executor, self._adapters_in_use)
        """LoRA adapters by name: to be loaded and unloaded between steps and on their thread."""
        executor.allocate_kv(manager.num_blocks, manager.block_size)
        if isinstance(executor, KeepsHostBlocks) and manager.num_host_blocks:
            executor.allocate_host(manager.num_host_blocks)

    @property
    def executor(self) -> Executor:
        """What computes: to be measured on its own, between steps and on their thread."""
        return self._executor

    @property
    def manager(self) -> KVCacheManager:
        """What keeps the blocks: to be looked at, or measured on its own, between steps and on their thread."""
        return self._manager

    @property
    def has_work(self) -> bool:
        """Whether a request is live, so that `step` has something to do."""
        return bool(self._live)

    @property
    def max_request_tokens(self) -> int:
        """The most that prompt and max_tokens of a request may add up to: `max_context`, or the pool if it is less."""
        manager = self._manager
        return min(self.max_context, manager.num_blocks // self._num_groups * manager.block_size)

    def stats(self) -> EngineStats:
        """Return the counters as they stand. May be called from any thread."""
        manager, scheduler = self._manager, self._scheduler
        cache = manager.stats()
        return replace(
            self._stats,
            prompt_tokens=cache.queries,
            cached_tokens=cache.hits,
            host_cached_tokens=cache.host_hits,
            num_preemptions=cache.preemptions,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_held=scheduler.waiting.num_held,
            num_blocks=manager.num_blocks,
            num_free_blocks=manager.num_free_blocks,
        )

    def validate(self, request: Request) -> None:
        """Raise RequestError if the request can never be served here. May be called from any thread.

        Cost: one pass over the prompt; of a form that is new here, `Grammars.check`.
        """
        sampling = request.sampling
        num_prompt_tokens = check_token_ids(request, self._executor.vocab_size)
        if sampling.stop and self._new_detokenizer is None:
            raise RequestError("stop", "stop: the engine has no tokenizer, so stop strings cannot be found")
        if (form := form_of(sampling)) is not None:
            if self.grammars is None:
                raise RequestError(form.name, f"{form.name}: the engine has no tokenizer, so it cannot be followed")
            self.grammars.check(form)
        if sampling.n > self._scheduler.max_num_seqs:
            raise RequestError(
                "n",
                f"n: {sampling.n} samples are drawn side by side; at most {self._scheduler.max_num_seqs} requests run",
            )
        self.adapters.validate(request.namespace.adapter)
        self._validate_length(num_prompt_tokens, sampling.max_tokens)

    def _adapters_in_use(self) -> set[str]:
        used = (samples[0].request.namespace.adapter for samples in self._live.values() if samples)
        return {adapter.digest for adapter in used if adapter is not None}

    def _validate_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        num_tokens = num_prompt_tokens + max_tokens
        block_size, num_blocks = self._manager.block_size, self._manager.num_blocks
        num_needed = -(-num_tokens // block_size) * self._num_groups
        # Whose fault it is: the prompt's if it leaves no room for one token of output.
        param = "prompt" if num_prompt_tokens >= self.max_request_tokens else "max_tokens"
        asked = f"{param}: {num_prompt_tokens} prompt tokens and max_tokens {max_tokens} make {num_tokens} tokens"
        if num_tokens > self.max_context:
            raise RequestError(param, f"{asked}; the longest context is {self.max_context} tokens")
        if num_needed > num_blocks:
            raise RequestError(
                param,
                f"{asked}, which need {num_needed} KV blocks of {block_size} tokens; the pool has {num_blocks}",
            )

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served, or its id is that of a live request.
        """
        self.validate(request)
        if request.request_id in self._live:
            raise RequestError("request_id", f"request_id: {request.request_id!r} is in use by a live request")
        sampling = request.sampling
        seed = self._seeds.getrandbits(128) if sampling.seed is None else sampling.seed
        sequence = self._manager.start(
            request.prompt,
            namespace=request.namespace,
            read_cache=request.read_cache,
            write_cache=request.write_cache,
            priority=-request.priority,
        )
        live = LiveRequest(
            request,
            sequence,
            arrival=self._num_arrivals,
            seed=seed,
            sampler=self._new_sampler(request, seed),
            output=self._new_output(sampling),
            num_unborn=sampling.n - 1,
        )
        self._num_arrivals += 1
        self._live[request.request_id] = [live]
        self._reports.submitted(live)
        if request.deadline_s is not None:
            now = self._clock()
            live.half_time_s, live.deadline_s = now + request.deadline_s / 2, now + request.deadline_s
            self._deadlines.push((live.deadline_s,), live)
            if self._deadlines.is_crowded:
                timed = [each for samples in self._live.values() for each in samples if each.deadline_s < math.inf]
                self._deadlines.rebuild(((each.deadline_s,), each) for each in timed)
        self._scheduler.add(live)

    def abort(self, request_id: str) -> list[Delta]:
        """End a request in whatever state it is; return the last deltas of its samples, none if it is not live.

        What it committed stays cached, all else is free again.
        """
        return self._end_all(request_id, "abort")

    def step(self) -> list[Delta]:
        """Run one batch; return what it added, in order of rank. Requests still in prefill add nothing.

        If the executor fails, the requests of this batch end with finish_reason "error", leaving nothing of the step
        in the cache; the others live on. Logits from which no token can be drawn end the one request that they are of.
        """
        if not self._live:
            return []
        started, started_cpu = self._clock(), self._cpu_clock()
        deltas = self._end_late(started)
        if not self._live:
            return deltas
        scheduled = self._scheduler.schedule(started)
        groups = self._groups.of(scheduled)
        stats = self._stats
        stats.schedule_cpu_s += self._cpu_clock() - started_cpu
        self.last_batch = scheduled
        self._reports.scheduled(scheduled)
        deltas += self._run(scheduled, groups) if scheduled else self._refuse_first()
        stats.num_steps += 1
        stats.step_s += self._clock() - started
        stats.step_cpu_s += self._cpu_clock() - started_cpu
        return deltas

    def take_events(self) -> list[Event]:
        """Return what happened to cached blocks since the last call, after the reports of what was found. ValueError if
        the manager does not record it."""
        return [*self._reports.take(), *self._manager.take_events()]

    def _run(self, scheduled: list[ScheduledSpan], groups: list[Group]) -> list[Delta]:
        lacking: set[int] = set()
        try:
            rows = self._execute(scheduled, groups, lacking)
        except Exception as error:
            described = _describe(error)
            ended = dict.fromkeys(live for live, _, _ in scheduled)
            # Who was admitted without a turn in this step may build on a block that was never brought.
            running = self._scheduler.running
            ended |= dict.fromkeys(live for live in running if not lacking.isdisjoint(live.sequence.block_table))
            return [delta for live in ended for delta in self._end_early(live, "error", described)]
        for live, start, num_tokens in scheduled:
            if start < live.num_prompt_tokens:
                self._stats.computed_prompt_tokens += min(num_tokens, live.num_prompt_tokens - start)
        # Before anything is committed: KV that gives no usable logits must not be shared.
        drawn = [
            None if row is None else self._advance(live, row) for (live, _, _), row in zip(scheduled, rows, strict=True)
        ]
        started = self._cpu_clock()
        deltas: list[Delta] = []
        for (live, start, num_tokens), row, delta in zip(scheduled, rows, drawn, strict=True):
            if delta is None:
                self._commit(live, start, num_tokens)
            elif num_tokens == 1 and live.position < live.end_of_slots and delta.finish_reason is None:
                # Inside a block there is nothing to share.
                deltas.append(delta)
                live.drawn.append(delta.token_ids[0])
            elif delta.finish_reason == "error":
                deltas += self._end_early(live, "error", delta.error, drawn=delta)
            else:
                self._commit(live, start, num_tokens)
                deltas.append(delta)
                if row is not None:
                    deltas += [self._branch(live, row, index) for index in range(1, live.num_unborn + 1)]
                self._go_on(live, delta)
        self._stats.commit_cpu_s += self._cpu_clock() - started
        return deltas

    def _commit(self, live: LiveRequest, start: int, num_tokens: int) -> None:
        live.commit(self._manager, num_tokens)
        if num_tokens + start % self._block_size >= self._block_size:
            self._scheduler.committed(live)

    def _go_on(self, live: LiveRequest, delta: Delta) -> None:
        """A token was drawn: it is the last one, or the next to be computed."""
        if delta.finish_reason is None:
            self._manager.append(live.sequence, _pack_id(delta.token_ids[0]))
        else:
            self._end(live, delta.finish_reason)

    def _branch(self, parent: LiveRequest, logits: NDArray[np.float32], index: int) -> Delta:
        """Begin sample number `index` after the prompt that `parent` has computed; return its first delta."""
        request, seed = parent.request, parent.seed + index
        live = LiveRequest(
            request,
            self._manager.fork(parent.sequence),
            arrival=parent.arrival,
            seed=seed,
            sampler=self._new_sampler(request, seed),
            output=self._new_output(request.sampling),
            index=index,
            deadline_s=parent.deadline_s,
        )
        self._live[request.request_id].append(live)
        self._scheduler.add_branch(live, parent)
        delta = self._advance(live, logits)
        self._go_on(live, delta)
        return delta

    def _new_logits_sampler(self, request: Request, seed: int) -> TokenSource:
        form = form_of(request.sampling)
        constraint = None if form is None or self.grammars is None else self.grammars.start(form)
        return Sampler(request.sampling, seed, request.prompt, constraint)

    def _new_output(self, sampling: SamplingParams) -> OutputStream:
        detokenizer = None if self._new_detokenizer is None else self._new_detokenizer()
        return OutputStream(sampling, self._eos_token_ids, detokenizer)

    def _execute(
        self, scheduled: list[ScheduledSpan], groups: list[Group], lacking: set[int]
    ) -> list[NDArray[np.float32] | None]:
        """Move what the manager wants moved, then compute the spans; return the logits of those that are complete,
        float32 [vocab_size], None for the others.

        Raises whatever the executor does. If that was in moving, the blocks that lack their content are `lacking`.
        """
        batch = Batch([live.span(start, num_tokens) for live, start, num_tokens in scheduled], groups)
        started = self._clock()
        try:
            self._transfer(lacking)
            logits = self._executor.execute(batch).logits
        finally:
            self._stats.execute_s += self._clock() - started
        rows: list[NDArray[np.float32] | None] = []
        for span, of_span in zip(batch.spans, logits, strict=True):
            if span.num_logits != (0 if of_span is None else len(of_span)):
                raise RuntimeError("the executor did not return as many rows of logits as it was asked for")
            rows.append(None if of_span is None or len(of_span) == 0 else of_span[0])
        return rows

    def _transfer(self, lacking: set[int]) -> None:
        transfers = self._manager.take_transfers()
        if not transfers:
            return
        try:
            make_transfers(self._executor, transfers)
        except Exception:
            lacking |= self._manager.fail_transfers(transfers)
            raise

    def _advance(self, live: LiveRequest, logits: NDArray[np.float32]) -> Delta:
        """Draw the request's next token. Whatever fails in that ends this request alone."""
        sampling = live.request.sampling
        num_before = live.output.num_tokens
        token_id = -1
        try:
            token_id = live.sampler.sample(logits, num_before)
            logprobs: tuple[TokenLogprob, ...] = ()
            if sampling.logprobs is not None:
                logprobs = (token_logprob(logits, token_id, sampling.logprobs),)
            piece = live.output.push(token_id, is_complete=live.sampler.is_complete)
        except Exception as error:
            drawn = (token_id,) if live.output.num_tokens > num_before else ()
            return self._delta(live, token_ids=drawn, finish_reason="error", error=_describe(error))
        self._stats.output_tokens += 1
        return self._delta(
            live, token_ids=(token_id,), text=piece.text, finish_reason=piece.finish_reason, logprobs=logprobs
        )

    def _refuse_first(self) -> list[Delta]:
        """Not even the first gets slots, with nothing else running: others hold the blocks, so waiting has no end."""
        manager = self._manager
        return self._end_early(
            self._scheduler.first(),
            "error",
            f"KV blocks: only {manager.num_free_blocks} of {manager.num_blocks} can be had, "
            "though no other request runs",
        )

    def _end_late(self, now_s: float) -> list[Delta]:
        """End the requests whose deadline has come."""
        deltas: list[Delta] = []
        while (entry := self._deadlines.first_entry()) is not None and entry[0][0] <= now_s:
            self._deadlines.drop_first()
            request = entry[1].request
            samples = self._live.get(request.request_id, ())
            if any(live.request is request for live in samples):
                error = f"deadline_s: {request.deadline_s} s have passed"
                deltas += self._end_all(request.request_id, "abort", error)
        return deltas

    def _end_all(self, request_id: str, reason: FinishReason, error: str | None = None) -> list[Delta]:
        samples = list(self._live.get(request_id, ()))
        return [delta for live in samples for delta in self._end_early(live, reason, error)]

    def _end_early(
        self, live: LiveRequest, reason: FinishReason, error: str | None = None, *, drawn: Delta | None = None
    ) -> list[Delta]:
        """End a sample, and with it those that were to begin after it; return their last deltas."""
        first = drawn or self._delta(live, finish_reason=reason, error=error)
        unborn = [
            self._delta(live, finish_reason=reason, error=error, index=index) for index in range(1, live.num_unborn + 1)
        ]
        self._end(live, reason)
        return [first, *unborn]

    def _end(self, live: LiveRequest, reason: FinishReason) -> None:
        self._scheduler.remove(live)
        self._reports.ended(live)
        samples = self._live[live.request_id]
        samples.remove(live)
        if not samples:
            del self._live[live.request_id]
        if reason in {"stop", "length"}:
            self._manager.finish(live.sequence)
        else:
            self._manager.abort(live.sequence)

    @staticmethod
    def _delta(
        live: LiveRequest,
        *,
        token_ids: tuple[int, ...] = (),
        text: str = "",
        finish_reason: FinishReason | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
        error: str | None = None,
        index: int | None = None,
    ) -> Delta:
        return Delta(
            request_id=live.request_id,
            token_ids=token_ids,
            text=text,
            num_prompt_tokens=live.num_prompt_tokens,
            num_cached_tokens=live.num_cached_tokens,
            num_output_tokens=live.output.num_tokens if index is None else 0,
            finish_reason=finish_reason,
            logprobs=logprobs,
            error=error,
            index=live.index if index is None else index,
        )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
