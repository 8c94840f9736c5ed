"""The torch executor on architectures that only transformers knows: its own logits, over pages, in any company."""

from __future__ import annotations

from array import array
from functools import cache
from random import Random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from anaphora.cache import KVCacheManager
from anaphora.engine.executor import Batch, Span
from anaphora.engine.loop import Engine
from anaphora.engine.request import Request, SamplingParams
from anaphora.engine.torch_executor import TorchExecutor
from anaphora.model import ModelError

from .torch_models import DENSE, EXPERTS, tiny_module

NUM_TOKENS = 300
TOLERANCE = 2e-5
"""Of the largest logit: what two ways to add up float32 numbers come to in four layers."""
REFUSED = {"stablelm"}

each_architecture = pytest.mark.parametrize(
    "architecture", [name for name in (*DENSE, *EXPERTS) if name not in REFUSED]
)
each_windowed = pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3_text", "gpt_oss"])


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def built(architecture):
    return TorchExecutor(tiny_module(architecture))


@cache
def own_logits(architecture, seed=0):
    """What the model itself gives, whole, without a cache."""
    ids = torch.from_numpy(tokens(seed).astype(np.int64))[None]
    with torch.inference_mode():
        return tiny_module(architecture)(ids, use_cache=False).logits[0].numpy()


def tokens(seed=0):
    return np.random.default_rng(seed).integers(3, 320, NUM_TOKENS, np.int32)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def run_in_company(executor, seed):
    """Logits of three sequences in random spans and scattered blocks, a table per layer group."""
    random, num_groups = Random(seed), len(executor.layer_groups)
    blocks_each = -(-NUM_TOKENS // 16)
    ids = random.sample(range(1, 3 * num_groups * blocks_each + 1), 3 * num_groups * blocks_each)
    executor.allocate_kv(len(ids), 16)
    tables = [
        [array("i", ids[(i * num_groups + g) * blocks_each :][:blocks_each]) for g in range(num_groups)]
        for i in range(3)
    ]
    computed, logits = [0, 0, 0], [[], [], []]
    while unfinished := [i for i in range(3) if computed[i] < NUM_TOKENS]:
        members = random.sample(unfinished, random.randint(1, len(unfinished)))
        spans = []
        for i in members:
            stop = min(NUM_TOKENS, computed[i] + random.choice([1, 1, 5, 40, 150]))
            spans.append(Span(tokens(i)[computed[i] : stop], computed[i], tables[i], num_logits=stop - computed[i]))
            computed[i] = stop
        for i, rows in zip(members, executor.execute(Batch(spans)).logits, strict=True):
            logits[i].append(rows)
    return [np.concatenate(rows) for rows in logits]


@each_architecture
def test_gives_the_models_own_logits_in_any_spans_company_and_blocks(architecture):
    for i, logits in enumerate(run_in_company(built(architecture), seed=0)):
        assert_close(logits, own_logits(architecture, i))


@pytest.mark.parametrize("architecture", [name for name in DENSE if name not in REFUSED])
def test_dense_models_give_the_same_bits_in_every_schedule(architecture):
    assert built(architecture).is_invariant
    for one, other in zip(*(run_in_company(built(architecture), seed) for seed in (1, 2)), strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def new_engine(executor, num_blocks=200, **options):
    windows = [group.window for group in executor.layer_groups]
    return Engine(executor, KVCacheManager(num_blocks, windows=windows), **options)


def answers(engine, prompts, num_tokens=8):
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(str(i), prompt.tobytes(), sampling))
    found, cached = [()] * len(prompts), [0] * len(prompts)
    while engine.has_work:
        for delta in engine.step():
            found[int(delta.request_id)] += delta.token_ids
            cached[int(delta.request_id)] = delta.num_cached_tokens
        engine.manager.check()
    return found, cached


@each_architecture
def test_greedy_tokens_are_transformers_own_cold_cached_and_in_chunks(architecture):
    prompt = tokens()[:150]
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    generated = tiny_module(architecture).generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    expected = tuple(generated[0, 150:].tolist())
    engine = new_engine(built(architecture))
    assert answers(engine, [prompt]) == ([expected], [0])
    assert answers(engine, [prompt]) == ([expected], [144])
    chunked = new_engine(built(architecture), max_num_batched_tokens=37)
    assert answers(chunked, [prompt, prompt[:100], prompt])[0][::2] == [expected, expected]


@each_windowed
def test_blocks_that_every_window_has_left_are_given_back(architecture):
    executor = built(architecture)
    engine = new_engine(executor, max_num_batched_tokens=32)
    engine.submit(Request("long", tokens().tobytes(), SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)))
    most_held = 0
    while engine.has_work:
        engine.step()
        most_held = max(most_held, engine.manager.num_blocks - engine.manager.num_free_blocks)
    num_full = sum(group.window is None for group in executor.layer_groups)
    # A window of 24 tokens and a chunk of 32 lie in 5 blocks at most, and 2 more until the next step gives them back.
    assert most_held <= num_full * 20 + 7


def test_a_request_that_needs_more_blocks_than_all_groups_have_is_refused_at_once():
    engine = new_engine(built("gemma2"), num_blocks=20)
    assert engine.max_request_tokens == 160
    with pytest.raises(Exception, match="need 22 KV blocks of 16 tokens; the pool has 20"):
        engine.submit(Request("big", tokens()[:100].tobytes(), SamplingParams(max_tokens=70)))


def test_a_manager_for_other_layer_groups_is_refused():
    with pytest.raises(ValueError, match="2 layer groups; the manager keeps tables for 1"):
        Engine(built("gemma2"), KVCacheManager(20))


class TestRefusesModels:
    @pytest.mark.parametrize(
        ("architecture", "changes", "message"),
        [
            ("stablelm", {}, "'stablelm' does not attend through transformers' attention interface"),
            ("gemma2", {"layer_types": ["chunked_attention"] * 4}, "layer_types: 'chunked_attention' is not supported"),
            (
                "llama",
                {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
                "rope_parameters: type 'dynamic' is not supported",
            ),
        ],
    )
    def test_of_kinds_that_pages_cannot_hold(self, architecture, changes, message):
        with pytest.raises(ModelError, match=message):
            TorchExecutor(tiny_module(architecture, **changes))

    def test_whose_own_forward_pass_gives_other_logits(self, monkeypatch):
        module = tiny_module("llama")
        # A scale that the interface is not told of, as an architecture with attention of its own might have.
        forward = type(module).forward

        def scaled(self, *args, **kwargs):
            output = forward(self, *args, **kwargs)
            if self.config._attn_implementation == "eager":
                output.logits *= 1.5
            return output

        monkeypatch.setattr(type(module), "forward", scaled)
        with pytest.raises(ModelError, match=r"over pages, logits of up to .* differ by .* from the model's own"):
            TorchExecutor(module)


def test_a_batch_with_tables_for_other_groups_is_refused():
    executor = built("gemma2")
    executor.allocate_kv(8, 16)
    table = array("i", [1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"spans\[0\].block_tables: expected 2 tables, one per layer group, got 1"):
        executor.execute(Batch([Span(tokens()[:4], 0, [table])]))
    # What the window of 24 has left needs no block; what it has not, does.
    behind = array("i", [0, 5, 6, 7])
    executor.execute(Batch([Span(tokens()[:4], 48, [table, behind])]))
    with pytest.raises(ValueError, match=r"spans\[0\].block_tables\[1\]: block 0 .* 1 \.\. 8"):
        executor.execute(Batch([Span(tokens()[:4], 38, [table, behind])]))
