"""LoRA adapters in the executors: right, and the same bits alone and in company."""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest

from anaphora.engine.executor import Batch, RunsAdapters, Span
from anaphora.engine.native import NativeExecutor, NativeUnavailableError, native_paths
from anaphora.engine.reference import ReferenceExecutor
from anaphora.model import read_lora
from anaphora.model.lora import TARGETS
from tests.tiny_adapters import merged, random_tensors, write_adapter

from .dense_model import FAMILIES, LLAMA, dense_logits, random_weights
from .executor_contract import NUM_BLOCKS, NUM_TOKENS, REAL_LAYER, assert_same_bits, run, sequence

try:
    PATHS = native_paths()
except NativeUnavailableError:
    PATHS = ()

KINDS = ("reference", *PATHS, *(f"{path} of 8 bits" for path in PATHS[:1]))
TOLERANCE = {"reference": 1e-5, "avx512-bf16": 8e-2, "8 bits": 1e-1}
"""Root mean square of the error, relative to that of the logits. For the other paths, whose operands are float32, it is
2e-3: keys and values that round to the other side."""

ADAPTERS = {
    "all": {"rank": 4, "seed": 1},
    "queries and values": {"rank": 8, "targets": ("q", "v"), "seed": 2},
    "mlp, wide": {"rank": 40, "targets": ("gate", "down"), "seed": 3},
    "one, rank 1": {"rank": 1, "targets": ("o",), "seed": 4},
    "rank-stabilised": {"rank": 3, "targets": ("k", "up"), "seed": 5, "use_rslora": True},
}


