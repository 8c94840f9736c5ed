"""A model as a folder in Hugging Face's form, for peers that read no GGUF."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from anaphora.model import Model

_LAYER = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def write_hf_copy(model: Model, folder: Path) -> None:
    """Write config.json and bf16 weights; no tokenizer, since the executors' benchmark speaks in ids.

    Raises ValueError for a model that is not a plain Llama with tied embeddings.
    """
    shape = model.shape
    if shape.architecture != "llama" or not shape.ties_embeddings or shape.rope_scaling is not None:
        raise ValueError(f"model: {model.name} is no plain Llama with tied embeddings; only those are copied")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_context,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": model.weights.embedding, "model.norm.weight": model.weights.final_norm}
    for number, layer in enumerate(model.weights.layers):
        for field in fields(layer):
            array = getattr(layer, field.name)
            if array is not None:
                tensors[f"model.layers.{number}.{_LAYER[field.name]}.weight"] = array
    _write_safetensors(tensors, folder / "model.safetensors")


def write_tokenizer(model: Model, folder: Path) -> None:
    """Write tokenizer.json, and its configuration with the chat template."""
    tokenizer = model.tokenizer
    tokenizer.save(folder / "tokenizer.json")
    end = tokenizer.decode([tokenizer.eos_token_ids[0]], skip_special_tokens=False)
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": end,
        "model_max_length": model.shape.max_context,
        "chat_template": model.chat_template.source if model.chat_template else None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration))


def _write_safetensors(tensors: dict[str, NDArray[np.float32]], path: Path) -> None:
    """By hand, since numpy has no bf16: 8 bytes of header length, a JSON header, the tensors one after the other."""
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, array in tensors.items():
        start, end = end, end + 2 * array.size
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            bits = np.ascontiguousarray(array).view(np.uint32)
            file.write(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes())
