"""How our radix index grows with the pool, the tree and the depth of a path, and what a match costs at the least."""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from array import array
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING, Any

from anaphora.cache import KVCacheManager

from .contestant import Stage
from .peer_anaphora import AnaphoraManager, as_bytes
from .workload import TOKEN_BYTES, Prompts, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_SIZE = 16


def cost_of(call: Callable[[], object], num_rounds: int = 15, round_s: float = 0.01) -> float:
    """Return the thread CPU microseconds of a call: the median of rounds."""
    call()
    started = time.thread_time_ns()
    call()
    num_calls = max(1, int(round_s * 1e9 / max(1, time.thread_time_ns() - started)))
    costs = []
    for _ in range(num_rounds):
        started = time.thread_time_ns()
        for _ in range(num_calls):
            call()
        costs.append((time.thread_time_ns() - started) / 1000 / num_calls)
    return median(costs)


def by_pool_size(sizes: tuple[int, ...], num_rounds: int) -> dict[int, dict[str, float]]:
    """Cycle of 2,048 tokens in full pools of these sizes: {blocks: {"0 % hits": us, "90 % hits": us}}."""
    costs: dict[int, dict[str, float]] = {}
    for num_blocks in sizes:
        costs[num_blocks] = {}
        for hit in (0, 90):
            stage = Stage(lambda s: AnaphoraManager(s, as_bytes), Scenario(2_048, hit, num_blocks=num_blocks))
            rounds = [stage.round(500)["us"] for _ in range(num_rounds)]
            stage.close()
            costs[num_blocks][f"{hit} % hits"] = median(rounds)
    return costs


