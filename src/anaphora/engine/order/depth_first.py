"""DepthFirstOrder (`dfs`): the tree of waiting prompts, branch by branch, heaviest first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.engine.order.prompt_tree import PromptTree

if TYPE_CHECKING:
    from anaphora.cache.manager import KVCacheManager
    from anaphora.engine.live_request import LiveRequest


class DepthFirstOrder:
    """Depth first over what prompts have in common: a prompt before those that extend it, a whole branch before the
    next, the branch with the most requests before its neighbours.

    Of requests that wait together this gives the best hit rate that any order can, if the cache holds the longest of
    them (SGLang, arXiv 2312.07104, theorem 3.1): each shared token is computed once, while those that share it
    follow one another. It asks the cache nothing. New arrivals join the branch that is being worked off, so who
    waits in another may starve.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._tree = PromptTree(manager.block_size)
        self._at = self._tree.top
        """Where the last one admitted ended, or the closest branch above that still has requests."""

    def push(self, live: LiveRequest) -> None:
        """See QueueOrder."""
        self._tree.push(live, 0)

    def remove(self, live: LiveRequest) -> None:
        """See QueueOrder."""
        self._tree.remove(live)

    def peek(self) -> LiveRequest | None:
        """See QueueOrder."""
        if not len(self._tree):
            return None
        while not self._at.num_waiting:
            self._at = self._at.parent or self._tree.top
        node = self._at
        while not node.ending:
            child = self._tree.heaviest_child(node)
            assert child is not None, "a node without requests is still in the tree"
            node = child
        return next(iter(node.ending))

    def committed(self, live: LiveRequest) -> None:
        """Changes nothing here."""

    def admitted(self, live: LiveRequest) -> None:
        """See QueueOrder."""
        self._at = self._tree.node_of(live)
        self._tree.remove(live)

    def ended(self, live: LiveRequest) -> None:
        """Changes nothing here."""
