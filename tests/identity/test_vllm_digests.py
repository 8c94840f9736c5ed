"""vLLM's digests against the standard library's pickle and a CBOR encoder written for these tests."""

from __future__ import annotations

import pickle
import sys
from array import array
from hashlib import sha256
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anaphora import Adapter, Namespace
from anaphora.identity import (
    DEFAULT_NAMESPACE,
    Extras,
    MediaKey,
    MediaSpan,
    PromptEmbeds,
    VllmDigests,
    extra_keys,
    vllm_extra_keys,
)
from anaphora.tokens import pack

pytestmark = pytest.mark.usefixtures("each_form")

# Around every boundary at which an encoding changes its size, and anywhere.
EDGES = [0, 23, 24, 0x7F, 0x80, 0xFF, 0x100, 0x1819, 0x7FFF, 0xFFFF, 0x10000, 0x1A0000, 0xFFFFFF, 0x1000000, 2**31 - 1]
INT32 = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**18), st.integers(-(2**31), 2**31 - 1))
INT64 = st.one_of(INT32, st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**31, 2**32, 2**39, -(2**39), -(2**63)]))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)


def cbor(value: object) -> bytes:
    """Deterministic CBOR of what a block's triple can hold."""
    match value:
        case None:
            return b"\xf6"
        case int():
            major, number, rest = (0, value, b"") if value >= 0 else (1, -1 - value, b"")
        case bytes():
            major, number, rest = 2, len(value), value
        case str():
            major, number, rest = 3, len(value.encode()), value.encode()
        case tuple():
            major, number, rest = 4, len(value), b"".join(map(cbor, value))
        case _:
            raise TypeError(value)
    if number < 24:
        return bytes([major * 32 + number]) + rest
    exponent = next(e for e in range(4) if number < 256 ** (2**e))
    return bytes([major * 32 + 24 + exponent]) + number.to_bytes(2**exponent, "big") + rest


SERIALIZE = {"sha256": lambda triple: pickle.dumps(triple, protocol=5), "sha256_cbor": cbor}
ALGORITHM = st.sampled_from(list(SERIALIZE))


@st.composite
def prompts(draw: st.DrawFn, ids: st.SearchStrategy[int]) -> tuple[list[int], int]:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 5, 16, 30, 300]))
    num_blocks = draw(st.integers(1, 3 if block_size > 16 else 9))
    pattern = draw(st.lists(ids, min_size=1, max_size=40))
    size = block_size * num_blocks
    return (pattern * size)[:size], block_size


@given(ALGORITHM, prompts(INT32))
@example("sha256_cbor", (EDGES * 600, 5))
def test_packed_ids_are_digested_as_vllm_serialises_them(algorithm, prompt):
    ids, block_size = prompt
    names = VllmDigests(algorithm)
    parent = names.root(DEFAULT_NAMESPACE)
    found = names.chain(parent, pack(ids), block_size)
    for i, name in enumerate(found):
        triple = (parent, tuple(ids[i * block_size : (i + 1) * block_size]), None)
        assert name == sha256(SERIALIZE[algorithm](triple)).digest()
        parent = name
    assert len(found) * block_size == len(ids)


@given(ALGORITHM, prompts(INT64))
def test_ids_of_64_bits_are_digested_as_vllm_serialises_them(algorithm, prompt):
    ids, block_size = prompt
    names = VllmDigests(algorithm)
    root = names.root(DEFAULT_NAMESPACE)
    triple = (root, tuple(ids[:block_size]), None)
    assert names.chain_ids(root, ids, block_size)[0] == sha256(SERIALIZE[algorithm](triple)).digest()


def test_a_long_prompt_is_encoded_in_pieces_without_a_seam():
    ids = [i * 7919 % 150_000 for i in range(20_000)]
    for algorithm in SERIALIZE:
        names = VllmDigests(algorithm)
        root = names.root(DEFAULT_NAMESPACE)
        assert names.chain(root, pack(ids), 16) == names.chain_ids(root, ids, 16)
        assert names.chain(root, pack(ids), 10_000) == names.chain_ids(root, ids, 10_000)


