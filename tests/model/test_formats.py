"""Every format gives the same weights, bit for bit, in one layout; what does not fit is refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from anaphora.model import ModelError, Weights, gguf_file, load_model
from anaphora.model.shape import DivisorsRope, LinearRope, Llama3Rope
from tests.tiny_models import random_weights, tiny_shape, write_gguf_model, write_hf_model

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")


def assert_same_weights(actual: Weights, expected: Weights) -> None:
    for name in ("embedding", "output", "final_norm"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), err_msg=name)
    assert len(actual.layers) == len(expected.layers)
    for number, (layer, expected_layer) in enumerate(zip(actual.layers, expected.layers, strict=True)):
        for field in fields(layer):
            tensor, wanted = getattr(layer, field.name), getattr(expected_layer, field.name)
            if wanted is None:
                assert tensor is None, f"layer {number} {field.name}"
            else:
                assert tensor.dtype == np.float32
                np.testing.assert_array_equal(tensor, wanted, err_msg=f"layer {number} {field.name}")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_folder_gives_its_weights_as_float32(tmp_path: Path, architecture: str, dtype: str) -> None:
    model = load_model(write_hf_model(tmp_path, architecture, dtype=dtype))
    assert model.shape == tiny_shape(architecture)
    assert_same_weights(model.weights, random_weights(tiny_shape(architecture)))


def test_float16_is_widened(tmp_path: Path) -> None:
    expected = random_weights(tiny_shape()).layers[1].down
    model = load_model(write_hf_model(tmp_path, dtype="float16"))
    np.testing.assert_array_equal(model.weights.layers[1].down, expected.astype(np.float16).astype(np.float32))


def test_sharded_weights_are_put_together(tmp_path: Path) -> None:
    model = load_model(write_hf_model(tmp_path, num_shards=3))
    assert sorted(path.name for path in tmp_path.glob("*.safetensors"))[2] == "model-00003-of-00003.safetensors"
    assert_same_weights(model.weights, random_weights(tiny_shape()))


@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
def test_a_gguf_file_gives_the_rows_of_q_and_k_in_rotate_half_order(tmp_path: Path, architecture: str) -> None:
    model = load_model(write_gguf_model(tmp_path / "tiny.gguf", architecture))
    assert_same_weights(model.weights, random_weights(tiny_shape(architecture)))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "F16", "BF16"])
def test_quantised_blocks_are_decoded_as_the_formats_own_package_decodes_them(tmp_path: Path, kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    model = load_model(write_gguf_model(tmp_path / "tiny.gguf", "qwen2", quantisation=quantisation))
    for tensor, original in (
        (model.weights.embedding, random_weights(tiny_shape("qwen2")).embedding),
        (model.weights.layers[1].q, random_weights(tiny_shape("qwen2")).layers[1].q),
    ):
        expected = gguf.dequantize(gguf.quantize(original, quantisation), quantisation)
        np.testing.assert_array_equal(tensor, expected)


def test_quantised_rows_of_q_are_reordered_before_they_are_decoded(tmp_path: Path) -> None:
    quantisation = gguf.GGMLQuantizationType.Q8_0
    model = load_model(write_gguf_model(tmp_path / "tiny.gguf", "llama", quantisation=quantisation))
    original = random_weights(tiny_shape()).layers[0].k
    np.testing.assert_array_equal(
        model.weights.layers[0].k, gguf.dequantize(gguf.quantize(original, quantisation), quantisation)
    )


@pytest.mark.parametrize("decoded_bytes", [1, 100, 1000])
def test_decoding_in_pieces_leaves_no_row_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded_bytes: int
) -> None:
    path = write_gguf_model(tmp_path / "tiny.gguf", quantisation=gguf.GGMLQuantizationType.Q8_0)
    whole = load_model(path).weights
    monkeypatch.setattr(gguf_file, "_DECODE_BYTES", decoded_bytes)
    assert_same_weights(load_model(path).weights, whole)


def test_tied_embeddings_are_one_array(tmp_path: Path) -> None:
    for path in (
        write_hf_model(tmp_path / "folder", ties_embeddings=True),
        write_gguf_model(tmp_path / "tiny.gguf", ties_embeddings=True),
    ):
        model = load_model(path)
        assert model.shape.ties_embeddings
        weights = model.weights
        assert weights.output is weights.embedding
        assert_same_weights(weights, random_weights(tiny_shape(ties_embeddings=True)))


@pytest.mark.parametrize(
    "scaling",
    [LinearRope(4.0), Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=128)],
)
def test_rope_scaling_of_a_folder(tmp_path: Path, scaling: LinearRope | Llama3Rope) -> None:
    assert load_model(write_hf_model(tmp_path, rope_scaling=scaling)).shape.rope_scaling == scaling


@pytest.mark.parametrize("scaling", [LinearRope(4.0), DivisorsRope((1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0))])
def test_rope_scaling_of_a_gguf_file(tmp_path: Path, scaling: LinearRope | DivisorsRope) -> None:
    path = write_gguf_model(tmp_path / "tiny.gguf", rope_scaling=scaling)
    assert load_model(path).shape.rope_scaling == scaling


def change_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_newer_configs_keep_theta_with_the_scaling(tmp_path: Path) -> None:
    folder = change_config(
        write_hf_model(tmp_path), rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    assert load_model(folder).shape.rope_theta == 500000.0


def test_head_dim_defaults_to_an_even_share_of_the_hidden_size(tmp_path: Path) -> None:
    assert load_model(change_config(write_hf_model(tmp_path), head_dim=None)).shape.head_dim == 16


def test_qwens_window_is_off_unless_it_is_switched_on(tmp_path: Path) -> None:
    folder = change_config(write_hf_model(tmp_path, "qwen2"), sliding_window=24, use_sliding_window=False)
    assert load_model(folder).shape.sliding_window is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "qwen3_moe"},
            "model_type: 'qwen3_moe' is not supported; supported are llama, mistral, qwen2, qwen3",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling: type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported, only 'silu'"),
        ({"attention_bias": True}, "attention_bias: true is not supported for 'llama'"),
        ({"mlp_bias": True}, "mlp_bias: True is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: "),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
        ({"num_hidden_layers": None}, "num_hidden_layers: missing"),
        ({"num_hidden_layers": "two"}, "num_layers: 'two' is not allowed"),
        ({"num_attention_heads": 0, "head_dim": None}, "a number is missing or wrong"),
        ({"vocab_size": 300}, "tensor 'model.embed_tokens.weight' has shape [320, 64]; expected [300, 64]"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_by_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        load_model(change_config(write_hf_model(tmp_path), **changes))


def test_a_window_on_some_layers_only_is_refused(tmp_path: Path) -> None:
    folder = change_config(write_hf_model(tmp_path, "qwen2"), sliding_window=24, use_sliding_window=True)
    with pytest.raises(ModelError, match="use_sliding_window: true is not supported"):
        load_model(folder)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_tensor_of_another_shape_is_named(tmp_path: Path, kind: str) -> None:
    if kind == "folder":
        path = change_config(write_hf_model(tmp_path), intermediate_size=128)
        name = "model.layers.0.mlp.gate_proj.weight"
    else:
        path = write_gguf_model(tmp_path / "tiny.gguf")
        data = path.read_bytes()
        key = b"llama.feed_forward_length" + (4).to_bytes(4, "little")
        path.write_bytes(data.replace(key + (96).to_bytes(4, "little"), key + (128).to_bytes(4, "little")))
        name = "blk.0.ffn_gate.weight"
    with pytest.raises(ModelError, match=re.escape(f"tensor '{name}' has shape [96, 64]; expected [128, 64]")):
        load_model(path)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_missing_tensor_is_named(tmp_path: Path, kind: str) -> None:
    if kind == "folder":
        path = write_hf_model(tmp_path)
        weights, old, new = path / "model.safetensors", b"layers.1.mlp.up_proj", b"layers.1.mlp.xx_proj"
        name = "model.layers.1.mlp.up_proj.weight"
    else:
        path = weights = write_gguf_model(tmp_path / "tiny.gguf")
        old, new = b"blk.1.ffn_up", b"blk.1.ffn_xx"
        name = "blk.1.ffn_up.weight"
    weights.write_bytes(weights.read_bytes().replace(old, new))
    with pytest.raises(ModelError, match=re.escape(f"tensor '{name}' is missing")):
        load_model(path)


@pytest.mark.parametrize("kept", [0, 3, 20, 1000, 0.5, 0.999])
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_truncated_file_is_refused(tmp_path: Path, kind: str, kept: float) -> None:
    if kind == "folder":
        path = write_hf_model(tmp_path)
        weights = path / "model.safetensors"
    else:
        path = weights = write_gguf_model(tmp_path / "tiny.gguf")
    data = weights.read_bytes()
    weights.write_bytes(data[: int(kept if kept > 1 else kept * len(data))])
    with pytest.raises(ModelError, match=f"{weights.name}.*(truncated|damaged|cannot be read)"):
        load_model(path)


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    folder = write_hf_model(tmp_path, dtype="float32")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"F32"', b'"I32"'))
    with pytest.raises(ModelError, match="dtype I32 is not supported; supported are F32, F16, BF16"):
        load_model(folder)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "weights.bin"])
def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path, shard: str) -> None:
    folder = write_hf_model(tmp_path, num_shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    with pytest.raises(ModelError, match="must be a plain"):
        load_model(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_hf_model(tmp_path, num_shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: missing"):
        load_model(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "neither config.json nor a .gguf file"),
        ("config.json", "{", "config.json: not valid JSON"),
        ("config.json", "[]", "config.json: expected a JSON object"),
        ("tokenizer.json", None, "tokenizer.json: missing"),
        ("tokenizer.json", "{}", "tokenizer.json: "),
        ("model.safetensors", None, "model.safetensors: missing"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "chat template: "),
    ],
)
def test_a_folder_with_a_file_missing_or_damaged_is_refused_by_file(
    tmp_path: Path, file: str, content: str | None, message: str
) -> None:
    folder = write_hf_model(tmp_path)
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(ModelError, match=re.escape(message)):
        load_model(folder)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type: 'yarn' is not supported"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor: missing"),
        ({"llama.expert_count": "8"}, "llama.expert_count: mixtures of experts are not supported"),
        ({"tokenizer.chat_template": "{% if %}"}, "chat template: "),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre: 'tekken' is not supported"),
    ],
)
def test_a_gguf_file_that_cannot_be_run_is_refused_by_key(
    tmp_path: Path, metadata: dict[str, str], message: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        load_model(write_gguf_model(tmp_path / "tiny.gguf", metadata=metadata))


def test_a_gguf_file_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write_gguf_model(tmp_path / "tiny.gguf", "llama")
    path.write_bytes(path.read_bytes().replace(b"llama", b"gemma"))
    with pytest.raises(
        ModelError, match=r"general\.architecture: 'gemma' is not supported; supported are llama, qwen2, qwen3"
    ):
        load_model(path)
