"""Adaptive: evict what is least worth the memory that it holds, judged by how such prefixes were used again so far.

Every request that ends leaves a path of nodes behind, and the tree tells what kind of prefix each of them is now: one
conversation's own, by its turn and by how much the turn added; shared by several conversations, by how long it uses to
stand idle; or left behind, where the next turn branched off before its end. `reuse` counts per kind how often and at
what age such prefixes are used again, those included that had been evicted meanwhile, since a small cache never sees
the late reuses that it should have waited for. The leaf whose kind and age are worth least goes first, and among equals
the one that was used longest ago.

    leaves     in one heap per *cell*, a kind and a bin of age, the oldest at the top. Two heaps list the cells: by
               worth, and by when their oldest leaf outgrows the bin. All heaps are lazy: what no longer holds is
               dropped when it comes up, and everything is entered anew when such entries outnumber the nodes.
    the past   of a node (`Past`): last use, kind, turn. It outlives the node: an evicted node becomes a *ghost*, its
               past kept by name below the past of its parent, with a few fingerprints to recognise its blocks by. A
               path that is computed again takes the pasts of its ghosts over. The latest NUM_GHOSTS are kept.

Cost: O(nodes of its path) a request that ends, O(log n) amortised a node let go or evicted; a leaf moves from bin to
bin at most 16 times. Memory: a past per node and ghost, some 300 bytes, and a few kilobytes per kind, of which there
are about a hundred.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, cast

from anaphora.cache.node import LruOrder
from anaphora.cache.reuse import BIN_START_S, NUM_BINS, Reuse, age_bin

if TYPE_CHECKING:
    from collections.abc import Callable

    from anaphora.cache.node import Node, Root
    from anaphora.cache.reuse import Kind, ReuseKind

NUM_GHOSTS = 8_192
"""Evicted nodes that are remembered: about 4,096 requests' worth."""
GAP_WEIGHT = 0.25
"""Of the newest idle time in a shared prefix's smoothed one."""
LEFT_BEHIND: Kind = ("left behind",)


@dataclass(frozen=True, slots=True)
class Adaptive:
    """What is least worth its memory first, as learned from uses so far. clock: the manager's, filled in by it."""

    clock: Callable[[], float] = time.monotonic


class Past:
    """What is remembered of a node, or of a ghost.

    kind, last_use_s, use: of its last use, and that use's serial number. entry: serial number of its entry in a cell.
    end: depth of its end at that use, in blocks.
    gap_s: how long it uses to stand idle. num_conversations: first turns that went through it.
    turn: that of the request that ended here; 0 if none did, or another one has gone on from there.
    prompt_end: depth of the last whole block of that request's prompt.
    ghosts: evicted nodes that extend it, by name.
    above, name: of a ghost, whose ghost it is, and under which name. marks: its fingerprints, by depth.
    lost: the ghost of what was trimmed off the node's end.
    """

    __slots__ = (
        "above",
        "end",
        "entry",
        "gap_s",
        "ghosts",
        "kind",
        "last_use_s",
        "lost",
        "marks",
        "name",
        "num_conversations",
        "prompt_end",
        "turn",
        "use",
    )

    def __init__(self, kind: Kind = (), last_use_s: float = 0.0, use: int = 0) -> None:
        self.kind = kind
        self.last_use_s = last_use_s
        self.use = use
        self.entry = 0
        self.end = 0
        self.gap_s = 0.0
        self.num_conversations = 0
        self.turn = 0
        self.prompt_end = 0
        self.ghosts: dict[int, Past] | None = None
        self.above: Past | None = None
        self.name = 0
        self.marks: tuple[tuple[int, int], ...] = ()
        self.lost: Past | None = None

    def head(self, end: int) -> Past:
        """Return the past of a first part of the node, up to depth `end`: used alike, but no request ended there."""
        head = Past(self.kind, self.last_use_s, self.use)
        head.gap_s = self.gap_s
        head.num_conversations = self.num_conversations
        head.end = end
        if end >= self.prompt_end - 1:
            # Whoever goes on from here goes on from that request all the same: answers are not always tokenised again
            # as they were generated, and the last block of a prompt may end in what only opens the answer.
            head.turn, head.prompt_end = self.turn, self.prompt_end
        return head


