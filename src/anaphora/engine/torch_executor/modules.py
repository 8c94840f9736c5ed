"""Models as `transformers` modules: from a folder in its form, or from arrays that are in memory already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from anaphora.engine.torch_executor.attention import IMPLEMENTATION
from anaphora.model import ModelError
from anaphora.model.hf_folder import tensors_by_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

    from anaphora.model import ModelShape, Weights

_LAYER_TYPES = ("full_attention", "sliding_attention")
_ROPES_BY_LENGTH = ("dynamic", "longrope")
"""RoPE variants that turn a token by the length of the sequence that it is in, so its KV is not one thing."""


def module_from_folder(folder: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Load a folder in Hugging Face's form. Nothing is asked of the network, and no code of the folder is run.

    Raises:
        ModelError: it cannot be read, or is of a kind that this executor cannot run; the message says which.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        check_config(config)
        module = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=IMPLEMENTATION, local_files_only=True
        )
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None
    except (ValueError, OSError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"{folder}: transformers cannot load it: {error}") from None
    return module.to(device).eval()


def module_from_arrays(shape: ModelShape, weights: Weights, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Make the module of one of the families that `anaphora.model` reads, on `weights`, copied only if needed."""
    config = AutoConfig.for_model(
        shape.architecture,
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_context,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=shape.rms_norm_eps,
        tie_word_embeddings=shape.ties_embeddings,
        sliding_window=shape.sliding_window,
        pad_token_id=None,
    )
    tensors = {name: _tensor(array) for name, array in tensors_by_name(shape, weights).items()}
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    module.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, strict=False, assign=True)
    module.tie_weights()
    # Not in any checkpoint: computed here, with scaling that a config cannot always say.
    frequencies = torch.tensor(shape.inverse_frequencies(), dtype=torch.float32)
    rotary = module.model.rotary_emb
    rotary.inv_freq, rotary.original_inv_freq = frequencies, frequencies.clone()
    missing = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]
    if missing:
        raise ModelError(f"tensor {missing[0]!r} is missing; a {shape.architecture} model needs it")
    return module.to(device).eval()


def check_config(config: PreTrainedConfig) -> None:
    """Raise ModelError for what paged attention cannot run: the message names the field and what is allowed."""
    config = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError("is_encoder_decoder: true is not supported, only decoders")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            raise ModelError(f"layer_types: {kind!r} is not supported; supported are {', '.join(_LAYER_TYPES)}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise ModelError(f"num_kv_shared_layers: {config.num_kv_shared_layers} is not supported, only 0")
    for kind in _rope_types(getattr(config, "rope_parameters", None)):
        if kind in _ROPES_BY_LENGTH:
            raise ModelError(
                f"rope_parameters: type {kind!r} is not supported: with it a token's keys depend on the tokens after it"
            )
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        raise ModelError("max_position_embeddings: missing")


def _rope_types(parameters: dict[str, Any] | None) -> Iterator[str]:
    """The types of RoPE: of all layers, or of each layer type."""
    for name, value in (parameters or {}).items():
        if name == "rope_type":
            yield value
        elif isinstance(value, dict):
            yield from _rope_types(value)


def _tensor(array: np.ndarray[Any, np.dtype[np.float32]]) -> torch.Tensor:
    """The array as a tensor; a copy if it is read-only, which tensors cannot be."""
    return torch.from_numpy(np.require(array, np.float32, ["C", "W"]))
