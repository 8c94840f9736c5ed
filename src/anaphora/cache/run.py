"""Runs: consecutive blocks of one prefix, known together, and what else begins as they do.

    roots: Namespace -> root
                          |  at 0
          "You are a helpful assistant. What is ..."      columns [7 8 9 0 4]
                     | at 2                 | at 5
            "Write ..." [12 13]      "Thanks! And ..." [20 21]

A run is never split: what diverges inside it hangs at the position where it does. So a block keeps its run and its
position for as long as it is cached.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any
from zlib import crc32

from anaphora.cache.radix_tree import count_equal_blocks

if TYPE_CHECKING:
    from anaphora.cache.segments import BlockContent, Label
    from anaphora.identity import Namespace

CHECKSUM_STRIDE = 16
"""Blocks between the checksums that a run keeps."""

NONE: dict[int, Any] = {}
"""What all runs share that have no children, or where nobody stands. Nothing is ever put in."""


class Run:
    """A stretch of consecutive whole blocks that follow a prefix. Positions count blocks from its beginning.

    parent: what it continues, from position `depth - parent.depth` on; None for a root. root: the top of its tree.
    depth: blocks before its first one.
    label: what its parent finds it by: its first block's tokens, with that block's media if it has any.
    content: the media that its first block lies in, as does every other of its blocks; None for a run of plain ones.
    key: the tokens of its blocks; may be longer than those, never by more than their size.
    columns: per layer group and position the block that is served, 0 where none is cached.
    copies: for a (group, position) the other blocks of the same content, in the order of insertion. Where there are
        any, a block is served.
    num_cached: per layer group how many blocks are served.
    kids: by position, those that go on from there otherwise than the run itself. standing: how many sequences have
        their last indexed block right before a position.
    digests: names of its first blocks, as many as have been asked for.
    """

    __slots__ = (
        "columns",
        "content",
        "copies",
        "depth",
        "digests",
        "key",
        "kids",
        "label",
        "num_cached",
        "parent",
        "root",
        "standing",
        "sums",
    )

    def __init__(self, parent: Run | None, depth: int, label: Label, key: bytes | bytearray, num_groups: int) -> None:
        self.parent = parent
        self.root: Run = self if parent is None else parent.root
        self.depth = depth
        self.label = label
        self.content = None if isinstance(label, bytes) else label[1]
        self.key = key
        self.columns: tuple[array[int], ...] = tuple([array("i") for _ in range(num_groups)])
        self.num_cached = [0] * num_groups
        self.copies: dict[tuple[int, int], list[int]] | None = None
        self.kids: dict[int, dict[Label, Run]] = NONE
        self.standing: dict[int, int] = NONE
        self.digests: list[bytes] | None = None
        self.sums: list[int] | None = None

    @property
    def num_blocks(self) -> int:
        """Positions, whether cached or not."""
        return len(self.columns[0])

    def content_at(self, position: int) -> BlockContent | None:
        """Return the media that a block lies in, as seen from that block."""
        return self.content and self.content.after(position)

    def kid(self, position: int, label: Label) -> Run | None:
        """Return the run that goes on from a position with a block of this label."""
        kids = self.kids.get(position)
        return None if kids is None else kids.get(label)

    def is_cached(self, position: int) -> bool:
        """Whether any group has a block there."""
        return position < self.num_blocks and any(column[position] for column in self.columns)

    def place(self, group: int, position: int, block: int) -> None:
        """Put a block, unless it is the null block, where its content is known already; the earliest is served."""
        column = self.columns[group]
        if not column[position]:
            column[position] = block
            self.num_cached[group] += block > 0
        elif block:
            self.copies = self.copies or {}
            self.copies.setdefault((group, position), []).append(block)

    def withdraw(self, group: int, position: int, block: int) -> None:
        """Take one block out; where there are copies, the next of them is served."""
        column = self.columns[group]
        copies = self.copies.get((group, position)) if self.copies is not None else None
        if copies is None:
            column[position] = 0
            self.num_cached[group] -= 1
            return
        if column[position] == block:
            column[position] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            assert self.copies is not None
            del self.copies[group, position]
            self.copies = self.copies or None

    def blocks_from(self, first: int) -> list[int]:
        """Return every block from a position on, of all groups, copies too."""
        blocks = [block for column in self.columns for block in column[first:] if block]
        for (_, position), copies in (self.copies or {}).items():
            if position >= first:
                blocks += copies
        return blocks

    def num_equal(self, tokens: bytes | bytearray, at: int, position: int, limit: int, width: int) -> int:
        """Return how many blocks from `position` on, at most `limit`, equal those of `tokens` from block `at` on."""
        key: bytes | bytearray | memoryview = self.key
        if len(key) != limit * width:
            key = memoryview(key)[position * width : (position + limit) * width]
        if tokens.startswith(key, at * width):
            return limit
        return count_equal_blocks(tokens, at * width, key, limit * width, width)

    def grow(self, tokens: bytes | bytearray, width: int) -> None:
        """Make the key, a bytearray, longer; the columns follow."""
        assert isinstance(self.key, bytearray)
        del self.key[self.num_blocks * width :]
        self.key += tokens

    def shorten(self, num_blocks: int, width: int) -> None:
        """Forget all from a position on, where nothing is cached. Cost: amortised O(1) a block."""
        for column in self.columns:
            del column[num_blocks:]
        size = num_blocks * width
        if size * 2 < len(self.key):
            self.key = self.key[:size]
        if self.digests is not None:
            del self.digests[num_blocks:]
        if self.sums is not None:
            del self.sums[num_blocks // CHECKSUM_STRIDE + 1 :]

    def checksum(self, position: int, width: int) -> int:
        """Return the CRC of all tokens before a position, from the prompt's first on, with the media at each run's
        beginning mixed in. Cost: O(CHECKSUM_STRIDE), and once O(blocks)."""
        if self.sums is not None:
            return self._checksum(self.sums, position, width)
        path: list[tuple[Run, int]] = []
        run: Run | None = self
        while run is not None:
            path.append((run, position))
            if run.parent is None or run.sums is not None:
                break
            position = run.depth - run.parent.depth
            run = run.parent
        result = 0
        for run, end in reversed(path):
            if run.sums is None:
                run.sums = [result if run.content is None else crc32(repr(run.content).encode(), result)]
            result = run._checksum(run.sums, end, width)
        return result

    def _checksum(self, sums: list[int], position: int, width: int) -> int:
        key = memoryview(self.key)
        stride = CHECKSUM_STRIDE * width
        while len(sums) * CHECKSUM_STRIDE <= position:
            end = len(sums) * stride
            sums.append(crc32(key[end - stride : end], sums[-1]))
        start = position // CHECKSUM_STRIDE
        return crc32(key[start * stride : position * width], sums[start])


class Root(Run):
    """The empty prefix of a namespace: a run without blocks."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, 0, b"", b"", 1)
        self.namespace = namespace
