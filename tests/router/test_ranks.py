"""Data-parallel ranks: one server, several engines behind it, each with a cache and events of its own."""

from __future__ import annotations

import contextlib
import json
import socket
from array import array
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from anaphora.cache.events import BlockStored
from anaphora.fleet.cost import CostPolicy
from anaphora.fleet.index import prefix_namespace
from anaphora.identity import DEFAULT_NAMESPACE
from anaphora.router.discovery.replica_list import parse_replica, parse_replicas
from anaphora.router.engine_metrics import read_metrics
from anaphora.router.fleet_state import Fleet
from anaphora.router.following import Follower
from anaphora.router.prompt import TextEstimate
from anaphora.router.replica import ReplicaSpec
from anaphora.router.route import RouteOptions, build_app
from anaphora.wire import VllmEventFormat
from anaphora.wire.publisher import EventPublisher
from anaphora.wire.subscriber import EventSubscriber
from tests.router.live_router import LiveRouter, eventually
from tests.server.live_server import running

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("zmq")
SPACE = prefix_namespace("")
FORMAT = VllmEventFormat()


def test_an_option_makes_a_replica_for_each_rank_whose_ports_follow_each_other() -> None:
    text = "http://10.0.0.5:8000 kv-events=tcp://10.0.0.5:5557 kv-replay=tcp://10.0.0.5:5657 ranks=2 label:zone=b"
    first, second = parse_replicas(text)
    assert [spec.name for spec in (first, second)] == ["10.0.0.5:8000#0", "10.0.0.5:8000#1"]
    assert first.address == second.address == "10.0.0.5:8000"
    assert (first.kv_events, first.kv_replay) == ("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5657")
    assert (second.kv_events, second.kv_replay) == ("tcp://10.0.0.5:5558", "tcp://10.0.0.5:5658")
    assert second.labels == (("zone", "b"),)
    assert [spec.name for spec in parse_replica(["http://a:1"])] == ["a:1"]


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("ranks=0", "ranks: expected 1 to 1024, got '0'"),
        ("ranks=two", "ranks: expected 1 to 1024, got 'two'"),
        ("ranks=2 kv-events=ipc:///tmp/events", "rank 0 needs a port: expected tcp://HOST:PORT of rank 0"),
        ("ranks=3 kv-events=tcp://a:65534", "rank 2 needs a port"),
    ],
)
def test_what_gives_no_ranks_is_refused(option: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_replica(["http://a:1", *option.split()])


def ids(*blocks: int) -> bytes:
    return array("i", [block for block in blocks for _ in range(16)]).tobytes()


def stored(rank: int, *blocks: int) -> bytes:
    names = tuple(bytes(blocks[: i + 1]).rjust(32, b"x") for i in range(len(blocks)))
    return FORMAT.encode([BlockStored(names, None, ids(*blocks), 16, DEFAULT_NAMESPACE)], 0.0, rank)


def two_ports() -> int:
    """The first of two neighbouring ports that are free."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


class World:
    """A server of two ranks, which publish at neighbouring ports, and a fleet that follows them by hand."""

    def __init__(self) -> None:
        events, replay = two_ports(), two_ports()
        self.publishers = [
            EventPublisher(f"tcp://127.0.0.1:{events + rank}", f"tcp://127.0.0.1:{replay + rank}") for rank in (0, 1)
        ]
        self.fleet = Fleet(CostPolicy())
        self.follower = Follower(self.fleet)
        spec = ReplicaSpec("http://a:1", f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")
        self.fleet.reconcile(spec.of_ranks(2))
        self.subscriber = EventSubscriber(lambda: None)
        self.subscriber.start()
        self.follower._reconcile(self.subscriber)

    def has(self, *blocks: int) -> dict[str, int]:
        for key, action in self.subscriber.take():
            self.follower.take(key, action)
        return self.fleet.knowledge.match(ids(*blocks), SPACE, ["a:1#0", "a:1#1"]).blocks

    def close(self) -> None:
        self.subscriber.close()
        for publisher in self.publishers:
            publisher.close()


@pytest.fixture
def world() -> Iterator[World]:
    it = World()
    yield it
    it.close()


def test_a_match_counts_for_the_rank_that_published_it(world: World) -> None:
    world.publishers[0].publish(stored(0, 1, 2, 3))
    world.publishers[1].publish(stored(1, 1, 5))
    eventually(lambda: world.has(1, 2, 3) == {"a:1#0": 3, "a:1#1": 1})
    assert world.has(1, 5) == {"a:1#0": 1, "a:1#1": 2}
    assert world.fleet.knowledge.kind("a:1#0") == world.fleet.knowledge.kind("a:1#1") == "precise"


def test_another_ranks_events_are_not_taken_for_this_ones(world: World) -> None:
    world.publishers[0].publish(stored(1, 1, 2, 3))
    world.publishers[1].publish(stored(1, 1))
    eventually(lambda: world.has(1, 2, 3)["a:1#1"] == 1)
    eventually(lambda: world.has(1, 2, 3) and world.fleet.replicas["a:1#0"].precise_problem)
    assert world.has(1, 2, 3)["a:1#0"] == 0
    assert "of data-parallel rank 1, expected 0" in (world.fleet.replicas["a:1#0"].precise_problem or "")
    assert world.fleet.knowledge.kind("a:1#0") == "partial"


def test_a_servers_metrics_are_told_apart_by_rank() -> None:
    text = """
vllm:num_requests_running{engine="0",model_name="m"} 3
vllm:num_requests_running{engine="1",model_name="m"} 5
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="90"} 1
"""
    ranks = [read_metrics(text, rank) for rank in (0, 1)]
    assert [(m.num_running, m.kv_usage, m.num_blocks) for m in ranks] == [(3, 0.25, 100), (5, 0.5, 90)]
    assert read_metrics(text).num_running == 8
    assert (
        read_metrics('sglang:num_running_reqs{dp_rank="1"} 4\nsglang:num_running_reqs{dp_rank="0"} 1', 1).num_running
        == 4
    )


class RankedServer:
    """Answers with the rank that a request names, and counts its probes."""

    def __init__(self) -> None:
        self.generations: list[Any] = []
        self.num_asked = {"/health": 0, "/metrics": 0}
        self.ranks: list[str | None] = []

    @property
    def app(self) -> RankedServer:
        return self

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        if scope["path"] in self.num_asked:
            self.num_asked[scope["path"]] += 1
            body = b"{}" if scope["path"] == "/health" else b'vllm:num_requests_running{engine="1"} 7\n'
        elif scope["path"] == "/v1/models":
            body = b'{"data": [{"id": "alphabet"}]}'
        else:
            while (await receive()).get("more_body"):
                pass
            ranks = [value.decode() for name, value in scope["headers"] if name == b"x-data-parallel-rank"]
            assert len(ranks) == 1
            self.ranks += ranks
            body = json.dumps({"rank": ranks[0]}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def test_requests_name_the_rank_that_has_their_prefix() -> None:
    server = RankedServer()
    with running(server) as (_, url):  # type: ignore[arg-type]
        app = build_app(RouteOptions(replicas=tuple(ReplicaSpec(url).of_ranks(3)), probe_s=0.05), TextEstimate())
        with running(app) as (_, own), httpx.Client(base_url=own, timeout=10) as client:  # type: ignore[arg-type]
            router = LiveRouter(own, app, client)
            eventually(lambda: all(entry["healthy"] for entry in router.replicas().values()))
            homes = set()
            for user in range(12):
                said = f"{user} is who speaks, and this is said in many words. " * 4
                responses = [router.complete(said + "!" * turn) for turn in range(3)]
                ranks = {response.json()["rank"] for response in responses}
                assert len(ranks) == 1
                names = {response.headers["x-anaphora-replica"] for response in responses}
                assert names == {f"{url.removeprefix('http://')}#{rank}" for rank in ranks}
                homes |= ranks
            assert homes >= {"0", "2"}, "the busy one may be spared"
            forced = client.post(
                "/v1/completions",
                json={"model": "alphabet", "prompt": said},
                headers={"x-data-parallel-rank": "9"},
            )
            assert forced.json()["rank"] in {"0", "1", "2"}, "who routes says which"
            running_now = {name[-1]: entry["running"] for name, entry in router.replicas().items()}
            assert running_now == {"0": 0, "1": 7, "2": 0}


def test_ranks_share_their_servers_probes_and_its_failures() -> None:
    server = RankedServer()
    with running(server) as (_, url):  # type: ignore[arg-type]
        app = build_app(RouteOptions(replicas=tuple(ReplicaSpec(url).of_ranks(8)), probe_s=0.05), TextEstimate())
        with running(app) as (_, own), httpx.Client(base_url=own, timeout=10) as client:  # type: ignore[arg-type]
            router = LiveRouter(own, app, client)
            eventually(lambda: server.num_asked["/health"] >= 10)
            assert server.num_asked["/health"] - server.num_asked["/metrics"] in {0, 1}
            assert router.complete("abc").status_code == 200
            explained = client.post("/explain/v1/completions", json={"model": "alphabet", "prompt": "abc"}).json()
            assert explained["fallbacks"] == [], "all ranks fail together"
            assert len(explained["scores"]) == 8
