"""The torch executor behind `LLM` and the command line: folders of any architecture, and models of ours."""

from __future__ import annotations

import pytest

from anaphora.engine.build import build_engine
from anaphora.engine.llm import LLM
from anaphora.engine.request import SamplingParams
from anaphora.model import ModelError, load_model
from tests.tiny_models import tiny_tokenizer, write_hf_model

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = "You are a helpful assistant; what is the capital of France? " * 3


def test_without_torch_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    monkeypatch.delitem(__import__("sys").modules, "anaphora.engine.torch_executor", raising=False)
    monkeypatch.delitem(__import__("sys").modules, "anaphora.engine.torch_executor.executor", raising=False)
    model = load_model(write_hf_model(tmp_path / "tiny"))
    with pytest.raises(ValueError, match=r"executor: 'torch' needs the package torch; pip install 'anaphora\[torch\]'"):
        build_engine(model, executor="torch")


def test_a_folder_loaded_for_torch_is_refused_by_other_executors(tmp_path):
    model = load_model(write_hf_model(tmp_path / "tiny"), any_architecture=True)
    with pytest.raises(ModelError, match="tiny: loaded for executor='torch'"):
        build_engine(model, executor="reference")
    with pytest.raises(ModelError, match="tiny: loaded for executor='torch'"):
        _ = model.weights


class TestWithTorch:
    @pytest.fixture(autouse=True)
    def _torch(self):
        self.torch = pytest.importorskip("torch")
        pytest.importorskip("transformers")

    @pytest.fixture
    def gemma2(self, tmp_path):
        from .torch_models import tiny_module

        folder = tmp_path / "gemma2"
        tiny_module("gemma2").save_pretrained(folder)
        tiny_tokenizer().save(str(folder / "tokenizer.json"))
        return folder

    def test_a_folder_of_any_architecture_answers_as_transformers_does_and_again_from_the_cache(self, gemma2):
        from transformers import AutoModelForCausalLM

        llm = LLM(gemma2, executor="torch", kv_memory_bytes=4 << 20)
        first, again = llm.generate(PROMPT, GREEDY)[0], llm.generate(PROMPT, GREEDY)[0]
        ids = llm.model.tokenizer.encode(PROMPT, add_bos=llm.model.tokenizer.adds_bos)
        ids = self.torch.frombuffer(bytearray(ids), dtype=self.torch.int32).long()[None]
        own = AutoModelForCausalLM.from_pretrained(gemma2, dtype=self.torch.float32, attn_implementation="eager")
        generated = own.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)
        assert first.token_ids == again.token_ids == tuple(generated[0, ids.shape[1] :].tolist())
        assert first.num_cached_tokens == 0
        assert again.num_cached_tokens == (ids.shape[1] - 1) // 16 * 16 > 0

    def test_other_executors_name_the_architectures_that_they_run(self, gemma2):
        with pytest.raises(ModelError, match="model_type: 'gemma2' is not supported; supported are llama"):
            LLM(gemma2)

    @pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
    def test_families_of_ours_give_the_reference_executors_tokens(self, architecture, tmp_path):
        folder = write_hf_model(tmp_path / architecture, architecture, dtype="float32")
        expected = LLM(folder, executor="reference", kv_memory_bytes=4 << 20).generate(PROMPT, GREEDY)[0]
        actual = LLM(folder, executor="torch", kv_memory_bytes=4 << 20).generate(PROMPT, GREEDY)[0]
        assert actual.token_ids == expected.token_ids

    def test_the_revision_changes_with_the_weights(self, tmp_path):
        one, other = (
            load_model(write_hf_model(tmp_path / str(seed), seed=seed), any_architecture=True).revision
            for seed in (0, 1)
        )
        assert one != other

    def test_a_folder_whose_tokenizer_has_more_tokens_than_the_model_is_refused(self, tmp_path):
        from .torch_models import tiny_module

        tiny_module("phi", vocab_size=300).save_pretrained(tmp_path)
        tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ModelError, match="vocab_size: the tokenizer has 320 tokens, the model gives logits of 300"):
            LLM(tmp_path, executor="torch")

    def test_a_damaged_file_is_refused_naming_the_folder(self, gemma2):
        (gemma2 / "model.safetensors").write_bytes(b"\0" * 100)
        with pytest.raises(ModelError, match=r"gemma2: .*cannot load it"):
            LLM(gemma2, executor="torch")
