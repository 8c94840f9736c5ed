"""A tokenizer from a GGUF file's own metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from anaphora.model.chat_template import ChatTemplate
from anaphora.model.errors import ModelError
from anaphora.model.tokenizer import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Values of tokenizer.ggml.token_type."""

_END_TOKENS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>"}
"""Control tokens that end a turn or a text. GGUF names one of a model's; models emit the others too."""

_GPT2_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _word_split(digits: str) -> pre_tokenizers.PreTokenizer:
    """GPT-4's way of cutting text, shared by Llama 3 and Qwen2 but for how many digits make a number."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": _GPT2_SPLIT,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2_SPLIT]),
    "llama-bpe": _word_split(r"\p{N}{1,3}"),
    "qwen2": _word_split(r"\p{N}"),
}
"""How text is cut before merging, by tokenizer.ggml.pre."""


def read_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that the metadata describes. Cost: 0.1 s for 49,152 tokens.

    Raises:
        ModelError: a tokenizer or pre-tokenizer that is not supported; the message lists those that are.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"tokenizer.ggml.model: {kind!r} is not supported, only gpt2 (byte-level BPE); "
            "use the model's Hugging Face folder, which brings its tokenizer.json"
        )
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _PRE_TOKENIZERS:
        raise ModelError(
            f"tokenizer.ggml.pre: {name!r} is not supported; supported are {', '.join(_PRE_TOKENIZERS)}. "
            "Other models can be served from their Hugging Face folder"
        )
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    merges = [
        (left, right) for left, _, right in (m.partition(" ") for m in _required(metadata, "tokenizer.ggml.merges"))
    ]
    backend = Backend(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=name == "llama-bpe",
        )
    )
    backend.pre_tokenizer = _PRE_TOKENIZERS[name]
    backend.decoder = decoders.ByteLevel()
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    _mark_special(backend, tokens, metadata)
    return Tokenizer(
        backend,
        bos_token_id=_token_id(metadata, "bos"),
        eos_token_ids=_end_ids(metadata, tokens),
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
    )


def read_chat_template(metadata: Mapping[str, Any]) -> ChatTemplate | None:
    """The file's chat template; None if it has none."""
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    bos, eos = (_token_id(metadata, which) for which in ("bos", "eos"))
    return ChatTemplate(source, "" if bos is None else tokens[bos], "" if eos is None else tokens[eos])


def _mark_special(backend: Backend, tokens: Sequence[str], metadata: Mapping[str, Any]) -> None:
    special, added = [], []
    for token, token_type in zip(tokens, metadata.get("tokenizer.ggml.token_type", ()), strict=False):
        if token_type in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif token_type == _USER_DEFINED:
            added.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(added)


def _end_ids(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[int, ...]:
    named = [_token_id(metadata, which) for which in ("eos", "eot", "eom")]
    types = metadata.get("tokenizer.ggml.token_type", ())
    spelled = [
        token_id
        for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=False))
        if token_type == _CONTROL and token in _END_TOKENS
    ]
    return tuple(dict.fromkeys(token_id for token_id in (*named, *spelled) if token_id is not None))


def _token_id(metadata: Mapping[str, Any], which: str) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{which}_token_id")
    if token_id is None:
        return None
    if not 0 <= token_id < len(_required(metadata, "tokenizer.ggml.tokens")):
        raise ModelError(f"tokenizer.ggml.{which}_token_id: {token_id} is outside the vocabulary")
    return int(token_id)


def _required(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list):
        raise ModelError(f"{key}: missing from the file")
    return value
