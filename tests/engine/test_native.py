"""The native executor, on each kernel path that this machine runs: exact as the reference is, and close to it."""

from __future__ import annotations

from array import array
from dataclasses import fields, replace
from functools import cache

import gguf
import numpy as np
import pytest

from anaphora.engine.executor import Batch, LayerGroup, Span
from anaphora.engine.native import NativeExecutor, NativeUnavailableError, native_paths
from anaphora.engine.reference import ReferenceExecutor

from . import executor_contract as contract
from .dense_model import FAMILIES, LLAMA, dense_logits, random_weights
from .executor_contract import NUM_BLOCKS, NUM_TOKENS, REAL_LAYER, assert_same_bits, expected_logits, run, sequence

try:
    PATHS = native_paths()
except NativeUnavailableError as error:
    pytest.skip(f"the native executor is not available: {error}", allow_module_level=True)

TOLERANCE = {"portable": 5e-4, "avx2": 5e-4, "avx512": 5e-4, "avx512-bf16": 4e-2}
HEAD_SIZES = (2, 10, 64, 80, 96, 128, 130, 256)


def to_bf16(x):
    """The nearest bf16 numbers, as float32."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def rounded_weights(shape):
    """Random weights whose matrices are bf16 already, so that packing them loses nothing."""
    weights = random_weights(shape)
    is_tied = weights.output is weights.embedding
    weights.embedding = to_bf16(weights.embedding)
    weights.output = weights.embedding if is_tied else to_bf16(weights.output)
    for layer in weights.layers:
        for field in fields(layer):
            array = getattr(layer, field.name)
            if array is not None and array.ndim == 2:
                setattr(layer, field.name, to_bf16(array))
    return weights


@cache
def build_on(path, num_threads=2):
    @cache
    def build(shape, poison=None):
        weights = rounded_weights(shape)
        if poison is not None:
            weights.embedding[52] = poison
        return NativeExecutor(shape, weights, num_threads, path)

    return build


@pytest.fixture(scope="module", params=PATHS)
def path(request):
    return request.param


@pytest.fixture(scope="module")
def build(path):
    return build_on(path)


def keep_bf16(kv):
    return to_bf16(kv.astype(np.float32)).astype(np.float64)


@cache
def dense(shape):
    """Logits in float64 with keys and values kept as bf16."""
    return dense_logits(shape, rounded_weights(shape), sequence(0), keep_bf16)


class TestIsClose:
    """Errors as root mean squares, relative to the logits' own.

    With operands of products in float32 all that is left are keys and values that round to the other side; with
    operands in bf16, 8 bits of each.
    """

    def assert_close(self, build, path, shape):
        error = expected_logits(build, shape, 0) - dense(shape)
        assert np.square(error).mean() ** 0.5 < TOLERANCE[path] * np.square(dense(shape)).mean() ** 0.5

    @pytest.mark.parametrize("family", FAMILIES)
    def test_to_a_dense_forward_in_float64(self, build, path, family):
        self.assert_close(build, path, FAMILIES[family])

    @pytest.mark.parametrize("head_dim", HEAD_SIZES)
    def test_with_heads_of_any_even_size(self, build, path, head_dim):
        self.assert_close(build, path, replace(LLAMA, head_dim=head_dim, num_layers=1))

    def test_at_real_size(self, build, path):
        self.assert_close(build, path, REAL_LAYER)

    def test_with_sizes_that_fill_no_strip_or_vector(self, build, path):
        self.assert_close(build, path, replace(LLAMA, hidden_size=33, intermediate_size=17, head_dim=6))


@cache
def q8_weights(shape):
    """Weights whose matrices are Q8_0 already: 32 numbers a block, one scale, as GGUF rounds them."""
    weights = random_weights(shape)

    def rounded(matrix):
        padded = np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % 32)))
        quantised = gguf.quantize(padded, gguf.GGMLQuantizationType.Q8_0)
        return gguf.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0)[:, : matrix.shape[1]].copy()

    is_tied = weights.output is weights.embedding
    weights.embedding = rounded(weights.embedding)
    weights.output = weights.embedding if is_tied else rounded(weights.output)
    for layer in weights.layers:
        for field in fields(layer):
            array = getattr(layer, field.name)
            if array is not None and array.ndim == 2:
                setattr(layer, field.name, rounded(array))
    return weights


class TestWeightsOf8Bits:
    @pytest.fixture(scope="class")
    def build(self, path):
        return cache(lambda shape: NativeExecutor(shape, q8_weights(shape), 2, path, "q8_0"))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_that_were_q8_0_lose_nothing(self, build, path, family):
        shape = FAMILIES[family]
        exact = dense_logits(shape, q8_weights(shape), sequence(0), keep_bf16)
        error = expected_logits(build, shape, 0) - exact
        assert np.square(error).mean() ** 0.5 < TOLERANCE[path] * np.square(exact).mean() ** 0.5

    def test_that_fill_no_block(self, build, path):
        shape = replace(LLAMA, hidden_size=33, intermediate_size=17, head_dim=6)
        exact = dense_logits(shape, q8_weights(shape), sequence(0), keep_bf16)
        error = expected_logits(build, shape, 0) - exact
        assert np.square(error).mean() ** 0.5 < TOLERANCE[path] * np.square(exact).mean() ** 0.5

    @contract.each_family
    def test_give_the_same_bits_in_company(self, build, family):
        contract.assert_same_bits_in_company(build, contract.EXACT[family], block_size=16, num_sequences=4, seed=3)

    def test_give_the_same_bits_at_real_size(self, build):
        contract.assert_same_bits_in_company(build, REAL_LAYER, block_size=16, num_sequences=4, seed=4)

    def test_of_other_values_round_to_half_a_step(self, build, path):
        shape = FAMILIES["qwen2"]
        executor = NativeExecutor(shape, random_weights(shape), 2, path, "q8_0")
        executor.allocate_kv(NUM_BLOCKS, 16)
        exact = dense_logits(shape, random_weights(shape), sequence(0), keep_bf16)
        error = run(executor, sequence(0), range(1, NUM_BLOCKS)) - exact
        assert np.square(error).mean() ** 0.5 < 0.05 * np.square(exact).mean() ** 0.5

    def test_have_a_numerics_id_of_their_own(self, build, path):
        assert build(LLAMA).numerics_id.startswith(f"native-{path}-q8_0-strip32-keys256-rope")


class TestReturnsLogits(contract.ReturnsLogits):
    pass


class TestSameBits(contract.SameBits):
    @contract.each_family
    def test_with_any_number_of_threads(self, path, build, family):
        shape = contract.EXACT[family]
        expected = expected_logits(build, shape, 0)
        for num_threads in (1, 3):
            model = build_on(path, num_threads)(shape)
            model.allocate_kv(NUM_BLOCKS, 16)
            tables = [array("i", range(1, 60)), array("i", range(60, 120))]
            spans = [Span(sequence(0), 0, [table], num_logits=NUM_TOKENS) for table in tables]
            for logits in model.execute(Batch(spans)).logits:
                assert_same_bits(logits, expected)
            one_more = Span(sequence(0)[-1:], NUM_TOKENS - 1, [tables[1]])
            assert_same_bits(model.execute(Batch([one_more])).logits[0], expected[-1:])

    @pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
    def test_with_heads_of_the_usual_sizes(self, build, head_dim):
        shape = replace(REAL_LAYER, head_dim=head_dim, num_heads=4, num_kv_heads=2)
        contract.assert_same_bits_in_company(build, shape, block_size=16, num_sequences=3, seed=1)

    def test_with_more_heads_in_a_group_than_rows_in_a_piece(self, build):
        shape = replace(LLAMA, num_heads=50, num_kv_heads=1)
        contract.assert_same_bits_in_company(build, shape, block_size=32, num_sequences=3, seed=2)

    @pytest.mark.skipif(not {"avx2", "avx512"} <= {*PATHS}, reason="the machine has not both paths")
    @contract.each_family
    def test_on_avx2_and_avx512(self, family):
        shape = contract.EXACT[family]
        first, second = (expected_logits(build_on(path), shape, 0) for path in ("avx2", "avx512"))
        assert_same_bits(first, second)


class TestUsesPages(contract.UsesPages):
    pass


class TestSharesPrefixes(contract.SharesPrefixes):
    @pytest.mark.parametrize("num_threads", [1, 3])
    def test_with_any_number_of_threads(self, path, num_threads):
        branches = [(0, 560), (0, 560), (1, 300), (0, 256)]
        self.assert_same_bits(build_on(path, num_threads), REAL_LAYER, 16, branches, 1)


class TestDescribesItself:
    def test_sizes_come_from_the_shape(self, build):
        model = build(FAMILIES["qwen3"])
        assert model.vocab_size == 53
        assert model.max_context == 2048
        assert model.block_sizes == contract.BLOCK_SIZES
        # A key takes its 10 dims, a value is padded to 16.
        assert model.layer_groups == (LayerGroup(layers=(0, 1), kv_bytes_per_token=2 * 3 * (10 + 16) * 2, window=None),)

    def test_numerics_id_names_path_dtype_tiles_and_rope(self, path, build):
        numerics_id = build(LLAMA).numerics_id
        assert numerics_id.startswith(f"native-{path}-bf16-strip32-keys256-rope")
        assert numerics_id == NativeExecutor(LLAMA, random_weights(LLAMA), path=path).numerics_id
        assert numerics_id != build(FAMILIES["linear rope"]).numerics_id


class TestRefuses(contract.Refuses):
    def test_a_path_that_the_machine_has_not(self):
        with pytest.raises(ValueError, match=r"path: 'mmx' is not allowed; .*portable"):
            NativeExecutor(LLAMA, random_weights(LLAMA), path="mmx")

    def test_a_weight_format_that_is_not_known(self):
        with pytest.raises(ValueError, match=r"weight_format: 'q2' is not allowed; .*bf16.*q8_0"):
            NativeExecutor(LLAMA, random_weights(LLAMA), weight_format="q2")

    def test_no_threads(self):
        with pytest.raises(ValueError, match="num_threads: 0 is not allowed"):
            NativeExecutor(LLAMA, random_weights(LLAMA), num_threads=0)


PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "Dear Sir or Madam, I am writing to",
    "1, 2, 3, 4,",
)
NUM_GENERATED = 16


@pytest.fixture(scope="session")
def continued(default_model):
    """Each prompt with what the reference executor continues it with, greedily, and its logits."""
    executor = ReferenceExecutor(default_model.shape, default_model.weights)
    results = []
    for prompt in PROMPTS:
        tokens = np.frombuffer(default_model.tokenizer.encode(prompt), np.int32)
        executor.allocate_kv(4, 16)
        logits = run(executor, tokens, range(1, 5))
        for position in range(len(tokens), len(tokens) + NUM_GENERATED):
            tokens = np.append(tokens, np.int32(logits[-1].argmax()))
            logits = np.concatenate([logits, run(executor, tokens, range(1, 5), position)])
        results.append((tokens, logits))
    return results


@pytest.mark.model
class TestOnTheDefaultModel:
    @pytest.mark.parametrize("kept", ["weights", "stored_weights"])
    def test_logits_are_close_to_the_reference_and_greedy_choices_the_same(self, path, default_model, continued, kept):
        executor = NativeExecutor(default_model.shape, getattr(default_model, kept), path=path)
        for tokens, expected in continued:
            executor.allocate_kv(4, 16)
            logits = run(executor, tokens, range(1, 5))
            # Of logits up to 36, with a root mean square of 6 to 14.
            assert np.abs(logits - expected).max() < 1.0
            assert np.square(logits - expected).mean() ** 0.5 < 0.2
            chosen = slice(-1 - NUM_GENERATED, -1)
            np.testing.assert_array_equal(logits[chosen].argmax(axis=1), expected[chosen].argmax(axis=1))
