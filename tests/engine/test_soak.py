"""Five hundred prompts under random load on a tiny real model: each gives, to the last token, what it gives alone."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from anaphora import KVCacheManager, Namespace
from anaphora.engine.loop import Engine
from anaphora.engine.reference import ReferenceExecutor
from anaphora.engine.request import Request, SamplingParams
from anaphora.tokens import pack
from tests.tiny_models import VOCAB_SIZE, random_weights, tiny_shape

if TYPE_CHECKING:
    from anaphora.engine.executor import Executor

NUM_PROMPTS = 125
NUM_BLOCKS = 24
SHAPE = tiny_shape(num_layers=1, hidden_size=32, intermediate_size=32, num_heads=2, num_kv_heads=1, max_context=256)


@pytest.fixture(scope="module")
def executor() -> Executor:
    return ReferenceExecutor(SHAPE, random_weights(SHAPE))


def some_requests(rng: random.Random) -> list[Request]:
    """Prompts that extend one of a few others, some greedy, some sampled, some with several samples."""
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(8, 110))] for _ in range(8)]
    requests = []
    for i in range(NUM_PROMPTS):
        tail = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 24))]
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 10),
            temperature=rng.choice([0.0, 0.0, 1.2]),
            seed=i,
            n=rng.choice([1, 1, 1, 2, 3]),
        )
        salt = rng.choice([None, None, "tenant"])
        priority = rng.choice([0, 0, 0, -1, 1])
        prompt = pack(rng.choice(stems) + tail)
        requests.append(Request(f"r{i}", prompt, sampling, Namespace(salt=salt), priority=priority))
    return requests


def alone(executor: Executor, request: Request) -> list[list[int]]:
    """The samples of a request in an engine of its own, one after another, each with nothing cached."""
    outputs = []
    for index in range(request.sampling.n):
        sampling = replace(request.sampling, n=1, seed=(request.sampling.seed or 0) + index)
        engine = Engine(executor, KVCacheManager(NUM_BLOCKS, 16))
        engine.submit(replace(request, sampling=sampling))
        drawn: list[int] = []
        while engine.has_work:
            for delta in engine.step():
                drawn += delta.token_ids
        outputs.append(drawn)
    return outputs


@pytest.mark.parametrize("order", ["fcfs", "lpm", "dfs", "fair"])
def test_each_of_many_prompts_under_random_load_gives_what_it_gives_alone(executor: Executor, order: str) -> None:
    rng = random.Random(order)
    requests = some_requests(rng)
    expected = {request.request_id: alone(executor, request) for request in requests}

    manager = KVCacheManager(NUM_BLOCKS, 16)
    engine = Engine(
        executor,
        manager,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        min_held_tokens=16,
        queue_order=order,  # type: ignore[arg-type]
    )
    drawn: dict[tuple[str, int], list[int]] = defaultdict(list)
    ends: dict[tuple[str, int], str] = {}
    upcoming = list(requests)
    num_steps = 0
    while upcoming or engine.has_work:
        for _ in upcoming[: rng.choice([0, 0, 1, 2, 6])]:
            engine.submit(upcoming.pop(0))
        deltas = engine.step()
        if rng.random() < 0.1:
            deltas += engine.abort(f"r{rng.randrange(NUM_PROMPTS)}")
        for delta in deltas:
            drawn[delta.request_id, delta.index] += delta.token_ids
            if delta.finish_reason is not None:
                ends[delta.request_id, delta.index] = delta.finish_reason
        num_steps += 1
        if num_steps % 8 == 0:
            manager.check()

    assert len(ends) == sum(request.sampling.n for request in requests)
    for request in requests:
        for index, tokens in enumerate(expected[request.request_id]):
            sample = request.request_id, index
            is_whole = ends[sample] != "abort"
            assert drawn[sample] == (tokens if is_whole else tokens[: len(drawn[sample])]), sample
    stats = engine.stats()
    assert list(ends.values()).count("abort") > 0
    assert min(stats.num_preemptions, stats.cached_tokens) > 0
    assert manager.num_free_blocks == manager.num_blocks
    manager.check()
