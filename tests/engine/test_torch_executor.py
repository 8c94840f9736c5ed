"""The torch executor on the families that every executor runs: right, and the same bits whatever else is computed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from anaphora.engine.executor import LayerGroup
from anaphora.engine.torch_executor import TorchExecutor
from anaphora.engine.torch_executor.invariance import agreeing_sizes, cut, num_sample_tokens, starts
from anaphora.engine.torch_executor.modules import module_from_arrays

from . import executor_contract as contract
from .dense_model import FAMILIES, LLAMA, dense_logits, random_weights
from .executor_contract import expected_logits, sequence


@cache
def torch_executor(shape, poison=None):
    module = module_from_arrays(shape, random_weights(shape), torch.float32, "cpu")
    executor = TorchExecutor(module)
    assert executor.is_invariant
    if poison is not None:
        with torch.no_grad():
            module.get_input_embeddings().weight[52] = poison
    return executor


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Two threads that spin cost these tiny products ten times their time on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def build():
    return torch_executor


class TestIsRight:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_agrees_with_a_dense_forward_in_float64(self, family):
        shape = FAMILIES[family]
        dense = dense_logits(shape, random_weights(shape), sequence(0))
        actual = expected_logits(torch_executor, shape, 0)
        np.testing.assert_allclose(actual, dense, rtol=0, atol=1e-4 * np.abs(dense).max())


class TestReturnsLogits(contract.ReturnsLogits):
    pass


class TestSameBits(contract.SameBits):
    pass


class TestUsesPages(contract.UsesPages):
    pass


class TestSharesPrefixes(contract.SharesPrefixes):
    pass


class TestRefuses(contract.Refuses):
    pass


class TestDescribesItself:
    def test_sizes_come_from_the_model(self):
        shape = FAMILIES["qwen3"]
        executor = torch_executor(shape)
        assert executor.vocab_size == 53
        assert executor.max_context == 2048
        assert executor.block_sizes == contract.BLOCK_SIZES
        assert executor.layer_groups == (LayerGroup((0, 1), kv_bytes_per_token=2 * 2 * 3 * 10 * 4, window=None),)

    def test_a_window_of_all_layers_is_the_one_groups_window(self):
        assert [group.window for group in torch_executor(FAMILIES["mistral"]).layer_groups] == [40]

    def test_numerics_id_names_what_the_bits_depend_on(self):
        executor = torch_executor(LLAMA)
        sizes = "+".join(map(str, executor.tile_sizes))
        assert executor.numerics_id.startswith(f"torch-cpu-float32-tokens{sizes}-keys256-")
        other = TorchExecutor(module_from_arrays(LLAMA, random_weights(LLAMA, seed=1), torch.float32, "cpu"))
        assert other.numerics_id != executor.numerics_id

    def test_a_context_shorter_than_the_tiles_is_tried_with_what_fits(self):
        shape = replace(LLAMA, max_context=60)
        module = module_from_arrays(shape, random_weights(shape), torch.float32, "cpu")
        assert TorchExecutor(module).tile_sizes == (16,)


class TestCutsAStep:
    @pytest.mark.parametrize(
        ("num_tokens", "sizes", "tiles"),
        [
            (1, (16, 128), [(0, 1, 16)]),
            (16, (16, 128), [(0, 16, 16)]),
            (97, (16, 128), [(0, 97, 128)]),  # padding of 31 costs less than another pass over the weights
            (95, (16, 128), [(i, i + 16, 16) for i in range(0, 80, 16)] + [(80, 95, 16)]),
            (300, (16, 128), [(0, 128, 128), (128, 256, 128), (256, 272, 16), (272, 288, 16), (288, 300, 16)]),
        ],
    )
    def test_into_large_tiles_first(self, num_tokens, sizes, tiles):
        assert list(cut(num_tokens, sizes)) == tiles


class TestTriesTileSizes:
    """With computations that are wrong in the ways that libraries are."""

    def tried(self, logit):
        """What is found when the logit of a token is logit(its number, its place in the tile, the tile's size)."""
        num_tokens = num_sample_tokens((4, 8, 32))

        def run(lengths, sizes):
            logits = np.zeros((num_tokens, 1), np.float32)
            for first, length in zip(starts(lengths), lengths, strict=True):
                for start, stop, size in cut(length, sizes):
                    for token in range(first + start, first + stop):
                        logits[token] = logit(token, token - first - start, size)
            return logits

        return agreeing_sizes(run, num_tokens, (4, 8, 32))

    def test_all_are_taken_where_nothing_shows(self):
        assert self.tried(lambda token, place, size: token) == (4, 8, 32)

    def test_a_size_with_other_bits_is_left_out(self):
        assert self.tried(lambda token, place, size: token + (size == 8)) == (4, 32)

    def test_a_size_in_which_places_differ_is_left_out(self):
        assert self.tried(lambda token, place, size: token + (size == 4 and place == 3)) == (8, 32)
        assert self.tried(lambda token, place, size: token + (size == 32 and place == 30)) == (4, 8)

    def test_none_is_found_where_places_always_show(self):
        assert self.tried(lambda token, place, size: token + place) == ()
