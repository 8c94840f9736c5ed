"""The reference tree's two sets of rules, and the real manager against the one that is ours.

The comparison runs random scripts: requests that share beginnings, diverge inside blocks, are equal to one that is
being computed at the same time, come in chunks, grow, are preempted and end, in pools so small that eviction never
stops. After every step the manager must know what the model knows, hold what it holds, and have evicted as much.
"""

from __future__ import annotations

import random

import pytest

from anaphora import Adapter, KVCacheManager, Namespace, Sequence
from tests.cache.reference_tree import ReferenceManager, ReferenceSequence, ReferenceTree

NAMESPACES = [Namespace(), Namespace(salt="a"), Namespace(salt="a", adapter=Adapter("a"))]
NEXT_TOKEN = -1
"""Ends a prompt that asks for all before it; the last token is never served."""


class TestTwoSetsOfRules:
    def test_for_one_page_sglang_gives_up_a_whole_edge_and_we_one_page(self):
        for like_sglang, num_evicted in [(True, 5), (False, 1)]:
            tree = ReferenceTree(1, like_sglang=like_sglang)
            tree.insert("", [1, 2, 3, 4, 5], "abcde")
            assert len(tree.evict(1)) == num_evicted
            assert len(tree.known("", [1, 2, 3, 4, 5])) == 5 - num_evicted

    def test_a_lookup_renews_and_cuts_in_sglang_and_changes_nothing_here(self):
        for like_sglang, survivor in [(True, (1, 2)), (False, (3, 4))]:
            tree = ReferenceTree(1, like_sglang=like_sglang)
            tree.insert("", [1, 2], "ab")
            tree.insert("", [3, 4], "cd")
            assert len(tree.match("", [1, 9])) == 1
            tree.evict(2)
            assert len(tree.known("", survivor)) == 2

    def test_the_unread_half_of_an_edge_is_renewed_in_sglang_and_not_here(self):
        for like_sglang, gone in [(True, [3, 4]), (False, [2, 1])]:
            tree = ReferenceTree(1, like_sglang=like_sglang)
            tree.insert("", [0, 1, 2], "abc")
            tree.insert("", [3, 4], "de")
            tree.insert("", [0, 9], "fg")
            assert [tokens[-1] for _, tokens in tree.evict(2)] == gone

    def test_namespaces_are_apart_and_the_order_of_eviction_is_one(self):
        tree = ReferenceTree(2)
        tree.insert("x", [1, 2, 3, 4], "ab")
        assert tree.match("y", [1, 2, 3, 4]) == []
        tree.insert("y", [1, 2, 3, 4], "cd")
        assert tree.evict(5) == [("x", (1, 2, 3, 4)), ("x", (1, 2)), ("y", (1, 2, 3, 4))]

    def test_what_was_held_is_as_old_as_its_last_holders_leave(self):
        tree = ReferenceTree(1)
        tree.insert("", [1, 2], "ab")
        tree.lock(held := tree.known("", [1]))
        tree.insert("", [3], "c")
        tree.unlock(held)
        assert [tokens for _, tokens in tree.evict(3)] == [(1, 2), (3,), (1,)]


