"""A model's weights in memory: float32 arrays in the layout of Hugging Face checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from anaphora.model.errors import ModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from anaphora.model.shape import ModelShape

    Array: TypeAlias = NDArray[np.float32]


_MAX_THREADS = 4


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [outputs, inputs]; rows of q and k are ordered for rotate-half RoPE.

    q [num_heads * head_dim, hidden], k and v [num_kv_heads * head_dim, hidden], o [hidden, num_heads * head_dim],
    gate and up [intermediate, hidden], down [hidden, intermediate], both norms [hidden], biases one per row,
    q_norm and k_norm [head_dim].
    """

    attention_norm: Array
    q: Array
    k: Array
    v: Array
    o: Array
    mlp_norm: Array
    gate: Array
    up: Array
    down: Array
    q_bias: Array | None = None
    k_bias: Array | None = None
    v_bias: Array | None = None
    q_norm: Array | None = None
    k_norm: Array | None = None


@dataclass(slots=True)
class Weights:
    """All weights, float32; arrays may be read-only views of the mapped file.

    embedding and output [vocab_size, hidden], one and the same array when tied; final_norm [hidden].
    """

    embedding: Array
    output: Array
    final_norm: Array
    layers: list[LayerWeights]


def assemble(shape: ModelShape, names: Mapping[str, str], read: Callable[[str], Array]) -> Weights:
    """Read every tensor that `shape` asks for and check its size.

    names: what a file calls each field of `Weights` and `LayerWeights`; "{layer}" stands for the layer's number.
    read: gives one tensor of the file as float32; KeyError when there is none of that name.

    Raises:
        ModelError: a tensor is missing or has another shape; the message names it.
    """

    def take(wanted: tuple[str, tuple[int, ...]]) -> Array:
        name, expected = wanted
        try:
            tensor = read(name)
        except KeyError:
            raise ModelError(f"tensor {name!r} is missing; a {shape.architecture} model needs it") from None
        if tensor.shape != expected:
            raise ModelError(f"tensor {name!r} has shape {list(tensor.shape)}; expected {list(expected)}")
        return tensor

    table = (shape.vocab_size, shape.hidden_size)
    outer = {"embedding": table, "final_norm": (shape.hidden_size,)}
    if not shape.ties_embeddings:
        outer["output"] = table
    inner = _layer_sizes(shape)
    wanted = [(names[field], size) for field, size in outer.items()]
    wanted += [(names[f].format(layer=layer), size) for layer in range(shape.num_layers) for f, size in inner.items()]
    # Decoding is numpy's work on megabytes at a time, which threads share well; mapped files are read as it goes.
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "weights") as pool:
        arrays = pool.map(take, wanted)
        model = {field: next(arrays) for field in outer}
        layers = [LayerWeights(**{field: next(arrays) for field in inner}) for _ in range(shape.num_layers)]
    return Weights(model["embedding"], model.get("output", model["embedding"]), model["final_norm"], layers)


def _layer_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "q": (q_rows, hidden),
        "k": (kv_rows, hidden),
        "v": (kv_rows, hidden),
        "o": (hidden, q_rows),
        "mlp_norm": (hidden,),
        "gate": (intermediate, hidden),
        "up": (intermediate, hidden),
        "down": (hidden, intermediate),
    }
    if shape.has_attention_bias:
        sizes |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if shape.has_qk_norm:
        sizes |= {"q_norm": (shape.head_dim,), "k_norm": (shape.head_dim,)}
    return sizes
