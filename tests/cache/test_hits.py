"""What a prompt is served: whole blocks, parts of blocks, and what keeps prefixes apart.

The contract of KVCacheManager, in the smallest pool that shows it; block size 4.
"""

from __future__ import annotations

import pytest

from anaphora import Adapter, KVCacheManager, Namespace
from anaphora.identity import BlockDigests, MediaSpan
from tests.cache.conftest import admit, run, tokens

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
