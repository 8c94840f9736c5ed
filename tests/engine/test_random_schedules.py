"""Whatever the schedule, a sample gives what it gives alone: arrivals, aborts, failures and time in tiny pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anaphora.engine.request import Request
from anaphora.tokens import unpack
from tests.engine.toy_engine import ToyEngine, request, toy_engine
from tests.engine.toy_executor import VOCAB_SIZE, toy_output

# Prompts are beginnings of two texts with a few tokens behind, so that many of them share a prefix.
TEXTS = [[(7 * i + 3) % VOCAB_SIZE for i in range(40)], [(5 * i + 1) % VOCAB_SIZE for i in range(40)]]
MAX_TOKENS = 12
LONGEST = 20 + 3 + MAX_TOKENS

prompts = st.builds(
    lambda text, length, tail: [*TEXTS[text][:length], *tail],
    st.integers(0, 1),
    st.integers(4, 20),
    st.lists(st.integers(0, 3), max_size=3),
)
samplings = st.one_of(
    st.just({}),
    st.builds(lambda seed: {"temperature": 1.2, "top_p": 0.9, "seed": seed}, st.integers(0, 3)),
)


class EngineHistory(RuleBasedStateMachine):
    """An engine over the toy model, whose clock moves by a second a reading; the manager's books are checked at every
    step."""

    @initialize(
        index=st.sampled_from(["radix", "hash"]),
        block_size=st.sampled_from([1, 2, 4]),
        num_spare_blocks=st.integers(0, 6),
        max_num_seqs=st.integers(3, 6),
        max_num_batched_tokens=st.integers(1, 24),
        queue_order=st.sampled_from(["fcfs", "lpm", "dfs", "fair"]),
        min_held_tokens=st.sampled_from([1, 4, 100]),
        host_blocks=st.sampled_from([0, 3, 30]),
    )
    def build(self, *, block_size: int, num_spare_blocks: int, **options: Any) -> None:
        # Just enough for the longest request, so that others must give way to it.
        num_blocks = -(-LONGEST // block_size) + num_spare_blocks
        self.now = 0.0
        self.toy: ToyEngine = toy_engine(
            block_size=block_size, num_blocks=num_blocks, clock=lambda: self.now, **options
        )
        self.submitted: list[Request] = []

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, MAX_TOKENS),
        sampling=samplings,
        n=st.sampled_from([1, 1, 1, 2, 3]),
        salt=st.sampled_from([None, None, "tenant"]),
        cache=st.sampled_from([{}, {}, {"read_cache": False}, {"write_cache": False}]),
        priority=st.sampled_from([0, 0, 0, -1, 5]),
        deadline_s=st.sampled_from([None, None, None, 3.0, 30.0]),
    )
    def submit(self, *, prompt: list[int], sampling: dict[str, Any], cache: dict[str, bool], **options: Any) -> None:
        each = request(f"r{len(self.submitted)}", prompt, **options, **sampling, **cache)
        self.submitted.append(each)
        self.toy.submit(each)

    @rule(num_steps=st.integers(1, 4), seconds=st.sampled_from([0.0, 1.0, 5.0]))
    def step(self, num_steps: int, seconds: float) -> None:
        for _ in range(num_steps):
            self.now += seconds
            self.toy.step()

    @rule(number=st.integers(0, 11))
    def abort(self, number: int) -> None:
        self.toy.abort(f"r{number}")

    @precondition(lambda self: self.toy.engine.has_work)
    @rule()
    def fail(self) -> None:
        self.toy.executor.failures.append(RuntimeError("flaky"))
        self.toy.step()
        self.toy.executor.failures.clear()

    @precondition(lambda self: self.toy.engine.has_work)
    @rule()
    def fail_to_move_blocks(self) -> None:
        self.toy.executor.transfer_failures.append(RuntimeError("flaky"))
        self.toy.step()
        self.toy.executor.transfer_failures.clear()

    @invariant()
    def every_live_request_is_counted_once(self) -> None:
        stats = self.toy.engine.stats()
        assert 0 <= stats.num_held <= stats.num_waiting
        assert self.toy.engine.has_work == (stats.num_running + stats.num_waiting > 0)

    def teardown(self) -> None:
        if not hasattr(self, "toy"):
            return
        self.toy.run()
        for submitted in self.submitted:
            for index in range(submitted.sampling.n):
                self._check_sample(submitted, index)
        assert self.toy.manager.num_free_blocks == self.toy.manager.num_blocks
        stats = self.toy.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_held) == (0, 0, 0)
        cache = self.toy.manager.stats()
        assert cache.hits == sum(self.toy.outcomes[each.request_id].num_cached_tokens for each in self.submitted)

    def _check_sample(self, submitted: Request, index: int) -> None:
        outcome = self.toy.outcomes[f"{submitted.request_id}#{index}" if index else submitted.request_id]
        sampling = submitted.sampling
        seed = None if sampling.seed is None else sampling.seed + index
        alone = toy_output(unpack(submitted.prompt), replace(sampling, seed=seed))
        if outcome.finish_reason == "length":
            assert outcome.token_ids == alone
        else:
            assert outcome.finish_reason in {"abort", "error"}
            assert outcome.error in {None, "RuntimeError: flaky", f"deadline_s: {submitted.deadline_s} s have passed"}
            assert outcome.token_ids == alone[: len(outcome.token_ids)]
        if not submitted.read_cache:
            assert outcome.num_cached_tokens == 0


TestEngineHistory = EngineHistory.TestCase
TestEngineHistory.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
