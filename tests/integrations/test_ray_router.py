"""PrefixRouter by Ray's hooks alone, without a cluster: the replicas are stand-ins that count who asks them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("ray.serve", reason="needs Ray Serve: pip install 'anaphora[ray]'")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID

from anaphora.integrations.ray_serve.messages import HttpCall, prompt_of
from anaphora.integrations.ray_serve.router import PrefixRouter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

DEPLOYMENT = DeploymentID("engines", "app")
LONG = "a text that is some blocks long " * 20


class StandIn:
    """What a router sees of a replica."""

    def __init__(self, name: str, *, limit: int = 4, **metadata: Any) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.max_ongoing_requests = limit
        self.multiplexed_model_ids: set[str] = set()
        self.replica_metadata = metadata
        self.node_id = "node"
        self.availability_zone = None
        self.num_asked = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.num_asked += 1
        return 0


class World:
    """A router and its replicas, a, b, ..."""

    def __init__(self, num_replicas: int = 2, limit: int = 4, **kwargs: Any) -> None:
        self.router = PrefixRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        self.router.initialize_state(**kwargs)
        self.replicas = {name: StandIn(name, limit=limit) for name in "abcdefgh"[:num_replicas]}
        self.router.update_replicas(list(self.replicas.values()))
        self.num_calls = 0

    def call(self, prompt: Any, multiplexed: str = "") -> PendingRequest:
        self.num_calls += 1
        metadata = RequestMetadata(
            request_id=f"r{self.num_calls}", internal_request_id=f"i{self.num_calls}", multiplexed_model_id=multiplexed
        )
        return PendingRequest([prompt], {}, metadata)

    async def ranks(self, pending: PendingRequest) -> list[str]:
        ranks = await self.router.choose_replicas(self.router._replicas_list, pending)
        assert all(len(rank) == 1 for rank in ranks)
        return [rank[0].replica_id.unique_id for rank in ranks]

    async def send(self, pending: PendingRequest, *, queue_len: int = 1) -> str:
        """What Ray does with a call that the first replica takes."""
        name = (await self.ranks(pending))[0]
        return await self.send_to(pending, name, queue_len=queue_len)

    async def send_to(self, pending: PendingRequest, name: str, *, queue_len: int = 1) -> str:
        replica = self.replicas[name]
        pending.future.set_result(replica)
        await asyncio.sleep(0)
        self.router.on_send_request(replica.replica_id)
        self.router.on_new_queue_len_info(replica.replica_id, queue_len)
        self.router.on_request_routed(pending, replica.replica_id, SimpleNamespace())
        return name

    def complete(self, pending: PendingRequest, name: str) -> None:
        replica_id = self.replicas[name].replica_id
        self.router.on_request_completed(replica_id, pending.metadata.internal_request_id)
        self.router.decrement_queue_len_cache(replica_id)

    def inflight(self) -> dict[str, int]:
        return {name: len(replica.load.inflight) for name, replica in self.router._fleet.replicas.items()}

    def is_at_rest(self) -> bool:
        return not self.router._attempts and not any(self.inflight().values())


def in_world(test: Callable[[World], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        world = World(**options)
        await asyncio.sleep(0.01)  # Ray asks new replicas once, beside all calls
        for replica in world.replicas.values():
            replica.num_asked = 0
        await test(world)
        world.router._fleet.knowledge.index.check()
        for task in world.router._tasks:
            task.cancel()

    asyncio.run(run())


def test_a_prompt_goes_where_it_was_and_others_do_not_follow() -> None:
    async def test(world: World) -> None:
        first = world.call({"prompt": LONG})
        home = await world.send(first)
        world.complete(first, home)
        for i in range(6):
            again = world.call({"prompt": LONG + str(i)})
            assert await world.send(again) == home
            world.complete(again, home)
        strangers = [world.call({"prompt": f"{i} {LONG}"}) for i in range(12)]
        homes = [await world.send(call) for call in strangers]
        assert len(set(homes)) == 3
        for call, name in zip(strangers, homes, strict=True):
            world.complete(call, name)
        assert world.is_at_rest()
        assert not any(replica.num_asked for replica in world.replicas.values()), "nobody was asked on a call's way"

    in_world(test, num_replicas=3, limit=100)


def test_a_replica_that_is_full_by_its_own_word_comes_after_those_with_room() -> None:
    async def test(world: World) -> None:
        first = world.call({"prompt": LONG})
        home = await world.send(first)
        other = "ab".replace(home, "")
        world.router.on_new_queue_len_info(world.replicas[home].replica_id, 4)  # of other routers' calls
        assert await world.ranks(world.call({"prompt": LONG})) == [other]
        world.router.on_new_queue_len_info(world.replicas[other].replica_id, 4)
        assert sorted(await world.ranks(world.call({"prompt": LONG}))) == ["a", "b"], "Ray is to ask all"
        world.router.on_new_queue_len_info(world.replicas[home].replica_id, 1)
        assert await world.ranks(world.call({"prompt": LONG})) == [home]

    in_world(test)


def test_events_are_not_followed_where_tokens_are_estimated() -> None:
    async def test(world: World) -> None:
        told = {"kv_events": "tcp://127.0.0.1:9", "num_blocks": 10, "block_size": 32, "max_running": 7}
        world.replicas["a"].replica_metadata = {"anaphora": told, "others": 1}
        world.router.update_replicas(list(world.replicas.values()))
        replica = world.router._fleet.replicas["a"]
        assert replica.spec.kv_events is None
        assert replica.max_running == 7
        first = world.call({"prompt": LONG})
        home = await world.send(first)
        world.complete(first, home)
        assert world.router._fleet.knowledge.kind(home) == "approximate"
        assert await world.send(world.call({"prompt": LONG})) == home

    in_world(test)


def test_a_refused_call_is_sent_again_and_counts_once() -> None:
    async def test(world: World) -> None:
        pending = world.call({"prompt": LONG})
        home = (await world.ranks(pending))[0]
        other = "ab".replace(home, "")
        pending.future.set_result(world.replicas[home])
        await asyncio.sleep(0)
        world.router.on_new_queue_len_info(world.replicas[home].replica_id, 4)  # with its refusal
        pending.reset_future()
        assert await world.send(pending) == other
        assert world.inflight() == {home: 0, other: 1}
        world.complete(pending, home)  # the refused one's end, which Ray tells too
        assert world.inflight() == {home: 0, other: 1}
        world.complete(pending, other)
        assert world.is_at_rest()
        assert (await world.ranks(world.call({"prompt": LONG})))[0] == other

    in_world(test)


def test_what_counts_is_the_replica_that_ray_took_in_the_end() -> None:
    async def test(world: World) -> None:
        pending = world.call({"prompt": LONG})
        first, second = await world.ranks(pending)
        await world.send_to(pending, second)
        assert world.inflight() == {first: 0, second: 1}
        world.complete(pending, second)
        assert world.is_at_rest()
        assert (await world.ranks(world.call({"prompt": LONG})))[0] == second

    in_world(test)


def test_calls_that_nobody_waits_for_leave_nothing_behind() -> None:
    async def test(world: World) -> None:
        pending = world.call({"prompt": LONG})
        await world.ranks(pending)
        await world.ranks(pending)  # Ray asks again, for want of room
        assert sum(world.inflight().values()) == 1
        pending.future.cancel()
        await asyncio.sleep(0)
        assert world.is_at_rest()

    in_world(test)


def test_a_dead_replica_is_no_candidate_and_its_cache_is_forgotten() -> None:
    async def test(world: World) -> None:
        first = world.call({"prompt": LONG})
        home = await world.send(first)
        world.router.on_replica_actor_died(world.replicas[home].replica_id)
        world.complete(first, home)
        assert home not in world.router._fleet.replicas
        again = world.call(HttpCall("POST", "/v1/completions", b"", [], b'{"prompt": "%s"}' % LONG.encode()))
        assert await world.ranks(again) == ["ab".replace(home, "")]
        assert list(again.args[0].predicted.values()) == [0]

    in_world(test)


def test_a_replica_that_could_not_be_reached_is_left_for_ray_to_ask() -> None:
    async def test(world: World) -> None:
        first = world.call({"prompt": LONG})
        home = await world.send(first)
        world.complete(first, home)
        world.router.on_replica_actor_unavailable(world.replicas[home].replica_id)
        await world.ranks(world.call({"prompt": LONG}))
        assert world.router.replica_queue_len_cache.get(world.replicas[home].replica_id) is None
        world.router.on_new_queue_len_info(world.replicas[home].replica_id, 0)
        assert (await world.ranks(world.call({"prompt": LONG})))[0] == home

    in_world(test, num_replicas=2)


def test_models_that_ray_loads_into_replicas_share_nothing() -> None:
    async def test(world: World) -> None:
        first = world.call({"prompt": LONG}, multiplexed="one")
        home = await world.send(first)
        other = world.call(HttpCall("POST", "/", b"", [], b'{"prompt": "%s"}' % LONG.encode()), multiplexed="two")
        await world.ranks(other)
        assert set(other.args[0].predicted.values()) == {0}
        world.replicas["ab".replace(home, "")].multiplexed_model_ids.add("one")
        assert await world.ranks(world.call({"prompt": LONG}, multiplexed="one")) == ["ab".replace(home, "")]

    in_world(test)


@pytest.mark.parametrize(
    "argument",
    [
        {"messages": [{"role": "user", "content": "hi"}], "model": "m"},
        b'{"messages": [{"role": "user", "content": "hi"}], "model": "m"}',
        SimpleNamespace(
            messages=[SimpleNamespace(model_dump=lambda **_: {"role": "user", "content": "hi"})], model="m"
        ),
        HttpCall(
            "POST", "/v1/chat/completions", b"", [], b'{"messages": [{"role": "user", "content": "hi"}], "model": "m"}'
        ),
    ],
)
def test_prompts_are_read_from_whatever_a_call_brings(argument: Any) -> None:
    body = prompt_of([5, argument], {})
    assert body is not None
    assert body.messages == [{"role": "user", "content": "hi"}]
    assert body.model == "m"


def test_a_call_without_a_prompt_is_told_apart_from_one_with_an_empty_body() -> None:
    assert prompt_of([5, None], {"flag": True}) is None
    body = prompt_of([HttpCall("GET", "/v1/models", b"", [], b"")], {})
    assert body is not None
    assert body.messages is None
