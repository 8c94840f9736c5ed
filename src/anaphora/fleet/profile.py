"""Profiles: filters, weighted scorers and a picker, put together as llm-d's scheduler runs them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anaphora.fleet.scorers import NoHitLruScorer
from anaphora.fleet.view import Decision, Score

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from anaphora.fleet.filters import Filter
    from anaphora.fleet.pickers import Picker
    from anaphora.fleet.scorers import Scorer
    from anaphora.fleet.view import ReplicaView, RequestView


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    """A scorer with its name and weight in one profile."""

    name: str
    scorer: Scorer
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Profile:
    """Filters in order, then the weighted sum of the scores (not normalised), then the picker."""

    name: str
    filters: tuple[tuple[str, Filter], ...]
    scorers: tuple[WeightedScorer, ...]
    picker: Picker

    def decide(self, request: RequestView, replicas: Sequence[ReplicaView], rng: random.Random) -> Decision:
        """Return the choice among `replicas`. Changes nothing."""
        if not replicas:
            return Decision((), (), "no replica is ready", lower_is_better=False, profile=self.name)
        left = list(replicas)
        for name, one in self.filters:
            left = one.filter(request, left, rng)
            if not left:
                reason = f"filter {name!r} of profile {self.name!r} left no replica"
                return Decision((), (), reason, lower_is_better=False, profile=self.name)
        parts: dict[str, dict[str, float]] = {replica.name: {} for replica in left}
        for weighted in self.scorers:
            for replica, score in zip(left, weighted.scorer.score(request, left), strict=True):
                parts[replica.name][weighted.name] = weighted.weight * min(max(score, 0.0), 1.0)
        totals = {name: sum(scores.values()) for name, scores in parts.items()}
        picked = self.picker.pick(totals, rng)
        matched = {replica.name: replica.matched_tokens for replica in left}
        order = sorted(totals, key=lambda name: -totals[name])
        best = parts[picked[0]]
        main = max(best, key=lambda name: best[name]) if best else "no scorer"
        return Decision(
            tuple(picked),
            tuple(Score(name, totals[name], parts[name], matched[name]) for name in order),
            f"scores {totals[picked[0]]:.3f}, most of it from {main}; "
            f"has {matched[picked[0]]} of {request.num_tokens} tokens",
            lower_is_better=False,
            profile=self.name,
        )


@dataclass(frozen=True, slots=True)
class PrefixBasedDecider:
    """prefix-based-pd-decider: prefill elsewhere where at least so many tokens are uncached on the decode replica."""

    non_cached_tokens: int = 0

    def disaggregates(self, request: RequestView, matched_tokens: int) -> bool:
        """Whether the prompt should be computed by a prefill replica."""
        least = self.non_cached_tokens
        return least > 0 and request.num_tokens >= least and request.num_tokens - matched_tokens >= least


@dataclass(frozen=True, slots=True)
class AlwaysDecider:
    """always-disagg-pd-decider."""

    def disaggregates(self, _request: RequestView, _matched_tokens: int) -> bool:
        """Yes."""
        return True


@dataclass(frozen=True, slots=True)
class ProfilePolicy:
    """One profile; or a decode profile, and a prefill profile for those requests that `decider` names.

    session_header: where clients say which replica their session was on, if a plugin asks for it.
    """

    profile: Profile
    prefill: Profile | None = None
    decider: PrefixBasedDecider | AlwaysDecider | None = None
    session_header: str | None = None

    def decide(self, request: RequestView, replicas: Sequence[ReplicaView], rng: random.Random) -> Decision:
        """Return the choice among `replicas`. Changes nothing."""
        decision = self.profile.decide(request, replicas, rng)
        if self.prefill is None or self.decider is None or decision.replica is None:
            return decision
        if not self.decider.disaggregates(request, decision.matched_tokens(decision.replica)):
            return decision
        return replace(decision, prefill=self.prefill.decide(request, replicas, rng).replica)

    def sent(self, decision: Decision, replica: str) -> None:
        """A request went to a replica."""
        had_hit = any(score.matched_tokens for score in decision.scores)
        for profile in (self.profile, self.prefill):
            for weighted in profile.scorers if profile else ():
                if isinstance(weighted.scorer, NoHitLruScorer):
                    weighted.scorer.sent(replica, had_hit=had_hit)
                    if decision.prefill is not None:
                        weighted.scorer.sent(decision.prefill, had_hit=had_hit)
