"""CostPolicy: every replica's price for a request in one unit, seconds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, ClassVar

from anaphora.fleet.view import Decision, ReplicaView, RequestView, Score

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class CostPolicy:
    """Send a request where its time, and the fleet's, is least.

    The price of a replica is the sum of

    - queue: the prompt tokens that it has still to compute, at its measured speed;
    - compute: the request's own uncached tokens, at that speed;
    - fleet: the same times `thrift`: what all the others lose, whoever waits. It keeps a burst of one new
      prefix together, where each request alone would be served as soon by computing the prefix again;
    - slots: what waiting for a place costs once `max_running` requests are there, to the request and to those after it;
    - running: the slowdown by each request that is generating.

    So a prefix is followed as long as that is cheaper than computing it again, and is copied to a second replica when
    the first one's queue costs more. Prices that are within `tolerance_s` are equal. Among equals the longest match
    wins; where nothing is known of any, the prompt's head chooses (rendezvous hashing), so that several routers agree.

    max_candidates: with more replicas than that, only the longest matches and as many drawn at random are priced.
    """

    thrift: float = 5.0
    running_s: float = 0.002
    tolerance_s: float = 0.001
    max_candidates: int = 64
    num_fallbacks: int = 3
    session_header: ClassVar[str | None] = None

    def decide(self, request: RequestView, replicas: Sequence[ReplicaView], rng: random.Random) -> Decision:
        """Return the choice among `replicas`, all of which could take the request. Changes nothing."""
        if not replicas:
            return Decision((), (), "no replica is ready")
        priced = [(self.price(request, replica), replica) for replica in self._candidates(replicas, rng)]
        order = sorted(priced, key=lambda pair: pair[0].total)
        best = order[0][0].total
        equals = [pair for pair in order if pair[0].total <= best + self.tolerance_s]
        longest = max(score.matched_tokens for score, _ in equals)
        finalists = [replica for score, replica in equals if score.matched_tokens == longest]
        if len(finalists) == 1:
            choice = finalists[0]
        elif longest or not request.head:
            choice = rng.choice(finalists)
        else:
            choice = max(finalists, key=lambda replica: rendezvous_weight(request.head, replica.name))
        return Decision(
            (choice.name, *self._fallbacks(choice, [replica for _, replica in order])),
            tuple(score for score, _ in order),
            _reason(request, choice, [replica for _, replica in order], len(finalists)),
        )

    def sent(self, decision: Decision, replica: str) -> None:
        """A request went to a replica: nothing to remember, prices see it."""

    def price(self, request: RequestView, replica: ReplicaView) -> Score:
        """Return what sending `request` to `replica` costs, in seconds, with its parts."""
        speed = replica.prefill_tokens_per_s
        own = max(request.num_tokens - replica.matched_tokens, 1) / speed
        excess = max(replica.busy + 1 - replica.max_running, replica.num_waiting if replica.num_running else 0, 0)
        parts = {
            "queue": replica.inflight_tokens / speed,
            "compute": own,
            "fleet": own * self.thrift,
            "slots": excess * replica.service_s / replica.max_running * (1 + self.thrift),
            "running": replica.busy * self.running_s,
        }
        return Score(replica.name, sum(parts.values()), parts, replica.matched_tokens)

    def _fallbacks(self, choice: ReplicaView, order: Sequence[ReplicaView]) -> list[str]:
        """The cheapest others, one at each address: where a server fails, all of its data-parallel ranks do."""
        addresses = {choice.address or choice.name}
        names: list[str] = []
        for replica in order:
            address = replica.address or replica.name
            if len(names) == self.num_fallbacks:
                break
            if address not in addresses:
                addresses.add(address)
                names.append(replica.name)
        return names

    def _candidates(self, replicas: Sequence[ReplicaView], rng: random.Random) -> Sequence[ReplicaView]:
        if len(replicas) <= self.max_candidates:
            return replicas
        half = self.max_candidates // 2
        by_match = sorted(replicas, key=lambda replica: (-replica.matched_tokens, replica.inflight_tokens))
        return [*by_match[:half], *rng.sample(by_match[half:], half)]


def rendezvous_weight(head: bytes, replica: str) -> bytes:
    """Weights by which a head prefers replicas: stable when others come and go, equal on every router."""
    return blake2b(replica.encode(), key=head[:64], digest_size=8).digest()


def _reason(request: RequestView, choice: ReplicaView, order: Sequence[ReplicaView], num_finalists: int) -> str:
    longest = max(replica.matched_tokens for replica in order)
    if not longest:
        if num_finalists > 1:
            return f"no replica has any of the prompt; {num_finalists} cost the same, and its head chose among them"
        return "no replica has any of the prompt; this one is the least busy"
    if choice.matched_tokens == longest:
        alone = num_finalists == 1
        return f"has {longest} of {request.num_tokens} tokens" + ("" if alone else f", as {num_finalists - 1} others")
    return (
        f"has {choice.matched_tokens} of {request.num_tokens} tokens where another has {longest}, "
        "but waiting for that one costs more than computing them"
    )
