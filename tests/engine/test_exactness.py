"""The promise of the whole engine: 50 prompts give the same logits, bit for bit, however they are served."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from anaphora import KVCacheManager
from anaphora.engine.loop import Engine
from anaphora.engine.native import NativeExecutor, NativeUnavailableError, native_paths
from anaphora.engine.reference import ReferenceExecutor
from anaphora.engine.request import Request, SamplingParams
from anaphora.tokens import pack
from tests.engine.dense_model import LLAMA, random_weights

if TYPE_CHECKING:
    from anaphora.engine.executor import Batch, Executor, Output

NUM_PROMPTS = 50
NUM_OUTPUT = 4
BLOCK_SIZE = 16


@cache
def prompts(vocab_size: int) -> list[bytes]:
    """Prompts of 1 to 131 tokens over three shared prefixes; some are a prefix of others, or cut inside a block."""
    rng = np.random.default_rng(7)
    prefixes = [rng.integers(0, vocab_size, length).tolist() for length in (7, 48, 101)]
    tails = [rng.integers(0, vocab_size, i % 31).tolist() for i in range(NUM_PROMPTS)]
    return [pack((prefixes[i % 3] if i % 10 else []) + tail or [3]) for i, tail in enumerate(tails)]


class Recorded:
    """An engine whose executor's logits are kept, by request."""

    def __init__(self, executor: Executor, *, num_blocks: int = 1200, **options: Any) -> None:
        self.manager = KVCacheManager(num_blocks, BLOCK_SIZE)
        self.engine = Engine(executor, self.manager, **options)
        self.rows: dict[str, list[np.ndarray]] = {}
        self._execute = executor.execute
        self.executor = executor

    def serve(self, numbers: list[int], **options: bool) -> list[np.ndarray]:
        """Serve prompts together; return the rows of logits of each, one on top of the other."""
        texts = prompts(self.executor.vocab_size)
        self.rows = {str(number): [] for number in numbers}
        for number in numbers:
            sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0)
            self.engine.submit(Request(str(number), texts[number], sampling, **options))
        self.executor.execute = self._record  # type: ignore[method-assign]
        try:
            while self.engine.has_work:
                for delta in self.engine.step():
                    assert delta.finish_reason != "error", delta.error
        finally:
            self.executor.execute = self._execute  # type: ignore[method-assign]
        return [np.stack(self.rows[str(number)]) for number in numbers]

    def _record(self, batch: Batch) -> Output:
        output = self._execute(batch)
        owners = {id(one.sequence.block_tables): name for name, lives in self.engine._live.items() for one in lives}
        for span, logits in zip(batch.spans, output.logits, strict=True):
            if logits is not None and len(logits):
                self.rows[owners[id(span.block_tables)]].append(logits[-1].copy())
        return output


def make(kind: str) -> Executor:
    if kind == "reference":
        return ReferenceExecutor(LLAMA, random_weights(LLAMA))
    try:
        native_paths()
    except NativeUnavailableError as error:
        pytest.skip(f"the native executor is not available: {error}")
    return NativeExecutor(LLAMA, random_weights(LLAMA))


def check_every_way_of_serving(executor: Executor, numbers: list[int]) -> None:
    alone = Recorded(executor)
    expected = []
    for number in numbers:
        expected += alone.serve([number])
        assert alone.manager.reset()
    assert all(len(rows) == NUM_OUTPUT for rows in expected)

    def same(way: str, found: list[np.ndarray]) -> None:
        for number, rows, wanted in zip(numbers, found, expected, strict=True):
            assert np.array_equal(rows.view(np.uint32), wanted.view(np.uint32)), f"{way}: prompt {number}"

    one_by_one = Recorded(executor)
    same("filling the cache", [one_by_one.serve([number])[0] for number in numbers])
    num_cold = one_by_one.manager.stats().hits
    same("warm", [one_by_one.serve([number])[0] for number in numbers])
    assert one_by_one.manager.stats().hits > 2 * num_cold
    same("warm, together", one_by_one.serve(numbers))
    same("cache off", Recorded(executor).serve(numbers, read_cache=False, write_cache=False))
    for budget in (5, 16, 37):
        same(f"in chunks of {budget}", Recorded(executor, max_num_batched_tokens=budget).serve(numbers))
    for batch in (4, 25):
        same(f"in batches of {batch}", Recorded(executor, max_num_seqs=batch).serve(numbers))
    crowded = Recorded(executor, num_blocks=20)
    same("preempted", crowded.serve(numbers))
    assert crowded.manager.stats().preemptions > 0


@pytest.mark.parametrize("kind", ["reference", "native"])
def test_fifty_prompts_give_the_same_bits_however_they_are_served(kind: str) -> None:
    check_every_way_of_serving(make(kind), list(range(NUM_PROMPTS)))


@pytest.mark.model
def test_the_default_model_gives_the_same_bits_however_it_is_served(default_model: Any) -> None:
    try:
        executor: Executor = NativeExecutor(default_model.shape, default_model.weights)
        # The other paths are several times slower; every fourth prompt has all prefixes among them.
        step = 1 if executor.path == "avx512-bf16" else 4
    except NativeUnavailableError:
        executor = ReferenceExecutor(default_model.shape, default_model.weights)
        step = 10  # slower still
    check_every_way_of_serving(executor, list(range(0, NUM_PROMPTS, step)))
