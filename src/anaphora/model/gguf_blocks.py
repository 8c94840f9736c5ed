"""Quantised blocks of GGUF files taken apart into numbers, scales and offsets, without rounding anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from anaphora.model.weights import QuantisedMatrix

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Parts = tuple[NDArray[Any], NDArray[np.float32], NDArray[np.float32] | None]

_MIDDLE = {4: 8, 6: 32}
"""What is subtracted from numbers of so many bits where they stand for signed ones."""


def take_apart(raw: Bytes, kind: GGMLQuantizationType) -> QuantisedMatrix | None:
    """Return a matrix from its rows of blocks, uint8 [outputs, bytes]; None for kinds that are not known here.

    Cost: a pass over it, at 0.1 s for 100 MB of numbers.
    """
    if kind not in _KINDS:
        return None
    blocks = raw.reshape(-1, GGML_QUANT_SIZES[kind][1])
    numbers, scales, offsets = _KINDS[kind](blocks)
    shape = (len(raw), -1)
    return QuantisedMatrix(
        np.ascontiguousarray(numbers, np.uint8).view(np.int8).reshape(shape),
        scales.reshape(shape),
        None if offsets is None else offsets.reshape(shape),
    )


# Each takes blocks, uint8 [blocks, bytes], and returns numbers [blocks, numbers], and scales and offsets [blocks, n],
# as ggml-common.h and ggml-quants.c of llama.cpp have them.


def _q8_0(blocks: Bytes) -> Parts:
    return blocks[:, 2:], _halves(blocks[:, :2]), None


def _q4_0(blocks: Bytes) -> Parts:
    scales = _halves(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), scales, scales * np.float32(-_MIDDLE[4])


def _q4_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4])


def _q4_k(blocks: Bytes) -> Parts:
    """Eight blocks of 32, whose scales and offsets are 6 bits each, in 12 bytes."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    offsets = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
    numbers = _nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(len(blocks), 256)
    return numbers, _halves(blocks[:, :2]) * scales, -_halves(blocks[:, 2:4]) * offsets


def _q6_k(blocks: Bytes) -> Parts:
    """Sixteen blocks of 16: low 4 bits in 128 bytes, high 2 bits in 64, scales of 8 bits, and a scale of those."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(2, 1) & 15
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & 3
    numbers = low.reshape(-1, 256) | high.reshape(-1, 256) << 4
    scales = _halves(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8)
    return numbers - np.uint8(_MIDDLE[6]), scales, None


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] bytes as [..., 2n] numbers: the low halves, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _halves(packed: Bytes) -> NDArray[np.float32]:
    return np.ascontiguousarray(packed).view("<f2").astype(np.float32)


_KINDS: dict[GGMLQuantizationType, Callable[[Bytes], Parts]] = {
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
