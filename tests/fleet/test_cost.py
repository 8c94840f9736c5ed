"""CostPolicy: who gets a request, in small worlds whose right answer is known."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.fleet.cost import CostPolicy, rendezvous_weight
from anaphora.fleet.index import FleetIndex, prefix_namespace
from anaphora.fleet.knowledge import FleetKnowledge
from anaphora.fleet.load import Load
from anaphora.fleet.view import Decision, ReplicaView, RequestView

SPACE = prefix_namespace("")


class World:
    """Replicas that have not answered anything yet: every request that was sent is still on its way."""

    def __init__(self, num: int, *, max_running: int = 64, seed: int = 0) -> None:
        self.loads = {f"r{i}": Load() for i in range(num)}
        self.knowledge = FleetKnowledge(FleetIndex(16), lambda: 0.0)
        for name in self.loads:
            self.knowledge.add(name, num_blocks=10_000)
        self.max_running = max_running
        self.rng = random.Random(seed)

    def view(self, tokens: bytes) -> list[ReplicaView]:
        match = self.knowledge.match(tokens, SPACE, self.loads)
        return [
            ReplicaView(
                name,
                matched_tokens=match.tokens(name),
                inflight_requests=len(load.inflight),
                inflight_tokens=load.inflight_tokens(0.0),
                max_running=self.max_running,
            )
            for name, load in self.loads.items()
        ]

    def send(self, tokens: bytes, head: bytes = b"") -> str:
        num_tokens = len(tokens) // 4
        decision = CostPolicy().decide(RequestView(num_tokens, head=head), self.view(tokens), self.rng)
        name = decision.replica
        assert name is not None
        self.loads[name].depart(max(num_tokens - decision.matched_tokens(name), 1), 0.0)
        self.knowledge.send(name, tokens, SPACE)
        return name


def prompt(prefix: int, num_shared: int, tail: int, num_own: int) -> bytes:
    return array("i", [prefix] * num_shared + [1000 + tail] * num_own).tobytes()


def test_cold_unrelated_requests_are_spread_evenly() -> None:
    world = World(4)
    homes = Counter(world.send(prompt(i, 320, 0, 0), head=bytes([i])) for i in range(8))
    assert set(homes.values()) == {2}


def test_a_burst_of_one_new_prefix_stays_together_up_to_the_guard() -> None:
    world = World(4, max_running=8)
    homes = [world.send(prompt(1, 64 * 16, i, 4)) for i in range(20)]
    assert len(set(homes[:8])) == 1
    assert len(set(homes)) <= 3


def test_a_hot_prefix_is_copied_when_its_replica_is_full() -> None:
    world = World(4, max_running=10)
    homes = Counter(world.send(prompt(1, 500, i, 20)) for i in range(40))
    assert len(homes) == 4
    assert max(homes.values()) <= 12


def test_ten_requests_follow_the_first() -> None:
    world = World(2)
    assert len({world.send(prompt(1, 320, 0, 0)) for _ in range(10)}) == 1


def test_equals_are_drawn_from() -> None:
    replicas = [ReplicaView(f"r{i}", matched_tokens=160) for i in range(4)]
    rng = random.Random(1)
    chosen = Counter(CostPolicy().decide(RequestView(200), replicas, rng).replica for _ in range(400))
    assert len(chosen) == 4
    assert min(chosen.values()) > 50


def test_two_routers_that_know_nothing_agree() -> None:
    replicas = [ReplicaView(f"r{i}") for i in range(5)]
    for head in map(bytes, [[i] for i in range(20)]):
        choices = {
            CostPolicy().decide(RequestView(100, head=head), order, random.Random(seed)).replica
            for seed, order in enumerate([replicas, replicas[::-1]])
        }
        assert len(choices) == 1


def test_when_a_replica_leaves_only_its_prompts_move() -> None:
    names = [f"r{i}" for i in range(5)]
    heads = [i.to_bytes(2, "big") for i in range(200)]
    before = {head: max(names, key=lambda name: rendezvous_weight(head, name)) for head in heads}
    after = {head: max(names[:-1], key=lambda name: rendezvous_weight(head, name)) for head in heads}
    assert all(after[head] == home for head, home in before.items() if home != "r4")


def test_waiting_and_computing_are_traded_in_seconds() -> None:
    def choice(queued_tokens: int) -> str | None:
        holder = ReplicaView("holder", matched_tokens=800, inflight_tokens=queued_tokens)
        return CostPolicy().decide(RequestView(1000), [holder, ReplicaView("idle")], random.Random()).replica

    assert choice(4700) == "holder"  # 4700 queued + 6 x 200 < 6 x 1000
    assert choice(4900) == "idle"


def test_no_replica_is_no_decision() -> None:
    decision = CostPolicy().decide(RequestView(10), [], random.Random())
    assert decision.replica is None
    assert decision.reason == "no replica is ready"


@given(st.data(), st.integers(1, 200))
def test_a_decision_is_the_cheapest_it_looked_at_and_never_loses_the_longest_match(
    data: st.DataObject, num: int
) -> None:
    counts = st.integers(0, 2000)
    replicas = [
        ReplicaView(
            f"r{i}",
            matched_tokens=data.draw(st.sampled_from([0, 160, 1600])),
            inflight_tokens=data.draw(counts),
            inflight_requests=data.draw(st.integers(0, 100)),
        )
        for i in range(num)
    ]
    decision: Decision = CostPolicy().decide(RequestView(2000), replicas, random.Random(0))
    totals = {score.replica: score.total for score in decision.scores}
    assert decision.replica is not None
    assert totals[decision.replica] <= min(totals.values()) + CostPolicy().tolerance_s
    assert max(score.matched_tokens for score in decision.scores) == max(r.matched_tokens for r in replicas)
    for score in decision.scores:
        assert score.total == pytest.approx(sum(score.parts.values()))
