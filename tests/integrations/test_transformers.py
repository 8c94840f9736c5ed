"""PrefixCache in Hugging Face's generate(): the same tokens with it and without, and less to compute."""

from __future__ import annotations

import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from anaphora.identity import Namespace
from anaphora.integrations.transformers import PrefixCache
from tests.engine.torch_models import tiny_module

ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_neox", "phi", "gpt_oss"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt(num_tokens=100, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(3, 320, (1, num_tokens)))


def generate(model, ids, num_tokens=10, **options):
    return model.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_conversation_gets_the_same_tokens_and_computes_only_what_is_new(architecture):
    model = tiny_module(architecture)
    prefixes = PrefixCache(model, kv_memory_bytes=8 << 20)
    ids, computed, num_kept = prompt(), [], 0
    model.register_forward_pre_hook(
        lambda _, args, kwargs: computed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for turn in range(3):
        expected = generate(model, ids)
        computed.clear()
        cache = prefixes.open(ids)
        output = generate(model, ids, past_key_values=cache)
        assert torch.equal(output, expected)
        assert cache.num_cached_tokens == num_kept
        assert computed == [ids.shape[1] - cache.num_cached_tokens] + [1] * 9
        prefixes.close(cache, output)
        prefixes.manager.check()
        num_kept = (output.shape[1] - 1) // 16 * 16  # the last token was drawn, and never computed
        ids = torch.cat([output, prompt(30, seed=turn + 1)], 1)
    stats = prefixes.stats()
    assert (stats.requests, stats.queries) == (3, 100 + 140 + 180)
    assert 0 < stats.hits < stats.queries


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_prompt_is_kept_as_soon_as_it_is_computed_though_nobody_closes(architecture):
    model = tiny_module(architecture)
    prefixes = PrefixCache(model, kv_memory_bytes=8 << 20)
    expected = generate(model, prompt())
    generate(model, prompt(), past_key_values=prefixes.open(prompt()))
    cache = prefixes.open(prompt())
    assert cache.num_cached_tokens == 96
    assert torch.equal(generate(model, prompt(), past_key_values=cache), expected)
    del cache
    gc.collect()
    assert prefixes.manager.usage == 0


def test_several_samples_and_beams_of_a_cached_prompt():
    model = tiny_module("llama")
    prefixes = PrefixCache(model, kv_memory_bytes=8 << 20)
    expected = generate(model, prompt(), num_beams=3, num_return_sequences=2)
    for num_cached in (0, 96):
        cache = prefixes.open(prompt())
        assert cache.num_cached_tokens == num_cached
        output = generate(model, prompt(), num_beams=3, num_return_sequences=2, past_key_values=cache)
        assert torch.equal(output, expected)
        prefixes.close(cache)


def test_prefixes_are_shared_within_a_namespace_alone():
    model = tiny_module("llama")
    prefixes = PrefixCache(model, kv_memory_bytes=8 << 20)
    generate(model, prompt(), past_key_values=prefixes.open(prompt(), namespace=Namespace(salt="acme")))
    assert prefixes.open(prompt(), namespace=Namespace(salt="globex")).num_cached_tokens == 0
    assert prefixes.open(prompt(), namespace=Namespace(salt="acme")).num_cached_tokens == 96


def test_a_pool_that_is_too_small_keeps_nothing_and_changes_nothing():
    model = tiny_module("llama")
    prefixes = PrefixCache(model, kv_memory_bytes=5 * 16 * 4 * 2 * 2 * 16 * 4)  # 4 blocks and the null block
    for _ in range(2):
        cache = prefixes.open(prompt())
        output = generate(model, prompt(), past_key_values=cache)
        assert torch.equal(output, generate(model, prompt()))
        prefixes.close(cache, output)
        prefixes.manager.check()


def test_what_it_cannot_serve_is_refused():
    prefixes = PrefixCache(tiny_module("llama"), kv_memory_bytes=8 << 20)
    with pytest.raises(ValueError, match=r"input_ids: expected one prompt, \[1, n\], got \[2, 100\]"):
        prefixes.open(prompt().expand(2, -1))
    cache = prefixes.open(prompt())
    with pytest.raises(ValueError, match="output_ids: expected the prompt that this cache was opened for"):
        prefixes.close(cache, prompt(seed=1))
