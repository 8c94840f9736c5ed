"""PrefixRouter: Ray Serve's choice of a replica, by where the prompt's prefix is cached and who is busy.

    @serve.deployment(request_router_config=RequestRouterConfig(request_router_class=PrefixRouter))

Every handle (of a proxy, of an ingress replica) has a router of its own, in its own process: a decision asks nobody. It
implements `ray.serve.request_router.RequestRouter` as Ray 2.60 has it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.serve.request_router import RequestRouter
from ray.util import metrics

from anaphora.fleet.cost import CostPolicy
from anaphora.fleet.index import DEFAULT_MAX_BYTES
from anaphora.fleet.knowledge import DEFAULT_NUM_BLOCKS
from anaphora.integrations.ray_serve.messages import HttpCall, prompt_of
from anaphora.router.fleet_state import Fleet
from anaphora.router.prompt import ModelPrompts, Prompt, PromptBody, PromptSource, TextEstimate
from anaphora.router.replica import ReplicaSpec

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

    from anaphora.router.fleet_state import Routed, Trip

log = logging.getLogger(__name__)

DEFAULT_MODEL = "default"
"""Names the model that an engine without a model's name serves."""
_LONG_BYTES = 16_384
"""Of text, from which on tokenising takes milliseconds, which the event loop has not."""
_HOUSEKEEPING_S = 1.0
_MAX_TOLD = 4
"""Replicas whose prediction goes along with a call: the choice, and where it may end up instead."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a replica says of itself once, by `record_replica_metadata` under the name "anaphora". All is optional.

    kv_events, kv_replay: ZMQ endpoints of its KV events, in vLLM's form. num_blocks, block_size: of its cache.
    max_running: requests that its engine runs at once. models: names that it answers to -> the base model.
    """

    kv_events: str | None = None
    kv_replay: str | None = None
    topic: str = ""
    num_blocks: int | None = None
    block_size: int | None = None
    max_running: int | None = None
    models: dict[str, str] | None = None

    @classmethod
    def of(cls, metadata: dict[str, Any]) -> ReplicaFacts:
        """Read the metadata; what is not known is left out."""
        told = metadata.get("anaphora")
        if not isinstance(told, dict):
            return cls()
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in told.items() if name in names})


