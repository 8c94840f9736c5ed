"""Our own digests: keyed, over the full identity, the same everywhere under one key."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from itertools import accumulate, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora import Adapter, Namespace
from anaphora.identity import (
    DEFAULT_NAMESPACE,
    BlockDigests,
    Media,
    MediaSpan,
    PromptEmbeds,
    extra_keys,
    validate_media,
)

pytestmark = pytest.mark.usefixtures("each_form")

KEY = bytes(range(32))
# Letters that framing uses itself.
TEXT = st.text("ab\0\1", max_size=3)
NAMESPACES = st.builds(
    Namespace,
    model=TEXT,
    adapter=st.none() | st.builds(Adapter, TEXT.filter(bool), name=TEXT),
    salt=st.none() | TEXT.filter(bool),
    generation=st.integers(0, 2),
    kv_layout=TEXT,
)


def chain(ids: list[int], block_size: int, namespace: Namespace = DEFAULT_NAMESPACE, media: tuple[Media, ...] = ()):
    names = BlockDigests(KEY)
    whole = len(ids) // block_size
    extras = extra_keys(namespace, validate_media(media, len(ids)), 0, whole, block_size)
    return names.chain(names.root(namespace), ids[: whole * block_size], block_size, extras)


def num_shared(one: list[bytes], other: list[bytes]) -> int:
    """Leading digests that are equal; no later one may be."""
    count = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
    assert not set(one[count:]) & set(other)
    return count


class TestNamespaces:
    @given(NAMESPACES, NAMESPACES)
    def test_roots_are_equal_exactly_if_namespaces_are(self, one, other):
        names = BlockDigests(KEY)
        assert (names.root(one) == names.root(other)) == (one == other)

    def test_no_field_imitates_another(self):
        texts = ["a", "ab", "b", "a\1a", "\1a"]
        namespaces = [Namespace(model=m, salt=s, kv_layout=k) for m, s, k in product(texts, texts, texts)]
        names = BlockDigests(KEY)
        assert len({names.root(namespace) for namespace in namespaces}) == len(namespaces)

    def test_adapters_of_one_name_and_different_weights_share_nothing(self):
        ids = list(range(1, 10))
        first, second, again = (
            chain(ids, 4, Namespace(adapter=Adapter(digest, name="s", lora_id=i)))
            for digest, i in [("aa", 1), ("bb", 2), ("aa", 1)]
        )
        base = chain(ids, 4)
        assert [num_shared(first, other) for other in (second, base, again)] == [0, 0, 2]

    def test_tenants_with_different_salts_share_nothing(self):
        ids = list(range(1025))
        mine, theirs = (chain(ids, 16, Namespace(salt=salt)) for salt in ("tenant-a/x", "tenant-b/x"))
        assert num_shared(mine, theirs) == num_shared(mine, chain(ids, 16)) == 0
        assert num_shared(mine, chain(ids, 16, Namespace(salt="tenant-a/x"))) == 64


class TestMedia:
    IDS = (1, 2, 3, 4, 5, 6, 99, 99, 99, 99, 7, 8, 9)

    def image(self, digest: str, offset: int = 6, length: int = 4) -> list[bytes]:
        return chain(list(self.IDS), 4, media=(MediaSpan(offset, length, digest),))

    def test_different_images_on_equal_placeholders_share_only_what_stands_before(self):
        assert num_shared(self.image("X"), self.image("Y")) == 1
        assert num_shared(self.image("X"), self.image("X")) == 3

    def test_one_image_at_two_offsets_or_of_two_lengths_is_not_the_same(self):
        assert num_shared(self.image("X"), self.image("X", offset=7, length=3)) == 1
        assert num_shared(self.image("X"), self.image("X", length=3)) == 1
        assert num_shared(self.image("X"), chain(list(self.IDS), 4)) == 1

    def test_equal_ids_with_different_rows_are_not_the_same(self):
        def rows(content: bytes, offset: int = 4) -> list[bytes]:
            return chain([0] * 12, 4, media=(PromptEmbeds(offset, content, 2),))

        assert num_shared(rows(b"aabbccdd"), rows(b"aabbccdd")) == 3
        assert num_shared(rows(b"aabbccdd"), rows(b"aabbccde")) == 1
        assert num_shared(rows(b"aabb"), rows(b"aabb", offset=5)) == 1
        assert num_shared(rows(b"aabb", offset=1), chain([0] * 12, 4)) == 0

    @given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2), st.sampled_from("xy")), max_size=3), st.data())
    def test_digests_are_equal_exactly_as_far_as_media_are(self, steps, data):
        def placed(moves: list[tuple[int, int, str]]) -> tuple[MediaSpan, ...]:
            spans: list[MediaSpan] = []
            for gap, length, digest in moves:
                end = spans[-1].offset + spans[-1].length if spans else 0
                spans.append(MediaSpan(end + gap, length, digest))
            return tuple(spans)

        one = placed(steps)
        other = placed(data.draw(st.permutations(steps)))
        extras = [extra_keys(DEFAULT_NAMESPACE, media, 0, 6, 2) or [None] * 6 for media in (one, other)]
        equal = next((i for i, (a, b) in enumerate(zip(*extras, strict=True)) if a != b), 6)
        assert num_shared(chain([9] * 12, 2, media=one), chain([9] * 12, 2, media=other)) == equal


class TestChains:
    @given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    def test_a_chain_continued_from_its_last_digest_is_the_whole_chain(self, cuts):
        media = (MediaSpan(1, 3, "x"), PromptEmbeds(5, b"rows", 1))
        ids = list(range(2 * sum(cuts)))
        names = BlockDigests(KEY)
        parent = root = names.root(DEFAULT_NAMESPACE)
        pieces: list[bytes] = []
        for end in accumulate(cuts):
            first = len(pieces)
            extras = extra_keys(DEFAULT_NAMESPACE, media, first, end - first, 2)
            pieces += names.chain(parent, ids[2 * first : 2 * end], 2, extras)
            parent = pieces[-1]
        assert pieces == names.chain(root, ids, 2, extra_keys(DEFAULT_NAMESPACE, media, 0, sum(cuts), 2))

    def test_every_source_of_ids_gives_the_same_names(self):
        ids = array("i", range(8))
        expected = chain(list(ids), 4)
        names = BlockDigests(KEY)
        root = names.root(DEFAULT_NAMESPACE)
        for source in (ids, ids.tobytes(), memoryview(ids), bytearray(ids.tobytes()), tuple(ids)):
            assert names.chain(root, source, 4) == expected
        assert [names.block(root, ids[:4].tobytes())] == expected[:1]

    def test_a_block_without_content_of_its_own_has_its_plain_name(self):
        namespace = Namespace(adapter=Adapter("w"), salt="s")
        names = BlockDigests(KEY)
        extras = extra_keys(namespace, (), 0, 2, 2)
        assert extras is not None
        root = names.root(namespace)
        assert names.chain(root, [1, 2, 3, 4], 2, extras) == names.chain(root, [1, 2, 3, 4], 2)

    def test_a_physical_block_is_named_by_the_finer_digest_that_closes_it(self):
        x, y, z = (list(range(1, 17)), [1, 2, 3, 4, *range(105, 117)], [*range(1, 9), *range(205, 213)])
        closing = [chain(ids, 2)[3::4] for ids in (x, y, z)]
        assert num_shared(closing[0], closing[1]) == 0
        assert num_shared(closing[0], closing[2]) == 1

    @pytest.mark.parametrize(
        ("parent", "tokens", "block_size", "extras", "message"),
        [
            (b"", [1, 2], 2, None, "parent: expected a digest of 32 bytes, got 0 bytes"),
            (bytes(32), [1, 2, 3], 2, None, "tokens: 3 ids are no whole number of blocks of 2"),
            (bytes(32), [1, 2], 0, None, "block_size: expected 1 or more, got 0"),
            (bytes(32), [1, 2], 2, [None] * 2, "extras: expected one entry for each of 1 blocks, got 2"),
            (bytes(32), [2**31, 2], 2, None, "does not fit int32"),
        ],
    )
    def test_refusals(self, parent, tokens, block_size, extras, message):
        with pytest.raises(ValueError, match=message):
            BlockDigests(KEY).chain(parent, tokens, block_size, extras)


class TestKeys:
    def test_names_under_different_keys_have_nothing_in_common(self):
        one, other = BlockDigests(KEY), BlockDigests(KEY[::-1])
        assert one.root(DEFAULT_NAMESPACE) != other.root(DEFAULT_NAMESPACE)
        assert one.chain(bytes(32), [1, 2], 2) != other.chain(bytes(32), [1, 2], 2)

    @pytest.mark.parametrize("size", [0, 15, 65])
    def test_a_key_is_16_to_64_bytes(self, size):
        with pytest.raises(ValueError, match=f"key: expected 16 to 64 bytes, got {size}"):
            BlockDigests(bytes(size))

    def test_without_a_key_names_mean_something_in_this_process_only(self):
        assert BlockDigests().root(DEFAULT_NAMESPACE) == BlockDigests().root(DEFAULT_NAMESPACE)
        script = "from anaphora.identity import *; print(BlockDigests().root(DEFAULT_NAMESPACE).hex())"
        roots = {subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout for _ in "ab"}
        assert len(roots) == 2


CHAINS = """
from anaphora import Adapter, Namespace
from anaphora.identity import BlockDigests, MediaSpan, VllmDigests, extra_keys
namespace = Namespace(model="m", adapter=Adapter("w", name="a", path="/a"), salt="s", generation=2, kv_layout="k")
extras = extra_keys(namespace, (MediaSpan(5, 4, "image"),), 0, 3, 4)
for names in (BlockDigests(bytes(range(32))), VllmDigests("sha256"), VllmDigests("sha256_cbor")):
    print(names.name, names.chain(names.root(namespace), list(range(1, 13)), 4, extras)[-1].hex())
"""
GOLDEN = """\
anaphora fec3987db4811999f1d6a034650f51b56a4ddc488169d541b4be5fcbc8fcb0ce
sha256 4feb4b2ae53bf2b8c5f6b120db97461d959548bceccff937f00cbec41d3c9cf2
sha256_cbor 58722485265f23a3816fd35213db068e3badb090788d3987d5e80bf4a7ca8a93
"""


@pytest.mark.parametrize("seed", ["0", "1", None])
def test_every_process_and_machine_gives_the_same_names(seed):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    ran = subprocess.run([sys.executable, "-c", CHAINS], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == GOLDEN


def test_the_machines_byte_order_does_not_show(monkeypatch):
    ids = array("i", [1, 300, 70_000, 2**31 - 1])
    names = BlockDigests(KEY)
    here = names.chain(bytes(32), ids, 2)
    ids.byteswap()
    monkeypatch.setattr(sys, "byteorder", {"little": "big", "big": "little"}[sys.byteorder])
    assert names.chain(bytes(32), ids, 2) == here
