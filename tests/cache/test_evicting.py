"""What goes first, what quotas and retention keep, and what is forgotten on purpose.

The contract of KVCacheManager, in the smallest pool that shows it; block size 4.
"""

from __future__ import annotations

import pytest

from anaphora import KVCacheManager, Namespace
from anaphora.cache.eviction import Tlru
from anaphora.cache.radix_index import RadixIndex
from tests.cache.conftest import Clock, admit, run, tokens
from tests.cache.paged_memory import fingerprint


class TestEviction:
    def test_tails_go_before_heads(self, make):
        manager = make(5)
        run(manager, tokens(1, 17))
        run(manager, tokens(50, 54))
        assert manager.match(tokens(1, 17)) == 12

    def test_what_was_let_go_first_goes_first(self, make):
        manager = make(6)
        run(manager, tokens(1, 9))
        run(manager, tokens(21, 29))
        run(manager, tokens(1, 9))
        run(manager, tokens(41, 53))
        assert manager.match(tokens(21, 29)) == 0
        assert manager.match(tokens(1, 9)) == 8

    def test_the_half_of_a_prefix_that_nobody_read_again_is_not_refreshed(self, make):
        manager = make(8)
        run(manager, tokens(1, 17))
        run(manager, tokens(21, 29))
        run(manager, [*tokens(1, 8), 99])
        run(manager, tokens(61, 76))
        assert manager.match(tokens(21, 29)) == 8
        assert manager.match(tokens(1, 17)) == 8

    def test_a_shared_prefix_outlives_what_only_one_of_its_readers_needed(self, make):
        manager = make(7)
        first = admit(manager, [*tokens(1, 8), *tokens(21, 25)])
        second = admit(manager, [*tokens(1, 8), *tokens(31, 35)])
        manager.finish(first)
        manager.finish(second)
        run(manager, tokens(61, 76))
        assert manager.match(tokens(1, 9)) == 8
        assert manager.match([*tokens(1, 8), *tokens(31, 35)]) == 12
        assert manager.match([*tokens(1, 8), *tokens(21, 25)]) == 8

    def test_a_pinned_block_is_never_evicted(self, make):
        manager = make(4)
        run(manager, tokens(1, 9))
        reader = manager.start(tokens(1, 9))
        assert manager.allocate(reader, 1)
        other = manager.start(tokens(21, 28))
        assert not manager.allocate(other, 8)
        assert manager.match(tokens(1, 9)) == 8

    def test_a_lookup_does_not_refresh(self, make):
        manager = make(4)
        run(manager, tokens(1, 5))
        run(manager, tokens(21, 25))
        before = fingerprint(manager)
        assert manager.match(tokens(1, 5)) == 4
        assert manager.start(tokens(1, 5)).num_cached_tokens == 4
        assert fingerprint(manager) == before

    def test_emptied_namespaces_are_forgotten(self, make):
        manager = make(2)
        for salt in range(100):
            run(manager, tokens(1, 5), Namespace(salt=str(salt)))
        index = manager._index
        assert len(index._tree.lanes if isinstance(index, RadixIndex) else index._trie.roots) <= 2


