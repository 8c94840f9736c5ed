"""Our own form: everything comes back as it was, except salts, which never leave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora import Adapter, KVCacheManager, Namespace
from anaphora.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, Mirror
from anaphora.identity import Extras, MediaSpan, PromptEmbeds, extra_keys
from anaphora.tokens import pack
from anaphora.wire import AnaphoraCodec, WireError

KEY = bytes(range(32))

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="§"), max_size=12)
names = texts.filter(bool)
# A salt begins with a character that nothing else holds and is too long to turn up by chance.
salts = st.text(st.characters(exclude_characters="\0"), min_size=8, max_size=20).map(lambda text: "§" + text)
adapters = st.builds(Adapter, names, texts, texts, st.none() | st.integers(0, 2**31))
namespaces = st.builds(Namespace, texts, st.none() | adapters, st.none() | salts, st.integers(0, 2**40), texts)
digests = st.binary(min_size=16, max_size=32)
media = st.sampled_from(["GPU", "CPU", "DISK", "pod/7"])


@st.composite
def stores(draw: st.DrawFn) -> BlockStored:
    block_size = draw(st.integers(1, 5))
    num_blocks = draw(st.integers(1, 4))
    first = draw(st.integers(0, 2))
    end = (first + num_blocks) * block_size
    namespace = draw(namespaces)
    items: list[Any] = []
    start = draw(st.integers(0, 6))
    while start < end:
        length = draw(st.integers(1, 7))
        if draw(st.booleans()):
            items.append(MediaSpan(start, length, draw(names)))
        else:
            items.append(PromptEmbeds(start, draw(st.binary(min_size=length, max_size=length)), 1))
        start += length + draw(st.integers(0, 9))
    ids = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=num_blocks * block_size, max_size=num_blocks * block_size)
    return BlockStored(
        tuple(draw(st.lists(digests, min_size=num_blocks, max_size=num_blocks))),
        draw(digests) if first else None,
        pack(draw(ids)),
        block_size,
        namespace,
        extra_keys(namespace, items, first, num_blocks, block_size),
        draw(media),
        draw(st.integers(0, 7)),
    )


removals = st.builds(BlockRemoved, st.lists(digests, min_size=1, max_size=3).map(tuple), media, st.integers(0, 7))
batches = st.lists(stores() | removals | st.just(AllBlocksCleared()), max_size=5)
codecs = st.sampled_from([AnaphoraCodec(), AnaphoraCodec(KEY)])


def masked(codec: AnaphoraCodec, event: Event) -> Event:
    """An event as it should come back."""
    if not isinstance(event, BlockStored):
        return event
    namespace = codec.masked(event.namespace)

    def mask(extras: Extras | None) -> Extras | None:
        return replace(extras, salt=namespace.salt) if extras and extras.salt is not None else extras

    extras = None if event.extras is None else [mask(block) for block in event.extras]
    return replace(event, namespace=namespace, extras=extras)


def salts_of(events: list[Event]) -> set[str]:
    return {e.namespace.salt for e in events if isinstance(e, BlockStored) and e.namespace.salt is not None}


@given(codec=codecs, events=batches, ts=st.floats(0, 2e9))
def test_events_come_back_as_they_were_except_for_the_salt(
    codec: AnaphoraCodec, events: list[Event], ts: float
) -> None:
    received = codec.decode(codec.encode(events, ts))
    assert received.ts == ts
    assert received.events == [masked(codec, event) for event in events]


@given(codec=codecs, events=batches)
def test_a_namespace_keeps_the_names_that_its_equality_ignores(codec: AnaphoraCodec, events: list[Event]) -> None:
    sent = next((e for e in events if isinstance(e, BlockStored) and e.namespace.adapter), None)
    if sent is not None:
        (received,) = codec.decode(codec.encode([sent], 0.0)).events
        assert isinstance(received, BlockStored)
        assert repr(received.namespace) == repr(sent.namespace)


@given(codec=codecs, events=batches)
def test_no_salt_is_in_the_bytes(codec: AnaphoraCodec, events: list[Event]) -> None:
    payload = codec.encode(events, 0.0)
    for salt in salts_of(events):
        assert salt.encode("utf-8", "surrogatepass") not in payload


@given(st.lists(salts, min_size=2, max_size=2, unique=True))
def test_with_a_key_equal_salts_look_equal_and_different_ones_different(pair: list[str]) -> None:
    codec, elsewhere = AnaphoraCodec(KEY), AnaphoraCodec(KEY)
    a, b = (Namespace(salt=salt) for salt in pair)
    assert codec.masked(a) == elsewhere.masked(a) != codec.masked(b)
    assert codec.masked(a) != Namespace()
    assert codec.masked(a) != AnaphoraCodec(KEY[::-1]).masked(a)
    assert codec.masked(Namespace()) == Namespace()


def test_without_a_key_salted_is_all_that_is_said() -> None:
    codec = AnaphoraCodec()
    event = BlockStored((b"\1" * 32,), None, pack([1]), 1, Namespace(salt="tenant"))
    (namespace,) = msgspec.msgpack.decode(codec.encode([event], 0.0))["namespaces"]
    assert namespace == {"model": "", "kv_layout": "", "generation": 0, "adapter": None, "is_salted": True}
    assert codec.masked(Namespace(salt="a")) == codec.masked(Namespace(salt="b")) != Namespace()


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_a_mirror_behind_the_wire_holds_what_the_managers_own_mirror_holds(index: Any) -> None:
    manager = KVCacheManager(6, 2, index=index, events=True)
    codec, near, far = AnaphoraCodec(KEY), Mirror(), Mirror()
    for number in range(12):
        sequence = manager.start([number % 4, 1, 2, number, 5], Namespace(salt=["a", "b", None][number % 3]))
        assert manager.allocate(sequence, 5 - manager.lookup(sequence))
        manager.commit(sequence, 5 - sequence.num_computed_tokens)
        manager.finish(sequence)
        events = manager.take_events()
        near.apply(events)
        far.apply(codec.decode(codec.encode(events, float(number))).events)
        assert near.blocks == far.blocks
    assert near.blocks.total() == manager.num_cached_blocks > 0


def encoded(**changes: Any) -> bytes:
    namespace = {"model": "", "kv_layout": "", "generation": 0, "adapter": None, "is_salted": False}
    event = {"type": "stored", "namespace": 0, "digests": [b"\1"], "parent": None, "tokens": bytes(8), "block_size": 2}
    event |= {"medium": "GPU", "group": 0} | changes.pop("event", {})
    namespace |= changes.pop("namespace", {})
    batch = {"version": 1, "ts": 0.0, "namespaces": [namespace], "events": [event]} | changes
    return msgspec.msgpack.encode(batch)


def test_fields_that_are_not_known_are_ignored() -> None:
    codec = AnaphoraCodec()
    assert codec.decode(encoded(later=1, event={"later": [1]}, namespace={"later": {}})) == codec.decode(encoded())


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (encoded(version=2), "payload: expected version 1, got 2"),
        (encoded(event={"namespace": 1}), r"events\[0\].namespace: expected less than 1, got 1"),
        (encoded(event={"tokens": bytes(4)}), r"events\[0\].tokens: 1 ids are no whole number of blocks of 2"),
        (encoded(event={"extras": [None, None]}), r"events\[0\].extras: expected one for each of 1 blocks, got 2"),
        (encoded(event={"block_size": 0}), r"payload: Expected `int` >= 1 - at `\$.events\[0\].block_size`"),
        (encoded(event={"type": "moved"}), r"payload: Invalid value 'moved' - at `\$.events\[0\].type`"),
        (encoded(event={"digests": [b""]}), r"payload: Expected `bytes` of length >= 1"),
        (encoded(namespace={"salt_tag": bytes(16)}), r"namespaces\[0\].salt_tag: expected none"),
        (encoded(namespace={"salt_tag": b"salt", "is_salted": True}), r"payload: Expected `bytes` of length >= 16"),
        (b"\x93\xca\0\0\0\0\x90\xc0", "payload: Expected `object`, got `array`"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused_with_its_place(payload: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        AnaphoraCodec().decode(payload)


def test_what_cannot_be_written_is_refused() -> None:
    codec = AnaphoraCodec()
    with pytest.raises(ValueError, match="expected at most 10 bytes, got"):
        codec.decode(encoded(), max_bytes=10)
    with pytest.raises(ValueError, match="lone surrogate"):
        codec.encode([BlockRemoved((b"\1",), medium="\ud800")], 0.0)
    with pytest.raises(ValueError, match="key: expected 16 to 64 bytes, got 3"):
        AnaphoraCodec(b"key")
