"""Beam search: what a plain search without a cache finds, while beams share what they have in common."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora import KVCacheManager, Namespace
from anaphora.engine.beam_search import Beam, BeamSearch
from anaphora.engine.request import RequestError
from anaphora.tokens import pack
from tests.engine.toy_executor import ToyExecutor, toy_logits

PROMPT = list(range(1, 11))


def search(
    manager: KVCacheManager, executor: ToyExecutor, prompt: list[int] = PROMPT, **options: object
) -> tuple[int, list[Beam]]:
    executor.allocate_kv(manager.num_blocks, manager.block_size)
    return BeamSearch(executor, manager, **options).run(pack(prompt), Namespace())  # type: ignore[arg-type]


def plainly(prompt: list[int], width: int, max_tokens: int, penalty: float, ends: set[int]) -> list[tuple[int, ...]]:
    """The textbook search, over whole prompts each time."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(max_tokens):
        candidates = []
        for parent, (total, tokens) in enumerate(live):
            row = toy_logits([*prompt, *tokens]).astype(np.float64)
            row -= row.max()
            row -= np.log(np.exp(row).sum())
            best = np.argsort(-row, kind="stable")[: 2 * width].tolist()
            candidates += [(-(total + float(row[token])), parent, token) for token in best]
        candidates.sort()
        going = []
        for negative, parent, token in candidates[: 2 * width]:
            tokens = (*live[parent][1], token)
            if token in ends:
                ended.append((-negative, tokens))
            elif len(going) < width:
                going.append((-negative, tokens))
        live = going
        if not live:
            break
    found = ended + live
    found.sort(key=lambda beam: -beam[0] / len(beam[1]) ** penalty)
    return [tokens for _, tokens in found[:width]]


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 47), min_size=1, max_size=12),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 6),
    penalty=st.sampled_from([0.0, 0.6, 1.0]),
    ends=st.sets(st.integers(0, 47), max_size=12),
    block_size=st.sampled_from([1, 4, 16]),
    index=st.sampled_from(["radix", "hash"]),
    budget=st.sampled_from([3, 100]),
)
def test_it_finds_what_a_plain_search_finds_and_gives_every_block_back(
    *,
    prompt: list[int],
    width: int,
    max_tokens: int,
    penalty: float,
    ends: set[int],
    block_size: int,
    index: str,
    budget: int,
) -> None:
    manager = KVCacheManager(200, block_size, index=index)  # type: ignore[arg-type]
    _, beams = search(
        manager,
        ToyExecutor(),
        prompt,
        width=width,
        max_tokens=max_tokens,
        length_penalty=penalty,
        end_token_ids=ends,
        max_num_batched_tokens=budget,
    )
    assert [beam.token_ids for beam in beams] == plainly(prompt, width, max_tokens, penalty, ends)
    assert [beam.has_ended for beam in beams] == [beam.token_ids[-1] in ends for beam in beams]
    assert manager.num_free_blocks == manager.num_blocks
    manager.check()


def test_the_prompt_is_computed_once_and_then_a_token_a_beam() -> None:
    executor = ToyExecutor()
    search(KVCacheManager(64, 4), executor, width=4, max_tokens=5)
    assert executor.num_computed_tokens == len(PROMPT) + 4 * (5 - 1)


def test_a_cached_prompt_is_found() -> None:
    manager, executor = KVCacheManager(64, 4), ToyExecutor()
    assert [search(manager, executor, width=2, max_tokens=3)[0] for _ in range(1)] == [0]
    num_cached, _ = BeamSearch(executor, manager, width=2, max_tokens=3).run(pack(PROMPT), Namespace())
    assert num_cached == 8


def test_a_pool_that_cannot_hold_the_beams_is_said_and_left_as_it_was() -> None:
    manager = KVCacheManager(5, 4)
    with pytest.raises(RequestError, match="width: 4 beams need more KV blocks than can be had; the pool has 5"):
        search(manager, ToyExecutor(), width=4, max_tokens=8)
    assert manager.num_free_blocks == 5
    manager.check()


@pytest.mark.parametrize("option", ["width", "max_tokens", "length_penalty"])
def test_options_that_make_no_sense_are_refused(option: str) -> None:
    with pytest.raises(RequestError, match=f"{option}: -1 is not allowed"):
        search(KVCacheManager(8, 4), ToyExecutor(), **{"width": 2, "max_tokens": 2, option: -1})
