"""KV events as vLLM spells them: the messages of a batch, written byte for byte and read with tolerance.

Written as vLLM 0.32 does: a batch is a msgpack array of time, events and data-parallel rank; an event is a map whose
first key is `type`; optional fields are left out where they are empty. Read are the messages of vLLM 0.26 and 0.32, the
arrays of older versions, and SGLang's: fields may be missing or unknown, and events of unknown types are counted.
"""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct, field
from msgspec.structs import astuple

from anaphora.wire.decoder import MAX_DIGEST_BYTES, MAX_PAYLOAD_BYTES, Decoder, WireError, require_size

MAX_EVENTS = 2**20

BlockHash: TypeAlias = int | Annotated[bytes, Meta(min_length=1, max_length=MAX_DIGEST_BYTES)]
"""A block's name: all of its digest, or 8 bytes of it as an integer (unsigned in vLLM, signed in SGLang)."""

ExtraKeys: TypeAlias = tuple[Any, ...]
"""What a block holds besides tokens, in this order: adapter name, [identifier, offset in the block] of each media item,
salt, digest of embeddings (bytes). msgspec has no union of text and bytes, so the messages check it themselves."""

_Natural = Annotated[int, Meta(ge=0)]


def _nil() -> None:
    """Default of a field that may be missing when read, but is written even if it is nil: a factory's value, unlike a
    plain default, is never left out."""


def _no_tokens() -> list[int]:
    """The same; msgspec would leave out an empty list whose factory is `list`."""
    return []


def _is_extra_key(key: object) -> bool:
    if isinstance(key, list | tuple):
        return all(type(part) in {str, bytes, int, NoneType} for part in key)
    return isinstance(key, str | bytes)


class _StoredFields(Struct, frozen=True, omit_defaults=True):
    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None = field(default_factory=_nil)
    token_ids: list[int] = field(default_factory=_no_tokens)
    block_size: _Natural = field(default_factory=int)
    lora_id: int | None = field(default_factory=_nil)
    medium: str | None = field(default_factory=_nil)
    lora_name: str | None = field(default_factory=_nil)
    extra_keys: tuple[ExtraKeys | None, ...] | None = None
    group_idx: _Natural | None = None

    def __post_init__(self) -> None:
        num_tokens, num_hashes = len(self.token_ids), len(self.block_hashes)
        # Events of lower tiers name blocks without their tokens; those of window layers may skip blocks, not tokens.
        if num_tokens and (num_tokens < num_hashes * self.block_size or num_tokens % (self.block_size or num_tokens)):
            raise ValueError(f"{num_tokens} token ids for {num_hashes} blocks of block_size {self.block_size}")
        if self.extra_keys is not None and len(self.extra_keys) < num_hashes:
            raise ValueError(f"extra_keys for {len(self.extra_keys)} of {num_hashes} blocks")
        for keys in self.extra_keys or ():
            if keys is not None and not all(map(_is_extra_key, keys)):
                raise ValueError("extra_keys: expected texts, bytes, and arrays of those and of integers")


class _WrittenStored(_StoredFields, frozen=True, tag_field="type", tag="BlockStored", omit_defaults=True):
    """The fields of vLLM 0.32: fifteen with the tag, the most that a map's one-byte head can count."""

    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class StoredMessage(_WrittenStored, frozen=True, tag_field="type", tag="BlockStored"):
    """Blocks became findable. `cache_salt` is SGLang's, and is not written: vLLM has the salt in `extra_keys`."""

    cache_salt: str | None = None


class _RemovedFields(Struct, frozen=True, omit_defaults=True):
    block_hashes: tuple[BlockHash, ...]
    medium: str | None = field(default_factory=_nil)
    group_idx: _Natural | None = None


class RemovedMessage(_RemovedFields, frozen=True, tag_field="type", tag="BlockRemoved", omit_defaults=True):
    """Blocks can no longer be found."""

    locality: str | None = None
    ownership: str | None = None


