"""An engine with host memory for evicted blocks: the same bits as without a cache, and what was evicted comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from anaphora import KVCacheManager
from anaphora.engine.build import build_engine, num_host_blocks_for
from anaphora.engine.executor import LayerGroup
from anaphora.engine.llm import LLM
from anaphora.engine.loop import Engine
from anaphora.engine.native import NativeUnavailableError, native_paths
from anaphora.engine.request import SamplingParams
from anaphora.model import load_model
from tests.engine.toy_engine import ToyEngine, request, toy_engine
from tests.engine.toy_executor import ToyExecutor, toy_output
from tests.tiny_models import write_hf_model

if TYPE_CHECKING:
    from anaphora.engine.executor import Batch, Output
    from anaphora.engine.llm import Completion
    from anaphora.model import Model

try:
    EXECUTORS = ["reference", "native"] if native_paths() else []
except NativeUnavailableError:
    EXECUTORS = ["reference"]

ALL_LOGPROBS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=5)
TOPICS = ("cats", "rain in autumn", "the number seven", "old bridges", "bread")


def prompt(topic: str, question: str = "why") -> str:
    return f"Here is a long text on {topic}, and then a question: " + f"it is well known of {topic}. " * 4 + question


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_hf_model(tmp_path_factory.mktemp("models") / "tiny"))


def num_bytes(model: Model, executor: str, num_blocks: int) -> int:
    engine = build_engine(model, executor=executor, kv_memory_bytes=1 << 20)  # type: ignore[arg-type]
    return num_blocks * 16 * sum(group.kv_bytes_per_token for group in engine.executor.layer_groups)


def outputs(completions: list[Completion]) -> list[tuple[Any, ...]]:
    return [(each.token_ids, each.text, each.logprobs) for each in completions]


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_comes_back_from_host_memory_gives_the_same_bits(model: Model, executor: str, index: str) -> None:
    prompts = [prompt(topic) for topic in TOPICS]
    size = max(len(model.tokenizer.encode(each)) // 4 for each in prompts)
    num_blocks = -(-(size + 6) // 16) + 1  # one request fits, so each evicts what the others left
    options: dict[str, Any] = {"executor": executor, "index": index}
    options["kv_memory_bytes"] = num_bytes(model, executor, num_blocks + 1)
    cold = [LLM(model, **options).generate(each, ALL_LOGPROBS)[0] for each in prompts]
    llm = LLM(model, host_kv_memory_bytes=num_bytes(model, executor, 100), **options)
    for _ in range(3):
        warm = [llm.generate(each, ALL_LOGPROBS)[0] for each in prompts]
        assert outputs(warm) == outputs(cold)
    for each in warm:
        assert each.num_cached_tokens == (each.num_prompt_tokens - 1) // 16 * 16
    stats = llm.stats()
    assert stats.host_cached_tokens > stats.cached_tokens // 2
    together = llm.generate(prompts, ALL_LOGPROBS)  # they preempt one another, and find their own blocks again
    assert outputs(together) == outputs(cold)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_beams_load_what_they_find(model: Model, executor: str) -> None:
    options: dict[str, Any] = {"executor": executor, "kv_memory_bytes": num_bytes(model, executor, 18)}
    cold = LLM(model, **options).beam_search(prompt("cats"), width=2, max_tokens=6)
    llm = LLM(model, host_kv_memory_bytes=num_bytes(model, executor, 50), **options)
    for topic in ("cats", "bread", "old bridges"):
        llm.beam_search(prompt(topic), width=2, max_tokens=6)
    warm = llm.beam_search(prompt("cats"), width=2, max_tokens=6)
    assert outputs(warm) == outputs(cold)
    assert llm.stats().host_cached_tokens > 0


def small_engine(host_blocks: int = 30) -> ToyEngine:
    return toy_engine(block_size=4, num_blocks=6, host_blocks=host_blocks)


def evicted_prefix(toy: ToyEngine) -> None:
    """Serve 16 tokens, then something else that takes all of the pool."""
    toy.run(request("first", range(1, 17), max_tokens=1))
    toy.run(request("other", range(20, 42), max_tokens=1))


def test_a_load_that_fails_ends_who_needs_it_and_is_never_found_again() -> None:
    toy = small_engine()
    evicted_prefix(toy)
    toy.executor.transfer_failures.append(RuntimeError("no room to copy"))
    (failed,) = toy.run(request("again", range(1, 18), max_tokens=3))
    assert (failed.finish_reason, failed.error) == ("error", "RuntimeError: no room to copy")
    (served,) = toy.run(request("once more", range(1, 18), max_tokens=3))
    assert served.num_cached_tokens == 0
    assert served.token_ids == toy_output(range(1, 18), SamplingParams(max_tokens=3, temperature=0.0))


def test_a_step_that_fails_after_the_loads_leaves_them_found() -> None:
    toy = small_engine()
    evicted_prefix(toy)
    toy.executor.failures.append(RuntimeError("flaky"))
    (failed,) = toy.run(request("again", range(1, 18), max_tokens=3))
    assert failed.finish_reason == "error"
    (served,) = toy.run(request("once more", range(1, 18), max_tokens=3))
    assert served.num_cached_tokens == 16
    assert served.token_ids == toy_output(range(1, 18), SamplingParams(max_tokens=3, temperature=0.0))


def test_an_executor_without_host_blocks_is_refused_a_manager_that_has_some() -> None:
    class DeviceOnly:
        block_sizes, vocab_size, max_context, numerics_id = (16,), 8, 64, "none"
        layer_groups = (LayerGroup((0,), 4),)

        def allocate_kv(self, num_blocks: int, block_size: int) -> None: ...

        def copy_blocks(self, pairs: object) -> None: ...

        def execute(self, batch: Batch) -> Output: ...

    with pytest.raises(ValueError, match="executor: it keeps no blocks in host memory"):
        Engine(DeviceOnly(), KVCacheManager(8, host_blocks=8))
    Engine(ToyExecutor(), KVCacheManager(8, host_blocks=8))


def test_host_memory_for_less_than_a_block_or_more_than_there_is_is_refused(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [LayerGroup((0,), kv_bytes_per_token=100)]
    assert num_host_blocks_for(4799, groups, 16) == 2
    with pytest.raises(ValueError, match="host_kv_memory_bytes: 1599 is not enough; the least is 1600"):
        num_host_blocks_for(1599, groups, 16)
    monkeypatch.setattr("anaphora.engine.build._machine_bytes", lambda: 2**30)
    with pytest.raises(ValueError, match=r"host_kv_memory_bytes: 2\.0 GiB is more than the memory of this machine"):
        build_engine(model, host_kv_memory_bytes=2**31)
