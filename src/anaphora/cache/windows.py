"""Windows: what each layer group needs of a prefix, and what it has left behind.

A model's layers come in groups that share one block table each: full attention needs every block; a sliding window of w
tokens needs those that hold the w - 1 tokens before the next one; a state layer needs the last block alone, as a window
of two tokens does. A hit must be one that every group can serve. The rules are vLLM's (0.32).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from anaphora.cache.sequence import Sequence as TokenSequence


class Windows:
    """The windows of a model's layer groups.

    Args:
        windows: per group its window in tokens, None for full attention.
        block_size: tokens in a block.
        retention: which blocks of window groups stay findable: None all; 0 only those that a prompt sent again, or a
            prefix shared with another prompt, needs; n those and the ones needed at every n tokens.
    """

    def __init__(self, windows: Sequence[int | None], block_size: int, retention: int | None = None) -> None:
        if not isinstance(windows, Sequence):
            raise TypeError(f"windows: expected a sequence with one entry per layer group, got {windows!r}")
        if not windows:
            raise ValueError("windows: expected at least one layer group")
        for group, window in enumerate(windows):
            if window is not None and (not isinstance(window, int) or window < 2):
                raise ValueError(
                    f"windows[{group}]: expected at least 2 tokens, or None for full attention, got {window!r}"
                )
        if retention is not None and (retention.__class__ is not int or retention < 0 or retention % block_size):
            raise ValueError(f"window_retention: expected None or a multiple of {block_size}, got {retention!r}")
        self.num_groups = len(windows)
        self.full_groups = tuple(group for group, window in enumerate(windows) if window is None)
        self.window_groups = tuple((group, window) for group, window in enumerate(windows) if window is not None)
        self.is_plain = self.num_groups == 1 and not self.window_groups
        """Whether there is one group, and it attends to everything."""
        self._block_size = block_size
        self._retention = retention

    def num_needed(self, window: int) -> int:
        """Blocks that must be there before the point where computing goes on."""
        return -(-(window - 1) // self._block_size)

    def fit(self, num_blocks: int, is_cached: Callable[[int, int], bool]) -> int:
        """Return the longest prefix, at most `num_blocks` blocks, that every group can serve.

        `is_cached(group, position)` says whether a window group has the block. Cost: O(blocks that are missing).
        """
        settled = False
        while not settled:
            settled = True
            for group, window in self.window_groups:
                fitting = self._fit(num_blocks, self.num_needed(window), group, is_cached)
                settled = settled and (fitting == num_blocks or len(self.window_groups) == 1)
                num_blocks = fitting
        return num_blocks

    @staticmethod
    def _fit(num_blocks: int, num_needed: int, group: int, is_cached: Callable[[int, int], bool]) -> int:
        run = 0
        for position in range(num_blocks - 1, -1, -1):
            run = run + 1 if is_cached(group, position) else 0
            if run == num_needed:
                return position + num_needed
        return run  # no whole window, but all from the beginning on

    def first_needed(self, num_blocks: int) -> list[int]:
        """Per group the first block that a hit of `num_blocks` needs; before it stand null blocks."""
        firsts = [0] * self.num_groups
        for group, window in self.window_groups:
            firsts[group] = max(0, num_blocks - self.num_needed(window))
        return firsts

    def left_behind(self, num_computed_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield per window group how many leading blocks no later token will look at."""
        for group, window in self.window_groups:
            first = (num_computed_tokens - window + 1) // self._block_size
            if first > 0:
                yield group, first

    def retained(self, group: int, sequence: TokenSequence, first: int, last: int) -> Container[int]:
        """Return which of a group's blocks first .. last - 1 stay findable."""
        window = dict(self.window_groups).get(group)
        if window is None or self._retention is None:
            return range(first, last)
        ends = {(sequence.num_prompt_tokens - 1) // self._block_size, sequence.num_shared_blocks}
        if self._retention:
            step = self._retention // self._block_size
            ends.update(range(first - first % step, last + step + self.num_needed(window), step))
        return {position for end in ends for position in range(end - self.num_needed(window), end)}
