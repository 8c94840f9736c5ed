"""HashIndex: what its structure promises beyond the contract of every index."""

from __future__ import annotations

import pytest

from anaphora import KVCacheManager, Namespace, Sequence
from anaphora.cache.hash_index import HashIndex
from anaphora.cache.index import NUM_GHOSTS, InvariantError
from anaphora.identity import BlockDigests, MediaSpan
from tests.cache.conftest import admit, run


class CountingDigests(BlockDigests):
    """Counts the blocks that are digested."""

    num_digested = 0

    def chain(self, parent, tokens, block_size, extras=None):
        digests = super().chain(parent, tokens, block_size, extras)
        self.num_digested += len(digests)
        return digests


def index_of(manager: KVCacheManager) -> HashIndex:
    assert isinstance(manager._index, HashIndex)
    return manager._index


class TestNames:
    def test_serving_makes_no_digest(self):
        digests = CountingDigests()
        manager = KVCacheManager(8, 4, index="hash", digests=digests)
        for first in (0, 0, 100, 0):
            run(manager, range(first, first + 20))
        assert manager.stats().evicted_blocks > 0
        assert digests.num_digested == 0

    def test_a_block_is_digested_once_whoever_asks(self):
        digests = CountingDigests()
        manager = KVCacheManager(16, 4, index="hash", digests=digests)
        first = admit(manager, range(20))
        names = manager.block_digests(first)
        assert digests.num_digested == 5
        second = admit(manager, [*range(18), 50, 51, 52])
        assert manager.block_digests(second)[:4] == names[:4]
        assert digests.num_digested == 6

    @pytest.mark.parametrize("events", [False, True])
    def test_names_are_those_of_the_chain(self, events):
        digests = BlockDigests()
        manager = KVCacheManager(16, 4, index="hash", digests=digests, events=events)
        namespace = Namespace(salt="x")
        sequence = manager.start(list(range(6)), namespace)
        for token in range(6, 21):
            assert manager.allocate(sequence, sequence.num_tokens - sequence.num_computed_tokens)
            manager.commit(sequence, sequence.num_tokens - sequence.num_computed_tokens)
            manager.append(sequence, [token])
        expected = digests.chain(digests.root(namespace), bytes(sequence.tokens[: 5 * 16]), 4)
        assert manager.block_digests(sequence) == expected


class TestGrowth:
    def test_a_run_that_lost_its_end_grows_on_with_other_tokens(self):
        manager = KVCacheManager(6, 2, index="hash", events=True)
        for end in ([5, 6, 7, 8], [50, 60, 70, 80]):
            sequence = manager.start([1, 2, 3, 4, *end])
            while sequence.num_computed_tokens < 8:
                assert manager.allocate(sequence, 2)
                manager.commit(sequence, 2)
            manager.check()
            assert manager.match([1, 2, 3, 4, *end, 9]) == 8
            table = list(sequence.block_table)
            manager.finish(sequence)
            manager.evict_blocks(table[2:])
        assert [run.num_blocks for run in index_of(manager)._trie.runs()] == [0, 2]


class TestGroups:
    def test_a_block_may_serve_one_layer_group_after_another(self):
        manager = KVCacheManager(6, 2, index="hash", windows=(None, 3), events=True)
        seen: dict[int, set[int]] = {}
        for first in range(0, 60, 6):
            sequence = admit(manager, range(first, first + 2 + first % 5))
            for group, table in enumerate(sequence.block_tables):
                for block in table:
                    seen.setdefault(block, set()).add(group)
            manager.finish(sequence)
            manager.check()
        assert {0, 1} in seen.values()


class TestEviction:
    def test_a_hole_ends_a_hit_and_is_filled_by_who_computes_it_again(self):
        manager = KVCacheManager(12, 2, index="hash")
        index_of(manager).keeps_orphans = True
        first = admit(manager, range(8))
        table = list(first.block_table)
        manager.finish(first)
        manager.evict_blocks([table[1]])
        assert manager.match(range(9)) == 2
        second = admit(manager, range(8))
        assert list(second.block_table)[:1] == table[:1]
        manager.finish(second)
        assert manager.match(range(9)) == 8

    def test_blocks_of_one_run_go_from_its_end_however_many_are_taken(self):
        for num_taken in range(1, 7):
            manager = KVCacheManager(6, 2, index="hash", events=True)
            run(manager, range(12))
            manager.take_events()
            other = admit(manager, range(100, 100 + 2 * num_taken))
            assert manager.match(range(13)) == 12 - 2 * num_taken
            assert manager.stats().evicted_blocks == num_taken
            manager.finish(other)

    def test_of_copies_the_earliest_is_served_and_then_the_next(self):
        manager = KVCacheManager(8, 2, index="hash")
        sequences = [manager.start([1, 2, 3, 4]) for _ in range(3)]
        for sequence in sequences:
            assert manager.allocate(sequence, 4)
        for sequence in sequences:
            manager.commit(sequence, 4)
        tables = [list(sequence.block_table) for sequence in sequences]
        for sequence in sequences:
            manager.finish(sequence)
        for table in tables:
            reader = admit(manager, [1, 2, 3, 4, 5])
            assert list(reader.block_table)[:2] == table
            manager.finish(reader)
            index_of(manager)._named.forget(table, True)
            index_of(manager)._num_named_free -= 2
            manager.check()
        assert manager.match([1, 2, 3, 4, 5]) == 0


