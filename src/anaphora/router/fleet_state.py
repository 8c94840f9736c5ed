"""The fleet at this moment: replicas, what is known of their caches, and who takes the next request."""

from __future__ import annotations

import random
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from anaphora.fleet.index import DEFAULT_MAX_BYTES, FleetIndex, prefix_namespace
from anaphora.fleet.knowledge import DEFAULT_NUM_BLOCKS, DEFAULT_SPECULATIVE_TTL_S, FleetKnowledge, Visit
from anaphora.fleet.load import believed_speed, pooled_speed
from anaphora.fleet.view import Decision, ReplicaView, RequestView
from anaphora.router.replica import Replica, ReplicaSpec, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from anaphora.fleet.load import Flight
    from anaphora.identity import Namespace
    from anaphora.router.prompt import Prompt

HEAD_BLOCKS = 4
"""Blocks at a prompt's start that choose a replica where nothing is known."""
_MAX_EXPLAINED = 1000


class Policy(Protocol):
    """Chooses; see `CostPolicy.decide`."""

    def decide(self, request: RequestView, replicas: Sequence[ReplicaView], rng: random.Random) -> Decision:
        """Return the choice."""
        ...

    def sent(self, decision: Decision, replica: str) -> None:
        """A request went to a replica."""
        ...

    @property
    def session_header(self) -> str | None:
        """Where clients say which replica their session was on; None if nobody asks."""
        ...


