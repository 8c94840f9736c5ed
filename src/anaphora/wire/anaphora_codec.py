"""KV events in our own form, which says everything that a block's identity holds, except salts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Struct

from anaphora.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from anaphora.identity import Adapter, EmbedsKey, Extras, MediaKey, Namespace
from anaphora.identity.digests import whole_blocks
from anaphora.tokens import TOKEN_BYTES
from anaphora.wire.decoder import MAX_DIGEST_BYTES, MAX_PAYLOAD_BYTES, Decoder, WireError, require_size
from anaphora.wire.salts import SALT_TAG_BYTES, SaltTags

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION = 1

_Digest: TypeAlias = Annotated[bytes, Meta(min_length=1, max_length=MAX_DIGEST_BYTES)]
_SaltTag: TypeAlias = Annotated[bytes, Meta(min_length=SALT_TAG_BYTES, max_length=SALT_TAG_BYTES)]
_Text: TypeAlias = Annotated[str, Meta(min_length=1)]
_Natural: TypeAlias = Annotated[int, Meta(ge=0)]
_Size: TypeAlias = Annotated[int, Meta(ge=1)]


class _AdapterRecord(Struct, frozen=True):
    digest: _Text
    name: str
    path: str
    lora_id: int | None


class _NamespaceRecord(Struct, frozen=True, omit_defaults=True):
    model: str
    kv_layout: str
    generation: int
    adapter: _AdapterRecord | None
    is_salted: bool
    salt_tag: _SaltTag | None = None


class _ContentRecord(Struct, frozen=True):
    media: tuple[MediaKey, ...]
    embeds: tuple[EmbedsKey, ...] | None


class _Stored(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="stored"):
    namespace: _Natural
    digests: tuple[_Digest, ...]
    parent: _Digest | None
    tokens: bytes
    block_size: _Size
    medium: str
    group: _Natural
    extras: tuple[_ContentRecord | None, ...] | None = None


class _Removed(Struct, frozen=True, tag_field="type", tag="removed"):
    digests: tuple[_Digest, ...]
    medium: str
    group: _Natural


class _Cleared(Struct, frozen=True, tag_field="type", tag="cleared"):
    pass


class _Batch(Struct, frozen=True):
    version: int
    ts: float
    namespaces: tuple[_NamespaceRecord, ...]
    events: tuple[_Stored | _Removed | _Cleared, ...]


class _Version(Struct, frozen=True):
    version: int


_batch: Decoder[_Batch] = Decoder(_Batch)
_version: Decoder[_Version] = Decoder(_Version)
_encoder = msgspec.msgpack.Encoder()


class EventBatch(NamedTuple):
    """What happened up to `ts` (Unix seconds), in order."""

    ts: float
    events: list[Event]


class AnaphoraCodec:
    """Writes and reads batches of events in our own form: a msgpack map of version, time, the namespaces that occur,
    and events that refer to them by position. `docs/events.md` describes every field.

    key: the fleet's, 16 to 64 secret bytes. With it a salt is written as its `SaltTags` tag, and equal salts can be
        told from different ones by whoever holds the key. Without it a namespace only says that it is salted.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._tags = SaltTags(key) if key is not None else None

    def masked(self, namespace: Namespace) -> Namespace:
        """Return `namespace` as a reader of events sees it: a stand-in takes the place of the salt.

        So a prompt's own namespace can be compared with those of decoded events. Without a key all salted namespaces
        look alike; then only digests tell their blocks apart.
        """
        return namespace if namespace.salt is None else replace(namespace, salt=_stand_in(self._tag(namespace)))

    def encode(self, events: Iterable[Event], ts: float) -> bytes:
        """Return one batch.

        Raises ValueError for text with a lone surrogate in anything but a salt, and for tokens that fill no whole
        blocks.
        """
        namespaces: dict[Namespace, int] = {}
        records = tuple(self._record(event, namespaces) for event in events)
        batch = _Batch(VERSION, float(ts), tuple(map(self._namespace_record, namespaces)), records)
        try:
            return _encoder.encode(batch)
        except UnicodeEncodeError:
            raise ValueError("namespace, media or medium: msgpack cannot hold a text with a lone surrogate") from None

    def decode(self, payload: bytes, *, max_bytes: int = MAX_PAYLOAD_BYTES) -> EventBatch:
        """Return the events as they were, except that their namespaces, and the extras that repeat them, are `masked`.

        Raises WireError for anything that is no batch of this version, or is longer than `max_bytes`.
        """
        require_size(payload, max_bytes)
        version = _version.decode(payload, "payload").version
        if version != VERSION:
            raise WireError(f"payload: expected version {VERSION}, got {version}")
        batch = _batch.decode(payload, "payload")
        namespaces = [_namespace(record, number) for number, record in enumerate(batch.namespaces)]
        return EventBatch(
            batch.ts, [_event(record, namespaces, f"events[{number}]") for number, record in enumerate(batch.events)]
        )

    def _tag(self, namespace: Namespace) -> bytes | None:
        return self._tags.tag(namespace.salt) if self._tags and namespace.salt is not None else None

    def _namespace_record(self, namespace: Namespace) -> _NamespaceRecord:
        adapter = namespace.adapter
        return _NamespaceRecord(
            namespace.model,
            namespace.kv_layout,
            namespace.generation,
            _AdapterRecord(adapter.digest, adapter.name, adapter.path, adapter.lora_id) if adapter else None,
            namespace.salt is not None,
            self._tag(namespace),
        )

    def _record(self, event: Event, namespaces: dict[Namespace, int]) -> _Stored | _Removed | _Cleared:
        if isinstance(event, AllBlocksCleared):
            return _Cleared()
        if isinstance(event, BlockRemoved):
            return _Removed(event.digests, event.medium, event.group)
        contents = tuple(map(_content_record, event.extras or ()))
        return _Stored(
            namespaces.setdefault(event.namespace, len(namespaces)),
            event.digests,
            event.parent,
            whole_blocks(event.tokens, event.block_size),
            event.block_size,
            event.medium,
            event.group,
            contents if any(contents) else None,
        )


