from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.tokens import MAX_TOKEN_ID, MIN_TOKEN_ID, pack, unpack

pytestmark = pytest.mark.usefixtures("each_form")

IDS = st.lists(st.integers(MIN_TOKEN_ID, MAX_TOKEN_ID), max_size=3000)


@given(IDS)
def test_packing_and_unpacking_give_the_same_ids(ids):
    assert list(unpack(pack(ids))) == ids


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_every_kind_of_source_packs_to_the_same_bytes(ids):
    expected = array("i", ids).tobytes()
    buffers = [array("i", ids), array("q", ids), array("I", ids), expected, bytearray(expected)]
    for source in [ids, tuple(ids), iter(ids), *buffers, memoryview(buffers[0]), memoryview(expected)]:
        assert pack(source) == expected


def test_bytes_are_taken_without_a_copy():
    packed = array("i", [1, 2, 3]).tobytes()
    assert pack(packed) is packed


def test_numpy_arrays_are_taken_as_they_are():
    np = pytest.importorskip("numpy")
    for dtype in ("int32", "int64", "uint16"):
        assert pack(np.array([1, 2, 3], dtype)) == pack([1, 2, 3])
    assert pack(np.arange(10, dtype=np.int32)[::2]) == pack([0, 2, 4, 6, 8])
    assert pack(np.array([7], np.int64)[0:1]) == pack([np.int64(7)]) == pack([7])


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 2**63])
def test_an_id_outside_int32_is_refused_with_its_place(wrong):
    with pytest.raises(ValueError, match=rf"token_ids\[2\]: {wrong} does not fit int32"):
        pack([1, 2, wrong])


@pytest.mark.parametrize("wrong", ["abc", 5, None, 1.5, [1, "a"], [1.0], array("d", [1.0]), [[1]]])
def test_what_is_no_run_of_integers_is_refused_by_name(wrong):
    with pytest.raises(TypeError, match="token_ids"):
        pack(wrong)


@pytest.mark.parametrize("wrong", [b"abc", bytearray(5)])
def test_bytes_that_are_no_whole_number_of_ids_are_refused(wrong):
    with pytest.raises(ValueError, match="whole number"):
        pack(wrong)


def test_more_than_one_dimension_is_refused():
    np = pytest.importorskip("numpy")
    with pytest.raises(ValueError, match="one dimension"):
        pack(np.zeros((2, 2), np.int32))
