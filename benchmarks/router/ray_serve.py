"""Conversations over real engines of ours under a real, local Ray Serve, with several request routers.

python -m benchmarks.router.ray_serve [--replicas 4] [--users 32] [--turns 5]

Ray's PrefixCacheAffinityRouter runs where its package's dependencies are installed (`pip install pyarrow`). Every
router sees the same conversations from one handle: users of a few system prompts, turn by turn, eight at a time.
Printed are

- hit rate: cached of all prompt tokens, as the engines report them;
- load: prompt tokens that the busiest replica computed, over the mean;
- choose, note: wall ms of `choose_replicas` and of `on_request_routed` in the handle's process, median and 99th
  percentile. The first may wait for others; the second holds up whatever else the process's loop has to do.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

import ray
from ray import serve
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import RequestRouter
from tests.tiny_models import write_gguf_model

from anaphora.integrations.ray_serve import AnswerHead, EngineReplica, HttpCall, PrefixRouter

CHOOSE_S: list[float] = []
NOTE_S: list[float] = []
PARALLEL = 8
TOKENS_OF_ANSWERS = 8


class RoundRobinRouter(RequestRouter):  # type: ignore[misc]
    """One after another."""

    turn = 0

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return them all, the next one first."""
        pending_request.routing_context.should_backoff = True
        self.turn += 1
        ring = sorted(candidate_replicas, key=lambda replica: replica.replica_id.unique_id)
        at = self.turn % len(ring)
        return [[replica] for replica in ring[at:] + ring[:at]]


class Engine(EngineReplica):
    """Answers in one piece: its name, prompt tokens, cached tokens, text."""

    async def ask(self, body: SimpleNamespace) -> tuple[str, int, int, str]:
        """Complete `body.prompt`."""
        fields = {
            "model": "tiny", "prompt": body.prompt, "max_tokens": TOKENS_OF_ANSWERS, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        call = HttpCall("POST", "/v1/completions", b"", [], json.dumps(fields).encode())
        parts = [part async for part in self.answer(call)]
        answer = json.loads(b"".join(part for part in parts if not isinstance(part, AnswerHead)))
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return self._name, usage["prompt_tokens"], cached, answer["choices"][0]["text"]


def timed(router: type) -> None:
    """Have a router's methods note how long they take."""
    choose, routed = router.choose_replicas, router.on_request_routed  # type: ignore[attr-defined]

    async def timed_choose(*args: Any, **kwargs: Any) -> Any:
        import __main__ as here  # Ray copies the router with all that it names; this is no copy

        started = time.perf_counter()
        try:
            return await choose(*args, **kwargs)
        finally:
            here.CHOOSE_S.append(time.perf_counter() - started)

    def timed_routed(*args: Any, **kwargs: Any) -> Any:
        import __main__ as here

        started = time.perf_counter()
        try:
            return routed(*args, **kwargs)
        finally:
            here.NOTE_S.append(time.perf_counter() - started)

    router.choose_replicas = timed_choose  # type: ignore[attr-defined]
    router.on_request_routed = timed_routed  # type: ignore[attr-defined]


def conversations(users: int, turns: int) -> list[list[str]]:
    """What each user says, turn by turn; the first turn begins with one of a few system prompts."""
    rng = random.Random(5)
    words = ["salt", "ship", "star", "song", "rain", "glass", "moth", "wheat", "stone", "lamp"]

    def text(num_words: int) -> str:
        return " ".join(rng.choices(words, k=num_words))

    systems = [text(60) for _ in range(max(users // 8, 1))]
    return [[systems[i % len(systems)] + text(12), *(text(12) for _ in range(turns - 1))] for i in range(users)]


def run(name: str, router: type, kwargs: dict[str, Any], model: str, args: argparse.Namespace) -> None:
    """Measure one router."""
    CHOOSE_S.clear()
    NOTE_S.clear()
    deployment = serve.deployment(
        Engine,
        name=f"engine-{name}",
        num_replicas=args.replicas,
        max_ongoing_requests=64,
        ray_actor_options={"num_cpus": 0},
        logging_config={"log_level": "ERROR"},
        request_router_config=RequestRouterConfig(request_router_class=router, request_router_kwargs=kwargs),
    )
    engine: Any = {"executor": "reference", "kv_memory_bytes": args.kv_mib << 20, "max_num_seqs": 8}
    handle = serve.run(deployment.bind(model, engine), name=name, route_prefix=None).options(method_name="ask")
    said = conversations(args.users, args.turns)
    history = [""] * args.users
    rng = random.Random(7)
    prompts, cached, last = 0, 0, 0
    computed: Counter[str] = Counter()

    def ask(user: int) -> tuple[int, str, int, int, str]:
        return user, *handle.remote(SimpleNamespace(prompt=history[user])).result()

    with ThreadPoolExecutor(PARALLEL) as pool:
        for turn in range(args.turns):
            order = rng.sample(range(args.users), args.users)
            for user in order:
                history[user] += said[user][turn]
            last = 0
            for user, replica, num_tokens, num_cached, answer in pool.map(ask, order):
                prompts += num_tokens
                last += num_tokens
                cached += num_cached
                computed[replica] += num_tokens - num_cached
                history[user] += answer
    serve.delete(name)
    load = max(computed.values()) / (computed.total() / args.replicas)
    took = "".join(f"{median(t) * 1e3:9.2f}{quantiles(t, n=100)[98] * 1e3:9.2f}" for t in (CHOOSE_S, NOTE_S))
    print(
        f"{name:24} {cached / prompts:9.1%} {load:9.2f}   {took}   ({prompts:,} tokens; {last:,} in the end)",
        flush=True,
    )


def main() -> None:
    """Measure them all, in one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--kv-mib", type=int, default=2, help="of KV for each engine; 2,032 tokens each (default: 2)")
    args = parser.parse_args()
    model = str(write_gguf_model(Path(tempfile.mkdtemp()) / "tiny.gguf", max_context=2048))
    contestants: list[tuple[str, type, dict[str, Any]]] = [
        ("round-robin", RoundRobinRouter, {}),
        ("two-choices", PowerOfTwoChoicesRequestRouter, {}),
    ]
    try:
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter

        contestants += [
            ("rays-prefix", PrefixCacheAffinityRouter, {}),
            ("rays-prefix-threshold-10", PrefixCacheAffinityRouter, {"imbalanced_threshold": 10}),
        ]
    except ImportError as error:
        print(f"without Ray's prefix router: {error}")
    contestants += [("anaphora-estimated", PrefixRouter, {}), ("anaphora-exact", PrefixRouter, {"model": model})]
    for each in dict.fromkeys(router for _, router, _ in contestants):
        timed(each)
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    print(f"{'':24} {'hit rate':>9} {'load':>9}   {'choose':>9}{'p99':>9}{'note':>9}{'p99':>9}")
    try:
        for name, router, kwargs in contestants:
            run(name, router, kwargs, model, args)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
