"""Tiny models of many architectures, made from transformers' configs: random weights, the same ones each time."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2

DENSE = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "gemma2": {"sliding_window": 24, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 24, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 16},
    "phi": {},
    "phi3": {},
    "gpt_neox": {},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 1024},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "olmo2": {},
    "cohere": {},
    "granite": {},
    "smollm3": {},
    "starcoder2": {"sliding_window": 24},
    "stablelm": {},
    "glm4": {},
    "exaone4": {"sliding_window": 24, "layer_types": _ALTERNATING},
}
EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"sliding_window": 24, "layer_types": _ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
        "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
        "num_key_value_heads": 4, "head_dim": 8,
    },
}  # fmt: skip


def tiny_module(model_type, attention="eager", **changes):
    settings = COMMON | DENSE.get(model_type, {}) | EXPERTS.get(model_type, {}) | changes
    config = AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    # As they are made, weights are so small that all tokens are about equally likely.
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(6)
    return module
