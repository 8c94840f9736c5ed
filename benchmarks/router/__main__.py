"""Measures the fleet index: finding, following events, memory; beside Dynamo's RadixTree where that is installed.

python -m benchmarks.router [--replicas 8 512] [--background 200000]

Figures are CPU time of the calling thread, the median of many calls. Dynamo's tree works on a thread of its own, so its
figures are wall time; it gets hashes ready made, and computing those from tokens is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from array import array
from statistics import median
from typing import TYPE_CHECKING

from anaphora.cache.events import BlockRemoved, BlockStored
from anaphora.fleet.index import FleetIndex, prefix_namespace
from anaphora.identity import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 16
RUN = 64
LENGTHS = (125, 2000, 8000)
SPACE = prefix_namespace("")


def tokens_of(rng: random.Random, num_blocks: int) -> bytes:
    """Random ids of a 128k vocabulary."""
    return array("i", rng.choices(range(128_000), k=num_blocks * BLOCK)).tobytes()


def events_of(rng: random.Random, tokens: bytes) -> list[BlockStored]:
    """A prompt as an engine publishes it: runs of 64 blocks, names of 8 bytes."""
    num = len(tokens) // 4 // BLOCK
    names = [rng.randbytes(8) for _ in range(num)]
    width = BLOCK * 4
    return [
        BlockStored(
            tuple(names[at : at + RUN]),
            names[at - 1] if at else None,
            tokens[at * width : (at + RUN) * width],
            BLOCK,
            DEFAULT_NAMESPACE,
        )
        for at in range(0, num, RUN)
    ]


def us(call: Callable[[], object], clock: Callable[[], int], repeats: int = 200) -> float:
    """Median microseconds of a call."""
    times = []
    for _ in range(repeats):
        started = clock()
        call()
        times.append(clock() - started)
    return median(times) / 1000


def rss_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def filled(names: list[str], num_blocks: int, per_prompt: int = 200) -> tuple[FleetIndex, list[list[bytes]], float]:
    """Return an index that was told of unrelated prompts by replicas in turn, the prompts' names, and the CPU seconds
    of telling. Events are made just before they are told, as a subscriber does, and dropped then."""
    rng = random.Random(7)
    index = FleetIndex(BLOCK, max_bytes=1 << 40)
    for name in names:
        index.add(name)
    prompts: list[list[bytes]] = []
    took = 0.0
    for i in range(num_blocks // per_prompt):
        events = events_of(rng, tokens_of(rng, per_prompt))
        started = time.thread_time()
        index.apply(names[i % len(names)], events)
        took += time.thread_time() - started
        prompts.append([name for event in events for name in event.digests])
    return index, prompts, took


def measure_anaphora(num_replicas: int, num_background: int) -> None:
    """Print the index's figures."""
    names = [f"r{i}" for i in range(num_replicas)]
    before = rss_bytes()
    index, prompts, took = filled(names, num_background)
    held = rss_bytes() - before
    num_blocks = len(prompts) * len(prompts[0])
    for _ in range(2):
        took = min(took, filled(names, num_background)[2])
    print(
        f"| Anaphora | {num_replicas} | stored: {num_blocks / took / 1e6:.2f} M blocks/s, "
        f"{held / num_blocks:.0f} B RSS a block, tokens and names included "
        f"({index.num_bytes / num_blocks:.0f} B by the index's own count) |"
    )
    took = 0.0
    for i, prompt in enumerate(prompts[:200]):
        removal = BlockRemoved(tuple(prompt))
        started = time.thread_time()
        index.apply(names[i % num_replicas], [removal])
        took += time.thread_time() - started
    print(f"| Anaphora | {num_replicas} | removed: {200 * len(prompts[0]) / took / 1e6:.2f} M blocks/s |")
    rng = random.Random(8)
    everyone = (1 << num_replicas) - 1
    for length in LENGTHS:
        tokens = tokens_of(rng, length)
        events = events_of(rng, tokens)
        for name in names:
            index.apply(name, events)
        assert index.tree.match(SPACE, tokens, everyone) == [(length, everyone)]
        groups = us(lambda tokens=tokens: index.tree.match(SPACE, tokens, everyone), time.thread_time_ns)
        whole = us(lambda tokens=tokens: index.match(tokens, SPACE), time.thread_time_ns)
        print(
            f"| Anaphora | {num_replicas} | {length} blocks | "
            f"{groups:.1f} us as bit masks | {whole:.1f} us as a table |"
        )
    forget = us(lambda: index.forget(names[0]), time.thread_time_ns, 50)
    print(f"| Anaphora | {num_replicas} | losing a replica | {forget:.1f} us |")


def measure_dynamo(num_replicas: int, num_background: int) -> None:
    """The same of Dynamo's tree."""
    try:
        from dynamo._core import RadixTree
    except ImportError:
        print("Dynamo is not installed: pip install ai-dynamo-runtime")
        return
    rng = random.Random(7)
    tree = RadixTree()

    def stored(worker: int, hashes: list[int], event_id: int) -> None:
        blocks = [{"block_hash": h, "tokens_hash": h} for h in hashes]
        data = {"event_id": event_id, "dp_rank": 0, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
        tree.apply_event(worker, json.dumps(data).encode())

    num_prompts = num_background // 200
    hashes = [[rng.getrandbits(63) for _ in range(200)] for _ in range(num_prompts)]
    started = time.perf_counter()
    for i, prompt in enumerate(hashes):
        stored(i % num_replicas, prompt, i)
    took = time.perf_counter() - started
    print(f"| Dynamo | {num_replicas} | stored: {num_prompts * 200 / took / 1e6:.2f} M blocks/s, JSON included |")
    for length in LENGTHS:
        prompt = [rng.getrandbits(63) for _ in range(length)]
        for worker in range(num_replicas):
            stored(worker, prompt, worker)
        assert len(tree.find_matches(prompt, False).scores) == num_replicas
        found = us(lambda prompt=prompt: tree.find_matches(prompt, False).scores, time.perf_counter_ns)
        print(f"| Dynamo | {num_replicas} | {length} blocks | {found:.1f} us |")


def main() -> None:
    """Measure, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router")
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 512])
    parser.add_argument("--background", type=int, default=200_000, metavar="BLOCKS")
    args = parser.parse_args()
    if len(args.replicas) > 1:  # each in a process of its own, whose memory is fresh
        me = [sys.executable, "-m", "benchmarks.router", "--background", str(args.background)]
        for num_replicas in args.replicas:
            subprocess.run([*me, "--replicas", str(num_replicas)], check=True)
        return
    measure_anaphora(args.replicas[0], args.background)
    measure_dynamo(args.replicas[0], args.background)
    print(f"load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores", flush=True)


if __name__ == "__main__":
    main()
