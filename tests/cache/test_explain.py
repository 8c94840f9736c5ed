"""Why a match ends where it does, and how long blocks stay.

The contract of KVCacheManager, in the smallest pool that shows it; block size 4.
"""

from __future__ import annotations

import pytest

from anaphora import Adapter, Namespace
from tests.cache.conftest import Clock, admit, run, tokens
from tests.cache.paged_memory import fingerprint


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
