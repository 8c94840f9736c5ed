"""Folders in the form of Hugging Face: config.json, *.safetensors, tokenizer.json, chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from anaphora.model import weights
from anaphora.model.chat_template import ChatTemplate
from anaphora.model.errors import ModelError, naming
from anaphora.model.safetensors_file import SafetensorsFile
from anaphora.model.shape import ARCHITECTURES, LinearRope, Llama3Rope, ModelShape, RopeScaling
from anaphora.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from anaphora.model.weights import Weights, WeightsReader

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

_LAYER = "model.layers.{layer}."
_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "output": "lm_head.weight",
    "final_norm": "model.norm.weight",
    "attention_norm": _LAYER + "input_layernorm.weight",
    "q": _LAYER + "self_attn.q_proj.weight",
    "k": _LAYER + "self_attn.k_proj.weight",
    "v": _LAYER + "self_attn.v_proj.weight",
    "o": _LAYER + "self_attn.o_proj.weight",
    "q_bias": _LAYER + "self_attn.q_proj.bias",
    "k_bias": _LAYER + "self_attn.k_proj.bias",
    "v_bias": _LAYER + "self_attn.v_proj.bias",
    "q_norm": _LAYER + "self_attn.q_norm.weight",
    "k_norm": _LAYER + "self_attn.k_norm.weight",
    "mlp_norm": _LAYER + "post_attention_layernorm.weight",
    "gate": _LAYER + "mlp.gate_proj.weight",
    "up": _LAYER + "mlp.up_proj.weight",
    "down": _LAYER + "mlp.down_proj.weight",
}
_FIXED = {"hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 1.0, "quantization_config": None}
"""Fields of config.json with the one value that is supported."""


def read_shape(folder: Path) -> ModelShape:
    """The model's shape, from config.json and generation_config.json.

    Raises:
        ModelError: an unsupported architecture or feature, or a field that is missing.
    """
    config = read_json(folder / CONFIG)
    with naming(folder / CONFIG, unless=str(folder)):
        try:
            return _shape_from(folder, config)
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelError(f"a number is missing or wrong: {error}") from None


def _shape_from(folder: Path, config: dict[str, Any]) -> ModelShape:
    architecture = config.get("model_type")
    if architecture is None:
        raise ModelError("model_type: missing")
    if architecture not in ARCHITECTURES:
        # First of all: of another kind of model no other field need be there.
        raise ModelError(f"model_type: {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    for field, supported in _FIXED.items():
        if config.get(field, supported) not in (supported, None):
            raise ModelError(f"{field}: {config[field]!r} is not supported, only {supported!r}")
    if architecture != "qwen2" and config.get("attention_bias"):
        raise ModelError(f"attention_bias: true is not supported for {architecture!r}, only for qwen2")

    def get(field: str, default: Any = None) -> Any:
        value = config.get(field)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{field}: missing")
        return value

    num_heads = get("num_attention_heads")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return ModelShape(
        architecture=architecture,
        num_layers=get("num_hidden_layers"),
        hidden_size=get("hidden_size"),
        intermediate_size=get("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=get("num_key_value_heads", num_heads),
        head_dim=get("head_dim", get("hidden_size") // num_heads),
        vocab_size=get("vocab_size"),
        max_context=get("max_position_embeddings"),
        rope_theta=float(rope.get("rope_theta") or get("rope_theta", 10000.0)),
        rms_norm_eps=float(get("rms_norm_eps", 1e-6)),
        rope_scaling=_rope_scaling(rope),
        has_attention_bias=architecture == "qwen2",
        has_qk_norm=architecture == "qwen3",
        ties_embeddings=bool(config.get("tie_word_embeddings", False)),
        sliding_window=_sliding_window(config),
        eos_token_ids=_eos_token_ids(folder, config),
        bos_token_id=config.get("bos_token_id"),
    )


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    try:
        match kind:
            case "default":
                return None
            case "linear":
                return LinearRope(float(rope["factor"]))
            case "llama3":
                return Llama3Rope(
                    factor=float(rope["factor"]),
                    low_freq_factor=float(rope["low_freq_factor"]),
                    high_freq_factor=float(rope["high_freq_factor"]),
                    original_max_context=int(rope["original_max_position_embeddings"]),
                )
    except KeyError as missing:
        raise ModelError(f"rope_scaling.{missing.args[0]}: missing for type {kind!r}") from None
    raise ModelError(f"rope_scaling: type {kind!r} is not supported; supported are default, linear and llama3")


def _sliding_window(config: dict[str, Any]) -> int | None:
    """Mistral's window holds for all layers; Qwen's is off unless switched on, and then from some layer on."""
    window: int | None = config.get("sliding_window")
    if config.get("model_type") == "mistral":
        return window
    if config.get("use_sliding_window"):
        raise ModelError("use_sliding_window: true is not supported; layers with and without a window would mix")
    return None


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """What ends a generation: generation_config.json before config.json, as its writers mean it."""
    generation = read_json(folder / GENERATION_CONFIG, optional=True)
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights, in a fixed order.

    Raises:
        ModelError: there are none, or the index names files that are not there.
    """
    if (folder / WEIGHTS_INDEX).exists():
        files = [folder / name for name in shard_names(read_json(folder / WEIGHTS_INDEX))]
    else:
        files = [folder / WEIGHTS]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}: missing; the weights must be safetensors files")
    return files


