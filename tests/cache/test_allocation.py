"""Room: given at once or refused with nothing changed; ends, forks and layer groups.

The contract of KVCacheManager, in the smallest pool that shows it; block size 4.
"""

from __future__ import annotations

import pytest

from anaphora import KVCacheManager
from tests.cache.conftest import admit, run, tokens
from tests.cache.paged_memory import fingerprint


class TestAllocation:
    def test_hits_are_pinned_before_new_blocks_are_taken(self, make):
        manager = make(5)
        run(manager, tokens(1, 9))
        second = admit(manager, [*tokens(1, 8), *tokens(20, 28)])
        assert second.num_cached_tokens == 8
        assert len(set(second.block_table)) == 5

    def test_a_refusal_changes_nothing(self, make):
        manager = make(4)
        run(manager, tokens(1, 9))
        before = fingerprint(manager)
        second = manager.start([*tokens(1, 8), *tokens(20, 28)])
        assert not manager.allocate(second, 9)
        assert fingerprint(manager) == before
        assert (second.state, len(second.block_table)) == ("waiting", 0)
        assert run(manager, tokens(1, 9)) == 8

    def test_a_running_sequence_that_is_refused_keeps_what_it_has(self, make):
        manager = make(2)
        sequence = admit(manager, tokens(1, 8))
        manager.append(sequence, [9])
        before = fingerprint(manager)
        assert not manager.allocate(sequence, 1)
        assert fingerprint(manager) == before

    def test_idle_cached_blocks_are_given_up_for_new_content(self, make):
        manager = make(2)
        run(manager, tokens(1, 8))
        assert run(manager, tokens(11, 18)) == 0
        assert manager.stats().evicted_blocks == 2

    def test_slots_may_go_beyond_the_known_tokens_but_commits_may_not(self, make):
        manager = make(4)
        sequence = manager.start(tokens(1, 3))
        assert manager.allocate(sequence, 9)
        assert len(sequence.block_table) == 3
        with pytest.raises(ValueError, match="knows 3"):
            manager.commit(sequence, 4)
        manager.append(sequence, tokens(4, 14))
        with pytest.raises(ValueError, match="allocate"):
            manager.commit(sequence, 13)
        manager.commit(sequence, 12)
        manager.check()

    def test_a_table_only_grows(self, make):
        manager = make(8)
        sequence = admit(manager, tokens(1, 6))
        seen = sequence.block_table[:]
        for token in tokens(7, 20):
            manager.append(sequence, [token])
            assert manager.allocate(sequence, 1)
            manager.commit(sequence, 1)
            assert sequence.block_table[: len(seen)] == seen
            seen = sequence.block_table[:]

    def test_a_view_of_the_old_table_does_not_block_its_growth(self, make):
        manager = make(4)
        sequence = admit(manager, tokens(1, 4))
        view = memoryview(sequence.block_table)
        manager.append(sequence, [5])
        assert manager.allocate(sequence, 1)
        assert len(view) == 1
        assert len(sequence.block_table) == 2

    def test_allocating_nothing_admits_a_sequence_with_its_hits(self, make):
        manager = make(4)
        run(manager, tokens(1, 9))
        sequence = manager.start(tokens(1, 9))
        assert manager.allocate(sequence, 0)
        assert (sequence.num_computed_tokens, len(sequence.block_table)) == (8, 2)
        manager.check()


class TestLayerGroups:
    def test_a_model_with_windows_gets_the_index_that_knows_them(self):
        manager = KVCacheManager(8, 4, windows=(None, 8))
        run(manager, tokens(1, 10))
        sequence = admit(manager, tokens(1, 10))
        assert sequence.num_cached_tokens == 8
        assert [len(table) for table in sequence.block_tables] == [3, 3]

    def test_a_waiting_sequence_has_an_empty_table_for_each_group(self):
        manager = KVCacheManager(8, 4, windows=(None, 8))
        sequence = manager.start(tokens(1, 10))
        assert [list(table) for table in sequence.block_tables] == [[], []]
        manager.allocate(sequence, 10)
        manager.preempt(sequence)
        assert [list(table) for table in sequence.block_tables] == [[], []]


