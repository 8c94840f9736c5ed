"""Attention over paged KV in key tiles at fixed token positions, merged in order: a batch-invariant attention.

A query meets the keys of its sequence tile by tile, tile i being the tokens i * KEY_TILE .. (i + 1) * KEY_TILE - 1
whatever the block size, the blocks' places and the span that the query came with. Running maximum, sum and output are
merged from first tile to last (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"). Masked keys
get the probability 0, and a tile in which a query sees nothing leaves its state as it was, so skipping it or not makes
no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from anaphora.engine.invariant_math import InvariantProduct
    from anaphora.engine.kv_pages import KVPages

    Array: TypeAlias = NDArray[np.float32]

KEY_TILE = 256
"""Tokens in a key tile: a multiple of every block size. Part of the numerics: another value gives other bits."""

QUERY_BLOCK = 128
"""Tokens whose scores are in memory at once. Not part of the numerics."""

_BELOW_ALL_SCORES = np.float32(-1e30)


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Consecutive tokens of a span that see keys of one tile; masked [tokens, KEY_TILE] marks those they do not."""

    start: int
    stop: int
    masked: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class KeyTile:
    """KEY_TILE tokens of a sequence: their blocks (the null block beyond the table's end), and who looks at them."""

    block_ids: NDArray[np.int64]
    query_blocks: list[QueryBlock]


def plan_tiles(
    start: int, num_tokens: int, block_table: NDArray[np.int64], block_size: int, window: int | None
) -> list[KeyTile]:
    """Say which queries of the span at `start` meet which key tiles. Cost: once a step, used by every layer.

    block_table: the blocks of tokens 0 .. start + num_tokens - 1, and no more.
    window: a token sees itself and the window - 1 tokens before it; None: all tokens before it.
    """
    blocks_per_tile = KEY_TILE // block_size
    tiles = []
    for first_key in range(0, start + num_tokens, KEY_TILE):
        keys = np.arange(first_key, first_key + KEY_TILE)
        query_blocks = []
        for first in range(0, num_tokens, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, num_tokens)
            queries = np.arange(start + first, start + last)[:, None]
            masked = keys > queries
            if window is not None:
                masked |= keys <= queries - window
            if not masked.all():
                query_blocks.append(QueryBlock(first, last, masked if masked.any() else None))
        if query_blocks:
            block_ids = np.zeros(blocks_per_tile, np.int64)
            blocks = block_table[first_key // block_size :][:blocks_per_tile]
            block_ids[: len(blocks)] = blocks
            tiles.append(KeyTile(block_ids, query_blocks))
    return tiles


def attend(queries: Array, pages: KVPages, layer: int, tiles: list[KeyTile], product: InvariantProduct) -> Array:
    """Return softmax(queries @ keys) @ values, [n, heads, head_dim], for one span's scaled queries of that shape.

    The span's own keys and values are in the pages already.
    """
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads = pages.num_kv_heads
    group = num_heads // num_kv_heads
    # The heads that read one KV head are rows of one product: row t * group + g is token t, head g of the group.
    grouped = queries.reshape(num_tokens, num_kv_heads, group, head_dim).transpose(1, 0, 2, 3)
    rows = grouped.reshape(num_kv_heads, num_tokens * group, head_dim)
    largest = np.full(rows.shape[:-1], _BELOW_ALL_SCORES)
    total = np.zeros(rows.shape[:-1], np.float32)
    mixed = np.zeros(rows.shape, np.float32)
    for tile in tiles:
        keys, values = pages.read(layer, tile.block_ids)
        for block in tile.query_blocks:
            here = slice(block.start * group, block.stop * group)
            scores = product(rows[:, here], keys)
            if block.masked is not None:
                by_token = scores.reshape(num_kv_heads, block.stop - block.start, group, KEY_TILE)
                np.copyto(by_token, -np.inf, where=block.masked[:, None])
            new_largest = np.maximum(largest[:, here], scores.max(axis=-1))
            scores -= new_largest[..., None]
            probabilities = np.exp(scores, out=scores)
            kept = np.exp(largest[:, here] - new_largest)
            largest[:, here] = new_largest
            total[:, here] = total[:, here] * kept + probabilities.sum(axis=-1)
            mixed[:, here] = mixed[:, here] * kept[..., None] + product(probabilities, values)
    mixed /= total[..., None]
    # A tile of masked keys adds 0.0, which turns -0.0 to 0.0 and changes nothing else: so that is done for all.
    mixed += 0.0
    return mixed.reshape(num_kv_heads, num_tokens, group, head_dim).transpose(1, 0, 2, 3).reshape(queries.shape)
