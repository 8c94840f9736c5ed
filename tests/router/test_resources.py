"""Objectives and model rewrites: what a file may say, which rule counts, who is shed, and what the proxy does of it."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.fleet.cost import CostPolicy
from anaphora.router.admission import Admission, Concurrency, Saturation, Utilization
from anaphora.router.fleet_state import Fleet
from anaphora.router.llmd.config import ConfigError, parse_config
from anaphora.router.prompt import TextEstimate
from anaphora.router.replica import ReplicaSpec
from anaphora.router.resource_file import ResourceError, parse_resources
from anaphora.router.resources import InferenceModelRewrite, InferenceObjective
from anaphora.router.rewrites import ModelRewrites
from anaphora.router.route import RouteError, RouteOptions, build_app
from anaphora.server.errors import ApiError
from tests.router.fake_kubernetes import objective, rewrite
from tests.router.live_router import eventually, replica_of, routing
from tests.server.live_server import serving_fake

if TYPE_CHECKING:
    from pathlib import Path

    from anaphora.router.replica import Replica

CONFIG_HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
HEAD = "apiVersion: llm-d.ai/v1alpha2\nkind: InferenceObjective\nmetadata: {name: batch}\n"
REWRITE = "apiVersion: llm-d.ai/v1alpha2\nkind: InferenceModelRewrite\nmetadata: {name: canary}\n"


def rewrites_of(*resources: dict[str, Any], seed: int = 0) -> ModelRewrites:
    table = ModelRewrites(random.Random(seed))
    table.set("test", [msgspec.convert(resource, InferenceModelRewrite) for resource in resources])
    return table


def target_of(table: ModelRewrites, model: str) -> str | None:
    found = table.rewrite(model)
    return None if found is None else found.target


# Which rule counts


def test_a_rule_for_a_name_comes_before_one_for_all() -> None:
    table = rewrites_of(rewrite("all", None, ("base", None)), rewrite("one", "chat", ("chat-v1", None)))
    assert [target_of(table, model) for model in ("chat", "other")] == ["chat-v1", "base"]


def test_of_two_rules_for_a_name_the_older_resource_counts() -> None:
    new, old = rewrite("a", "chat", ("new", None)), rewrite("b", "chat", ("old", None))
    old["metadata"]["creationTimestamp"] = "2025-12-31T23:59:59Z"
    assert target_of(rewrites_of(new, old), "chat") == "old"


def test_without_a_rule_a_model_stays() -> None:
    assert target_of(rewrites_of(rewrite("r", "chat", ("chat-v1", None))), "else") is None
    assert target_of(rewrites_of(), "chat") is None


@pytest.mark.parametrize(
    ("weights", "shares"),
    [((90, 10), (0.9, 0.1)), ((None, None), (0.5, 0.5)), ((1, 1), (0.5, 0.5)), ((3, None), (1.0, 0.0))],
)
def test_targets_are_drawn_by_weight(weights: Any, shares: Any) -> None:
    table = rewrites_of(rewrite("r", "chat", *zip(("a", "b"), weights, strict=True)))
    drawn = Counter(target_of(table, "chat") for _ in range(4000))
    assert [drawn[name] / 4000 for name in ("a", "b")] == pytest.approx(shares, abs=0.03)


@given(st.integers(0, 2**32))
def test_the_same_seed_draws_the_same_targets(seed: int) -> None:
    one, two = (rewrites_of(rewrite("r", "m", ("a", 1), ("b", 2), ("c", 3)), seed=seed) for _ in range(2))
    assert [target_of(one, "m") for _ in range(20)] == [target_of(two, "m") for _ in range(20)]


# Who is shed


def fleet_of(*loads: tuple[int, float]) -> list[Replica]:
    fleet = Fleet(CostPolicy())
    for i, (waiting, usage) in enumerate(loads):
        replica = fleet.add(ReplicaSpec.of(f"http://r{i}:1"))
        replica.load.num_waiting, replica.load.kv_usage = waiting, usage
    return list(fleet.replicas.values())


@pytest.mark.parametrize(
    ("loads", "saturation"),
    [
        ([(0, 0.0)], 0.0),
        ([(5, 0.1)], 1.0),
        ([(1, 0.8)], 1.0),
        ([(10, 0.0), (0, 0.0)], 1.0),
        ([(5, 0.0), (0, 0.4)], 0.75),
        ([], 0.0),
    ],
)
def test_saturation_is_the_mean_of_queue_or_cache_by_their_limits(loads: Any, saturation: float) -> None:
    assert Admission().saturation(fleet_of(*loads)) == pytest.approx(saturation)


def test_a_limit_of_concurrency_counts_what_was_sent() -> None:
    (replica,) = fleet_of((9, 0.9))
    for _ in range(3):
        replica.load.depart(100, 0.0)
    assert Concurrency(4).of(replica) == 0.75
    assert Concurrency(400, lambda: 0.0).of(replica) == 0.75


@pytest.mark.parametrize(
    ("plugins", "detector"),
    [
        ("[]", Utilization()),
        ("[{type: utilization-detector, parameters: {queueDepthThreshold: 2, kvCacheUtilThreshold: 0.5}}]",
         Utilization(2, 0.5)),
        ("[{type: concurrency-detector, parameters: {maxConcurrency: 7}}]\n"
         "saturationDetector: {pluginRef: concurrency-detector}", Concurrency(7)),
        ("[{type: concurrency-detector, parameters: {mode: tokens}}]\n"
         "saturationDetector: {pluginRef: concurrency-detector}", Concurrency(1_000_000, time.monotonic)),
    ],
)  # fmt: skip
def test_a_configuration_names_what_saturated_means(plugins: str, detector: Saturation) -> None:
    assert parse_config(f"{CONFIG_HEAD}plugins: {plugins}").saturation == detector


@pytest.mark.parametrize(
    ("plugins", "problem"),
    [
        ("[{type: queue-scorer}]\nsaturationDetector: {pluginRef: queue-scorer}", "is no detector"),
        ("[{type: concurrency-detector, parameters: {mode: x}}]\n"
         "saturationDetector: {pluginRef: concurrency-detector}", "expected requests or tokens, got 'x'"),
        ("[{type: utilization-detector, parameters: {queueDepthThreshold: 0}}]", "queueDepthThreshold: expected"),
    ],
)  # fmt: skip
def test_a_detector_that_is_none_is_refused(plugins: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_config(f"{CONFIG_HEAD}plugins: {plugins}")


def test_what_was_sent_beyond_a_replicas_places_waits_before_its_metrics_say_so() -> None:
    (replica,) = fleet_of((0, 0.0))
    replica.max_running = 2
    for _ in range(7):
        replica.load.depart(100, 0.0)
    assert Admission().saturation([replica]) == 1.0


def test_only_negative_priorities_are_shed_and_only_when_saturated() -> None:
    full, idle = fleet_of((9, 0.0)), fleet_of((0, 0.0))
    admission = Admission()
    for priority, replicas in ((0, full), (7, full), (-1, idle), (-1, [])):
        admission.check(priority, replicas)
    with pytest.raises(ApiError) as refused:
        admission.check(-1, full)
    assert refused.value.status == 429


def test_the_first_header_names_the_objective_and_unknown_ones_count_as_0() -> None:
    admission = Admission()
    admission.set("new", [msgspec.convert(objective("a", 5), InferenceObjective)])
    admission.set("old", [msgspec.convert(o, InferenceObjective) for o in (objective("a", -5), objective("b", -2))])
    new, old = b"x-llm-d-inference-objective", b"x-gateway-inference-objective"
    assert admission.priority({new: b"a", old: b"b"}) == 5
    assert admission.priority({old: b"b"}) == -2
    assert admission.priority({old: b"\xff"}) == 0
    assert admission.priority({}) == 0


# What a file may say


def test_documents_of_both_kinds_and_groups() -> None:
    old = HEAD.replace("llm-d.ai", "inference.networking.x-k8s.io")
    text = f"{HEAD}spec: {{poolRef: {{name: p}}, priority: -3}}\n---\n{old}spec: {{poolRef: {{name: q}}}}\n---\n"
    assert [o.spec.priority for o in parse_resources(text).objectives] == [-3, None]
    assert [o.spec.priority for o in parse_resources(text, "q").objectives] == [None]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kind: Pod", "document 1: kind: expected InferenceObjective or InferenceModelRewrite, got 'Pod'"),
        ("- 1", "document 1: expected an object"),
        ("{", "not valid YAML"),
        (HEAD.replace("v1alpha2", "v9"), "apiVersion: expected llm-d.ai/v1alpha2 or"),
        (HEAD, "document 1: object missing required field `spec`"),
        (f"{HEAD}spec: {{poolRef: {{name: p}}, priority: high}}", "spec.priority: expected `int | null`, got `str`"),
        (f"{HEAD}spec: {{poolRef: {{name: p}}, prioritty: 1}}", "spec.prioritty: no such field"),
        (f"{HEAD}spec: {{poolRef: {{name: p, namespace: x}}}}", "spec.poolRef.namespace: no such field"),
        (f"---\n{HEAD}spec: {{priority: 1}}", "spec: object missing required field `poolRef`"),
        (f"{REWRITE}spec: {{poolRef: {{name: p}}, rules: [{{targets: []}}]}}", "spec.rules[0].targets"),
        (
            f"{REWRITE}spec: {{poolRef: {{name: p}}, rules: [{{targets: [{{modelRewrite: m, weight: 0}}]}}]}}",
            "spec.rules[0].targets[0].weight: expected `int` >= 1",
        ),
        (
            f"{REWRITE}spec: {{poolRef: {{name: p}}, rules: [{{targets: [{{modelRewrite: m}}], matches: "
            "[{model: {type: Prefix, value: x}}]}]}",
            "spec.rules[0].matches[0].model.type: invalid enum value 'Prefix'",
        ),
    ],
)
def test_a_fault_is_named_by_its_path(text: str, problem: str) -> None:
    with pytest.raises(ResourceError) as error:
        parse_resources(text)
    assert problem in str(error.value)


def test_a_time_in_yaml_is_a_time_in_text() -> None:
    text = f"{REWRITE.replace('canary}', 'canary, creationTimestamp: 2026-01-01T00:00:00Z}')}"
    (resource,) = parse_resources(f"{text}spec: {{poolRef: {{name: p}}, rules: []}}").rewrites
    assert resource.metadata.creation_timestamp == "2026-01-01T00:00:00Z"


def test_a_faulty_file_stops_the_start_and_changes_nothing_later(tmp_path: Path) -> None:
    file = tmp_path / "resources.yaml"
    file.write_text("kind: Pod")
    with pytest.raises(RouteError, match=r"resources.yaml: document 1: kind"):
        build_app(RouteOptions(resources_file=file), TextEstimate())
    rule = f"{REWRITE}spec: {{poolRef: {{name: p}}, rules: [{{targets: [{{modelRewrite: alphabet}}]}}]}}"
    file.write_text(rule)
    with serving_fake() as a, routing(a.url, resources_file=file) as router:
        assert router.chat("hello", model="anything").json()["model"] == "alphabet"
        file.write_text("kind: Pod")
        assert router.chat("hello", model="anything").status_code == 200
        file.write_text("")
        eventually(lambda: router.chat("hello", model="anything").status_code == 404)


# Through the proxy


def test_a_header_names_the_model_where_no_rule_does() -> None:
    with serving_fake() as a, routing(a.url) as router:
        body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        named = {"x-gateway-model-name-rewrite": "alphabet"}
        response = router.client.post("/v1/chat/completions", json=body, headers=named)
        assert replica_of(response)
        explained = router.explain(response)
        assert (explained["requested_model"], explained["model"]) == ("chat", "alphabet")


def test_a_shed_request_gets_429_and_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "resources.yaml"
    file.write_text(f"{HEAD}spec: {{poolRef: {{name: p}}, priority: -3}}")
    with serving_fake() as a, routing(a.url, resources_file=file, max_running=1) as router:
        (replica,) = router.app._fleet.replicas.values()
        replica.max_running = -5
        batch = {"x-llm-d-inference-objective": "batch"}
        body = {"model": "alphabet", "prompt": "abc", "max_tokens": 2}
        refused = router.client.post("/v1/completions", json=body, headers=batch)
        assert refused.status_code == 429
        assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
        assert refused.json()["error"]["code"] == "saturated"
        assert router.client.post("/v1/completions", json=body).status_code == 200
        assert 'anaphora_router_shed_requests_total{priority="-3"} 1.0' in router.client.get("/metrics").text
