"""Products whose rows are independent, and the check that finds those which are not."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.engine.invariant_math import ROW_COUNTS, InvariantProduct, rms_norm, silu

RANDOM = np.random.default_rng(1)
WEIGHT = RANDOM.standard_normal((96, 40), np.float32)
OTHER_WEIGHT = RANDOM.standard_normal((33, 17), np.float32)


def same_bits(left, right):
    return left.shape == right.shape and np.array_equal(left.view(np.uint32), right.view(np.uint32))


def row_by_row(x, weight):
    """The product in an order of additions that depends on nothing: one inner index after the other."""
    out = np.zeros((*x.shape[:-1], weight.shape[-1]), np.float32)
    for k in range(x.shape[-1]):
        out += x[..., k : k + 1] * weight[..., k : k + 1, :]
    return out


def backwards(x, weight):
    return row_by_row(x[..., ::-1], weight[..., ::-1, :])


def independent(x, weight, out):
    out[...] = row_by_row(x, weight)


def last_row_differs(x, weight, out):
    """Row 7 of a tile of 8, rows 15 of 16, ... go through another kernel, as edges of a blocking do."""
    out[...] = row_by_row(x, weight)
    if x.shape[-2] > 1:
        out[..., -1:, :] = backwards(x[..., -1:, :], weight)


def neighbours_leak(x, weight, out):
    """A row is rounded to a scale that it shares with its tile, as in block-scaled formats."""
    scale = np.abs(x).max(axis=(-1, -2), keepdims=True)
    out[...] = row_by_row(x / scale, weight) * scale if x.shape[-2] > 1 else row_by_row(x, weight)


def many_rows_differ(x, weight, out):
    """From 64 rows on the library takes another kernel."""
    out[...] = (row_by_row if x.shape[-2] < 64 else backwards)(x, weight)


def only_16_and_64_are_clean(x, weight, out):
    out[...] = row_by_row(x, weight)
    if x.shape[-2] not in {1, 16, 64}:
        out[..., :1, :] = backwards(x[..., :1, :], weight)


class TestTheCheck:
    def test_takes_all_row_counts_of_a_product_whose_rows_are_independent(self):
        assert InvariantProduct([WEIGHT, OTHER_WEIGHT], matmul=independent).row_counts == ROW_COUNTS

    def test_leaves_out_the_row_counts_that_give_other_bits(self):
        assert InvariantProduct([WEIGHT], matmul=many_rows_differ).row_counts == (8, 16, 32)

    def test_passes_over_row_counts_in_which_the_place_matters(self):
        assert InvariantProduct([WEIGHT], matmul=only_16_and_64_are_clean).row_counts == (16, 64)

    def test_asks_every_shape(self):
        def fails_for_one_shape(x, weight, out):
            (last_row_differs if weight.shape[-2] == len(OTHER_WEIGHT) else independent)(x, weight, out)

        assert InvariantProduct([WEIGHT], matmul=fails_for_one_shape).row_counts == ROW_COUNTS
        assert InvariantProduct([WEIGHT, OTHER_WEIGHT], matmul=fails_for_one_shape).row_counts == (1,)

    @pytest.mark.parametrize("matmul", [last_row_differs, neighbours_leak])
    def test_multiplies_row_by_row_when_nothing_else_is_safe_and_says_so_once(self, matmul, caplog):
        with caplog.at_level(logging.WARNING):
            product = InvariantProduct([WEIGHT], matmul=matmul)
        assert product.row_counts == (1,)
        assert len(caplog.records) == 1
        assert "96x40" in caplog.text
        x = RANDOM.standard_normal((37, 96), np.float32)
        assert same_bits(product(x, WEIGHT), row_by_row(x, WEIGHT))

    def test_names_the_bits(self):
        first, again = (InvariantProduct([WEIGHT], matmul=independent).fingerprint for _ in range(2))
        other_order = InvariantProduct([WEIGHT], matmul=lambda x, weight, out: np.copyto(out, backwards(x, weight)))
        assert first == again != other_order.fingerprint


class TestTheProduct:
    @settings(deadline=None, max_examples=60)
    @given(num_rows=st.integers(1, 600), row=st.integers(0, 599), row_counts=st.sampled_from([ROW_COUNTS, (8,), (1,)]))
    def test_gives_a_row_the_same_bits_in_any_company(self, num_rows, row, row_counts):
        product = InvariantProduct([WEIGHT], row_counts)
        x = np.random.default_rng(num_rows).standard_normal((num_rows, 96), np.float32)
        row %= num_rows
        assert same_bits(product(x, WEIGHT)[row : row + 1], product(x[row : row + 1], WEIGHT))

    def test_is_the_product(self):
        x = RANDOM.standard_normal((333, 96), np.float32)
        expected = x.astype(np.float64) @ WEIGHT.astype(np.float64)
        np.testing.assert_allclose(InvariantProduct([WEIGHT])(x, WEIGHT), expected, atol=1e-4)

    def test_takes_leading_axes_one_weight_each(self):
        product = InvariantProduct([WEIGHT])
        x = RANDOM.standard_normal((3, 21, 96), np.float32)
        weights = RANDOM.standard_normal((3, 96, 40), np.float32)
        out = product(x, weights)
        for i in range(3):
            assert same_bits(out[i], product(x[i], weights[i]))

    def test_of_no_rows_is_no_rows(self):
        assert InvariantProduct([WEIGHT])(np.empty((0, 96), np.float32), WEIGHT).shape == (0, 40)


class TestRowWiseFunctions:
    """numpy may add, or compute a function, in other ways at other lengths and alignments; a row must not notice."""

    @pytest.mark.parametrize("size", [4, 10, 64, 576, 1000])
    @pytest.mark.parametrize("num_rows", [2, 3, 8, 61])
    def test_a_norm_is_the_same_alone_in_a_batch_and_out_of_a_wider_array(self, size, num_rows):
        x = RANDOM.standard_normal((num_rows, size + 3), np.float32)[:, 3:]
        weight = RANDOM.standard_normal(size, np.float32)
        together = rms_norm(x, weight, 1e-5)
        for row in range(num_rows):
            assert same_bits(together[row : row + 1], rms_norm(x[row : row + 1].copy(), weight, 1e-5))

    @pytest.mark.parametrize("function", [np.exp, silu])
    def test_a_function_of_an_element_is_the_same_at_every_place(self, function):
        values = RANDOM.uniform(-30, 30, 50).astype(np.float32)
        for length in range(1, 70):
            places = np.lib.stride_tricks.sliding_window_view(np.resize(values, length + 49), 50)
            assert same_bits(function(np.resize(values, length)), np.resize(function(values), length))
            assert same_bits(function(places), np.stack([function(np.ascontiguousarray(place)) for place in places]))

    @pytest.mark.parametrize("num_rows", [1, 3, 8, 50])
    def test_a_sum_over_keys_is_the_same_in_any_company(self, num_rows):
        probabilities = RANDOM.random((2, num_rows + 5, 256), np.float32)[:, :num_rows]
        sums = probabilities.sum(axis=-1)
        for index in np.ndindex(2, num_rows):
            assert same_bits(sums[index].reshape(1), probabilities[index].copy().sum().reshape(1))
