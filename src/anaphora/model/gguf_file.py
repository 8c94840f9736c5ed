"""GGUF files: metadata and tensors of a mapped file.

Quantised blocks are decoded by the `gguf` package. The header is parsed here: that package's reader makes several numpy
views per vocabulary entry, 2.5 s for SmolLM2's 98,000 strings, against 0.1 s.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from anaphora.model import weights
from anaphora.model.errors import ModelError
from anaphora.model.gguf_blocks import take_apart
from anaphora.model.shape import DivisorsRope, LinearRope, ModelShape, RopeScaling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from anaphora.model.weights import Matrix, WeightsReader

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_DECODE_BYTES = 1 << 17
"""Quantised bytes decoded at once: the float32 they become, under 1 MB, stays in the second-level cache."""

_NAMES = {
    "embedding": "token_embd.weight",
    "output": "output.weight",
    "final_norm": "output_norm.weight",
    "attention_norm": "blk.{layer}.attn_norm.weight",
    "q": "blk.{layer}.attn_q.weight",
    "k": "blk.{layer}.attn_k.weight",
    "v": "blk.{layer}.attn_v.weight",
    "o": "blk.{layer}.attn_output.weight",
    "q_bias": "blk.{layer}.attn_q.bias",
    "k_bias": "blk.{layer}.attn_k.bias",
    "v_bias": "blk.{layer}.attn_v.bias",
    "q_norm": "blk.{layer}.attn_q_norm.weight",
    "k_norm": "blk.{layer}.attn_k_norm.weight",
    "mlp_norm": "blk.{layer}.ffn_norm.weight",
    "gate": "blk.{layer}.ffn_gate.weight",
    "up": "blk.{layer}.ffn_up.weight",
    "down": "blk.{layer}.ffn_down.weight",
}
_QUANTISATIONS = frozenset(kind.value for kind in GGMLQuantizationType)
_ROPE_DIVISORS = "rope_freqs.weight"
_CONVERTED_FROM = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""GGUF's name of an architecture -> ours. Mistral's models are stored as "llama"."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int


class GGUFFile:
    """One mapped GGUF file.

    metadata: every key of the header; arrays of numbers are numpy arrays, arrays of strings are lists.

    Raises:
        ModelError: not a GGUF file, a damaged one, or a part of a split one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.stat().st_size == 0:
                raise ModelError(f"{path}: not a GGUF file, or damaged: it is empty")
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None
        try:
            self.metadata, self._tensors = _Header(self._map).parse()
        except (
            struct.error,
            ArithmeticError,
            LookupError,
            MemoryError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise ModelError(f"{path}: not a GGUF file, or damaged: {error}") from None
        if self.metadata.get("split.count", 1) > 1:
            raise ModelError(f"{path}: one part of a split GGUF; merge the parts first (llama-gguf-split --merge)")

    @property
    def tensor_names(self) -> Iterable[str]:
        """Names of all tensors, in the file's order."""
        return self._tensors.keys()

    def tensor(self, name: str, interleaved_heads: int = 0) -> NDArray[np.float32]:
        """One tensor as float32, outermost dimension first; a view of the mapped file where it is float32 there.

        interleaved_heads: of a q or k matrix, whose rows are put into rotate-half order. llama.cpp's converter permutes
        rows of the "llama" architecture: row 2i of a head was i, row 2i + 1 was i + head_dim / 2. 0: no such matrix.

        Raises:
            KeyError: there is none of that name.
            ModelError: what `shape_of` raises, or the rows are no whole heads.
        """
        self.shape_of(name)
        return self._decode(name, self._rows(name, interleaved_heads))

    def stored_tensor(self, name: str, interleaved_heads: int = 0) -> Matrix:
        """What `tensor` returns, its numbers still quantised if it is a matrix of a kind that `take_apart` knows."""
        self.shape_of(name)
        raw, kind = self._rows(name, interleaved_heads), self._tensors[name].kind
        matrix = take_apart(raw, kind) if raw.ndim == 2 else None
        return self._decode(name, raw) if matrix is None else matrix

    def shape_of(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, outermost dimension first, by the header alone.

        Raises:
            KeyError: there is none of that name.
            ModelError: its quantisation is not known to the `gguf` package, or the file ends before it does.
        """
        tensor = self._tensors[name]
        self._extent(name)
        if not _can_decode(tensor.kind):
            raise ModelError(f"tensor {name!r}: quantisation {tensor.kind.name} is not supported")
        return tensor.shape

    def _rows(self, name: str, interleaved_heads: int) -> NDArray[Any]:
        """`_raw`, reordered where it must be: before it is decoded, when it is smallest."""
        raw = self._raw(name)
        if not interleaved_heads:
            return raw
        if raw.ndim != 2 or raw.shape[0] % (2 * interleaved_heads):
            raise ModelError(
                f"tensor {name!r} has shape {list(raw.shape)}; expected {interleaved_heads} heads of an even size"
            )
        pairs = raw.reshape(interleaved_heads, raw.shape[0] // interleaved_heads // 2, 2, raw.shape[1])
        return pairs.swapaxes(1, 2).reshape(raw.shape)

    def _raw(self, name: str) -> NDArray[Any]:
        """The stored rows: float32 elements, or bytes of quantised blocks."""
        tensor, shape = self._tensors[name], self._extent(name)
        raw = np.frombuffer(self._map, np.uint8, math.prod(shape), tensor.offset).reshape(shape)
        return raw.view(np.float32) if tensor.kind == GGMLQuantizationType.F32 else raw

    def _extent(self, name: str) -> tuple[int, ...]:
        """A tensor's shape with its columns in bytes, all of them in the file."""
        tensor = self._tensors[name]
        block_elements, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        *rows, columns = tensor.shape or (1,)
        if columns % block_elements:
            raise ModelError(f"tensor {name!r}: {columns} columns are no whole number of {tensor.kind.name} blocks")
        shape = (*rows, columns // block_elements * block_bytes)
        # Python's integers: the sizes come from the file, and may be anything up to 2**64.
        if tensor.offset + math.prod(shape) > len(self._map):
            raise ModelError(f"{self.path}: tensor {name!r} ends after the file does; the file is truncated")
        return shape

    def _decode(self, name: str, raw: NDArray[Any]) -> NDArray[np.float32]:
        tensor = self._tensors[name]
        if tensor.kind == GGMLQuantizationType.F32:
            return raw
        out = np.empty(tensor.shape, np.float32)
        rows, flat = raw.reshape(-1, raw.shape[-1]), out.reshape(-1, out.shape[-1])
        step = max(1, _DECODE_BYTES // rows.shape[1])
        for start in range(0, len(rows), step):
            # One long row: the package splits its input by rows, and would do so again.
            decoded = dequantize(rows[start : start + step].reshape(1, -1), tensor.kind)
            flat[start : start + step] = decoded.reshape(-1, flat.shape[1])
        return out


@cache
def _can_decode(kind: GGMLQuantizationType) -> bool:
    """Whether the `gguf` package decodes this quantisation: it says so only when asked to."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


class _Header:
    """Parses a header front to back. Every number is little-endian."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, _Tensor]]:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        self._position = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"GGUF version {version}; supported are {', '.join(map(str, _VERSIONS))}")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        found = {}
        for _ in range(num_tensors):
            name = self._string()
            dimensions = [self._number("Q") for _ in range(self._number("I"))]
            number = self._number("I")
            if number not in _QUANTISATIONS:
                raise ModelError(f"tensor {name!r}: quantisation {number} is not known")
            kind = GGMLQuantizationType(number)
            found[name] = (tuple(reversed(dimensions)), kind, self._number("Q"))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        start = -(-self._position // alignment) * alignment
        return metadata, {name: _Tensor(shape, kind, start + at) for name, (shape, kind, at) in found.items()}

    def _number(self, code: str) -> int:
        (value,) = struct.unpack_from("<" + code, self._data, self._position)
        self._position += struct.calcsize("<" + code)
        return value  # type: ignore[no-any-return]

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", "replace")

    def _take(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._data):
            raise ValueError("the file is truncated")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_SCALARS[kind])
        item_kind, count = self._number("I"), self._number("Q")
        if item_kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[item_kind])
            return np.frombuffer(self._take(count * dtype.itemsize), dtype)
        return [self._value(item_kind) for _ in range(count)]


def read_shape(file: GGUFFile, eos_token_ids: tuple[int, ...], bos_token_id: int | None) -> ModelShape:
    """The model's shape, from the metadata.

    Raises:
        ModelError: an unsupported architecture or feature, or a key that is missing.
    """
    try:
        return _shape_from(file, eos_token_ids, bos_token_id)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{file.path}: a number is missing or wrong: {error}") from None


def _shape_from(file: GGUFFile, eos_token_ids: tuple[int, ...], bos_token_id: int | None) -> ModelShape:
    metadata = file.metadata
    name = metadata.get("general.architecture")
    if name not in _CONVERTED_FROM:
        raise ModelError(f"general.architecture: {name!r} is not supported; supported are {', '.join(_CONVERTED_FROM)}")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{name}.{key}", default)
        if value is None:
            raise ModelError(f"{name}.{key}: missing from {file.path.name}")
        return value

    if get("expert_count", 0):
        raise ModelError(f"{name}.expert_count: mixtures of experts are not supported")
    num_heads = get("attention.head_count")
    head_dim = get("attention.key_length", get("embedding_length") // num_heads)
    rotated = get("rope.dimension_count", head_dim)
    if rotated != head_dim or get("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{name}.rope.dimension_count: {rotated} of {head_dim} rotated; all of a head must be")
    tensor_names = set(file.tensor_names)
    return ModelShape(
        architecture=_CONVERTED_FROM[name],
        num_layers=get("block_count"),
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=get("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None),
        max_context=get("context_length"),
        rope_theta=float(get("rope.freq_base", 10000.0)),
        rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope_scaling=_rope_scaling(file, name),
        has_attention_bias=name == "qwen2",
        has_qk_norm=name == "qwen3",
        ties_embeddings=_NAMES["output"] not in tensor_names,
        sliding_window=metadata.get(f"{name}.attention.sliding_window") or None,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
    )


def _rope_scaling(file: GGUFFile, name: str) -> RopeScaling | None:
    kind = file.metadata.get(f"{name}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(f"{name}.rope.scaling.type: {kind!r} is not supported; supported are none and linear")
    if _ROPE_DIVISORS in file.tensor_names:
        return DivisorsRope(tuple(file.tensor(_ROPE_DIVISORS).tolist()))
    if kind == "none":
        return None
    factor = file.metadata.get(f"{name}.rope.scaling.factor")
    if factor is None:
        raise ModelError(f"{name}.rope.scaling.factor: missing from {file.path.name}")
    return LinearRope(float(factor))


class _Tensors:
    """The file's tensors for `stored_weights`."""

    def __init__(self, file: GGUFFile, shape: ModelShape) -> None:
        self._file = file
        is_permuted = shape.architecture == "llama"
        self._heads = {"attn_q.weight": shape.num_heads, "attn_k.weight": shape.num_kv_heads} if is_permuted else {}

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._file.shape_of(name)

    def read(self, name: str) -> NDArray[np.float32]:
        return self._file.tensor(name, self._interleaved_heads(name))

    def read_stored(self, name: str) -> Matrix:
        return self._file.stored_tensor(name, self._interleaved_heads(name))

    def _interleaved_heads(self, name: str) -> int:
        return next((num_heads for ending, num_heads in self._heads.items() if name.endswith(ending)), 0)


def stored_weights(file: GGUFFile, shape: ModelShape) -> WeightsReader:
    """Check the file's tensors, and return what reads them: as float32, in half a second for SmolLM2-135M in Q4_1.

    Raises:
        ModelError: a tensor is missing, has another shape or an unsupported quantisation, or is cut off.
    """
    return weights.stored_weights(shape, _NAMES, _Tensors(file, shape))
