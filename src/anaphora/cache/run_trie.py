"""RunTrie: what is known under each namespace, as a tree of runs.

A prefix is known because its last block is cached, because something longer is known, or because a sequence stands
there. Matching compares tokens, so it is exact. Names are made when somebody asks for them, once for each block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from anaphora.cache.index import require
from anaphora.cache.prefix import Prefix
from anaphora.cache.run import NONE, Root, Run
from anaphora.cache.segments import Segments
from anaphora.identity import extra_keys
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Iterator
    from collections.abc import Sequence as SequenceOf

    from anaphora.cache.segments import Label
    from anaphora.identity import BlockDigests, Media, Namespace


class Span(NamedTuple):
    """Consecutive positions of one run: first .. end - 1."""

    run: Run
    first: int
    end: int


class RunTrie:
    """The runs of every namespace.

    A place in it is a run and a position, `run.depth + position` blocks deep. Where a child begins, the place is its
    parent's.

    Cost, for r = runs on a path: walk O(r) + one memcmp; add O(1) + one memcpy; trim amortised O(1) a block.
    """

    def __init__(self, block_size: int, num_groups: int, digests: BlockDigests) -> None:
        self.roots: dict[Namespace, Root] = {}
        self.width = block_size * TOKEN_BYTES
        self._block_size = block_size
        self._num_groups = num_groups
        self._digests = digests

    def root(self, namespace: Namespace) -> Root:
        """Return a namespace's root, made if need be; somebody is about to stand there."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace)
        return root

    def label_at(self, run: Run, position: int) -> Label:
        """Return the label of a run's block."""
        tokens = bytes(run.key[position * self.width : (position + 1) * self.width])
        content = run.content_at(position)
        return tokens if content is None else (tokens, content)

    def continuations(self, run: Run, position: int) -> Iterator[tuple[bytes, int]]:
        """Yield the blocks without media that are cached at a place, as (tokens, id)."""
        if position < run.num_blocks and run.content is None and run.columns[0][position]:
            yield bytes(run.key[position * self.width : (position + 1) * self.width]), run.columns[0][position]
        for label, kid in run.kids.get(position, {}).items():
            if isinstance(label, bytes) and kid.columns[0][0]:
                yield label, kid.columns[0][0]

    def walk(self, sequence: Prefix, run: Run, at: int, last: int) -> list[Span]:
        """Follow a sequence's blocks `at` .. `last` - 1 from a place on, for as long as they are known, cached or not.
        Changes nothing."""
        spans: list[Span] = []
        position = at - run.depth
        tokens, segments, width = sequence.tokens, sequence.segments, self.width
        content, stop = None, last
        while at < last:
            if segments is not None:
                content, end = segments.at(at)
                stop = min(last, end)
            limit = min(run.num_blocks - position, stop - at)
            if limit > 0 and (run.content is content is None or run.content_at(position) == content):
                num_equal = run.num_equal(tokens, at, position, limit, width)
                if num_equal:
                    spans.append(Span(run, position, position + num_equal))
                    at += num_equal
                    position += num_equal
                    if num_equal == limit:
                        continue
            if position not in run.kids:
                break
            kid = run.kid(position, sequence.label(at, self.width))
            if kid is None:
                break
            run, position = kid, 0
        return spans

    def add(self, sequence: Prefix, run: Run, at: int, last: int) -> list[Span]:
        """Make a sequence's blocks `at` .. `last` - 1 known, of which not even the first is, below a place. The caller
        fills the columns, all of the same length.

        A leaf whose key can grow does. That of a whole prompt cannot: others begin as it does, and go on otherwise.
        """
        spans: list[Span] = []
        tokens, segments, width = sequence.tokens, sequence.segments, self.width
        while at < last:
            position = at - run.depth
            if type(run.key) is bytearray and position == run.num_blocks and not run.kids and segments is None:
                run.grow(tokens[at * width : last * width], width)
                spans.append(Span(run, position, last - run.depth))
                break
            end = last if segments is None else min(last, segments.at(at)[1])
            label = sequence.label(at, self.width)
            key = tokens[at * width : end * width]
            if type(key) is bytes:
                if end < len(tokens) // width and segments is None:
                    key = bytearray(key)  # more of the prompt will follow, in place
                elif key == label:
                    key = label  # one object for both
            kid = Run(run, at, label, key, self._num_groups)
            if run.kids is NONE:
                run.kids = {}
            run.kids.setdefault(position, {})[label] = kid
            spans.append(Span(kid, 0, end - at))
            run, at = kid, end
        return spans

    def place(self, run: Run, depth: int) -> tuple[Run, int]:
        """Return the place at a depth on the path to a run."""
        while run.parent is not None and run.depth >= depth:
            run = run.parent
        return run, depth - run.depth

    def prefix_of(self, run: Run, position: int) -> Prefix:
        """Return all that is before a place. Cost: O(runs) + one memcpy."""
        namespace = self._namespace(run)
        path: list[tuple[Run, int]] = []
        while run.parent is not None:
            path.append((run, position))
            position = run.depth - run.parent.depth
            run = run.parent
        path.reverse()
        tokens = b"".join(bytes(memoryview(run.key)[: end * self.width]) for run, end in path)
        if all(run.content is None for run, _ in path):
            return Prefix(tokens, namespace)
        return Prefix(tokens, namespace, Segments.joined((end, run.content) for run, end in path))

    # -- what is of no use -----------------------------------------------------------------------------------------

    def stand(self, run: Run, position: int) -> None:
        """A sequence stands at a place; so that stays known."""
        if run.standing is NONE:
            run.standing = {}
        run.standing[position] = run.standing.get(position, 0) + 1

    def leave(self, run: Run, position: int) -> None:
        """It stands there no more; what has become of no use goes."""
        rest = run.standing.pop(position) - 1
        if rest:
            run.standing[position] = rest
            return
        run.standing = run.standing or NONE
        if position == run.num_blocks:
            self.trim(run)

    def trim(self, run: Run) -> None:
        """Shorten a run to its last position that is of use, or take it away, and so on above it."""
        while run.parent is not None:
            if run.columns[0][-1]:
                return
            end = 0
            if run.kids or run.standing:
                end = max(max(run.kids, default=0), max(run.standing, default=0))
            for num_cached, column in zip(run.num_cached, run.columns, strict=True):
                if num_cached:
                    end = _end_of_cached(column, end)
            if end:
                if end < run.num_blocks:
                    run.shorten(end, self.width)
                return
            parent = run.parent
            position = run.depth - parent.depth
            kids = parent.kids[position]
            del kids[run.label]
            if kids:
                return
            del parent.kids[position]
            parent.kids = parent.kids or NONE
            if position < parent.num_blocks:
                return
            run = parent
        if not run.kids and not run.standing:
            del self.roots[self._namespace(run)]

    # -- names -----------------------------------------------------------------------------------------------------

    def names(self, run: Run, num_blocks: int, media: SequenceOf[Media] = ()) -> list[bytes]:
        """Return the digests that a run has, at least of its first `num_blocks` blocks; those of its ancestors are made
        too. `media` are those of the sequence that has just made the run."""
        path: list[tuple[Run, int]] = []
        node, end = run, num_blocks
        while node.parent is not None and (node.digests is None or len(node.digests) < end):
            path.append((node, end))
            end = node.depth - node.parent.depth
            node = node.parent
        for part, last in reversed(path):
            digests = part.digests = part.digests or []
            first = part.depth + len(digests)
            extras = extra_keys(self._namespace(run), media, first, last - len(digests), self._block_size)
            parent = digests[-1] if digests else self.name_before(part)
            tokens = bytes(memoryview(part.key)[len(digests) * self.width : last * self.width])
            digests += self._digests.chain(parent, tokens, self._block_size, extras)
        return run.digests or []

    def name_before(self, run: Run) -> bytes:
        """Return the digest of what a run continues, whose own must have been made."""
        parent = run.parent
        assert parent is not None
        if isinstance(parent, Root):
            return self._digests.root(parent.namespace)
        assert parent.digests is not None
        return parent.digests[run.depth - parent.depth - 1]

    def path_names(self, run: Run, position: int) -> list[bytes]:
        """Return the digests of all blocks up to a place."""
        parts: list[list[bytes]] = []
        while run.parent is not None:
            parts.append(self.names(run, position)[:position])
            position = run.depth - run.parent.depth
            run = run.parent
        return [name for part in reversed(parts) for name in part]

    @staticmethod
    def _namespace(run: Run) -> Namespace:
        assert isinstance(run.root, Root)
        return run.root.namespace

    # -- the whole -------------------------------------------------------------------------------------------------

    def runs(self) -> Iterator[Run]:
        """Every run, the roots included; parents before their children."""
        stack: list[Run] = list(self.roots.values())
        while stack:
            run = stack.pop()
            yield run
            for kids in run.kids.values():
                stack.extend(kids.values())

    def cached(self) -> Iterator[tuple[Run, int, int, list[int]]]:
        """Yield (run, position, group, blocks) wherever blocks are cached, the one that is served first."""
        for run in self.runs():
            for group, column in enumerate(run.columns):
                for position, block in enumerate(column):
                    if block:
                        yield run, position, group, [block, *(run.copies or {}).get((group, position), ())]

    def check(self, standing: dict[tuple[Run, int], int]) -> None:
        """Assert every invariant of the tree, given how many sequences stand where. Raises InvariantError."""
        require(not NONE, "something was put into what all runs share")
        seen: dict[tuple[Run, int], int] = {}
        for run in self.runs():
            num_blocks = run.num_blocks
            seen.update(((run, position), num) for position, num in run.standing.items())
            for position, kids in run.kids.items():
                require(bool(kids), "a place without children was kept as one with some")
                require(0 <= position <= num_blocks, "a child hangs below a position that its parent has not")
                for label, kid in kids.items():
                    require(kid.parent is run and kid.root is run.root, "a child has another parent")
                    require(kid.label == label, "a child is not where its label says")
                    require(kid.depth == run.depth + position, "a child is not as deep as it says")
                    is_next = position < num_blocks and label == self.label_at(run, position)
                    require(not is_next, "a child begins as its parent goes on")
            if isinstance(run, Root):
                require(self.roots.get(run.namespace) is run, "a root of another namespace")
                require(run.parent is None and not num_blocks, "a root has blocks, or a parent")
                require(bool(run.kids or run.standing), "a namespace of which nothing is known was kept")
                continue
            require(num_blocks > 0, "a run without blocks was kept")
            require(run.parent is not None and 0 not in run.kids, "a child hangs where its parent begins")
            require({len(column) for column in run.columns} == {num_blocks}, "columns differ in length")
            size = num_blocks * self.width
            require(size <= len(run.key) <= 2 * size, "a key is too short for its blocks, or keeps too much")
            require(run.label == self.label_at(run, 0), "a label is not what the first block says")
            require(len(run.digests or ()) <= num_blocks, "there are more names than blocks")
            require(run.num_cached == [len(column) - column.count(0) for column in run.columns], "a count of blocks")
            of_use = num_blocks in run.kids or num_blocks in run.standing or any(c[-1] for c in run.columns)
            require(of_use, "a position of no use was kept")
            for (group, position), copies in (run.copies or {}).items():
                require(bool(copies) and run.columns[group][position] > 0, "copies of what is not served")
        require(seen == standing, "the count of those who stand somewhere is wrong")


def _end_of_cached(column: array[int], least: int) -> int:
    """Return the position after a column's last block, or `least` if that is more. Searches bytes from the end."""
    end, size = len(column), 64
    while end > least:
        start = max(least, end - size)
        rest = column[start:end].tobytes().rstrip(b"\0")
        if rest:
            return start - (-len(rest) // column.itemsize)
        end, size = start, size * 4
    return least


def extending(places: Iterable[tuple[Run, int]]) -> dict[Run, int]:
    """Return per run the first position from which on it is one of these places or extends one."""
    firsts: dict[Run, int] = {}
    stack = list(places)
    while stack:
        run, first = stack.pop()
        if run in firsts and firsts[run] <= first:
            continue
        firsts[run] = first
        stack.extend((kid, 0) for position, kids in run.kids.items() if position > first for kid in kids.values())
    return firsts
