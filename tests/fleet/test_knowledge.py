"""FleetKnowledge: what is believed of a replica, and when it ends."""

from __future__ import annotations

from array import array

from anaphora.cache.events import AllBlocksCleared, BlockStored
from anaphora.fleet.index import FleetIndex, prefix_namespace
from anaphora.fleet.knowledge import FleetKnowledge, _RecallingDigests
from anaphora.identity import DEFAULT_NAMESPACE, BlockDigests

SPACE = prefix_namespace("")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def knowledge_of(*replicas: str, num_blocks: int = 100, clock: Clock | None = None) -> FleetKnowledge:
    knowledge = FleetKnowledge(FleetIndex(4), clock or Clock(), speculative_ttl_s=10)
    for replica in replicas:
        knowledge.add(replica, num_blocks=num_blocks)
    return knowledge


def ids(*blocks: int) -> bytes:
    return array("i", [block for block in blocks for _ in range(4)]).tobytes()


def has(knowledge: FleetKnowledge, replica: str, *blocks: int) -> int:
    return knowledge.match(ids(*blocks), SPACE, [replica]).blocks[replica]


def serve(knowledge: FleetKnowledge, replica: str, *blocks: int) -> None:
    visit = knowledge.send(replica, ids(*blocks), SPACE)
    knowledge.confirm(visit)
    knowledge.close(visit)


def test_a_request_on_its_way_counts_at_once() -> None:
    knowledge = knowledge_of("a")
    visit = knowledge.send("a", ids(1, 2), SPACE)
    assert has(knowledge, "a", 1, 2, 3) == 2
    assert knowledge.match(ids(1, 2), SPACE, ["a"]).device_blocks == {"a": 0}
    knowledge.confirm(visit)
    assert knowledge.match(ids(1, 2), SPACE, ["a"]).device_blocks == {"a": 2}


def test_a_request_that_fails_leaves_nothing_and_takes_nothing_from_others() -> None:
    knowledge = knowledge_of("a")
    first, second = (knowledge.send("a", ids(1, 2), SPACE) for _ in range(2))
    knowledge.close(first)
    assert has(knowledge, "a", 1, 2) == 2
    knowledge.close(second)
    assert has(knowledge, "a", 1, 2) == 0
    knowledge.close(second)


def test_what_was_expected_for_too_long_is_expected_no_more() -> None:
    clock = Clock()
    knowledge = knowledge_of("a", clock=clock)
    knowledge.send("a", ids(1), SPACE)
    clock.now = 11
    knowledge.expire()
    assert has(knowledge, "a", 1) == 0


def test_the_mirror_evicts_as_an_engine_does_tails_first_and_at_its_size() -> None:
    knowledge = knowledge_of("a", num_blocks=4)
    serve(knowledge, "a", 1, 2, 3)
    serve(knowledge, "a", 7, 8)
    assert has(knowledge, "a", 7, 8) == 2
    assert has(knowledge, "a", 1, 2, 3) == 2, "the tail went, the head stayed"


def test_a_prompt_longer_than_the_pool_is_not_believed() -> None:
    knowledge = knowledge_of("a", num_blocks=2)
    serve(knowledge, "a", 1, 2, 3)
    assert has(knowledge, "a", 1, 2, 3) == 0


def test_events_replace_the_approximation() -> None:
    knowledge = knowledge_of("a", "b")
    serve(knowledge, "a", 1, 2)
    knowledge.begin_following("a")
    knowledge.follow("a", [BlockStored((b"n",), None, ids(5), 4, DEFAULT_NAMESPACE)])
    assert knowledge.kind("a") == "precise"
    assert (has(knowledge, "a", 1, 2), has(knowledge, "a", 5)) == (0, 1)
    serve(knowledge, "a", 9)
    assert has(knowledge, "a", 9) == 0, "only its own events say what a replica has"


def test_a_lost_replica_is_unknown_and_begins_anew() -> None:
    knowledge = knowledge_of("a")
    visit = knowledge.send("a", ids(1), SPACE)
    serve(knowledge, "a", 2)
    knowledge.lose("a")
    assert knowledge.kind("a") == "unknown"
    assert (has(knowledge, "a", 1), has(knowledge, "a", 2)) == (0, 0)
    knowledge.confirm(visit)  # it was sent to what is gone
    knowledge.close(visit)
    assert has(knowledge, "a", 1) == 0
    serve(knowledge, "a", 3)
    assert knowledge.kind("a") == "approximate"
    assert has(knowledge, "a", 3) == 1


def test_a_request_outlives_its_replica() -> None:
    knowledge = knowledge_of("a")
    visit = knowledge.send("a", ids(1), SPACE)
    knowledge.confirm(visit)
    knowledge.remove("a")
    knowledge.add("a", num_blocks=9)
    knowledge.close(visit)
    assert has(knowledge, "a", 1) == 0
    knowledge.index.check()


def test_the_age_is_that_of_the_last_news() -> None:
    clock = Clock()
    knowledge = knowledge_of("a", clock=clock)
    assert knowledge.age_s("a") == float("inf")
    serve(knowledge, "a", 1)
    clock.now = 5
    assert knowledge.age_s("a") == 5


def test_events_in_part_are_completed_by_our_own_decisions_until_the_cache_is_emptied() -> None:
    knowledge = knowledge_of("a")
    knowledge.begin_following("a")
    knowledge.follow("a", [BlockStored((b"n",), None, ids(5), 4, DEFAULT_NAMESPACE)])
    knowledge.lose("a")
    assert knowledge.kind("a") == "partial"
    serve(knowledge, "a", 5, 6)
    assert has(knowledge, "a", 5, 6) == 2
    knowledge.follow("a", [AllBlocksCleared()])
    assert knowledge.kind("a") == "precise"
    assert has(knowledge, "a", 5, 6) == 0


def test_names_that_are_recalled_are_those_that_would_be_computed() -> None:
    plain, recalling = BlockDigests(), _RecallingDigests()
    prompt, other = ids(1, 2, 3, 4), ids(1, 2, 9, 4)
    root = plain.root(SPACE)
    names = plain.chain(root, prompt, 4)
    recalling.recall(SPACE, prompt, tuple(names))
    for tokens in (prompt, other):
        for first in range(4):
            parent = plain.chain(root, tokens, 4)[first - 1] if first else root
            for last in range(first, 5):
                part = tokens[first * 16 : last * 16]
                assert recalling.chain(parent, part, 4) == plain.chain(parent, part, 4)
    assert recalling.chain(names[3], prompt, 4) == plain.chain(names[3], prompt, 4)