class ClearedMessage(Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """No block can be found any more."""


Message: TypeAlias = StoredMessage | RemovedMessage | ClearedMessage


class _StoredRow(_StoredFields, frozen=True, array_like=True, tag_field="type", tag="BlockStored"):
    """The array form ends where versions begin to differ in what follows."""


class _RemovedRow(_RemovedFields, frozen=True, array_like=True, tag_field="type", tag="BlockRemoved"):
    pass


class VllmBatch(Struct, frozen=True):
    """One message of a publisher. ts: Unix seconds. unknown_types: of events that were skipped."""

    ts: float
    messages: tuple[Message, ...]
    data_parallel_rank: int | None = None
    unknown_types: tuple[str, ...] = ()


class _BatchRow(Struct, frozen=True, array_like=True):
    ts: float
    events: tuple[_WrittenStored | RemovedMessage | ClearedMessage, ...]
    data_parallel_rank: int | None


class _Envelope(Struct, frozen=True, array_like=True):
    ts: float
    events: Raw
    data_parallel_rank: int | None = None


class _Tag(Struct, frozen=True):
    type: str


class _TagRow(Struct, frozen=True, array_like=True):
    type: str


_envelope: Decoder[_Envelope] = Decoder(_Envelope)
_events: Decoder[list[Raw]] = Decoder(list[Raw])
_tag: Decoder[_Tag] = Decoder(_Tag)
_tag_row: Decoder[_TagRow] = Decoder(_TagRow)
_maps: dict[str, Decoder[Message]] = {
    "BlockStored": Decoder(StoredMessage),
    "BlockRemoved": Decoder(RemovedMessage),
    "AllBlocksCleared": Decoder(ClearedMessage),
}
_stored_row: Decoder[_StoredRow] = Decoder(_StoredRow)
_removed_row: Decoder[_RemovedRow] = Decoder(_RemovedRow)
_encoder = msgspec.msgpack.Encoder()


def encode_batch(batch: VllmBatch) -> bytes:
    """Return a batch as vLLM 0.32 writes it. Raises ValueError for text that UTF-8 cannot hold."""
    events = tuple(
        _WrittenStored(*astuple(message)[:-1]) if isinstance(message, StoredMessage) else message
        for message in batch.messages
    )
    try:
        return _encoder.encode(_BatchRow(float(batch.ts), events, batch.data_parallel_rank))
    except UnicodeEncodeError:
        # The text itself stays out of the message: it may be a salt.
        raise ValueError("salt, adapter, media or medium: msgpack cannot hold a text with a lone surrogate") from None


def decode_batch(payload: bytes, *, max_bytes: int = MAX_PAYLOAD_BYTES) -> VllmBatch:
    """Return what a publisher sent.

    Raises WireError for anything that is no batch of events, or is longer than `max_bytes`.

    Cost: 10 to 40 ns a byte; memory below 100 bytes for each byte of the payload, whatever it holds.
    """
    require_size(payload, max_bytes)
    envelope = _envelope.decode(payload, "payload")
    _require_few_events(memoryview(envelope.events))
    messages: list[Message] = []
    unknown: list[str] = []
    for position, event in enumerate(_events.decode(envelope.events, "events")):
        where = f"events[{position}]"
        data = memoryview(event)
        is_row = data[0] >> 4 == 0x9 or data[0] in {0xDC, 0xDD}
        kind = (_tag_row if is_row else _tag).decode(data, where).type
        if kind not in _maps:
            unknown.append(kind)
        elif is_row:
            messages.append(_from_row(kind, data, where))
        else:
            messages.append(_maps[kind].decode(data, where))
    return VllmBatch(envelope.ts, tuple(messages), envelope.data_parallel_rank, tuple(unknown))


def _from_row(kind: str, data: memoryview, where: str) -> Message:
    if kind == "BlockStored":
        return StoredMessage(*astuple(_stored_row.decode(data, where)))
    if kind == "BlockRemoved":
        return RemovedMessage(*astuple(_removed_row.decode(data, where)))
    return ClearedMessage()


def _require_few_events(events: memoryview) -> None:
    # An event that is not one takes a byte on the wire, and a hundred as an object.
    head = events[0]
    if head >> 4 == 0x9:
        return
    if head not in {0xDC, 0xDD}:
        raise WireError("payload: expected an array of events - at `$[1]`")
    num_events = int.from_bytes(events[1 : 3 if head == 0xDC else 5], "big")
    if num_events > MAX_EVENTS:
        raise WireError(f"payload: expected at most {MAX_EVENTS} events, got {num_events} - at `$[1]`")
