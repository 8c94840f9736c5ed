"""Whatever the body: an answer, or a refusal in OpenAI's shape, and never a fault of the server's own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anaphora.server.openai_api import ChatCompletionRequest, CompletionRequest

if TYPE_CHECKING:
    from tests.server.live_server import LiveServer

FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.one_of(st.integers(), st.integers(-2, 30), st.floats(allow_nan=False, allow_infinity=False))
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
anything = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4))
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "developer"]), "content": texts},
        optional={"name": texts},
    ),
    min_size=1,
    max_size=3,
)
prompts = st.one_of(
    texts,
    st.lists(texts, max_size=3),
    st.lists(st.integers(-1, 300), max_size=5),
    st.lists(st.lists(st.integers(0, 256), max_size=4), max_size=3),
)


sound = {
    "n": st.integers(1, 3),
    "stream": st.booleans(),
    "stop": texts | st.lists(texts, max_size=4),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(0, 300),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100),
    "logit_bias": st.dictionaries(st.integers(0, 256).map(str), st.floats(-100, 100), max_size=3),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    "deadline_s": st.sampled_from([1e-4, 60.0]),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "ignore_eos": st.booleans(),
    "priority": st.integers(-1000, 1000),
    "cache_salt": st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=128),
}


def bodies(struct: type, prompt: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Sound bodies, most of them with a field or two that may be anything."""
    known = sorted(struct.__struct_fields__)  # type: ignore[attr-defined]
    base = {"model": st.just("alphabet"), "max_tokens": st.integers(1, 5), **prompt}
    wild = st.dictionaries(st.sampled_from(known), anything, max_size=2)
    unknown = st.just({}) | st.dictionaries(texts, anything, max_size=1)
    return st.builds(lambda *parts: {k: v for part in parts for k, v in part.items()},
                     st.fixed_dictionaries(base, optional=sound), wild, unknown)  # fmt: skip


def check(live: LiveServer, path: str, body: dict[str, Any]) -> None:
    response = live.client.post(path, content=json.dumps(body))
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith("data: [DONE]\n\n") or "deadline_passed" in response.text, response.text
        else:
            assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
        return
    assert 400 <= response.status_code < 500 or "deadline_passed" in response.text, response.text
    error = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["message"]


@FUZZ
@given(body=bodies(ChatCompletionRequest, {"messages": messages}))
def test_chat_bodies(live: LiveServer, body: dict[str, Any]) -> None:
    check(live, "/v1/chat/completions", body)


@FUZZ
@given(body=bodies(CompletionRequest, {"prompt": prompts}))
def test_completion_bodies(live: LiveServer, body: dict[str, Any]) -> None:
    check(live, "/v1/completions", body)


@FUZZ
@given(content=st.one_of(st.binary(max_size=40), anything.map(lambda value: json.dumps(value).encode())))
def test_bodies_of_any_bytes(live: LiveServer, content: bytes) -> None:
    response = live.client.post("/v1/chat/completions", content=content)
    assert response.status_code == 400
    assert sorted(response.json()["error"]) == ["code", "message", "param", "type"]
