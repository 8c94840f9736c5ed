"""Equal content computed twice at once.

The contract of KVCacheManager, in the smallest pool that shows it; block size 4.
"""

from __future__ import annotations

from anaphora.cache.radix_index import RadixIndex
from tests.cache.conftest import admit, run, tokens


class TestDuplicates:
    def test_a_copy_computed_at_once_survives_the_first_one(self, make):
        manager = make(6)
        first, second = manager.start(tokens(1, 5)), manager.start(tokens(1, 5))
        assert manager.allocate(first, 5)
        assert manager.allocate(second, 5)
        manager.commit(first, 5)
        manager.commit(second, 5)
        manager.check()
        assert not set(first.block_table) & set(second.block_table)
        manager.finish(first)
        manager.check()
        other = admit(manager, tokens(50, 62))
        assert len(other.block_table) == 4
        assert manager.match(tokens(1, 5)) == 4
        manager.finish(second)
        manager.finish(other)
        manager.check()
        assert manager.num_free_blocks == 6

    def test_two_live_copies_use_their_own_blocks_and_none_is_lost(self, make):
        manager = make(8)
        pair = [manager.start(tokens(1, 9)) for _ in range(2)]
        for sequence in pair:
            assert manager.allocate(sequence, 9)
        for sequence in pair:
            manager.commit(sequence, 9)
        assert manager.num_free_blocks == 2
        for sequence in pair:
            manager.finish(sequence)
            manager.check()
        assert manager.num_free_blocks == 8
        assert run(manager, tokens(1, 9)) == 8

    def test_of_several_copies_the_earliest_takes_the_place_of_the_first(self, make):
        manager = make(40)
        copies = [manager.start(tokens(1, 5)) for _ in range(5)]
        for sequence in copies:
            assert manager.allocate(sequence, 5)
        for sequence in copies:
            manager.commit(sequence, 5)
        manager.abort(copies[0])
        if isinstance(manager._index, RadixIndex):
            assert admit(manager, tokens(1, 5)).block_table[0] == copies[1].block_table[0]

    def test_new_content_after_a_copy_is_found_below_it(self, make):
        manager = make(12)
        first, second = manager.start(tokens(1, 5)), manager.start([*tokens(1, 4), *tokens(31, 35)])
        assert manager.allocate(first, 5)
        assert manager.allocate(second, 9)
        manager.commit(first, 5)
        manager.commit(second, 9)
        manager.check()
        assert manager.match([*tokens(1, 4), *tokens(31, 35)]) == 8
        manager.finish(first)
        manager.check()
        assert manager.num_free_blocks == 9
        assert manager.match([*tokens(1, 4), *tokens(31, 35)]) == 8

    def test_computing_again_what_nobody_holds_takes_no_memory_twice(self, make):
        manager = make(6)
        run(manager, tokens(1, 9))
        again = admit(manager, tokens(1, 9), read_cache=False)
        assert manager.num_free_blocks == 3
        manager.finish(again)
        assert manager.match(tokens(1, 9)) == 8

    def test_a_growing_tail_that_someone_else_reads_grows_beside_it(self, make):
        manager = make(8)
        writer = admit(manager, tokens(1, 5))
        manager.append(writer, tokens(6, 8))
        assert manager.allocate(writer, 3)
        manager.commit(writer, 3)
        reader = admit(manager, [*tokens(1, 8), 50])
        assert reader.num_cached_tokens == 8
        manager.append(writer, tokens(9, 12))
        assert manager.allocate(writer, 4)
        manager.commit(writer, 4)
        manager.check()
        manager.finish(writer)
        manager.check()
        assert manager.match(tokens(1, 13)) == 12

    def test_a_reader_of_the_first_copy_keeps_it(self, make):
        manager = make(12)
        first, second = manager.start(tokens(1, 9)), manager.start(tokens(1, 9))
        for sequence in (first, second):
            assert manager.allocate(sequence, 9)
        for sequence in (first, second):
            manager.commit(sequence, 9)
        reader = admit(manager, tokens(1, 9))
        assert reader.block_table[:2] == first.block_table[:2]
        manager.finish(first)
        manager.check()
        held = reader.block_table[:]
        manager.finish(second)
        manager.check()
        assert reader.block_table == held
        manager.finish(reader)
        manager.check()
        assert manager.num_free_blocks == 12
