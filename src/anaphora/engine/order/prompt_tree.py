"""PromptTree: the prompts that wait, by what they have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.engine.order.lazy_heap import LazyHeap
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anaphora.engine.live_request import LiveRequest
    from anaphora.identity import Namespace


class PromptNode:
    """A run of tokens that some waiting prompts have in common, up to where they part or one of them ends.

    edge: its tokens, packed, from position `start` to `end`; empty at a root.
    num_waiting: requests whose prompts go through it. 0: it is out of the tree, and `parent` is where to go on.
    ending: those whose prompts end with it, in the order in which they were added.
    covered: so many leading tokens of those prompts are cached, as far as is known; never less than really are.
    by_weight: its children, those with the most requests first; entries go stale as those come and go.
    """

    __slots__ = (
        "by_arrival",
        "by_weight",
        "children",
        "covered",
        "edge",
        "end",
        "ending",
        "num_waiting",
        "parent",
        "start",
    )

    def __init__(self, parent: PromptNode | None, edge: bytes, start: int) -> None:
        self.parent = parent
        self.edge = edge
        self.start = start
        self.end = start + len(edge) // TOKEN_BYTES
        self.num_waiting = 0
        self.ending: dict[LiveRequest, None] = {}
        self.covered = 0
        self.children: dict[bytes, PromptNode] = {}
        self.by_arrival: LazyHeap[tuple[int], LiveRequest] = LazyHeap()
        self.by_weight: LazyHeap[tuple[int], PromptNode] = LazyHeap()


class PromptTree:
    """A radix tree over waiting prompts, one root for each namespace, and one for those that read no cache.

    Cost: O(depth) nodes and one memcmp over the prompt for each call.
    """

    def __init__(self, block_size: int) -> None:
        self.top = PromptNode(None, b"", 0)
        """Above the roots, so that an order may walk all namespaces as one tree."""
        self._block_size = block_size
        self._roots: dict[tuple[Namespace, bool], PromptNode] = {}
        self._ends: dict[LiveRequest, PromptNode] = {}
        """Where each prompt ends."""

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, live: LiveRequest) -> bool:
        return live in self._ends

    def node_of(self, live: LiveRequest) -> PromptNode:
        """Return where the prompt of a request ends. KeyError if it is not here."""
        return self._ends[live]

    def push(self, live: LiveRequest, num_cached: int) -> list[PromptNode]:
        """Add a request of whose prompt `num_cached` tokens are cached; return its path, the root first."""
        key = (live.request.namespace, live.request.read_cache)
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = PromptNode(self.top, b"", 0)
        self.top.num_waiting += 1
        path = self._path_to(root, live.request.prompt)
        for node in path:
            node.num_waiting += 1
            node.by_arrival.push((live.arrival,), live)
            self._weigh(node)
            node.covered = max(node.covered, self._whole_blocks(min(num_cached, node.end)))
        self._ends[live] = path[-1]
        path[-1].ending[live] = None
        return path

    def remove(self, live: LiveRequest) -> list[PromptNode]:
        """Take out a request (KeyError if it is not here); return the nodes that swallowed the one above them."""
        node = self._ends.pop(live)
        del node.ending[live]
        self.top.num_waiting -= 1
        grown: list[PromptNode] = []
        while node is not self.top:
            above = node.parent
            assert above is not None
            node.num_waiting -= 1
            if above is self.top:
                if not node.num_waiting:
                    del self._roots[live.request.namespace, live.request.read_cache]
            elif not node.num_waiting:
                del above.children[node.edge[:TOKEN_BYTES]]
            elif len(node.children) == 1 and not node.ending:
                grown.append(self._merge_into_child(node))
            if node.num_waiting and node.by_arrival.is_crowded:
                left = {member for member in node.by_arrival if member in self._ends}
                node.by_arrival.rebuild(((member.arrival,), member) for member in left)
            node = above
        return grown

    def oldest(self, node: PromptNode) -> LiveRequest:
        """Return the request that arrived first of those through a node in the tree."""
        oldest = node.by_arrival.first(self._ends.__contains__)
        assert oldest is not None, "a node without requests is still in the tree"
        return oldest

    def heaviest_child(self, node: PromptNode) -> PromptNode | None:
        """Return the child with the most requests, equals by the order in which they came to have them."""
        heap = node.by_weight
        while (entry := heap.first_entry()) is not None:
            (negative,), child = entry
            if child.num_waiting == -negative and child.parent is node:
                return child
            heap.drop_first()
            if child.parent is node and 0 < child.num_waiting < -negative:
                heap.push((-child.num_waiting,), child)
        return None

    def cover(self, live: LiveRequest) -> Iterator[PromptNode]:
        """A request that runs has computed tokens that all may find: yield the nodes that are covered further."""
        root = self._roots.get((live.request.namespace, True))
        if root is None:
            return
        tokens = live.sequence.tokens
        num_computed = live.sequence.num_computed_tokens
        node = root
        while node.end < num_computed:
            child = node.children.get(bytes(tokens[node.end * TOKEN_BYTES : (node.end + 1) * TOKEN_BYTES]))
            if child is None:
                return
            is_whole = tokens.startswith(child.edge, child.start * TOKEN_BYTES)
            end = child.end if is_whole else child.start + common_tokens(child.edge, tokens, child.start)
            covered = self._whole_blocks(min(end, num_computed))
            if covered > child.covered:
                child.covered = covered
                yield child
            if not is_whole:
                return
            node = child

    def uncover(self, node: PromptNode, num_cached: int) -> Iterator[PromptNode]:
        """Only `num_cached` tokens of a prompt through `node` are cached: yield the nodes that are covered less."""
        at: PromptNode | None = node
        while at is not None and at.covered > num_cached:
            at.covered = num_cached
            yield at
            at = at.parent

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens // self._block_size * self._block_size

    def _path_to(self, root: PromptNode, prompt: bytes) -> list[PromptNode]:
        node, path = root, [root]
        position = 0
        while position < len(prompt):
            first = prompt[position : position + TOKEN_BYTES]
            child = node.children.get(first)
            if child is None:
                child = node.children[first] = PromptNode(node, prompt[position:], position // TOKEN_BYTES)
                # Known of it is what is known of the node that it hangs on.
                child.covered = min(node.covered, self._whole_blocks(child.end))
            elif not prompt.startswith(child.edge, position):
                child = self._split(child, common_tokens(child.edge, prompt, child.start))
            path.append(child)
            node = child
            position = node.end * TOKEN_BYTES
        return path

    def _split(self, lower: PromptNode, num_tokens: int) -> PromptNode:
        """Cut an edge after its first tokens; return the new node above."""
        above, cut = lower.parent, num_tokens * TOKEN_BYTES
        assert above is not None
        upper = PromptNode(above, lower.edge[:cut], lower.start)
        upper.num_waiting = lower.num_waiting
        upper.covered = min(lower.covered, self._whole_blocks(upper.end))
        upper.by_arrival = lower.by_arrival.copy()
        above.children[upper.edge[:TOKEN_BYTES]] = upper
        lower.parent, lower.edge, lower.start = upper, lower.edge[cut:], upper.end
        upper.children[lower.edge[:TOKEN_BYTES]] = lower
        self._weigh(lower)
        return upper

    def _merge_into_child(self, node: PromptNode) -> PromptNode:
        """A node where no prompt ends and none parts becomes the beginning of its only child; return that."""
        (child,) = node.children.values()
        above = node.parent
        assert above is not None
        child.parent, child.edge, child.start = above, node.edge + child.edge, node.start
        child.covered = max(child.covered, node.covered)
        above.children[child.edge[:TOKEN_BYTES]] = child
        self._weigh(child)
        node.num_waiting = 0
        node.parent = child
        return child

    def _weigh(self, node: PromptNode) -> None:
        """Put a node where it belongs among its parent's children."""
        above = node.parent
        assert above is not None
        above.by_weight.push((-node.num_waiting,), node)
        children = self._roots if above is self.top else above.children
        if above.by_weight.is_crowded:
            above.by_weight.rebuild(((-child.num_waiting,), child) for child in children.values())


def common_tokens(edge: bytes, tokens: bytes | bytearray, start: int) -> int:
    """Return how many leading tokens of `edge` are those of `tokens` from position `start` on. Cost: O(log) memcmps."""
    position = start * TOKEN_BYTES
    low, high = 0, min(len(edge), len(tokens) - position) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if tokens.startswith(edge[low * TOKEN_BYTES : middle * TOKEN_BYTES], position + low * TOKEN_BYTES):
            low = middle
        else:
            high = middle - 1
    return low
