"""Replays of what SGLang 0.5.23's RadixCache answered, step by step.

Three of its rules are not ours, on purpose:

- it evicts a whole edge where a page would do; ours frees what is needed, from the tail up;
- a lookup changes it: cuts edges, renews their recency; ours changes nothing until a request is admitted;
- it renews the part of an edge that a request did not read, and dates a held prefix by its last lookup; ours dates
  what was held, page by page, by when its last holder let go.

So each trace is replayed twice.

1. Through the reference tree with SGLang's rules: every field of every step is equal, the shape of the tree too.
2. Through a real KVCacheManager, with a lookup of theirs being a reader of ours that is admitted and ends, and each
   eviction asking for as many tokens as theirs freed (that settles the first two differences). Compared is every
   result (tokens known, slots, tokens and slots freed) and the number of tokens known, held and evictable, after every
   step. For the third difference, the reference tree with our rules is asked for each answer first. Where it gives
   SGLang's, so must the manager. Where it does not, which only evictions may, the manager must choose the same victims
   as that tree, and both are then rebuilt as SGLang left its own, so that every later step starts from SGLang's state.
   How many steps there are and how many evictions differ is written down for every trace: no step is left out unseen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anaphora import KVCacheManager, Namespace, Sequence
from anaphora.cache.eviction import Slru, Tlru
from tests.cache.paged_memory import fingerprint
from tests.cache.reference_tree import Key, ReferenceTree

STORED = Path(__file__).parents[1] / "golden" / "sglang"
COMPLETE = Path(__file__).parents[3] / "shared" / "golden" / "sglang"
"""Beside the repository, where there is one: the same traces without cuts, and more."""

Step = dict[str, Any]
Answer = dict[str, Any]

# Per trace: how many steps it has, and in how many of its evictions our rules choose other victims.
STORED_TRACES = {
    "events_page1": (8, 0),
    "events_page16": (8, 0),
    "fig3_page1": (23, 0),
    "locks_page1": (15, 1),
    "locks_page16": (15, 1),
    "namespaces_page1": (12, 0),
    "policy_fifo_page1": (11, 0),
    "policy_filo_page1": (11, 0),
    "policy_lfu_page1": (11, 0),
    "policy_lru_page1": (11, 0),
    "policy_mru_page1": (11, 0),
    "policy_priority_page1": (11, 0),
    "policy_slru_3_page1": (11, 0),
    "policy_slru_page1": (11, 0),
    "policy_tlru_page1": (12, 0),
    "random_seed1_page1": (60, 3),
    "random_seed2_page16": (30, 0),
    "splits_page1": (11, 0),
    "splits_page16": (13, 0),
}
COMPLETE_TRACES = STORED_TRACES | {
    "fig3_page16": (23, 0),
    "namespaces_page16": (12, 0),
    "random_seed1_page1": (300, 11),
    "random_seed1_page16": (300, 8),
    "random_seed2_page1": (300, 3),
    "random_seed2_page16": (300, 7),
}

# What makes a manager of each policy that the real index has, under its name in the traces' names.
REAL_POLICIES: dict[str, dict[str, Any]] = {
    "lru": {},
    "lfu": {"eviction": "lfu"},
    "slru": {"eviction": "slru"},
    "slru_3": {"eviction": Slru(threshold=3)},
    "fifo": {"eviction": "fifo"},
    "filo": {"eviction": "filo"},
    "mru": {"eviction": "mru"},
    "priority": {"eviction": "priority"},
    "tlru": {"eviction": Tlru(threshold=40, next_prompt=10)},
}


def policy_of(name: str) -> str:
    return name.removeprefix("policy_").rpartition("_page")[0] if name.startswith("policy_") else "lru"


TRACES = [
    *(pytest.param(STORED, *trace, id=trace[0]) for trace in STORED_TRACES.items()),
    *(pytest.param(COMPLETE, *trace, id=f"complete-{trace[0]}") for trace in COMPLETE_TRACES.items()),
]
REAL_TRACES = [trace for trace in TRACES if policy_of(trace.values[1]) in REAL_POLICIES]


def load(directory: Path, name: str) -> dict[str, Any]:
    if not directory.exists():
        pytest.skip("the complete traces are not here; the stored ones cover the same ground")
    trace: dict[str, Any] = json.loads((directory / f"{name}.json").read_text())
    return trace


@pytest.mark.parametrize(("directory", "name", "counts"), TRACES)
def test_the_reference_tree_with_sglangs_rules_gives_every_answer(
    directory: Path, name: str, counts: tuple[int, int]
) -> None:
    trace = load(directory, name)
    tree = TreeReplay(trace, like_sglang=True)
    for step in trace["steps"]:
        answer = tree.apply(step, step.get("num_tokens"))
        assert answer["result"] == step["result"]
        sizes = {**answer["sizes"], "nodes": len(tree.tree.edges()), "evictable_leaves": tree.num_evictable_leaves()}
        assert step["sizes"] == {field: sizes[field] for field in step["sizes"]}
        if "tree" in step:
            assert tree.nodes() == step["tree"]
    assert len(trace["steps"]) == counts[0]


@pytest.mark.parametrize(("directory", "name", "counts"), REAL_TRACES)
def test_the_real_tree_gives_every_answer_that_our_own_rules_do_not_change(
    directory: Path, name: str, counts: tuple[int, int]
) -> None:
    trace = load(directory, name)
    theirs = TreeReplay(trace, like_sglang=True)
    ours = TreeReplay(trace, like_sglang=False)
    real = RealReplay(trace, REAL_POLICIES[policy_of(name)])
    num_other_victims = 0
    for step in trace["steps"]:
        theirs.apply(step, step.get("num_tokens"))
        golden = unordered({"result": step["result"], "sizes": {s: step["sizes"][s] for s in real.sizes()}})
        num_tokens = step["result"].get("evicted")
        expected = unordered(ours.apply(step, num_tokens))
        assert unordered(real.apply(step, num_tokens)) == expected
        if expected != golden:
            assert step["op"] == "evict"
            num_other_victims += 1
            ours.rebuild(theirs)
            real.rebuild(theirs)
    assert (len(trace["steps"]), num_other_victims) == counts


@pytest.mark.parametrize("name", STORED_TRACES)
def test_a_stored_trace_is_what_the_complete_one_says(name: str) -> None:
    stored, complete = load(STORED, name), load(COMPLETE, name)
    assert {**stored, "steps": None} == {**complete, "steps": None}
    for kept, step in zip(stored["steps"], complete["steps"], strict=False):
        assert kept == {field: step[field] for field in kept}


def unordered(answer: Answer) -> Answer:
    """Leave out in which order slots were freed: theirs go by edge, ours by page."""
    result = answer["result"]
    return {**answer, "result": {**result, "freed_slots": sorted(result.get("freed_slots", ()))}}


class TreeReplay:
    """A reference tree that understands the traces' steps. A page's value is the list of its slots."""

    def __init__(self, trace: dict[str, Any], *, like_sglang: bool) -> None:
        self.tree = ReferenceTree(
            trace["page_size"],
            like_sglang=like_sglang,
            policy=trace["policy"],
            policy_config=trace.get("policy_config"),
        )
        self.handles: dict[str, list[Key]] = {}
        self.locked: list[str] = []

    def apply(self, step: Step, num_tokens: int | None) -> Answer:
        """Take a step; if it is an eviction, for `num_tokens`."""
        result = getattr(self, step["op"])(step) if num_tokens is None else self.evict(num_tokens)
        return {"result": result, "sizes": self.tree.sizes()}

    def insert(self, step: Step) -> Answer:
        known = self.tree.insert(
            namespace(step), step["tokens"], page_slots(step, self.tree.page_size), step["priority"]
        )
        return {"already_cached": len(known) * self.tree.page_size}

    def match(self, step: Step) -> Answer:
        found = self.tree.match(namespace(step), step["tokens"])
        if not self.tree.like_sglang:
            self.tree.let_go(found)
        if "handle" in step:
            self.handles[step["handle"]] = found
        return {"matched": len(found) * self.tree.page_size, "slots": self.slots(found)}

    def lock(self, step: Step) -> Answer:
        self.locked.append(step["handle"])
        self.tree.lock(self.handles[step["handle"]])
        return {}

    def unlock(self, step: Step) -> Answer:
        self.locked.remove(step["handle"])
        self.tree.unlock(self.handles[step["handle"]])
        return {}

    def evict(self, num_tokens: int) -> Answer:
        pages = dict(self.tree.pages)
        gone = self.tree.evict(num_tokens)
        freed = [slot for key in gone for slot in pages[key].value]
        return {"evicted": len(freed), "freed_slots": freed}

    def reset(self, step: Step) -> Answer:
        self.tree.pages.clear()
        return {}

    def slots(self, path: list[Key]) -> list[int]:
        return [slot for key in path for slot in self.tree.pages[key].value]

    def num_evictable_leaves(self) -> int:
        return len(self.tree.leaves())

    def nodes(self) -> list[dict[str, Any]]:
        """Return the edges as the traces write them."""
        nodes: list[dict[str, Any]] = []
        depths: dict[Key, int] = {}
        for edge in self.tree.edges():
            above = self.tree.parent(edge[0])
            depths[edge[-1]] = depths.get(above, 0) + 1
            (extra_key, cache_salt), tokens = edge[-1]
            (shared,) = {(page.locks, page.hits, page.priority) for page in map(self.tree.pages.__getitem__, edge)}
            node = {"depth": depths[edge[-1]], "extra_key": extra_key, "cache_salt": cache_salt}
            node |= {"tokens": list(tokens[len(above[1]) :]), "slots": self.slots(edge)}
            nodes.append(node | dict(zip(("lock_ref", "hit_count", "priority"), shared, strict=True)))
        return nodes

    def rebuild(self, other: TreeReplay) -> None:
        """Become what the other one is: its pages, used in the same order, and its locks."""
        self.tree.pages.clear()
        for (space, tokens), page in by_recency(other.tree):
            size = self.tree.page_size
            values = [other.tree.pages[key].value for key in self.tree.path(space, tokens)]
            assert len(values) * size == len(tokens)
            self.tree.insert(space, tokens, values, page.priority)
        for handle in self.locked:
            self.tree.lock(self.handles[handle])


class RealReplay:
    """A manager that understands the traces' steps. Whoever inserts or looks up is a request that comes and goes."""

    NUM_BLOCKS = 200
    NEXT_TOKEN = -1
    """What a request still has to compute: the manager never serves a prompt's last token from the cache."""

    def __init__(self, trace: dict[str, Any], options: dict[str, Any]) -> None:
        self.page_size: int = trace["page_size"]
        self.options = options
        self.prefixes: dict[str, tuple[Namespace, list[int]]] = {}
        """What each handle stands for."""
        self.locks: dict[str, Sequence] = {}
        self.start()

    def start(self) -> None:
        self.manager = KVCacheManager(self.NUM_BLOCKS, self.page_size, index="radix", **self.options)
        self.slots: dict[int, list[int]] = {}
        """Per block, the slots that the traces gave its content."""
        self.blocks: dict[tuple[Namespace, tuple[int, ...]], int] = {}
        """The block of each prefix that may be known."""

    def apply(self, step: Step, num_tokens: int | None) -> Answer:
        """Take a step; if it is an eviction, for `num_tokens`."""
        result = getattr(self, step["op"])(step) if num_tokens is None else self.evict(num_tokens)
        self.manager.check()
        return {"result": result, "sizes": self.sizes()}

    def sizes(self) -> dict[str, int]:
        num_cached = self.manager.num_cached_blocks
        num_held = self.manager.num_blocks - self.manager.num_free_blocks
        pages = {"total": num_cached + num_held, "evictable": num_cached, "protected": num_held}
        return {name: number * self.page_size for name, number in pages.items()}

    def insert(self, step: Step) -> Answer:
        return {
            "already_cached": self.add(
                real_namespace(namespace(step)), step["tokens"], page_slots(step, self.page_size), step["priority"]
            )
        }

    def add(self, space: Namespace, tokens: list[int], slots: list[list[int]], priority: int = 0) -> int:
        writer = self.admit(space, tokens, priority)
        missing = len(tokens) // self.page_size * self.page_size - writer.num_computed_tokens
        num_evicted = self.manager.stats().evicted_blocks
        assert self.manager.allocate(writer, missing)
        assert self.manager.stats().evicted_blocks == num_evicted
        self.manager.commit(writer, missing)
        for position in range(writer.num_cached_tokens // self.page_size, len(writer.block_table)):
            block = writer.block_table[position]
            self.slots[block] = slots[position]
            self.blocks[space, tuple(tokens[: (position + 1) * self.page_size])] = block
        self.manager.finish(writer)
        return writer.num_cached_tokens

    def match(self, step: Step) -> Answer:
        space, tokens = real_namespace(namespace(step)), step["tokens"]
        before = fingerprint(self.manager)
        matched = self.matched(space, tokens)
        assert fingerprint(self.manager) == before
        reader = self.admit(space, tokens)
        assert reader.num_cached_tokens == matched
        slots = [slot for block in reader.block_table for slot in self.slots[block]]
        self.manager.finish(reader)
        if "handle" in step:
            self.prefixes[step["handle"]] = space, tokens[:matched]
        return {"matched": matched, "slots": slots}

    def matched(self, space: Namespace, tokens: list[int]) -> int:
        return self.manager.match([*tokens, self.NEXT_TOKEN], space)

    def admit(self, space: Namespace, tokens: list[int], priority: int = 0) -> Sequence:
        """Let a request hold what is known of its prompt. It counts as a use only once it commits something."""
        sequence = self.manager.start([*tokens, self.NEXT_TOKEN], space, priority=priority)
        assert self.manager.allocate(sequence, 0)
        return sequence

    def lock(self, step: Step) -> Answer:
        self.locks[step["handle"]] = self.admit(*self.prefixes[step["handle"]])
        return {}

    def unlock(self, step: Step) -> Answer:
        self.manager.finish(self.locks.pop(step["handle"]))
        return {}

    def evict(self, num_tokens: int) -> Answer:
        """Let a request come that needs all blank blocks and so many more, and go without leaving anything."""
        manager = self.manager
        num_before = manager.stats().evicted_blocks
        num_blank = manager.num_free_blocks - manager.num_cached_blocks
        pressure = manager.start([self.NEXT_TOKEN], Namespace(salt="pressure"), write_cache=False)
        assert manager.allocate(pressure, num_blank * self.page_size + num_tokens)
        manager.abort(pressure)
        gone = [(space, tokens) for space, tokens in self.blocks if self.matched(space, list(tokens)) < len(tokens)]
        freed = [slot for prefix in gone for slot in self.slots[self.blocks.pop(prefix)]]
        return {"evicted": (manager.stats().evicted_blocks - num_before) * self.page_size, "freed_slots": freed}

    def reset(self, step: Step) -> Answer:
        assert self.manager.reset()
        return {}

    def rebuild(self, other: TreeReplay) -> None:
        """Become what the other one is: its prefixes, used in the same order, and its locks."""
        self.start()
        tree = other.tree
        for (space, tokens), _ in by_recency(tree):
            slots = [tree.pages[key].value for key in tree.path(space, tokens)]
            self.add(real_namespace(space), list(tokens), slots)
        for handle in self.locks:
            self.locks[handle] = self.admit(*self.prefixes[handle])


def by_recency(tree: ReferenceTree) -> list[tuple[Key, Any]]:
    """Return a tree's pages, least recently used first; of those used at once, the deepest last, since it renews the
    others."""
    return sorted(tree.pages.items(), key=lambda item: (item[1].used, len(item[0][1])))


def namespace(step: Step) -> tuple[str | None, str | None]:
    return step["extra_key"], step["cache_salt"] or None


def real_namespace(space: tuple[str | None, str | None]) -> Namespace:
    extra_key, salt = space
    return Namespace(model="" if extra_key is None else f"extra key {extra_key}", salt=salt)


def page_slots(step: Step, page_size: int) -> list[list[int]]:
    first = step["slots"][0] if step["slots"] else 0
    starts = range(0, len(step["tokens"]) // page_size * page_size, page_size)
    return [list(range(first + start, first + start + page_size)) for start in starts]
