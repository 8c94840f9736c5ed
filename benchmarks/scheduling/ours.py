"""Our orders as contestants."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from anaphora import KVCacheManager
from anaphora.engine.live_request import LiveRequest
from anaphora.engine.order import new_order
from anaphora.engine.request import Request, SamplingParams
from anaphora.engine.sampling import Sampler
from anaphora.engine.stopping import OutputStream

from .contest import BLOCK_SIZE, NUM_BLOCKS, Contestant

if TYPE_CHECKING:
    from anaphora.engine.order import QueueOrderChoice

_SAMPLING = SamplingParams(max_tokens=1)


class OurOrder(Contestant):
    """An order over a KVCacheManager, without a scheduler around it.

    order_s: what the order took while requests were served, in seconds of CPU.
    """

    def __init__(self, kind: QueueOrderChoice, num_blocks: int = NUM_BLOCKS) -> None:
        self.manager = KVCacheManager(num_blocks, BLOCK_SIZE)
        self.order_s = 0.0
        self._order = new_order(kind, self.manager)
        self._num_arrived = 0

    def push(self, name: int, tokens: bytes) -> None:
        """See Contestant."""
        request = Request(str(name), tokens, _SAMPLING)
        sequence = self.manager.start(tokens)
        sampler, output = Sampler(_SAMPLING, 0), OutputStream(_SAMPLING)
        self._order.push(LiveRequest(request, sequence, self._num_arrived, 0, sampler, output))
        self._num_arrived += 1

    def serve(self) -> tuple[int, int]:
        """See Contestant."""
        manager, now = self.manager, time.process_time
        started = now()
        live = self._order.peek()
        self.order_s += now() - started
        assert live is not None
        sequence = live.sequence
        manager.allocate(sequence, sequence.num_tokens - sequence.num_cached_tokens)
        started = now()
        self._order.admitted(live)
        self.order_s += now() - started
        manager.commit(sequence, sequence.num_tokens - sequence.num_computed_tokens)
        started = now()
        self._order.committed(live)
        self.order_s += now() - started
        manager.finish(sequence)
        self._order.ended(live)
        return int(live.request_id), live.num_cached_tokens
