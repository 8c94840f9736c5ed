"""LongestPrefixOrder (`lpm`): who has the longest cached prefix goes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.engine.order.lazy_heap import LazyHeap
from anaphora.engine.order.prompt_tree import PromptNode, PromptTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from anaphora.cache.manager import KVCacheManager
    from anaphora.engine.live_request import LiveRequest
    from anaphora.identity import Namespace

MAX_LOOKUPS = 32
"""How often `peek` asks the cache again before it takes what it believes to be best."""


class LongestPrefixOrder:
    """Longest cached prefix first, equals by arrival. It makes hits, and starves those whose prefix nobody shares.

    Requests whose prompts begin alike have their cached prefix in common, so they stand as one group in a heap, keyed
    by how much of that is cached. What is computed raises a group's key at once; what is evicted is noticed when the
    group comes first and its oldest request is looked up again. So no pass looks up more than a few requests, whatever
    the length of the queue.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._tree = PromptTree(manager.block_size)
        self._manager = manager
        self._groups: LazyHeap[tuple[int, int], PromptNode] = LazyHeap()
        """Nodes that are covered further than their parents, and roots, by (-covered, arrival of their oldest)."""
        self._passed_over: dict[PromptNode, None] = {}

    def __len__(self) -> int:
        return len(self._tree)

    def push(self, live: LiveRequest) -> None:
        """See QueueOrder."""
        self._list(self._tree.push(live, self._manager.lookup(live.sequence)))

    def remove(self, live: LiveRequest) -> None:
        """See QueueOrder."""
        self._list(self._tree.remove(live))

    def committed(self, live: LiveRequest) -> None:
        """See QueueOrder."""
        self._list(self._tree.cover(live))

    def admitted(self, live: LiveRequest) -> None:
        """See QueueOrder."""
        self.remove(live)

    def ended(self, live: LiveRequest) -> None:
        """Changes nothing here."""

    def peek(self, passes_over: Callable[[LiveRequest], bool] | None = None) -> LiveRequest | None:
        """See QueueOrder. Groups whose oldest request is passed over stay out until `reconsider`."""
        tree, groups = self._tree, self._groups
        num_lookups = 0
        while (entry := groups.first_entry()) is not None:
            (negative, arrival), node = entry
            if not self._counts(node, -negative):
                groups.drop_first()
                continue
            oldest = tree.oldest(node)
            if oldest.arrival != arrival:
                groups.drop_first()
                groups.push((negative, oldest.arrival), node)
            elif passes_over is not None and passes_over(oldest):
                groups.drop_first()
                self._passed_over[node] = None
            elif not node.covered or num_lookups == MAX_LOOKUPS:
                return oldest
            else:
                num_lookups += 1
                num_cached = self._manager.lookup(oldest.sequence)
                # Its last token is never served, so a prompt that is cached as a whole finds a block less of it.
                if num_cached >= min(node.covered, oldest.sequence.num_tokens - self._manager.block_size):
                    return oldest
                self._list(tree.uncover(node, num_cached))
        return None

    def namespaces_passed_over(self) -> set[Namespace]:
        """Return those of the requests that were passed over."""
        return {self._tree.oldest(node).request.namespace for node in self._passed_over if node.num_waiting}

    def reconsider(self) -> None:
        """Take back what was passed over."""
        passed_over, self._passed_over = self._passed_over, {}
        self._list(node for node in passed_over if node.num_waiting)

    def _counts(self, node: PromptNode, covered: int) -> bool:
        return node.num_waiting > 0 and node.covered == covered

    def _list(self, nodes: Iterable[PromptNode]) -> None:
        tree, groups = self._tree, self._groups
        for node in nodes:
            parent = node.parent
            if parent is tree.top or (parent is not None and node.covered > parent.covered):
                groups.push((-node.covered, tree.oldest(node).arrival), node)
        if groups.is_crowded:
            left = {node for node in groups if node.num_waiting}
            groups.rebuild(((-node.covered, tree.oldest(node).arrival), node) for node in left)
