"""QueueOrder: what the waiting queue asks of an order, and how an order is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from anaphora.cache.manager import KVCacheManager
    from anaphora.engine.live_request import LiveRequest

QueueOrderKind: TypeAlias = Literal["fcfs", "lpm", "dfs", "fair"]


class QueueOrder(Protocol):
    """Requests that may be admitted, and which of them is next.

    Whatever changes costs O(depth of its prompt among those that wait), whoever else waits. What has been cached is
    told (`committed`), what has been evicted is found out when it matters (`peek`).
    """

    def push(self, live: LiveRequest) -> None:
        """Add a request, with its place by its arrival."""
        ...

    def remove(self, live: LiveRequest) -> None:
        """Take out a request that is here and will not run now."""
        ...

    def peek(self) -> LiveRequest | None:
        """Return the next one to be admitted; None if there is none."""
        ...

    def committed(self, live: LiveRequest) -> None:
        """A running request has computed more tokens: they may be a hit for those that wait."""
        ...

    def admitted(self, live: LiveRequest) -> None:
        """Take out a request that is here, because it runs now."""
        ...

    def ended(self, live: LiveRequest) -> None:
        """A request that was admitted from here has come to its end, one way or another."""
        ...


QueueOrderFactory: TypeAlias = "Callable[[KVCacheManager], QueueOrder]"
QueueOrderChoice: TypeAlias = "QueueOrderKind | QueueOrderFactory"


def new_order(kind: QueueOrderChoice, manager: KVCacheManager) -> QueueOrder:
    """Return a new, empty order: one of ours by its name, or what a function makes of the manager.

    Raises ValueError for a name that is not known.
    """
    from anaphora.engine.order.depth_first import DepthFirstOrder  # noqa: PLC0415
    from anaphora.engine.order.fair import FairOrder  # noqa: PLC0415
    from anaphora.engine.order.first_come import FirstComeOrder  # noqa: PLC0415
    from anaphora.engine.order.longest_prefix import LongestPrefixOrder  # noqa: PLC0415

    kinds: dict[str, QueueOrderFactory] = {
        "fcfs": FirstComeOrder,
        "lpm": LongestPrefixOrder,
        "dfs": DepthFirstOrder,
        "fair": FairOrder,
    }
    if callable(kind):
        return kind(manager)
    if kind not in kinds:
        raise ValueError(f"queue_order: {kind!r} is not known; allowed are {sorted(kinds)}")
    return kinds[kind](manager)
