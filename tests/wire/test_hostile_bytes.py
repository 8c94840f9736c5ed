"""Whatever bytes arrive, a reader returns events or raises WireError, in bounded memory."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora import Adapter, Namespace
from anaphora.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from anaphora.identity import EmbedsKey, Extras, MediaKey
from anaphora.wire import AnaphoraCodec, Frames, VllmEventFormat, WireError, decode_batch, events_of

if TYPE_CHECKING:
    from collections.abc import Callable

CODEC = AnaphoraCodec(b"k" * 16)
EVENTS = [
    BlockStored(
        (b"\1" * 32, b"\2" * 32),
        None,
        bytes(range(16)),
        2,
        Namespace("m", Adapter("d", "name", "path", 3), "salt", 1, "bf16"),
        [Extras(Adapter("d", "name"), (MediaKey("i", -1, 2),), "salt", (EmbedsKey(0, 1, b"\3" * 32),)), None],
    ),
    BlockRemoved((b"\1" * 32,)),
    AllBlocksCleared(),
]


def read_vllm(payload: bytes) -> object:
    return events_of(decode_batch(payload))


READERS = {
    "vllm": (read_vllm, VllmEventFormat().encode(EVENTS, 1.5)),
    "anaphora": (CODEC.decode, CODEC.encode(EVENTS, 1.5)),
}
readers = pytest.mark.parametrize(("read", "valid"), READERS.values(), ids=READERS)

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
words = st.sampled_from(
    [
        *("type", "BlockStored", "BlockRemoved", "AllBlocksCleared", "block_hashes", "token_ids", "block_size"),
        *("parent_block_hash", "extra_keys", "lora_name", "cache_salt", "version", "ts", "namespaces", "events"),
        *("stored", "removed", "digests", "parent", "tokens", "medium", "group", "extras", "is_salted", "salt_tag"),
    ]
)
values = st.recursive(
    scalars | words,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(words | st.text(), inner, max_size=8),
    max_leaves=30,
)


@readers
@given(payload=st.binary(max_size=200))
def test_any_bytes(read: Callable[[bytes], object], valid: bytes, payload: bytes) -> None:
    with suppress(WireError):
        read(payload)


@readers
@given(value=values)
def test_any_values_in_the_place_of_events(read: Callable[[bytes], object], valid: bytes, value: Any) -> None:
    for whole in (value, [1.5, value, 0], [1.5, [value], 0]):
        with suppress(WireError):
            read(msgspec.msgpack.encode(whole))


@readers
@given(data=st.data())
def test_valid_bytes_with_some_replaced(read: Callable[[bytes], object], valid: bytes, data: st.DataObject) -> None:
    payload = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(payload)))
        end = start + data.draw(st.integers(0, 6))
        payload[start:end] = data.draw(st.binary(max_size=6))
    with suppress(WireError):
        read(bytes(payload))


@readers
def test_every_beginning_of_valid_bytes(read: Callable[[bytes], object], valid: bytes) -> None:
    for length in range(len(valid)):
        with pytest.raises(WireError):
            read(valid[:length])


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_any_message_parts(parts: list[bytes]) -> None:
    with suppress(WireError):
        Frames.from_parts(parts)


def within_vllm_event(field: str, value: bytes) -> bytes:
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [], "block_size": 4} | {field: "HERE"}
    return msgspec.msgpack.encode([1.5, [event], 0]).replace(b"\xa4HERE", value)


NUM_ITEMS = 2**18
MANY = b"\xdd" + NUM_ITEMS.to_bytes(4, "big")
FLOODS = {
    "events": b"\x93\xca\0\0\0\0" + MANY + b"\x90" * NUM_ITEMS + b"\xc0",
    "hashes": within_vllm_event("block_hashes", MANY + b"\x01" * NUM_ITEMS),
    "keys": within_vllm_event("extra_keys", MANY + b"\x90" * NUM_ITEMS),
    "keys of one block": within_vllm_event("extra_keys", b"\x91" + MANY + b"\x80" * NUM_ITEMS),
    "nothing known": within_vllm_event("future", MANY + b"\x80" * NUM_ITEMS),
    "depth": within_vllm_event("extra_keys", b"\x91" * NUM_ITEMS),
    "unknown depth": within_vllm_event("future", b"\x91" * NUM_ITEMS),
}


@pytest.mark.parametrize("payload", FLOODS.values(), ids=FLOODS)
def test_memory_is_bounded_by_the_bytes_received(payload: bytes) -> None:
    tracemalloc.start()
    try:
        with suppress(WireError):
            read_vllm(payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(payload)
