"""A tokenizer from a GGUF file's own metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from anaphora.model.chat_template import ChatTemplate
from anaphora.model.errors import ModelError
from anaphora.model.tokenizer import SPACE_MARK, Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Values of tokenizer.ggml.token_type."""

_END_TOKENS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>"}
"""Control tokens that end a turn or a text. GGUF names one of a model's; models emit the others too."""

_OTHER_WAY = "The model's Hugging Face folder, which brings its own tokenizer.json, can be served instead"


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt4_split(digits: str) -> pre_tokenizers.PreTokenizer:
    """GPT-4's way of cutting text, shared by Llama 3 and Qwen2 but for how many digits make a number."""
    return _split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": _split(_GPT2),
    "smollm": _split(r"\p{N}", _GPT2),
    "llama-bpe": _gpt4_split(r"\p{N}{1,3}"),
    "qwen2": _gpt4_split(r"\p{N}"),
    # What llama.cpp does with models that its converter did not know.
    "default": _split(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9]{3}"),
}
"""How text is cut before merging, by tokenizer.ggml.pre."""


def read_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that the metadata describes. Cost: 0.1 s for 49,152 tokens.

    Raises:
        ModelError: a tokenizer or pre-tokenizer that is not supported; the message lists those that are.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = _byte_level_bpe(metadata)
    elif kind == "llama":
        backend = _sentencepiece_bpe(metadata)
    else:
        raise ModelError(
            f"tokenizer.ggml.model: {kind!r} is not supported; supported are gpt2 (byte-level BPE) and llama "
            f"(SentencePiece BPE). {_OTHER_WAY}"
        )
    tokens, types = _vocabulary(metadata)
    typed = list(zip(tokens, types, strict=True))
    backend.add_special_tokens([_added(token, True) for token, of_type in typed if of_type in (_CONTROL, _UNKNOWN)])
    backend.add_tokens([_added(token, False) for token, of_type in typed if of_type == _USER_DEFINED])
    adds_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    return Tokenizer(
        backend,
        bos_token_id=_token_id(metadata, "bos"),
        eos_token_ids=_end_ids(metadata),
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
    )


def _byte_level_bpe(metadata: Mapping[str, Any]) -> Backend:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _PRE_TOKENIZERS:
        raise ModelError(
            f"tokenizer.ggml.pre: {name!r} is not supported; supported are {', '.join(_PRE_TOKENIZERS)}. {_OTHER_WAY}"
        )
    tokens, _ = _vocabulary(metadata)
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in _strings(metadata, "merges"))]
    # Llama 3 takes a word that is a token as it is, though its merges would not lead there.
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = _bpe(vocabulary, merges, ignore_merges=name == "llama-bpe")
    if name == "qwen2":
        # As Qwen's own tokenizer does; llama.cpp leaves it out, and differs on decomposed characters.
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[name]
    backend.decoder = decoders.ByteLevel()
    return backend


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Backend:
    """Build the model. Merges that name what is no token are the file's fault, and the library's own exception."""
    try:
        return Backend(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:
        raise ModelError(f"tokenizer.ggml.tokens, tokenizer.ggml.merges: they do not fit each other: {error}") from None


def _sentencepiece_bpe(metadata: Mapping[str, Any]) -> Backend:
    """SentencePiece keeps a score per token and no merges: two tokens merge if their union is one, best score first."""
    tokens, types = _vocabulary(metadata)
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError("tokenizer.ggml.scores: expected one score for each token")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    ranked = sorted(
        (-float(scores[token_id]), vocabulary[token[:cut]], vocabulary[token[cut:]])
        for token_id, token in enumerate(tokens)
        if types[token_id] == _NORMAL
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    )
    backend = _bpe(
        vocabulary,
        [(tokens[left], tokens[right]) for _, left, right in ranked],
        unk_token=next((token for token, of_type in zip(tokens, types, strict=True) if of_type == _UNKNOWN), None),
        fuse_unk=True,
        byte_fallback=True,
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(SPACE_MARK))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def read_chat_template(metadata: Mapping[str, Any]) -> ChatTemplate | None:
    """The file's chat template; None if it has none."""
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    tokens = _strings(metadata, "tokens")
    bos, eos = (_token_id(metadata, which) for which in ("bos", "eos"))
    return ChatTemplate(source, "" if bos is None else tokens[bos], "" if eos is None else tokens[eos])


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    tokens, types = _vocabulary(metadata)
    named = [_token_id(metadata, which) for which in ("eos", "eot", "eom")]
    spelled = [i for i, token in enumerate(tokens) if token in _END_TOKENS and types[i] == _CONTROL]
    return tuple(dict.fromkeys(token_id for token_id in (*named, *spelled) if token_id is not None))


def _token_id(metadata: Mapping[str, Any], which: str) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{which}_token_id")
    if token_id is None:
        return None
    if not 0 <= token_id < len(_strings(metadata, "tokens")):
        raise ModelError(f"tokenizer.ggml.{which}_token_id: {token_id} is outside the vocabulary")
    return int(token_id)


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[list[str], Sequence[int]]:
    """Tokens by id, and their types."""
    tokens = _strings(metadata, "tokens")
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ModelError(f"tokenizer.ggml.token_type: {len(types)} types for {len(tokens)} tokens")
    return tokens, types


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list):
        raise ModelError(f"tokenizer.ggml.{key}: missing from the file")
    return value
