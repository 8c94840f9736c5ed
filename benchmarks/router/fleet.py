"""Replays a Mooncake trace on a fleet of virtual replicas, under several ways of routing.

python -m benchmarks.router.fleet mooncake_conversation.jsonl [--blocks 4000] [--replicas 8]

A replica is the real cache manager with one block a hash of the trace (512 tokens), a prefill that takes one prompt
after another at a fixed speed, and answers that take a fixed time a token. What a router knows, it knows as in
`anaphora route`: from its own decisions, or from the managers' events, which arrive `--lag` seconds late. `one cache`
is a single replica of the same total memory and speed: no router can hit more.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import TypeAlias

from anaphora.cache.manager import KVCacheManager
from anaphora.cache.sequence import Sequence
from anaphora.fleet.cost import CostPolicy, rendezvous_weight
from anaphora.fleet.index import FleetIndex, prefix_namespace
from anaphora.fleet.knowledge import FleetKnowledge, Visit
from anaphora.fleet.load import Flight, Load
from anaphora.fleet.view import ReplicaView, RequestView

SPACE = prefix_namespace("")
HASH_TOKENS = 512
ITL_S = 0.02


@dataclass
class Request:
    """One line of the trace."""

    at: float
    tokens: bytes
    num_tokens: int
    output: int
    home: str = ""
    cached: int = 0
    ttft: float = 0.0


@dataclass
class Replica:
    """One virtual engine."""

    name: str
    manager: KVCacheManager
    speed: float
    queue: deque[Request] = field(default_factory=deque)
    is_busy: bool = False
    computed: int = 0


Choose: TypeAlias = "Callable[[Request], str]"


class World:
    """A clock, replicas, and a router."""

    def __init__(
        self,
        requests: list[Request],
        num: int,
        blocks: int,
        speed: float,
        lag: float,
        policy: str,
        thrift: float,
    ) -> None:
        self.requests = requests
        self.now = 0.0
        self.policy = policy
        self.pricing = CostPolicy(running_s=0.01, thrift=thrift)
        self.lag = lag
        self.replicas = {f"r{i}": Replica(f"r{i}", KVCacheManager(blocks, 1, events=True), speed) for i in range(num)}
        self.loads = {name: Load(prefill_tokens_per_s=speed / HASH_TOKENS) for name in self.replicas}
        self.knowledge = FleetKnowledge(FleetIndex(1), lambda: self.now)
        for name in self.replicas:
            self.knowledge.add(name, num_blocks=blocks)
            if policy == "precise":
                self.knowledge.begin_following(name)
        self.rng = random.Random(1)
        self.turn = itertools.cycle(self.replicas)
        self.trips: dict[int, tuple[Flight, Visit]] = {}
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()

    def later(self, at: float, job: Callable[[], None]) -> None:
        """Do something at a time."""
        heapq.heappush(self.agenda, (at, next(self.count), job))

    def run(self) -> None:
        """Play the whole trace."""
        for request in self.requests:
            self.later(request.at, lambda request=request: self.arrive(request))
        while self.agenda:
            self.now, _, job = heapq.heappop(self.agenda)
            job()

    def arrive(self, request: Request) -> None:
        """A request comes in."""
        request.home = self.choose(request)
        replica = self.replicas[request.home]
        replica.queue.append(request)
        self.start_next(replica)

    def choose(self, request: Request) -> str:
        """Where it goes."""
        names = list(self.replicas)
        if self.policy == "round robin":
            return next(self.turn)
        if self.policy == "session":  # what a client's session would say: the second block is its own
            return max(names, key=lambda name: rendezvous_weight(request.tokens[4:8] or request.tokens, name))
        if len(names) == 1:
            return names[0]
        match = self.knowledge.match(request.tokens, SPACE, names)
        views = [
            ReplicaView(
                name,
                matched_tokens=match.blocks[name],
                inflight_requests=len(load.inflight),
                inflight_tokens=load.inflight_tokens(self.now),
                prefill_tokens_per_s=load.prefill_tokens_per_s,
                max_running=10_000,
            )
            for name, load in self.loads.items()
        ]
        num = len(request.tokens) // 4
        decision = self.pricing.decide(RequestView(num, num, 1, request.tokens[:4]), views, self.rng)
        home = decision.replica
        assert home is not None
        flight = self.loads[home].depart(max(num - match.blocks[home], 1), self.now)
        self.trips[id(request)] = (flight, self.knowledge.send(home, request.tokens, SPACE))
        return home

    def start_next(self, replica: Replica) -> None:
        """The replica takes the next prompt, if it can."""
        if replica.is_busy or not replica.queue:
            return
        request = replica.queue[0]
        sequence = replica.manager.start(request.tokens, SPACE)
        if not replica.manager.allocate(sequence, sequence.num_tokens - sequence.num_cached_tokens):
            return  # until somebody finishes
        replica.queue.popleft()
        replica.is_busy = True
        uncached = sequence.num_tokens - sequence.num_cached_tokens
        request.cached = sequence.num_cached_tokens
        replica.computed += uncached
        self.later(
            self.now + uncached * HASH_TOKENS / replica.speed, lambda: self.prefilled(replica, request, sequence)
        )

    def prefilled(self, replica: Replica, request: Request, sequence: Sequence) -> None:
        """A prompt is computed, and its answer begins."""
        replica.manager.commit(sequence, sequence.num_tokens - sequence.num_computed_tokens)
        request.ttft = self.now - request.at
        replica.is_busy = False
        if trip := self.trips.get(id(request)):
            trip[0].arrive(self.now)
            self.knowledge.confirm(trip[1])
        self.publish(replica)
        self.later(self.now + request.output * ITL_S, lambda: self.finished(replica, request, sequence))
        self.start_next(replica)

    def finished(self, replica: Replica, request: Request, sequence: Sequence) -> None:
        """An answer is complete."""
        replica.manager.finish(sequence)
        if trip := self.trips.pop(id(request), None):
            trip[0].end(self.now)
            self.knowledge.close(trip[1])
        self.publish(replica)
        self.start_next(replica)

    def publish(self, replica: Replica) -> None:
        """Events leave the replica."""
        events = replica.manager.take_events()
        if events and self.policy == "precise":
            self.later(self.now + self.lag, lambda: self.knowledge.follow(replica.name, events))


def read(path: Path, speedup: float) -> list[Request]:
    """The trace's requests, in order."""
    requests = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        tokens = array("i", entry["hash_ids"]).tobytes()
        at = entry["timestamp"] / 1000 / speedup
        requests.append(Request(at, tokens, entry["input_length"], entry["output_length"]))
    return requests


