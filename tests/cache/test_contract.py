"""The contract of KVCacheManager, clause by clause, in the smallest pool that shows it. Block size 4 throughout."""

from __future__ import annotations

from array import array

import pytest

from anaphora import Adapter, KVCacheManager, Namespace
from anaphora.cache.eviction import Tlru
from anaphora.cache.radix_index import RadixIndex
from anaphora.identity import BlockDigests, MediaSpan, PromptEmbeds, VllmDigests
from tests.cache.conftest import admit, run
from tests.cache.paged_memory import fingerprint


def tokens(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


IMAGE, OTHER_IMAGE = "sha256:aa", "sha256:bb"
PLACEHOLDER = 99


class TestHits:
    def test_an_equal_prompt_hits_every_whole_block_but_leaves_the_last_token_to_compute(self, make):
        for length, expected in [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8)]:
            manager = make(8)
            assert run(manager, tokens(1, length)) == 0
            assert run(manager, tokens(1, length)) == expected

    def test_a_divergence_inside_a_block_loses_that_block_only(self, make):
        manager = make(16)
        run(manager, tokens(1, 13))
        assert run(manager, [*tokens(1, 7), 99, *tokens(9, 13)]) == 4

    def test_a_longer_prompt_hits_what_a_shorter_one_left_and_the_other_way_round(self, make):
        manager = make(16)
        run(manager, tokens(1, 9))
        assert run(manager, tokens(1, 17)) == 8
        assert run(manager, tokens(1, 9)) == 8
        assert run(manager, tokens(1, 30)) == 16

    def test_only_committed_blocks_are_found(self, make):
        manager = make(16)
        first = manager.start(tokens(1, 17))
        assert manager.allocate(first, 17)
        assert manager.match(tokens(1, 17)) == 0
        manager.commit(first, 8)
        assert manager.match(tokens(1, 17)) == 8
        manager.commit(first, 3)
        assert manager.match(tokens(1, 17)) == 8
        manager.check()

    def test_generated_tokens_are_found_by_the_next_turn(self, make):
        manager = make(16)
        turn = admit(manager, tokens(1, 6))
        for token in tokens(7, 12):
            manager.append(turn, [token])
            assert manager.allocate(turn, 1)
            manager.commit(turn, 1)
            manager.check()
        manager.finish(turn)
        assert manager.match([*tokens(1, 12), 50, 51]) == 12

    def test_the_number_of_cached_tokens_is_what_a_lookup_finds_until_admission_and_then_final(self, make):
        manager = make(16)
        sequence = manager.start(tokens(1, 13))
        assert sequence.num_cached_tokens == 0
        other = admit(manager, tokens(1, 9))
        assert sequence.num_cached_tokens == 8
        assert manager.allocate(sequence, 5)
        assert sequence.num_cached_tokens == sequence.num_computed_tokens == 8
        manager.commit(sequence, 5)
        manager.finish(other)
        assert sequence.num_cached_tokens == 8

    def test_read_cache_off_computes_everything_and_still_leaves_it_for_others(self, make):
        manager = make(16)
        assert run(manager, tokens(1, 9)) == 0
        assert run(manager, tokens(1, 9), read_cache=False) == 0
        assert run(manager, tokens(1, 9)) == 8

    def test_write_cache_off_leaves_nothing_behind(self, make):
        manager = make(16)
        assert run(manager, tokens(1, 9), write_cache=False) == 0
        assert run(manager, tokens(1, 9)) == 0
        assert manager.num_free_blocks == 16


