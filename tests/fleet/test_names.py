"""Names of blocks, entered only as far as they are asked for."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.fleet.names import MAX_RUN, BlockNames


def names_of(first: int, count: int) -> tuple[bytes, ...]:
    return tuple(b"%d" % i for i in range(first, first + count))


def taken(names: BlockNames, asked: tuple[bytes, ...]) -> list[int]:
    spans, unknown = names.take(asked)
    assert not unknown
    names.check()
    return sorted(place + i for place, count in spans for i in range(count))


@pytest.mark.parametrize("count", [1, 2, MAX_RUN, MAX_RUN + 1, 3 * MAX_RUN])
def test_a_run_goes_whole_backwards_or_from_its_end(count: int) -> None:
    run = names_of(0, count)
    for asked in (run, run[::-1]):
        names = BlockNames()
        names.add(run, 100, 1, is_new=True)
        assert names.count == count
        assert taken(names, asked) == list(range(100, 100 + count))
        assert names.count == 0
    names = BlockNames()
    names.add(run, 100, 1, is_new=True)
    for i in reversed(range(count)):
        assert names.place(b"%d" % i) == 100 + i
        assert taken(names, (b"%d" % i,)) == [100 + i]
        assert names.place(b"%d" % i) is None


def test_any_block_of_a_run_is_found_and_can_go() -> None:
    names = BlockNames()
    names.add(names_of(0, 40), 100, 2, is_new=True)
    assert names.place(b"17") == 134
    assert taken(names, (b"3",)) == [106, 107]
    assert names.place(b"3") is None
    assert names.place(b"39") == 178
    assert names.count == 39


def test_a_name_that_was_stored_twice_is_taken_twice() -> None:
    names = BlockNames()
    names.add(names_of(0, 9), 100, 1, is_new=True)
    names.add(names_of(4, 9), 104, 1, is_new=False)
    assert names.count == 13
    assert taken(names, names_of(4, 9)) == [109, 110, 111, 112]
    assert taken(names, names_of(0, 9)) == list(range(100, 109))
    assert names.count == 0


def test_unknown_names_are_told() -> None:
    names = BlockNames()
    names.add(names_of(0, 3), 0, 1, is_new=True)
    spans, unknown = names.take((b"x", b"1", b"y"))
    assert (spans, unknown) == ([(1, 1)], [b"x", b"y"])


def test_names_whose_blocks_are_gone_are_lost_and_their_successors_are_not() -> None:
    names = BlockNames()
    names.add(names_of(0, 10), 100, 1, is_new=True)
    assert taken(names, (b"9",)) == [109]
    names.add((b"9",), 500, 1, is_new=True)
    names.lose(lambda place: place < 105 or place == 500)
    names.check()
    assert dict(names.items()) == {b"%d" % i: 100 + i for i in range(5)} | {b"9": 500}


steps = st.lists(
    st.tuples(st.sampled_from(["store", "take", "back", "find"]), st.integers(0, 30), st.integers(1, 12)), max_size=30
)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_it_is_a_table_with_copies(plan: list[tuple[str, int, int]]) -> None:
    names = BlockNames()
    copies: Counter[bytes] = Counter()
    for what, first, count in plan:
        run = names_of(first, count)
        if what == "store":
            is_new = not any(copies[name] for name in run)
            names.add(run, first, 1, is_new=is_new)
            copies.update(run)
        elif what == "find":
            assert names.place(run[0]) == (first if copies[run[0]] else None)
        else:
            spans, unknown = names.take(run if what == "take" else run[::-1])
            gone = sorted(b"%d" % (place + i) for place, size in spans for i in range(size))
            assert gone == sorted(name for name in run if copies[name] == 1)
            assert sorted(unknown) == sorted(name for name in run if not copies[name])
            copies = +Counter({name: num - (name in run) for name, num in copies.items()})
        names.check()
        assert names.count == len(copies)
        assert sorted(name for name, _ in names.items()) == sorted(copies)
