"""FleetIndex against the obvious model: a replica has a set of prefixes."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from anaphora.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from anaphora.fleet.index import FleetIndex, prefix_namespace
from anaphora.identity import DEFAULT_NAMESPACE, Extras, MediaKey, Namespace

B = 4
PLAIN = prefix_namespace("")


def ids(*blocks: int) -> bytes:
    """A prompt whose block i holds `blocks[i]` B times."""
    return array("i", [block for block in blocks for _ in range(B)]).tobytes()


def name(*blocks: int) -> bytes:
    """The engine's name of the last of these blocks."""
    return bytes(blocks)


def stored(*blocks: int, after: int = 0, medium: str = "GPU", block_size: int = B) -> BlockStored:
    """The event that stores all of the prompt's blocks but the first `after`."""
    names = tuple(name(*blocks[: i + 1]) for i in range(after, len(blocks)))
    parent = name(*blocks[:after]) if after else None
    return BlockStored(names, parent, ids(*blocks[after:]), block_size, DEFAULT_NAMESPACE, medium=medium)


def removed(*prompts: tuple[int, ...], medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved(tuple(name(*prompt) for prompt in prompts), medium)


def fleet(*replicas: str, **options: int) -> FleetIndex:
    index = FleetIndex(B, **options)
    for replica in replicas:
        index.add(replica)
    return index


def test_every_replica_gets_the_length_of_its_own_prefix() -> None:
    index = fleet("a", "b", "c")
    index.apply("a", [stored(1, 2, 3)])
    index.apply("b", [stored(1, 2), stored(1, 2, 4, after=2)])
    assert index.match(ids(1, 2, 3), PLAIN).blocks == {"a": 3, "b": 2, "c": 0}
    assert index.match(ids(1, 2, 4, 9), PLAIN).blocks == {"a": 2, "b": 3, "c": 0}


def test_a_partial_block_never_matches() -> None:
    index = fleet("a")
    index.apply("a", [stored(1, 2)])
    assert index.match(ids(1, 2)[:-4], PLAIN).blocks == {"a": 1}


def test_a_hole_ends_the_prefix_of_that_replica_alone() -> None:
    index = fleet("a", "b")
    for replica in "ab":
        index.apply(replica, [stored(1, 2, 3)])
    index.apply("a", [removed((1, 2))])
    assert index.match(ids(1, 2, 3), PLAIN).blocks == {"a": 1, "b": 3}
    index.apply("a", [stored(1, 2, after=1)])
    assert index.match(ids(1, 2, 3), PLAIN).blocks == {"a": 3, "b": 3}


def test_clearing_one_publisher_leaves_the_others() -> None:
    index = fleet("p1", "p2")
    index.apply("p1", [stored(1), stored(2)])
    index.apply("p2", [stored(1), AllBlocksCleared()][:1])
    index.apply("p1", [AllBlocksCleared()])
    assert index.match(ids(1), PLAIN).blocks == {"p1": 0, "p2": 1}
    assert index.match(ids(2), PLAIN).blocks == {"p1": 0, "p2": 0}


def test_a_child_waits_for_its_parent() -> None:
    index = fleet("a")
    prompt = tuple(range(11))
    index.apply("a", [stored(*prompt, after=10)])
    assert index.match(ids(*prompt), PLAIN).blocks == {"a": 0}
    assert index.match(ids(10), PLAIN).blocks == {"a": 0}  # never attached at the root
    index.apply("a", [stored(*prompt[:10])])
    assert index.match(ids(*prompt), PLAIN).blocks == {"a": 11}


def test_what_was_removed_while_it_waited_stays_removed() -> None:
    index = fleet("a")
    index.apply("a", [stored(1, 2, 3, after=1), removed((1, 2, 3)), stored(1)])
    assert index.match(ids(1, 2, 3), PLAIN).blocks == {"a": 2}


def test_orphans_are_bounded() -> None:
    index = fleet("a", max_orphans=3)
    index.apply("a", [stored(1, i, after=1) for i in range(10)])
    index.check()
    assert index.counters.num_orphans_lost == 7
    index.apply("a", [stored(1)])
    assert [index.match(ids(1, i), PLAIN).blocks["a"] for i in (6, 7, 9)] == [1, 2, 2]


def test_a_block_is_gone_with_its_last_medium() -> None:
    index = fleet("a")
    index.apply("a", [stored(1), stored(1, medium="CPU"), removed((1,))])
    match = index.match(ids(1), PLAIN)
    assert match.blocks == {"a": 1}
    assert match.device_blocks == {"a": 0}
    index.apply("a", [removed((1,), medium="CPU")])
    assert index.match(ids(1), PLAIN).blocks == {"a": 0}


def test_media_complete_each_other() -> None:
    index = fleet("a")
    index.apply("a", [stored(1, 2, 3), stored(1, 2, 3, medium="CPU"), removed((1, 2, 3), (1, 2))])
    index.apply("a", [removed((1,), medium="CPU")])
    assert index.match(ids(1, 2, 3), PLAIN).blocks == {"a": 3}


def test_a_lower_tier_may_name_blocks_without_their_tokens() -> None:
    index = fleet("a")
    by_name = BlockStored((name(1), name(1, 2)), None, b"", 0, DEFAULT_NAMESPACE, medium="CPU")
    index.apply("a", [stored(1, 2), by_name, removed((1,), (1, 2))])
    assert index.match(ids(1, 2), PLAIN).blocks == {"a": 2}


def test_a_name_that_was_stored_twice_is_removed_twice() -> None:
    index = fleet("a")
    index.apply("a", [stored(1), stored(1), removed((1,))])
    assert index.match(ids(1), PLAIN).blocks == {"a": 1}
    index.apply("a", [removed((1,))])
    assert index.match(ids(1), PLAIN).blocks == {"a": 0}


def test_a_new_replica_under_an_old_name_has_nothing() -> None:
    index = fleet("10.0.0.5", "b")
    index.apply("10.0.0.5", [stored(1, 2)])
    index.remove_replica("10.0.0.5")
    index.add("10.0.0.5")
    assert index.match(ids(1, 2), PLAIN).blocks == {"10.0.0.5": 0, "b": 0}
    while index.sweep(1):
        index.check()
    assert index.tree.num_blocks == 0


def test_salts_adapters_models_and_media_are_apart() -> None:
    index = fleet("a")
    index.add("other", model="m2")
    salted = BlockStored((b"s",), None, ids(1), B, Namespace(salt="tenant"))
    image = BlockStored((b"i", b"j"), None, ids(7, 8), B, DEFAULT_NAMESPACE, [None, _shows("imgA")])
    index.apply("a", [salted, image])
    index.apply("other", [salted])

    def found(tokens: bytes, namespace: Namespace = PLAIN, *extras: Extras | None) -> int:
        return index.match(tokens, namespace, extras=extras or None).blocks["a"]

    assert found(ids(1)) == 0
    assert found(ids(1), prefix_namespace("", salt="other")) == 0
    assert found(ids(1), prefix_namespace("", salt="tenant")) == 1
    assert index.match(ids(1), prefix_namespace("m2", salt="tenant")).blocks == {"a": 0, "other": 1}
    assert [found(ids(7, 8), PLAIN, None, extras) for extras in (_shows("imgA"), _shows("imgB"), None)] == [2, 1, 1]


def _shows(image: str) -> Extras:
    return Extras(media=(MediaKey(image, 0, 0),))


def test_larger_engine_blocks_are_cut_and_others_refused() -> None:
    index = fleet("a")
    big = BlockStored((b"x", b"y"), None, ids(1, 2, 3, 4), 2 * B, DEFAULT_NAMESPACE)
    index.apply("a", [big, BlockStored((b"z",), b"y", ids(5, 6), 2 * B, DEFAULT_NAMESPACE)])
    assert index.match(ids(1, 2, 3), PLAIN).blocks == {"a": 3}
    assert index.match(ids(1, 2, 3, 4, 5, 6), PLAIN).blocks == {"a": 6}
    index.apply("a", [BlockRemoved((b"y",))])
    assert index.match(ids(1, 2, 3, 4, 5, 6), PLAIN).blocks == {"a": 2}
    index.apply("a", [BlockStored((b"q",), None, ids(9) + ids(9)[:8], B + 2, DEFAULT_NAMESPACE)])
    assert index.counters.num_incompatible_block_size == 1
    index.check()


def test_memory_is_bounded_and_the_last_used_survive() -> None:
    index = fleet("a", "b", max_bytes=100_000)
    for i in range(2000):
        index.apply("ab"[i % 2], [stored(i % 256, i // 256, 3, 4, 5)])
        index.match(ids(0, 0, 3, 4, 5), PLAIN)
        assert index.num_bytes <= 100_000
    index.check()
    assert index.match(ids(0, 0, 3, 4, 5), PLAIN).blocks["a"] == 5
    assert index.tree.num_dropped_blocks > 0


@pytest.mark.parametrize("num", [1, 700])
def test_any_number_of_replicas_may_hold_a_block(num: int) -> None:
    replicas = [str(i) for i in range(num)]
    index = fleet(*replicas)
    for replica in replicas:
        index.apply(replica, [stored(1, 2)])
    assert index.match(ids(1, 2), PLAIN).blocks == dict.fromkeys(replicas, 2)


def test_what_is_split_off_during_a_sweep_is_swept_too() -> None:
    index = fleet("a")
    index.apply("a", [stored(0), stored(2, 0)])
    index.forget("a")
    assert index.sweep(1)
    index.apply("a", [stored(2, 1)])
    while index.sweep(1):
        pass
    index.check()
    assert index.tree.num_blocks == 2


REPLICAS = ("a", "b", "c")
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)


class IndexMachine(RuleBasedStateMachine):
    """Stores, removals and losses in any order; the model is a set of prefixes for each replica and medium."""

    def __init__(self) -> None:
        super().__init__()
        self.index = fleet(*REPLICAS)
        self.model: dict[tuple[str, str], set[tuple[int, ...]]] = {
            (r, medium): set() for r in REPLICAS for medium in ("GPU", "CPU")
        }

    @rule(replica=st.sampled_from(REPLICAS), medium=st.sampled_from(["GPU", "GPU", "CPU"]), prompt=prompts)
    def store(self, replica: str, medium: str, prompt: tuple[int, ...]) -> None:
        mine = self.model[replica, medium]
        after = 0
        while after < len(prompt) and prompt[: after + 1] in mine:
            after += 1
        for end in range(after + 1, len(prompt) + 1):
            if prompt[:end] in mine:  # beyond a hole: an engine would store the missing one alone
                prompt = prompt[: end - 1]
                break
        if len(prompt) == after:
            return
        self.index.apply(replica, [stored(*prompt, after=after, medium=medium)])
        mine.update(prompt[:end] for end in range(after + 1, len(prompt) + 1))

    @rule(data=st.data(), replica=st.sampled_from(REPLICAS), medium=st.sampled_from(["GPU", "CPU"]))
    def remove(self, data: st.DataObject, replica: str, medium: str) -> None:
        mine = self.model[replica, medium]
        if mine:
            gone = data.draw(st.lists(st.sampled_from(sorted(mine)), unique=True))
            self.index.apply(replica, [removed(*gone, medium=medium)])
            mine.difference_update(gone)

    @rule(replica=st.sampled_from(REPLICAS))
    def forget(self, replica: str) -> None:
        self.index.forget(replica)
        for medium in ("GPU", "CPU"):
            self.model[replica, medium].clear()

    @rule(num=st.integers(1, 3))
    def sweep(self, num: int) -> None:
        self.index.sweep(num)

    @rule(prompt=prompts)
    def ask(self, prompt: tuple[int, ...]) -> None:
        match = self.index.match(ids(*prompt), PLAIN)
        for replica in REPLICAS:
            device, host = self.model[replica, "GPU"], self.model[replica, "CPU"]
            assert match.device_blocks[replica] == _run(prompt, device)
            assert match.blocks[replica] == _run(prompt, device | host)

    @invariant()
    def is_sound(self) -> None:
        self.index.check()


def _run(prompt: tuple[int, ...], held: set[tuple[int, ...]]) -> int:
    end = 0
    while end < len(prompt) and prompt[: end + 1] in held:
        end += 1
    return end


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
