"""LoRA in numpy, float32: what adapters add to projections, row by row with bits of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from anaphora.engine.invariant_math import InvariantProduct
from anaphora.model.lora import TARGETS, projection_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from anaphora.engine.executor import Span
    from anaphora.model import LoraAdapter, ModelShape

    Array: TypeAlias = NDArray[np.float32]

MIN_RANK = 16
"""Ranks are rounded up to multiples of this with zeros, so that no operand is too narrow for the kernels."""

ROW_COUNTS = (8, 32, 128)


@dataclass(frozen=True, slots=True)
class _Pair:
    """a [inputs, rank], b [rank, outputs] with the scale in it; `columns` of the fused projection that it adds to."""

    a: Array
    b: Array
    columns: slice
    product: InvariantProduct


class LowRankAdapters:
    """Adapters by digest, arranged for products.

    The products of a rank are checked once, on random operands of the model's sizes (see `InvariantProduct`), so an
    adapter's bits depend on its numbers and its rank, not on what else is loaded.
    """

    def __init__(self, shape: ModelShape) -> None:
        self._sizes = projection_sizes(shape)
        self._columns = {target: slice(0, self._sizes[target][0]) for target in TARGETS}
        for fused in (("q", "k", "v"), ("gate", "up")):
            start = 0
            for target in fused:
                self._columns[target] = slice(start, start := start + self._sizes[target][0])
        self._products: dict[int, InvariantProduct] = {}
        self._layers: dict[str, list[dict[str, _Pair]]] = {}

    @property
    def digests(self) -> Mapping[str, object]:
        """Keyed by the digests of those that are loaded."""
        return self._layers

    def load(self, adapter: LoraAdapter) -> None:
        """Take an adapter in; BLAS must run alone (`Workers.alone`), as it does in a step."""
        if adapter.digest in self._layers:
            return
        num_padded = -adapter.rank % MIN_RANK
        product = self._product(adapter.rank + num_padded)
        scale = np.float32(adapter.scale)
        self._layers[adapter.digest] = [
            {
                target: _Pair(
                    np.ascontiguousarray(np.pad(pair.a, ((0, num_padded), (0, 0))).T),
                    np.ascontiguousarray(np.pad(pair.b * scale, ((0, 0), (0, num_padded))).T),
                    self._columns[target],
                    product,
                )
                for target, pair in layer.items()
            }
            for layer in adapter.layers
        ]

    def unload(self, digest: str) -> None:
        """Forget an adapter, KeyError if there is none such."""
        del self._layers[digest]

    def of_batch(self, spans: Sequence[Span]) -> BatchAdapters:
        """The adapters of a step's spans, each loaded, with the rows that are theirs."""
        rows: dict[str, list[NDArray[np.intp]]] = {}
        first = 0
        for span in spans:
            stop = first + len(span.tokens)
            if span.adapter is not None:
                rows.setdefault(span.adapter, []).append(np.arange(first, stop))
            first = stop
        return BatchAdapters([(self._layers[digest], np.concatenate(of_it)) for digest, of_it in rows.items()])

    def _product(self, rank: int) -> InvariantProduct:
        if rank not in self._products:
            random = np.random.default_rng(rank)
            shapes = {(inputs, rank) for _, inputs in self._sizes.values()}
            shapes |= {(rank, outputs) for outputs, _ in self._sizes.values()}
            samples = [random.standard_normal(shape, np.float32) for shape in sorted(shapes)]
            self._products[rank] = InvariantProduct(samples, ROW_COUNTS)
        return self._products[rank]


@dataclass(frozen=True, slots=True)
class BatchAdapters:
    """What the rows of one step have added to their projections."""

    adapters: list[tuple[list[dict[str, _Pair]], NDArray[np.intp]]]

    def add(self, layer: int, targets: tuple[str, ...], rows: Array, projected: Array) -> None:
        """Add to `projected`, the projections `targets` of `rows` side by side, those of the rows' adapters."""
        for layers, indices in self.adapters:
            for target in targets:
                pair = layers[layer].get(target)
                if pair is not None:
                    projected[indices, pair.columns] += pair.product(pair.product(rows[indices], pair.a), pair.b)
