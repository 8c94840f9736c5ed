"""Tiny random models on disk, in every layout that is supported: loaders and executors are tested on them offline.

A shape and a seed give the same weights in every format, and all values are exact in bfloat16, so whatever loads them
can be compared bit for bit. The tokenizer is a real byte-level BPE with a chat format.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from anaphora.model import LayerWeights, ModelShape, Weights
from anaphora.model.shape import DivisorsRope, LinearRope, Llama3Rope

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_TOKEN_ID, EOS_TOKEN_ID = 1, 2
VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TRAINING_TEXT = (
    "the cat sat on the mat and the dog ran after the ball while rain fell on the hills. You are a helpful assistant; "
    "what is the capital of France? The quick brown fox jumps over thirteen lazy zebras, and nobody knows why.",
)


def tiny_shape(architecture: str = "llama", **overrides: object) -> ModelShape:
    """Two layers, 64 wide, 4 query and 2 KV heads of 16; what an architecture always has is set."""
    settings: dict[str, object] = {
        "architecture": architecture,
        "num_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB_SIZE,
        "max_context": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 2.0**-16,
        "has_attention_bias": architecture == "qwen2",
        "has_qk_norm": architecture == "qwen3",
        "sliding_window": 24 if architecture == "mistral" else None,
        "eos_token_ids": (EOS_TOKEN_ID,),
        "bos_token_id": BOS_TOKEN_ID,
    }
    return ModelShape(**(settings | overrides))  # type: ignore[arg-type]


def random_weights(shape: ModelShape, seed: int = 0) -> Weights:
    """Weights of unit gain, rounded to values that bfloat16 holds exactly."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return _as_bfloat16(rng.normal(0.0, columns**-0.5, (rows, columns)))

    def vector(size: int, mean: float) -> NDArray[np.float32]:
        return _as_bfloat16(rng.normal(mean, 0.1, size))

    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def layer() -> LayerWeights:
        weights = LayerWeights(
            attention_norm=vector(hidden, 1.0),
            q=matrix(q_rows, hidden),
            k=matrix(kv_rows, hidden),
            v=matrix(kv_rows, hidden),
            o=matrix(hidden, q_rows),
            mlp_norm=vector(hidden, 1.0),
            gate=matrix(intermediate, hidden),
            up=matrix(intermediate, hidden),
            down=matrix(hidden, intermediate),
        )
        if shape.has_attention_bias:
            weights.q_bias, weights.k_bias, weights.v_bias = (
                vector(q_rows, 0.0),
                vector(kv_rows, 0.0),
                vector(kv_rows, 0.0),
            )
        if shape.has_qk_norm:
            weights.q_norm, weights.k_norm = vector(shape.head_dim, 1.0), vector(shape.head_dim, 1.0)
        return weights

    embedding = matrix(shape.vocab_size, hidden)
    output = embedding if shape.ties_embeddings else matrix(shape.vocab_size, hidden)
    return Weights(embedding, output, vector(hidden, 1.0), [layer() for _ in range(shape.num_layers)])


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE with 320 ids: special tokens, 256 bytes, some merges; digits one by one, as SmolLM has them."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def write_hf_model(
    path: Path,
    architecture: str = "llama",
    *,
    dtype: str = "bfloat16",
    num_shards: int = 1,
    seed: int = 0,
    **shape_overrides: object,
) -> Path:
    """Write a folder in Hugging Face's form: config.json, safetensors, tokenizer, chat template. Returns `path`.

    dtype: "bfloat16", "float16" or "float32"; the numbers are the same (float16 may round the smallest).
    """
    shape = tiny_shape(architecture, **shape_overrides)
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", _hf_config(shape))
    _write_json(path / "generation_config.json", {"eos_token_id": list(shape.eos_token_ids)})
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    tokens = {"bos_token": SPECIAL_TOKENS[BOS_TOKEN_ID], "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID]}
    _write_json(path / "tokenizer_config.json", {**tokens, "chat_template": CHAT_TEMPLATE})
    tensors = _named(random_weights(shape, seed), _HF_OUTER, _HF_LAYER, ties=shape.ties_embeddings)
    names = sorted(tensors)
    shards = [names[shard::num_shards] for shard in range(num_shards)]
    files = ["model.safetensors"]
    if num_shards > 1:
        files = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        _write_json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    for file, shard in zip(files, shards, strict=True):
        write_safetensors(path / file, {name: tensors[name] for name in shard}, dtype)
    return path


def write_safetensors(path: Path, tensors: dict[str, NDArray[np.float32]], dtype: str) -> None:
    """Write one safetensors file. bfloat16, which numpy lacks, is written as uint16 and relabelled."""
    if dtype != "bfloat16":
        save_file({name: tensor.astype(dtype) for name, tensor in tensors.items()}, path)
        return
    save_file({name: (t.view(np.uint32) >> 16).astype(np.uint16) for name, t in tensors.items()}, path)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].replace(b'"U16"', b'"BF16"')
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