def by_tree_size(sizes: tuple[int, ...], num_rounds: int) -> dict[int, dict[str, float]]:
    """Lookup and whole cycle of 2,048 tokens at 90 % hits beside so many nodes of one block each. The pool is full of
    them, so a cycle evicts 13 nodes: {nodes: {"lookup": us, "cycle, 13 nodes evicted": us}}."""
    costs: dict[int, dict[str, float]] = {}
    for num_nodes in sizes:
        scenario = Scenario(2_048, 90, num_blocks=num_nodes + 2_000)
        prompts = Prompts(scenario)
        manager = KVCacheManager(scenario.num_blocks, BLOCK_SIZE)
        head = prompts.ids(scenario.num_shared_tokens)
        _serve(manager, head + prompts.ids(1))
        for _ in range(num_nodes + 2_000):
            _serve(manager, prompts.ids(BLOCK_SIZE + 1))
            manager.finish(_admitted(manager, head + bytes(TOKEN_BYTES)))  # the head stays in use
        lookups, cycles = [], []
        for _ in range(num_rounds):
            new = [
                head + prompts.ids(2_048 - scenario.num_shared_tokens) for _ in range(min(100, num_nodes // 100 + 5))
            ]
            lookups.append(_cost_each(manager.match, new))
            cycles.append(_cost_each(lambda tokens, manager=manager: _serve(manager, tokens), new))
        costs[num_nodes] = {"lookup": median(lookups), "cycle, 13 nodes evicted": median(cycles)}
    return costs


def by_depth(depths: tuple[int, ...], num_blocks: int = 1_000) -> dict[int, dict[str, float]]:
    """Lookup and whole cycle of a cached prompt of 1,000 blocks that lies in so many edges."""
    costs: dict[int, dict[str, float]] = {}
    for depth in depths:
        prompts = Prompts(Scenario(num_blocks * BLOCK_SIZE, 0))
        manager = KVCacheManager(2 * num_blocks, BLOCK_SIZE)
        tokens = prompts.ids(num_blocks * BLOCK_SIZE + 1)
        for edge in range(1, depth + 1):
            _serve(manager, tokens[: num_blocks * edge // depth * BLOCK_SIZE * TOKEN_BYTES])
        costs[depth] = {
            "lookup": cost_of(lambda manager=manager, tokens=tokens: manager.match(tokens)),
            "cycle": cost_of(lambda manager=manager, tokens=tokens: _serve(manager, tokens)),
        }
    return costs


def full_match(lengths: tuple[int, ...]) -> dict[int, dict[str, float]]:
    """A lookup of a prompt that is cached whole in one edge, beside one memcmp of the same bytes."""
    costs: dict[int, dict[str, float]] = {}
    for num_tokens in lengths:
        manager = KVCacheManager(2 * num_tokens // BLOCK_SIZE, BLOCK_SIZE)
        stored = Prompts(Scenario(num_tokens, 0)).ids(num_tokens)
        _serve(manager, stored)
        asked = bytes(bytearray(stored)) + bytes(TOKEN_BYTES)  # equal, elsewhere in memory, one token to compute
        costs[num_tokens] = {
            "match": cost_of(lambda manager=manager, asked=asked: manager.match(asked)),
            "memcmp": cost_of(lambda asked=asked, stored=stored: asked.startswith(stored)),
        }
    return costs


def python_events(lengths: tuple[int, ...]) -> dict[int, dict[str, int]]:
    """Python-level work of one request at 90 % hits: calls of Python functions, calls into C, and lines run."""
    counts: dict[int, dict[str, int]] = {}
    for num_tokens in lengths:
        scenario = Scenario(num_tokens, 90)
        prompts = Prompts(scenario)
        manager = KVCacheManager(scenario.num_blocks, BLOCK_SIZE)
        head = prompts.ids(scenario.num_shared_tokens)
        tail = num_tokens - scenario.num_shared_tokens
        for _ in range(3):
            _serve(manager, head + prompts.ids(tail))
        events = _events_of(lambda tokens, manager=manager: _serve(manager, tokens), head, prompts, tail)
        counts[num_tokens] = {"Python calls": events["call"], "C calls": events["c_call"], "lines": events["line"]}
    return counts


def bytes_per_block(blocks_per_node: tuple[int, ...], num_blocks: int = 100_000) -> dict[int, dict[str, float]]:
    """Memory of a full pool by the size of its nodes: bytes per block and per node, tokens and block ids included."""
    sizes: dict[int, dict[str, float]] = {}
    for length in blocks_per_node:
        prompts = Prompts(Scenario(length * BLOCK_SIZE, 0))
        num_nodes = num_blocks // length
        gc.collect()
        tracemalloc.start()
        manager = KVCacheManager(num_blocks, BLOCK_SIZE)
        for _ in range(num_nodes):
            _serve(manager, prompts.ids(length * BLOCK_SIZE))
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        raw = length * (BLOCK_SIZE * TOKEN_BYTES + array("i").itemsize)
        sizes[length] = {
            "bytes per block": taken / num_blocks,
            "bytes per node": taken / num_nodes,
            "of which tokens and ids": raw,
        }
    return sizes


def _admitted(manager: KVCacheManager, tokens: bytes) -> Any:
    sequence = manager.start(tokens)
    num_new = sequence.num_tokens - sequence.num_cached_tokens
    if not manager.allocate(sequence, num_new):
        raise RuntimeError("no blocks left")
    manager.commit(sequence, num_new)
    return sequence


def _serve(manager: KVCacheManager, tokens: bytes) -> None:
    manager.finish(_admitted(manager, tokens))


def _cost_each(call: Callable[[bytes], object], arguments: list[bytes]) -> float:
    started = time.thread_time_ns()
    for argument in arguments:
        call(argument)
    return (time.thread_time_ns() - started) / 1000 / len(arguments)


def _events_of(call: Callable[[bytes], object], head: bytes, prompts: Prompts, num_new: int) -> Counter[str]:
    """Count what two requests of the same kind do: the profiler sees calls, the tracer lines."""
    first, second = (head + prompts.ids(num_new) for _ in range(2))
    events: Counter[str] = Counter()

    def profile(frame: Any, event: str, arg: Any) -> None:
        events[event] += 1

    def trace(frame: Any, event: str, arg: Any) -> Any:
        events[event] += event == "line"
        return trace

    sys.setprofile(profile)
    try:
        call(first)
    finally:
        sys.setprofile(None)
    sys.settrace(trace)
    try:
        call(second)
    finally:
        sys.settrace(None)
    return events
