"""vLLM's names for blocks, bit for bit: four algorithms, by the rules of 0.26 and of 0.32."""

from __future__ import annotations

import secrets
from functools import cache, partial
from hashlib import sha256
from itertools import groupby, repeat
from typing import TYPE_CHECKING, Any, Literal, get_args

from anaphora import compiled
from anaphora.identity.digests import BlockDigests, require_one_a_block, whole_blocks
from anaphora.identity.serializers import CborSerializer, ExtraKey, ExtraKeys, PickleSerializer, Tag
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from anaphora.compiled.absent import ChainKind
    from anaphora.identity.extras import EmbedsKey, Extras
    from anaphora.identity.namespace import Namespace
    from anaphora.tokens import TokenIds

VllmAlgorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
VllmVersion = Literal["0.26", "0.32"]

_UNSET_SEED = "vllm-none-hash"
_LORA, _MEDIA, _SALT, _EMBEDS = Tag("lora"), Tag("mm"), Tag("cache_salt"), Tag("prompt_embeds")
MIN_ID, MAX_ID = -(2**63), 2**63 - 1


class VllmDigests(BlockDigests):
    """The digests of a vLLM engine, to share names with it: KV events, external stores, routers.

    They cover token ids, the adapter's name and path (0.26: name), media, salt and embeddings, but not the model, the
    KV layout or the adapter's weights, so they must not name blocks in a store that several models share.

    Args:
        algorithm: vLLM's `--prefix-caching-hash-algo`. The two of xxhash need the package of that name.
        seed: the text of PYTHONHASHSEED in vLLM's environment; None if it is not set there.
        version: whose rules: 0.26 leaves extra keys untagged and draws a random first parent without a seed; 0.32 tags
            them, and without a seed still has a fixed first parent with sha256.
        allow_unsafe: accept xxhash with a seed. XXH3 is not cryptographic and takes no key; whoever knows the seed can
            make two prompts with one name, and so plant KV under the name of someone else's prompt.

    Equal texts in one block's extra keys count as separate objects to pickle, except vLLM's own tag words: so they do
    in a vLLM server, whose requests arrive serialised.

    Raises ValueError for the unsafe combination, ModuleNotFoundError without the xxhash package.

    Cost: for each block of 16 tokens 0.2 us with sha256 in C; in the pure form 1.5 us with sha256 and 1.1 us with
    xxhash, and about 12 us a chain.
    """

    def __init__(
        self,
        algorithm: VllmAlgorithm = "sha256",
        *,
        seed: str | None = None,
        version: VllmVersion = "0.32",
        allow_unsafe: bool = False,
    ) -> None:
        _require_one_of("algorithm", algorithm, get_args(VllmAlgorithm))
        _require_one_of("version", version, get_args(VllmVersion))
        if seed is not None and not isinstance(seed, str):
            raise TypeError(f"seed: expected the text of PYTHONHASHSEED or None, got {type(seed).__name__}")
        is_xxhash = algorithm.startswith("xxhash")
        if is_xxhash and seed is not None and not allow_unsafe:
            raise ValueError(
                f"algorithm: {algorithm!r} with a seed is an unkeyed, non-cryptographic digest that anybody can "
                "compute: prompts with colliding names can be made, and get one tenant the KV of another. Use 'sha256' "
                "or 'sha256_cbor', leave the seed unset, or pass allow_unsafe=True if all who send prompts are trusted"
            )
        self.name = algorithm
        self._hash: Callable[[bytes], Any] = _xxh3_128() if is_xxhash else sha256
        self.digest_size = 16 if is_xxhash else 32
        self._serializer = CborSerializer() if algorithm.endswith("cbor") else PickleSerializer()
        self._kind: ChainKind | None = None if is_xxhash else "cbor" if algorithm.endswith("cbor") else "pickle"
        # Block sizes are few, and what is fixed by them is asked for with every chain.
        self._heads, self._opening = cache(self._serializer.heads), cache(self._serializer.opening)
        self._closing = cache(partial(self._serializer.closing, extra_keys=()))
        self._tagged = version == "0.32"
        if seed is None and version == "0.26":
            self._none_hash = secrets.token_bytes(32)
        else:
            if seed is None:
                seed = secrets.token_bytes(32).hex() if is_xxhash else _UNSET_SEED
            self._none_hash = self._hash(self._serializer.document(seed)).digest()

    def root(self, namespace: Namespace) -> bytes:
        """Return vLLM's NONE_HASH, the parent of every first block, whatever the namespace."""
        return self._none_hash

    def chain(
        self, parent: bytes, tokens: TokenIds, block_size: int, extras: Sequence[Extras | None] | None = None
    ) -> list[bytes]:
        """Return the digests of consecutive full blocks; see `BlockDigests.chain`."""
        packed = whole_blocks(tokens, block_size)
        self._require_parent(parent)
        digests = self._digest_in_c(parent, packed, block_size, extras)
        if digests is not None:
            return digests
        return self._digest(parent, self._serializer.packed_blocks(packed, block_size), block_size, extras)

    def chain_ids(
        self, parent: bytes, ids: Sequence[int], block_size: int, extras: Sequence[Extras | None] | None = None
    ) -> list[bytes]:
        """Return the digests of consecutive full blocks of ids of up to 64 bits, which only vLLM has.

        Raises ValueError for an id that does not fit, or if the last block is not full. Cost: 0.2 us an id more.
        """
        if block_size < 1 or len(ids) % block_size:
            raise ValueError(f"ids: {len(ids)} ids are no whole number of blocks of {block_size}")
        for position, value in enumerate(ids):
            if not MIN_ID <= value <= MAX_ID:
                raise ValueError(f"ids[{position}]: {value} does not fit int64")
        self._require_parent(parent)
        return self._digest(parent, self._serializer.id_blocks(ids, block_size), block_size, extras)

    def _require_parent(self, parent: bytes) -> None:
        if len(parent) not in {self.digest_size, len(self._none_hash)}:
            raise ValueError(f"parent: expected a digest of {self.digest_size} bytes, got {len(parent)} bytes")

    def _digest_in_c(
        self, parent: bytes, packed: bytes, block_size: int, extras: Sequence[Extras | None] | None
    ) -> list[bytes] | None:
        """What `_digest` returns, a run of equal extras at a time; None where that has to do it."""
        if self._kind is None or not compiled.IN_USE:
            return None
        opening = self._opening(block_size)
        if extras is None:
            return compiled.chain(self._kind, parent, packed, block_size, opening, self._closing(block_size))
        width = block_size * TOKEN_BYTES
        digests: list[bytes] = []
        for closing, run in groupby(self._closings(block_size, len(packed) // width, extras)):
            start = len(digests) * width
            ids = packed[start : start + len(list(run)) * width]
            found = compiled.chain(self._kind, parent, ids, block_size, opening, closing)
            if found is None:
                return None
            digests += found
            parent = found[-1]
        return digests

    def _digest(
        self, parent: bytes, blocks: list[bytes], block_size: int, extras: Sequence[Extras | None] | None
    ) -> list[bytes]:
        new, join, opening = self._hash, b"".join, self._opening(block_size)
        heads, next_heads = self._heads(len(parent), block_size), self._heads(self.digest_size, block_size)
        digests: list[bytes] = []
        for ids, closing in zip(blocks, self._closings(block_size, len(blocks), extras), strict=True):
            parent = new(join((heads[len(ids) + len(closing)], parent, opening, ids, closing))).digest()
            digests.append(parent)
            # A first parent can be longer than a digest: 0.26 draws 32 bytes for xxhash as well.
            heads = next_heads
        return digests

    def _closings(self, block_size: int, num_blocks: int, extras: Sequence[Extras | None] | None) -> Iterable[bytes]:
        plain = self._closing(block_size)
        if extras is None:
            return repeat(plain, num_blocks)
        require_one_a_block(extras, num_blocks)
        closings: dict[Extras | None, bytes] = {None: plain}
        for block_extras in dict.fromkeys(extras):
            if block_extras is not None:
                keys = vllm_extra_keys(block_extras, tagged=self._tagged)
                closings[block_extras] = self._serializer.closing(block_size, keys)
        return [closings[block_extras] for block_extras in extras]


def vllm_extra_keys(extras: Extras, *, tagged: bool = True) -> ExtraKeys:
    """Return a block's extra keys in vLLM's order: adapter, media, salt, embeddings.

    tagged: as 0.32 digests them; otherwise as 0.26 does, and as both write them into KV events.

    Raises ValueError for what vLLM has no form for: an adapter without a name, embeddings that do not begin with the
    prompt.
    """
    keys: list[ExtraKey] = []
    if extras.adapter is not None:
        name = extras.adapter.name
        if not name:
            raise ValueError("adapter.name: vLLM's digests tell adapters by their names; expected a non-empty one")
        keys.append((_LORA, name, extras.adapter.path) if tagged else name)
    for item in extras.media:
        keys.append((_MEDIA, item.digest, item.offset) if tagged else (item.digest, item.offset))
    if extras.salt is not None:
        keys.append((_SALT, extras.salt) if tagged else extras.salt)
    if extras.embeds is not None:
        digest = _rows_digest(extras.embeds)
        keys.append((_EMBEDS, digest) if tagged else digest)
    return tuple(keys)


def _rows_digest(embeds: tuple[EmbedsKey, ...]) -> bytes:
    if not embeds:
        return sha256(b"").digest()
    if len(embeds) > 1 or embeds[0].offset:
        raise ValueError("media: vLLM's digests take embeddings from the prompt's first token on, in one run")
    return embeds[0].digest


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")


def _xxh3_128() -> Callable[[bytes], Any]:
    try:
        from xxhash import xxh3_128  # noqa: PLC0415 - optional
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "algorithm: 'xxhash' and 'xxhash_cbor' need the xxhash package: pip install xxhash"
        ) from None
    return xxh3_128
