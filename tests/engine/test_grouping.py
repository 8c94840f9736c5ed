"""Groups of sequences that begin with the same blocks: all that are worth it, nested or apart, outer ones first."""

from __future__ import annotations

from array import array
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from anaphora.engine.grouping import shared_prefixes


def groups(*tables, block_size=1, min_tokens=1):
    return shared_prefixes([array("i", table) for table in tables], block_size, min_tokens)


def num_common(tables):
    return next((i for i, ids in enumerate(zip(*tables, strict=False)) if len(set(ids)) > 1), min(map(len, tables)))


def test_groups_come_in_levels_outer_ones_first():
    tables = [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7], [1, 2, 8], [9]
    assert groups(*tables) == [((0, 1, 2, 3), 2), ((0, 1), 4)]


def test_members_may_stand_anywhere_in_the_step():
    assert groups([1, 2], [5], [1, 3], [6], [1, 2]) == [((0, 2, 4), 1), ((0, 4), 2)]


def test_a_table_that_another_one_begins_with_is_shared_whole():
    assert groups([1, 2], [1, 2, 3]) == [((0, 1), 2)]


def test_what_is_equal_further_on_counts_for_nothing():
    assert groups([1, 2, 3], [4, 2, 3]) == []


def test_nothing_is_shared_by_none_or_one():
    assert groups() == []
    assert groups([1, 2, 3]) == []
    assert groups([], [1]) == []


def test_a_group_must_add_min_tokens_to_the_one_around_it():
    tables = [*range(1, 7)], [*range(1, 7)], [*range(1, 5)], [1, 2, 3, 4, 9]
    assert groups(*tables, block_size=16, min_tokens=33) == [((0, 1, 2, 3), 4)]
    assert groups(*tables, block_size=16, min_tokens=32) == [((0, 1, 2, 3), 4), ((0, 1), 6)]
    assert groups(*tables, block_size=16, min_tokens=65) == [((0, 1), 6)]


def test_ids_are_compared_whole_whatever_their_bytes():
    assert groups([256, 1], [256, 2], [1, 2]) == [((0, 1), 1)]


tables_with_common_starts = st.lists(st.lists(st.integers(1, 3), max_size=8), max_size=8)


@given(tables=tables_with_common_starts, min_tokens=st.integers(1, 4))
def test_every_group_has_in_common_what_it_says_and_each_two_worth_it_are_in_one(tables, min_tokens):
    found = groups(*tables, min_tokens=min_tokens)
    for members, num_blocks in found:
        assert list(members) == sorted(set(members))
        assert len(members) >= 2
        assert num_common([tables[i] for i in members]) == num_blocks
    for (left, _), (right, _) in combinations(found, 2):
        assert not set(left) & set(right) or set(right) < set(left)
    for i, j in combinations(range(len(tables)), 2):
        best = max((num_blocks for members, num_blocks in found if {i, j} <= set(members)), default=0)
        assert best <= num_common([tables[i], tables[j]]) < best + min_tokens