class TestIdentity:
    def test_unequal_namespaces_never_match(self, make):
        manager = make(64)
        namespaces = [
            Namespace(),
            Namespace(salt="a"),
            Namespace(salt="b"),
            Namespace(model="a"),
            Namespace(model="b"),
            Namespace(generation=1),
            Namespace(adapter=Adapter("aa", name="s")),
            Namespace(adapter=Adapter("bb", name="s")),
            Namespace(adapter=Adapter("aa", name="s"), salt="a"),
        ]
        for namespace in namespaces:
            assert run(manager, tokens(1, 9), namespace) == 0
        for namespace in namespaces:
            assert run(manager, tokens(1, 9), namespace) == 8

    def test_an_adapter_is_its_digest_whatever_it_is_called(self, make):
        manager = make(16)
        run(manager, tokens(1, 9), Namespace(adapter=Adapter("aa", name="one")))
        assert run(manager, tokens(1, 9), Namespace(adapter=Adapter("aa", name="two"))) == 8

    def test_an_empty_salt_is_refused(self):
        with pytest.raises(ValueError, match="salt"):
            Namespace(salt="")

    def test_equal_blocks_after_unequal_ones_are_other_prefixes(self, make):
        manager = make(16)
        run(manager, [*tokens(1, 4), *tokens(50, 54)])
        assert run(manager, [*tokens(11, 14), *tokens(50, 54)]) == 0
        assert run(manager, tokens(50, 54)) == 0

    def test_a_forged_digest_costs_a_miss_and_never_serves_another_prefix(self):
        class OneName(BlockDigests):
            def chain(self, parent, tokens, block_size, extras=None):
                return [b"the same for all"] * (len(tokens) // 4 // block_size)

        manager = KVCacheManager(16, 4, index="hash", digests=OneName())
        run(manager, [*tokens(1, 4), *tokens(50, 54)])
        run(manager, tokens(11, 15))
        assert manager.match([*tokens(11, 14), *tokens(50, 54)]) == 4
        assert manager.match(tokens(50, 54)) == 0
        assert manager.match(tokens(1, 5), Namespace(salt="a")) == 0
        assert manager.match([*tokens(1, 4), *tokens(50, 54)]) == 8


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


class TestHitsInsideABlock:
    def test_by_default_hits_are_whole_blocks(self, make):
        manager = make(16)
        run(manager, tokens(1, 17))
        assert run(manager, [*tokens(1, 6), *tokens(105, 117)]) == 4

    def test_a_hit_ends_at_the_last_equal_unit_and_its_part_of_a_block_is_copied(self, make):
        manager = make(16, match_unit=2)
        first = admit(manager, tokens(1, 17))
        second = manager.start([*tokens(1, 7), *tokens(105, 117)])
        assert second.num_cached_tokens == 6
        assert manager.allocate(second, 14)
        assert second.num_computed_tokens == second.num_cached_tokens == 6
        assert second.block_table[0] == first.block_table[0]
        assert manager.take_copies() == [(first.block_table[1], second.block_table[1])]
        manager.commit(second, 14)
        manager.check()
        assert manager.match([*tokens(1, 7), *tokens(105, 117)]) == 18
        assert manager.match(tokens(1, 17)) == 16

    def test_the_first_block_can_be_hit_in_part(self, make):
        manager = make(16, match_unit=1)
        run(manager, tokens(1, 9))
        assert run(manager, [1, 2, 3, 99, 98]) == 3
        assert manager.stats().hits == 3

    def test_of_several_branches_the_one_that_goes_on_longest_is_taken(self, make):
        manager = make(16, match_unit=1)
        run(manager, [*tokens(1, 4), 50, 51, 52, 53, 54])
        run(manager, [*tokens(1, 4), 50, 51, 62, 63, 64])
        assert manager.match([*tokens(1, 4), 50, 51, 52, 99]) == 7

    def test_the_last_token_is_computed_still(self, make):
        manager = make(16, match_unit=1)
        run(manager, tokens(1, 9))
        assert manager.match(tokens(1, 8)) == 7
        assert manager.match([1]) == 0

    def test_media_match_in_whole_blocks_only(self, make):
        manager = make(16, match_unit=1)
        image = [MediaSpan(5, 6, IMAGE)]
        prompt = [*tokens(1, 5), *[PLACEHOLDER] * 6, *tokens(6, 9)]
        run(manager, prompt, media=image)
        assert manager.match(prompt) == 4
        assert manager.match([*prompt[:11], 99, 99], media=image) == 8

    def test_a_unit_that_does_not_divide_the_block_is_refused(self, make):
        with pytest.raises(ValueError, match="match_unit"):
            make(4, match_unit=3)


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


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


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


class TestMedia:
    def test_equal_placeholders_of_unequal_images_never_match(self, make):
        manager = make(32)
        prompt = [*tokens(1, 6), *[PLACEHOLDER] * 4, *tokens(7, 9)]
        for image, expected in ((IMAGE, 0), (OTHER_IMAGE, 4), (IMAGE, 12)):
            assert run(manager, prompt, media=[MediaSpan(6, 4, image)]) == expected

    def test_a_prompt_with_an_image_shares_the_text_before_it_with_those_without(self, make):
        manager = make(32)
        text = tokens(1, 21)
        run(manager, text)
        prompt = [*tokens(1, 9), *[PLACEHOLDER] * 8, *tokens(1, 4)]
        assert run(manager, prompt, media=[MediaSpan(9, 8, IMAGE)]) == 8
        assert run(manager, prompt) == 8
        assert run(manager, text) == 20

    def test_placeholders_without_an_image_are_plain_tokens(self, make):
        manager = make(32)
        prompt = [PLACEHOLDER] * 17
        run(manager, prompt)
        assert run(manager, prompt, media=[MediaSpan(4, 8, IMAGE)]) == 4
        assert run(manager, prompt) == 16

    def test_an_image_matches_only_at_its_place(self, make):
        manager = make(64)
        for offset in (4, 5):
            assert run(manager, [PLACEHOLDER] * 17, media=[MediaSpan(offset, 6, IMAGE)]) == (0 if offset == 4 else 4)
        assert run(manager, [PLACEHOLDER] * 17, media=[MediaSpan(5, 6, IMAGE)]) == 16
        assert run(manager, [PLACEHOLDER] * 17, media=[MediaSpan(4, 3, IMAGE), MediaSpan(7, 3, IMAGE)]) == 4

    def test_a_long_image_matches_up_to_where_its_prompts_part(self, make):
        manager = make(64)
        image = MediaSpan(2, 30, IMAGE)
        run(manager, [1, 2, *[PLACEHOLDER] * 30, *tokens(3, 7)], media=[image])
        assert run(manager, [1, 2, *[PLACEHOLDER] * 30, *tokens(13, 17)], media=[image]) == 32
        # The same item in the middle of a longer one: blocks 1 to 4 hold the same rows, block 5 on does not.
        longer = MediaSpan(2, 40, OTHER_IMAGE)
        assert run(manager, [1, 2, *[PLACEHOLDER] * 40, 3], media=[longer]) == 0

    def test_a_request_cut_inside_an_image_is_found_by_the_whole_one(self, make):
        manager = make(64)
        image = MediaSpan(0, 32, IMAGE)
        sequence = manager.start([PLACEHOLDER] * 32, media=[image])
        assert manager.allocate(sequence, 10)
        manager.commit(sequence, 10)
        manager.check()
        assert manager.match([*[PLACEHOLDER] * 32, 1], media=[image]) == 8
        assert manager.allocate(sequence, 22)
        manager.commit(sequence, 22)
        manager.check()
        assert manager.match([*[PLACEHOLDER] * 32, 1], media=[image]) == 32

    def test_rows_of_embeddings_match_block_by_block(self, make):
        manager = make(64)
        rows = bytes(range(64))
        changed = rows[:40] + bytes([255]) + rows[41:]
        assert run(manager, [0] * 17, media=[PromptEmbeds(0, rows, 4)]) == 0
        assert run(manager, [0] * 17, media=[PromptEmbeds(0, rows, 4)]) == 16
        assert run(manager, [0] * 17, media=[PromptEmbeds(0, changed, 4)]) == 8
        assert run(manager, [0] * 17) == 0

    def test_an_item_outside_the_prompt_is_refused_by_name(self, make):
        with pytest.raises(ValueError, match=r"media\[0\]"):
            make(4).start([1, 2, 3], media=[MediaSpan(2, 2, IMAGE)])


class TestExplain:
    def test_a_prompt_that_is_served_whole(self, make):
        manager = make(8)
        run(manager, tokens(1, 9))
        why = manager.explain(tokens(1, 9))
        assert (why.reason, why.num_cached_tokens, why.position) == ("complete", 8, 8)

    def test_nothing_is_cached(self, make):
        why = make(8).explain(tokens(1, 9))
        assert (why.reason, why.num_cached_tokens, why.position) == ("nothing_cached", 0, 0)

    def test_another_token_stands_there(self, make):
        manager = make(8)
        run(manager, tokens(1, 17))
        why = manager.explain([*tokens(1, 6), 99, *tokens(8, 17)])
        assert (why.reason, why.num_cached_tokens) == ("diverged", 4)
        assert (why.position, why.prompt_token, why.cached_token) == (6, 99, 7)
        assert why.num_below_block == 2

    def test_of_several_branches_the_closest_one_is_shown(self, make):
        manager = make(8)
        run(manager, [*tokens(1, 4), 50, 51, 52, 53, 54])
        run(manager, [*tokens(1, 4), 60, 61, 62, 63, 64])
        why = manager.explain([*tokens(1, 4), 60, 61, 99, 63, 64])
        assert (why.position, why.prompt_token, why.cached_token) == (6, 99, 62)

    def test_what_comes_next_was_evicted(self, make):
        manager = make(4)
        run(manager, tokens(1, 9))
        run(manager, tokens(21, 33))
        assert manager.match(tokens(1, 9)) == 0
        assert manager.explain(tokens(1, 9)).reason == "evicted"
        assert manager.explain(tokens(5, 13)).reason != "evicted"
        assert manager.explain(tokens(1, 9), Namespace(salt="x")).reason == "nothing_cached"

    def test_the_tail_of_a_prompt_was_evicted(self, make):
        manager = make(5)
        run(manager, tokens(1, 17))
        run(manager, tokens(50, 54))
        why = manager.explain(tokens(1, 17))
        assert (why.reason, why.num_cached_tokens, why.position) == ("evicted", 12, 12)

    def test_nobody_computed_what_comes_next(self, make):
        manager = make(8)
        run(manager, tokens(1, 9))
        assert manager.explain(tokens(1, 30)).reason == "not_cached"

    def test_it_is_cached_for_others_only_and_their_salt_is_not_told(self, make):
        manager = make(16)
        run(manager, tokens(1, 9), Namespace(salt="secret"))
        run(manager, tokens(1, 5), Namespace(adapter=Adapter("aa")))
        why = manager.explain(tokens(1, 9))
        assert why.reason == "other_namespace"
        assert [(e.fields, e.num_tokens) for e in why.elsewhere] == [(("salt",), 8), (("adapter",), 4)]
        assert "secret" not in repr(why)

    def test_a_short_prompt_is_equal_but_does_not_fill_a_block(self, make):
        manager = make(16, block_size=8)
        run(manager, tokens(1, 30))
        why = manager.explain(tokens(1, 16))
        assert (why.reason, why.num_cached_tokens) == ("complete", 8)
        run(manager, tokens(41, 70))
        why = manager.explain([*tokens(41, 45), 99, 98, 97, 96])
        assert (why.reason, why.num_below_block, why.position) == ("diverged", 5, 5)

    def test_asking_changes_nothing(self, make):
        manager = make(4)
        run(manager, tokens(1, 9))
        run(manager, tokens(21, 33), Namespace(salt="a"))
        before = fingerprint(manager)
        manager.explain(tokens(1, 9))
        assert fingerprint(manager) == before


class TestResidency:
    def test_times_are_counted_in_blocks_from_stored_to_evicted_and_from_let_go_to_held(self, make):
        clock = Clock()
        manager = make(4, clock=clock, measure_residency=True)
        sequence = admit(manager, tokens(1, 9))
        clock.now = 3
        manager.finish(sequence)
        clock.now = 8
        again = admit(manager, tokens(1, 9))
        assert manager.residency().reuse_gap_s.buckets() == [(8.0, 2)]
        clock.now = 9
        manager.finish(again)
        clock.now = 109
        run(manager, tokens(21, 36))
        residency = manager.residency()
        assert residency.idle_before_eviction_s.buckets() == [(128.0, 2)]
        assert residency.lifetime_s.buckets() == [(128.0, 2)]
        assert residency.reuse_gap_s.total == 2

    def test_a_snapshot_clears_nothing_and_does_not_change_afterwards(self, make):
        manager = make(4, clock=Clock(), measure_residency=True)
        run(manager, tokens(1, 5))
        run(manager, tokens(1, 5))
        first = manager.residency()
        run(manager, tokens(1, 5))
        assert (first.reuse_gap_s.total, manager.residency().reuse_gap_s.total) == (1, 2)

    def test_what_is_forgotten_on_purpose_is_not_counted_as_evicted(self, make):
        manager = make(4, clock=Clock(), measure_residency=True)
        run(manager, tokens(1, 9))
        manager.invalidate()
        run(manager, tokens(1, 16))
        assert manager.residency().lifetime_s.total == 0

    def test_without_measuring_it_says_how_to(self, make):
        with pytest.raises(ValueError, match="measure_residency=True"):
            make(4).residency()


class TestInput:
    @pytest.mark.parametrize(
        ("arguments", "field"),
        [({"num_blocks": 0}, "num_blocks"), ({"block_size": 0}, "block_size"), ({"index": "tree"}, "index")],
    )
    def test_a_wrong_argument_is_named(self, arguments, field):
        with pytest.raises(ValueError, match=field):
            KVCacheManager(**{"num_blocks": 4, **arguments})

    def test_an_empty_prompt_is_refused(self, make):
        with pytest.raises(ValueError, match="at least one token"):
            make(4).start([])

    def test_every_kind_of_buffer_is_the_same_prompt(self, make):
        manager = make(16)
        ids = tokens(1, 9)
        run(manager, ids)
        for same in (tuple(ids), array("i", ids), array("q", ids), array("i", ids).tobytes(), iter(ids)):
            assert manager.match(same) == 8

    def test_a_wrong_argument_or_state_is_refused_before_anything_changes(self, make):
        manager, other = make(8), make(8)
        waiting = manager.start(tokens(1, 5))
        running = admit(manager, tokens(21, 25))
        before = fingerprint(manager)
        for call in (
            lambda: manager.allocate(waiting, 1.5),
            lambda: manager.allocate(running, float("nan")),
            lambda: manager.commit(running, 0.5),
            lambda: manager.commit(waiting, 0),
            lambda: other.allocate(waiting, 5),
            lambda: manager.retain([1], ttl_s=float("nan")),
            lambda: manager.retain([1], priority="high"),
            lambda: make(True),
            lambda: make(4, match_unit=1.5),
            lambda: make(4, clock=5),
            lambda: make(4, eviction=5),
        ):
            with pytest.raises(ValueError, match=r"expected|running|another"):
                call()
        with pytest.raises(TypeError, match="namespace"):
            manager.start([1], "tenant")
        assert fingerprint(manager) == before
        manager.check()
        other.check()

    def test_a_wrong_type_is_refused_by_the_name_of_its_field(self, make):
        manager = make(8)
        for field, call in (
            ("num_blocks", lambda: KVCacheManager(2**31)),
            ("index", lambda: KVCacheManager(4, index=["radix"])),
            ("digests", lambda: make(4, digests="sha256")),
            ("max_retained_share", lambda: make(4, max_retained_share="half")),
            ("windows", lambda: KVCacheManager(4, windows=8)),
            ("window_retention", lambda: KVCacheManager(4, 4, windows=(None, 8), window_retention=4.0)),
            ("priority", lambda: manager.start([1], priority="high")),
            ("media", lambda: manager.start([1], media=5)),
            ("ttl_s", lambda: manager.retain([1], ttl_s="a day")),
            ("block_ids", lambda: manager.evict_blocks(5)),
            ("block_ids", lambda: manager.evict_blocks([1.5])),
            ("namespace", lambda: manager.set_quota("tenant", 1)),
        ):
            with pytest.raises((ValueError, TypeError), match=field):
                call()
        assert manager.match([1, 2, 3], media=iter(())) == 0
        manager.check()

    @pytest.mark.parametrize(
        "call",
        [
            lambda manager, sequence: manager.allocate(sequence, 1),
            lambda manager, sequence: manager.commit(sequence, 1),
            lambda manager, sequence: manager.append(sequence, [1]),
            lambda manager, sequence: manager.preempt(sequence),
            lambda manager, sequence: manager.fork(sequence),
            lambda manager, sequence: manager.finish(sequence),
            lambda manager, sequence: manager.abort(sequence),
            lambda manager, sequence: manager.lookup(sequence),
            lambda manager, sequence: manager.block_digests(sequence),
        ],
        ids=["allocate", "commit", "append", "preempt", "fork", "finish", "abort", "lookup", "block_digests"],
    )
    def test_another_managers_sequence_is_refused_whatever_its_state(self, make, call):
        manager, other = make(8), make(8)
        run(other, tokens(1, 8))
        running, waiting = admit(manager, tokens(1, 5)), manager.start(tokens(1, 9))
        for sequence in (running, waiting):
            before = fingerprint(manager), fingerprint(other)
            with pytest.raises(ValueError, match="another manager"):
                call(other, sequence)
            assert (fingerprint(manager), fingerprint(other)) == before

    def test_what_events_could_not_name_is_refused_at_the_start(self, make):
        manager = make(8, events=True, digests=VllmDigests("sha256_cbor"))
        rows = PromptEmbeds(2, b"ab" * 2, 2)
        for namespace, media, field in (
            (Namespace(adapter=Adapter("sha256:aa")), (), "adapter.name"),
            (Namespace(salt="\ud800"), (), "salt"),
            (Namespace(), (rows,), "media"),
        ):
            with pytest.raises(ValueError, match=field):
                manager.start(tokens(1, 9), namespace, media=media)
        manager.check()

    def test_only_a_running_sequence_can_be_preempted(self, make):
        manager = make(4)
        with pytest.raises(ValueError, match="running"):
            manager.preempt(manager.start([1]))