@dataclass(slots=True)
class Routed:
    """A request with its decision. sent_to: where it went in the end, if an answer began.

    requested_model: what the client asked for, where a rewrite made it `model`.
    """

    request_id: str
    model: str | None
    prompt: Prompt
    namespace: Namespace
    decision: Decision
    views: tuple[ReplicaView, ...]
    decided_s: float
    at: float
    sent_to: str | None = None
    attempts: list[tuple[str, str]] = field(default_factory=list)
    reported_tokens: int | None = None
    status: int | None = None
    block_size: int = 16
    requested_model: str | None = None
    priority: int = 0

    def predicted_tokens(self, replica: str) -> int:
        """Cached tokens that the replica should report: whole blocks, and never the whole prompt."""
        view = next((view for view in self.views if view.name == replica), None)
        if view is None:
            return 0
        block_size = self.block_size
        return min(view.matched_tokens, max(self.prompt.num_tokens - 1, 0) // block_size * block_size)

    def explain(self) -> dict[str, Any]:
        """The decision as JSON. Holds no text of the prompt."""
        decision = self.decision
        return {
            "request_id": self.request_id,
            "model": self.model,
            "requested_model": self.requested_model or self.model,
            "priority": self.priority,
            "prompt_tokens": self.prompt.num_tokens,
            "tokens": "exact" if self.prompt.is_exact else "estimated",
            "replica": decision.replica,
            "fallbacks": list(decision.replicas[1:]),
            "reason": decision.reason,
            "policy": decision.profile,
            "prefill_replica": decision.prefill,
            "decided_in_us": round(self.decided_s * 1e6, 1),
            "sent_to": self.sent_to,
            "attempts": [{"replica": name, "outcome": outcome} for name, outcome in self.attempts],
            "predicted_cached_tokens": self.predicted_tokens(self.sent_to or decision.replica or ""),
            "reported_cached_tokens": self.reported_tokens,
            "status": self.status,
            "lower_is_better": decision.lower_is_better,
            "scores": [self._line(score.replica, score.total, score.parts) for score in decision.scores],
        }

    def _line(self, replica: str, total: float, parts: Any) -> dict[str, Any]:
        view = next(view for view in self.views if view.name == replica)
        return {
            "replica": replica,
            "total": round(total, 6),
            "parts": {name: round(value, 6) for name, value in parts.items()},
            "predicted_cached_tokens": self.predicted_tokens(replica),
            "in_device_memory_tokens": view.device_tokens,
            "knowledge": view.knowledge,
            "knowledge_age_s": None if view.knowledge_age_s == float("inf") else round(view.knowledge_age_s, 3),
            "inflight_requests": view.inflight_requests,
            "inflight_tokens": view.inflight_tokens,
            "running": view.num_running,
            "waiting": view.num_waiting,
            "kv_usage": view.kv_usage,
            "prefill_tokens_per_s": round(view.prefill_tokens_per_s, 1),
        }


class Fleet:
    """Replicas and the knowledge of them. Lives on the event loop; nothing here waits.

    is_closing: whoever can is to send requests to another router.
    num_blocks: of a replica's cache where it does not say; max_running: the same for its requests at once.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        block_size: int = 16,
        num_blocks: int = DEFAULT_NUM_BLOCKS,
        max_running: int = 64,
        index_bytes: int = DEFAULT_MAX_BYTES,
        speculative_ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.policy = policy
        self.clock = clock
        self.replicas: dict[str, Replica] = {}
        self.knowledge = FleetKnowledge(
            FleetIndex(block_size, max_bytes=index_bytes),
            clock,
            speculative_ttl_s=DEFAULT_SPECULATIVE_TTL_S if speculative_ttl_s is None else speculative_ttl_s,
        )
        self.explained: OrderedDict[str, Routed] = OrderedDict()
        self.on_lost: Callable[[Replica], None] | None = None
        self.is_closing = False
        self._rng = rng or random.Random()
        self._num_blocks = num_blocks
        self._max_running = max_running

    # Membership

    def add(self, spec: ReplicaSpec) -> Replica:
        """A replica joins, or one that was draining under this name comes back."""
        replica = self.replicas.get(spec.name)
        if replica is not None:
            replica.is_draining = False
            replica.spec = spec
            return replica
        replica = self.replicas[spec.name] = Replica(spec, max_running=self._max_running)
        self.knowledge.add(spec.name, num_blocks=self._num_blocks)
        return replica

    def drain(self, name: str) -> None:
        """The replica gets no new requests; it leaves when its last one has ended."""
        replica = self.replicas[name]
        replica.is_draining = True
        self._leave_if_idle(replica)

    def reconcile(self, specs: Sequence[ReplicaSpec], held: Container[str] = ()) -> tuple[list[str], list[str]]:
        """Make the fleet what `specs` says. Return the names that joined and those that began to drain.

        held: names among them that get no new requests for now.
        """
        wanted = {spec.name: spec for spec in specs}
        joined = [n for n in wanted if n not in self.replicas or self.replicas[n].is_draining]
        left = [n for n, replica in self.replicas.items() if n not in wanted and not replica.is_draining]
        for spec in wanted.values():
            self.add(spec).is_held = spec.name in held
        for name in left:
            self.drain(name)
        return joined, left

    def lost(self, replica: Replica) -> None:
        """What was in the replica's cache is not so any more, as far as we know."""
        if replica.name in self.replicas:
            self.knowledge.lose(replica.name)
            if self.on_lost is not None:
                self.on_lost(replica)

    # Deciding

    def candidates(self, model: object, allowed: Container[str] | None = None) -> list[Replica]:
        """Replicas that can take a request for `model`. allowed: their names are among these; None: any."""
        now = self.clock()
        able = (r for r in self.replicas.values() if r.can_take(now) and (allowed is None or r.name in allowed))
        return serving(able, model)

    def decide(
        self,
        model: object,
        prompt: Prompt,
        salt: str | None,
        session: str | None = None,
        allowed: Container[str] | None = None,
    ) -> Routed:
        """Choose replicas for a prompt; changes nothing but the table of explanations. Cost: tens of microseconds."""
        started = time.perf_counter()
        candidates = self.candidates(model, allowed)
        adapter = _adapter(candidates, model)
        namespace = prefix_namespace("", adapter, salt)
        match = self.knowledge.match(prompt.tokens, namespace, [replica.name for replica in candidates])
        block_size = match.block_size
        speed = pooled_speed(replica.load for replica in candidates)
        views = tuple(
            self._view(
                replica, match.tokens(replica.name), match.device_blocks.get(replica.name, 0) * block_size, speed
            )
            for replica in candidates
        )
        width = block_size * 4
        head = prompt.tokens[: HEAD_BLOCKS * width] or str(model).encode()
        request = RequestView(prompt.num_tokens, match.num_blocks, block_size, head, session, adapter)
        decision = self.policy.decide(request, views, self._rng)
        took = time.perf_counter() - started
        return Routed(
            secrets.token_hex(8), model if isinstance(model, str) else None, prompt, namespace, decision, views, took,
            time.time(), block_size=block_size,
        )  # fmt: skip

    def remember(self, routed: Routed) -> None:
        """Keep a decision for those who ask about it."""
        self.explained[routed.request_id] = routed
        while len(self.explained) > _MAX_EXPLAINED:
            self.explained.popitem(last=False)

    # A request's way

    def depart(self, routed: Routed, name: str) -> Trip:
        """The request is sent to a replica."""
        replica = self.replicas[name]
        replica.breaker.try_one()
        self.policy.sent(routed.decision, name)
        uncached = max(routed.prompt.num_tokens - routed.predicted_tokens(name), 1)
        flight = replica.load.depart(uncached, self.clock())
        return Trip(self, replica, flight, self.knowledge.send(name, routed.prompt.tokens, routed.namespace))

    def _leave_if_idle(self, replica: Replica) -> None:
        if replica.is_draining and not replica.load.inflight and self.replicas.get(replica.name) is replica:
            del self.replicas[replica.name]
            self.knowledge.remove(replica.name)

    def _view(self, replica: Replica, matched_tokens: int, device_tokens: int, speed: float) -> ReplicaView:
        load = replica.load
        return ReplicaView(
            name=replica.name,
            matched_tokens=matched_tokens,
            device_tokens=device_tokens,
            inflight_requests=len(load.inflight),
            inflight_tokens=load.inflight_tokens(self.clock()),
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_usage=load.kv_usage,
            prefill_tokens_per_s=believed_speed(load, speed),
            service_s=load.service_s,
            max_running=replica.max_running,
            knowledge=self.knowledge.kind(replica.name),
            knowledge_age_s=self.knowledge.age_s(replica.name),
            adapters_running=replica.adapters_running,
            adapters_waiting=replica.adapters_waiting,
            max_adapters=replica.max_adapters,
            labels=dict(replica.spec.labels),
            address=replica.spec.address,
        )


class Trip:
    """A request at one replica, from sending to the end. Every end counts once."""

    def __init__(self, fleet: Fleet, replica: Replica, flight: Flight, visit: Visit) -> None:
        self.replica = replica
        self._fleet = fleet
        self._flight = flight
        self._visit = visit

    def answered(self, *, is_stream: bool = True) -> None:
        """The answer's body began: the prompt is computed and in the cache."""
        self._flight.arrive(self._fleet.clock(), is_stream=is_stream)
        self._fleet.knowledge.confirm(self._visit)

    def taken(self) -> None:
        """The replica works on it, and nothing more will be seen before its end: the prompt counts as cached."""
        self._fleet.knowledge.confirm(self._visit)

    def end(self, *, succeeded: bool) -> None:
        """The request is over. Idempotent."""
        self._flight.end(self._fleet.clock(), succeeded=succeeded)
        self._fleet.knowledge.close(self._visit)
        self._fleet._leave_if_idle(self.replica)


def _adapter(candidates: Sequence[Replica], model: object) -> str | None:
    """The adapter that a request's `model` names, None for a base model, which all candidates share."""
    for replica in candidates:
        base = replica.models.get(model) if isinstance(model, str) else None
        if base is not None:
            return None if base == model else str(model)
    return None
