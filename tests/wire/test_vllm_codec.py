"""What vLLM's form says, what readers of it must put up with, and what it must not give away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from anaphora import Adapter, KVCacheManager, Namespace
from anaphora.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, Mirror
from anaphora.identity import EmbedsKey, Extras, MediaKey, MediaSpan
from anaphora.tokens import pack
from anaphora.wire import Frames, GroupKind, VllmEventFormat, WireError, decode_batch, encode_batch, events_of

HASH = 7


def batch(*events: Any, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def read(*events: Any) -> list[Event]:
    return events_of(decode_batch(batch(*events)))


def stored(**fields: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": [HASH], "parent_block_hash": None, "token_ids": [1, 2, 3, 4]}
    return event | {"block_size": 4} | fields


STORED = BlockStored((HASH.to_bytes(8, "big"),), None, pack([1, 2, 3, 4]), 4, Namespace())


# -- reading -----------------------------------------------------------------------------------------------------------


def test_arrays_and_maps_with_missing_and_unknown_fields_say_the_same() -> None:
    row = ["BlockStored", [HASH], None, [1, 2, 3, 4], 4]
    assert read(row) == read(stored(future=1)) == [STORED]
    (full,) = read([*row, None, "GPU", None, [["s"]], 0, "x", "y"])
    assert full == BlockStored(
        STORED.digests, None, STORED.tokens, 4, Namespace(salt="s"), extras=[Extras(salt="s")], medium="GPU", group=0
    )
    removed = BlockRemoved(STORED.digests)
    assert read(["BlockRemoved", [HASH]], ["BlockRemoved", [HASH], "GPU", 0, "LOCAL", "new"]) == [removed, removed]
    assert read(["AllBlocksCleared"], ["AllBlocksCleared", 1], {"type": "AllBlocksCleared", "why": "new"}) == (
        [AllBlocksCleared()] * 3
    )


def test_the_first_key_of_a_map_need_not_be_its_type() -> None:
    assert read(dict(reversed(stored().items()))) == [STORED]


def test_events_of_unknown_types_are_counted_and_skipped() -> None:
    received = decode_batch(batch(["Unknown", 1], {"type": "BlockMoved", "to": {"a": [1.5, None]}}, stored()))
    assert received.unknown_types == ("Unknown", "BlockMoved")
    assert events_of(received) == [STORED]


def test_a_batch_may_lack_its_rank_and_have_fields_more() -> None:
    assert decode_batch(msgspec.msgpack.encode([1.5, []])).data_parallel_rank is None
    assert decode_batch(msgspec.msgpack.encode([2, [], 3, "new", {}])) == msgspec.structs.replace(
        decode_batch(batch(rank=3)), ts=2.0
    )


def test_sglangs_events_are_read_with_signed_names_and_a_salt_of_their_own() -> None:
    # RadixCache 0.5.23, page size 1, after the insertion of [1, 2, 3] and then of [1, 2, 9].
    first, second = read(
        {
            "type": "BlockStored",
            "block_hashes": [7470307888890966271, -1634645291211865391, 7325169757385981536],
            "token_ids": [1, 2, 3],
            "block_size": 1,
            "medium": "GPU",
            "cache_salt": "s1",
        },
        {
            "type": "BlockStored",
            "block_hashes": [7406025652449014946],
            "parent_block_hash": -1634645291211865391,
            "token_ids": [9],
            "block_size": 1,
            "medium": "CPU_PINNED",
        },
    )
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert second.parent == first.digests[1] == (2**64 - 1634645291211865391).to_bytes(8, "big")
    assert first.namespace == Namespace(salt="s1")
    assert second.medium == "CPU_PINNED"


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_mirror_that_follows_sglangs_tree_ends_empty_after_its_reset(page_size: int) -> None:
    path = Path(__file__).parents[1] / f"golden/sglang/events_page{page_size}.json"
    mirror = Mirror()
    num_blocks = []
    for step in json.loads(path.read_text())["steps"]:
        mirror.apply(read(*step["events"]))
        num_blocks.append(mirror.blocks.total())
    # Inserted are three pages (then split), one that branches off, three under a salt, three under a key that SGLang's
    # names leave out; then one page is evicted, then all.
    assert num_blocks == [3, 3, 4, 7, 10, 9, 0, 0]


@pytest.mark.parametrize("replayed", [False, True])
def test_frames_are_read_with_and_without_their_topic(replayed: bool) -> None:
    live = Frames("kv@pod@model", 258, b"payload")
    assert live.parts()[1] == b"\0\0\0\0\0\0\1\2"
    delimiter = [b""] if replayed else []
    assert Frames.from_parts([*delimiter, *live.parts()]) == live
    assert Frames.from_parts(live.parts()[1:]) == Frames("", 258, b"payload")


@pytest.mark.parametrize(
    "parts", [[], [b"x"], [b"t", b"1234567", b""], [b"t", b"123456789", b""], [b"\xff", bytes(8), b""], [b"x"] * 4]
)
def test_other_frames_are_refused(parts: list[bytes]) -> None:
    with pytest.raises(WireError, match=r"^frames: "):
        Frames.from_parts(parts)


def test_each_block_has_its_own_extra_keys() -> None:
    keys = [["sql", ["img", 2], "tenant"], None, [["img", -6], "other-img"], [b"\1" * 32]]
    event = stored(block_hashes=[1, 2, 3, 4], token_ids=[0] * 16, extra_keys=keys, lora_name="sql", lora_id=3)
    (received,) = read(event)
    assert isinstance(received, BlockStored)
    adapter = Adapter("sql", name="sql", lora_id=3)
    assert received.namespace == Namespace(adapter=adapter, salt="tenant")
    assert received.extras == [
        Extras(adapter, (MediaKey("img", 2, 0),), "tenant"),
        None,
        Extras(media=(MediaKey("img", -6, 0), MediaKey("other-img", 0, 0))),
        Extras(embeds=(EmbedsKey(0, 0, b"\1" * 32),)),
    ]


def test_a_salt_that_reads_like_the_adapters_name_is_still_a_salt() -> None:
    (received,) = read(stored(extra_keys=[["x", "x"]], lora_name="x"))
    assert isinstance(received, BlockStored)
    assert received.namespace == Namespace(adapter=Adapter("x"), salt="x")


def test_blocks_of_a_lower_tier_may_come_without_tokens() -> None:
    (received,) = read(stored(token_ids=[], block_size=0, medium="CPU"))
    assert received == BlockStored(STORED.digests, None, b"", 0, Namespace(), medium="CPU")


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (stored(block_hashes=["a"]), r"events\[1\]: Expected `int \| bytes`, got `str` - at `\$.block_hashes\[0\]`"),
        (stored(block_hashes=[b""]), r"events\[1\]: Expected `bytes` of length >= 1 - at `\$.block_hashes\[0\]`"),
        (stored(block_hashes=[bytes(65)]), r"events\[1\]: Expected `bytes` of length <= 64"),
        (stored(block_size=24), r"events\[1\]: 4 token ids for 1 blocks of block_size 24"),
        (stored(block_size=3), r"events\[1\]: 4 token ids for 1 blocks of block_size 3"),
        (stored(block_size=-4), r"events\[1\]: Expected `int` >= 0 - at `\$.block_size`"),
        (stored(token_ids=[1, 2, 3, 2**31]), r"events\[1\].token_ids\[3\]: 2147483648 does not fit int32"),
        (stored(extra_keys=[]), r"events\[1\]: extra_keys for 0 of 1 blocks"),
        (stored(extra_keys=[[1.5]]), r"events\[1\]: extra_keys: expected texts, bytes"),
        (stored(extra_keys=[[["lora", "name", "path"]]]), r"events\[1\].extra_keys\[0\]: .*an array of 3"),
        ({"type": "BlockStored"}, r"events\[1\]: Object missing required field `block_hashes`"),
        (["BlockRemoved"], r"events\[1\]: Expected `array` of at least length 2, got 1"),
        ({"kind": 1}, r"events\[1\]: Object missing required field `type`"),
        ([], r"events\[1\]: Expected `array` of at least length 1, got 0"),
        (None, r"events\[1\]: Expected `object`, got `None`"),
    ],
)
def test_an_event_that_makes_no_sense_is_refused_with_its_place(event: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        read({"type": "AllBlocksCleared"}, event)


def test_absurd_lengths_are_refused() -> None:
    with pytest.raises(WireError, match="expected at most 100 bytes, got 101"):
        decode_batch(bytes(101), max_bytes=100)
    with pytest.raises(WireError, match="expected at most 1048576 events, got 1048577"):
        decode_batch(b"\x93\xca\0\0\0\0\xdd\0\x10\0\1" + b"\xc0" * (2**20 + 1) + b"\xc0")
    for length in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        with pytest.raises(WireError, match="payload: Input data was truncated"):
            decode_batch(b"\x93\xca\0\0\0\0" + length)


# -- writing -----------------------------------------------------------------------------------------------------------


def manager_events(namespace: Namespace, **options: Any) -> list[Event]:
    manager = KVCacheManager(8, 4, index="hash", events=True)
    sequence = manager.start(list(range(1, 10)), namespace, **options)
    assert manager.allocate(sequence, 9)
    manager.commit(sequence, 9)
    return manager.take_events()


def extra_keys(form: VllmEventFormat, events: list[Event]) -> Any:
    return decode_batch(form.encode(events, 0.0)).messages[0].extra_keys  # type: ignore[union-attr]


def test_a_salt_is_not_written_unless_asked_for() -> None:
    salts = Namespace(salt="tenant-a"), Namespace(salt="tenant-b")
    a, b = map(manager_events, salts)
    assert extra_keys(VllmEventFormat(clear_salts=True), a) == (("tenant-a",), None)
    for form in (VllmEventFormat(), VllmEventFormat(key=b"k" * 32)):
        assert b"tenant-a" not in form.encode(a, 0.0)
        (tag_a,), (tag_b,) = extra_keys(form, a)[0], extra_keys(form, b)[0]
        assert tag_a != tag_b
        assert len(tag_a) == 32
        assert extra_keys(form, a) == ((tag_a,), None)
    assert extra_keys(VllmEventFormat(key=b"k" * 32), a) != extra_keys(VllmEventFormat(key=b"l" * 32), a)


def test_salted_and_unsalted_blocks_of_the_same_tokens_have_disjoint_names() -> None:
    names = [
        set(decode_batch(VllmEventFormat().encode(manager_events(Namespace(salt=salt)), 0.0)).messages[0].block_hashes)  # type: ignore[union-attr]
        for salt in (None, "a", "b")
    ]
    assert sum(map(len, names)) == len(set().union(*names)) == 6


def test_media_keys_are_untagged_and_relative_to_each_block() -> None:
    events = manager_events(Namespace(), media=[MediaSpan(2, 4, "img")])
    assert extra_keys(VllmEventFormat(), events) == ((["img", 2],), (["img", -2],))


def test_layer_groups_are_named_by_their_kinds() -> None:
    form = VllmEventFormat(groups=(GroupKind(), GroupKind("sliding_window", 128)))
    event = BlockStored((b"\1" * 32,), None, pack([1]), 1, Namespace(), group=1)
    message = decode_batch(form.encode([event], 0.0)).messages[0]
    assert message.group_idx == 1  # type: ignore[union-attr]
    assert message.kv_cache_spec_kind == "sliding_window"  # type: ignore[union-attr]
    assert message.kv_cache_spec_sliding_window == 128  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="groups: expected a kind for layer group 1, got 1 kinds"):
        VllmEventFormat().encode([event], 0.0)


def test_what_vllm_has_no_form_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"adapter\.name: vLLM's digests tell adapters by their names"):
        VllmEventFormat().encode(manager_events(Namespace(adapter=Adapter("weights"))), 0.0)
    salted = manager_events(Namespace(salt="secret\ud800"))
    with pytest.raises(ValueError, match="lone surrogate") as refusal:
        VllmEventFormat(clear_salts=True).encode(salted, 0.0)
    assert "secret" not in str(refusal.value)
    with pytest.raises(ValueError, match="key: expected 16 to 64 bytes, got 3"):
        VllmEventFormat(key=b"key")


def test_fields_that_vllm_always_writes_are_written_when_they_are_empty() -> None:
    event = BlockStored((b"\1" * 8,), None, b"", 0, Namespace(), medium="CPU")
    (written,) = msgspec.msgpack.decode(VllmEventFormat().encode([event], 0.0))[1]
    fields = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
    assert list(written) == [*fields, "extra_keys", "group_idx", "kv_cache_spec_kind"]
    assert (written["token_ids"], written["parent_block_hash"], written["lora_id"]) == ([], None, None)


def test_names_of_other_lengths_than_eight_bytes_survive_as_bytes() -> None:
    event = BlockRemoved((b"\1" * 16, b"\2" * 32))
    payload = VllmEventFormat(int_hashes=False).encode([event], 0.0)
    assert events_of(decode_batch(payload)) == [event]
    assert encode_batch(decode_batch(payload)) == payload
