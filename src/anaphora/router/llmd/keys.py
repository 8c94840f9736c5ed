"""llm-d's names for blocks, bit for bit: what its two producers call the blocks of a prompt.

The index here needs no names; these are for comparing with an llm-d router beside this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FNV_OFFSET, _FNV_PRIME, _MASK = 0xCBF29CE484222325, 0x100000001B3, 2**64 - 1


def precise_keys(
    tokens: Sequence[int],
    model: str,
    *,
    block_size: int = 16,
    hash_seed: str = "",
    salt: str = "",
    media: Mapping[int, Sequence[str]] | None = None,
) -> list[int]:
    """Return the keys of the whole blocks, as precise-prefix-cache-producer computes them.

    FNV-1a (64 bit) over the canonical CBOR of [parent, tokens, extra]. media: block -> identifiers of its items.
    """
    parent = _fnv(_cbor([_fnv(hash_seed.encode()), None, model]))
    keys: list[int] = []
    for block in range(len(tokens) // block_size):
        items = list((media or {}).get(block, ())) + ([salt] if salt and block == 0 else [])
        extra = [{"Hash": item} for item in items] or None
        parent = _fnv(_cbor([parent, list(tokens[block * block_size : (block + 1) * block_size]), extra]))
        keys.append(parent)
    return keys


def approximate_keys(
    tokens: bytes, model: str, *, block_size: int = 64, salt: str = "", max_blocks: int = 2048
) -> list[int]:
    """Return the keys of the blocks, the last and partial one included, as approx-prefix-cache-producer computes them.

    XXH64 over the block's own XXH64 and the parent's key. tokens: packed int32 ids. Needs the xxhash package.
    """
    from xxhash import xxh64_intdigest  # noqa: PLC0415 - optional

    parent = xxh64_intdigest(model.encode() + salt.encode())
    width = block_size * TOKEN_BYTES
    keys: list[int] = []
    for at in range(0, len(tokens), width)[:max_blocks]:
        own = xxh64_intdigest(tokens[at : at + width])
        parent = xxh64_intdigest(own.to_bytes(8, "little") + parent.to_bytes(8, "little"))
        keys.append(parent)
    return keys


def _fnv(data: bytes) -> int:
    value = _FNV_OFFSET
    for byte in data:
        value = ((value ^ byte) * _FNV_PRIME) & _MASK
    return value


def _cbor(value: object) -> bytes:
    """Canonical CBOR of what stands in a block's key: null, unsigned integers, text, arrays, maps of one entry."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0, value)
    if isinstance(value, str):
        text = value.encode()
        return _head(3, len(text)) + text
    if isinstance(value, dict):
        return _head(5, len(value)) + b"".join(_cbor(part) for pair in value.items() for part in pair)
    assert isinstance(value, list)
    return _head(4, len(value)) + b"".join(map(_cbor, value))


def _head(kind: int, number: int) -> bytes:
    if number < 24:
        return bytes([kind << 5 | number])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * size:
            return bytes([kind << 5 | code]) + number.to_bytes(size, "big")
    raise ValueError(f"{number} does not fit 64 bits")
