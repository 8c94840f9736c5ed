"""TokenTree: who holds which blocks, for many holders in one radix tree.

A node is a run of blocks: its edge holds their token ids as bytes, so a walk compares memory and needs no digests. Who
holds all of a node stands in one Python int, a bit a holder; who holds a part of it has an int of its own, a bit a
block. So holes are allowed, and a walk costs nodes, not blocks times holders.

A place in the tree is one int, `(node id << 24) | depth in blocks`: small enough to be kept for every block of every
holder. A node that is split keeps its id for its upper part and leads on to the lower one.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING

from anaphora.fleet.node import NODE_BYTES, Node
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

DEPTH_BITS = 24
_DEPTH_MASK = (1 << DEPTH_BITS) - 1


class TokenTree:
    """Blocks of `block_size` tokens under any number of roots, held by numbered holders.

    Memory is bounded: `max_bytes` counts tokens and nodes; beyond that the least recently used leaves go,
    whoever holds them, so heads outlive what extends them.
    """

    def __init__(self, block_size: int, max_bytes: int) -> None:
        self.block_size = block_size
        self.width = block_size * TOKEN_BYTES
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_blocks = 0
        self.num_dropped_blocks = 0
        self.live = 0
        """Bits of the holders that count; what others left behind waits for `sweep`."""
        self._roots: dict[Hashable, Node] = {}
        self._root_keys: dict[int, Hashable] = {}
        self._nodes: dict[int, Node] = {}
        self._leaves: OrderedDict[int, Node] = OrderedDict()
        self._next_id = 0
        self._bits: list[int] = []
        self._free_holders: list[int] = []
        self._retired: dict[int, None] = {}
        self._sweep: Iterator[None] | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes, roots left out."""
        return len(self._nodes)

    # Holders

    def add_holder(self) -> int:
        """Return the number of a holder that has nothing."""
        if self._free_holders:
            holder = self._free_holders.pop()
        else:
            holder = len(self._bits)
            self._bits.append(1 << holder)
        self.live |= self._bits[holder]
        return holder

    def retire(self, holder: int) -> None:
        """Forget all that a holder has. Cost: O(1); `sweep` takes the traces away later."""
        self.live &= ~self._bits[holder]
        self._retired[holder] = None

    def sweep(self, max_nodes: int = 4096) -> bool:
        """Take away what retired holders left in up to `max_nodes` nodes. Return whether there is more to do."""
        if self._sweep is None:
            if not self._retired:
                return False
            self._sweep = self._sweep_all()
        for _ in range(max_nodes):
            if next(self._sweep, self) is self:
                self._sweep = None
                return bool(self._retired)
        return True

    def _sweep_all(self) -> Iterator[None]:
        mine = list(self._retired)
        mask = ~sum(self._bits[holder] for holder in mine)
        for node_id in chain(list(self._nodes), self._ids_from(self._next_id)):  # what is split off meanwhile, too
            node = self._nodes.get(node_id)
            if node is not None:
                node.full &= mask
                for holder in mine:
                    node.partial.pop(holder, None)
                self._trim(node)
            yield
        for holder in mine:
            del self._retired[holder]
            self._free_holders.append(holder)

    def _ids_from(self, node_id: int) -> Iterator[int]:
        while node_id < self._next_id:
            yield node_id
            node_id += 1

    # Writing

    def store(self, holder: int, root: Hashable, after: int | None, tokens: bytes) -> list[tuple[int, int, bool]]:
        """Note that `holder` has these blocks, which follow the place `after` (None: the root).

        Returns where they lie: of each run the place of the first, the number of blocks, and whether the holder had
        none of them. Raises KeyError if `after` is no place any more.

        Cost: one comparison of the tokens, a few microseconds a node on the way.
        """
        bit, width = self._bits[holder], self.width
        total = len(tokens) // width
        if not total:
            return []
        if after is None:
            node = self._root(root)
            position = 0
        else:
            node, position = self.resolve(after)
            position += 1
            if position == node.size and self._can_grow(node, bit):  # a sequence goes on: what comes most
                self._grow(node, tokens, total)
                return [((node.node_id << DEPTH_BITS) | (after & _DEPTH_MASK) + 1, total, True)]
        places: list[tuple[int, int, bool]] = []
        offset = 0
        while offset < total:
            if position < node.size:
                count = self._common(node, position, tokens, offset)
                if not count:
                    self._split(node, position)
                    continue
                is_new = self.hold(node, position, count, holder)
            elif node.kids and (kid := node.kids.get(tokens[offset * width : (offset + 1) * width])):
                node, position = kid, 0
                continue
            else:
                count = total - offset
                rest = tokens[offset * width :] if offset else tokens
                if self._can_grow(node, bit):
                    self._grow(node, rest, count)
                else:
                    node = self._add(node, rest, count)
                    node.full = bit
                    position = 0
                is_new = True
            places.append(((node.node_id << DEPTH_BITS) | (node.start + position), count, is_new))
            position += count
            offset += count
        if not node.kids:
            self._leaves.move_to_end(node.node_id)
        if self.num_bytes > self.max_bytes:
            self.shrink(node)
        return places

    def _can_grow(self, node: Node, bit: int) -> bool:
        """Whether the one who stores more after a node has all of it, alone."""
        return not node.kids and node.full & self.live == bit and not node.partial and not node.sealed

    def _grow(self, node: Node, tokens: bytes, count: int) -> None:
        node.unread.append(tokens)
        node.size += count
        self.num_blocks += count
        self.num_bytes += count * self.width
        self._leaves.move_to_end(node.node_id)
        if self.num_bytes > self.max_bytes:
            self.shrink(node)

    def remove(self, holder: int, place: int, count: int) -> None:
        """Note that `holder` no longer has `count` blocks from `place` on. What nobody has goes."""
        while count > 0:
            try:
                node, position = self.resolve(place)
            except KeyError:
                return
            here = min(count, node.size - position)
            self._unhold(node, position, here, holder)
            self._trim(node)
            place += here
            count -= here

    def is_place(self, place: int) -> bool:
        """Whether the block at `place` is still known."""
        try:
            self.resolve(place)
        except KeyError:
            return False
        return True

    def resolve(self, place: int) -> tuple[Node, int]:
        """Return the node and the position in it. Raises KeyError for a place that is gone."""
        node: Node | None = self._nodes.get(place >> DEPTH_BITS)
        depth = place & _DEPTH_MASK
        while node is not None and depth >= node.start + node.size:
            node = node.lower
        if node is None:
            raise KeyError(place)
        return node, depth - node.start

    # Reading

    def match(self, root: Hashable, tokens: bytes, holders: int) -> list[tuple[int, int]]:
        """Return (blocks, holders) pairs: who of `holders` has how many of the prompt's first whole blocks.

        Lengths grow; holders that have nothing are in the pair with 0, or in none where the list is empty. Cost: about
        half a microsecond a node and one comparison of the tokens, whatever the number of holders that have all of it.
        """
        alive = holders & self.live
        node = self._roots.get(root)
        found: list[tuple[int, int]] = []
        if node is None or not alive:
            return [(0, alive)] if alive else []
        width, bits = self.width, self._bits
        end = len(tokens) // width * width
        at = depth = 0
        deepest = node
        while at < end:
            kid = node.kids.get(tokens[at : at + width])
            if kid is None:
                break
            node = kid
            if tokens.startswith(node.tokens, at) and at + node.size * width <= end:
                count = node.size
            else:
                count = self._common(node, 0, tokens, depth)
            going = alive & node.full
            if going != alive:
                gone = alive & ~going
                for holder, blocks in node.partial.items():
                    bit = bits[holder]
                    if gone & bit and blocks & 1:
                        run = (~blocks & (blocks + 1)).bit_length() - 1
                        found.append((depth + min(run, count), bit))
                        gone &= ~bit
                if gone:
                    found.append((depth, gone))
            alive = going
            depth += count
            if not alive:
                break
            deepest = node
            if count < node.size:
                break
            at += count * width
        if not deepest.kids and deepest.parent is not None:
            self._leaves.move_to_end(deepest.node_id)
        if alive:
            found.append((depth, alive))
        if len(found) > 1:
            found.sort()
        return found

    def match_together(self, root: Hashable, tokens: bytes, holders: tuple[int, ...]) -> int:
        """Return how many first blocks the holders have together, each of them in at least one of these."""
        node = self._roots.get(root)
        depth, total = 0, len(tokens) // self.width
        live = [(holder, self._bits[holder]) for holder in holders if self._bits[holder] & self.live]
        while node is not None and depth < total:
            node = node.kids.get(tokens[depth * self.width : (depth + 1) * self.width])
            if node is None:
                break
            count = self._common(node, 0, tokens, depth)
            everything = (1 << node.size) - 1
            blocks = 0
            for holder, bit in live:
                blocks |= everything if node.full & bit else node.partial.get(holder, 0)
            run = min((~blocks & (blocks + 1)).bit_length() - 1, count)
            depth += run
            if run < node.size:
                break
        return depth

    def check(self) -> None:
        """Assert every invariant of the tree. Cost: all of it."""
        num_blocks = 0
        for node in self._nodes.values():
            assert node.size > 0
            assert len(node.tokens) == node.size * self.width
            assert node.parent is not None
            assert node.parent.kids[bytes(node.tokens[: self.width])] is node
            assert node.start == node.parent.start + node.parent.size
            assert (node.node_id in self._leaves) == (not node.kids)
            everything = (1 << node.size) - 1
            assert all(0 < blocks < everything for blocks in node.partial.values())
            assert not any(node.full & self._bits[holder] for holder in node.partial)
            num_blocks += node.size
            if not node.kids and not self._retired:
                assert self._last_held(node) == node.size
        assert num_blocks == self.num_blocks
        assert self.num_bytes == num_blocks * self.width + len(self._nodes) * NODE_BYTES

    # Inside

    def _root(self, key: Hashable) -> Node:
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(self._next_id, None, 0, b"", 0)
            root.sealed = True
            self._root_keys[self._next_id] = key
            self._next_id += 1
        return root

    def _common(self, node: Node, position: int, tokens: bytes, offset: int) -> int:
        """How many blocks of the node from `position` on equal those of `tokens` from `offset` on. Halves its way."""
        width = self.width
        most = min(node.size - position, len(tokens) // width - offset)
        edge = memoryview(node.tokens)
        at, base = offset * width, position * width
        low, high, step = 0, most, most
        while low < high:
            if tokens.startswith(edge[base + low * width : base + (low + step) * width], at + low * width):
                low += step
            else:
                high = low + step - 1
            step = max(1, (high - low + 1) // 2)
        edge.release()
        return low

    def _add(self, parent: Node, tokens: bytes, size: int) -> Node:
        node = Node(self._next_id, parent, parent.start + parent.size, tokens, size)
        self._next_id += 1
        self._nodes[node.node_id] = node
        parent.kids[tokens[: self.width]] = node
        self._leaves.pop(parent.node_id, None)
        self._leaves[node.node_id] = node
        self.num_blocks += size
        self.num_bytes += NODE_BYTES + size * self.width
        return node

    def _split(self, node: Node, position: int) -> None:
        """Move what begins at `position` into a node of its own below."""
        low = Node(
            self._next_id,
            node,
            node.start + position,
            node.tokens[position * self.width :],
            node.size - position,
        )
        self._next_id += 1
        del node.tokens[position * self.width :]
        low.kids, low.lower, low.sealed = node.kids, node.lower, node.sealed
        for kid in low.kids.values():
            kid.parent = low
        low.full = node.full = node.full & self.live
        whole_high, whole_low = (1 << position) - 1, (1 << low.size) - 1
        high_partial: dict[int, int] = {}
        for holder, blocks in node.partial.items():
            if holder in self._retired:
                continue
            high, rest = blocks & whole_high, blocks >> position
            if high == whole_high:
                node.full |= self._bits[holder]
            elif high:
                high_partial[holder] = high
            if rest == whole_low:
                low.full |= self._bits[holder]
            elif rest:
                low.partial[holder] = rest
        node.partial, node.size, node.lower = high_partial, position, low
        node.kids = {bytes(low.tokens[: self.width]): low}
        self._nodes[low.node_id] = low
        if self._leaves.pop(node.node_id, None) is not None:
            self._leaves[low.node_id] = low
            self._leaves.move_to_end(low.node_id, last=False)
        self.num_bytes += NODE_BYTES

    def hold(self, node: Node, position: int, count: int, holder: int) -> bool:
        """Note that `holder` has `count` blocks of a node, which are known already. Return whether it had none."""
        bit = self._bits[holder]
        if node.full & bit:
            return False
        before = node.partial.get(holder, 0)
        these = ((1 << count) - 1) << position
        blocks = before | these
        if blocks == (1 << node.size) - 1:
            node.full |= bit
            node.partial.pop(holder, None)
        else:
            node.partial[holder] = blocks
        return not before & these

    def _unhold(self, node: Node, position: int, count: int, holder: int) -> None:
        bit = self._bits[holder]
        blocks = (1 << node.size) - 1 if node.full & bit else node.partial.get(holder, 0)
        node.full &= ~bit
        blocks &= ~(((1 << count) - 1) << position)
        if blocks:
            node.partial[holder] = blocks
        else:
            node.partial.pop(holder, None)

    def _last_held(self, node: Node) -> int:
        """The position after the last block that anybody has."""
        if node.full & self.live:
            return node.size
        bits, live = self._bits, self.live
        return max((blocks.bit_length() for holder, blocks in node.partial.items() if bits[holder] & live), default=0)

    def _trim(self, node: Node) -> None:
        """Take away what nobody has at the end of a leaf, and then of what becomes one."""
        while not node.kids and node.parent is not None and node.size:
            last = self._last_held(node)
            if last == node.size:
                return
            if not last:
                node = self._drop(node)
                continue
            if node.full:  # left by the retired
                node.full = 0
            self._cut(node, last)
            return

    def _cut(self, node: Node, size: int) -> None:
        self.num_blocks -= node.size - size
        self.num_bytes -= (node.size - size) * self.width
        del node.tokens[size * self.width :]
        node.size = size
        whole = (1 << size) - 1
        for holder, blocks in list(node.partial.items()):
            left = blocks & whole
            if left == whole:
                node.full |= self._bits[holder]
                del node.partial[holder]
            elif left:
                node.partial[holder] = left
            else:
                del node.partial[holder]

    def _drop(self, node: Node) -> Node:
        """Remove a leaf; return its parent."""
        parent = node.parent
        assert parent is not None
        del parent.kids[bytes(node.tokens[: self.width])]
        del self._nodes[node.node_id]
        del self._leaves[node.node_id]
        self.num_blocks -= node.size
        self.num_bytes -= node.size * self.width + NODE_BYTES
        node.size = 0
        node.lower = None
        if not parent.kids:
            if parent.parent is not None:
                self._leaves[parent.node_id] = parent
            else:
                del self._roots[self._root_keys.pop(parent.node_id)]
        return parent

    def shrink(self, keep: Node | None = None) -> None:
        """Drop the oldest leaves until an eighth is free. Long ones lose their tail alone."""
        target = self.max_bytes - self.max_bytes // 8
        while self.num_bytes > target and self._leaves:
            node = next(iter(self._leaves.values()))
            if node is keep and len(self._leaves) > 1:
                self._leaves.move_to_end(node.node_id)
                continue
            excess = -(-(self.num_bytes - target) // self.width)
            before = self.num_blocks
            parent = node.parent
            assert parent is not None
            if excess < node.size:
                node.sealed = True
                self._cut(node, node.size - excess)
                self._trim(node)
            else:
                parent.sealed = True
                self._drop(node)
                self._trim(parent)
            self.num_dropped_blocks += before - self.num_blocks
