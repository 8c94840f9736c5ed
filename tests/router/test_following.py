"""KV events over real sockets: what the router knows of replicas that publish them."""

from __future__ import annotations

import contextlib
import time
from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from anaphora.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Mirror
from anaphora.cache.manager import KVCacheManager
from anaphora.engine.build import build_engine
from anaphora.engine.loop import Engine
from anaphora.engine.service import EngineService
from anaphora.fleet.cost import CostPolicy
from anaphora.fleet.index import prefix_namespace
from anaphora.identity import DEFAULT_NAMESPACE
from anaphora.model import load_model
from anaphora.router.fleet_state import Fleet
from anaphora.router.following import Follower
from anaphora.router.model_text import load_text_side
from anaphora.router.prompt import ModelPrompts, TextEstimate
from anaphora.router.replica import ReplicaSpec
from anaphora.router.route import RouteOptions, build_app
from anaphora.server.app import OpenAIServer
from anaphora.server.served_model import ServedModel
from anaphora.wire import VllmEventFormat, decode_batch, events_of
from anaphora.wire.publisher import EventPublisher
from anaphora.wire.subscriber import EventSubscriber
from tests.router.live_router import LiveRouter, cached_tokens, eventually
from tests.server.live_server import running
from tests.tiny_models import write_gguf_model
from tests.wire.golden import STORED, live, parts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("zmq")
SPACE = prefix_namespace("")
FORMAT = VllmEventFormat()


def ids(*blocks: int) -> bytes:
    return array("i", [block for block in blocks for _ in range(16)]).tobytes()


def name(*blocks: int) -> bytes:
    return bytes([*blocks]).rjust(32, b"x")


def stored(*blocks: int, after: int = 0) -> bytes:
    names = tuple(name(*blocks[: i + 1]) for i in range(after, len(blocks)))
    parent = name(*blocks[:after]) if after else None
    return FORMAT.encode([BlockStored(names, parent, ids(*blocks[after:]), 16, DEFAULT_NAMESPACE)], 0.0)


class World:
    """A publisher, and a fleet that follows it by hand instead of on a loop."""

    def __init__(self, publisher: EventPublisher | None = None, *, replays: bool = True) -> None:
        self.publisher = publisher or EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", topic="kv@a")
        self.fleet = Fleet(CostPolicy())
        self.follower = Follower(self.fleet)
        events = f"tcp://127.0.0.1:{self.publisher.port}"
        replay = f"tcp://127.0.0.1:{self.publisher.replay_port}" if replays else None
        self.fleet.add(ReplicaSpec("http://a", kv_events=events, kv_replay=replay))
        self.subscriber = EventSubscriber(lambda: None)
        self.subscriber.start()
        self.follower._reconcile(self.subscriber)

    def read(self) -> None:
        for key, action in self.subscriber.take():
            self.follower.take(key, action)

    def has(self, *blocks: int) -> int:
        self.read()
        return self.fleet.knowledge.match(ids(*blocks), SPACE, ["a"]).blocks["a"]

    def kind(self) -> str:
        self.read()
        return self.fleet.knowledge.kind("a")

    def close(self) -> None:
        self.subscriber.close()
        self.publisher.close()


@contextlib.contextmanager
def world(**options: Any) -> Iterator[World]:
    it = World(**options)
    try:
        yield it
    finally:
        it.close()


def test_events_are_followed_from_the_first_one_on() -> None:
    with world() as w:
        w.publisher.publish(stored(1, 2))
        w.publisher.publish(stored(1, 2, 3, after=2))
        eventually(lambda: w.has(1, 2, 3) == 3)
        assert w.kind() == "precise"
        w.publisher.publish(FORMAT.encode([BlockRemoved((name(1, 2, 3),))], 0.0))
        eventually(lambda: w.has(1, 2, 3) == 2)
        w.publisher.publish(FORMAT.encode([AllBlocksCleared()], 0.0))
        eventually(lambda: w.has(1, 2, 3) == 0)
        assert w.kind() == "precise"


def test_labels_that_change_cost_no_knowledge() -> None:
    with world() as w:
        w.publisher.publish(stored(1, 2))
        eventually(lambda: w.has(1, 2) == 2)
        spec = w.fleet.replicas["a"].spec
        w.fleet.add(replace(spec, labels=(("tier", "gold"),)))
        w.follower._reconcile(w.subscriber)
        assert (w.has(1, 2), w.kind()) == (2, "precise")
        w.fleet.add(replace(spec, topic="other"))
        w.follower._reconcile(w.subscriber)
        assert w.kind() != "precise", "events of another kind say nothing of these"


def test_a_router_that_starts_later_knows_the_same() -> None:
    with world() as first:
        for i in range(20):
            first.publisher.publish(stored(i, 1))
        eventually(lambda: first.has(19, 1) == 2)
        second = World(first.publisher)
        eventually(lambda: second.has(19, 1) == 2)
        assert second.kind() == "precise"
        assert all(second.has(i, 1) == first.has(i, 1) == 2 for i in range(20))
        second.subscriber.close()


