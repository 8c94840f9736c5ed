"""Tiny random models of every family, and their forward pass written down plainly: dense, in float64, no pages."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np

from anaphora.model import LayerWeights, ModelShape, Weights
from anaphora.model.shape import DivisorsRope, LinearRope, Llama3Rope

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

LLAMA = ModelShape(
    architecture="llama",
    num_layers=2,
    hidden_size=24,
    intermediate_size=40,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=53,
    max_context=2048,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
)

FAMILIES = {
    "llama": LLAMA,
    "tied": replace(LLAMA, ties_embeddings=True),
    "all heads have keys": replace(LLAMA, num_kv_heads=6),
    "llama3 rope": replace(
        LLAMA,
        rope_scaling=Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=128),
    ),
    "linear rope": replace(LLAMA, rope_scaling=LinearRope(factor=4.0)),
    "divisors rope": replace(LLAMA, rope_scaling=DivisorsRope(divisors=(1.0, 8.0))),
    "mistral": replace(LLAMA, architecture="mistral", sliding_window=40),
    "mistral, wide window": replace(LLAMA, architecture="mistral", sliding_window=300),
    "qwen2": replace(LLAMA, architecture="qwen2", has_attention_bias=True, ties_embeddings=True),
    "qwen3": replace(LLAMA, architecture="qwen3", has_qk_norm=True, head_dim=10, num_kv_heads=3),
}


def random_weights(shape: ModelShape, seed: int = 0) -> Weights:
    random = np.random.default_rng(seed)

    def matrix(num_outputs: int, num_inputs: int) -> NDArray[np.float32]:
        return random.standard_normal((num_outputs, num_inputs), np.float32) * np.float32(2 / num_inputs**0.5)

    def norm(size: int) -> NDArray[np.float32]:
        return random.uniform(0.5, 1.5, size).astype(np.float32)

    hidden, q_rows, kv_rows = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layers = []
    for _ in range(shape.num_layers):
        layer = LayerWeights(
            attention_norm=norm(hidden),
            q=matrix(q_rows, hidden),
            k=matrix(kv_rows, hidden),
            v=matrix(kv_rows, hidden),
            o=matrix(hidden, q_rows),
            mlp_norm=norm(hidden),
            gate=matrix(shape.intermediate_size, hidden),
            up=matrix(shape.intermediate_size, hidden),
            down=matrix(hidden, shape.intermediate_size),
        )
        if shape.has_attention_bias:
            layer.q_bias, layer.k_bias, layer.v_bias = norm(q_rows), norm(kv_rows), norm(kv_rows)
        if shape.has_qk_norm:
            layer.q_norm, layer.k_norm = norm(shape.head_dim), norm(shape.head_dim)
        layers.append(layer)
    embedding = random.standard_normal((shape.vocab_size, hidden), np.float32)
    output = embedding if shape.ties_embeddings else matrix(shape.vocab_size, hidden)
    return Weights(embedding, output, norm(hidden), layers)


def dense_logits(
    shape: ModelShape,
    weights: Weights,
    tokens: NDArray[np.int32],
    kept: Callable[[NDArray[np.float64]], NDArray[np.float64]] = lambda kv: kv,
) -> NDArray[np.float64]:
    """Logits of every token of one sequence, [n, vocab_size]. `kept` is what becomes of keys and values when stored."""
    num_tokens, group = len(tokens), shape.num_heads // shape.num_kv_heads
    age = np.arange(num_tokens)[:, None] - np.arange(num_tokens)
    visible = (age >= 0) & (age < (shape.sliding_window or num_tokens))

    x = weights.embedding[tokens].astype(np.float64)
    for float32_layer in weights.layers:
        layer = _in_float64(float32_layer)
        normed = _rms_norm(x, layer.attention_norm, shape)
        q, k, v = normed @ layer.q.T, normed @ layer.k.T, normed @ layer.v.T
        if layer.q_bias is not None:
            q, k, v = q + layer.q_bias, k + layer.k_bias, v + layer.v_bias
        outputs = []
        for head in range(shape.num_heads):
            head_q, head_k, head_v = (
                array[:, index * shape.head_dim : (index + 1) * shape.head_dim]
                for array, index in ((q, head), (k, head // group), (v, head // group))
            )
            if layer.q_norm is not None:
                head_q, head_k = _rms_norm(head_q, layer.q_norm, shape), _rms_norm(head_k, layer.k_norm, shape)
            scores = _rope(head_q, shape) @ kept(_rope(head_k, shape)).T / np.sqrt(shape.head_dim)
            weight = np.where(visible, np.exp(scores - scores.max(axis=1, keepdims=True)), 0.0)
            outputs.append(weight @ kept(head_v) / weight.sum(axis=1, keepdims=True))
        x = x + np.concatenate(outputs, axis=1) @ layer.o.T
        normed = _rms_norm(x, layer.mlp_norm, shape)
        gate = normed @ layer.gate.T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ layer.up.T)) @ layer.down.T
    return _rms_norm(x, weights.final_norm, shape) @ weights.output.T


def _in_float64(layer: LayerWeights) -> LayerWeights:
    arrays = {field.name: getattr(layer, field.name) for field in fields(layer)}
    return LayerWeights(**{name: None if array is None else array.astype(np.float64) for name, array in arrays.items()})


def _rms_norm(x: NDArray[np.float64], weight: NDArray[np.float64], shape: ModelShape) -> NDArray[np.float64]:
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + shape.rms_norm_eps) * weight


def _rope(x: NDArray[np.float64], shape: ModelShape) -> NDArray[np.float64]:
    half = shape.head_dim // 2
    turned = np.empty_like(x)
    for i in range(half):
        frequency = shape.rope_theta ** (-2 * i / shape.head_dim)
        match shape.rope_scaling:
            case LinearRope():
                frequency /= shape.rope_scaling.factor
            case DivisorsRope():
                frequency /= shape.rope_scaling.divisors[i]
            case Llama3Rope() as scaling:
                wavelength = 2 * np.pi / frequency
                longest, shortest = (
                    scaling.original_max_context / scaling.low_freq_factor,
                    scaling.original_max_context / scaling.high_freq_factor,
                )
                if wavelength > longest:
                    frequency /= scaling.factor
                elif wavelength > shortest:
                    share = (scaling.original_max_context / wavelength - scaling.low_freq_factor) / (
                        scaling.high_freq_factor - scaling.low_freq_factor
                    )
                    frequency *= share + (1 - share) / scaling.factor
        # A pair is one complex number; turning it is a multiplication.
        pair = (x[:, i] + 1j * x[:, half + i]) * np.exp(1j * frequency * np.arange(len(x)))
        turned[:, i], turned[:, half + i] = pair.real, pair.imag
    return turned
