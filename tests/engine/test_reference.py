"""The reference executor: right, and the same bits whatever the spans, the batch and the pages."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from anaphora.engine import tiled_attention
from anaphora.engine.executor import LayerGroup
from anaphora.engine.reference import ReferenceExecutor

from . import executor_contract as contract
from .dense_model import FAMILIES, LLAMA, dense_logits, random_weights
from .executor_contract import BLOCK_SIZES, EXACT, NUM_BLOCKS, assert_same_bits, expected_logits, run, sequence


@cache
def reference(shape, poison=None):
    weights = random_weights(shape)
    if poison is not None:
        weights.embedding[52] = poison
    return ReferenceExecutor(shape, weights)


@pytest.fixture(scope="module")
def build():
    return reference


class TestIsRight:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_agrees_with_a_dense_forward_in_float64(self, family):
        shape = FAMILIES[family]
        dense = dense_logits(shape, random_weights(shape), sequence(0))
        actual = expected_logits(reference, shape, 0)
        np.testing.assert_allclose(actual, dense, rtol=0, atol=2e-4 * np.abs(dense).max())


class TestReturnsLogits(contract.ReturnsLogits):
    pass


class TestSameBits(contract.SameBits):
    @contract.each_family
    def test_whatever_part_of_the_queries_is_in_memory_at_once(self, family, monkeypatch):
        shape = EXACT[family]
        expected, model = expected_logits(reference, shape, 0), reference(shape)
        monkeypatch.setattr(tiled_attention, "QUERY_BLOCK", 37)
        model.allocate_kv(NUM_BLOCKS, 16)
        assert_same_bits(run(model, sequence(0), range(1, 100)), expected)


class TestUsesPages(contract.UsesPages):
    pass


class TestSharesPrefixes(contract.SharesPrefixes):
    pass


class TestDescribesItself:
    def test_sizes_come_from_the_shape(self):
        shape = FAMILIES["qwen3"]
        model = reference(shape)
        assert model.vocab_size == 53
        assert model.max_context == 2048
        assert model.block_sizes == BLOCK_SIZES == (16, 32, 64, 128)
        assert model.layer_groups == (LayerGroup(layers=(0, 1), kv_bytes_per_token=2 * 2 * 3 * 10 * 4, window=None),)

    def test_numerics_id_names_what_the_bits_depend_on(self):
        numerics_id = ReferenceExecutor(LLAMA, random_weights(LLAMA)).numerics_id
        assert numerics_id == reference(LLAMA).numerics_id
        assert numerics_id.startswith("reference-float32-rows")
        assert f"-keys{tiled_attention.KEY_TILE}-" in numerics_id


class TestRefuses(contract.Refuses):
    pass
