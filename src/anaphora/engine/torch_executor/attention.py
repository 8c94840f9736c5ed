"""Attention of a `transformers` model over our pages, through the library's attention interface.

A model whose attention implementation is `IMPLEMENTATION` calls `attend_here` in each attention layer, which hands the
call to whatever stands in `attending`: a recorder when the model is looked at, `PagedAttention` when a step is
computed. No mask is made by the library; who sees whom follows from positions and windows.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import AttentionInterface

from anaphora.model import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anaphora.engine.torch_executor.pages import TorchPages

IMPLEMENTATION = "anaphora_paged"

KEY_TILE = 256
"""Tokens in a key tile: a multiple of every block size. Part of the numerics: another value gives other bits."""

_CHANGES_SCORES = ("position_bias", "indices", "block_indices")
"""Arguments of the interface that some architectures pass and that change who sees whom, or how much."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call, batch axis taken away: query [heads, n, key_dim], key and value [KV heads, n, size].

    sinks: float [heads], a score per head that takes part in the softmax and has no value (gpt-oss).
    softcap: scores are squeezed to softcap * tanh(score / softcap) (Gemma 2).
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class Attending(Protocol):
    """What computes a layer's attention: returns [n, heads, value_dim]."""

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Attend."""
        ...


_attending: ContextVar[Attending] = ContextVar("attending")


@contextmanager
def attending(function: Attending) -> Iterator[None]:
    """Within this context, and this thread, attention layers of `IMPLEMENTATION` call `function`."""
    token = _attending.set(function)
    try:
        yield
    finally:
        _attending.reset(token)


def attend_here(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that `transformers` calls: query [1, heads, n, key_dim] and so on; returns [1, n, heads, size].

    Raises:
        ModelError: the architecture asks for something that paged attention does not have.
    """
    unknown = [name for name in _CHANGES_SCORES if others.get(name) is not None]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if is_causal is False or not getattr(module, "is_causal", True):
        unknown.append("attention in both directions")
    if unknown:
        raise ModelError(f"attention: {type(module).__name__} needs {', '.join(unknown)}, which is not supported")
    call = AttentionCall(
        module,
        query[0],
        key[0],
        value[0],
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window or None,
        softcap or None,
        others.get("sinks") if s_aux is None else s_aux,
    )
    return _attending.get()(call)[None], None


AttentionInterface.register(IMPLEMENTATION, attend_here)


def attend_densely(call: AttentionCall) -> torch.Tensor:
    """Attend among the call's own tokens, at positions 0 .. n - 1: for looking at a model, and as what pages must give.

    The whole matrix of scores is in memory.
    """
    group = call.query.shape[0] // call.key.shape[0]
    keys, values = call.key.repeat_interleave(group, 0), call.value.repeat_interleave(group, 0)
    scores = _capped(call.query @ keys.transpose(1, 2) * call.scale, call.softcap)
    positions = torch.arange(call.query.shape[1], device=call.query.device)
    scores.masked_fill_(_hidden(positions, positions, call.window), -torch.inf)
    if call.sinks is not None:
        scores = torch.cat([scores, call.sinks.reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
    weights = torch.softmax(scores.float(), -1)[..., : len(positions)].to(values.dtype)
    return (weights @ values).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a tile of tokens: consecutive tokens of one sequence, from position `start` on.

    num_rows: how many rows their product is computed with, zeros behind the tokens.
    blocks: per layer group int64 ids of the blocks of all tokens up to the last of these, made up to whole key tiles
        with the null block.
    """

    rows: slice
    start: int
    num_rows: int
    blocks: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attention of one tile of tokens over the pages, its own keys and values written first.

    Batch-invariant where the library's products of fixed shapes are: every product has the shape [KV heads, num_rows *
    heads per KV head, size] x [KV heads, size, KEY_TILE] or its counterpart for values, key tiles lie at fixed
    positions of the sequence, and what they give is added from first to last. The largest score is taken over all
    tiles first, so that a tile without a visible key adds exactly 0.

    layers: number and group of each attention module. slots: per group int64 [tokens], where they are written.
    """

    pages: TorchPages
    layers: dict[torch.nn.Module, tuple[int, int]]
    slots: Sequence[torch.Tensor]
    pieces: Sequence[Piece]

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Return [n, heads, value_dim]; rows of padding are 0."""
        layer, group = self.layers[call.module]
        num_tokens = len(self.slots[group])
        keys, values = call.key[:, :num_tokens].transpose(0, 1), call.value[:, :num_tokens].transpose(0, 1)
        self.pages.write(layer, self.slots[group], keys, values)
        num_heads, num_rows, _ = call.query.shape
        # Rows of padding stay zero: whatever they are, nobody reads them.
        attended = call.query.new_zeros(num_rows, num_heads, call.value.shape[-1])
        for piece in self.pieces:
            attended[piece.rows] = self._attend(call, piece, layer, piece.blocks[group])
        return attended

    def _attend(self, call: AttentionCall, piece: Piece, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        num_heads, _, key_dim = call.query.shape
        num_kv_heads, num_tokens = call.key.shape[0], piece.rows.stop - piece.rows.start
        group = num_heads // num_kv_heads
        # Rows of one KV head's product: the heads that read it one after the other, each with its num_rows tokens.
        queries = call.query.new_zeros(num_heads, piece.num_rows, key_dim)
        queries[:, :num_tokens] = call.query[:, piece.rows]
        queries *= call.scale
        queries = queries.view(num_kv_heads, group * piece.num_rows, key_dim)
        positions = piece.start + torch.arange(piece.num_rows, device=queries.device).clamp(max=num_tokens - 1)
        blocks_per_tile = KEY_TILE // self.pages.block_size
        first = 0 if call.window is None else max(0, piece.start - call.window + 1) // KEY_TILE
        tiles = []
        for number in range(first, len(blocks) // blocks_per_tile):
            ids = blocks[number * blocks_per_tile : (number + 1) * blocks_per_tile]
            keys, values = self.pages.read(layer, ids)
            scores = _capped(torch.bmm(queries, keys.permute(1, 2, 0).contiguous()).float(), call.softcap)
            by_head = scores.view(num_heads, piece.num_rows, KEY_TILE)
            at = torch.arange(number * KEY_TILE, (number + 1) * KEY_TILE, device=queries.device)
            by_head.masked_fill_(_hidden(positions, at, call.window), -torch.inf)
            tiles.append((by_head, values))
        largest = tiles[0][0].amax(-1)
        for scores, _ in tiles[1:]:
            largest = torch.maximum(largest, scores.amax(-1))
        if call.sinks is None:
            total = torch.zeros_like(largest)
        else:
            sinks = call.sinks.float().reshape(-1, 1)
            largest = torch.maximum(largest, sinks)
            total = torch.exp(sinks - largest)
        mixed = torch.zeros(num_kv_heads, group * piece.num_rows, call.value.shape[-1], device=queries.device)
        for scores, values in tiles:
            weights = torch.exp(scores - largest[..., None])
            total += weights.sum(-1)
            rows = weights.view(num_kv_heads, group * piece.num_rows, KEY_TILE).to(values.dtype)
            mixed += torch.bmm(rows, values.transpose(0, 1).contiguous())
        attended = mixed.view(num_heads, piece.num_rows, -1) / total[..., None]
        return attended[:, :num_tokens].transpose(0, 1).to(call.query.dtype)


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _hidden(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Whether the query at a position [q] does not see the key at another [k]: bool [q, k]."""
    age = queries[:, None] - keys
    return age < 0 if window is None else (age < 0) | (age >= window)