class Cell:
    """The leaves of one kind in one bin of age: a heap of (last use, serial number, node).

    due_s: when the oldest of them outgrows the bin.
    """

    __slots__ = ("bin", "due_s", "kind", "leaves")

    def __init__(self, kind: ReuseKind, b: int) -> None:
        self.kind = kind
        self.bin = b
        self.due_s = 0.0
        self.leaves: list[tuple[float, int, Node]] = []


class AdaptiveOrder(LruOrder):
    """The nodes that nobody holds, the leaves among them by worth; and the pasts of all."""

    keeps_notes = True

    def __init__(self, policy: Adaptive, quota: int | None = None) -> None:
        super().__init__(quota)
        self.reuse = Reuse()
        self.ghosts: OrderedDict[Past, None] = OrderedDict()
        """The latest evicted last."""
        self._clock = policy.clock
        self._now_s = self._clock()
        self._num_uses = 0
        self._top = Past()
        """Has the ghosts of the first nodes of all lanes."""
        self._counted: tuple[int, Kind] | None = None
        """The use that the last reuse was counted for: nodes of a path that were last used together count once."""
        self._cells: dict[tuple[Kind, int], Cell] = {}
        self._by_worth: list[tuple[float, int, int, Cell]] = []
        """(worth, -bin, serial number, cell): among equals, all of them until something is learned, the oldest bin."""
        self._by_due: list[tuple[float, int, Cell]] = []
        self._serial = 0
        self._num_entries = 0

    # -- uses ------------------------------------------------------------------------------------------------------

    def used(self, node: Node, priority: int) -> None:
        """A request goes on from here: count the reuse. Nodes come in the order of the path."""
        if not node.depth:
            self._now_s = self._clock()
            self._counted = None
        if node.note is not None:
            self._count_reuse(node.note)

    def _count_reuse(self, past: Past) -> None:
        age_s = self._now_s - past.last_use_s
        if (past.use, past.kind) != self._counted:
            self._counted = past.use, past.kind
            self.reuse.count_reuse(past.kind, age_s)
        past.gap_s += GAP_WEIGHT * (age_s - past.gap_s)
        past.last_use_s = self._now_s

    def finished(self, tail: Node, num_prompt_blocks: int, split: Callable[[Node, int], Node]) -> None:
        """A request ends at `tail`, still held: find out what its path is a use of."""
        now_s = self._now_s = self._clock()
        self._num_uses += 1
        self._counted = None
        path, num_known = self._recognise(tail.path(), split)
        if not path:
            return
        last: Past | None = path[num_known - 1].note if num_known else None
        known_end = path[num_known - 1].depth + len(path[num_known - 1].blocks) if num_known else 0
        end = tail.depth + len(tail.blocks)
        turn = 1
        if last is not None and last.turn:
            turn += last.turn
            last.turn = 0  # only the first request that goes on from another one is its next turn
        own: Kind = ("turn", min(turn.bit_length(), 4), (end - known_end).bit_length())
        counted: Kind | None = None
        for node in path:
            past = node.note
            if past is None:
                past = node.note = Past()
            past.num_conversations += turn == 1
            kind: Kind = own if past.num_conversations <= 1 else ("shared", age_bin(past.gap_s))
            if kind != counted:
                counted = kind
                self.reuse.count_use(kind, now_s)
            past.kind, past.last_use_s, past.use = kind, now_s, self._num_uses
            past.end = node.depth + len(node.blocks)
            past.lost = None
        tail_past: Past = tail.note
        if not tail.kids and not tail_past.ghosts:
            tail_past.turn = turn
            tail_past.prompt_end = min(num_prompt_blocks, end)
        if self.reuse.reckon(now_s):
            self._by_worth = []
            for cell in self._cells.values():
                if cell.leaves:
                    self._list_by_worth(cell)

    def _recognise(self, path: list[Node], split: Callable[[Node, int], Node]) -> tuple[list[Node], int]:
        """Give the nodes of a path that are known their pasts, those of ghosts included, cutting them where what is
        known ends. Returns the path as it is then, and how many of its nodes are known."""
        known: list[Node] = []
        rest = path[::-1]
        above = self._top
        while rest:
            node = rest[-1]
            past: Past | None = node.note
            if past is not None and past.end < node.depth + len(node.blocks):
                node.note = None
                num_blocks = past.end - node.depth  # since then the node has grown in place
            elif past is not None:
                num_blocks = len(node.blocks)
            else:
                past = self._recall(node, above)
                if past is None:
                    break
                num_blocks = past.end - node.depth
                self._count_reuse(past)
            if num_blocks < len(node.blocks):
                upper = split(node, num_blocks)
                upper.note = past
                known.append(upper)
            else:
                node.note = past
                known.append(rest.pop())
            above = past
            self._counted = past.use, past.kind
        return known + rest[::-1], len(known)

    # -- ghosts ----------------------------------------------------------------------------------------------------

    def evicted(self, node: Node, num_left: int) -> None:
        """Keep the past of what goes: of the whole node, or of what follows its first `num_left` blocks."""
        past = self._past(node)
        ghost = past.lost
        if ghost is None or ghost not in self.ghosts:
            ghost = past
            ghost.marks = _marks(node, past)
        else:
            self._forget(ghost)  # what was trimmed off before is one ghost with what goes now
        if num_left:
            if ghost is past:
                past = node.note = ghost.head(0)
                past.entry = ghost.entry
                past.lost = ghost
            past.end = node.depth + num_left
            self._remember(ghost, past, hash(_block(node, num_left)))
        else:
            parent = node.parent
            assert parent is not None
            self._remember(ghost, self._past(parent) if parent.parent is not None else self._top, _name(node))

    def _remember(self, ghost: Past, above: Past, name: int) -> None:
        if above.ghosts is None:
            above.ghosts = {}
        above.ghosts[name] = ghost
        ghost.above, ghost.name = above, name
        self.ghosts[ghost] = None
        if len(self.ghosts) > NUM_GHOSTS:
            self._forget(next(iter(self.ghosts)))

    def _forget(self, ghost: Past) -> None:
        self.ghosts.pop(ghost, None)
        above, ghost.above = ghost.above, None
        if above is not None and above.ghosts is not None and above.ghosts.get(ghost.name) is ghost:
            del above.ghosts[ghost.name]

    def _recall(self, node: Node, above: Past) -> Past | None:
        """Return the past of a new node's ghost, or of a first part of it if its blocks are others from there on."""
        ghost = above.ghosts.get(_name(node)) if above.ghosts else None
        if ghost is None:
            return None
        self._forget(ghost)
        num_equal = 1
        for end, fingerprint in reversed(ghost.marks):
            num_blocks = end - node.depth
            if 1 < num_blocks <= len(node.blocks) and hash(_block(node, num_blocks - 1)) == fingerprint:
                num_equal = num_blocks
                break
        end = node.depth + num_equal
        return ghost if end == ghost.end else ghost.head(end)

    def _past(self, node: Node) -> Past:
        """Return the past of a node; of one that is let go without ever having been used, a blank one."""
        if node.note is None:
            node.note = Past((), self._now_s)
            node.note.end = node.depth + len(node.blocks)
        past: Past = node.note
        return past

    # -- leaves ----------------------------------------------------------------------------------------------------

    def put_in(self, node: Node) -> None:
        """Enter a leaf."""
        super().put_in(node)
        if not node.kids:
            self._enter(node)

    def became_leaf(self, node: Node) -> None:
        """Enter it, if nobody holds it."""
        if node in self.idle:
            self._enter(node)

    def split(self, upper: Node, lower: Node) -> None:
        """Both halves have been used alike; but if the next turn branches off here, the lower half is left behind."""
        past: Past | None = lower.note
        if past is None:
            return
        head = upper.note = past.head(lower.depth)
        if head.turn:
            past.turn = 0
            past.kind, past.last_use_s = LEFT_BEHIND, self._now_s
            self.reuse.count_use(LEFT_BEHIND, self._now_s)
            if lower in self.idle and not lower.kids:
                self._enter(lower)

    def first(self) -> Node:
        """The oldest leaf of the cell that is worth least."""
        self._now_s = self._clock()
        self._let_leaves_age()
        while True:
            worth, _, _, cell = self._by_worth[0]
            if worth == cell.kind.worth[cell.bin]:
                leaves = cell.leaves
                while leaves and not self._is_current(leaves[0]):
                    heappop(leaves)
                    self._num_entries -= 1
                if leaves:
                    return leaves[0][2]
            heappop(self._by_worth)

    def _is_current(self, entry: tuple[float, int, Node]) -> bool:
        node = entry[2]
        return self._past(node).entry == entry[1] and node in self.idle and not node.kids

    def _enter(self, node: Node) -> None:
        if self._num_entries > 2 * len(self.idle) + 64:
            for cell in self._cells.values():
                cell.leaves.clear()
            self._by_worth, self._by_due = [], []
            self._num_entries = 0
            for leaf in self.idle:
                if not leaf.kids and leaf is not node:
                    self._enter(leaf)
        past = self._past(node)
        self._serial += 1
        past.entry = self._serial
        self._place((past.last_use_s, self._serial, node), past.kind, age_bin(self._now_s - past.last_use_s))

    def _place(self, entry: tuple[float, int, Node], kind: Kind, b: int) -> None:
        cell = self._cells.get((kind, b))
        if cell is None:
            cell = self._cells[kind, b] = Cell(self.reuse.of(kind), b)
        is_oldest = not cell.leaves or entry[0] < cell.leaves[0][0]
        if not cell.leaves:
            self._list_by_worth(cell)
        heappush(cell.leaves, entry)
        self._num_entries += 1
        if is_oldest:
            self._list_by_due(cell)

    def _list_by_worth(self, cell: Cell) -> None:
        self._serial += 1
        heappush(self._by_worth, (cell.kind.worth[cell.bin], -cell.bin, self._serial, cell))

    def _list_by_due(self, cell: Cell) -> None:
        if cell.bin + 1 < NUM_BINS:
            self._serial += 1
            cell.due_s = cell.leaves[0][0] + BIN_START_S[cell.bin + 1]
            heappush(self._by_due, (cell.due_s, self._serial, cell))

    def _let_leaves_age(self) -> None:
        while self._by_due and self._by_due[0][0] <= self._now_s:
            due_s, _, cell = heappop(self._by_due)
            if due_s != cell.due_s:
                continue  # listed again since, for an older leaf
            leaves, end_s = cell.leaves, BIN_START_S[cell.bin + 1]
            # The sum that was listed, not the age: that may round to less than the bin's end when the sum is due, and
            # the leaf would come back for ever.
            while leaves and leaves[0][0] + end_s <= self._now_s:
                entry = heappop(leaves)
                self._num_entries -= 1
                if self._is_current(entry):
                    b = max(age_bin(self._now_s - entry[0]), cell.bin + 1)
                    self._place(entry, self._past(entry[2]).kind, b)
            if leaves:
                self._list_by_due(cell)


def _name(node: Node) -> int:
    """What the past above a node finds its ghost by."""
    if node.depth:
        return hash(node.label)
    return hash((cast("Root", node.parent).namespace, node.label))


def _block(node: Node, position: int) -> bytes:
    """The tokens of one of the node's blocks."""
    width = len(node.label if isinstance(node.label, bytes) else node.label[0])
    return bytes(node.key[position * width : (position + 1) * width])


def _marks(node: Node, past: Past) -> tuple[tuple[int, int], ...]:
    """Fingerprints of a node, (depth, hash of the block before it), at doubling lengths and where its prompt ends.

    They tell how far a new path agrees with a ghost whose tokens are gone; if they are wrong, only a count is.
    """
    num_blocks = len(node.blocks)
    ends = {1 << power for power in range(1, num_blocks.bit_length())} | {num_blocks}
    if past.turn:
        ends |= {past.prompt_end - node.depth, past.prompt_end - node.depth - 1}
    return tuple((node.depth + end, hash(_block(node, end - 1))) for end in sorted(ends) if 1 < end <= num_blocks)