class TestGhosts:
    def reason(self, manager: KVCacheManager, tokens, **options) -> str:
        return manager.explain(list(tokens), **options).reason

    def test_content_that_was_computed_again_is_still_told_from_what_never_was(self):
        manager = KVCacheManager(6, 2, index="hash")
        run(manager, range(12))
        run(manager, range(100, 112))
        run(manager, range(6))
        assert self.reason(manager, range(13)) == "evicted"
        assert self.reason(manager, [*range(6), 9, 9, 9]) == "not_cached"

    def test_the_same_tokens_after_another_prefix_were_not_evicted(self):
        manager = KVCacheManager(6, 2, index="hash")
        run(manager, [1, 2, *range(20, 30)])
        run(manager, range(100, 112))
        run(manager, [3, 4])
        assert self.reason(manager, [3, 4, *range(20, 30)]) == "not_cached"

    def test_nor_were_those_of_a_branch_after_another_head(self):
        manager = KVCacheManager(6, 2, index="hash")
        heads = [admit(manager, head) for head in ([1, 2], [3, 4])]
        run(manager, [1, 2, 20, 21, 22, 23])
        run(manager, range(100, 108))
        assert self.reason(manager, [1, 2, 20, 21, 22, 23]) == "evicted"
        assert self.reason(manager, [3, 4, 20, 21, 22, 23]) == "not_cached"
        for head in heads:
            manager.finish(head)

    @pytest.mark.parametrize("num_shared", [2, 4])
    def test_a_branch_is_remembered_by_all_that_comes_before_it(self, num_shared):
        manager = KVCacheManager(num_shared // 2 + 6, 2, index="hash")
        head = admit(manager, range(num_shared))
        run(manager, [*range(num_shared), 50, 51, 52, 53])
        run(manager, range(100, 112))
        assert manager.match([*range(num_shared), 50, 51, 52]) == num_shared
        assert self.reason(manager, [*range(num_shared), 50, 51, 52]) == "evicted"
        manager.finish(head)

    def test_another_image_at_the_same_place_was_not_evicted(self):
        manager = KVCacheManager(6, 2, index="hash")
        run(manager, [0] * 12, media=[MediaSpan(2, 4, "cat")])
        run(manager, range(100, 112))
        run(manager, [0, 0])
        assert self.reason(manager, [0] * 12, media=[MediaSpan(2, 4, "cat")]) == "evicted"
        assert self.reason(manager, [0] * 12, media=[MediaSpan(2, 4, "dog")]) == "not_cached"

    def test_what_they_keep_is_bounded(self):
        manager = KVCacheManager(64, 1, index="hash")
        for first in range(0, 4 * NUM_GHOSTS, 50):
            run(manager, range(first, first + 50))
        ghosts = index_of(manager)._named.ghosts
        assert NUM_GHOSTS - 64 <= len(ghosts) <= NUM_GHOSTS
        manager.reset()
        assert len(ghosts) == 0

    def test_forgotten_content_is_not_among_them(self):
        manager = KVCacheManager(8, 4, index="hash")
        for _ in range(3):
            run(manager, range(17))
            manager.invalidate()
        assert len(index_of(manager)._named.ghosts) == 0


class TestCheck:
    """Every part of the books is held against the others."""

    def broken(self, spoil) -> None:
        manager = KVCacheManager(16, 2, index="hash")
        run(manager, range(9))
        sequence = admit(manager, [*range(6), 50, 51, 52])
        manager.check()
        spoil(index_of(manager), sequence)
        with pytest.raises(InvariantError):
            manager.check()

    def test_counts_of_holders(self):
        def spoil(index: HashIndex, sequence: Sequence) -> None:
            index._num_holders[sequence.block_table[0]] += 1

        self.broken(spoil)

    def test_the_run_of_a_block(self):
        def spoil(index: HashIndex, sequence: Sequence) -> None:
            index._named.runs[sequence.block_table[0]] = None

        self.broken(spoil)

    def test_the_position_of_a_block(self):
        def spoil(index: HashIndex, sequence: Sequence) -> None:
            index._named._positions[sequence.block_table[0]] += 1

        self.broken(spoil)

    def test_the_tokens_of_a_run(self):
        def spoil(index: HashIndex, sequence: Sequence) -> None:
            run = sequence.index_state[0]
            run.key = bytes(len(run.key))

        self.broken(spoil)

    def test_the_blocks_of_a_run(self):
        def spoil(index: HashIndex, sequence: Sequence) -> None:
            sequence.index_state[0].columns[0][0] = 0

        self.broken(spoil)

    def test_the_count_of_cached_blocks(self):
        def spoil(index: HashIndex, sequence: Sequence) -> None:
            index._num_named_free += 1

        self.broken(spoil)

    def test_the_free_queue(self):
        def spoil(index: HashIndex, sequence: Sequence) -> None:
            index._free.append(sequence.block_table[:1])

        self.broken(spoil)

    def test_who_stands_where(self):
        def spoil(index: HashIndex, sequence: Sequence) -> None:
            index._trie.stand(*sequence.index_state)

        self.broken(spoil)
