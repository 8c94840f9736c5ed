"""A model's weights handed to the library, which packs them into strips: a layer at a time, then let go."""

from __future__ import annotations

import ctypes
from dataclasses import fields
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from anaphora.engine.native.library import MATRICES, VECTORS, LayerPointers, Stored
from anaphora.model import LayerWeights, QuantisedMatrix, StoredWeights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from anaphora.model import ModelShape, Weights

    Array: TypeAlias = NDArray[np.float32]
    Matrix: TypeAlias = Array | QuantisedMatrix

_SHARING = (("q", "k", "v"), ("gate", "up"))
"""What shares a matrix of strips, and so has one format."""


def pack_weights(
    library: ctypes.CDLL, engine: int, shape: ModelShape, weights: Weights | StoredWeights, cosines: Array, sines: Array
) -> bool:
    """Give an engine of the library all its weights. False if there was not enough memory."""
    embedding = _plain(weights.embedding)
    output = None if shape.ties_embeddings else _plain(weights.output)
    vectors = [_plain_array(vector) for vector in (weights.final_norm, cosines, sines)]
    is_loaded = library.anaphora_load(
        engine,
        ctypes.byref(_stored(embedding)),
        None if output is None else ctypes.byref(_stored(output)),
        *(vector.ctypes.data for vector in vectors),
    )
    del embedding, output
    for number, layer in enumerate(_layers(weights)):
        is_loaded = is_loaded and _pack_layer(library, engine, number, layer)
    return bool(is_loaded)


def _layers(weights: Weights | StoredWeights) -> Iterator[Mapping[str, Matrix]]:
    """Each layer's tensors by field, without absent ones."""
    if isinstance(weights, StoredWeights):
        yield from weights.layers
    else:
        names = [field.name for field in fields(LayerWeights)]
        for layer in weights.layers:
            yield {name: tensor for name in names if (tensor := getattr(layer, name)) is not None}


def _pack_layer(library: ctypes.CDLL, engine: int, number: int, layer: Mapping[str, Matrix]) -> bool:
    matrices = {name: layer[name] for name in MATRICES}
    for names in _SHARING:
        if len({_kind(matrices[name]) for name in names}) > 1:
            matrices |= {name: _dense(matrices[name]) for name in names}
    matrices = {name: _plain(matrix) for name, matrix in matrices.items()}
    vectors = {name: _plain_array(_dense(layer[name])) for name in VECTORS if name in layer}
    pointers = LayerPointers(
        **{name: _stored(matrix) for name, matrix in matrices.items()},
        **{name: vector.ctypes.data for name, vector in vectors.items()},
    )
    return bool(library.anaphora_load_layer(engine, number, ctypes.byref(pointers)))


def _kind(matrix: Matrix) -> tuple[int, bool] | None:
    return matrix.kind if isinstance(matrix, QuantisedMatrix) else None


def _dense(matrix: Matrix) -> Array:
    return matrix.dense() if isinstance(matrix, QuantisedMatrix) else matrix


def _plain(matrix: Matrix) -> Matrix:
    """As C++ reads it: rows one after the other."""
    if not isinstance(matrix, QuantisedMatrix):
        return _plain_array(matrix)
    offsets = None if matrix.offsets is None else _plain_array(matrix.offsets)
    return QuantisedMatrix(np.require(matrix.numbers, np.int8, ["C"]), _plain_array(matrix.scales), offsets)


def _plain_array(array: Array) -> Array:
    return np.require(array, np.float32, ["C", "A"])


def _stored(matrix: Matrix) -> Stored:
    """Pointers, good for as long as `matrix` is held."""
    if not isinstance(matrix, QuantisedMatrix):
        return Stored(matrix.ctypes.data, None, None, 0)
    offsets = None if matrix.offsets is None else matrix.offsets.ctypes.data
    return Stored(matrix.numbers.ctypes.data, matrix.scales.ctypes.data, offsets, matrix.kind[0])