def test_without_a_replay_a_late_router_knows_a_part_and_says_so() -> None:
    with world() as first:
        first.publisher.publish(stored(1))
        eventually(lambda: first.has(1) == 1)
        late = World(first.publisher, replays=False)

        def publish_and_look() -> bool:
            first.publisher.publish(stored(2))
            return late.kind() == "partial"

        eventually(publish_and_look)
        assert late.has(1) == 0
        visit = late.fleet.knowledge.send("a", ids(1, 7), SPACE)
        late.fleet.knowledge.confirm(visit)
        late.fleet.knowledge.close(visit)
        assert late.has(1, 7) == 2, "what was served there is there, whatever the events miss"
        first.publisher.publish(FORMAT.encode([AllBlocksCleared()], 0.0))
        eventually(lambda: late.kind() == "precise")
        assert late.has(1, 7) == 0
        late.subscriber.close()


def test_an_engine_that_restarts_has_an_empty_cache() -> None:
    with world() as w:
        w.publisher.publish(stored(1, 2))
        eventually(lambda: w.has(1, 2) == 2)
        port, replay_port = w.publisher.port, w.publisher.replay_port
        w.publisher.close()
        w.publisher = EventPublisher(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}", topic="kv@a")

        def publish_and_look() -> bool:
            w.publisher.publish(stored(3))
            time.sleep(0.05)
            return w.has(3) == 1

        eventually(publish_and_look)
        assert w.has(1, 2) == 0
        assert w.kind() == "precise"


def test_bytes_that_are_no_events_are_survived() -> None:
    with world() as w:
        w.publisher.publish(b"\xc1nonsense")
        w.publisher.publish(stored(5))
        eventually(lambda: w.has(5) == 1)
        assert w.follower.num_bad_batches == 1
        assert w.kind() == "partial"


def test_where_tokens_are_estimated_events_are_not_followed_and_what_was_sent_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with publishing_server(write_gguf_model(tmp_path / "tiny.gguf", max_context=2048)) as a:
        app = build_app(RouteOptions(replicas=(a,), probe_s=0.05), TextEstimate())
        assert "not followed without --model" in capsys.readouterr().err
        with running(app) as (_, url), httpx.Client(base_url=url, timeout=20) as client:
            router = LiveRouter(url, app, client)
            said = "What is the capital of France? " * 8
            for _ in range(2):
                response = router.chat(said, model="tiny", max_tokens=2)
                time.sleep(0.2)
            assert int(response.headers["x-anaphora-predicted-cached-tokens"]) > 0
            (shown,) = router.replicas().values()
            assert shown["knowledge"] == "approximate"


def test_a_real_vllm_servers_messages_are_understood() -> None:
    batches = [parts(frame)[2] for step in live(STORED)["steps"] for frame in step["frames_hex"]]
    mirror = Mirror()
    with world() as w:
        for payload in batches:
            w.publisher.publish(payload)
            mirror.apply(events_of(decode_batch(payload)))
        eventually(lambda: w.read() or w.follower.num_batches == len(batches))
        index = w.fleet.knowledge.index
        index.check()
        assert w.follower.num_bad_batches == index.counters.num_orphans_lost == 0
        assert index.counters.num_stored > 10
        known = index._replicas["a"].tiers["GPU"].names
        assert {name for name, _ in known.items()} == {digest for digest, group, _ in mirror.blocks if group == 0}


@contextlib.contextmanager
def publishing_server(path: Path) -> Iterator[ReplicaSpec]:
    """A real server of ours whose cache tells what it does."""
    model = load_model(path)
    built = build_engine(model, executor="reference", kv_memory_bytes=2**20)
    manager = KVCacheManager(built.manager.num_blocks, built.manager.block_size, events=True)
    engine = Engine(built.executor, manager, tokenizer=model.tokenizer, eos_token_ids=model.tokenizer.eos_token_ids)
    publisher = EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    service = EngineService(engine, on_events=lambda events: publisher.publish(FORMAT.encode(events, time.time())))
    with running(OpenAIServer(service, ServedModel.of(model, engine))) as (_, url):
        try:
            yield ReplicaSpec(url, f"tcp://127.0.0.1:{publisher.port}", f"tcp://127.0.0.1:{publisher.replay_port}")
        finally:
            publisher.close()


def test_with_events_even_the_answers_are_predicted(tmp_path: Path) -> None:
    path = write_gguf_model(tmp_path / "tiny.gguf", max_context=2048)
    prompts = ModelPrompts(*load_text_side(path))
    with publishing_server(path) as a, publishing_server(path) as b:
        app = build_app(RouteOptions(replicas=(a, b), probe_s=0.05), prompts)
        with running(app) as (_, url), httpx.Client(base_url=url, timeout=20) as client:
            router = LiveRouter(url, app, client)
            said = ["What is the capital of France?"]
            for turn in range(3):
                response = router.chat(*said, model="tiny", max_tokens=40, ignore_eos=True)
                assert response.status_code == 200, response.text
                assert int(response.headers["x-anaphora-predicted-cached-tokens"]) == cached_tokens(response)
                said += [response.json()["choices"][0]["message"]["content"], f"And then? {turn}"]
                time.sleep(0.2)  # for events on their way
            assert cached_tokens(response) > 0
            assert router.replicas()[response.headers["x-anaphora-replica"]]["knowledge"] == "precise"
