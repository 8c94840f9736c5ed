"""Random matrices in GGUF's quantised blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES

from anaphora.model import QuantisedMatrix
from anaphora.model.gguf_blocks import take_apart

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Where a block has halves, and how large they must be for weights of unit size, about.
_HALVES = {
    Kind.Q8_0: {0: 0.014},
    Kind.Q4_0: {0: 0.2},
    Kind.Q4_1: {0: 0.2, 2: -1.5},
    Kind.Q4_K: {0: 0.007, 2: 0.05},
    Kind.Q6_K: {208: 0.0007},
}


def random_blocks(kind: Kind, num_outputs: int, num_inputs: int, seed: int = 0) -> NDArray[np.uint8]:
    """Rows of blocks, every bit pattern of numbers among them, weights of unit size about."""
    random = np.random.default_rng(seed)
    block_inputs, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (num_outputs * num_inputs // block_inputs, block_bytes), np.uint8)
    for at, size in _HALVES[kind].items():
        halves = (size * random.uniform(0.5, 1.5, (len(blocks), 1))).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(num_outputs, -1)


def random_matrix(kind: Kind, num_outputs: int, num_inputs: int, seed: int = 0) -> QuantisedMatrix:
    """The same taken apart, scaled so that a product with it neither grows nor shrinks much."""
    matrix = take_apart(random_blocks(kind, num_outputs, num_inputs, seed), kind)
    assert matrix is not None
    # A power of two: scales keep the bits that they have in a file.
    factor = np.float32(2.0 ** -round(np.log2(num_inputs) / 2))
    offsets = None if matrix.offsets is None else matrix.offsets * factor
    return QuantisedMatrix(matrix.numbers, matrix.scales * factor, offsets)
