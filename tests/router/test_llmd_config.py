"""llm-d's configuration files: what they mean here, and what is refused."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.fleet.pickers import MaxScorePicker, RandomPicker
from anaphora.fleet.profile import PrefixBasedDecider
from anaphora.fleet.scorers import session_token
from anaphora.fleet.view import ReplicaView, RequestView
from anaphora.router.llmd.config import ConfigError, parse_config
from tests.router.live_router import replica_of, routing
from tests.server.live_server import serving_fake

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
FULL = (
    HEAD
    + """
plugins:
- type: approx-prefix-cache-producer
  parameters: {blockSizeTokens: 64, lruCapacityPerServer: 5000}
- type: prefix-cache-scorer
- type: queue-scorer
- name: kv
  type: kv-cache-utilization-scorer
- type: random-picker
  parameters: {maxNumOfEndpoints: 2}
- type: single-profile-handler
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer, weight: 50}
  - {pluginRef: queue-scorer}
  - {pluginRef: kv, weight: 1.5}
"""
)


def test_a_whole_file() -> None:
    config = parse_config(FULL)
    profile = config.policy.profile
    assert [(s.name, s.weight) for s in profile.scorers] == [
        ("prefix-cache-scorer", 50),
        ("queue-scorer", 1),
        ("kv", 1.5),
    ]
    assert profile.picker == RandomPicker(2), "a picker that is declared serves profiles that name none"
    assert config.num_blocks == 5000


def test_without_plugins_the_defaults_are_llmds() -> None:
    profile = parse_config(HEAD).policy.profile
    assert {(s.name, s.weight) for s in profile.scorers} == {
        ("queue-scorer", 2), ("kv-cache-utilization-scorer", 2), ("prefix-cache-scorer", 3),
    }  # fmt: skip
    assert profile.picker == MaxScorePicker()
    assert profile.name == "default"


def test_without_profiles_every_plugin_is_in_the_default_one() -> None:
    text = HEAD + "plugins: [{type: queue-scorer}, {type: decode-filter}, {type: max-score-picker}]"
    profile = parse_config(text).policy.profile
    assert [name for name, _ in profile.filters] == ["decode-filter"]
    assert [(s.name, s.weight) for s in profile.scorers] == [("queue-scorer", 1.0)]


def test_the_old_group_and_json_are_read_too() -> None:
    parse_config('{"apiVersion": "inference.networking.x-k8s.io/v1alpha1", "kind": "EndpointPickerConfig"}')


def test_precise_producers_say_where_events_are() -> None:
    config = parse_config(
        HEAD
        + """
plugins:
- type: precise-prefix-cache-producer
  parameters:
    tokenProcessorConfig: {blockSizeTokens: 32, hashSeed: "42"}
    indexerConfig: {kvBlockIndexConfig: {costAwareMemoryConfig: {size: 2GiB}}}
    kvEventsConfig: {topicFilter: "kv@", podDiscoveryConfig: {socketPort: 5600}}
    speculativeIndexing: true
    speculativeTTL: 500ms
- type: prefix-cache-scorer
  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
"""
    )
    assert (config.block_size, config.kv_events_port, config.index_bytes) == (32, 5600, 2 * 2**30)
    assert config.speculative_ttl_s == 0.5


def test_prefill_and_decode() -> None:
    config = parse_config(
        HEAD
        + """
