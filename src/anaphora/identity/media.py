"""What a prompt holds besides token ids: images, audio and other items, and rows of embeddings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from anaphora.tokens import Buffer


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """An image, audio or video item: the run of placeholder tokens that it fills.

    offset: the run's first token in the prompt.
    length: tokens in the run.
    digest: what the processor calls the item: equal for equal content after processing, different otherwise.
    """

    offset: int
    length: int
    digest: str

    def __post_init__(self) -> None:
        _require_integer("offset", self.offset, 0)
        _require_integer("length", self.length, 1)
        if not isinstance(self.digest, str) or not self.digest:
            raise ValueError(f"digest: expected a non-empty string that names the item's content, got {self.digest!r}")


class PromptEmbeds:
    """Rows of embeddings that stand in a prompt for token ids (those positions usually hold id 0).

    offset: the position of the first row in the prompt.
    rows: any C-contiguous buffer, kept without a copy; it must not change afterwards.
    row_bytes: bytes of one row.

    Compared by identity: equal content shows in the digests of its rows.
    """

    __slots__ = ("_digests", "_rows", "offset", "row_bytes")

    def __init__(self, offset: int, rows: Buffer, row_bytes: int) -> None:
        _require_integer("offset", offset, 0)
        _require_integer("row_bytes", row_bytes, 1)
        view = memoryview(rows)
        if not view.c_contiguous:
            raise ValueError("rows: expected a C-contiguous buffer")
        if not view.nbytes or view.nbytes % row_bytes:
            raise ValueError(f"rows: expected one or more rows of {row_bytes} bytes, got {view.nbytes} bytes")
        self.offset = offset
        self.row_bytes = row_bytes
        self._rows = view.cast("B")
        self._digests: dict[tuple[int, int], bytes] = {}

    @property
    def length(self) -> int:
        """Number of rows, which is the number of positions that they fill."""
        return self._rows.nbytes // self.row_bytes

    def digest(self, first: int, end: int) -> bytes:
        """Return the SHA-256 of the rows first .. end - 1 as they lie in memory.

        Cost: about 1 us for 2 KB of rows, once for each pair of arguments; then a look-up.
        """
        key = (first, end)
        digest = self._digests.get(key)
        if digest is None:
            digest = self._digests[key] = sha256(self._rows[first * self.row_bytes : end * self.row_bytes]).digest()
        return digest


Media: TypeAlias = MediaSpan | PromptEmbeds


def validate_media(media: Iterable[Media], num_tokens: int) -> tuple[Media, ...]:
    """Return `media` as a tuple if it is in prompt order, without overlaps, and inside a prompt of `num_tokens` tokens.

    Raises:
        TypeError: it is not iterable, or an entry is neither a MediaSpan nor a PromptEmbeds.
        ValueError: names the entry that is out of order, overlaps its predecessor, or leaves the prompt.
    """
    if not isinstance(media, Iterable):
        raise TypeError(f"media: expected MediaSpans and PromptEmbeds in prompt order, got {type(media).__name__}")
    items = tuple(media)
    end = 0
    for position, item in enumerate(items):
        if not isinstance(item, MediaSpan | PromptEmbeds):
            raise TypeError(f"media[{position}]: expected a MediaSpan or PromptEmbeds, got {type(item).__name__}")
        if item.offset < end:
            raise ValueError(
                f"media[{position}].offset: expected {end} or more, where the item before ends, got {item.offset}"
            )
        end = item.offset + item.length
        if end > num_tokens:
            raise ValueError(
                f"media[{position}].offset: {item.offset} and length {item.length} leave the prompt "
                f"of {num_tokens} tokens"
            )
    return items


def _require_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected an integer of {least} or more, got {value!r}")
