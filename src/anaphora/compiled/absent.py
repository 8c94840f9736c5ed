"""What stands in for the C code where it was not built. It declines everything, so the pure forms do the work."""

from __future__ import annotations

from typing import Literal, TypeAlias

ChainKind: TypeAlias = Literal["pickle", "cbor", "blake2b"]


def pack(ids: object, /) -> bytes | None:
    """Return ids as native-endian int32 bytes, or None where the pure form has to decide.

    It has to for all but a list or tuple of exact ints that fit int32, and a buffer of them in one dimension. No code
    of an id's own type ever runs.

    Cost in C: about 3 ns an id; one memcpy for buffers.
    """
    return None


def chain(
    kind: ChainKind, parent: bytes, ids: bytes, block_size: int, before: bytes, after: bytes, portable: bool = False, /
) -> list[bytes] | None:
    """Return the digests of consecutive full blocks, or None where the pure form has to decide.

    It has to for a parent of another size than 32 bytes, ids that are no whole blocks, anything that is not exactly
    `bytes`, and pickled blocks of about 64 KiB or more.

    Args:
        kind: what is digested: "pickle" and "cbor" write triples as vLLM does, for SHA-256; "blake2b" takes parent and
            ids as they are.
        parent: the digest before the first block.
        ids: packed ids, little-endian int32.
        before, after: what stands in a triple between parent and ids, and after the ids; for "blake2b" the key and the
            personalisation.
        portable: leave the processor's SHA instructions unused.

    Long chains leave the interpreter to other threads meanwhile.

    Raises ValueError for another kind.

    Cost in C: 0.2 to 0.3 us a block of 16 tokens.
    """
    return None