def main() -> None:
    """Replay under each policy; print a line each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router.fleet")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=4000, help="of 512 tokens, in each replica (default: 4000)")
    parser.add_argument("--speed", type=float, default=8000, help="prefill tokens/s of a replica (default: 8000)")
    parser.add_argument("--lag", type=float, default=0.05, help="seconds that events take (default: 0.05)")
    parser.add_argument("--speedup", type=float, default=1.0, help="of the trace's clock (default: 1)")
    parser.add_argument("--thrift", type=float, default=CostPolicy().thrift, help="see CostPolicy")
    args = parser.parse_args()
    print("| routing | hit rate | of one cache | max/mean load | TTFT p50 s | p90 s |")
    print("|---|---|---|---|---|---|")
    best = 0.0
    for policy in ("one cache", "round robin", "session", "approximate", "precise"):
        requests = read(args.trace, args.speedup)
        num = 1 if policy == "one cache" else args.replicas
        factor = args.replicas // num
        world = World(requests, num, args.blocks * factor, args.speed * factor, args.lag, policy, args.thrift)
        world.run()
        total = sum(len(request.tokens) // 4 for request in requests)
        rate = sum(request.cached for request in requests) / total
        best = best or rate
        computed = [replica.computed for replica in world.replicas.values()]
        assert len(Counter(request.home for request in requests)) == num
        cuts = quantiles([request.ttft for request in requests], n=10)
        print(
            f"| {policy} | {rate:.4f} | {rate / best:.1%} | {max(computed) * num / sum(computed):.2f} "
            f"| {cuts[4]:.2f} | {cuts[8]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