class TestQuotas:
    ALICE, BOB = Namespace(salt="alice"), Namespace(salt="bob")

    def test_a_namespace_keeps_no_more_than_its_quota_when_nobody_holds_it(self, make):
        manager = make(16, 4)
        manager.set_quota(self.ALICE, 3)
        run(manager, tokens(1, 21), self.ALICE)
        assert manager.match(tokens(1, 21), self.ALICE) == 12
        assert manager.num_cached_blocks == 3

    def test_one_tenant_cannot_flush_another(self, make):
        manager = make(16, 4)
        manager.set_quota(self.ALICE, 4)
        run(manager, tokens(1, 9), self.ALICE)
        run(manager, tokens(1, 9), self.BOB)
        for first in range(100, 400, 20):
            run(manager, tokens(first, first + 8), self.ALICE)
            manager.check()
        assert manager.match(tokens(1, 9), self.BOB) == 8
        for first in range(100, 400, 20):
            run(manager, tokens(first, first + 16), self.BOB)
        assert manager.match(tokens(380, 388), self.ALICE) == 8

    def test_a_running_sequence_may_go_beyond_the_quota(self, make):
        manager = make(16, 4)
        manager.set_quota(self.ALICE, 1)
        sequence = admit(manager, tokens(1, 33), self.ALICE)
        assert manager.match(tokens(1, 33), self.ALICE) == 32
        manager.finish(sequence)
        assert manager.match(tokens(1, 33), self.ALICE) == 4

    def test_a_quota_can_be_changed_and_lifted_at_any_time(self, make):
        manager = make(16, 4)
        run(manager, tokens(1, 21), self.ALICE)
        manager.set_quota(self.ALICE, 2)
        manager.check()
        assert manager.match(tokens(1, 21), self.ALICE) == 8
        manager.set_quota(self.ALICE, None)
        run(manager, tokens(1, 21), self.ALICE)
        manager.check()
        assert manager.match(tokens(1, 21), self.ALICE) == 20

    def test_lifting_a_quota_loses_nothing_that_is_cached(self, make):
        manager = make(16, 4)
        manager.set_quota(self.ALICE, 3)
        run(manager, tokens(1, 13), self.ALICE)
        manager.set_quota(self.ALICE, None)
        manager.check()
        assert manager.match(tokens(1, 13), self.ALICE) == 12
        run(manager, tokens(100, 163), self.BOB)
        assert manager.match(tokens(1, 13), self.ALICE) == 0

    def test_what_a_quota_keeps_makes_room_when_nothing_else_can(self, make):
        manager = make(8, 4)
        manager.set_quota(self.ALICE, 4)
        manager.set_quota(self.BOB, 4)
        run(manager, tokens(1, 13), self.ALICE)
        run(manager, tokens(1, 17), self.BOB)
        sequence = admit(manager, tokens(50, 75))
        manager.check()
        assert len(sequence.block_table) == 7
        assert manager.match(tokens(1, 17), self.BOB) + manager.match(tokens(1, 13), self.ALICE) <= 4

    def test_a_quota_outlives_a_reset_and_what_is_forgotten(self, make):
        manager = make(16, 4)
        manager.set_quota(self.ALICE, 2)
        run(manager, tokens(1, 13), self.ALICE)
        manager.evict_blocks(range(1, 17))
        manager.check()
        assert manager.num_free_blocks == 16
        run(manager, tokens(1, 13), self.ALICE)
        assert manager.reset()
        manager.check()
        assert manager.num_free_blocks == 16
        run(manager, tokens(1, 13), self.ALICE)
        assert manager.match(tokens(1, 13), self.ALICE) == 8

    def test_what_is_not_to_be_had_is_refused_by_name(self):
        for max_blocks in (-1, 2.5, float("nan"), "many", True):
            with pytest.raises(ValueError, match="max_blocks"):
                KVCacheManager(4).set_quota(self.ALICE, max_blocks)
        with pytest.raises(ValueError, match=r"windows: .* need index='hash'"):
            KVCacheManager(4, index="radix", windows=(None, 8))
        with pytest.raises(ValueError, match="index: expected 'radix' or 'hash'"):
            KVCacheManager(4, index="trie")
        with pytest.raises(ValueError, match="eviction: expected one of lru"):
            KVCacheManager(4, eviction="random")
        with pytest.raises(ValueError, match="eviction"):
            KVCacheManager(4, index="hash", eviction="lfu")
        with pytest.raises(ValueError, match="next_prompt"):
            Tlru(threshold=10, next_prompt=10)


class TestTrimmedLeaves:
    def test_a_leaf_that_lost_its_tail_grows_by_what_is_computed_next(self):
        manager = KVCacheManager(6, 2, index="radix")
        first = manager.start(tokens(1, 12))
        assert manager.allocate(first, 12)
        for _ in range(6):
            manager.commit(first, 2)  # block by block, so that the leaf grows in place
        manager.finish(first)
        run(manager, [91, 92, 93])  # takes the last two blocks
        assert run(manager, [*tokens(1, 8), 77, 78, 79]) == 8
        assert manager.match([*tokens(1, 8), 77, 78, 79]) == 10
        assert manager.match(tokens(1, 12)) == 8

    def test_the_key_of_a_leaf_does_not_keep_more_than_twice_what_is_cached(self):
        manager = KVCacheManager(64, 1, index="radix")
        run(manager, tokens(1, 64))
        for size in range(1, 64):
            run(manager, tokens(1000, 1000 + size))
            assert isinstance(manager._index, RadixIndex)
            assert all(len(node.key) <= 2 * 4 * (len(node.blocks) + 1) for node in manager._index._tree.nodes())