@dataclass(slots=True, eq=False)
class _Attempt:
    """A request on its way to one replica. future: of Ray's, settled when a replica is chosen for good."""

    pending: PendingRequest
    future: asyncio.Future[Any]
    body: PromptBody
    prompt: Prompt
    routed: Routed | None = None
    trip: Trip | None = None
    is_over: bool = False

    def end(self, *, succeeded: bool) -> None:
        self.is_over = True
        if self.trip is not None:
            self.trip.end(succeeded=succeeded)


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # ray is optional, and no part of the type check
    """Sends a call where its prompt costs the fleet least time: see `CostPolicy`.

    What a replica's cache holds is known from its KV events where it publishes them (`EngineReplica` does) and the
    model is given, and otherwise from the calls that went there, with as many blocks as it has. How busy it is comes
    from Ray: the queue length that it reports with every call that it takes or refuses, and the calls of this handle.

    Nothing on a call's way waits for an actor. Where Ray's entry of a queue length is missing or too old, the calls of
    this handle stand for it; a replica that is full all the same refuses, and the call goes to the next one. Only when
    all are full, or one was unreachable, does Ray ask them.
    """

    def initialize_state(
        self,
        *,
        model: str | None = None,
        block_size: int = 16,
        num_blocks: int = DEFAULT_NUM_BLOCKS,
        index_bytes: int = DEFAULT_MAX_BYTES,
        **cost: float,
    ) -> None:
        """Take `request_router_kwargs`, all of them optional.

        model: path or hub name of the model, or "default", for exact tokens; None: estimated from the text.
        block_size: tokens; engines' must be multiples of it. num_blocks: of a cache that does not say.
        index_bytes: a bound of the index. cost: fields of `CostPolicy`.

        Raises:
            ValueError: an argument that is not among these.
            ModelError: the model's tokenizer cannot be read.
        """
        known = {field.name for field in fields(CostPolicy)}
        if unknown := cost.keys() - known:
            allowed = ["block_size", "index_bytes", "model", "num_blocks", *sorted(known)]
            raise ValueError(f"request_router_kwargs: unknown {sorted(unknown)}; allowed are {allowed}")
        self._fleet = Fleet(
            CostPolicy(**cost),  # type: ignore[arg-type]
            block_size=block_size,
            num_blocks=num_blocks,
            index_bytes=index_bytes,
        )
        self._is_exact = model is not None
        self._prompts: PromptSource = TextEstimate() if model is None else _model_prompts(model)
        self._attempts: dict[str, list[_Attempt]] = {}
        self._doubtful: set[ReplicaID] = set()
        """Replicas that could not be reached: Ray asks them before it sends anything."""
        self._tasks: list[asyncio.Task[None]] = []
        self._has_warned = False
        self._follows = False
        tags = {"application": self._deployment_id.app_name, "deployment": self._deployment_id.name}
        self._prompt_tokens = _counter("prompt_tokens", "Prompt tokens of calls that were sent.", tags)
        self._predicted_tokens = _counter(
            "predicted_cached_tokens", "Of those, how many the replica was taken to have in its cache.", tags
        )

    # Who is there

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray's controller names the replicas, all of them."""
        specs: list[ReplicaSpec] = []
        told: dict[str, ReplicaFacts] = {}
        for replica in replicas:
            facts = told[_name(replica.replica_id)] = ReplicaFacts.of(replica.replica_metadata)
            url = f"ray://{_name(replica.replica_id)}"
            is_followed = self._is_exact  # events name tokens, which estimates have not
            specs.append(ReplicaSpec(url, facts.kv_events if is_followed else None, facts.kv_replay, facts.topic))
        self._fleet.reconcile(specs)
        for running in replicas:
            name = _name(running.replica_id)
            facts, replica = told[name], self._fleet.replicas[name]
            replica.max_running = facts.max_running or running.max_ongoing_requests
            replica.models = facts.models or {}
            if facts.num_blocks and facts.block_size:
                own = self._fleet.knowledge.index.block_size
                self._fleet.knowledge.resize(name, max(facts.num_blocks * facts.block_size // own, 1))
        self._follows = self._follows or any(spec.kv_events for spec in specs)
        self._start_tasks()
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """The replica is gone, and its cache with it."""
        super().on_replica_actor_died(replica_id)
        name = _name(replica_id)
        if name in self._fleet.replicas:
            self._fleet.lost(self._fleet.replicas[name])
            self._fleet.drain(name)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """The replica cannot be reached: Ray asks it before anything is sent there."""
        super().on_replica_actor_unavailable(replica_id)
        self._doubtful.add(replica_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """The replica told how many calls it has."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._doubtful.discard(replica_id)

    # A call's way

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas with room, best first, each a rank of its own; all of them where none has room."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Ray asks again at once, for ever
        attempt = await self._attempt(pending_request)
        multiplexed = pending_request.metadata.multiplexed_model_id
        able = self._with_room(candidate_replicas, multiplexed)
        body = attempt.body
        salt = body.cache_salt if isinstance(body.cache_salt, str) else None
        if multiplexed:  # a model that Ray has replicas load: equal prompts of two of them have nothing in common
            salt = f"{multiplexed}\0{salt or ''}"
        routed = self._fleet.decide(body.model, attempt.prompt, salt, allowed=able)
        if attempt.trip is not None:
            attempt.trip.end(succeeded=False)
        attempt.routed, attempt.trip = routed, None
        if routed.decision.replica is None:
            return [[replica] for replica in able.values()]
        # From here on the call counts as on its way there, so that the next one sees it.
        attempt.trip = self._fleet.depart(routed, routed.decision.replica)
        log.debug("%s: %s", pending_request.metadata.request_id, routed.decision.reason)
        order = dict.fromkeys((routed.decision.replica, *(score.replica for score in routed.decision.scores)))
        for call in pending_request.args:
            if isinstance(call, HttpCall):
                call.predicted.clear()
                call.predicted.update({name: routed.predicted_tokens(name) for name in list(order)[:_MAX_TOLD]})
        return [[able[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """The replica took the call."""
        for attempt in self._attempts.get(pending_request.metadata.internal_request_id, ()):
            if attempt.future is pending_request.future and attempt.routed is not None and attempt.trip is not None:
                tags = {"replica": _name(replica_id)}
                self._prompt_tokens.inc(max(attempt.prompt.num_tokens, 1), tags)
                if predicted := attempt.routed.predicted_tokens(_name(replica_id)):
                    self._predicted_tokens.inc(predicted, tags)
                attempt.trip.taken()

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A call that was sent ended, in whatever way. Ray says so once for each time that it sent it."""
        attempts = self._attempts.get(internal_request_id, [])
        here = [a for a in attempts if a.trip is not None and a.trip.replica.name == _name(replica_id)]
        over = [a for a in attempts if a.is_over or a.trip is None]  # it was not sent where it was first to go
        for attempt in (here or over)[:1]:
            attempt.end(succeeded=True)
            self._drop(internal_request_id, attempt)

    async def _attempt(self, pending: PendingRequest) -> _Attempt:
        """Return the call's attempt, a new one if Ray has sent the last one and it was refused."""
        attempts = self._attempts.setdefault(pending.metadata.internal_request_id, [])
        before = [attempt for attempt in attempts if attempt.pending is pending]
        for attempt in before:
            if attempt.future is pending.future:
                return attempt
            attempt.end(succeeded=False)
        if before:
            attempt = _Attempt(pending, pending.future, before[0].body, before[0].prompt)
        else:
            body = prompt_of(pending.args, pending.kwargs)
            if body is None and not self._has_warned:
                self._has_warned = True
                log.warning("%s: calls without a prompt go by load alone", self._deployment_id)
            body = body or PromptBody()
            attempt = _Attempt(pending, pending.future, body, await self._prompt(body))
        self._attempts.setdefault(pending.metadata.internal_request_id, []).append(attempt)
        pending.future.add_done_callback(lambda future: self._settled(attempt, future))
        return attempt

    async def _prompt(self, body: PromptBody) -> Prompt:
        if self._prompts.is_slow and _num_bytes(body) > _LONG_BYTES:
            return await asyncio.to_thread(self._prompts.prompt, body)
        return self._prompts.prompt(body)

    def _with_room(self, candidates: list[RunningReplica], multiplexed: str) -> dict[str, RunningReplica]:
        """Those that can take a call, with how busy they are; all where none can. Those that have the model loaded
        come alone, if there are any."""
        room: dict[str, RunningReplica] = {}
        for running in candidates:
            name = _name(running.replica_id)
            replica = self._fleet.replicas.get(name)
            if replica is None:
                continue
            queue_len = self.replica_queue_len_cache.get(running.replica_id)
            if queue_len is None and running.replica_id not in self._doubtful:
                queue_len = len(replica.load.inflight)
                super().on_new_queue_len_info(running.replica_id, queue_len)
            replica.load.num_running = queue_len or 0
            if queue_len is not None and queue_len < running.max_ongoing_requests:
                room[name] = running
        room = room or {_name(running.replica_id): running for running in candidates}
        loaded = {name: running for name, running in room.items() if multiplexed in running.multiplexed_model_ids}
        return loaded or room

    def _settled(self, attempt: _Attempt, future: asyncio.Future[Any]) -> None:
        """A replica was chosen for good, perhaps not the first of ours; or nobody waits for one any more."""
        if future.cancelled():
            attempt.end(succeeded=False)
            self._drop(attempt.pending.metadata.internal_request_id, attempt)
            return
        name = _name(future.result().replica_id)
        trip = attempt.trip
        if trip is not None and trip.replica.name != name:
            trip.end(succeeded=False)
            is_there = name in self._fleet.replicas and attempt.routed is not None
            attempt.trip = self._fleet.depart(attempt.routed, name) if is_there else None  # type: ignore[arg-type]

    def _drop(self, request_id: str, attempt: _Attempt) -> None:
        attempts = self._attempts.get(request_id, [])
        if attempt in attempts:
            attempts.remove(attempt)
        if not attempts:
            self._attempts.pop(request_id, None)

    # Beside it

    def _start_tasks(self) -> None:
        if not self._tasks:
            self._tasks.append(asyncio.get_running_loop().create_task(_guarded(self._keep_house())))
        if self._follows and len(self._tasks) == 1:
            from anaphora.router.following import Follower  # noqa: PLC0415 - needs pyzmq, which estimates do not

            self._tasks.append(asyncio.get_running_loop().create_task(_guarded(Follower(self._fleet).run())))

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            self._fleet.knowledge.expire()
            self._fleet.knowledge.index.sweep()


def _name(replica_id: ReplicaID) -> str:
    name: str = replica_id.unique_id
    return name


def _num_bytes(body: PromptBody) -> int:
    """About how long a prompt is. Other fields than these are short, or the text of few."""
    messages = body.messages if isinstance(body.messages, list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return sum(len(text) if isinstance(text, str) else _LONG_BYTES for text in [*contents, body.prompt or ""])


def _model_prompts(ref: str) -> ModelPrompts:
    from anaphora.model import load_model  # noqa: PLC0415 - tokenizers, which estimates do not need
    from anaphora.model.fetch import fetch_default_model  # noqa: PLC0415
    from anaphora.router.model_text import load_text_side  # noqa: PLC0415

    path = fetch_default_model() if ref == DEFAULT_MODEL else Path(ref)
    if path.exists():
        return ModelPrompts(*load_text_side(path))
    model = load_model(ref)
    return ModelPrompts(model.tokenizer, model.chat_template)


def _counter(name: str, description: str, tags: dict[str, str]) -> Any:
    counter = metrics.Counter(f"anaphora_serve_{name}", description, tag_keys=("application", "deployment", "replica"))
    counter.set_default_tags(tags)
    return counter


async def _guarded(job: Coroutine[Any, Any, None]) -> None:
    try:
        await job
    except asyncio.CancelledError:
        raise
    except Exception:
        log.exception("a background job of the router failed")
