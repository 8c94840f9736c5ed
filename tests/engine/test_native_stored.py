"""The native executor on weights as GGUF files quantise them: the file's own weights, exact as all others."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from anaphora.engine.native import NativeExecutor, NativeUnavailableError, native_paths
from anaphora.engine.reference import ReferenceExecutor
from anaphora.model import LayerWeights, QuantisedMatrix, StoredWeights, Weights
from tests.quantised import random_matrix

from . import executor_contract as contract
from .dense_model import FAMILIES, LLAMA, dense_logits, random_weights
from .executor_contract import assert_same_bits, expected_logits, sequence
from .test_native import TOLERANCE, keep_bf16, to_bf16

try:
    PATHS = native_paths()
except NativeUnavailableError as error:
    pytest.skip(f"the native executor is not available: {error}", allow_module_level=True)

KINDS = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K]
# Sizes in whole blocks of every kind, in no whole number of the 64 pairs that are unpacked at once.
SHAPE = replace(LLAMA, hidden_size=256, intermediate_size=768, num_heads=4, num_kv_heads=2, head_dim=64)
# The usual kinds of a file called Q4_K_M.
MIXED = {"v": Kind.Q6_K, "down": Kind.Q6_K, "output": Kind.Q6_K}


@cache
def stored_weights(shape, kind, others=()):
    """Random matrices of one kind, but for those that `others`, pairs of field and kind, names."""
    kinds = dict(others)
    dense = random_weights(shape)

    def stored(name, array):
        return array if array.ndim == 1 else random_matrix(kinds.get(name, kind), *array.shape, seed=len(name))

    layers = [
        {
            field.name: stored(field.name, array)
            for field in fields(layer)
            if (array := getattr(layer, field.name)) is not None
        }
        for layer in dense.layers
    ]
    embedding = stored("embedding", dense.embedding)
    output = embedding if shape.ties_embeddings else stored("output", dense.output)
    return StoredWeights(embedding, output, dense.final_norm, layers)


def dense_of(stored):
    """The same weights as float32."""

    def dense(tensor):
        return tensor.dense() if isinstance(tensor, QuantisedMatrix) else tensor

    layers = [LayerWeights(**{name: dense(tensor) for name, tensor in layer.items()}) for layer in stored.layers]
    return Weights(dense(stored.embedding), dense(stored.output), stored.final_norm, layers)


def relative_error(actual, expected):
    return np.square(actual - expected).mean() ** 0.5 / np.square(expected).mean() ** 0.5


@pytest.fixture(scope="module", params=PATHS)
def path(request):
    return request.param


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def build(path, kind):
    return cache(lambda shape: NativeExecutor(shape, stored_weights(shape, kind), 2, path))


@cache
def dense(shape, kind):
    """Logits in float64 with keys and values kept as bf16."""
    return dense_logits(shape, dense_of(stored_weights(shape, kind)), sequence(0), keep_bf16)


def test_nothing_is_lost(build, path, kind):
    assert relative_error(expected_logits(build, SHAPE, 0), dense(SHAPE, kind)) < TOLERANCE[path]


@pytest.mark.parametrize("kind", KINDS, scope="module")
def test_the_reference_executor_with_the_same_weights_is_as_close(path, kind):
    weights = stored_weights(SHAPE, kind)
    native, reference = (
        expected_logits(cache(make), SHAPE, 0)
        for make in (
            lambda shape: NativeExecutor(shape, weights, 1, path),
            lambda shape: ReferenceExecutor(shape, dense_of(weights), 1),
        )
    )
    # The reference keeps float32 keys and values, so that the 8 bits of bf16 ones come on top: up to 1.4 % here.
    assert relative_error(native, reference) < TOLERANCE[path] + 2e-2


def test_the_same_bits_in_company(build):
    contract.assert_same_bits_in_company(build, SHAPE, block_size=16, num_sequences=4, seed=5)


def test_the_same_bits_with_shared_prefixes_and_any_number_of_threads(path, kind):
    for num_threads in (1, 3):
        build = cache(lambda shape, n=num_threads: NativeExecutor(shape, stored_weights(shape, kind), n, path))
        contract.SharesPrefixes().assert_same_bits(build, SHAPE, 16, [(0, 560), (0, 560), (1, 300), (0, 256)], 1)


@pytest.mark.skipif(not {"avx2", "avx512"} <= {*PATHS}, reason="the machine has not both paths")
@pytest.mark.parametrize("kind", KINDS, scope="module")
def test_the_same_bits_on_avx2_and_avx512(kind):
    first, second = (
        expected_logits(cache(lambda shape, p=path: NativeExecutor(shape, stored_weights(shape, kind), 2, p)), SHAPE, 0)
        for path in ("avx2", "avx512")
    )
    assert_same_bits(first, second)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_with_biases_norms_and_a_tied_output(path, family):
    shape = replace(
        SHAPE,
        **{name: getattr(FAMILIES[family], name) for name in ("has_attention_bias", "has_qk_norm", "ties_embeddings")},
    )
    executor = cache(lambda shape: NativeExecutor(shape, stored_weights(shape, Kind.Q4_0), 2, path))
    assert relative_error(expected_logits(executor, shape, 0), dense(shape, Kind.Q4_0)) < TOLERANCE[path]


def test_of_several_kinds_those_that_share_a_product_become_bf16(path):
    """As in files called Q4_K_M, where v is of another kind than q and k."""
    stored = stored_weights(SHAPE, Kind.Q4_K, tuple(MIXED.items()))
    weights = dense_of(stored)
    for layer in weights.layers:
        layer.q, layer.k, layer.v = map(to_bf16, (layer.q, layer.k, layer.v))
    expected = dense_logits(SHAPE, weights, sequence(0), keep_bf16)
    executor = cache(lambda shape: NativeExecutor(shape, stored, 2, path))
    assert relative_error(expected_logits(executor, SHAPE, 0), expected) < TOLERANCE[path]


def test_numerics_id_says_that_weights_are_as_stored(path):
    executor = NativeExecutor(SHAPE, stored_weights(SHAPE, Kind.Q4_0), 1, path)
    assert executor.numerics_id.startswith(f"native-{path}-stored-bf16-strip32-keys256-rope")
