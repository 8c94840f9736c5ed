"""The library face over a tiny real model: text in, text out, cached tokens counted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from anaphora.cache import KVCacheManager
from anaphora.engine.llm import LLM
from anaphora.engine.loop import Engine
from anaphora.engine.native import NativeUnavailableError, native_paths
from anaphora.engine.reference import ReferenceExecutor
from anaphora.engine.request import Request, RequestError, SamplingParams
from anaphora.identity import Namespace
from anaphora.model import ModelError, load_model, read_lora
from tests.tiny_adapters import write_adapter
from tests.tiny_models import write_hf_model

if TYPE_CHECKING:
    from pathlib import Path

    from anaphora.model import Model

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = "You are a helpful assistant; the quick brown fox jumps over thirteen lazy zebras, and nobody knows why. " * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_hf_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def llm(model: Model) -> LLM:
    return LLM(model, kv_memory_bytes=1 << 20)


def test_a_prompt_is_continued(llm: LLM) -> None:
    (completion,) = llm.generate("the cat sat", GREEDY)
    assert completion.num_prompt_tokens == len(llm.model.tokenizer.encode("the cat sat")) // 4
    assert len(completion.token_ids) == 8
    assert completion.finish_reason == "length"
    assert completion.text == llm.model.tokenizer.decode(completion.token_ids)


def test_prompts_together_give_what_they_give_alone_in_order(model: Model, llm: LLM) -> None:
    prompts = ["the cat sat", LONG + "what is", LONG + "the dog", "rain fell"]
    together = llm.generate(prompts, GREEDY)
    for prompt, completion in zip(prompts, together, strict=True):
        (alone,) = LLM(model, kv_memory_bytes=1 << 20).generate(prompt, GREEDY)
        assert completion.token_ids == alone.token_ids


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_a_prompt_seen_before_is_served_from_the_cache_with_the_same_result(model: Model, index: str) -> None:
    llm = LLM(model, kv_memory_bytes=1 << 20, index=index)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)
    (cold,) = llm.generate(LONG, params)
    (warm,) = llm.generate(LONG, params)
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (cold.num_prompt_tokens - 1) // 16 * 16
    assert warm.token_ids == cold.token_ids
    assert warm.logprobs == cold.logprobs
    assert llm.stats().cached_tokens == warm.num_cached_tokens


def test_several_samples_of_each_prompt_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, ignore_eos=True, n=3)
    together = llm.generate(["the cat sat", "rain fell"], params)
    assert len(together) == 6
    for i, completion in enumerate(together):
        prompt = ("the cat sat", "rain fell")[i // 3]
        (alone,) = llm.generate(prompt, replace(params, n=1, seed=3 + i % 3))
        assert completion.token_ids == alone.token_ids


def test_best_of_returns_the_likeliest_samples_best_first(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.5, seed=3, ignore_eos=True, logprobs=0)
    drawn = llm.generate("the cat sat", replace(params, n=5))
    best = llm.generate("the cat sat", replace(params, n=2), best_of=5)
    by_mean = sorted(drawn, key=lambda c: -sum(t.logprob for t in c.logprobs) / len(c.logprobs))
    assert [completion.token_ids for completion in best] == [completion.token_ids for completion in by_mean[:2]]
    with pytest.raises(ValueError, match="best_of: 1 is not allowed; it must be at least n, 2"):
        llm.generate("the cat sat", replace(params, n=2), best_of=1)


def test_a_beam_search_of_width_one_is_greedy_and_a_wider_one_finds_no_less(llm: LLM) -> None:
    (greedy,) = llm.generate("the cat sat", replace(GREEDY, ignore_eos=False))
    (narrow,) = llm.beam_search("the cat sat", 1, max_tokens=8, length_penalty=0.0)
    wide = llm.beam_search("the cat sat", 4, max_tokens=8, length_penalty=0.0)
    assert (narrow.token_ids, narrow.text) == (greedy.token_ids, greedy.text)
    sums = [sum(token.logprob for token in completion.logprobs) for completion in wide]
    assert len(wide) == 4
    assert sums == sorted(sums, reverse=True)
    assert llm.generate("the cat sat", GREEDY)[0].token_ids == greedy.token_ids


@pytest.mark.parametrize("queue_order", ["fcfs", "lpm", "dfs", "fair"])
def test_the_order_of_the_queue_changes_no_answer(model: Model, llm: LLM, queue_order: str) -> None:
    prompts = ["the cat sat", LONG + "what is", "rain fell", LONG + "the dog", LONG]
    ordered = LLM(model, kv_memory_bytes=1 << 20, max_num_seqs=2, queue_order=queue_order)  # type: ignore[arg-type]
    expected = [completion.token_ids for completion in llm.generate(prompts, GREEDY)]
    assert [completion.token_ids for completion in ordered.generate(prompts, GREEDY)] == expected


def test_packed_ids_are_taken_as_they_are(llm: LLM) -> None:
    text = "the cat sat"
    (from_text,), (from_ids,) = (llm.generate(p, GREEDY) for p in (text, llm.model.tokenizer.encode(text)))
    assert from_ids.token_ids == from_text.token_ids


def test_calls_with_different_salts_share_nothing(llm: LLM) -> None:
    cached = [llm.generate(LONG, GREEDY, cache_salt=salt)[0].num_cached_tokens for salt in ("a", "b", None, "a")]
    assert cached[:3] == [0, 0, 0]
    assert cached[3] > 0


def test_a_second_turn_reuses_the_first(llm: LLM) -> None:
    first = llm.chat([{"role": "user", "content": LONG}], GREEDY)
    messages = [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "why"},
    ]
    second = llm.chat(messages, GREEDY)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= (first.num_prompt_tokens - 1) // 16 * 16


def test_a_prompt_that_cannot_be_served_is_refused_with_all_the_others(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the longest context is 512 tokens"):
        llm.generate(["cat", LONG * 8], GREEDY)
    stats = llm.stats()
    assert (stats.num_steps, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert llm.generate("cat", GREEDY)[0].finish_reason == "length"


def test_no_prompts_give_no_completions(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_an_unknown_executor_or_option_is_refused(model: Model) -> None:
    with pytest.raises(ValueError, match=r"executor: 'abacus' is not known; allowed are \['auto', .*'torch'\]"):
        LLM(model, executor="abacus")  # type: ignore[typeddict-item]
    with pytest.raises(TypeError, match="blocksize"):
        LLM(model, blocksize=16)  # type: ignore[call-arg]


class TestAdapters:
    """A name is for people; what is computed and what is shared goes by the numbers of the adapter."""

    @pytest.fixture
    def folders(self, model: Model, tmp_path: Path) -> dict[str, Path]:
        return {name: write_adapter(tmp_path / name, model.shape, seed=seed) for seed, name in enumerate("ab")}

    @pytest.fixture(params=["reference", "native"])
    def executor(self, request: pytest.FixtureRequest) -> str:
        if request.param == "native":
            try:
                native_paths()
            except NativeUnavailableError as error:
                pytest.skip(f"the native executor is not available: {error}")
        return str(request.param)

    @pytest.fixture
    def adapted(self, model: Model, folders: dict[str, Path], executor: str) -> LLM:
        return LLM(model, kv_memory_bytes=1 << 20, adapters=folders, executor=executor)  # type: ignore[arg-type]

    def test_each_says_something_else_and_the_model_what_it_says_without_any(
        self, model: Model, adapted: LLM, executor: str
    ) -> None:
        outputs = [adapted.generate(LONG, GREEDY, adapter=adapter)[0].token_ids for adapter in (None, "a", "b")]
        assert len(set(outputs)) == 3
        plain = LLM(model, kv_memory_bytes=1 << 20, executor=executor)  # type: ignore[arg-type]
        assert plain.generate(LONG, GREEDY)[0].token_ids == outputs[0]

    def test_prefixes_are_shared_within_one_and_never_across(self, adapted: LLM) -> None:
        params = replace(GREEDY, logprobs=3)
        cold = {adapter: adapted.generate(LONG, params, adapter=adapter)[0] for adapter in (None, "a", "b")}
        assert [completion.num_cached_tokens for completion in cold.values()] == [0, 0, 0]
        for adapter, first in cold.items():
            (again,) = adapted.generate(LONG, params, adapter=adapter)
            assert again.num_cached_tokens == (first.num_prompt_tokens - 1) // 16 * 16
            assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)

    def test_reloaded_in_place_with_other_numbers_finds_none_of_the_old_blocks(
        self, model: Model, adapted: LLM, folders: dict[str, Path]
    ) -> None:
        (before,) = adapted.generate(LONG, GREEDY, adapter="a")
        write_adapter(folders["a"], model.shape, seed=7)
        (unread,) = adapted.generate(LONG, GREEDY, adapter="a")
        assert unread.token_ids == before.token_ids  # files are read when they are loaded, and only then
        adapted.load_adapter("a", folders["a"])
        (after,) = adapted.generate(LONG, GREEDY, adapter="a")
        assert after.num_cached_tokens == 0
        assert after.token_ids != before.token_ids

    def test_reloaded_with_the_same_numbers_finds_them(self, adapted: LLM, folders: dict[str, Path]) -> None:
        (before,) = adapted.generate(LONG, GREEDY, adapter="a")
        adapted.load_adapter("a", folders["a"])
        adapted.load_adapter("the same", folders["a"])
        for adapter in ("a", "the same"):
            (after,) = adapted.generate(LONG, GREEDY, adapter=adapter)
            assert after.num_cached_tokens > 0
            assert after.token_ids == before.token_ids

    def test_a_beam_search_and_a_chat_take_one(self, adapted: LLM) -> None:
        (greedy,) = adapted.generate("the cat sat", replace(GREEDY, ignore_eos=False), adapter="a")
        (narrow,) = adapted.beam_search("the cat sat", 1, max_tokens=8, length_penalty=0.0, adapter="a")
        assert narrow.token_ids == greedy.token_ids
        messages = [{"role": "user", "content": "the cat sat"}]
        assert adapted.chat(messages, GREEDY, adapter="a").text != adapted.chat(messages, GREEDY).text

    def test_one_that_is_not_loaded_is_refused_by_name(self, adapted: LLM) -> None:
        adapted.unload_adapter("a")
        with pytest.raises(RequestError, match="adapter: 'a' is not loaded; loaded are 'b'"):
            adapted.generate(LONG, GREEDY, adapter="a")
        with pytest.raises(KeyError):
            adapted.unload_adapter("a")

    def test_one_that_is_damaged_is_refused_and_what_was_loaded_stays(
        self, adapted: LLM, folders: dict[str, Path]
    ) -> None:
        (before,) = adapted.generate(LONG, GREEDY, adapter="a")
        (folders["a"] / "adapter_model.safetensors").write_bytes(b"")
        with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
            adapted.load_adapter("a", folders["a"])
        assert adapted.generate(LONG, GREEDY, adapter="a")[0].token_ids == before.token_ids

    def test_the_name_of_the_model_is_no_name_for_one(self, model: Model, folders: dict[str, Path]) -> None:
        with pytest.raises(ValueError, match="adapter: 'tiny' is the model's own name"):
            LLM(model, adapters={"tiny": folders["a"]})


def test_an_adapter_without_a_name_is_forgotten_once_no_live_request_uses_it(model: Model, tmp_path: Path) -> None:
    first, second = (read_lora(write_adapter(tmp_path / str(i), model.shape, seed=i), model.shape) for i in (1, 2))
    executor = ReferenceExecutor(model.shape, model.weights)
    engine = Engine(executor, KVCacheManager(num_blocks=32, block_size=16))
    old = engine.adapters.load("a", first)
    prompt = model.tokenizer.encode(LONG)
    engine.submit(Request("1", prompt, GREEDY, Namespace(adapter=old)))
    engine.step()
    engine.adapters.load("a", second)
    assert set(executor.adapters) == {first.digest, second.digest}
    while engine.has_work:
        assert all(delta.finish_reason != "error" for delta in engine.step())
    engine.adapters.load("a", second)
    assert set(executor.adapters) == {second.digest}
    with pytest.raises(RequestError, match=f"adapter: 'a' \\({first.digest}\\) is not loaded"):
        engine.submit(Request("2", prompt, GREEDY, Namespace(adapter=old)))
