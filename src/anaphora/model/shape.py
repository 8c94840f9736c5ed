"""The shape of a model: what an executor must know before it sees a weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from anaphora.model.errors import ModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Decoder-only transformers with RMSNorm, rotate-half RoPE, grouped queries and a SwiGLU MLP."""

MAX_CONTEXT = 1 << 24
"""More is a damaged file. Executors tabulate sines and cosines for every position."""


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Position interpolation (arXiv 2306.15595): every frequency divided by `factor`."""

    factor: float
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones left alone, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_context: int
    kind: Literal["llama3"] = "llama3"


@dataclass(frozen=True, slots=True)
class DivisorsRope:
    """Each of the head_dim / 2 frequencies divided by a number of its own: how GGUF files keep Llama 3.1's scaling."""

    divisors: tuple[float, ...]
    kind: Literal["divisors"] = "divisors"


RopeScaling: TypeAlias = LinearRope | Llama3Rope | DivisorsRope


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and constants of one model.

    Query head h reads KV head h // (num_heads / num_kv_heads). With a `sliding_window` of w, a token attends to itself
    and the w - 1 tokens before it. `max_context` is in tokens. Generation ends at any of `eos_token_ids`.

    Raises:
        ModelError: an architecture that is not in `ARCHITECTURES`, or sizes that do not fit one another.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rope_theta: float
    rms_norm_eps: float
    rope_scaling: RopeScaling | None = None
    has_attention_bias: bool = False
    has_qk_norm: bool = False
    ties_embeddings: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"architecture: {self.architecture!r} is not supported; it must be one of {', '.join(ARCHITECTURES)}"
            )
        for name in (
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_context",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"{name}: {value!r} is not allowed; it must be a positive integer")
        if self.max_context > MAX_CONTEXT:
            raise ModelError(f"max_context: {self.max_context} is not allowed; it must be at most {MAX_CONTEXT} tokens")
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ModelError(f"{name}: {value!r} is not allowed; it must be a positive number")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_kv_heads: {self.num_kv_heads} does not divide the {self.num_heads} query heads")
        if self.head_dim % 2:
            raise ModelError(f"head_dim: {self.head_dim} is odd; RoPE rotates pairs")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ModelError(f"sliding_window: {self.sliding_window} is not allowed; it must be positive, or None")
        if isinstance(self.rope_scaling, DivisorsRope) and len(self.rope_scaling.divisors) != self.head_dim // 2:
            raise ModelError(
                f"rope_scaling: {len(self.rope_scaling.divisors)} divisors for {self.head_dim // 2} frequencies"
            )

    def inverse_frequencies(self) -> NDArray[np.float64]:
        """RoPE's angle per position, float64 [head_dim / 2], scaling applied.

        Element i belongs to the rotated pair (i, i + head_dim / 2): position p turns it by p times this, in radians.
        """
        half = self.head_dim // 2
        frequencies: NDArray[np.float64] = self.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
        match self.rope_scaling:
            case LinearRope(factor=factor):
                return frequencies / factor
            case DivisorsRope(divisors=divisors):
                return frequencies / np.asarray(divisors, np.float64)
            case Llama3Rope() as scaling:
                turns = scaling.original_max_context * frequencies / (2 * np.pi)
                ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
                kept: NDArray[np.float64] = np.clip(ramp, 0.0, 1.0)
                return frequencies * (kept + (1.0 - kept) / scaling.factor)
        return frequencies
