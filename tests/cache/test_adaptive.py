"""eviction="adaptive": what kind of use each node is of, what is remembered of evicted ones, and what goes first."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from anaphora import KVCacheManager, Namespace
from anaphora.cache import adaptive
from anaphora.cache.adaptive import LEFT_BEHIND, AdaptiveOrder, Past
from anaphora.cache.reuse import BIN_WIDTH_S, NUM_BINS, Reuse, age_bin, gittins
from tests.cache.conftest import run

if TYPE_CHECKING:
    from anaphora.cache.reuse import Kind


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Cache:
    """A manager of one-token blocks with a clock of its own. Prompts are strings, all but the last letter committed."""

    def __init__(self, num_blocks: int, eviction: str = "adaptive") -> None:
        self.clock = Clock()
        self.manager = KVCacheManager(num_blocks, 1, eviction=eviction, clock=self.clock)

    def serve(self, prompt: str, wait_s: float = 0.0, namespace: Namespace | None = None) -> int:
        self.clock.now_s += wait_s
        sequence = self.manager.start([ord(letter) for letter in prompt], namespace or Namespace())
        assert self.manager.allocate(sequence, len(prompt) - sequence.num_cached_tokens)
        self.manager.commit(sequence, len(prompt) - 1 - sequence.num_computed_tokens)
        self.manager.finish(sequence)
        self.manager.check()
        return sequence.num_cached_tokens

    @property
    def order(self) -> AdaptiveOrder:
        order = self.manager._index._tree.order
        assert isinstance(order, AdaptiveOrder)
        return order

    def pasts(self) -> dict[str, Past]:
        """The past of each node by its letters."""
        tree = self.manager._index._tree
        return {tree.tokens_of(node)[::4].decode(): node.note for node in tree.nodes()}

    def kinds(self) -> dict[str, Kind]:
        return {letters: past.kind for letters, past in self.pasts().items()}


class TestKinds:
    def test_a_conversations_own_prefix_is_of_its_turn_and_of_how_much_the_turn_added(self):
        cache = Cache(50)
        cache.serve("abcd.")
        assert cache.kinds() == {"abcd": ("turn", 1, 3)}
        cache.serve("abcdef.")
        assert set(cache.kinds().values()) == {("turn", 2, 2)}
        cache.serve("abcdefg.")
        assert set(cache.kinds().values()) == {("turn", 2, 1)}, "turns 2 and 3 are one kind"
        cache.serve("abcdefgh.")
        assert set(cache.kinds().values()) == {("turn", 3, 1)}

    def test_a_prefix_of_several_conversations_is_shared_and_of_how_long_it_stands_idle(self):
        cache = Cache(50)
        cache.serve("sysabc.")
        cache.serve("sysdefg.", wait_s=40.0)
        assert cache.kinds() == {"sys": ("shared", age_bin(10.0)), "abc": ("turn", 1, 3), "defg": ("turn", 1, 3)}

    def test_only_the_first_request_that_goes_on_from_another_is_its_next_turn(self):
        cache = Cache(50)
        for prompt in ("abcd.", "abcdef.", "abcdxyz."):
            cache.serve(prompt)
        assert cache.kinds()["xyz"] == ("turn", 1, 2)
        assert cache.kinds()["abcd"] == ("shared", 0)

    def test_what_the_next_turn_does_not_go_on_from_is_left_behind(self):
        cache = Cache(50)
        cache.serve("abcd.")
        cache.serve("abcxyz.")  # the last block of a prompt may be rewritten
        assert cache.kinds() == {"abc": ("turn", 2, 2), "d": LEFT_BEHIND, "xyz": ("turn", 2, 2)}

    def test_namespaces_are_other_conversations(self):
        cache = Cache(50)
        cache.serve("abcd.")
        cache.serve("abcdef.", namespace=Namespace(salt="x"))
        assert cache.kinds() == {"abcd": ("turn", 1, 3), "abcdef": ("turn", 1, 3)}

    def test_other_policies_remember_nothing_of_the_kind(self):
        cache = Cache(50, "lru")
        cache.serve("abcd.")
        assert cache.pasts() == {"abcd": None}


class TestGhosts:
    @pytest.mark.parametrize("num_other", [6, 9], ids=["trimmed", "evicted"])
    def test_a_conversation_that_was_evicted_is_known_when_it_comes_back(self, num_other):
        cache = Cache(10)
        cache.serve("abcdef.")
        cache.serve("ABCDEFGHI"[:num_other] + ".", wait_s=1)
        assert cache.manager.match([ord(letter) for letter in "abcdef."]) == (3 if num_other == 6 else 0)
        cache.serve("abcdefgh.", wait_s=1)
        assert cache.pasts()["gh"].kind == ("turn", 2, 2)
        assert cache.order.reuse.of(("turn", 1, 3)).num_reuses[age_bin(2.0)] > 0

    def test_a_ghost_is_recognised_as_far_as_its_fingerprints_tell(self):
        cache = Cache(10)
        cache.serve("sysuabcd.")
        cache.serve("ABCDEFGHI.", wait_s=1)
        assert cache.manager.match([ord("s"), 0]) == 0
        cache.serve("sysuxyz.", wait_s=1)
        assert cache.kinds()["sysu"][0] == "shared"
        assert cache.kinds()["xyz"] == ("turn", 1, 2)

    def test_ghosts_are_bounded_and_hold_no_tokens(self, monkeypatch):
        monkeypatch.setattr(adaptive, "NUM_GHOSTS", 8)
        cache = Cache(10)
        rng = random.Random(1)
        for _ in range(300):
            cache.serve("".join(rng.choices("ab", k=rng.randint(1, 9))) + ".", wait_s=1)
        order = cache.order
        assert len(order.ghosts) == 8
        reachable, stack = [], [order._top, *cache.pasts().values()]
        while stack:
            below = list((stack.pop().ghosts or {}).values())
            reachable += below
            stack += below
        assert reachable
        assert order.ghosts.keys() >= set(reachable)
        assert all(type(part) is int for ghost in order.ghosts for mark in ghost.marks for part in mark)


class TestWorth:
    def test_the_index_is_the_best_ratio_of_reuse_to_time_held_over_all_waiting_times(self):
        rng = random.Random(1)
        for _ in range(50):
            shares = [rng.choice((0.0, 0.02, 0.1)) * rng.random() for _ in range(NUM_BINS)]
            waiting = [1.0]
            for share in shares:
                waiting.append(max(waiting[-1] - share, 0.001))
            held = [(a + b) / 2 * w for a, b, w in zip(waiting, waiting[1:], BIN_WIDTH_S, strict=False)]
            expected = [
                max(sum(shares[b : end + 1]) / sum(held[b : end + 1]) for end in range(b, NUM_BINS))
                for b in range(NUM_BINS)
            ]
            assert gittins(shares) == pytest.approx(expected)

    def test_a_kind_that_was_never_seen_is_worth_what_the_kind_above_it_is(self):
        reuse = Reuse()
        for _ in range(20):
            reuse.count_use(("turn", 2, 1), 0.0)
            reuse.count_reuse(("turn", 2, 1), 3.0)
            reuse.reckon(0.0)
        assert reuse.of(("turn", 2)).worth[0] > 0
        assert reuse.of(("turn", 2, 9)).worth == reuse.of(("turn", 2)).worth

    def test_late_uses_count_only_against_the_ages_that_they_have_reached(self):
        reuse = Reuse()
        reuse.count_use((), 0.0)
        reuse.reckon(0.0)
        assert reuse.of(()).num_uses[1] == 0
        for _ in range(10):
            reuse.count_use((), 3.0)
            reuse.reckon(3.0)
        assert [round(num) for num in reuse.of(()).num_uses[:4]] == [8, 1, 1, 0], "reckoned after 1, 2, 4, 8 uses"

    def test_until_something_is_learned_it_is_lru(self):
        caches = [Cache(10), Cache(10, "lru")]
        for cache in caches:
            for prompt in ("abc.", "def.", "ghi."):
                cache.serve(prompt, wait_s=3)
            cache.serve("xyz.", wait_s=3)
        adaptive_nodes, lru_nodes = (sorted(cache.pasts()) for cache in caches)
        assert adaptive_nodes == lru_nodes == ["def", "ghi", "xyz"]

    def test_an_age_that_rounds_to_less_than_its_bins_end_does_not_stop_the_clock(self):
        cache = Cache(6)
        cache.clock.now_s = FIRST_S
        cache.serve("abc.")
        cache.clock.now_s = FIRST_S + 256.0
        assert cache.clock.now_s - FIRST_S < 256.0
        assert cache.serve("defgh.") == 0


FIRST_S = 255.069


def conversations_and_scans(seed: int) -> list[tuple[float, list[int]]]:
    """Conversations whose turns are 20 to 60 s apart, and twice as many prompts that never come back."""
    rng = random.Random(seed)
    prompts: list[tuple[float, list[int]]] = []
    next_id = 1

    def fresh(num_tokens: int) -> list[int]:
        nonlocal next_id
        next_id += num_tokens
        return list(range(next_id - num_tokens, next_id))

    for _ in range(150):
        time_s, history = rng.uniform(0, 1000), fresh(8)
        for _ in range(rng.randint(2, 6)):
            prompts.append((time_s, [*history, *fresh(1)]))
            history = [*history, *fresh(3)]
            time_s += rng.uniform(20, 60)
    prompts += [(rng.uniform(0, 1000), fresh(25)) for _ in range(300)]
    return sorted(prompts)


def num_hits(prompts: list[tuple[float, list[int]]], eviction: str) -> int:
    clock = Clock()
    manager = KVCacheManager(300, 1, eviction=eviction, clock=clock)
    hits = 0
    for clock.now_s, prompt in prompts:
        sequence = manager.start(prompt)
        assert manager.allocate(sequence, len(prompt) - sequence.num_cached_tokens)
        manager.commit(sequence, len(prompt) - 1 - sequence.num_computed_tokens)
        manager.finish(sequence)
        hits += sequence.num_cached_tokens
    return hits


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_conversations_among_scans_hit_four_times_as_often_as_under_lru(seed):
    prompts = conversations_and_scans(seed)
    assert num_hits(prompts, "adaptive") >= 4 * num_hits(prompts, "lru")


def test_preempted_aborted_and_retained_sequences_leave_the_books_in_order():
    clock = Clock()
    manager = KVCacheManager(12, 1, eviction="adaptive", clock=clock)
    run(manager, range(1, 6))
    kept = manager.retain(range(1, 6))
    sequence = manager.start(range(1, 9))
    assert manager.allocate(sequence, 3)
    manager.preempt(sequence)
    manager.check()
    assert manager.allocate(sequence, 3)
    manager.commit(sequence, 2)
    manager.abort(sequence)
    kept.release()
    manager.check()
    assert run(manager, range(1, 9)) == 7
