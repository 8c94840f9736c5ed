"""A model's weights as float32 arrays, in the layout of Hugging Face checkpoints: checked first, then read."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, overload

import numpy as np

from anaphora.model.errors import ModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from anaphora.model.shape import ModelShape

    Array: TypeAlias = NDArray[np.float32]


_MAX_THREADS = 4


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [outputs, inputs]; rows of q and k are ordered for rotate-half RoPE.

    q [num_heads * head_dim, hidden], k and v [num_kv_heads * head_dim, hidden], o [hidden, num_heads * head_dim],
    gate and up [intermediate, hidden], down [hidden, intermediate], both norms [hidden], biases one per row,
    q_norm and k_norm [head_dim].
    """

    attention_norm: Array
    q: Array
    k: Array
    v: Array
    o: Array
    mlp_norm: Array
    gate: Array
    up: Array
    down: Array
    q_bias: Array | None = None
    k_bias: Array | None = None
    v_bias: Array | None = None
    q_norm: Array | None = None
    k_norm: Array | None = None


@dataclass(slots=True)
class Weights:
    """All weights, float32; arrays may be read-only views of the mapped file.

    embedding and output [vocab_size, hidden], one and the same array when tied; final_norm [hidden].
    layers: of a model on disk, each is read when it is asked for, and in memory no longer than somebody holds it.
    """

    embedding: Array
    output: Array
    final_norm: Array
    layers: Sequence[LayerWeights]


class TensorSource(Protocol):
    """The tensors of a model's files, by the names that they have there."""

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape from the header, once it is known that `read` can give it; costs nothing.

        Raises:
            KeyError: there is none of that name.
            ModelError: its kind is not supported, or the file ends before it does.
        """

    def read(self, name: str) -> Array:
        """Return a tensor as float32."""


def stored_weights(shape: ModelShape, names: Mapping[str, str], source: TensorSource) -> Callable[[], Weights]:
    """Check every tensor that `shape` asks for against the files' headers; return what reads them.

    names: what a file calls each field of `Weights` and `LayerWeights`; "{layer}" stands for the layer's number.

    Raises:
        ModelError: a tensor is missing, has another shape or cannot be read; the message names it. Nothing was read.
    """
    table = (shape.vocab_size, shape.hidden_size)
    outer = {"embedding": table, "final_norm": (shape.hidden_size,)}
    if not shape.ties_embeddings:
        outer["output"] = table
    inner = _layer_sizes(shape)
    for field, size in outer.items():
        _check(source, names[field], size, shape)
    for layer in range(shape.num_layers):
        for field, size in inner.items():
            _check(source, names[field].format(layer=layer), size, shape)

    def read() -> Weights:
        with _pool() as pool:
            arrays = dict(zip(outer, pool.map(source.read, [names[field] for field in outer]), strict=True))
        layers = _StoredLayers(shape.num_layers, {field: names[field] for field in inner}, source)
        return Weights(arrays["embedding"], arrays.get("output", arrays["embedding"]), arrays["final_norm"], layers)

    return read


def _check(source: TensorSource, name: str, expected: tuple[int, ...], shape: ModelShape) -> None:
    try:
        found = source.shape_of(name)
    except KeyError:
        raise ModelError(f"tensor {name!r} is missing; a {shape.architecture} model needs it") from None
    if found != expected:
        raise ModelError(f"tensor {name!r} has shape {list(found)}; expected {list(expected)}")


def _pool() -> ThreadPoolExecutor:
    """Decoding is numpy's work on megabytes at a time, which threads share well; mapped files are read as it goes."""
    return ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "weights")


class _StoredLayers(Sequence[LayerWeights]):
    """Layers in files. Iteration reads the next one while the caller works on this one."""

    def __init__(self, num_layers: int, names: Mapping[str, str], source: TensorSource) -> None:
        self._numbers = range(num_layers)
        self._names = names
        self._source = source

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...

    @overload
    def __getitem__(self, index: slice) -> list[LayerWeights]: ...

    def __getitem__(self, index: int | slice) -> LayerWeights | list[LayerWeights]:
        numbers = self._numbers[index]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        return self._layer(map(self._source.read, self._tensors(numbers)))

    def __iter__(self) -> Iterator[LayerWeights]:
        with _pool() as pool:
            coming = deque([pool.map(self._source.read, self._tensors(number)) for number in self._numbers[:1]])
            for number in self._numbers[1:]:
                coming.append(pool.map(self._source.read, self._tensors(number)))
                yield self._layer(coming.popleft())
            yield self._layer(coming.popleft())

    def _tensors(self, number: int) -> list[str]:
        return [name.format(layer=number) for name in self._names.values()]

    def _layer(self, arrays: Iterable[Array]) -> LayerWeights:
        return LayerWeights(**dict(zip(self._names, arrays, strict=True)))


def _layer_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "q": (q_rows, hidden),
        "k": (kv_rows, hidden),
        "v": (kv_rows, hidden),
        "o": (hidden, q_rows),
        "mlp_norm": (hidden,),
        "gate": (intermediate, hidden),
        "up": (intermediate, hidden),
        "down": (hidden, intermediate),
    }
    if shape.has_attention_bias:
        sizes |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if shape.has_qk_norm:
        sizes |= {"q_norm": (shape.head_dim,), "k_norm": (shape.head_dim,)}
    return sizes
