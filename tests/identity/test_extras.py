from __future__ import annotations

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from anaphora import Adapter, Namespace
from anaphora.identity import (
    DEFAULT_NAMESPACE,
    EmbedsKey,
    Extras,
    Media,
    MediaKey,
    MediaSpan,
    PromptEmbeds,
    extra_keys,
    validate_media,
)

ROW_BYTES = 3


@st.composite
def media_in_order(draw: st.DrawFn) -> tuple[Media, ...]:
    items: list[Media] = []
    end = 0
    for _ in range(draw(st.integers(0, 4))):
        offset, length = end + draw(st.integers(0, 6)), draw(st.integers(1, 9))
        if draw(st.booleans()):
            items.append(MediaSpan(offset, length, draw(st.sampled_from("xy"))))
        else:
            items.append(PromptEmbeds(offset, draw(st.binary(min_size=3 * length, max_size=3 * length)), ROW_BYTES))
        end = offset + length
    return validate_media(items, end)


def block_by_block(namespace: Namespace, media: tuple[Media, ...], block: int, size: int) -> Extras | None:
    """The definition: every item that shares a position with the block."""
    start = block * size
    items, rows = [], []
    for item in media:
        shared = [p for p in range(start, start + size) if item.offset <= p < item.offset + item.length]
        if shared and isinstance(item, MediaSpan):
            items.append(MediaKey(item.digest, item.offset - start, item.length))
        elif shared:
            digest = item.digest(shared[0] - item.offset, shared[-1] + 1 - item.offset)
            rows.append(EmbedsKey(shared[0] - start, len(shared), digest))
    embeds = tuple(rows) if any(isinstance(item, PromptEmbeds) for item in media) else None
    salt = namespace.salt if block == 0 else None
    extras = Extras(namespace.adapter, tuple(items), salt, embeds)
    return None if extras == Extras() else extras


@given(
    st.sampled_from([DEFAULT_NAMESPACE, Namespace(salt="s"), Namespace(salt="s", adapter=Adapter("w"), model="m")]),
    media_in_order(),
    st.integers(0, 8),
    st.integers(0, 8),
    st.integers(1, 7),
)
def test_a_block_has_the_items_that_overlap_it(namespace, media, first, num_blocks, size):
    expected = [block_by_block(namespace, media, block, size) for block in range(first, first + num_blocks)]
    assert extra_keys(namespace, media, first, num_blocks, size) == (expected if any(expected) else None)


def test_text_without_adapter_and_salt_has_no_extras_at_all():
    assert extra_keys(Namespace(model="m", generation=3, kv_layout="k"), (), 0, 4, 4) is None
    assert extra_keys(Namespace(salt="s"), (), 1, 4, 4) is None
    assert extra_keys(DEFAULT_NAMESPACE, (MediaSpan(0, 4, "x"),), 1, 4, 4) is None


def test_offsets_count_from_the_blocks_first_token_and_are_negative_where_the_item_began_earlier():
    keys = extra_keys(DEFAULT_NAMESPACE, (MediaSpan(6, 4, "x"),), 0, 4, 4)
    assert keys == [None, Extras(media=(MediaKey("x", 2, 4),)), Extras(media=(MediaKey("x", -2, 4),)), None]


def test_content_leaves_out_what_the_namespace_says():
    namespace = Namespace(salt="s", adapter=Adapter("w"))
    rows = bytes(range(6))
    keys = extra_keys(namespace, (PromptEmbeds(0, rows, 3), MediaSpan(4, 2, "x")), 0, 4, 2)
    assert keys is not None
    assert [block and block.content for block in keys] == [
        ((), (EmbedsKey(0, 2, sha256(rows).digest()),)),
        None,
        ((MediaKey("x", 0, 2),), ()),
        None,
    ]
    assert all(block and block.embeds is not None for block in keys)


def test_the_salt_is_not_shown():
    assert "tenant-7" not in repr(extra_keys(Namespace(salt="tenant-7"), (), 0, 1, 4))
