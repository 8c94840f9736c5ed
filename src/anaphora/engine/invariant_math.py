"""Row-wise mathematics whose results do not depend on what else is computed in the same call.

An ordinary matrix product picks its kernel by the number of rows, so the last bits of a row change with its company.
Here every product goes through calls of a few fixed row counts, and those are trusted only after a check, on this
library, CPU and number of threads, that a row's bits are the same in all of them, at every position and beside any
neighbours.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.float32]
    Matmul: TypeAlias = Callable[[Array, Array, Array], object]
    """(x, weight, out), the third argument being where the product goes."""

log = logging.getLogger(__name__)

ROW_COUNTS = (8, 16, 32, 64, 128, 256)
"""Row counts to try, ascending: few rows make a decode step cheap, many rows make prefill fast."""

MAX_PADDING = 32
"""Rows of zeros worth adding to save a call: reading the weights once more costs about as much as 30 rows."""


class InvariantProduct:
    """x @ weight, float32, where each row of the result is a function of that row of x and of the weight alone.

    It serves weights of the shapes and memory layouts of `samples`, for which it finds on construction the `row_counts`
    that give the same bits. If there are none, each row is multiplied alone, which is slow and needs no proof.

    samples: one weight [inputs, outputs] of each shape to be served. Ordinary (dense, non-zero) values, since products
        with zeros are equal in any order.
    row_counts: what to try, ascending. The first that is free of position sets the bits, later ones must agree with it.
    matmul: the product to use, another than numpy's for tests.

    Cost of construction: per sample about as much as the product of 30 + sum(row_counts) rows.
    """

    def __init__(
        self, samples: Sequence[Array], row_counts: Sequence[int] = ROW_COUNTS, matmul: Matmul = np.matmul
    ) -> None:
        self._matmul = matmul
        self.row_counts, self.fingerprint = self._agreeing_row_counts(samples, row_counts)
        """The row counts in use, ascending; and a digest (hexadecimal) of the bits that they give for `samples`."""
        if self.row_counts == (1,):
            shapes = ", ".join(f"{sample.shape[0]}x{sample.shape[1]}" for sample in samples)
            log.warning(
                "no row count of %s gives products of %s whose rows are independent; multiplying row by row",
                tuple(row_counts),
                shapes,
            )

    def __call__(self, x: Array, weight: Array) -> Array:
        """Return x [..., n, inputs] @ weight [inputs, outputs], or [..., inputs, outputs] with x's leading axes."""
        *lead, num_rows, num_inputs = x.shape
        num_outputs = weight.shape[-1]
        out = np.empty((*lead, num_rows, num_outputs), np.float32)
        for start, stop, count in self._calls(num_rows):
            num_padding = -(stop - start) % count
            rows, products = x[..., start:stop, :], out[..., start:stop, :]
            if num_padding:
                rows = np.zeros((*lead, count, num_inputs), np.float32)
                rows[..., :-num_padding, :] = x[..., start:stop, :]
                products = np.empty((*lead, count, num_outputs), np.float32)
            self._matmul(
                rows.reshape(*lead, -1, count, num_inputs),
                weight[..., None, :, :],
                products.reshape(*lead, -1, count, num_outputs),
            )
            if num_padding:
                out[..., start:stop, :] = products[..., :-num_padding, :]
        return out

    def _calls(self, num_rows: int) -> Iterator[tuple[int, int, int]]:
        """Cut rows into (start, stop, row count): as many tiles as fit, then smaller ones, the last one padded."""
        start = 0
        while start < num_rows:
            rest = num_rows - start
            covering = next((count for count in self.row_counts if count >= rest), None)
            fitting = next((count for count in reversed(self.row_counts) if count <= rest), None)
            if covering is not None and (fitting is None or covering - rest <= MAX_PADDING):
                yield start, num_rows, covering
                return
            assert fitting is not None
            stop = start + rest // fitting * fitting
            yield start, stop, fitting
            start = stop

    def _agreeing_row_counts(self, samples: Sequence[Array], candidates: Sequence[int]) -> tuple[tuple[int, ...], str]:
        for index, count in enumerate(candidates):
            checks = [_Check(self._matmul, sample, count) for sample in samples]
            if all(check.is_position_free() for check in checks):
                larger = [other for other in candidates[index + 1 :] if all(check.agrees(other) for check in checks)]
                return (count, *larger), _digest([check.expected for check in checks])
        return (1,), _digest([_Check(self._matmul, sample, 1).expected for sample in samples])


class _Check:
    """Random rows and their products with one weight, in calls of `count` rows."""

    def __init__(self, matmul: Matmul, weight: Array, count: int) -> None:
        self._matmul, self._weight, self._count = matmul, weight, count
        self._random = np.random.default_rng(count)
        # Two tiles, so that a row can have other neighbours and not only another place among the same ones.
        self._rows = self._random.standard_normal((2 * count, weight.shape[0]), np.float32)
        self.expected = self._products(self._rows, count)

    def is_position_free(self) -> bool:
        """Whether all rows keep their bits when each moves on by one place, the last of a tile to the next tile."""
        return _same_bits(
            self._products(np.roll(self._rows, 1, axis=0), self._count), np.roll(self.expected, 1, axis=0)
        )

    def agrees(self, count: int) -> bool:
        """Whether calls of `count` rows give the same bits, wherever in them a row stands."""
        choice = self._random.integers(0, len(self._rows), count)
        return _same_bits(self._products(self._rows[choice], count), self.expected[choice])

    def _products(self, rows: Array, count: int) -> Array:
        out = np.empty((len(rows), self._weight.shape[1]), np.float32)
        for start in range(0, len(rows), count):
            self._matmul(rows[start : start + count], self._weight, out[start : start + count])
        return out


def _same_bits(left: Array, right: Array) -> bool:
    return np.array_equal(left.view(np.uint32), right.view(np.uint32))


def _digest(arrays: Sequence[Array]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Scale each row of x [..., n] to a root mean square of 1, then by weight [n].

    numpy adds along a contiguous last axis in an order that depends on its length alone.
    """
    mean_square = np.square(x).mean(axis=-1, keepdims=True)
    scaled: Array = x / np.sqrt(mean_square + np.float32(epsilon))
    return scaled * weight


def silu(x: Array) -> Array:
    """Return x * sigmoid(x). Below about -88 it is -0.0, by way of an overflow that the caller has silenced."""
    result: Array = np.exp(-x)
    result += 1.0
    np.divide(x, result, out=result)
    return result
