"""What cannot be, refused by all in the same words: an executor over another kind of manager; pages, copies, spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from anaphora.engine.executor import KeepsHostBlocks
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from array import array
    from collections.abc import Collection, Sequence

    from anaphora.cache.manager import KVCacheManager
    from anaphora.engine.executor import Batch, Executor, Span


def check_fit(executor: Executor, manager: KVCacheManager) -> None:
    """Raise ValueError for an executor that cannot run over a manager's blocks."""
    if manager.block_size not in executor.block_sizes:
        raise ValueError(f"block_size: {manager.block_size} is not allowed; allowed are {executor.block_sizes}")
    num_groups, num_tables = len(executor.layer_groups), len(manager.start(bytes(TOKEN_BYTES)).block_tables)
    if num_groups != num_tables:
        raise ValueError(f"executor: it has {num_groups} layer groups; the manager keeps tables for {num_tables}")
    if manager.num_host_blocks and not isinstance(executor, KeepsHostBlocks):
        raise ValueError("executor: it keeps no blocks in host memory; the manager has some")


def check_pages(num_blocks: int, block_size: int, block_sizes: Sequence[int]) -> None:
    """Raise ValueError for num_blocks below 1, or a block size that is not in `block_sizes`."""
    if num_blocks < 1:
        raise ValueError(f"num_blocks: {num_blocks} is not allowed; it must be at least 1")
    if block_size not in block_sizes:
        raise ValueError(f"block_size: {block_size} is not allowed; it must be one of {block_sizes}")


def check_copies(pairs: Sequence[tuple[int, int]], num_sources: int, num_targets: int | None = None) -> None:
    """Raise ValueError for a page that does not exist, or the null block as the target. Targets are as many as sources
    unless `num_targets` says otherwise."""
    last = num_sources if num_targets is None else num_targets
    for source, target in pairs:
        if not (0 <= source <= num_sources and 1 <= target <= last):
            raise ValueError(
                f"pairs: ({source}, {target}) is not allowed; the source must be 0 .. {num_sources}, "
                f"the target 1 .. {last}"
            )


def check_batch(
    batch: Batch,
    *,
    vocab_size: int,
    max_context: int,
    num_blocks: int,
    block_size: int,
    windows: Sequence[int | None] = (None,),
    adapters: Collection[str] = (),
) -> None:
    """Raise ValueError for a span that cannot be computed, with one of `adapters` or none.

    windows: per layer group its attention window in tokens, None for full attention.
    The message names the span's index and field, and says what is allowed.
    """
    for index, span in enumerate(batch.spans):
        _check_span(f"spans[{index}]", span, vocab_size, max_context, num_blocks, block_size, windows)
        if span.adapter is not None and span.adapter not in adapters:
            raise ValueError(f"spans[{index}].adapter: {span.adapter!r} is not allowed; no such adapter is loaded")
    for index in range(len(batch.shared)):
        _check_group(index, batch, block_size)


def _check_group(index: int, batch: Batch, block_size: int) -> None:
    name, spans = f"shared[{index}]", batch.spans
    members, num_blocks = batch.shared[index]
    if len(set(members)) < max(2, len(members)) or not 0 <= min(members) <= max(members) < len(spans):
        raise ValueError(f"{name}: members {members} are not allowed; it must be two or more of the {len(spans)} spans")
    most = min(-(-(spans[i].start + len(spans[i].tokens)) // block_size) for i in members)
    if not 1 <= num_blocks <= most:
        raise ValueError(f"{name}: {num_blocks} blocks in common are not allowed; the shortest member has {most}")
    first = spans[members[0]].block_tables[0][:num_blocks]
    for i in members:
        if spans[i].block_tables[0][:num_blocks] != first:
            raise ValueError(f"{name}: spans {members[0]} and {i} do not begin with the same {num_blocks} blocks")
    for other, _ in batch.shared[:index]:
        if (overlap := set(members) & set(other)) and overlap not in (set(members), set(other)):
            raise ValueError(f"{name}: members {members} are neither apart from {other} nor nested with them")


def _check_span(
    name: str,
    span: Span,
    vocab_size: int,
    max_context: int,
    num_blocks: int,
    block_size: int,
    windows: Sequence[int | None],
) -> None:
    tokens = span.tokens
    if not (isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.dtype == np.int32 and len(tokens)):
        raise ValueError(f"{name}.tokens: expected int32 [n] with n >= 1")
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"{name}.tokens: id {wrong} is not allowed; ids are 0 .. {vocab_size - 1}")
    end = span.start + len(tokens)
    if span.start < 0 or end > max_context:
        raise ValueError(
            f"{name}.start: positions {span.start} .. {end - 1} are not allowed; "
            f"this model's are 0 .. {max_context - 1}"
        )
    if not 0 <= span.num_logits <= len(tokens):
        raise ValueError(f"{name}.num_logits: {span.num_logits} is not allowed; it must be 0 .. {len(tokens)}")
    if len(span.block_tables) != len(windows):
        tables = "1 table (one layer group)" if len(windows) == 1 else f"{len(windows)} tables, one per layer group"
        raise ValueError(f"{name}.block_tables: expected {tables}, got {len(span.block_tables)}")
    for group, (table, window) in enumerate(zip(span.block_tables, windows, strict=True)):
        first = 0 if window is None else max(0, span.start - window + 1) // block_size
        _check_table(f"{name}.block_tables[{group}]", table, first, end, num_blocks, block_size)


def _check_table(name: str, table: array[int], first: int, end: int, num_blocks: int, block_size: int) -> None:
    """Raise ValueError unless the table has the blocks of `end` tokens; before block number `first`, any."""
    num_needed = -(-end // block_size)
    if len(table) < num_needed:
        raise ValueError(f"{name}: {end} tokens need {num_needed} blocks of {block_size}, got {len(table)}")
    needed = table[first:num_needed]
    if min(needed) < 1 or max(needed) > num_blocks:
        wrong = min(needed) if min(needed) < 1 else max(needed)
        raise ValueError(f"{name}: block {wrong} is not allowed; ids are 1 .. {num_blocks}")
