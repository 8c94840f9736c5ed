"""The orders of the waiting queue, against the plain rule that each stands for, whatever happens to the queue."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anaphora import KVCacheManager, Namespace
from anaphora.engine.live_request import LiveRequest
from anaphora.engine.order import DepthFirstOrder, FairOrder, FirstComeOrder, LongestPrefixOrder, QueueOrder, new_order
from anaphora.engine.request import Request, SamplingParams
from anaphora.engine.sampling import Sampler
from anaphora.engine.stopping import OutputStream
from anaphora.tokens import pack

BLOCK = 2


@dataclass
class Queue:
    """An order over requests on a manager, without an engine: who is admitted is computed at once."""

    order: QueueOrder
    manager: KVCacheManager
    waiting: list[LiveRequest] = field(default_factory=list)
    num_arrived: int = 0

    def push(self, prompt: list[int], salt: str | None = None) -> LiveRequest:
        sampling = SamplingParams(max_tokens=1)
        request = Request(f"r{self.num_arrived}", pack(prompt), sampling, Namespace(salt=salt))
        sequence = self.manager.start(request.prompt, request.namespace)
        live = LiveRequest(request, sequence, self.num_arrived, 0, Sampler(sampling, 0), OutputStream(sampling))
        self.num_arrived += 1
        self.order.push(live)
        self.waiting.append(live)
        return live

    def peek(self) -> LiveRequest:
        live = self.order.peek()
        assert live in self.waiting
        return live

    def admit(self) -> LiveRequest:
        """Serve who is next, to its end."""
        live = self.peek()
        sequence = live.sequence
        assert self.manager.allocate(sequence, sequence.num_tokens - sequence.num_cached_tokens)
        self.order.admitted(live)
        self.waiting.remove(live)
        self.manager.commit(sequence, sequence.num_tokens - sequence.num_computed_tokens)
        self.order.committed(live)
        self.manager.finish(sequence)
        self.order.ended(live)
        return live

    def remove(self, live: LiveRequest) -> None:
        self.order.remove(live)
        self.waiting.remove(live)

    def num_cached(self, live: LiveRequest) -> int:
        return self.manager.lookup(live.sequence)


def queue(order: type[QueueOrder], num_blocks: int = 200, **options: int) -> Queue:
    manager = KVCacheManager(num_blocks, BLOCK)
    return Queue(order(manager, **options), manager)


# Few first tokens and short prompts, so that they share, split and end inside one another.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("push"), prompts, st.sampled_from([None, None, "x"])),
        st.tuples(st.just("push"), prompts, st.sampled_from([None, None, "x"])),
        st.tuples(st.just("admit")),
        st.tuples(st.just("remove"), st.integers(0, 9)),
        st.tuples(st.just("back"), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(0, 40)),
    ),
    max_size=60,
)


def play(queue: Queue, action: tuple[object, ...]) -> LiveRequest | None:
    match action:
        case ("push", list() as prompt, salt):
            queue.push(prompt, salt)  # type: ignore[arg-type]
        case ("remove", int() as index) if queue.waiting:
            queue.remove(queue.waiting[index % len(queue.waiting)])
        case ("back", int() as index) if queue.waiting:  # held back, and released
            live = queue.waiting[index % len(queue.waiting)]
            queue.order.remove(live)
            queue.order.push(live)
        case ("evict", int() as block):
            queue.manager.evict_blocks([block + 1])
        case ("admit",) if queue.waiting:
            return queue.admit()
    return None


@settings(max_examples=300, deadline=None)
@given(actions=actions)
def test_fcfs_is_the_order_of_arrival(actions: list[tuple[object, ...]]) -> None:
    fcfs = queue(FirstComeOrder)
    for action in actions:
        if action == ("admit",) and fcfs.waiting:
            assert fcfs.peek() is min(fcfs.waiting, key=lambda live: live.arrival)
        play(fcfs, action)


@settings(max_examples=600, deadline=None)
@given(actions=actions, num_blocks=st.integers(5, 40))
def test_lpm_is_the_longest_cached_prefix_and_of_equals_the_oldest(
    actions: list[tuple[object, ...]], num_blocks: int
) -> None:
    lpm = queue(LongestPrefixOrder, num_blocks)
    for action in actions:
        if action[0] == "evict":
            action = ("evict", int(action[1]) % num_blocks)  # type: ignore[call-overload]  # noqa: PLW2901
        if action == ("admit",) and lpm.waiting:
            chosen = lpm.peek()
            longest = max(map(lpm.num_cached, lpm.waiting))
            # What a prompt cannot be served of itself, its last block, is no reason to put it behind.
            assert lpm.num_cached(chosen) in {longest, longest - BLOCK}
            if lpm.num_cached(chosen) < longest:
                assert lpm.num_cached(chosen) == (chosen.sequence.num_tokens - 1) // BLOCK * BLOCK
            elif not any(len(live.request.prompt) // 4 % BLOCK == 0 for live in lpm.waiting):
                equals = [live for live in lpm.waiting if lpm.num_cached(live) == longest]
                assert chosen is min(equals, key=lambda live: live.arrival)
        play(lpm, action)


@settings(max_examples=300, deadline=None)
@given(batch=st.lists(prompts, min_size=1, max_size=30), spare=st.integers(0, 2))
def test_depth_first_makes_as_many_hits_as_any_order_can_if_the_cache_holds_the_longest(
    batch: list[list[int]], spare: int
) -> None:
    # Theorem 3.1 of the SGLang paper. The least that must be computed: every block of the tree of prompts once, and
    # of each prompt what is never served: the rest of it after its last whole block, of which one token at least is.
    longest = max(-(-len(prompt) // BLOCK) for prompt in batch)
    dfs = queue(DepthFirstOrder, num_blocks=longest + spare)
    for prompt in batch:
        dfs.push(prompt)
    while dfs.waiting:
        dfs.admit()
    stats = dfs.manager.stats()
    blocks = {tuple(prompt[:end]) for prompt in batch for end in range(BLOCK, len(prompt) + 1, BLOCK)}
    served_at_most = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in batch)
    first_time = {
        block for block in blocks if any(len(p) > len(block) and tuple(p[: len(block)]) == block for p in batch)
    }
    whole = {block for block in blocks if block not in first_time}
    assert whole <= {tuple(prompt) for prompt in batch}
    # A block that some prompt could be served is computed once by the first that has it, unless that was a prompt
    # which ends with it, which computes it whether it is cached or not.
    free = {block for block in first_time if list(block) in batch}
    assert stats.hits == served_at_most - BLOCK * (len(first_time) - len(free))


def test_dfs_takes_the_heaviest_branch_first_and_stays_in_it() -> None:
    dfs = queue(DepthFirstOrder)
    light = [dfs.push([1, 1, 5]), dfs.push([1, 1, 6])]
    heavy = [dfs.push([2, 2, 1, i]) for i in range(3)] + [dfs.push([2, 2, 2, 2])]
    first = [dfs.admit() for _ in range(2)]
    assert first == heavy[:2]
    dfs.push([1, 1, 7])
    dfs.push([1, 1, 8])  # the light branch is the heavier one by now
    late = dfs.push([2, 2, 1, 9])
    assert [dfs.admit() for _ in range(3)] == [heavy[2], late, heavy[3]]
    assert [dfs.admit() for _ in range(2)] == light


def test_lpm_starves_a_prefix_that_nobody_shares_and_fair_does_not() -> None:
    waits = {}
    for name, options in ((LongestPrefixOrder, {}), (FairOrder, {"max_overtakes": 10})):
        hot = queue(name, **options)  # type: ignore[arg-type]
        hot.push([1, 1, 1, 1, 0])
        hot.admit()
        cold = hot.push([9, 9, 9, 9, 9])
        hot.push([1, 1, 1, 1, 1])
        waits[name] = 0
        while cold in hot.waiting and waits[name] < 500:
            hot.push([1, 1, 1, 1, waits[name] % 7])
            hot.admit()
            waits[name] += 1
    assert waits == {LongestPrefixOrder: 500, FairOrder: 10}


@settings(max_examples=400, deadline=None)
@example([("push", [0, 0], None), ("push", [0], None), ("push", [0, 0], None), ("admit",), ("back", 0)], 1, 0, 1)
@example([("push", [0, 0], None), ("admit",), ("push", [0], None), ("back", 0), ("push", [0, 0, 0], None)], 1, 0, 1)
@given(actions=actions, max_overtakes=st.integers(1, 4), share=st.sampled_from([0, 0.5, 1]), quantum=st.integers(1, 20))
def test_under_fair_at_most_so_many_later_arrivals_go_before_any_request(
    actions: list[tuple[object, ...]], max_overtakes: int, share: float, quantum: int
) -> None:
    fair = queue(FairOrder, max_overtakes=max_overtakes, share=share, quantum=quantum)
    overtakes: dict[LiveRequest, int] = {}
    namespaces: set[Namespace] = set()
    most_waiting = 0
    for action in [*actions, *[("admit",)] * 60]:
        if action[0] == "back" and fair.waiting:  # only who is next is ever held back
            action = ("back", fair.waiting.index(fair.peek()))  # noqa: PLW2901
        admitted = play(fair, action)
        namespaces |= {live.request.namespace for live in fair.waiting}
        most_waiting = max(most_waiting, len(fair.waiting))
        if admitted is not None:
            bound = max(max_overtakes, int(share * most_waiting)) + (len(namespaces) > 1) * max_overtakes
            for live in fair.waiting:
                overtakes[live] = overtakes.get(live, 0) + (admitted.arrival > live.arrival)
                assert overtakes[live] < bound
    assert not fair.waiting


def test_fair_takes_the_longest_prefix_of_a_round_and_then_the_next_round() -> None:
    fair = queue(FairOrder, max_overtakes=4, share=0)
    warm, cold = [1, 1, 1], [2, 2, 2]
    fair.push(warm)
    fair.admit()
    arrived = [fair.push([*prompt, i]) for i, prompt in enumerate((cold, warm, cold, warm, cold, warm))]
    assert [arrived.index(fair.admit()) for _ in range(6)] == [1, 3, 0, 2, 4, 5]


def test_namespaces_that_wait_are_served_alike_however_many_requests_each_sends() -> None:
    fair = queue(FairOrder, max_overtakes=1000, quantum=20)
    for i in range(100):
        fair.push([i, *range(9)], "greedy")
    for i in range(10):
        fair.push([i, *range(9)], "modest")
    served = [fair.admit().request.namespace.salt for _ in range(20)]
    assert served.count("modest") == 10
    assert [fair.admit().request.namespace.salt for _ in range(20)] == ["greedy"] * 20


def test_a_namespace_with_nothing_waiting_does_not_queue_behind_the_rounds_of_another() -> None:
    fair = queue(FairOrder, max_overtakes=8, share=0)
    for i in range(100):
        fair.push([i, *range(9)], "greedy")
    waits = []
    for i in range(12):
        modest = fair.push([i, *range(9)], "modest")
        waits.append(next(n for n in range(1000) if fair.admit() is modest))
    assert max(waits[:8]) <= 8
    assert max(waits) > 30  # those who wait have been passed by often enough


def test_accounts_of_namespaces_that_have_gone_are_forgotten() -> None:
    fair = queue(FairOrder)
    for i in range(10_000):
        fair.push([1, 2, 3], f"user {i}")
        fair.admit()
    assert len(fair.order._credits) <= 4096  # type: ignore[attr-defined]


def test_hits_are_free_so_a_namespace_that_reuses_its_prefix_gets_further_with_its_credit() -> None:
    fair = queue(FairOrder, quantum=22)
    for i in range(20):
        fair.push([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, i], "reuses")
        fair.push([i, 2, 3, 4, 5, 6, 7, 8, 9, 9, i], "does not")
    served = [fair.admit().request.namespace.salt for _ in range(22)]
    assert served.count("reuses") > 2 * served.count("does not")


@pytest.mark.parametrize("kind", ["fcfs", "lpm", "dfs", "fair"])
def test_a_pass_over_ten_thousand_waiting_requests_looks_up_a_few_of_them(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = KVCacheManager(300, BLOCK)
    crowd = Queue(new_order(kind, manager), manager)  # type: ignore[arg-type]
    for i in range(10_000):
        crowd.push([i % 100, 1, 2, 3, i % 100, i])
    num_lookups = 0
    lookup = manager.lookup

    def counting(sequence: object) -> int:
        nonlocal num_lookups
        num_lookups += 1
        return lookup(sequence)  # type: ignore[arg-type]

    monkeypatch.setattr(manager, "lookup", counting)
    most = 0
    for _ in range(300):
        before = num_lookups
        assert crowd.order.peek() is not None
        most = max(most, num_lookups - before)
        crowd.admit()
    assert most <= 3


@pytest.mark.parametrize("kind", ["fcfs", "lpm", "dfs", "fair"])
def test_every_order_is_known_by_its_name_and_forgets_what_has_gone(kind: str) -> None:
    manager = KVCacheManager(50, BLOCK)
    orders = Queue(new_order(kind, manager), manager)  # type: ignore[arg-type]
    for i in range(300):
        orders.push([i % 5, i % 3, i % 7, i], salt=f"s{i % 2}")
        orders.remove(orders.waiting[0]) if i % 3 else orders.admit()
    while orders.waiting:
        orders.admit()
    assert orders.order.peek() is None


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"queue_order: 'lifo' is not known; allowed are \['dfs', 'fair', 'fcfs', 'lpm'\]"
    ):
        new_order("lifo", KVCacheManager(4))  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["max_overtakes", "quantum"])
def test_bounds_of_fair_that_make_no_sense_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: -1 is not allowed"):
        FairOrder(KVCacheManager(4), **{option: -1})
