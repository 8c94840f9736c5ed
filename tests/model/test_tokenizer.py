"""Encoding, decoding, and decoding token by token."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from anaphora.model import Detokenizer, ModelError, Tokenizer
from anaphora.model.gguf_tokenizer import read_tokenizer
from anaphora.tokens import pack, unpack
from tests.model.test_gguf_tokenizer import sentencepiece
from tests.tiny_models import BOS_TOKEN_ID, EOS_TOKEN_ID, SPECIAL_TOKENS, VOCAB_SIZE, tiny_tokenizer

BYTE_LEVEL = Tokenizer(tiny_tokenizer(), bos_token_id=BOS_TOKEN_ID, eos_token_ids=(EOS_TOKEN_ID,))
SENTENCEPIECE = read_tokenizer(sentencepiece())
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])

text = st.text(st.characters(exclude_categories=["Cs"]))


def pushed(tokenizer: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(text)
def test_any_text_comes_back(original: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(original, parse_special=False)) == original
    if original:
        assert SENTENCEPIECE.decode(SENTENCEPIECE.encode(original, parse_special=False)) == " " + original


def test_ids_are_packed_int32() -> None:
    packed = BYTE_LEVEL.encode("the cat")
    assert type(packed) is bytes
    assert unpack(packed).tolist() == tiny_tokenizer().encode("the cat").ids


def test_special_tokens_are_parsed_on_demand() -> None:
    spelled = "".join(SPECIAL_TOKENS)
    assert unpack(BYTE_LEVEL.encode(spelled)).tolist() == [0, 1, 2]
    plain = unpack(BYTE_LEVEL.encode(spelled, parse_special=False)).tolist()
    assert not set(plain) & BYTE_LEVEL.special_token_ids
    assert BYTE_LEVEL.decode(plain) == spelled
    assert unpack(BYTE_LEVEL.encode(spelled)).tolist() == [0, 1, 2], "the switch is of one call"


def test_bos_comes_first_where_it_is_asked_for_and_there_is_one() -> None:
    without = BYTE_LEVEL.encode("the cat")
    assert BYTE_LEVEL.encode("the cat", add_bos=True) == pack([BOS_TOKEN_ID]) + without
    assert Tokenizer(tiny_tokenizer()).encode("the cat", add_bos=True) == without


def test_nothing_is_added_truncated_or_padded_whatever_the_file_says() -> None:
    backend = tiny_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert Tokenizer(backend).encode("the quick brown fox") == BYTE_LEVEL.encode("the quick brown fox")


def test_the_empty_text_has_no_ids() -> None:
    assert BYTE_LEVEL.encode("") == b""
    assert BYTE_LEVEL.decode(b"") == ""


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(ValueError, match="text: contains a lone surrogate"):
        BYTE_LEVEL.encode("a\ud800b")


def test_special_tokens_are_left_out_of_text_on_demand() -> None:
    ids = BYTE_LEVEL.encode("<|im_start|>the<|im_end|>")
    assert BYTE_LEVEL.decode(ids) == "the"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "<|im_start|>the<|im_end|>"


def test_ids_without_a_token_have_no_text() -> None:
    assert BYTE_LEVEL.decode([VOCAB_SIZE, 2**31 - 1, -1]) == ""
    assert BYTE_LEVEL.vocab_size == VOCAB_SIZE


def test_tokens_are_found_by_their_spelling() -> None:
    assert BYTE_LEVEL.token_id("<|im_end|>") == EOS_TOKEN_ID
    assert BYTE_LEVEL.token_id("<|unheard|>") is None


@TOKENIZERS
@given(data=st.data())
def test_pushed_pieces_and_the_flush_join_to_the_decoded_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1)))
    skip = data.draw(st.booleans())
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pushed(tokenizer, token_ids, skip_special_tokens=skip)) == whole


@TOKENIZERS
@given(original=text)
def test_of_valid_text_every_push_gives_whole_characters_only(tokenizer: Tokenizer, original: str) -> None:
    pieces = pushed(tokenizer, unpack(tokenizer.encode(original, parse_special=False)).tolist())
    assert "".join(pieces).removeprefix("" if tokenizer is BYTE_LEVEL else " ") == original
    assert pieces[-1] == "", "nothing is left for the flush"


def byte_ids(data: bytes) -> list[int]:
    letters = {BYTE_LEVEL.token_bytes(i): i for i in range(VOCAB_SIZE)}
    return [letters[bytes([byte])] for byte in data]


def test_a_character_appears_with_its_last_byte() -> None:
    assert pushed(BYTE_LEVEL, byte_ids("a👍b".encode())) == ["a", "", "", "", "👍", "b", ""]


def test_bytes_that_no_character_begins_with_are_replaced_at_once() -> None:
    assert pushed(BYTE_LEVEL, byte_ids(b"\xffa")) == ["\ufffd", "a", ""]


def test_an_unfinished_character_is_replaced_when_another_begins_or_the_text_ends() -> None:
    assert pushed(BYTE_LEVEL, byte_ids(b"\xf0\x9fa\xe2\x82")) == ["", "", "\ufffda", "", "", "\ufffd"]


def test_token_bytes_of_an_unspellable_token_are_its_text() -> None:
    """A vocabulary may hold tokens outside GPT-2's alphabet of bytes."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={"日": 0, "\u0120a": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    assert Tokenizer(backend).decode([0, 1]) == "日 a"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_other_kinds_of_tokenizer_are_refused(decoder: decoders.Decoder | None) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ModelError, match=r"tokenizer: decoder .* is not supported; supported are ByteLevel"):
        Tokenizer(backend)


def test_the_alphabet_of_bytes_is_complete() -> None:
    backend = tiny_tokenizer()
    letters = [token for token in json.loads(backend.to_str())["model"]["vocab"] if len(token) == 1]
    spelled = {BYTE_LEVEL.token_bytes(backend.token_to_id(letter)) for letter in letters}
    assert spelled == {bytes([byte]) for byte in range(256)}
