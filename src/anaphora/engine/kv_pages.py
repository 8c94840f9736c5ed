"""KVPages: the keys and values of every layer, in pages of one block each."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from anaphora.engine.validation import check_copies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.float32]
    Indices: TypeAlias = NDArray[np.int64]

_LARGEST = np.finfo(np.float32).max


class KVPages:
    """float32 pages 0 .. num_blocks; page 0 is the null block and stays zero.

    Keys are kept transposed, so that a tile read from the pages is a ready right-hand side for queries @ keys: keys
    [layers, KV heads, head_dim, page, token], values [layers, KV heads, page, token, head_dim].

    Values are always finite. A page may still hold another sequence's tokens when it is read; they are given the
    probability 0, and 0 * x leaves a sum unchanged for every x but infinity and NaN.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, num_blocks: int, block_size: int) -> None:
        self.num_kv_heads = num_kv_heads
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._keys = np.zeros((num_layers, num_kv_heads, head_dim, num_blocks + 1, block_size), np.float32)
        self._values = np.zeros((num_layers, num_kv_heads, num_blocks + 1, block_size, head_dim), np.float32)

    def write(self, layer: int, slots: Indices, keys: Array, values: Array) -> None:
        """Store keys and values [n, KV heads, head_dim] at `slots`: page * block_size + place in the page."""
        _, num_kv_heads, head_dim = keys.shape
        key_slots = self._keys[layer].reshape(num_kv_heads, head_dim, -1)
        value_slots = self._values[layer].reshape(num_kv_heads, -1, head_dim)
        key_slots[:, :, slots] = keys.transpose(1, 2, 0)
        value_slots[:, slots] = np.fmin(np.fmax(values, -_LARGEST), _LARGEST).transpose(1, 0, 2)

    def read(self, layer: int, block_ids: Indices) -> tuple[Array, Array]:
        """Return copies of pages in a row: keys [KV heads, head_dim, tokens], values [KV heads, tokens, head_dim]."""
        keys = np.take(self._keys[layer], block_ids, axis=2)
        values = np.take(self._values[layer], block_ids, axis=1)
        num_kv_heads, head_dim = keys.shape[:2]
        return keys.reshape(num_kv_heads, head_dim, -1), values.reshape(num_kv_heads, -1, head_dim)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (from, to), in every layer, one pair after the other.

        Raises:
            ValueError: a page that does not exist, or the null block as the target.
        """
        self.copy_from(self, pairs)

    def copy_from(self, other: KVPages, pairs: Sequence[tuple[int, int]]) -> None:
        """The same, from others of the same shape, which may be more or fewer."""
        check_copies(pairs, other.num_blocks, self.num_blocks)
        for source, target in pairs:
            self._keys[:, :, :, target] = other._keys[:, :, :, source]
            self._values[:, :, target] = other._values[:, :, source]
