"""A LoRA adapter as the native executor multiplies by it: its pairs fused as the products are that they add to."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from anaphora.model.lora import projection_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from anaphora.model import LoraAdapter, LowRank, ModelShape

    Array: TypeAlias = NDArray[np.float32]

LANES = 16
"""Constant of cpp/layout.h: gate and up take turns in a strip, so many outputs each."""

PRODUCTS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
"""What shares a matrix, in the order of `load_adapter` in api.cpp."""


class NativeAdapter:
    """An adapter in the library's memory, bf16, for as long as this object lives.

    Raises:
        MemoryError: there is not enough memory for it.
    """

    def __init__(self, library: ctypes.CDLL, engine: int, shape: ModelShape, adapter: LoraAdapter) -> None:
        self.handle: int = library.anaphora_create_adapter(engine, adapter.scale) or 0
        if not self.handle:
            raise MemoryError("not enough memory for an adapter")
        weakref.finalize(self, library.anaphora_destroy_adapter, self.handle)
        for layer, pairs in enumerate(adapter.layers):
            for product, down, up in _fused(pairs, shape):
                if not library.anaphora_load_adapter(
                    engine,
                    self.handle,
                    layer,
                    product,
                    down.ctypes.data,
                    up.ctypes.data,
                    len(down),
                    down.shape[1],
                    len(up),
                ):
                    raise MemoryError("not enough memory for an adapter")


def _fused(pairs: Mapping[str, LowRank], shape: ModelShape) -> Iterator[tuple[int, Array, Array]]:
    """Per product that the adapter adds to: its number, down [ranks, inputs], up [outputs, ranks] in strip order."""
    sizes = projection_sizes(shape)
    for product, targets in enumerate(PRODUCTS):
        present = [target for target in targets if target in pairs]
        if not present:
            continue
        down = np.concatenate([pairs[target].a for target in present])
        ups, first = [], 0
        for target in targets:
            up = np.zeros((sizes[target][0], len(down)), np.float32)
            if target in pairs:
                up[:, first : first + len(pairs[target].a)] = pairs[target].b
                first += len(pairs[target].a)
            ups.append(up)
        yield product, down, _taking_turns(ups) if "gate" in targets else np.concatenate(ups)


def _taking_turns(ups: list[Array]) -> Array:
    """LANES rows of the one, then as many of the other, and so on, the last ones filled up with zeros."""
    padded = [np.pad(up, ((0, -len(up) % LANES), (0, 0))).reshape(-1, LANES, up.shape[1]) for up in ups]
    return np.ascontiguousarray(np.stack(padded, axis=1).reshape(-1, ups[0].shape[1]))