@given(ALGORITHM, st.lists(st.tuples(TEXT, st.integers(-70_000, 70_000)), max_size=4), TEXT, TEXT, st.none() | TEXT)
@example("sha256", [("d" * 255, -1)], "n" * 255, "p" * 256, "s" * 257)
def test_extra_keys_are_digested_as_separate_objects_but_for_the_tag_words(algorithm, items, name, path, salt):
    extras = Extras(Adapter("w", name=name, path=path), tuple(MediaKey(d, o, 1) for d, o in items), salt)
    names = VllmDigests(algorithm)
    root = names.root(DEFAULT_NAMESPACE)

    def own(text: str) -> str:
        """An equal string that is another object."""
        return "".join([text, "\0"])[:-1]

    keys = [("lora", own(name), own(path)), *(("mm", own(digest), offset) for digest, offset in items)]
    if salt:
        keys.append(("cache_salt", own(salt)))
    triple = (root, (1, 2, 3, 4), tuple(keys))
    expected = sha256(SERIALIZE[algorithm](triple)).digest()
    # Python shares the objects of one-letter strings, which a message decoder does not.
    if algorithm != "sha256" or all(len(text) > 1 for text in [name, path, salt or "  ", *(d for d, _ in items)]):
        assert names.chain(root, [1, 2, 3, 4], 4, [extras]) == [expected]


def test_equal_strings_give_one_digest_whether_they_are_one_object_or_two():
    one, two = "same-name", "".join(["same", "-name"])
    assert one is not two
    names = VllmDigests("sha256")
    root = names.root(DEFAULT_NAMESPACE)
    triple = (root, (1, 2), (("lora", one, ""), ("cache_salt", two)))
    expected = sha256(pickle.dumps(triple, protocol=5)).digest()
    for salt in (one, two):
        extras = extra_keys(Namespace(adapter=Adapter("w", name=one), salt=salt), (), 0, 1, 2)
        assert names.chain(root, [1, 2], 2, extras) == [expected]


@pytest.mark.parametrize("algorithm", SERIALIZE)
def test_the_salt_stands_on_the_first_block_and_rekeys_all_that_follow(algorithm):
    names = VllmDigests(algorithm, seed="0")
    salted = Namespace(salt="tenant")
    extras = extra_keys(salted, (), 0, 3, 2)
    assert extras is not None
    assert [block and block.salt for block in extras] == ["tenant", None, None]
    ids = [1, 2, 3, 4, 5, 6]
    plain = names.chain(names.root(DEFAULT_NAMESPACE), ids, 2)
    assert names.root(salted) == names.root(DEFAULT_NAMESPACE)
    assert not set(plain) & set(names.chain(names.root(salted), ids, 2, extras))


def test_blocks_after_the_last_row_of_embeddings_carry_the_digest_of_no_rows():
    rows = bytes(range(6))
    extras = extra_keys(DEFAULT_NAMESPACE, (PromptEmbeds(0, rows, 2),), 0, 3, 2)
    assert extras is not None
    assert [block and vllm_extra_keys(block) for block in extras] == [
        (("prompt_embeds", sha256(rows[:4]).digest()),),
        (("prompt_embeds", sha256(rows[4:]).digest()),),
        (("prompt_embeds", sha256(b"").digest()),),
    ]