class TestForgetting:
    def test_an_evicted_block_is_not_found_nor_what_extends_it(self, make):
        manager = make(8)
        sequence = admit(manager, tokens(1, 13))
        manager.evict_blocks([sequence.block_table[1]])
        manager.check()
        assert manager.match(tokens(1, 13)) == 4
        assert len(sequence.block_table) == 4
        manager.finish(sequence)
        manager.check()
        assert manager.match(tokens(1, 13)) == 4
        assert manager.num_free_blocks == 8

    def test_what_is_computed_anew_is_found_again_but_nothing_that_was_built_on_what_was_forgotten(self, make):
        manager = make(12)
        sequence = admit(manager, tokens(1, 13))
        manager.evict_blocks([sequence.block_table[0]])
        assert manager.match(tokens(1, 13)) == 0
        assert run(manager, tokens(1, 5)) == 0
        assert manager.match(tokens(1, 13)) == 4
        manager.append(sequence, tokens(14, 20))
        assert manager.allocate(sequence, 7)
        manager.commit(sequence, 7)
        manager.check()
        assert manager.match(tokens(1, 20)) == 4
        manager.finish(sequence)
        manager.check()
        assert run(manager, tokens(1, 9)) == 4
        assert manager.match(tokens(1, 20)) == 8

    def test_descendants_that_nobody_holds_are_forgotten_too(self, make):
        manager = make(12)
        run(manager, tokens(1, 17))
        first = admit(manager, tokens(1, 5))
        manager.evict_blocks([first.block_table[0]])
        manager.check()
        manager.finish(first)
        run(manager, tokens(1, 5))
        assert manager.match(tokens(1, 17)) == 4

    def test_a_half_full_block_that_is_evicted_is_never_published(self, make):
        manager = make(12)
        sequence = admit(manager, tokens(1, 6))
        manager.evict_blocks([sequence.block_table[1]])
        manager.append(sequence, tokens(7, 8))
        assert manager.allocate(sequence, 2)
        manager.commit(sequence, 2)
        assert manager.match(tokens(1, 9)) == 4

    def test_the_copy_of_a_part_of_an_evicted_block_is_never_published(self, make):
        manager = make(12, match_unit=1)
        source = admit(manager, tokens(1, 5))
        reader = manager.start([1, 2, *tokens(91, 95)])
        assert manager.allocate(reader, 5)
        assert reader.num_cached_tokens == 2
        manager.evict_blocks([source.block_table[0]])
        manager.commit(reader, 5)
        assert manager.match([1, 2, *tokens(91, 95)]) == 0

    def test_forgotten_tokens_take_no_memory(self):
        manager = KVCacheManager(8, 4)
        for _ in range(3):
            run(manager, tokens(1, 17))
            manager.invalidate()
        assert isinstance(manager._index, RadixIndex)
        assert len(manager._index._tree.ghosts) == 0

    def test_new_weights_find_nothing_of_the_old_ones(self, make):
        manager = make(16)
        run(manager, tokens(1, 9))
        running = admit(manager, [*tokens(1, 8), *tokens(21, 25)])
        manager.invalidate()
        manager.check()
        assert manager.match(tokens(1, 9)) == 0
        manager.append(running, tokens(26, 30))
        assert manager.allocate(running, 5)
        manager.commit(running, 5)
        manager.finish(running)
        manager.check()
        assert manager.match([*tokens(1, 8), *tokens(21, 30)]) == 0
        assert run(manager, tokens(1, 9)) == 0
        assert run(manager, tokens(1, 9)) == 8
        assert manager.num_free_blocks == 16

    def test_a_sequence_preempted_before_new_weights_starts_anew_and_publishes(self, make):
        manager = make(16)
        sequence = admit(manager, tokens(1, 9))
        manager.preempt(sequence)
        manager.invalidate()
        assert manager.allocate(sequence, 9)
        assert sequence.num_computed_tokens == 0
        manager.commit(sequence, 9)
        assert manager.match(tokens(1, 9)) == 8

    def test_an_id_outside_the_pool_is_refused(self, make):
        with pytest.raises(ValueError, match="between 1 and 4, got 5"):
            make(4).evict_blocks([5])