def to_bf16(x):
    """The nearest bf16 numbers, as float32."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@cache
def bf16_weights(shape):
    """Random weights whose matrices are bf16 already, so that packing them loses nothing."""
    weights = random_weights(shape)
    weights.embedding, weights.output = to_bf16(weights.embedding), to_bf16(weights.output)
    for layer in weights.layers:
        for target in TARGETS:
            setattr(layer, target, to_bf16(getattr(layer, target)))
    return weights


def bf16_adapter(folder, shape, rank, targets=TARGETS, seed=0, **config):
    tensors = {name: to_bf16(tensor) for name, tensor in random_tensors(shape, rank, targets, seed).items()}
    return read_lora(write_adapter(folder, shape, rank, targets, tensors=tensors, **config), shape)


def expected_logits(kind, shape, adapter=None):
    """In float64, of a model with the adapter merged into its weights, keys and values kept as the executor does."""
    weights = bf16_weights(shape) if adapter is None else merged(bf16_weights(shape), adapter)
    if kind == "reference":
        return dense_logits(shape, weights, sequence(0))
    return dense_logits(shape, weights, sequence(0), lambda kv: to_bf16(kv.astype(np.float32)).astype(np.float64))


def tolerance(kind):
    return TOLERANCE["8 bits"] if "8 bits" in kind else TOLERANCE.get(kind, 2e-3)


@cache
def build(kind, shape, num_threads=2):
    weights = bf16_weights(shape)
    if kind == "reference":
        return ReferenceExecutor(shape, weights, num_threads)
    path, *eight_bits = kind.split(" ", 1)
    return NativeExecutor(shape, weights, num_threads, path, "q8_0" if eight_bits else "bf16")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    @cache
    def of(shape):
        root = tmp_path_factory.mktemp("adapters")
        return {name: bf16_adapter(root / name, shape, **settings) for name, settings in ADAPTERS.items()}

    return of


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def logits_alone(executor, tokens, adapter):
    """All logits of a sequence alone in fresh pages, as one span."""
    executor.allocate_kv(NUM_BLOCKS, 16)
    span = Span(tokens, 0, [array("i", range(1, 60))], num_logits=len(tokens), adapter=adapter)
    return executor.execute(Batch([span])).logits[0]


def relative_error(actual, expected):
    return np.square(actual - expected).mean() ** 0.5 / np.square(expected).mean() ** 0.5


class TestIsRight:
    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
    @pytest.mark.parametrize("name", ADAPTERS)
    def test_as_if_merged_into_the_weights(self, kind, family, name, adapters):
        shape = FAMILIES[family]
        adapter = adapters(shape)[name]
        executor = build(kind, shape)
        executor.load_adapter(adapter)
        expected = expected_logits(kind, shape, adapter)
        assert relative_error(logits_alone(executor, sequence(0), adapter.digest), expected) < tolerance(kind)
        assert relative_error(expected_logits(kind, shape), expected) > 0.2

    def test_at_real_size(self, kind, adapters):
        adapter = adapters(REAL_LAYER)["all"]
        executor = build(kind, REAL_LAYER)
        executor.load_adapter(adapter)
        expected = expected_logits(kind, REAL_LAYER, adapter)
        assert relative_error(logits_alone(executor, sequence(0), adapter.digest), expected) < tolerance(kind)


class TestSameBits:
    @pytest.mark.parametrize(
        "shape", [LLAMA, replace(FAMILIES["qwen2"], hidden_size=33, intermediate_size=17), REAL_LAYER]
    )
    @pytest.mark.parametrize("num_threads", [1, 2])
    def test_of_base_and_adapters_in_one_batch_as_of_each_alone(self, kind, shape, num_threads, adapters):
        """Spans of random lengths, sequences in a random order, base among them: cut, batched, cached, all the same."""
        random, loaded = Random(0), adapters(shape)
        executor = build(kind, shape, num_threads)
        plain = build(kind, shape, num_threads)
        names = [None, *ADAPTERS, None, "all"]
        digests = [None if name is None else loaded[name].digest for name in names]
        base = [logits_alone(plain, sequence(i), None) for i in range(2)]
        for adapter in loaded.values():
            executor.load_adapter(adapter)
        expected = [logits_alone(executor, sequence(i), digest) for i, digest in enumerate(digests)]
        assert_same_bits(expected[0], base[0])

        executor.allocate_kv(40 * len(names), 16)
        tables = [array("i", range(1 + 40 * i, 41 + 40 * i)) for i in range(len(names))]
        computed = [0] * len(names)
        while unfinished := [i for i in range(len(names)) if computed[i] < NUM_TOKENS]:
            members = random.sample(unfinished, random.randint(1, len(unfinished)))
            stops = [min(computed[i] + random.choice([1, 1, 7, 64, 200, 600]), NUM_TOKENS) for i in members]
            spans = [
                Span(sequence(i)[computed[i] : stop], computed[i], [tables[i]], stop - computed[i], digests[i])
                for i, stop in zip(members, stops, strict=True)
            ]
            for i, stop, logits in zip(members, stops, executor.execute(Batch(spans)).logits, strict=True):
                assert_same_bits(logits, expected[i][computed[i] : stop])
                computed[i] = stop

    def test_with_a_prefix_in_common(self, kind, adapters):
        adapter = adapters(LLAMA)["all"]
        executor = build(kind, LLAMA)
        executor.load_adapter(adapter)
        expected = logits_alone(executor, sequence(0), adapter.digest)
        table = array("i", range(1, 60))
        spans = [Span(sequence(0)[i : i + 1], i, [table], adapter=adapter.digest) for i in (590, 595, 599)]
        for i, logits in zip((590, 595, 599), executor.execute(Batch(spans, [((0, 1, 2), 36)])).logits, strict=True):
            assert_same_bits(logits, expected[i : i + 1])

    def test_whatever_else_was_loaded_and_when(self, kind, adapters):
        first, *others = adapters(LLAMA).values()
        executor, alone = build(kind, LLAMA), build(kind, LLAMA, 1)
        alone.load_adapter(first)
        for adapter in (*others, first):
            executor.load_adapter(adapter)
        expected = logits_alone(executor, sequence(0)[:50], first.digest)
        for adapter in others:
            executor.unload_adapter(adapter.digest)
        executor.load_adapter(first)  # once more: nothing
        assert list(executor.adapters) == [first.digest]
        assert_same_bits(logits_alone(executor, sequence(0)[:50], first.digest), expected)
        if kind != "reference":  # whose bits depend on the number of threads
            assert_same_bits(logits_alone(alone, sequence(0)[:50], first.digest), expected)


class TestLoading:
    def test_is_by_digest(self, kind, adapters):
        executor, adapter = build(kind, LLAMA), adapters(LLAMA)["all"]
        assert isinstance(executor, RunsAdapters)
        executor.load_adapter(adapter)
        executor.unload_adapter(adapter.digest)
        assert adapter.digest not in executor.adapters
        with pytest.raises(KeyError):
            executor.unload_adapter(adapter.digest)

    def test_refuses_spans_of_an_adapter_that_is_gone_before_anything_is_written(self, kind, adapters):
        executor, adapter = build(kind, LLAMA), adapters(LLAMA)["all"]
        executor.load_adapter(adapter)
        executor.unload_adapter(adapter.digest)
        before = logits_alone(executor, sequence(0)[:20], None)
        bad = Span(sequence(1)[:20], 0, [array("i", [1, 2])], adapter=adapter.digest)
        with pytest.raises(ValueError, match=rf"spans\[0\].adapter: '{adapter.digest}' .* no such adapter is loaded"):
            executor.execute(Batch([bad]))
        assert_same_bits(run(executor, sequence(0)[:20], [1, 2], 19), before[19:])
