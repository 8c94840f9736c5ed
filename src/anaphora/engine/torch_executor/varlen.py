"""Attention on CUDA by PyTorch's own paged kernel, `torch.nn.attention.varlen`, without split-KV.

Its documentation promises that with num_splits=1 a sequence's output has the same bits whatever else is in the batch.
This module has not been run: no CUDA device was at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch.nn.attention.varlen import varlen_attn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.engine.torch_executor.attention import AttentionCall, PagedAttention, Piece

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """The same as `PagedAttention`, which computes the layers that the kernel does not have: capped scores, sinks, keys
    and values of different sizes, float32."""

    paged: PagedAttention

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        """Return [n, heads, value_dim]; rows of padding are 0."""
        fits = call.softcap is None and call.sinks is None and call.key.shape[-1] == call.value.shape[-1]
        if not fits or call.query.dtype not in HALF:
            return self.paged(call)
        paged, pieces = self.paged, self.paged.pieces
        layer, group = paged.layers[call.module]
        num_tokens = len(paged.slots[group])
        keys, values = call.key[:, :num_tokens].transpose(0, 1), call.value[:, :num_tokens].transpose(0, 1)
        paged.pages.write(layer, paged.slots[group], keys, values)
        device = call.query.device
        lengths = [piece.rows.stop - piece.rows.start for piece in pieces]
        ends = [piece.start + length for piece, length in zip(pieces, lengths, strict=True)]
        out: torch.Tensor = varlen_attn(
            call.query[:, :num_tokens].transpose(0, 1).contiguous(),
            paged.pages.keys[layer],
            paged.pages.values[layer],
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
            None,
            max(lengths),
            max(ends),
            scale=call.scale,
            # The kernel counts the tokens to the left of a token, we the token too.
            window_size=(-1 if call.window is None else call.window - 1, 0),
            enable_gqa=call.query.shape[0] != call.key.shape[0],
            seqused_k=torch.tensor(ends, dtype=torch.int32, device=device),
            block_table=_tables(pieces, group, device),
            num_splits=1,
        )
        attended = out.new_zeros(call.query.shape[1], *out.shape[1:])
        attended[:num_tokens] = out
        return attended


def _tables(pieces: Sequence[Piece], group: int, device: torch.device) -> torch.Tensor:
    tables = [piece.blocks[group] for piece in pieces]
    width = max(map(len, tables))
    table = torch.zeros(len(tables), width, dtype=torch.int32, device=device)
    for row, blocks in zip(table, tables, strict=True):
        row[: len(blocks)] = blocks
    return table
