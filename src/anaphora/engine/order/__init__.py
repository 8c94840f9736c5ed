"""In which order waiting requests are admitted: one module an order, one protocol for all."""

from anaphora.engine.order.depth_first import DepthFirstOrder
from anaphora.engine.order.fair import FairOrder
from anaphora.engine.order.first_come import FirstComeOrder
from anaphora.engine.order.longest_prefix import LongestPrefixOrder
from anaphora.engine.order.queue_order import QueueOrder, QueueOrderChoice, new_order

__all__ = [
    "DepthFirstOrder",
    "FairOrder",
    "FirstComeOrder",
    "LongestPrefixOrder",
    "QueueOrder",
    "QueueOrderChoice",
    "new_order",
]
