"""A model's weights in the layout of Hugging Face checkpoints, as float32 or as stored: checked first, then read."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar, overload

import numpy as np

from anaphora.model.errors import ModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from anaphora.model.shape import ModelShape

    Array: TypeAlias = NDArray[np.float32]
    Matrix: TypeAlias = "Array | QuantisedMatrix"

Tensor = TypeVar("Tensor")
Layer = TypeVar("Layer")

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


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A matrix as its file keeps it: a weight is number * scale + offset.

    numbers: int8 [outputs, inputs]; 0 to 15 where there are offsets.
    scales: float32 [outputs, blocks], one for each block of 16 or 32 inputs. Times a number they are exact in float32.
    offsets: like scales, or None for none.
    """

    numbers: NDArray[np.int8]
    scales: Array
    offsets: Array | None = None

    @property
    def kind(self) -> tuple[int, bool]:
        """Inputs of a block, and whether there are offsets: what makes two matrices alike."""
        return self.numbers.shape[1] // self.scales.shape[1], self.offsets is not None

    def dense(self) -> Array:
        """The weights, float32 [outputs, inputs]."""
        blocks = self.numbers.reshape(*self.scales.shape, -1).astype(np.float32) * self.scales[..., None]
        if self.offsets is not None:
            blocks += self.offsets[..., None]
        return blocks.reshape(self.numbers.shape)


@dataclass(slots=True)
class StoredWeights:
    """All weights as their files keep them: like `Weights`, but what is quantised there may be so here.

    layers: each by the names of the fields of `LayerWeights`, without those that the model has not.
    """

    embedding: Matrix
    output: Matrix
    final_norm: Array
    layers: Sequence[Mapping[str, Matrix]]


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

    def read_stored(self, name: str) -> Matrix:
        """Return a tensor as the file keeps it, as float32 where `QuantisedMatrix` cannot hold it."""


def stored_weights(shape: ModelShape, names: Mapping[str, str], source: TensorSource) -> WeightsReader:
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

    return WeightsReader(
        shape.num_layers,
        {field: names[field] for field in outer},
        {field: names[field] for field in inner},
        source,
    )


class WeightsReader:
    """Reads a model's weights, which were checked; each call reads them anew.

    outer, inner: what the file calls the fields of `Weights` and `LayerWeights` that the model has.
    """

    def __init__(
        self, num_layers: int, outer: Mapping[str, str], inner: Mapping[str, str], source: TensorSource
    ) -> None:
        self._num_layers = num_layers
        self._outer = outer
        self._inner = inner
        self._source = source

    def __call__(self) -> Weights:
        """Everything as float32."""
        with _pool() as pool:
            arrays = dict(zip(self._outer, pool.map(self._source.read, self._outer.values()), strict=True))
        layers = _Layers(self._num_layers, self._inner, self._source.read, lambda layer: LayerWeights(**layer))
        return Weights(arrays["embedding"], arrays.get("output", arrays["embedding"]), arrays["final_norm"], layers)

    def as_stored(self) -> StoredWeights:
        """Everything as the files keep it."""
        read = self._source.read_stored
        embedding = read(self._outer["embedding"])
        output = read(self._outer["output"]) if "output" in self._outer else embedding
        layers: _Layers[Matrix, Mapping[str, Matrix]] = _Layers(self._num_layers, self._inner, read, dict)
        return StoredWeights(embedding, output, self._source.read(self._outer["final_norm"]), layers)


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


class _Layers(Sequence[Layer], Generic[Tensor, Layer]):
    """Layers in files. Iteration reads the next one while the caller works on this one.

    read: a tensor by its name in the file. make: a layer from its tensors by field.
    """

    def __init__(
        self,
        num_layers: int,
        names: Mapping[str, str],
        read: Callable[[str], Tensor],
        make: Callable[[dict[str, Tensor]], Layer],
    ) -> None:
        self._numbers = range(num_layers)
        self._names = names
        self._read = read
        self._make = make

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Layer: ...

    @overload
    def __getitem__(self, index: slice) -> list[Layer]: ...

    def __getitem__(self, index: int | slice) -> Layer | list[Layer]:
        numbers = self._numbers[index]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        return self._layer(map(self._read, self._tensors(numbers)))

    def __iter__(self) -> Iterator[Layer]:
        with _pool() as pool:
            coming = deque([pool.map(self._read, self._tensors(number)) for number in self._numbers[:1]])
            for number in self._numbers[1:]:
                coming.append(pool.map(self._read, self._tensors(number)))
                yield self._layer(coming.popleft())
            yield self._layer(coming.popleft())

    def _tensors(self, number: int) -> list[str]:
        return [name.format(layer=number) for name in self._names.values()]

    def _layer(self, tensors: Iterable[Tensor]) -> Layer:
        return self._make(dict(zip(self._names, tensors, strict=True)))


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