def shard_names(index: dict[str, Any]) -> list[str]:
    """The files that a model.safetensors.index.json names, sorted.

    Raises:
        ModelError: no table of tensors, or a name that is not a plain safetensors file name.
    """
    table = index.get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ModelError(f"{WEIGHTS_INDEX}: weight_map is missing or empty")
    names = sorted(set(map(str, table.values())))
    for name in names:
        # The name becomes part of a path, and the file comes from strangers.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{WEIGHTS_INDEX}: {name!r} is not allowed; it must be a plain *.safetensors file name")
    return names


class _Tensors:
    """The tensors of all files for `stored_weights`."""

    def __init__(self, files: Sequence[SafetensorsFile]) -> None:
        self._files = files

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._file_of(name).shape_of(name)

    def read(self, name: str) -> NDArray[np.float32]:
        return self._file_of(name).tensor(name)

    read_stored = read

    def _file_of(self, name: str) -> SafetensorsFile:
        for file in self._files:
            if name in file:
                return file
        raise KeyError(name)


def stored_weights(folder: Path, shape: ModelShape) -> WeightsReader:
    """Check the files' tensors, and return what reads them as float32, bfloat16 and float16 widened.

    Raises:
        ModelError: a file or tensor is missing or damaged, or a tensor has another shape or dtype.
    """
    files = [SafetensorsFile(path) for path in weight_files(folder)]
    return weights.stored_weights(shape, _NAMES, _Tensors(files))


def tensors_by_name(shape: ModelShape, weights: Weights) -> dict[str, NDArray[np.float32]]:
    """The arrays of `weights` under the names that a checkpoint of this shape has; a tied output has none."""
    outer = ["embedding", "final_norm"] + ([] if shape.ties_embeddings else ["output"])
    tensors = {_NAMES[field]: getattr(weights, field) for field in outer}
    for number, layer in enumerate(weights.layers):
        for field in fields(layer):
            if (array := getattr(layer, field.name)) is not None:
                tensors[_NAMES[field.name].format(layer=number)] = array
    return tensors


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What config.json and generation_config.json say of beginning and end."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def read_special_tokens(folder: Path) -> SpecialTokens:
    """The ids that begin and end a text, of a model of any architecture.

    Raises:
        ModelError: the files cannot be read.
    """
    config = read_json(folder / CONFIG)
    return SpecialTokens(config.get("bos_token_id"), _eos_token_ids(folder, config))


def read_tokenizer(folder: Path, shape: ModelShape | SpecialTokens) -> Tokenizer:
    """The tokenizer of tokenizer.json.

    Raises:
        ModelError: the file is missing or of a kind that is not supported.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        raise ModelError(f"{path}: missing; save the model's fast tokenizer there (transformers' save_pretrained does)")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise ModelError(f"{path}: {error}") from None
    config = read_json(folder / TOKENIZER_CONFIG, optional=True)
    bos_token_id = shape.bos_token_id
    if bos_token := _token_text(config, "bos_token"):
        bos_token_id = backend.token_to_id(bos_token)
    # A chat model's tokenizer often names the end of a turn where config.json still has the base model's end.
    eos_token_ids = shape.eos_token_ids
    eos_token_id = backend.token_to_id(_token_text(config, "eos_token") or "")
    if eos_token_id is not None and eos_token_id not in eos_token_ids:
        eos_token_ids = (*eos_token_ids, eos_token_id)
    return Tokenizer(
        backend,
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
        adds_bos=bos_token_id is not None and backend.encode("").ids[:1] == [bos_token_id],
    )


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The folder's chat template, from its own file or from tokenizer_config.json; None if it has none."""
    config = read_json(folder / TOKENIZER_CONFIG, optional=True)
    source = config.get("chat_template")
    if (folder / CHAT_TEMPLATE).is_file():
        source = (folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
    elif isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if source is None:
        return None
    return ChatTemplate(source, _token_text(config, "bos_token") or "", _token_text(config, "eos_token") or "")


def _token_text(config: dict[str, Any], field: str) -> str | None:
    token = config.get(field)
    return token.get("content") if isinstance(token, dict) else token


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in a file; an empty one for a file that is `optional` and not there.

    Raises:
        ModelError: the file cannot be read, or holds something else.
    """
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return value
