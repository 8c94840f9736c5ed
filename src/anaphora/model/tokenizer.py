"""Text to token ids and back, with the ids that the model was made with."""

from __future__ import annotations

import codecs
import json
import re
from array import array
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from anaphora.model.errors import ModelError
from anaphora.tokens import TokenIds, pack, unpack

SPACE_MARK = "\u2581"
"""SentencePiece writes a space as this."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A `tokenizers` pipeline with the model's own special tokens around it. Safe to share between threads.

    bos_token_id: what a sequence begins with, None if the model has no such token.
    eos_token_ids: ids that end a generation.
    adds_bos: whether the model expects `bos_token_id` before plain text (chat templates write it themselves).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        adds_bos: bool = False,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._is_byte_level = _is_byte_level(backend)
        self._token_bytes: dict[int, bytes] = {}
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.adds_bos = adds_bos and bos_token_id is not None
        self.special_token_ids = frozenset(token_id for token_id, token in self._added.items() if token.special)

    @property
    def vocab_size(self) -> int:
        """Number of ids that have a token, added ones included. A model's own vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def save(self, path: Path) -> None:
        """Write the pipeline as a tokenizer.json."""
        self._backend.save(str(path))

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, None if there is none."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> bytes:
        """Ids of `text`, packed int32.

        With `parse_special` off, text that spells a special token ("<|im_end|>") is encoded like any other text: what a
        user wrote cannot end their turn. `add_bos` puts `bos_token_id` first where the model has one.

        Raises:
            ValueError: the text holds lone surrogates, which no UTF-8 text does.
        """
        backend = self._backend if parse_special else self._plain_backend
        try:
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            if isinstance(text, str):
                raise ValueError("text: contains a lone surrogate, which is no character") from None
            raise
        ids = array("i", encoding.ids)
        if add_bos and self.bos_token_id is not None:
            ids.insert(0, self.bos_token_id)
        return ids.tobytes()

    def decode(self, token_ids: TokenIds, *, skip_special_tokens: bool = True) -> str:
        """The text that the ids stand for; U+FFFD for bytes that are no UTF-8, nothing for ids without a token.

        SentencePiece models encode a space before the first word; it is kept, as in the middle of a text it must be.
        """
        pieces = (self.token_bytes(i, skip_special_tokens=skip_special_tokens) for i in unpack(pack(token_ids)))
        return b"".join(pieces).decode("utf-8", "replace")

    @cached_property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token: a text of n bytes is at least n / longest_token_bytes tokens."""
        return max((len(self.token_bytes(token_id)) for token_id in range(self.vocab_size)), default=1) or 1

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes:
        """The bytes of one token: part of a character, perhaps. Empty for an id without a token."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return b""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token: str | None = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._is_byte_level:
            try:
                return token.translate(_BYTE_OF_LETTER).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode()
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """A copy for text without special tokens: the switch is a property of the whole pipeline, not of a call."""
        plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain


class Detokenizer:
    """Text of a growing sequence of tokens, as it becomes certain.

    Bytes of an unfinished character are held back. What all pushes and the flush return, joined, is `decode` of all
    ids. Cost of a push: that of its own token.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is certain now and was not before."""
        return self._decoder.decode(
            self._tokenizer.token_bytes(token_id, skip_special_tokens=self._skip_special_tokens)
        )

    def flush(self) -> str:
        """The sequence ends here: U+FFFD for a character that was never finished, else nothing."""
        return self._decoder.decode(b"", final=True)


def _byte_level_alphabet() -> dict[int, int]:
    """GPT-2's spelling of bytes as letters, inverted: code point -> byte.

    Printable bytes of Latin-1 stand for themselves; the other 68, in order, are U+0100 and up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_level_alphabet()


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether tokens spell bytes as letters (GPT-2), or text with marks for spaces (SentencePiece).

    Raises:
        ModelError: neither.
    """
    kinds = set(_decoder_kinds(backend.decoder))
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    raise ModelError(f"tokenizer: decoder {sorted(kinds)} is not supported; supported are ByteLevel and SentencePiece")


def _decoder_kinds(decoder: Any) -> Iterable[str]:
    if decoder is None:
        return
    state = json.loads(decoder.__getstate__())
    for part in state.get("decoders", [state]):
        yield part["type"]
