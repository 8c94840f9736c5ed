"""A reference becomes a model with a name, and a revision that changes with what is computed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from anaphora.model import ModelError, load, load_model
from tests.tiny_models import EOS_TOKEN_ID, tiny_shape, write_gguf_model, write_hf_model


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("Qwen3-0.6B-Q4_K_M.gguf", "Qwen3-0.6B"),
        ("Llama-3.2-1B.IQ4_XS.gguf", "Llama-3.2-1B"),
        ("model-f16.gguf", "model"),
        ("Qwen2-0.5B.gguf", "Qwen2-0.5B"),
    ],
)
def test_a_file_is_named_without_its_quantisation(tmp_path: Path, file: str, name: str) -> None:
    assert load_model(write_gguf_model(tmp_path / file)).name == name


def test_a_folder_is_named_as_it_is_called(tmp_path: Path) -> None:
    assert load_model(str(write_hf_model(tmp_path / "My-Model"))).name == "My-Model"


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("", "model: '' is no file or folder here, and no ORG/NAME of the hub; "),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "model: 'https://huggingface.co/Qwen/Qwen3-0.6B' is a URL; "
         "give the model's name, Qwen/Qwen3-0.6B"),
        ("huggingface.co/Qwen/Qwen3-0.6B/tree/main", "give the model's name, Qwen/Qwen3-0.6B"),
    ],
)  # fmt: skip
def test_what_is_no_reference_is_refused_with_what_would_do(ref: str, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        load_model(ref)


def test_folder_without_a_model_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    with pytest.raises(ModelError) as raised:
        load_model(tmp_path)
    assert str(raised.value) == f"{tmp_path}: this folder is no model: it has neither config.json nor a .gguf file"


def test_folder_of_gguf_files_is_answered_with_one_of_them(tmp_path: Path) -> None:
    file = write_gguf_model(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=re.escape(f"give the path of one of them, say {file}")):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type: missing"),
        ({"model_type": "gemma"}, "model_type: 'gemma' is not supported; supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": "llama"}, "num_attention_heads: missing"),
    ],
)
def test_fault_in_the_configuration_names_its_file(tmp_path: Path, config: dict[str, str], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as raised:
        load_model(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / 'config.json'}: {message}")


def test_fault_in_the_weights_names_the_model(tmp_path: Path) -> None:
    file = write_gguf_model(tmp_path / "gemma.gguf", metadata={"general.architecture": "gemma"})
    with pytest.raises(ModelError) as raised:
        load_model(file)
    assert str(raised.value).startswith(f"{file}: general.architecture: 'gemma' is not supported")


def test_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ModelError) as raised:
        load_model(file)
    assert str(raised.value) == f"{file}: not a GGUF file, or damaged: it is empty"


def test_equal_models_have_equal_revisions(tmp_path: Path) -> None:
    first, second = (load_model(write_hf_model(tmp_path / name)) for name in ("a", "b"))
    assert first.revision == second.revision
    assert len(first.revision) == 16


@pytest.mark.parametrize("write", [write_hf_model, write_gguf_model])
def test_other_weights_are_another_revision(tmp_path: Path, write: type) -> None:
    assert load_model(write(tmp_path / "a")).revision != load_model(write(tmp_path / "b", seed=1)).revision


def test_the_same_weights_in_another_shape_are_another_revision(tmp_path: Path) -> None:
    folder = write_hf_model(tmp_path)
    before = load_model(folder).revision
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 20000.0}))
    assert load_model(folder).revision != before


def test_of_large_files_samples_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_HASHED_WHOLE_BYTES", 1000)
    monkeypatch.setattr(load, "_SAMPLE_BYTES", 10)
    monkeypatch.setattr(load, "_NUM_SAMPLES", 4)
    path = tmp_path / "weights"

    def revision(changed_byte: int) -> str:
        data = bytearray(1001)
        data[changed_byte] = 1
        path.write_bytes(data)
        return load.weights_revision(tiny_shape(), [path])

    unseen = revision(50)
    assert revision(60) == unseen
    assert len({unseen, revision(0), revision(335), revision(1000)}) == 4


def test_a_folders_tokenizer_and_shape_agree_on_what_ends_a_generation(tmp_path: Path) -> None:
    folder = write_hf_model(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    model = load_model(folder)
    assert model.shape.eos_token_ids == model.tokenizer.eos_token_ids == (0, EOS_TOKEN_ID)


def test_config_names_the_end_where_there_is_no_generation_config(tmp_path: Path) -> None:
    folder = write_hf_model(tmp_path)
    (folder / "generation_config.json").unlink()
    assert load_model(folder).shape.eos_token_ids == (EOS_TOKEN_ID,)


def test_a_template_is_taken_from_its_own_file_then_from_the_tokenizers_default(tmp_path: Path) -> None:
    folder = write_hf_model(tmp_path)
    settings = {"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": "{{ bos_token }}1"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = load_model(folder).chat_template
    assert template is not None
    assert template.render([]) == "<s>1"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}2")
    template = load_model(folder).chat_template
    assert template is not None
    assert template.render([]) == "<s>2"


def test_a_model_need_not_chat(tmp_path: Path) -> None:
    folder = write_hf_model(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    assert load_model(folder).chat_template is None


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="vocab_size: the tokenizer has 320 tokens, the model embeds 300"):
        load_model(write_hf_model(tmp_path, vocab_size=300))


def test_a_padded_vocabulary_is_accepted(tmp_path: Path) -> None:
    model = load_model(write_hf_model(tmp_path, vocab_size=384))
    assert (model.shape.vocab_size, model.tokenizer.vocab_size) == (384, 320)


@pytest.mark.parametrize("ref", ["./nowhere", "nowhere.gguf", "folder/model.gguf", "/no/such/place", "one-word"])
def test_what_is_neither_here_nor_on_the_hub_is_refused_with_what_is_possible(ref: str) -> None:
    with pytest.raises(ModelError, match=r"is no file or folder here.*\.gguf file.*config\.json.*Qwen/Qwen3-0\.6B"):
        load_model(ref)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"PK" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file, or damaged: it does not begin with 'GGUF'"):
        load_model(path)
