"""Prompts as token ids: those of the log, those of a model's tokenizer, or an estimate that says that it is one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from anaphora.tokens import TOKEN_BYTES, pack

if TYPE_CHECKING:
    from anaphora.lab.record import LoggedRequest, Part

_PIECE = re.compile(r"\s?[^\W\d_]{1,8}|\d{1,3}|[^\w\s]|\s+|_")
"""Words of up to 8 letters with the space before them, numbers of up to 3 digits, other signs one by one."""

ESTIMATE_ERROR = "-17 to +18 % a text"
"""The estimate's error beside SmolLM2's tokenizer on 40 texts: prose, Markdown, Python, JSON."""

_FIRST_ID = 1 << 20
"""Estimated ids begin here, so that they meet no ids of a log."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as packed int32 ids, and for each part the token at which it begins.

    part_starts: one more than parts; the last is where the prompt's own parts end and the answer's opening begins.
    """

    ids: bytes
    part_starts: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.ids) // TOKEN_BYTES


class Encoder(Protocol):
    """Turns prompts into token ids: equal prefixes of text give equal prefixes of ids."""

    name: str
    is_estimate: bool

    def text(self, text: str) -> bytes:
        """Packed ids of a text."""
        ...

    def marker(self, text: str) -> bytes:
        """Packed ids of what a chat template writes around messages."""
        ...


class EstimatingEncoder:
    """Pieces of text about as large as tokens, each piece an id of its own. Needs no model and no network.

    Cost: about 2 s for 10 MB of new text; equal texts are split once. Memory: the log's distinct texts.
    """

    is_estimate = True

    def __init__(self) -> None:
        self.name = f"estimate ({ESTIMATE_ERROR})"
        self._ids: dict[str, int] = {}
        self._texts: dict[str, bytes] = {}

    def text(self, text: str) -> bytes:
        """Ids of its pieces."""
        known = self._texts.get(text)
        if known is None:
            ids = self._ids
            known = self._texts[text] = pack(
                [ids.setdefault(piece, _FIRST_ID + len(ids)) for piece in _PIECE.findall(text)]
            )
        return known

    def marker(self, text: str) -> bytes:
        """One id that no text has."""
        return pack([self._ids.setdefault("\0" + text, _FIRST_ID + len(self._ids))])


class ModelEncoder:
    """A model's own tokenizer, part by part, with its turn markers between. Counts are its own; a chat template that
    writes more around messages than their role (dates, tool preambles) is longer by that much."""

    is_estimate = False

    def __init__(self, reference: str) -> None:
        from anaphora.lab.model_files import read_tokenizer  # noqa: PLC0415  (needs packages that estimates do not)

        self.name, self._tokenizer = read_tokenizer(reference)
        self._texts: dict[str, bytes] = {}

    def text(self, text: str) -> bytes:
        """Ids of a text, special tokens in it encoded like any other text."""
        known = self._texts.get(text)
        if known is None:
            clean = text.encode("utf-8", "replace").decode()
            known = self._texts[text] = self._tokenizer.encode(clean, parse_special=False)
        return known

    def marker(self, text: str) -> bytes:
        """Ids of the marker's text, special tokens as such."""
        known = self._texts.get("\0" + text)
        if known is None:
            known = self._texts["\0" + text] = self._tokenizer.encode(text)
        return known


def encode(request: LoggedRequest, encoder: Encoder) -> Encoded | None:
    """The prompt's ids: the log's own where it has them; None for a request without content."""
    if request.token_ids is not None:
        num = len(request.token_ids) // TOKEN_BYTES
        return Encoded(request.token_ids, (0,) * max(1, len(request.parts)) + (num,))
    return encode_parts(request.parts, encoder) if request.parts else None


def encode_parts(parts: tuple[Part, ...], encoder: Encoder) -> Encoded:
    """Ids of a prompt's parts with turn markers in ChatML's manner: an opening with the role, and a closing."""
    pieces: list[bytes] = []
    starts: list[int] = []
    num = 0
    before: str | None = None
    for part in parts:
        head = _head(part)
        if head != before:
            for text in _between(before, head, part.role):
                marker = encoder.marker(text)
                pieces.append(marker)
                num += len(marker)
            before = head
        starts.append(num // TOKEN_BYTES)
        ids = encoder.text(part.text)
        pieces.append(ids)
        num += len(ids)
    starts.append(num // TOKEN_BYTES)
    for text in _between(before, None, "assistant"):
        pieces.append(encoder.marker(text))
    return Encoded(b"".join(pieces), tuple(starts))


def _head(part: Part) -> str:
    """What a turn marker stands around: a message, the system prompt, all tools; nothing around a bare prompt."""
    if part.section == "prompt":
        return ""
    if part.section == "tools" or part.path.startswith("system"):
        return part.section
    return part.path.partition("]")[0]


def _between(before: str | None, head: str | None, role: str) -> list[str]:
    closing = ["<|im_end|>\n"] if before else []
    return closing if head == "" or before == "" else [*closing, "<|im_start|>", role or "tools", "\n"]
