"""Keeping a group together against waiting: who joins a running group may go first, and how often others are passed
over for that."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.engine.cost_model import WorkModel
from anaphora.engine.executor import Batch
from tests.engine.test_virtual import SHAPE, span
from tests.engine.toy_engine import ToyEngine, request, toy_engine
from tests.engine.toy_executor import VOCAB_SIZE, toy_output

BLOCK, NUM_SHARED = 16, 256
# Long enough to be attended to once; no two have a block in common.
PREFIXES = [[(7 * i + 11 * group + i // 5) % VOCAB_SIZE for i in range(NUM_SHARED)] for group in range(3)]


def engine(**options: object) -> ToyEngine:
    return toy_engine(**{"num_blocks": 400, "block_size": BLOCK, "max_num_batched_tokens": 4096, **options})  # type: ignore[arg-type]


def admissions(toy: ToyEngine) -> list[str]:
    """Run to the end; return who was admitted, in order."""
    seen: dict[str, None] = {}
    for _ in range(2000):
        if not toy.engine.has_work:
            return list(seen)
        toy.step()
        seen |= {live.request_id: None for live, _, _ in toy.engine.last_batch}
    raise AssertionError("no end")


def test_who_joins_a_running_group_goes_before_who_does_not() -> None:
    for max_overtakes, order in ((0, ["a", "running", "other", "joins"]), (1, ["a", "running", "joins", "other"])):
        toy = engine(max_num_seqs=2, max_group_overtakes=max_overtakes)
        toy.submit(request("a", [1], max_tokens=3), request("running", [*PREFIXES[0], 1], max_tokens=20))
        toy.step()
        toy.submit(request("other", [*PREFIXES[1], 1], max_tokens=9), request("joins", [*PREFIXES[0], 2], max_tokens=9))
        assert admissions(toy) == order


def test_a_prefix_that_is_too_short_to_share_attention_changes_nothing() -> None:
    toy = engine(max_num_seqs=2, max_group_overtakes=9)
    short = PREFIXES[0][: NUM_SHARED - BLOCK]
    toy.submit(request("a", [1], max_tokens=3), request("running", [*short, 1], max_tokens=20))
    toy.step()
    toy.submit(request("other", [*PREFIXES[1], 1], max_tokens=9), request("same", [*short, 2], max_tokens=9))
    assert admissions(toy) == ["a", "running", "other", "same"]


def test_the_group_in_which_more_is_saved_goes_first() -> None:
    toy = engine(max_num_seqs=3, max_group_overtakes=9)
    toy.submit(
        request("a", [1], max_tokens=3),
        request("ends soon", [*PREFIXES[0], 1], max_tokens=5),
        request("runs long", [*PREFIXES[1], 1], max_tokens=30),
    )
    toy.step()
    toy.submit(request("soon", [*PREFIXES[0], 2], max_tokens=30), request("long", [*PREFIXES[1], 2], max_tokens=30))
    assert admissions(toy)[3:] == ["long", "soon"]


def test_priorities_and_namespaces_are_never_mixed() -> None:
    toy = engine(max_num_seqs=2, max_group_overtakes=9)
    toy.submit(request("a", [1], max_tokens=3), request("running", [*PREFIXES[0], 1], max_tokens=20))
    toy.step()
    toy.submit(
        request("other", [*PREFIXES[1], 1]),
        request("less urgent", [*PREFIXES[0], 2], priority=1),
        request("another tenant", [*PREFIXES[0], 3], salt="x"),
        request("uses no cache", [*PREFIXES[0], 4], read_cache=False),
    )
    assert admissions(toy)[2:] == ["other", "another tenant", "uses no cache", "less urgent"]


@settings(max_examples=200, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(0, 3)), max_size=14),
    max_overtakes=st.integers(0, 3),
    num_seqs=st.integers(1, 3),
    num_blocks=st.integers(18, 60),
)
def test_nobody_is_passed_over_more_often_than_stated(
    arrivals: list[tuple[int, int, int]], max_overtakes: int, num_seqs: int, num_blocks: int
) -> None:
    toy = engine(max_num_seqs=num_seqs, max_group_overtakes=max_overtakes, num_blocks=num_blocks, min_held_tokens=10**6)
    waiting: list[str] = []
    most_waiting = 0
    overtaken: dict[str, int] = {}

    def step() -> None:
        toy.step()
        for live, _, _ in toy.engine.last_batch:
            if live.request_id in waiting:
                for earlier in waiting[: waiting.index(live.request_id)]:
                    overtaken[earlier] = overtaken.get(earlier, 0) + 1
                waiting.remove(live.request_id)

    for i, (group, max_tokens, num_steps) in enumerate(arrivals):
        made = request(str(i), [*PREFIXES[group], i], max_tokens=max_tokens)
        toy.submit(made)
        waiting.append(made.request_id)
        most_waiting = max(most_waiting, len(waiting))
        for _ in range(num_steps):
            step()
    while toy.engine.has_work:
        step()
    assert not waiting
    bound = max(max_overtakes, most_waiting // 2) if max_overtakes else 0
    assert max(overtaken.values(), default=0) <= bound
    for i, (group, max_tokens, _) in enumerate(arrivals):
        alone = toy_output([*PREFIXES[group], i], request("alone", [1], max_tokens=max_tokens).sampling)
        assert toy.outcomes[str(i)].token_ids == alone


def test_who_finds_no_room_does_not_block_others_for_longer_than_stated() -> None:
    toy = engine(max_num_seqs=8, max_group_overtakes=2, num_blocks=64)
    toy.submit(request("running", [*PREFIXES[0], 1], max_tokens=40))  # 17 blocks, and more as it goes on
    toy.step()
    big = [*PREFIXES[0], *PREFIXES[1], *PREFIXES[2], 5]  # 33 blocks more; fewer are left
    toy.submit(request("fills", [*PREFIXES[1], 9], max_tokens=20), request("ends", range(20), max_tokens=4))
    toy.step()
    toy.submit(request("small", [3], max_tokens=2), request("big", big, max_tokens=2))
    order = admissions(toy)
    assert order.index("small") < order.index("big")
    assert set(order) == {"running", "fills", "ends", "small", "big"}


@pytest.mark.parametrize("value", [-1, 1.5, "3"])
def test_a_bound_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"max_group_overtakes: .* is not allowed; it must be 0 or more"):
        engine(max_group_overtakes=value)


def test_what_a_group_shares_is_read_once_in_the_cost_model() -> None:
    spans = [span(100, 1), span(100, 1), span(100, 1), span(50, 1)]
    apart = WorkModel(SHAPE, 16).of(Batch(spans)).kv_bytes
    per_token = WorkModel(SHAPE).kv_bytes_per_token
    outer, inner = ((0, 1, 2, 3), 2), ((0, 1), 5)
    assert WorkModel(SHAPE, 16).of(Batch(spans, [outer])).kv_bytes == apart - 3 * 32 * per_token
    assert WorkModel(SHAPE, 16).of(Batch(spans, [outer, inner])).kv_bytes == apart - (3 * 32 + 3 * 16) * per_token