plugins:
- {type: prefix-cache-scorer}
- {type: prefill-filter}
- {type: decode-filter}
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 100}}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: prefix-based-pd-decider}}}
schedulingProfiles:
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: prefix-cache-scorer}]}
- {name: prefill, plugins: [{pluginRef: prefill-filter}]}
"""
    )
    assert config.policy.decider == PrefixBasedDecider(100)
    views = [
        ReplicaView("p", labels={"llm-d.ai/role": "prefill"}),
        ReplicaView("d1", labels={"llm-d.ai/role": "decode"}, matched_tokens=64),
        ReplicaView("d2"),
    ]

    def decide(num_tokens: int) -> tuple[str | None, str | None]:
        decision = config.policy.decide(RequestView(num_tokens, num_tokens // 16), views, random.Random())
        return decision.replica, decision.prefill

    assert decide(200) == ("d1", "p")
    assert decide(150) == ("d1", None), "too little is uncached"


REFUSED = [
    ("", "the file: expected `object`, got `null`"),
    ("kind: [", "not valid YAML"),
    (HEAD.replace("v1alpha1", "v9"), "apiVersion: expected llm-d.ai/v1alpha1"),
    (HEAD.replace("Picker", "Nose"), "kind: expected EndpointPickerConfig"),
    (HEAD + "plugin: []", "the file: object contains unknown field `plugin`"),
    (HEAD + "plugins: [{type: queue-scorer, weight: 1}]", "plugins[0]: object contains unknown field `weight`"),
    (HEAD + "plugins: [{type: magic}]", "plugins[0].type: 'magic' is not supported"),
    (
        HEAD + "plugins: [{type: queue-scorer}, {type: queue-scorer}]",
        "plugins[1].name: 'queue-scorer' is there already",
    ),
    (
        HEAD + "plugins: [{type: no-hit-lru-scorer, parameters: {lruSiez: 3}}]",
        "plugins[0].parameters: object contains unknown field `lruSiez`",
    ),
    (
        HEAD + "plugins:\n- type: precise-prefix-cache-producer\n"
        "  parameters: {kvEventsConfig: {podDiscoveryConfig: {x: 1}}}",
        "plugins[0].parameters.kvEventsConfig.podDiscoveryConfig: object contains unknown field `x`",
    ),
    (
        HEAD + "plugins: [{type: no-hit-lru-scorer, parameters: {lruSize: 0}}]",
        "plugins[0].parameters.lruSize: expected a number above 0, got 0",
    ),
    (
        HEAD + "plugins: [{type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: gone}}]",
        "plugins[0].parameters.prefixMatchInfoProducerName: no plugin is called 'gone'",
    ),
    (
        HEAD + "schedulingProfiles: [{name: a, plugins: [{pluginRef: gone}]}]",
        "schedulingProfiles[0].plugins[0].pluginRef: no plugin is called 'gone'",
    ),
    (HEAD + "schedulingProfiles: [{name: ''}]", "schedulingProfiles[0].name: expected a name"),
    (HEAD + "schedulingProfiles: [{name: a}, {name: a}]", "schedulingProfiles[1].name: 'a' is there already"),
    (
        HEAD + "schedulingProfiles: [{name: a}, {name: b}]",
        "schedulingProfiles: single-profile-handler takes one, got 2",
    ),
    (HEAD + "flowControl: {maxRequests: '5'}", "flowControl: not supported here"),
    (
        HEAD
        + "plugins: [{type: max-score-picker}]\n"
        + "schedulingProfiles: [{name: a, plugins: [{pluginRef: max-score-picker, weight: 2}]}]",
        "schedulingProfiles[0].plugins[0].weight: only scorers have one",
    ),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_what_is_wrong_is_refused_with_its_path(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    assert str(caught.value).startswith(message)


@given(st.text())
def test_no_text_fails_in_another_way(text: str) -> None:
    for whole in (text, HEAD + text):
        with contextlib.suppress(ConfigError):
            parse_config(whole)


def test_a_router_runs_by_a_file_and_finds_its_replicas_in_another(tmp_path: Path) -> None:
    with serving_fake() as a, serving_fake() as b:
        endpoints = "".join(
            f"- {{name: r{i}, address: 127.0.0.1, port: '{server.url.rpartition(':')[2]}'}}\n"
            for i, server in enumerate((a, b))
        )
        (tmp_path / "endpoints.yaml").write_text("endpoints:\n" + endpoints)
        file = tmp_path / "config.yaml"
        file.write_text(
            HEAD
            + """
plugins:
- {type: file-discovery, parameters: {path: endpoints.yaml, watchFile: true}}
- {type: prefix-cache-scorer}
- {type: no-hit-lru-scorer}
- {type: session-affinity-scorer}
dataLayer: {discovery: {pluginRef: file-discovery}}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer, weight: 3}
  - {pluginRef: session-affinity-scorer, weight: 2}
  - {pluginRef: no-hit-lru-scorer}
"""
        )
        with routing(config=file) as router:
            prompt = "a long prompt that fills some blocks, and then goes on. " * 4
            homes = [replica_of(router.complete(f"{i} {prompt}")) for i in range(4)]
            assert len(set(homes)) == 2, "requests without a hit alternate"
            again = router.complete(f"0 {prompt}")
            assert replica_of(again) == homes[0]
            assert again.headers["x-session-token"] == session_token(homes[0])
            other = router.client.post(
                "/v1/completions",
                json={"model": "alphabet", "prompt": "x", "max_tokens": 1},
                headers={"x-session-token": session_token(homes[1])},
            )
            assert replica_of(other) == homes[1]
