"""A tokenizer from GGUF metadata gives the ids that llama.cpp gives for the same file."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from anaphora.model import ModelError
from anaphora.model.gguf_tokenizer import read_chat_template, read_tokenizer
from anaphora.tokens import unpack

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE, _NEWLINE = "\u0120", "\u010a"
"""How byte-level BPE spells a space and a newline."""

# The expected tokens below are llama.cpp's, from these very vocabularies written to GGUF files.
_TEXT = "1234 \n\n 56 DON'T a+b"
_MERGES = [
    "1 2",
    "12 3",
    "123 4",
    f"{_NEWLINE} {_NEWLINE}",
    f"{_SPACE} {_NEWLINE}{_NEWLINE}",
    f"{_NEWLINE}{_NEWLINE} {_SPACE}",
    f"1234 {_SPACE}",
    "5 6",
    f"{_SPACE} 56",
    "' T",
    "a +",
    "a+ b",
    "+ b",
    f"{_SPACE} a",
]


def byte_level(pre: str, **more: Any) -> dict[str, Any]:
    merged = [merge.replace(" ", "") for merge in _MERGES]
    tokens = [*sorted(ByteLevel.alphabet()), *merged, "<|im_end|>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_NORMAL] * (len(tokens) - 2) + [_CONTROL, _USER_DEFINED],
        "tokenizer.ggml.merges": _MERGES,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def sentencepiece(**more: Any) -> dict[str, Any]:
    pieces = ["\u2581", "a", "b", "c", "ab", "bc", "abc", "\u2581a", "\u2581ab"]
    scores = [0.0, 0.0, 0.0, 0.0, -2.0, -1.0, -4.0, -3.0, -5.0]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * (len(tokens) - len(pieces)) + scores,
        "tokenizer.ggml.token_type": [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256 + [_NORMAL] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def encoded(metadata: dict[str, Any], text: str, *, parse_special: bool = True) -> list[str]:
    ids = unpack(read_tokenizer(metadata).encode(text, parse_special=parse_special))
    return [metadata["tokenizer.ggml.tokens"][token_id] for token_id in ids]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", "1234 ĠĊĊ Ġ56 Ġ D O N ' T Ġa + b"),
        ("smollm", "1 2 3 4 ĠĊĊ Ġ 5 6 Ġ D O N ' T Ġa + b"),
        ("llama-bpe", "123 4 ĠĊĊ Ġ 56 Ġ D O N 'T Ġa +b"),
        ("qwen2", "1 2 3 4 ĠĊĊ Ġ 5 6 Ġ D O N 'T Ġa +b"),
        ("default", "123 4 ĠĊĊ Ġ 56 Ġ D O N ' T Ġa + b"),
    ],
)
def test_text_is_cut_as_the_named_pre_tokenizer_cuts_it(pre: str, expected: str) -> None:
    assert encoded(byte_level(pre), _TEXT) == expected.split(" ")


def test_control_tokens_are_parsed_on_demand_and_user_defined_ones_always() -> None:
    text = "a<tool> a<|im_end|>"
    assert encoded(byte_level("smollm"), text) == ["a", "<tool>", "Ġa", "<|im_end|>"]
    assert encoded(byte_level("smollm"), text, parse_special=False) == ["a", "<tool>", "Ġa", *"<|im_end|>"]


def test_qwen_composes_characters_as_its_own_tokenizer_does() -> None:
    tokenizer = read_tokenizer(byte_level("qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    assert read_tokenizer(byte_level("llama-bpe")).decode(tokenizer.encode("e\u0301")) == "\u00e9"


def test_llama_3_takes_a_whole_word_that_is_a_token_without_merging_to_it() -> None:
    metadata = byte_level("llama-bpe")
    metadata["tokenizer.ggml.tokens"][-1] = "xyz"
    metadata["tokenizer.ggml.token_type"][-1] = _NORMAL
    assert encoded(metadata, "xyz") == ["xyz"]
    assert encoded(metadata | {"tokenizer.ggml.pre": "gpt-2"}, "xyz") == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc  ab é", "▁a bc ▁ ▁ab ▁ <0xC3> <0xA9>"),
        ("bcabc</s>ab", "▁ bc abc </s> ▁ab"),
    ],
)
def test_sentencepiece_merges_the_best_score_first_and_spells_the_rest_in_bytes(text: str, expected: str) -> None:
    assert encoded(sentencepiece(), text) == expected.split(" ")


def test_sentencepiece_leaves_the_first_space_out_where_the_file_says_so() -> None:
    assert encoded(sentencepiece(add_space_prefix=False), "abc ab") == ["abc", "▁ab"]


def test_sentencepiece_text_comes_back_with_the_space_that_was_put_before_it() -> None:
    tokenizer = read_tokenizer(sentencepiece())
    assert tokenizer.decode(tokenizer.encode("abc  é\n👩‍👧 cab")) == " abc  é\n👩‍👧 cab"


def test_bos_is_added_where_the_file_says_so_or_the_kind_has_always_done() -> None:
    assert read_tokenizer(sentencepiece()).adds_bos
    assert not read_tokenizer(sentencepiece(add_bos_token=False)).adds_bos
    assert not read_tokenizer(byte_level("smollm", bos_token_id=0)).adds_bos
    assert read_tokenizer(byte_level("llama-bpe", bos_token_id=0)).adds_bos
    assert not read_tokenizer(byte_level("llama-bpe")).adds_bos, "there is no token to add"


def test_generation_ends_at_the_named_token_and_at_control_tokens_that_end_a_turn() -> None:
    metadata = byte_level("smollm", eos_token_id=0)
    assert read_tokenizer(metadata).eos_token_ids == (0, len(metadata["tokenizer.ggml.tokens"]) - 2)
    metadata["tokenizer.ggml.token_type"][-2] = _NORMAL
    assert read_tokenizer(metadata).eos_token_ids == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, r"tokenizer\.ggml\.model: 't5' is not supported; supported are gpt2 .* llama"),
        (
            {"tokenizer.ggml.pre": "tekken"},
            r"tokenizer\.ggml\.pre: 'tekken' .* gpt-2, smollm, llama-bpe, qwen2, default",
        ),
        ({"tokenizer.ggml.pre": None}, r"tokenizer\.ggml\.pre: None is not supported"),
        ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges: missing"),
        ({"tokenizer.ggml.token_type": [1]}, r"tokenizer\.ggml\.token_type: 1 types for 272 tokens"),
        ({"tokenizer.ggml.eos_token_id": 272}, r"tokenizer\.ggml\.eos_token_id: 272 is outside the vocabulary"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_tokenizer(byte_level("smollm") | change)


def test_a_merge_of_what_is_no_token_is_refused() -> None:
    metadata = byte_level("gpt-2") | {"tokenizer.ggml.merges": [*_MERGES, "b zz"]}
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.merges: they do not fit each other: .*zz"):
        read_tokenizer(metadata)


def test_scores_must_be_there_for_sentencepiece() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.scores: expected one score for each token"):
        read_tokenizer(sentencepiece(scores=[0.0]))


def test_the_chat_template_knows_the_files_special_tokens() -> None:
    metadata = sentencepiece() | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}
    template = read_chat_template(metadata)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi</s>"
    assert read_chat_template(sentencepiece()) is None