class TestRetention:
    def test_a_retained_prefix_outlives_what_was_used_after_it(self, make):
        manager = make(8)
        run(manager, tokens(1, 9))
        kept = manager.retain(tokens(1, 9))
        assert kept.num_tokens == 8
        for first in (21, 41, 61):
            run(manager, tokens(first, first + 16))
            manager.check()
        assert manager.match(tokens(1, 9)) == 8

    def test_it_gives_way_when_its_time_is_over(self, make):
        clock = Clock()
        manager = make(8, clock=clock)
        run(manager, tokens(1, 9))
        kept = manager.retain(tokens(1, 9), ttl_s=300)
        clock.now = 200
        assert kept.renew(300)
        clock.now = 499
        assert kept.is_active
        clock.now = 500
        assert not kept.is_active
        assert not kept.renew(300)
        assert manager.match(tokens(1, 9)) == 8
        run(manager, tokens(21, 52))
        assert manager.match(tokens(1, 9)) == 0

    def test_running_sequences_come_first_and_low_priority_gives_way_before_high(self, make):
        manager = make(8, max_retained_share=1.0)
        for first, priority in ((1, 1), (21, 0), (41, 1)):
            run(manager, tokens(first, first + 4))
            manager.retain(tokens(first, first + 4), priority=priority)
        assert (manager.num_free_blocks, manager.num_retained_blocks) == (8, 3)
        big = manager.start(tokens(61, 84))
        assert manager.allocate(big, 24)
        assert [manager.match(tokens(first, first + 4)) for first in (1, 21, 41)] == [4, 0, 4]
        assert manager.allocate(big, 28)
        assert [manager.match(tokens(first, first + 4)) for first in (1, 21, 41)] == [0, 0, 4]
        manager.check()
        assert manager.num_free_blocks == 1

    def test_a_refusal_that_giving_way_would_not_mend_changes_nothing(self, make):
        manager = make(8, max_retained_share=1.0)
        run(manager, tokens(1, 9))
        manager.retain(tokens(1, 9))
        before = fingerprint(manager)
        assert not manager.allocate(manager.start(tokens(61, 99)), 36)
        assert fingerprint(manager) == before
        assert manager.num_retained_blocks == 2

    def test_its_own_hit_is_not_given_away_to_make_room_for_it(self, make):
        manager = make(4, max_retained_share=1.0)
        run(manager, tokens(1, 9))
        manager.retain(tokens(1, 9))
        run(manager, tokens(21, 25))
        manager.retain(tokens(21, 25))
        sequence = manager.start(tokens(1, 16))
        assert manager.allocate(sequence, 8)
        assert sequence.num_cached_tokens == 8
        manager.check()

    def test_the_share_bounds_what_is_kept_and_the_longest_beginning_that_fits_is_kept(self, make):
        manager = make(16, max_retained_share=0.25)
        run(manager, tokens(1, 25))
        assert manager.retain(tokens(1, 25)).num_tokens == 16
        assert manager.num_retained_blocks == 4
        # What is kept already costs nothing again.
        assert manager.retain(tokens(1, 13)).num_tokens == 12
        run(manager, tokens(41, 45))
        assert manager.retain(tokens(41, 45)).num_tokens == 0
        manager.check()

    def test_what_has_run_out_of_time_takes_no_share(self, make):
        now = [0.0]
        manager = make(8, clock=lambda: now[0])
        run(manager, tokens(1, 13))
        run(manager, tokens(21, 33))
        manager.retain(tokens(1, 12), ttl_s=5)
        assert manager.retain(tokens(21, 32)).num_tokens == 4
        now[0] = 5.0
        assert manager.retain(tokens(21, 32)).num_tokens == 12
        assert manager.num_retained_blocks == 3
        manager.check()

    def test_releasing_gives_back_exactly_what_was_kept(self, make):
        manager = make(8)
        run(manager, tokens(1, 9))
        kept = manager.retain(tokens(1, 9))
        for _ in range(2):
            kept.release()
            manager.check()
            assert (manager.num_free_blocks, manager.num_cached_blocks, manager.num_retained_blocks) == (8, 2, 0)

    def test_reset_and_new_weights_forget_what_was_retained(self, make):
        for forget in ("reset", "invalidate"):
            manager = make(8)
            run(manager, tokens(1, 9))
            kept = manager.retain(tokens(1, 9))
            getattr(manager, forget)()
            manager.check()
            assert not kept.is_active
            assert manager.match(tokens(1, 9)) == 0
            assert manager.num_free_blocks == 8

    def test_wrong_arguments_are_named(self, make):
        with pytest.raises(ValueError, match="ttl_s"):
            make(4).retain([1], ttl_s=0)
        with pytest.raises(ValueError, match="max_retained_share"):
            make(4, max_retained_share=1.5)
