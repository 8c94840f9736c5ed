"""POST /v1/completions: prompts in all their forms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.server.events import read_events
from tests.server.live_server import serving_fake

if TYPE_CHECKING:
    from tests.server.live_server import LiveServer

PATH = "/v1/completions"
ABC = [97, 98, 99]


def answer(live: LiveServer, prompt: Any, **fields: Any) -> dict[str, Any]:
    response = live.post(PATH, {"prompt": prompt, "max_tokens": 2, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_answer_has_every_field_that_clients_read(live: LiveServer) -> None:
    body = answer(live, "abc")
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "text_completion",
        "model": "alphabet",
        "choices": [{"index": 0, "text": "de", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("prompt", "texts", "num_tokens"),
    [
        ("abc", ["de"], 3),
        (ABC, ["de"], 3),
        (["abc", "k"], ["de", "lm"], 4),
        ([ABC, [107]], ["de", "lm"], 4),
    ],
    ids=["text", "ids", "texts", "lists of ids"],
)
def test_prompt_takes_text_or_ids_or_lists_of_either(
    live: LiveServer, prompt: Any, texts: list[str], num_tokens: int
) -> None:
    body = answer(live, prompt)
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
    assert body["usage"]["prompt_tokens"] == num_tokens


def test_samples_are_numbered_prompt_by_prompt(live: LiveServer) -> None:
    body = answer(live, ["abc", "k"], n=2)
    assert [choice["text"] for choice in body["choices"]] == ["de", "de", "lm", "lm"]
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 8


def test_cached_tokens_are_those_of_each_prompts_first_sample(own: LiveServer) -> None:
    long = "a" * 33
    answer(own, long)
    body = answer(own, [long, "b" * 33], n=2)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


def test_max_tokens_default_to_16_as_openai_has_it(live: LiveServer) -> None:
    assert answer(live, "\x01", max_tokens=None)["usage"]["completion_tokens"] == 16


def test_default_max_tokens_shrink_to_what_the_context_leaves(live: LiveServer) -> None:
    body = answer(live, "a" * 2045, max_tokens=None)
    assert body["usage"]["completion_tokens"] == 3


def test_logprobs_are_lists_side_by_side(live: LiveServer) -> None:
    choice = answer(live, "abc", logprobs=1)["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["d", "e"],
        "token_logprobs": [0.0, 0.0],
        "top_logprobs": [{"d": 0.0}, {"e": 0.0}],
        "text_offset": [0, 1],
    }


def test_stream_brings_the_text_in_pieces_with_running_offsets(live: LiveServer) -> None:
    fields = {"prompt": "abc", "max_tokens": 2, "stream": True, "logprobs": 0}
    *chunks, done = read_events(live.post(PATH, fields))
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["d", "e"]
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0], [1]]
    assert [choice["finish_reason"] for choice in choices] == [None, "length"]


def test_neutral_values_of_unsupported_fields_are_accepted(live: LiveServer) -> None:
    fields = {"echo": False, "best_of": 1, "suffix": "", "presence_penalty": 0.0, "logit_bias": {}}
    assert answer(live, "abc", **fields)["choices"][0]["text"] == "de"


def test_server_without_caching_finds_and_leaves_nothing() -> None:
    with serving_fake(uses_cache=False) as server:
        bodies = [answer(server, "a" * 40) for _ in range(2)]
        assert server.engine.manager.num_cached_blocks == 0
    assert [body["usage"]["prompt_tokens_details"] for body in bodies] == [{"cached_tokens": 0}] * 2