def _content_record(extras: Extras | None) -> _ContentRecord | None:
    """Adapter and salt stand in the namespace."""
    if extras is None or (not extras.media and extras.embeds is None):
        return None
    return _ContentRecord(extras.media, extras.embeds)


def _stand_in(tag: bytes | None) -> str:
    return "salted" if tag is None else f"salt tag {tag.hex()}"


def _namespace(record: _NamespaceRecord, number: int) -> Namespace:
    if record.salt_tag is not None and not record.is_salted:
        raise WireError(f"namespaces[{number}].salt_tag: expected none, the namespace is not salted")
    adapter = record.adapter
    return Namespace(
        record.model,
        Adapter(adapter.digest, adapter.name, adapter.path, adapter.lora_id) if adapter else None,
        _stand_in(record.salt_tag) if record.is_salted else None,
        record.generation,
        record.kv_layout,
    )


def _event(record: _Stored | _Removed | _Cleared, namespaces: list[Namespace], where: str) -> Event:
    if isinstance(record, _Cleared):
        return AllBlocksCleared()
    if isinstance(record, _Removed):
        return BlockRemoved(record.digests, record.medium, record.group)
    if record.namespace >= len(namespaces):
        raise WireError(f"{where}.namespace: expected less than {len(namespaces)}, got {record.namespace}")
    namespace = namespaces[record.namespace]
    try:
        tokens = whole_blocks(record.tokens, record.block_size)
    except ValueError as error:
        raise WireError(f"{where}.{error}") from None
    num_blocks = len(tokens) // (TOKEN_BYTES * record.block_size)
    if record.extras is not None and len(record.extras) != num_blocks:
        raise WireError(f"{where}.extras: expected one for each of {num_blocks} blocks, got {len(record.extras)}")
    return BlockStored(
        record.digests,
        record.parent,
        tokens,
        record.block_size,
        namespace,
        _extras(namespace, record.extras or (None,) * num_blocks, is_chain_head=record.parent is None),
        record.medium,
        record.group,
    )


def _extras(
    namespace: Namespace, contents: tuple[_ContentRecord | None, ...], *, is_chain_head: bool
) -> list[Extras | None] | None:
    """Say again of each block what its namespace says, as `extra_keys` does: the adapter, and at the head the salt."""
    plain = Extras(namespace.adapter) if namespace.adapter else None
    extras = [
        Extras(namespace.adapter, content.media, embeds=content.embeds) if content else plain for content in contents
    ]
    if is_chain_head and namespace.salt is not None and extras:
        extras[0] = replace(extras[0] or Extras(), salt=namespace.salt)
    return extras if any(extras) else None
