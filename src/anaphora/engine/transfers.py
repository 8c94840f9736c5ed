"""What a KVCacheManager wants moved, moved by an executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.engine.executor import KeepsHostBlocks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anaphora.cache.transfers import Transfer
    from anaphora.engine.executor import Executor


def make_transfers(executor: Executor, transfers: Iterable[Transfer]) -> None:
    """Move what `take_transfers` returned, in order. To be done before the step's batch is executed.

    Raises whatever the executor does; then some of them may have been made.
    """
    for kind, pairs in transfers:
        if kind == "copy":
            executor.copy_blocks(pairs)
            continue
        assert isinstance(executor, KeepsHostBlocks)
        if kind == "save":
            executor.save_blocks(pairs)
        else:
            executor.load_blocks(pairs)
