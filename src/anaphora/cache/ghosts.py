"""Ghosts: blocks that were evicted lately, remembered so that `explain` can tell evicted from never cached."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anaphora.cache.run import Root, Run

if TYPE_CHECKING:
    from anaphora.cache.prefix import Prefix
    from anaphora.cache.run_trie import RunTrie
    from anaphora.cache.segments import BlockContent
    from anaphora.identity import Namespace


@dataclass(slots=True)
class _Stretch:
    """Consecutive blocks of one run that were evicted: first .. end - 1, counted from where `tokens` begin.

    depth: blocks before `tokens`; checksum: of what those hold. content: the media that the block at `depth` lies in.
    size: blocks' worth of memory that `tokens` keep.
    """

    namespace: Namespace
    depth: int
    checksum: int
    tokens: bytes
    content: BlockContent | None
    first: int
    end: int
    size: int


class Ghosts:
    """The last blocks that were evicted, in stretches. Keeps tokens of `limit` blocks, and nothing of the tree.

    What comes before a stretch is compared by a checksum: this explains, and serves nothing.
    Cost: O(1), or a copy of the tokens and a checksum, for each stretch; O(stretches) to ask.
    """

    def __init__(self, limit: int, trie: RunTrie) -> None:
        self._limit = limit
        self._trie = trie
        self._width = trie.width
        self._stretches: deque[_Stretch] = deque()
        self._size = 0
        self._latest: Run | None = None

    def __len__(self) -> int:
        """Blocks whose tokens are kept."""
        return self._size

    def remember(self, run: Run, first: int, end: int) -> None:
        """The blocks first .. end - 1 of a run are about to go, the last one first."""
        key, start = run.key, 0
        if run is self._latest and self._stretches[-1].tokens is key and self._stretches[-1].first == end:
            self._stretches[-1].first = first  # more of what went last
            return
        self._latest = run
        assert isinstance(run.root, Root)
        width = self._width
        end = min(end, first + self._limit)
        # The key itself costs nothing to keep, if it is mostly these blocks and will not change.
        if type(key) is not bytes or (end - first) * 2 * width < len(key):
            key, start = bytes(memoryview(key)[first * width : end * width]), first
        size = len(key) // width
        if start:
            checksum = run.checksum(start, width)
        else:
            checksum = run.parent.checksum(run.depth - run.parent.depth, width) if run.depth and run.parent else 0
        content = run.content_at(start)
        self._stretches.append(
            _Stretch(run.root.namespace, run.depth + start, checksum, key, content, first - start, end - start, size)
        )
        self._size += size
        while self._size > self._limit and len(self._stretches) > 1:
            self._size -= self._stretches.popleft().size

    def has(self, sequence: Prefix, run: Run | None, num_blocks: int) -> bool:
        """Whether the block after a sequence's first `num_blocks`, which end in `run`, is among them."""
        width = self._width
        for stretch in self._stretches:
            depth = stretch.depth
            if not depth + stretch.first <= num_blocks < depth + stretch.end:
                continue
            own = sequence.tokens[depth * width : (num_blocks + 1) * width]
            if len(own) != (num_blocks + 1 - depth) * width or not stretch.tokens.startswith(own):
                continue
            content, end = sequence.segments.at(depth) if sequence.segments is not None else (None, num_blocks + 1)
            if stretch.namespace != sequence.namespace or stretch.content != content or end <= num_blocks:
                continue
            if not depth:
                return True
            if run is not None:
                above, position = self._trie.place(run, depth)
                if above.checksum(position, width) == stretch.checksum:
                    return True
        return False

    def clear(self) -> None:
        """Forget all of them."""
        self._stretches.clear()
        self._size = 0
        self._latest = None