@given(ALGORITHM, st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_a_chain_continued_from_its_last_digest_is_the_whole_chain(algorithm, cuts):
    ids = list(range(1000, 1000 + 2 * sum(cuts)))
    media = (MediaSpan(1, 3, "image"),)
    namespace = Namespace(adapter=Adapter("w", name="a"), salt="s")
    names = VllmDigests(algorithm)
    parent = root = names.root(namespace)
    whole = names.chain(root, ids, 2, extra_keys(namespace, media, 0, sum(cuts), 2))
    pieces: list[bytes] = []
    for end in accumulate(cuts):
        first = len(pieces)
        extras = extra_keys(namespace, media, first, end - first, 2)
        pieces += names.chain(parent, ids[2 * first : 2 * end], 2, extras)
        parent = pieces[-1]
    assert pieces == whole


def test_a_physical_block_is_named_by_the_finer_digest_that_closes_it():
    names = VllmDigests("sha256", seed="0")
    root = names.root(DEFAULT_NAMESPACE)

    def closing(ids: list[int]) -> list[bytes]:
        return names.chain(root, ids, 2)[3::4]

    x, y, z = (list(range(1, 17)), [1, 2, 3, 4, *range(105, 117)], [*range(1, 9), *range(205, 213)])
    assert [a == b for a, b in zip(closing(x), closing(y), strict=True)] == [False, False]
    assert [a == b for a, b in zip(closing(x), closing(z), strict=True)] == [True, False]


def test_the_machines_byte_order_does_not_show(monkeypatch):
    ids = array("i", [1, 300, 70_000, 2**31 - 1])
    names = VllmDigests("sha256_cbor", seed="0")
    root = names.root(DEFAULT_NAMESPACE)
    here = names.chain(root, ids, 2)
    ids.byteswap()
    monkeypatch.setattr(sys, "byteorder", {"little": "big", "big": "little"}[sys.byteorder])
    assert names.chain(root, ids, 2) == here


class TestSeeds:
    def test_without_a_seed_032_has_one_first_parent_for_all_and_026_a_new_one_each_time(self):
        for algorithm in SERIALIZE:
            fixed = {VllmDigests(algorithm).root(DEFAULT_NAMESPACE) for _ in range(2)}
            drawn = {VllmDigests(algorithm, version="0.26").root(DEFAULT_NAMESPACE) for _ in range(2)}
            assert (len(fixed), len(drawn)) == (1, 2)

    def test_xxhash_without_a_seed_draws_its_first_parent_of_16_bytes_or_in_026_of_32(self):
        pytest.importorskip("xxhash")
        for version, size in (("0.32", 16), ("0.26", 32)):
            made = [VllmDigests("xxhash", version=version) for _ in range(2)]
            roots = [names.root(DEFAULT_NAMESPACE) for names in made]
            assert roots[0] != roots[1]
            assert [len(root) for root in roots] == [size, size]
            first, second = made[0].chain(roots[0], [1, 2, 3, 4], 2)
            assert [len(first), len(second)] == [16, 16]
            assert made[0].chain(first, [3, 4], 2) == [second]

    @pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
    def test_a_digest_that_anybody_can_compute_and_collide_is_refused_unless_allowed(self, algorithm):
        pytest.importorskip("xxhash")
        for version in ("0.26", "0.32"):
            with pytest.raises(ValueError, match=r"non-cryptographic.*allow_unsafe"):
                VllmDigests(algorithm, seed="0", version=version)
            assert VllmDigests(algorithm, seed="0", version=version, allow_unsafe=True).digest_size == 16

    def test_without_the_package_xxhash_says_how_to_get_it(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "xxhash", None)
        with pytest.raises(ModuleNotFoundError, match="pip install xxhash"):
            VllmDigests("xxhash")
        VllmDigests("sha256")


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"algorithm": "md5"}, ValueError, "algorithm: expected one of 'sha256', 'sha256_cbor', 'xxhash'"),
            ({"version": "0.27"}, ValueError, "version: expected one of '0.26', '0.32', got '0.27'"),
            ({"seed": 0}, TypeError, "seed: expected the text of PYTHONHASHSEED or None, got int"),
        ],
    )
    def test_unknown_options(self, options, error, message):
        with pytest.raises(error, match=message):
            VllmDigests(**options)

    def test_tokens_that_are_no_whole_blocks(self):
        names = VllmDigests()
        root = names.root(DEFAULT_NAMESPACE)
        for chain in (names.chain, names.chain_ids):
            with pytest.raises(ValueError, match="no whole number of blocks of 2"):
                chain(root, [1, 2, 3], 2)

    def test_an_id_beyond_64_bits(self):
        names = VllmDigests()
        with pytest.raises(ValueError, match=r"ids\[1\]: 9223372036854775808 does not fit int64"):
            names.chain_ids(names.root(DEFAULT_NAMESPACE), [1, 2**63], 2)

    def test_a_parent_that_is_no_digest(self):
        with pytest.raises(ValueError, match="parent: expected a digest of 32 bytes, got 0 bytes"):
            VllmDigests().chain(b"", [1, 2], 2)

    def test_extras_of_another_length(self):
        names = VllmDigests()
        with pytest.raises(ValueError, match="extras: expected one entry for each of 2 blocks, got 1"):
            names.chain(names.root(DEFAULT_NAMESPACE), [1, 2, 3, 4], 2, [None])

    def test_a_pickled_block_beyond_one_frame(self):
        names = VllmDigests("sha256")
        with pytest.raises(ValueError, match=r"block_size: a block of .* does not fit one frame"):
            names.chain(names.root(DEFAULT_NAMESPACE), [2**20] * 13_200, 13_200)

    def test_text_that_cbor_cannot_hold_without_repeating_it(self):
        names = VllmDigests("sha256_cbor")
        with pytest.raises(ValueError, match="lone surrogate") as caught:
            names.chain(names.root(DEFAULT_NAMESPACE), [1, 2], 2, [Extras(salt="secret\ud800")])
        assert "secret" not in str(caught.value)

    def test_an_adapter_without_a_name(self):
        with pytest.raises(ValueError, match=r"adapter\.name"):
            vllm_extra_keys(Extras(Adapter("weights")))

    def test_embeddings_that_do_not_begin_with_the_prompt(self):
        extras = extra_keys(DEFAULT_NAMESPACE, (PromptEmbeds(1, bytes(8), 4),), 0, 1, 4)
        assert extras is not None
        assert extras[0] is not None
        with pytest.raises(ValueError, match="from the prompt's first token on"):
            vllm_extra_keys(extras[0])
