"""KV pages in torch tensors: what one layer keeps, and the pages of all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from anaphora.engine.executor import LayerGroup
from anaphora.engine.validation import check_copies

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class KVLayer:
    """What one attention layer keeps of a token, and for how long: `window` tokens, or None for ever."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    @property
    def num_elements(self) -> int:
        """Numbers per token."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


def group_layers(layers: Sequence[KVLayer], element_bytes: int) -> tuple[LayerGroup, ...]:
    """Return the layers by window: full attention first, then the windows, ascending."""
    windows = sorted({layer.window for layer in layers}, key=lambda window: (window is not None, window or 0))
    members = [tuple(i for i, layer in enumerate(layers) if layer.window == window) for window in windows]
    return tuple(
        LayerGroup(numbers, sum(layers[i].num_elements for i in numbers) * element_bytes, window)
        for numbers, window in zip(members, windows, strict=True)
    )


class TorchPages:
    """Pages 0 .. num_blocks of every layer; page 0 is the null block.

    Keys [pages, block_size, KV heads, key_dim] and values [.., value_dim] per layer: the layout that paged kernels of
    the FlashAttention family take. A block id names a page in every layer; layers of a group that does not hold the
    block leave theirs unused.

    Values are always finite. A page may still hold another sequence's tokens when it is read; they are given the
    probability 0, and 0 * x leaves a sum unchanged for every x but infinity and NaN.
    """

    def __init__(
        self,
        layers: Sequence[KVLayer],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._largest = torch.finfo(dtype).max

        def zeros(layer: KVLayer, size: int) -> torch.Tensor:
            return torch.zeros(num_blocks + 1, block_size, layer.num_kv_heads, size, dtype=dtype, device=device)

        self.keys = [zeros(layer, layer.key_dim) for layer in layers]
        self.values = [zeros(layer, layer.value_dim) for layer in layers]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [n, KV heads, size] at `slots` [n]: page * block_size + place in the page."""
        finite = torch.nan_to_num(values, nan=0.0, posinf=self._largest, neginf=-self._largest)
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys.to(self.keys[layer].dtype))
        self.values[layer].flatten(0, 1).index_copy_(0, slots, finite.to(self.values[layer].dtype))

    def read(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of pages in a row: keys and values [blocks * block_size, KV heads, size]."""
        return (
            self.keys[layer].index_select(0, blocks).flatten(0, 1),
            self.values[layer].index_select(0, blocks).flatten(0, 1),
        )

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (from, to), in every layer, one pair after the other.

        Raises:
            ValueError: a page that does not exist, or the null block as the target.
        """
        self.copy_from(self, pairs)

    def copy_from(self, other: TorchPages, pairs: Sequence[tuple[int, int]]) -> None:
        """The same, from others of the same layers, which may be more or fewer and on another device."""
        check_copies(pairs, other.num_blocks, self.num_blocks)
        for source, target in pairs:
            for to, of in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
                to[target].copy_(of[source])
