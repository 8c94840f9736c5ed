"""LoRA adapters (arXiv 2106.09685) in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from anaphora.model.errors import ModelError, naming
from anaphora.model.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from anaphora.model.shape import ModelShape

    Array: TypeAlias = NDArray[np.float32]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 1024
"""More is a damaged file: a matrix of such a rank is better merged into the weights."""

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""The projections that can be adapted, by the names of their fields in `LayerWeights`."""

_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((False,), "DoRA is not supported"),
    "use_qalora": ((False,), "QALoRA is not supported"),
    "modules_to_save": (([],), "whole modules beside the low-rank pairs are not supported"),
    "bias": (("none",), "adapted biases are not supported"),
    "lora_bias": ((False,), "adapted biases are not supported"),
    "fan_in_fan_out": ((False,), "transposed weights are not supported"),
    "rank_pattern": (({},), "ranks that differ between modules are not supported"),
    "alpha_pattern": (({},), "alphas that differ between modules are not supported"),
    "layer_replication": (([],), "repeated layers are not supported"),
    "trainable_token_indices": (([], {}), "adapted embeddings are not supported"),
    "target_parameters": (([],), "adapted parameters outside of linear modules are not supported"),
    "alora_invocation_tokens": (([],), "activated LoRA is not supported"),
}
"""Fields of adapter_config.json that change what is computed, with the values that do not. None is one of them."""

_TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(0|[1-9]\d{0,5})\.(?:self_attn\.([qkvo])|mlp\.(gate|up|down))_proj"
    r"\.lora_([AB])\.weight"
)
_MODULE = re.compile(r"(?:.*\.)?(q|k|v|o|gate|up|down)_proj")


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one projection: scale * b @ a, on top of its weight [outputs, inputs].

    a: float32 [rank, inputs]. b: float32 [outputs, rank].
    """

    a: Array
    b: Array


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """One adapter in memory, apart from its files: what happens to those does not reach it.

    digest: 32 hexadecimal digits over the scale and every number that is added, so over all that it computes.
    scale: lora_alpha / rank, or lora_alpha / sqrt(rank) for rank-stabilised adapters (Kalajdzievski 2023).
    layers: per layer of the model the projections that it changes, by the names in `TARGETS`.
    """

    path: str
    digest: str
    rank: int
    scale: float
    layers: tuple[Mapping[str, LowRank], ...]


def read_lora(folder: Path, shape: ModelShape) -> LoraAdapter:
    """Read an adapter for a model of this shape. Its files' headers are checked before any number is read.

    Cost: the file once, and its numbers in memory as float32.

    Raises:
        ModelError: a file is missing or damaged, or it is an adapter that cannot be run on this model. The message
            names the file and the field or tensor at fault.
    """
    folder = folder.resolve()
    with naming(folder):
        if not folder.is_dir():
            raise ModelError(f"expected a folder with {CONFIG} and {WEIGHTS}")
        config = _read_config(folder / CONFIG)
        rank, scale = _rank_and_scale(config)
        if not (folder / WEIGHTS).is_file():
            raise ModelError(f"{WEIGHTS}: missing")
        file = SafetensorsFile(folder / WEIGHTS)
        names = _checked_names(file, config, rank, shape)
        layers: tuple[dict[str, LowRank], ...] = tuple({} for _ in range(shape.num_layers))
        digest = hashlib.sha256(f"LoRA scale {scale!r}".encode())
        for (layer, target), (name_a, name_b) in sorted(names.items()):
            pair = LowRank(_read(file, name_a), _read(file, name_b))
            layers[layer][target] = pair
            digest.update(f"\n{layer} {target} {pair.a.shape} {pair.b.shape}\n".encode())
            digest.update(pair.a.data)
            digest.update(pair.b.data)
        return LoraAdapter(str(folder), digest.hexdigest()[:32], rank, scale, layers)


def projection_sizes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Per projection that can be adapted its (outputs, inputs)."""
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "q": (q_rows, hidden),
        "k": (kv_rows, hidden),
        "v": (kv_rows, hidden),
        "o": (hidden, q_rows),
        "gate": (intermediate, hidden),
        "up": (intermediate, hidden),
        "down": (hidden, intermediate),
    }


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{CONFIG}: missing; an adapter in PEFT's format has one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{CONFIG}: not JSON, or damaged: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{CONFIG}: expected a JSON object")
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{CONFIG}: peft_type: {config.get('peft_type')!r} is not supported, only 'LORA'")
    for field, (neutral, why) in _NEUTRAL.items():
        value = config.get(field)
        if value is not None and value not in neutral:
            raise ModelError(f"{CONFIG}: {field}: {str(value)[:100]} is not allowed; {why}")
    return config