class Script:
    """A real manager and the model of it, put through the same random steps."""

    def __init__(self, seed: int, num_blocks: int, block_size: int) -> None:
        self.rng = random.Random(seed)
        self.block_size = block_size
        self.real = KVCacheManager(num_blocks, block_size, index="radix")
        self.model = ReferenceManager(num_blocks, block_size)
        self.live: list[tuple[Sequence, ReferenceSequence]] = []
        self.asked: list[tuple[Namespace, list[int]]] = [(Namespace(), [0])]
        self.max_tokens = num_blocks * block_size // 2
        self.num_hits = self.num_twins = self.num_refusals = 0

    def step(self) -> None:
        rng = self.rng
        running = [pair for pair in self.live if pair[1].is_running]
        action = rng.random()
        if len(self.live) < 2 or (action < 0.15 and len(self.live) < 5):
            self.start()
        elif action < 0.3:
            self.allocate(*rng.choice(self.live))
        elif action < 0.5 and running:
            self.compute(*rng.choice(running))
        elif action < 0.55:
            self.append(*rng.choice(self.live))
        elif action < 0.7:
            self.end(*rng.choice(self.live))
        elif action < 0.8 and running:
            self.preempt(*rng.choice(running))
        elif action < 0.99:
            self.pass_through()
        elif not running:
            assert self.real.reset()
            self.model.reset()

    def prompt(self) -> tuple[Namespace, list[int]]:
        """Return what a live request asks for, or a beginning of what was asked before, cut anywhere, and more."""
        rng = self.rng
        if self.live and rng.random() < 0.3:
            twin = rng.choice(self.live)[1]
            return twin.namespace, list(twin.tokens)
        namespace, known = rng.choice(self.asked[-12:])
        if rng.random() < 0.2:
            namespace = rng.choice(NAMESPACES)
        beginning = known[: rng.randrange(len(known) + 1)]
        tokens = [*beginning, *(rng.randrange(3) for _ in range(rng.randrange(1, 2 * self.block_size + 2)))]
        return namespace, tokens[: self.max_tokens]

    def pass_through(self) -> None:
        """A request that comes, computes all of its prompt if there is room, and ends."""
        self.start()
        real, model = self.live[-1]
        self.allocate(real, model)
        if model.is_running:
            self.compute(real, model)
        self.end(real, model)

    def start(self) -> None:
        namespace, tokens = self.prompt()
        self.asked.append((namespace, tokens))
        options = {"read_cache": self.rng.random() < 0.9, "write_cache": self.rng.random() < 0.9}
        pair = self.real.start(tokens, namespace, **options), ReferenceSequence(list(tokens), namespace, **options)
        self.live.append(pair)
        if self.rng.random() < 0.7:
            self.allocate(*pair)

    def allocate(self, real: Sequence, model: ReferenceSequence) -> None:
        if not real.was_admitted and self.rng.random() < 0.5:
            assert real.num_cached_tokens == len(self.model.hits(model)) * self.block_size
        rest = len(model.tokens) - model.num_computed_tokens
        num_tokens = self.rng.choice([0, 1, rest, rest, rest, self.rng.randrange(rest + self.block_size)])
        is_room = self.model.can_allocate(model, num_tokens)
        assert self.real.allocate(real, num_tokens) == is_room
        if is_room:
            self.num_hits += not model.is_running and self.model.hits(model) != []
            self.model.allocate(model, num_tokens, list(real.block_table))
        self.num_refusals += not is_room

    def compute(self, real: Sequence, model: ReferenceSequence) -> None:
        most = min(len(model.tokens), len(model.table) * self.block_size) - model.num_computed_tokens
        num_tokens = self.rng.choice([most, most, self.rng.randrange(most + 1)])
        self.real.commit(real, num_tokens)
        self.model.commit(model, num_tokens)
        self.num_twins += any(len(self.model.copies(key)) > 1 for key in model.path)

    def append(self, real: Sequence, model: ReferenceSequence) -> None:
        if len(model.tokens) < self.max_tokens:
            tokens = [self.rng.randrange(3) for _ in range(self.rng.randrange(1, 4))]
            self.real.append(real, tokens)
            model.tokens += tokens
            self.asked.append((model.namespace, list(model.tokens)))

    def end(self, real: Sequence, model: ReferenceSequence) -> None:
        self.live.remove((real, model))
        self.rng.choice([self.real.finish, self.real.abort])(real)
        if model.is_running:
            self.model.give_back(model)

    def preempt(self, real: Sequence, model: ReferenceSequence) -> None:
        self.real.preempt(real)
        self.model.give_back(model)

    def compare(self) -> None:
        """Assert that both are in the same state, as far as the probes tell."""
        real, model = self.real, self.model
        real.check()
        assert real.num_free_blocks == model.num_blocks - len(model.held_blocks())
        assert real.num_cached_blocks == len(model.cached_blocks())
        assert real.stats().evicted_blocks == model.num_evicted_blocks
        for sequence, twin in self.live:
            assert list(sequence.block_table) == twin.table
            assert sequence.num_computed_tokens == twin.num_computed_tokens
        for namespace, tokens in self.asked[-8:]:
            known = model.tree.known(namespace, tokens)
            assert real.match([*tokens, NEXT_TOKEN], namespace) == len(known) * self.block_size

    def compare_everything(self) -> None:
        """Assert that every page that the model knows is known. As many are, so there is none that it does not know."""
        self.compare()
        for namespace, tokens in self.model.tree.pages:
            assert self.real.match([*tokens, NEXT_TOKEN], namespace) == len(tokens)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 12), (1, 24), (4, 6), (4, 14), (16, 4), (16, 10)])
def test_the_radix_index_is_the_reference_tree_step_by_step(block_size: int, num_blocks: int, seed: int) -> None:
    script = Script(seed, num_blocks, block_size)
    for number in range(1000):
        script.step()
        if number % 20:
            script.compare()
        else:
            script.compare_everything()
    # The script went where it was meant to go.
    assert script.model.num_evicted_blocks > 80
    assert script.num_hits > 30
    assert script.num_refusals > 5
    assert script.num_twins > 0
