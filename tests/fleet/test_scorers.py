"""Scorers, filters and pickers, by the numbers that their rules give."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from anaphora.fleet.filters import (
    LabelFilter,
    PrefixAffinityFilter,
    RoleFilter,
    SessionFilter,
    UtilisationFilter,
)
from anaphora.fleet.pickers import MaxScorePicker, WeightedRandomPicker
from anaphora.fleet.profile import Profile, WeightedScorer
from anaphora.fleet.scorers import (
    ActiveRequestScorer,
    ContextLengthScorer,
    KvUtilisationScorer,
    LoadAwareScorer,
    LoraAffinityScorer,
    NoHitLruScorer,
    PrefixScorer,
    QueueScorer,
    RunningScorer,
    SessionScorer,
    TokenLoadScorer,
    session_token,
)
from anaphora.fleet.view import ReplicaView, RequestView

REQUEST = RequestView(160, 10, 16)
RNG = random.Random(0)


def views(field: str, *values: object) -> list[ReplicaView]:
    return [ReplicaView(f"r{i}", **{field: value}) for i, value in enumerate(values)]  # type: ignore[arg-type]


def test_prefix() -> None:
    assert PrefixScorer().score(REQUEST, views("matched_tokens", 0, 80, 160)) == [0, 0.5, 1]
    assert PrefixScorer().score(RequestView(5), views("matched_tokens", 0)) == [0]
    longer = PrefixScorer(match_length_weight=0.5, match_length_scale_tokens=320)
    assert longer.score(REQUEST, views("matched_tokens", 160)) == [0.5 * 0.25 + 0.5]


def test_load() -> None:
    assert QueueScorer().score(REQUEST, views("num_waiting", 0, 5, 10)) == [1, 0.5, 0]
    assert QueueScorer().score(REQUEST, views("num_waiting", 4, 4)) == [1, 1]
    assert RunningScorer().score(REQUEST, views("num_running", 2, 4)) == [1, 0]
    assert KvUtilisationScorer().score(REQUEST, views("kv_usage", 0.25)) == [0.75]
    assert LoadAwareScorer().score(REQUEST, views("num_waiting", 0, 64, 500)) == [0.5, 0.25, 0]
    assert ActiveRequestScorer(idle_threshold=1).score(REQUEST, views("inflight_requests", 1, 2, 4)) == [1, 0.5, 0]
    tokens = TokenLoadScorer(queue_threshold_tokens=320)
    assert tokens.score(REQUEST, views("matched_tokens", 0, 160)) == [0.5, 1]


def test_adapters() -> None:
    request = RequestView(1, adapter="a")
    replicas = [
        ReplicaView("active", adapters_running=frozenset("a"), max_adapters=1),
        ReplicaView("room", adapters_running=frozenset("b"), max_adapters=2),
        ReplicaView("queued", adapters_running=frozenset("b"), adapters_waiting=frozenset("a"), max_adapters=1),
        ReplicaView("full", adapters_running=frozenset("b"), max_adapters=1),
    ]
    assert LoraAffinityScorer().score(request, replicas) == [1.0, 0.8, 0.6, 0.0]


def test_context_length() -> None:
    label = "llm-d.ai/context-length-range"
    replicas = [
        ReplicaView("in", labels={label: "0-1000"}),
        ReplicaView("out", labels={label: "1160-2000"}),
        ReplicaView("no"),
    ]
    inside, outside, none = ContextLengthScorer().score(REQUEST, replicas)
    assert inside == pytest.approx(0.3 + 0.7 * (0.7 / 1.1 + 0.3 * 0.84))
    assert outside == pytest.approx(0.3 / 2)
    assert none == 0.5


def test_session() -> None:
    request = RequestView(1, session=session_token("r1"))
    replicas = views("num_waiting", 0, 0)
    assert SessionScorer().score(request, replicas) == [0, 1]
    assert SessionFilter().filter(request, replicas, RNG) == replicas[1:]
    assert SessionFilter().filter(RequestView(1, session="gone"), replicas, RNG) == replicas


def test_requests_without_a_hit_go_to_the_least_recently_used() -> None:
    scorer = NoHitLruScorer()
    replicas = views("matched_tokens", 0, 0, 0)
    assert scorer.score(REQUEST, replicas) == [1, 0.5, 0]
    scorer.sent("r0", had_hit=False)
    scorer.sent("r1", had_hit=True)
    assert scorer.score(REQUEST, replicas) == [0, 1, 0.5]
    assert scorer.score(REQUEST, views("matched_tokens", 0, 16)) == [0.5, 0.5]
    assert scorer.score(REQUEST, replicas[:1]) == [1]


def test_affinity_keeps_to_the_holders_until_they_are_too_late() -> None:
    holder = ReplicaView("holder", matched_tokens=160)
    others = views("matched_tokens", 0, 0)
    affinity = PrefixAffinityFilter()
    assert affinity.filter(REQUEST, [holder, *others], RNG) == [holder]
    assert affinity.filter(REQUEST, others, RNG) == others
    busy = ReplicaView("holder", matched_tokens=160, inflight_tokens=15_928 * 19)
    assert affinity.filter(REQUEST, [busy, *others], RNG) == [busy, *others]
    assert PrefixAffinityFilter(max_ttft_penalty_ms=0).filter(REQUEST, [busy, *others], RNG) == [busy]
    assert PrefixAffinityFilter(exploration_probability=1).filter(REQUEST, [holder, *others], RNG) == [holder, *others]


def test_labels_and_roles() -> None:
    roles = ["prefill", "decode", "prefill-decode", "both", ""]
    replicas = [ReplicaView(role or "none", labels={"llm-d.ai/role": role, "zone": "a"}) for role in roles]

    def left(one: RoleFilter | LabelFilter) -> list[str]:
        return [replica.name for replica in one.filter(REQUEST, replicas, RNG)]

    assert left(RoleFilter("prefill")) == ["prefill", "prefill-decode", "both"]
    assert left(RoleFilter("decode", takes_unlabelled=True)) == ["decode", "prefill-decode", "both", "none"]
    assert left(LabelFilter({"zone": "b"})) == []
    assert len(left(LabelFilter({"zone": "a"}))) == 5


def test_saturated_replicas_are_left_out_unless_all_are() -> None:
    replicas = views("num_waiting", 3, 9)
    assert UtilisationFilter().filter(REQUEST, replicas, RNG) == replicas[:1]
    assert UtilisationFilter().filter(REQUEST, replicas[1:], RNG) == replicas[1:]


def test_the_best_is_picked_and_drawn_among_equals() -> None:
    picks = Counter(MaxScorePicker().pick({"a": 1, "b": 2, "c": 2}, RNG)[0] for _ in range(200))
    assert set(picks) == {"b", "c"}
    assert MaxScorePicker(2).pick({"a": 1, "b": 0, "c": 2}, RNG) == ["c", "a"]


def test_weighted_draws_are_in_proportion() -> None:
    picks = Counter(WeightedRandomPicker().pick({"a": 3, "b": 1, "c": 0}, RNG)[0] for _ in range(4000))
    assert picks["c"] == 0
    assert 2.3 < picks["a"] / picks["b"] < 3.9
    assert set(WeightedRandomPicker(3).pick({"a": 0, "b": 0, "c": 0}, RNG)) == {"a", "b", "c"}


def test_a_profile_weighs_its_scores_and_says_of_what_the_best_is_made() -> None:
    replicas = [ReplicaView("a", matched_tokens=160, num_waiting=5), ReplicaView("b")]
    scorers = (WeightedScorer("prefix", PrefixScorer(), 3), WeightedScorer("queue", QueueScorer(), 2))
    decision = Profile("default", (), scorers, MaxScorePicker()).decide(REQUEST, replicas, RNG)
    assert decision.replica == "a"
    assert [(score.replica, score.total) for score in decision.scores] == [("a", 3), ("b", 2)]
    assert "prefix" in decision.reason


def test_a_filter_that_leaves_nobody_is_named() -> None:
    profile = Profile("p", (("zone", LabelFilter({"zone": "b"})),), (), MaxScorePicker())
    decision = profile.decide(REQUEST, views("num_waiting", 0), RNG)
    assert decision.replica is None
    assert decision.reason == "filter 'zone' of profile 'p' left no replica"