def _rank_and_scale(config: dict[str, Any]) -> tuple[int, float]:
    rank, alpha, rslora = config.get("r"), config.get("lora_alpha"), config.get("use_rslora", False)
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise ModelError(f"{CONFIG}: r: {rank!r} is not allowed; it must be a whole number from 1 to {MAX_RANK}")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise ModelError(f"{CONFIG}: lora_alpha: {alpha!r} is not allowed; it must be a number")
    if rslora not in (True, False, None):
        raise ModelError(f"{CONFIG}: use_rslora: {rslora!r} is not allowed; it must be true or false")
    return rank, alpha / math.sqrt(rank) if rslora else alpha / rank


def _checked_names(
    file: SafetensorsFile, config: dict[str, Any], rank: int, shape: ModelShape
) -> dict[tuple[int, str], tuple[str, str]]:
    """Per layer and projection the names of its A and B, their shapes checked by the header."""
    found: dict[tuple[int, str], dict[str, str]] = {}
    for name in file:
        match = _TENSOR.fullmatch(name)
        if match is None:
            what = "DoRA is not supported" if "lora_magnitude" in name else f"allowed are {', '.join(TARGETS)}"
            raise ModelError(f"{WEIGHTS}: tensor {name[:200]!r} adapts what cannot be adapted here; {what}")
        layer, target = int(match[1]), match[2] or match[3]
        if layer >= shape.num_layers:
            raise ModelError(f"{WEIGHTS}: tensor {name!r}: the model has {shape.num_layers} layers")
        outputs, inputs = projection_sizes(shape)[target]
        expected = (rank, inputs) if match[4] == "A" else (outputs, rank)
        actual = file.shape_of(name)
        if actual != expected:
            raise ModelError(
                f"{WEIGHTS}: tensor {name!r} has shape {list(actual)}; with rank {rank} this model needs "
                f"{list(expected)}"
            )
        found.setdefault((layer, target), {})[match[4]] = name
    for (layer, target), pair in found.items():
        if len(pair) == 1:
            ((half, name),) = pair.items()
            raise ModelError(
                f"{WEIGHTS}: layer {layer}, {target}: lora_{'BA'['AB'.index(half)]} of {name!r} is missing"
            )
    if not found:
        raise ModelError(f"{WEIGHTS}: no tensors")
    _require_targets(config, set(found), shape)
    return {key: (pair["A"], pair["B"]) for key, pair in found.items()}


def _require_targets(config: dict[str, Any], found: set[tuple[int, str]], shape: ModelShape) -> None:
    """What the config lists must be in the file: each target, in every layer unless it says in which."""
    targets = config.get("target_modules")
    if isinstance(targets, str):
        return  # a pattern, or "all-linear": what it matched is what the file has
    if not isinstance(targets, list) or not targets:
        raise ModelError(f"{CONFIG}: target_modules: expected a list of module names, or a pattern")
    layers = config.get("layers_to_transform")
    listed = range(shape.num_layers) if layers is None else [layers] if isinstance(layers, int) else layers
    if not isinstance(listed, (range, list)) or not all(type(n) is int and 0 <= n < shape.num_layers for n in listed):
        raise ModelError(f"{CONFIG}: layers_to_transform: expected layers from 0 to {shape.num_layers - 1}")
    for module in targets:
        match = _MODULE.fullmatch(module) if isinstance(module, str) else None
        if match is None:
            allowed = ", ".join(f"{target}_proj" for target in TARGETS)
            raise ModelError(
                f"{CONFIG}: target_modules: {str(module)[:100]!r} cannot be adapted; allowed are {allowed}"
            )
        # A longer name may be one layer's own; a name excluded by another field is for PEFT to say.
        is_everywhere = module == f"{match[1]}_proj" and not config.get("exclude_modules")
        for layer in listed if is_everywhere else ():
            if (layer, match[1]) not in found:
                raise ModelError(f"{WEIGHTS}: layer {layer}, {match[1]}: missing, although {CONFIG} lists it")


def _read(file: SafetensorsFile, name: str) -> Array:
    # A copy: the file may be written over, and its digest must stay the digest of what is computed with.
    array = np.array(file.tensor(name), np.float32, order="C")
    if not np.isfinite(array).all():
        raise ModelError(f"{WEIGHTS}: tensor {name!r}: damaged: it has numbers that are not finite")
    return array
