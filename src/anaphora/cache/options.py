"""Options: what a manager may be made with. `KVCacheManager` says what each of them means."""

from __future__ import annotations

from operator import index as to_integer
from typing import TYPE_CHECKING, Literal

from anaphora.identity import BlockDigests

if TYPE_CHECKING:
    from collections.abc import Iterable

IndexKind = Literal["radix", "hash"]
INDEX_KINDS = ("radix", "hash")
MAX_BLOCK_ID = 2**31 - 1
"""Block tables hold int32."""


def check_block_ids(block_ids: Iterable[int], num_blocks: int) -> set[int]:
    """Return ids of blocks as a set. Raises TypeError or ValueError for what is none of the pool's."""
    try:
        blocks = set(map(to_integer, block_ids))
    except TypeError as error:
        raise TypeError(f"block_ids: expected integers, {error}") from None
    for block in blocks:
        if not 1 <= block <= num_blocks:
            raise ValueError(f"block_ids: expected ids between 1 and {num_blocks}, got {block}")
    return blocks


def check_options(
    num_blocks: int,
    block_size: int,
    index: str | None,
    digests: BlockDigests | None,
    match_unit: int,
    max_retained_share: float,
    host_blocks: int,
    clock: object,
) -> None:
    """Raise ValueError or TypeError that names the first option that is not allowed, and what is."""
    for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
        if value.__class__ is not int or not 1 <= value <= MAX_BLOCK_ID:
            raise ValueError(f"{name}: expected a positive integer that fits int32, got {value!r}")
    if host_blocks.__class__ is not int or not 0 <= host_blocks <= MAX_BLOCK_ID:
        raise ValueError(f"host_blocks: expected an integer that fits int32, 0 or more, got {host_blocks!r}")
    if not callable(clock):
        raise ValueError(f"clock: expected a function that returns seconds, got {clock!r}")
    if not isinstance(max_retained_share, (int, float)) or not 0 <= max_retained_share <= 1:
        raise ValueError(f"max_retained_share: expected 0 to 1, got {max_retained_share!r}")
    if digests is not None and not isinstance(digests, BlockDigests):
        raise TypeError(f"digests: expected BlockDigests, or None for our own, got {type(digests).__name__}")
    if index is not None and not (isinstance(index, str) and index in INDEX_KINDS):
        raise ValueError(f"index: expected 'radix' or 'hash', got {index!r}")
    if match_unit.__class__ is not int or not 1 <= match_unit <= block_size or block_size % match_unit:
        raise ValueError(f"match_unit: expected a divisor of block_size, {block_size}, got {match_unit!r}")
