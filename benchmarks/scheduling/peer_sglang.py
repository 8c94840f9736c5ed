"""SGLang's real SchedulePolicy and RadixCache as contestants; prints one JSON object. Written against 0.5.23.

Run by an interpreter that has sglang, as `python -m benchmarks.scheduling.peer_sglang`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from array import array
from importlib.metadata import version

import torch
from benchmarks.bookkeeping.peer_sglang import SlotCounter
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from .contest import BLOCK_SIZE, NUM_BLOCKS, Contestant, backlog, burst, pass_time_us, starvation

POLICIES = ("fcfs", "lpm", "dfs-weight")


class SglangOrder(Contestant):
    """A list that SGLang's policy sorts once a pass; requests are matched again when they are served, as there.

    order_s: what sorting took while requests were served, in seconds of CPU.
    """

    def __init__(self, policy: str, num_blocks: int = NUM_BLOCKS) -> None:
        self._slots = SlotCounter(num_blocks * BLOCK_SIZE)
        self._tree = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self._slots,
                page_size=BLOCK_SIZE,
            )
        )
        self._policy = SchedulePolicy(policy, self._tree, False, False, False)
        self._queue: list[Req] = []
        self.order_s = 0.0
        self.sorts_when_serving = True

    def push(self, name: int, tokens: bytes) -> None:
        """See Contestant."""
        self._queue.append(Req(str(name), "", array("q", array("i", tokens)), SamplingParams(max_new_tokens=1)))

    def order(self) -> None:
        """See Contestant."""
        self._policy.calc_priority(self._queue)

    def serve(self) -> tuple[int, int]:
        """See Contestant."""
        if self.sorts_when_serving:
            started = time.process_time()
            self.order()
            self.order_s += time.process_time() - started
        request = self._queue.pop(0)
        tree, slots = self._tree, self._slots
        tokens = request.origin_input_ids
        match = tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens, limit=len(tokens) - 1)))
        tree.inc_lock_ref(match.last_device_node)
        num_hit = match.device_prefix_len
        missing = len(tokens) - num_hit - slots.num_free
        if missing > 0:
            tree.evict(EvictParams(num_tokens=missing))
        slots.num_free -= len(tokens) - num_hit
        num_whole = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
        value = torch.arange(num_whole, dtype=torch.int64)
        tree.insert(InsertParams(key=RadixKey(tokens), value=value, prev_prefix_len=num_hit, inserted_len=num_hit))
        tree.dec_lock_ref(match.last_device_node)
        slots.num_free += len(tokens) - num_whole
        return int(request.rid), num_hit


def main() -> None:
    """Run every experiment."""
    results: dict[str, dict[str, object]] = {}
    with contextlib.redirect_stdout(sys.stderr):
        for policy in POLICIES:
            print(f"sglang {policy} ...", flush=True)
            row: dict[str, object] = {"burst": burst(SglangOrder(policy))}
            row["backlog"] = backlog(SglangOrder(policy))
            row["starvation"] = starvation(SglangOrder(policy))
            row["pass_us"] = {}
            for num_waiting in (128, 1024, 10_000):
                contestant = SglangOrder(policy, num_blocks=20_000)
                contestant.sorts_when_serving = False
                row["pass_us"][num_waiting] = pass_time_us(contestant, num_waiting, 3)  # type: ignore[index]
            results[policy] = row
    print(json.dumps({"version": version("sglang"), "results": results}))


def _without_a_server() -> None:
    """The policy asks a running server how it is configured; here it has the defaults."""

    class Answer:
        disaggregation_mode = "null"
        radix_eviction_policy = "lru"

        def __getattr__(self, name: str) -> object:
            return None

    for name in ("get_disagg", "get_memory", "get_schedule", "get_exec"):
        if hasattr(schedule_policy, name):
            setattr(schedule_policy, name, Answer)


if __name__ == "__main__":
    _without_a_server()
    main()
