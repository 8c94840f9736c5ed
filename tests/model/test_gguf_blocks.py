"""Quantised blocks taken apart hold exactly the weights that the formats' own package decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from anaphora.model import QuantisedMatrix, load_model
from anaphora.model.gguf_blocks import take_apart
from tests.quantised import random_blocks
from tests.tiny_models import tiny_shape, write_gguf_model

if TYPE_CHECKING:
    from pathlib import Path

KINDS = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K]


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_the_same(kind: Kind) -> None:
    raw = random_blocks(kind, num_outputs=5, num_inputs=768)
    matrix = take_apart(raw, kind)
    assert matrix is not None
    np.testing.assert_array_equal(matrix.dense(), gguf.dequantize(raw, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_of_few_bits(kind: Kind) -> None:
    matrix = take_apart(random_blocks(kind, num_outputs=5, num_inputs=768), kind)
    assert matrix is not None
    assert matrix.numbers.shape == (5, 768)
    assert matrix.kind == (16 if kind == Kind.Q6_K else 32, kind.name.startswith("Q4"))
    if matrix.offsets is not None:
        assert (matrix.numbers.min(), matrix.numbers.max()) == (0, 15)


def test_other_kinds_are_left_alone() -> None:
    assert take_apart(np.zeros((1, 24), np.uint8), Kind.Q5_1) is None


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_models_stored_weights_are_its_weights(tmp_path: Path, architecture: str, kind: str) -> None:
    model = load_model(write_gguf_model(tmp_path / "tiny.gguf", architecture, quantisation=Kind[kind]))
    stored, weights = model.stored_weights, model.weights
    assert isinstance(stored.embedding, QuantisedMatrix)
    np.testing.assert_array_equal(stored.embedding.dense(), weights.embedding)
    np.testing.assert_array_equal(stored.final_norm, weights.final_norm)
    assert len(stored.layers) == tiny_shape(architecture).num_layers
    for layer, dense in zip(stored.layers, weights.layers, strict=True):
        for name, tensor in layer.items():
            is_matrix = tensor.numbers.ndim == 2 if isinstance(tensor, QuantisedMatrix) else tensor.ndim == 2
            assert isinstance(tensor, QuantisedMatrix) == is_matrix
            plain = tensor.dense() if isinstance(tensor, QuantisedMatrix) else tensor
            np.testing.assert_array_equal(plain, getattr(dense, name))


def test_a_file_without_quantised_tensors_has_none(tmp_path: Path) -> None:
    stored = load_model(write_gguf_model(tmp_path / "tiny.gguf")).stored_weights
    assert isinstance(stored.embedding, np.ndarray)
    assert all(isinstance(tensor, np.ndarray) for layer in stored.layers for tensor in layer.values())