def write_gguf_model(
    path: Path,
    architecture: str = "llama",
    *,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    seed: int = 0,
    metadata: dict[str, str] | None = None,
    **shape_overrides: object,
) -> Path:
    """Write a GGUF file as llama.cpp's converter does, q and k of "llama" permuted. Returns `path`.

    quantisation: of the matrices. metadata: further string keys, put over the usual ones.
    """
    shape = tiny_shape(architecture, **shape_overrides)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_context)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    if isinstance(shape.rope_scaling, LinearRope):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(shape.rope_scaling.factor)
    if isinstance(shape.rope_scaling, DivisorsRope):
        writer.add_tensor("rope_freqs.weight", np.asarray(shape.rope_scaling.divisors, np.float32))
    strings = {"tokenizer.ggml.pre": "smollm", "tokenizer.chat_template": CHAT_TEMPLATE} | (metadata or {})
    for key, value in strings.items():
        writer.add_string(key, value)
    _add_gguf_tokenizer(writer)
    for name, tensor in _named(random_weights(shape, seed), _GGUF_OUTER, _GGUF_LAYER, shape.ties_embeddings).items():
        stored = tensor
        if architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            pairs = tensor.reshape(-1, 2, shape.head_dim // 2, shape.hidden_size)
            stored = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(tensor.shape))
        if tensor.ndim == 1:
            writer.add_tensor(name, stored)
        else:
            writer.add_tensor(name, gguf.quantize(stored, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_gguf_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = tiny_tokenizer()
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(VOCAB_SIZE)]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(BOS_TOKEN_ID)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_add_bos_token(False)


def _hf_config(shape: ModelShape) -> dict[str, object]:
    scaling: dict[str, object] | None = None
    match shape.rope_scaling:
        case LinearRope(factor=factor):
            scaling = {"type": "linear", "factor": factor}
        case Llama3Rope() as llama3:
            scaling = {
                "rope_type": "llama3",
                "factor": llama3.factor,
                "low_freq_factor": llama3.low_freq_factor,
                "high_freq_factor": llama3.high_freq_factor,
                "original_max_position_embeddings": llama3.original_max_context,
            }
    return {
        "model_type": shape.architecture,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_context,
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "rms_norm_eps": shape.rms_norm_eps,
        "tie_word_embeddings": shape.ties_embeddings,
        "sliding_window": shape.sliding_window,
        "hidden_act": "silu",
        "eos_token_id": EOS_TOKEN_ID,
        "bos_token_id": shape.bos_token_id,
    }


_HF_OUTER = {
    "embedding": "model.embed_tokens.weight",
    "output": "lm_head.weight",
    "final_norm": "model.norm.weight",
}
_HF_LAYER = {
    "attention_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
_GGUF_OUTER = {"embedding": "token_embd.weight", "output": "output.weight", "final_norm": "output_norm.weight"}
_GGUF_LAYER = {
    "attention_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "o": "blk.{}.attn_output.weight",
    "q_bias": "blk.{}.attn_q.bias",
    "k_bias": "blk.{}.attn_k.bias",
    "v_bias": "blk.{}.attn_v.bias",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "mlp_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
}


def _named(
    weights: Weights, outer: dict[str, str], inner: dict[str, str], ties: bool
) -> dict[str, NDArray[np.float32]]:
    named = {name: getattr(weights, field) for field, name in outer.items() if not (ties and field == "output")}
    for number, layer in enumerate(weights.layers):
        for field in fields(layer):
            tensor = getattr(layer, field.name)
            if tensor is not None:
                named[inner[field.name].format(number)] = tensor
    return named


def _as_bfloat16(values: NDArray[np.float64]) -> NDArray[np.float32]:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
