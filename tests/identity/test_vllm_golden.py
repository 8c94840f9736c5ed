"""vLLM's digests equal what vLLM's own code gave, bit for bit."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from anaphora.identity import DEFAULT_NAMESPACE, extra_keys, vllm_extra_keys
from anaphora.identity.serializers import CborSerializer, PickleSerializer, Serializer
from anaphora.tokens import MAX_TOKEN_ID, pack
from tests.identity.golden import SOURCES, VERSIONS, digests, prompt, vectors

SERIALIZERS: dict[str, Serializer] = {
    "sha256": PickleSerializer(),
    "sha256_cbor": CborSerializer(),
    "xxhash": PickleSerializer(),
    "xxhash_cbor": CborSerializer(),
}

pytestmark = [
    pytest.mark.usefixtures("each_form"),
    pytest.mark.parametrize("version", VERSIONS),
    pytest.mark.parametrize("source", SOURCES),
]


def test_the_first_parent_follows_the_seed(source, version):
    for algorithm, roots in vectors(source, version)["none_hash"].items():
        for seed, expected in roots.items():
            assert digests(algorithm, seed, version).root(DEFAULT_NAMESPACE).hex() == expected


def test_the_bytes_digested_for_the_first_parent(source, version):
    for algorithm, expected in vectors(source, version)["none_hash_preimages"].items():
        assert SERIALIZERS[algorithm].document("0").hex() == expected


@pytest.mark.parametrize("algorithm", SERIALIZERS)
def test_every_chain(source, version, algorithm):
    golden = vectors(source, version)
    chains = [chain for chain in golden["chains"] if chain["algo"] == algorithm]
    assert chains
    for chain in chains:
        block_size = chain["block_size"]
        names = digests(algorithm, chain["seed"], version)
        ids, namespace, media = prompt(chain, golden["prompts"])
        root = names.root(namespace)
        extras = extra_keys(namespace, media, 0, len(ids) // block_size, block_size)
        found = [name.hex() for name in names.chain_ids(root, ids, block_size, extras)]
        expected = chain["hashes"]
        assert found[-len(expected) :] == expected, (chain["variant"], chain["prompt"], chain["seed"])
        if max(ids, default=0) <= MAX_TOKEN_ID:
            assert [name.hex() for name in names.chain(root, pack(ids), block_size, extras)] == found
        if "extra_keys" in chain:
            assert len(found) == len(expected)
            blocks = extras or [None] * len(found)
            written = [block and in_json(vllm_extra_keys(block, tagged=version == "0.32")) for block in blocks]
            assert written == chain["extra_keys"]


def in_json(keys: Any) -> Any:
    if isinstance(keys, tuple):
        return [in_json(key) for key in keys]
    return {"hex": keys.hex()} if isinstance(keys, bytes) else keys


def test_a_growing_prompt_extends_its_chain(source, version):
    golden = vectors(source, version)
    ids = golden["prompts"]["seq_37"]
    for growth in golden["growth"]:
        block_size = growth["block_size"]
        names = digests(growth["algo"], "0", version)
        parent = names.root(DEFAULT_NAMESPACE)
        found: list[str] = []
        lengths = [growth["start"] + i for i in range(len(growth["hash_counts"]) - 1)] + [len(ids)]
        for length, count in zip(lengths, growth["hash_counts"], strict=True):
            new = names.chain(parent, ids[len(found) * block_size : length // block_size * block_size], block_size)
            found += [name.hex() for name in new]
            parent = bytes.fromhex(found[-1])
            assert len(found) == count
        assert found[-len(growth["hashes"]) :] == growth["hashes"]


def test_the_bytes_digested_for_a_first_block(source, version):
    golden = vectors(source, version)
    for block in golden["first_block_preimages"]:
        block_size, algorithm = block["block_size"], block["algo"]
        ids, namespace, media = prompt(block, golden["prompts"])
        extras = extra_keys(namespace, media, 0, 1, block_size)
        keys = vllm_extra_keys(extras[0], tagged=version == "0.32") if extras and extras[0] else ()
        parent = bytes.fromhex(golden["none_hash"][algorithm][block["seed"]])
        serializer = SERIALIZERS[algorithm]
        written = serializer.packed_blocks(pack(ids[:block_size]), block_size)[0]
        closing = serializer.closing(block_size, keys)
        head = serializer.heads(len(parent), block_size)[len(written) + len(closing)]
        preimage = head + parent + serializer.opening(block_size) + written + closing
        assert preimage.hex() == block["preimage_hex"]
        if algorithm.startswith("sha256"):
            assert sha256(preimage).hexdigest() == block["hash"]