class TestEnds:
    @pytest.mark.parametrize("state", ["waiting", "admitted", "prefilling", "decoding", "preempted"])
    def test_an_abort_in_any_state_gives_everything_back_and_a_second_one_does_nothing(self, make, state):
        manager = make(8)
        sequence = manager.start(tokens(1, 13))
        if state != "waiting":
            assert manager.allocate(sequence, 13)
        if state in {"prefilling", "decoding", "preempted"}:
            manager.commit(sequence, 8)
        if state in {"decoding", "preempted"}:
            manager.commit(sequence, 5)
            manager.append(sequence, [14])
        if state == "preempted":
            manager.preempt(sequence)
        for _ in range(2):
            manager.abort(sequence)
            manager.check()
            assert manager.num_free_blocks == 8
            assert manager.stats().aborted == 1
        with pytest.raises(ValueError, match="finished"):
            manager.allocate(sequence, 1)

    def test_a_preempted_sequence_comes_back_to_its_own_blocks(self, make):
        manager = make(8)
        sequence = admit(manager, tokens(1, 9))
        manager.append(sequence, [10])
        manager.preempt(sequence)
        manager.check()
        assert (sequence.num_computed_tokens, len(sequence.block_table)) == (0, 0)
        assert manager.num_free_blocks == 8
        assert manager.allocate(sequence, 2)
        assert (sequence.num_computed_tokens, sequence.num_cached_tokens) == (8, 0)
        stats = manager.stats()
        assert (stats.requests, stats.queries, stats.hits) == (1, 9, 0)
        assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 10, 8)

    def test_a_prompt_in_chunks_counts_once(self, make):
        manager = make(16)
        sequence = manager.start(tokens(1, 33))
        for chunk in (8, 8, 8, 8, 1):
            assert manager.allocate(sequence, chunk)
            manager.commit(sequence, chunk)
        stats = manager.stats()
        assert (stats.requests, stats.queries, stats.hits) == (1, 33, 0)
        assert sequence.num_cached_tokens == 0

    def test_a_refused_request_is_not_counted(self, make):
        manager = make(2)
        sequence = manager.start(tokens(1, 30))
        for _ in range(3):
            assert not manager.allocate(sequence, 30)
        assert manager.stats().requests == 0

    def test_reset_forgets_all_unless_someone_holds_blocks(self, make):
        manager = make(8)
        sequence = admit(manager, tokens(1, 9))
        assert not manager.reset()
        assert manager.match(tokens(1, 9)) == 8
        manager.finish(sequence)
        assert manager.reset()
        manager.check()
        assert manager.match(tokens(1, 9)) == 0
        assert manager.num_free_blocks == 8


class TestForks:
    def test_a_fork_shares_every_block_until_one_writes_into_a_shared_one(self, make):
        manager = make(8)
        parent = admit(manager, tokens(1, 6))
        child = manager.fork(parent)
        assert child.block_table == parent.block_table
        assert manager.num_free_blocks == 6
        for sequence, token in ((parent, 70), (child, 80)):
            manager.append(sequence, [token])
            assert manager.allocate(sequence, 1)
        assert child.block_table[0] == parent.block_table[0]
        assert child.block_table[1] != parent.block_table[1]
        # The first writer copies; the other then has the block to itself.
        assert manager.take_copies() == [(child.block_table[1], parent.block_table[1])]
        assert manager.take_copies() == []
        for sequence in (parent, child):
            manager.commit(sequence, 1)
            manager.check()
            manager.finish(sequence)
        manager.check()
        assert manager.num_free_blocks == 8

    def test_the_copy_of_a_shared_block_keeps_the_slots_allocated_beyond_it(self, make):
        manager = make(8)
        parent = manager.start(tokens(1, 6))
        assert manager.allocate(parent, 12)
        manager.commit(parent, 6)
        beyond = parent.block_table[2]
        manager.fork(parent)
        assert manager.allocate(parent, 6)
        assert parent.block_table[2] == beyond
        manager.check()

    def test_no_copy_where_the_last_block_is_full(self, make):
        manager = make(8)
        parent = admit(manager, tokens(1, 8))
        child = manager.fork(parent)
        manager.append(child, [9])
        assert manager.allocate(child, 1)
        assert manager.take_copies() == []

    def test_a_copy_that_does_not_fit_is_refused_and_changes_nothing(self, make):
        manager = make(2)
        parent = admit(manager, tokens(1, 6))
        child = manager.fork(parent)
        manager.append(child, [70])
        before = fingerprint(manager)
        assert not manager.allocate(child, 1)
        assert fingerprint(manager) == before
        with pytest.raises(ValueError, match="shared block"):
            manager.commit(child, 1)
        manager.finish(parent)
        assert manager.allocate(child, 1)
        assert manager.take_copies() == []
        manager.commit(child, 1)

    def test_forks_in_flight_end_in_any_order_without_a_loss(self, make):
        manager = make(8)
        parent = admit(manager, tokens(1, 6), write_cache=False)
        family = [parent, manager.fork(parent), manager.fork(parent)]
        family.append(manager.fork(family[1]))
        assert manager.num_free_blocks == 6
        for sequence in (family[1], family[0], family[3], family[2]):
            assert manager.num_free_blocks == 6
            manager.abort(sequence)
            manager.check()
        assert manager.num_free_blocks == 8
