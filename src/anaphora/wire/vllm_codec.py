"""Between the cache's events and vLLM's messages."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from anaphora.cache.events import DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, Event
from anaphora.identity import DEFAULT_NAMESPACE, Adapter, EmbedsKey, Extras, MediaKey, Namespace, vllm_extra_keys
from anaphora.tokens import pack, unpack
from anaphora.wire.decoder import WireError
from anaphora.wire.salts import SaltTags
from anaphora.wire.vllm_messages import (
    BlockHash,
    ClearedMessage,
    ExtraKeys,
    Message,
    RemovedMessage,
    StoredMessage,
    VllmBatch,
    encode_batch,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

INT_HASH_BYTES = 8
_PROCESS_KEY = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class GroupKind:
    """What vLLM calls a layer group: `full_attention`, `sliding_window` with its tokens, and so on."""

    kind: str = "full_attention"
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class VllmEventFormat:
    """How a vLLM 0.32 engine would write events: byte for byte, as far as it is asked to.

    int_hashes: names as integers, the last 8 bytes of each digest (vLLM's default), or as all of their bytes.
    groups: the model's layer groups; an event's `group` counts into them.
    clear_salts: write salts as they are, as vLLM does, in the `extra_keys` of a prompt's first block. Whoever reads the
        events can then probe for cached prompts of every tenant, so it has to be asked for. Otherwise the tag of the
        salt stands there, in hexadecimal: tenants stay apart for consumers, who compute no digest from it.
    key: what tags are made with, 16 to 64 secret bytes; one drawn by this process if None.
    """

    int_hashes: bool = True
    groups: tuple[GroupKind, ...] = (GroupKind(),)
    clear_salts: bool = False
    key: bytes | None = field(default=None, repr=False)
    _tags: SaltTags = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_tags", SaltTags(_PROCESS_KEY if self.key is None else self.key))

    def encode(self, events: Iterable[Event], ts: float, data_parallel_rank: int | None = 0) -> bytes:
        """Return one batch. vLLM makes one for each step of the engine that has events, and none for the others.

        ts: Unix seconds.

        Raises ValueError for what vLLM has no form for: an adapter without a name, embeddings that do not begin with
        the prompt, text with a lone surrogate, a layer group that `groups` lacks.

        Cost: 40 to 150 ns a token.
        """
        return encode_batch(VllmBatch(ts, tuple(map(self.message, events)), data_parallel_rank))

    def message(self, event: Event) -> Message:
        """Return one event in vLLM's words."""
        if isinstance(event, AllBlocksCleared):
            return ClearedMessage()
        names = tuple(map(self._name, event.digests))
        if isinstance(event, BlockRemoved):
            return RemovedMessage(names, event.medium, event.group)
        if event.group >= len(self.groups):
            raise ValueError(f"groups: expected a kind for layer group {event.group}, got {len(self.groups)} kinds")
        group = self.groups[event.group]
        adapter = event.namespace.adapter
        return StoredMessage(
            block_hashes=names,
            parent_block_hash=None if event.parent is None else self._name(event.parent),
            token_ids=unpack(event.tokens).tolist(),
            block_size=event.block_size,
            lora_id=adapter.lora_id if adapter else None,
            medium=event.medium,
            lora_name=adapter.name if adapter else None,
            extra_keys=tuple(map(self._extra_keys, event.extras or [None] * len(names))),
            group_idx=event.group,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.sliding_window,
        )

    def _name(self, digest: bytes) -> BlockHash:
        return int.from_bytes(digest[-INT_HASH_BYTES:], "big") if self.int_hashes else digest

    def _extra_keys(self, extras: Extras | None) -> ExtraKeys | None:
        if extras is None:
            return None
        if extras.salt is not None and not self.clear_salts:
            extras = replace(extras, salt=self._tags.tag(extras.salt).hex())
        return vllm_extra_keys(extras, tagged=False) or None


def events_of(batch: VllmBatch) -> list[Event]:
    """Return a batch's messages as the cache's events, as far as vLLM's form says what those hold.

    An integer name becomes its 8 bytes, big-endian. An adapter is known by its name alone. Lengths of media and of
    embeddings are unknown, and 0 here. A text without an offset is the salt on a prompt's first block, a media item on
    others. So a store with a parent does not say its salt: it belongs to the namespace of that parent.

    Raises WireError for token ids outside int32, and for extra keys of another form.
    """
    return [_event(message, f"events[{position}]") for position, message in enumerate(batch.messages)]


def _event(message: Message, where: str) -> Event:
    if isinstance(message, ClearedMessage):
        return AllBlocksCleared()
    digests = tuple(map(_digest, message.block_hashes))
    medium, group = message.medium or DEVICE, message.group_idx or 0
    if isinstance(message, RemovedMessage):
        return BlockRemoved(digests, medium, group)
    try:
        tokens = pack(message.token_ids)
    except ValueError as error:
        raise WireError(f"{where}.{error}") from None
    adapter = None
    if message.lora_name or message.lora_id is not None:
        name = message.lora_name or ""
        adapter = Adapter(name or f"lora_id {message.lora_id}", name=name, lora_id=message.lora_id)
    is_chain_head = message.parent_block_hash is None
    extras = [
        _extras(keys, adapter, is_chain_head and block == 0, f"{where}.extra_keys[{block}]") if keys else None
        for block, keys in enumerate(message.extra_keys or ())
    ]
    salt = message.cache_salt or (extras[0].salt if extras and extras[0] else None) or None
    return BlockStored(
        digests,
        None if message.parent_block_hash is None else _digest(message.parent_block_hash),
        tokens,
        message.block_size,
        Namespace(adapter=adapter, salt=salt) if adapter or salt else DEFAULT_NAMESPACE,
        extras if any(extras) else None,
        medium,
        group,
    )


def _digest(name: BlockHash) -> bytes:
    return name if isinstance(name, bytes) else (name % 2**64).to_bytes(INT_HASH_BYTES, "big")


def _extras(keys: ExtraKeys, adapter: Adapter | None, is_head: bool, where: str) -> Extras:
    """Tell untagged keys apart by their order: adapter, media, salt, embeddings."""
    names_adapter = adapter is not None and keys[0] == adapter.name
    media: list[MediaKey] = []
    salt: str | None = None
    embeds: tuple[EmbedsKey, ...] | None = None
    for key in keys[names_adapter:]:
        match key:
            case bytes():
                embeds = (EmbedsKey(0, 0, key),)
            case str() if is_head:
                salt = key
            case str():  # older versions name a media item alone
                media.append(MediaKey(key, 0, 0))
            case (str(digest), int(offset)):
                media.append(MediaKey(digest, offset, 0))
            case _:
                raise WireError(f"{where}: expected text, bytes or [identifier, offset], got an array of {len(key)}")
    return Extras(adapter if names_adapter else None, tuple(media), salt, embeds)
