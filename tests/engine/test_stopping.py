"""When an output ends, and which of its text is certain already."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.engine.request import SamplingParams
from anaphora.engine.stopping import OutputStream, StopStrings

if TYPE_CHECKING:
    from collections.abc import Iterable


class Spelling:
    """A detokenizer that spells token i as the i-th of some pieces, and holds the last back to the flush."""

    def __init__(self, *pieces: str, held_back: str = "") -> None:
        self.pieces = pieces
        self.held_back = held_back

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return self.held_back


def stream(pieces: Iterable[str], *stops: str) -> tuple[list[str], bool]:
    """What is passed on per piece, the flush last unless a stop string ended it."""
    strings = StopStrings(stops)
    passed: list[str] = []
    for piece in pieces:
        text, is_stopped = strings.push(piece)
        passed.append(text)
        if is_stopped:
            return passed, True
    return [*passed, strings.flush()], False


def test_without_stop_strings_text_passes_at_once() -> None:
    assert stream(["ab", "", "c"]) == (["ab", "", "c", ""], False)


def test_text_ends_before_the_stop_string() -> None:
    assert stream(["one STOP two"], "STOP") == (["one "], True)
    assert stream(["STOP"], "STOP") == ([""], True)


def test_a_possible_beginning_is_held_back_until_it_is_decided() -> None:
    assert stream(["ab#", "#", "c"], "##!") == (["ab", "", "##c", ""], False)
    assert stream(["ab#", "#", "!c"], "##!") == (["ab", "", ""], True)


def test_only_what_may_still_begin_a_stop_string_is_held_back() -> None:
    # After "aab" + "a" the text ends with "aaba"; "aabaac" may begin there or at its last "a".
    assert stream(["aab", "aab", "aac"], "aabaac") == (["", "aab", ""], True)


def test_held_back_text_comes_with_the_flush() -> None:
    assert stream(["ab#"], "##") == (["ab", "#"], False)


def test_the_string_that_ends_first_wins() -> None:
    assert stream(["abcd"], "abcd", "bc") == (["a"], True)
    assert stream(["xbc"], "bc", "c") == (["x"], True)


@given(
    text=st.text("ab#", max_size=30),
    stops=st.lists(st.text("ab#", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 30)),
)
def test_the_text_does_not_depend_on_how_it_was_cut_into_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    passed, is_stopped = stream(pieces, *stops)

    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    expected = text
    if ends:
        end, negative_length = min(ends)
        expected = text[: end + negative_length]
    assert (("".join(passed)), is_stopped) == (expected, bool(ends))


def test_the_last_allowed_token_ends_with_length_and_everything_held_back() -> None:
    output = OutputStream(SamplingParams(max_tokens=2, stop=("b!",)), detokenizer=Spelling("a", "b", held_back="~"))
    assert output.push(0) == ("a", None)
    assert output.push(1) == ("b~", "length")


@pytest.mark.parametrize("params", [SamplingParams(stop_token_ids=(9,)), SamplingParams()])
def test_a_stop_token_ends_without_text_and_gives_back_what_was_held(params: SamplingParams) -> None:
    output = OutputStream(params, () if params.stop_token_ids else (9,), Spelling("a", "b"))
    assert output.push(1) == ("b", None)
    assert output.push(9) == ("", "stop")
    assert output.num_tokens == 2


def test_end_of_sequence_can_be_ignored_but_stop_tokens_cannot() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=(0,))
    output = OutputStream(params, (0, 1), Spelling("a", "b"))
    assert output.push(1) == ("b", None)
    assert output.push(0) == ("", "stop")


def test_a_stop_string_ends_with_stop_even_at_the_last_allowed_token() -> None:
    output = OutputStream(SamplingParams(max_tokens=2, stop=("b",)), detokenizer=Spelling("a", "ab"))
    assert output.push(0) == ("a", None)
    assert output.push(1) == ("a", "stop")


def test_without_a_detokenizer_there_is_no_text() -> None:
    output = OutputStream(SamplingParams(max_tokens=1))
    assert output.push(3) == ("", "length")
