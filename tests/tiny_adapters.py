"""Random LoRA adapters: on disk in PEFT's format, and merged into a model's weights."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from anaphora.model import LayerWeights, LoraAdapter, ModelShape, Weights
from anaphora.model.lora import TARGETS, projection_sizes
from tests.tiny_models import write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_MODULES = {target: f"{'self_attn' if target in 'qkvo' else 'mlp'}.{target}_proj" for target in TARGETS}


def tensor_name(layer: int, target: str, half: str) -> str:
    return f"base_model.model.model.layers.{layer}.{_MODULES[target]}.lora_{half}.weight"


def random_tensors(
    shape: ModelShape, rank: int = 4, targets: tuple[str, ...] = TARGETS, seed: int = 0
) -> dict[str, NDArray[np.float32]]:
    """An adapter's tensors by PEFT's names, which change a projection about as much as the projection itself is."""
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(shape.num_layers):
        for target in targets:
            outputs, inputs = projection_sizes(shape)[target]
            a = random.standard_normal((rank, inputs), np.float32) * np.float32(inputs**-0.5)
            b = random.standard_normal((outputs, rank), np.float32) * np.float32(rank**-0.5)
            tensors |= {tensor_name(layer, target, "A"): a, tensor_name(layer, target, "B"): b}
    return tensors


def write_adapter(
    folder: Path,
    shape: ModelShape,
    rank: int = 4,
    targets: tuple[str, ...] = TARGETS,
    seed: int = 0,
    tensors: dict[str, NDArray[np.float32]] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter in PEFT's format, with what PEFT writes into the config; `config` goes over it."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": False,
        "use_rslora": False,
        "target_modules": [f"{target}_proj" for target in targets],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings | config), encoding="utf-8")
    tensors = random_tensors(shape, rank, targets, seed) if tensors is None else tensors
    write_safetensors(folder / "adapter_model.safetensors", tensors, "float32")
    return folder


def merged(weights: Weights, adapter: LoraAdapter) -> Weights:
    """The weights of a model that needs no adapter: W + scale * B @ A, in float64, then float32."""
    layers = []
    for layer, pairs in zip(weights.layers, adapter.layers, strict=True):
        arrays = {field.name: getattr(layer, field.name) for field in fields(layer)}
        for target, pair in pairs.items():
            added = adapter.scale * pair.b.astype(np.float64) @ pair.a.astype(np.float64)
            arrays[target] = (arrays[target] + added).astype(np.float32)
        layers.append(LayerWeights(**arrays))
    return Weights(weights.embedding, weights.output, weights.final_norm, layers)
