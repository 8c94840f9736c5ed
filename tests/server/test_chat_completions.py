"""POST /v1/chat/completions: what is honoured, and how it is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.server.events import read_events
from tests.server.live_server import serving_fake

if TYPE_CHECKING:
    from tests.server.live_server import LiveServer

PATH = "/v1/chat/completions"


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def text(live: LiveServer, **fields: Any) -> str:
    response = live.post(PATH, {"messages": user("abc"), "max_tokens": 4, **fields})
    assert response.status_code == 200, response.text
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


def test_answer_has_every_field_that_clients_read(live: LiveServer) -> None:
    response = live.post(PATH, {"messages": user("abc"), "max_tokens": 3})
    answer = response.json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "chat.completion",
        "model": "alphabet",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "def", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": len("user: abc"),
            "completion_tokens": 3,
            "total_tokens": len("user: abc") + 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_end_of_sequence_finishes_with_stop(live: LiveServer) -> None:
    answer = live.post(PATH, {"messages": user("w"), "max_tokens": 50}).json()
    assert answer["choices"][0]["message"]["content"] == "xyz"
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_bias_and_penalties_change_what_is_drawn(live: LiveServer) -> None:
    # The model all but says what comes next: its logit is 100, all others are 0.
    assert text(live, temperature=0, logit_bias={"120": 100, "121": 100.0, "122": -100}) == "defg"
    assert text(live, temperature=0, logit_bias={str(ord("d")): -100, str(ord("q")): 1}) == "qrst"
    # "e" is in the prompt's "user", so it falls to 1; "d" was drawn, so it rises to 2.
    assert text(live, temperature=0, repetition_penalty=100, presence_penalty=-2) == "dddd"
    assert text(live, temperature=0, frequency_penalty=-2, logit_bias={"100": 1, "101": -99.5}) == "dddd"
    assert text(live, temperature=1, min_p=0.5, top_k=3) == "defg"


def test_max_tokens_default_to_the_rest_of_the_context(live: LiveServer) -> None:
    live.post(PATH, {"messages": user("w")})
    assert live.engine.service.requests[-1].sampling.max_tokens == 2048 - len("user: w")


def test_max_completion_tokens_is_the_newer_name_of_max_tokens(live: LiveServer) -> None:
    assert text(live, max_tokens=None, max_completion_tokens=2) == "de"
    assert text(live, max_tokens=2, max_completion_tokens=2) == "de"


@pytest.mark.parametrize(("stop", "expected"), [("f", "de"), (["zz", "ef"], "d"), ([], "defg"), (None, "defg")])
def test_stop_strings_end_the_text_before_them(live: LiveServer, stop: Any, expected: str) -> None:
    assert text(live, stop=stop) == expected


def test_ignore_eos_goes_on_after_the_end(live: LiveServer) -> None:
    answer = live.post(PATH, {"messages": user("y"), "max_tokens": 3, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


def test_sampling_fields_reach_the_engine(live: LiveServer) -> None:
    text(live, temperature=0.5, top_p=0.25, top_k=7, seed=-3)
    sampling = live.engine.service.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 7, -3)


def test_null_stands_for_the_default(live: LiveServer) -> None:
    text(live, temperature=None, top_p=None, seed=None, n=None, stream=None, logprobs=None, tools=None, user=None)
    sampling = live.engine.service.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1.0, 1.0, 0, None)


def test_samples_of_a_prompt_are_one_request_to_the_engine(live: LiveServer) -> None:
    answer = live.post(PATH, {"messages": user("abc"), "max_tokens": 2, "n": 3, "seed": 10}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    last = live.engine.service.requests[-1]
    assert (last.sampling.n, last.sampling.seed) == (3, 10)


def test_prompt_counts_once_however_many_samples(live: LiveServer) -> None:
    usage = live.post(PATH, {"messages": user("abc"), "max_tokens": 2, "n": 3}).json()["usage"]
    assert usage["prompt_tokens"] == len("user: abc")
    assert usage["completion_tokens"] == 6


def test_text_parts_are_joined_by_newlines(live: LiveServer) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    live.post(PATH, {"messages": user(parts), "max_tokens": 1})
    assert live.engine.service.requests[-1].prompt == live.engine.model.tokenizer.encode("user: ab\nc")


def test_developer_is_the_newer_name_of_system(live: LiveServer) -> None:
    live.post(PATH, {"messages": [{"role": "developer", "content": "be brief"}, *user("a")], "max_tokens": 1})
    assert live.engine.service.requests[-1].prompt == live.engine.model.tokenizer.encode("system: be brief\nuser: a")


def test_an_answer_can_be_sent_back_as_it_came(live: LiveServer) -> None:
    said = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None,
            "function_call": None, "tool_calls": None}  # fmt: skip
    assert live.post(PATH, {"messages": [*user("a"), said, *user("abc")], "max_tokens": 1}).status_code == 200


def test_special_tokens_in_messages_are_special(live: LiveServer) -> None:
    usage = live.post(PATH, {"messages": user("a<eos>b"), "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == len("user: ab") + 1


def test_tools_are_rendered_when_the_model_is_not_to_call_them(live: LiveServer) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    response = live.post(PATH, {"messages": user("a"), "max_tokens": 1, "tools": [tool], "tool_choice": "none"})
    assert response.status_code == 200
    assert live.engine.service.requests[-1].prompt == live.engine.model.tokenizer.encode("[tools 1]user: a")


def test_logprobs_name_the_token_its_bytes_and_alternatives(live: LiveServer) -> None:
    fields = {"messages": user("abc"), "max_tokens": 1, "logprobs": True, "top_logprobs": 1}
    choice = live.post(PATH, fields).json()["choices"][0]
    token = {"token": "d", "logprob": 0.0, "bytes": [ord("d")]}
    assert choice["logprobs"] == {"content": [{**token, "top_logprobs": [token]}], "refusal": None}


def test_logprobs_without_top_logprobs_have_no_alternatives(live: LiveServer) -> None:
    choice = live.post(PATH, {"messages": user("abc"), "max_tokens": 2, "logprobs": True}).json()["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["d", "e"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], []]


@pytest.mark.parametrize(
    "field",
    [
        {"user": "u"},
        {"store": True},
        {"metadata": {"a": "b"}},
        {"service_tier": "auto"},
        {"parallel_tool_calls": False},
        {"prompt_cache_key": "k"},
        {"prompt_cache_retention": "24h"},
        {"safety_identifier": "s"},
        {"presence_penalty": 0, "frequency_penalty": 0.0},
        {"logit_bias": {}},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"tools": [], "tool_choice": "auto"},
    ],
    ids=str,
)
def test_fields_that_cannot_change_the_answer_are_accepted(live: LiveServer, field: dict[str, Any]) -> None:
    assert text(live, **field) == "defg"


def test_second_turn_finds_the_first_in_the_cache(own: LiveServer) -> None:
    first = user("a" * 60)
    said = own.post(PATH, {"messages": first, "max_tokens": 20}).json()
    assert said["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    messages = [*first, {"role": "assistant", "content": "b"}, *user("c")]
    again = own.post(PATH, {"messages": messages, "max_tokens": 1}).json()
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}


def test_cache_salt_separates_and_rejoins(own: LiveServer) -> None:
    def cached(salt: str | None) -> int:
        fields = {"messages": user("a" * 60), "max_tokens": 1, "cache_salt": salt}
        count: int = own.post(PATH, fields).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert [cached("one"), cached("two"), cached(None)] == [0, 0, 0]
    assert [cached("one"), cached("two"), cached(None)] == [64, 64, 64]


def test_priority_is_heeded_where_that_is_allowed(live: LiveServer) -> None:
    text(live, priority=-3)
    assert live.engine.service.requests[-1].priority == 0
    with serving_fake(allows_priority=True) as open_to_clients:
        text(open_to_clients, priority=-3)
        assert open_to_clients.engine.service.requests[-1].priority == -3


def test_an_answer_that_is_not_whole_at_its_deadline_is_a_504_that_names_it(live: LiveServer) -> None:
    asked = {"messages": user("abc"), "ignore_eos": True, "max_tokens": 2000}
    answer = live.post(PATH, {**asked, "deadline_s": 1e-6})
    assert answer.status_code == 504
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == ("deadline_s", "deadline_passed")
    assert answer.headers["x-should-retry"] == "false"
    assert text(live, deadline_s=60) == "defg"


def test_a_stream_ends_with_the_deadlines_error(live: LiveServer) -> None:
    asked = {"messages": user("abc"), "max_tokens": 4, "stream": True, "deadline_s": 1e-6}
    events = live.post(PATH, asked).text
    assert '"code":"deadline_passed"' in events
    assert "[DONE]" not in events


def test_model_revision_is_part_of_the_namespace(live: LiveServer) -> None:
    text(live, cache_salt="tenant")
    namespace = live.engine.service.requests[-1].namespace
    assert (namespace.model, namespace.salt) == ("r1", "tenant")


def test_stream_opens_with_the_role_and_ends_with_done(live: LiveServer) -> None:
    *chunks, done = read_events(live.post(PATH, {"messages": user("abc"), "max_tokens": 2, "stream": True}))
    assert done == "[DONE]"
    assert {(chunk["object"], chunk["model"]) for chunk in chunks} == {("chat.completion.chunk", "alphabet")}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "d"},
        {"content": "e"},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]


def test_stream_with_usage_has_it_in_a_last_chunk_of_its_own(own: LiveServer) -> None:
    fields = {"messages": user("a" * 60), "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    own.post(PATH, fields)
    *chunks, last, _ = read_events(own.post(PATH, fields))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 66,
        "completion_tokens": 2,
        "total_tokens": 68,
        "prompt_tokens_details": {"cached_tokens": 64},
    }


def test_stream_of_several_samples_marks_each_chunk_with_its_index(live: LiveServer) -> None:
    fields = {"messages": user("abc"), "max_tokens": 3, "stream": True, "n": 2}
    *chunks, _ = read_events(live.post(PATH, fields))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: "def", 1: "def"}


def test_stream_holds_back_what_may_begin_a_stop_string(live: LiveServer) -> None:
    fields = {"messages": user("abc"), "max_tokens": 9, "stream": True, "stop": "fgh"}
    *chunks, _ = read_events(live.post(PATH, fields))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "de"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_stream_carries_logprobs_token_by_token(live: LiveServer) -> None:
    fields = {"messages": user("abc"), "max_tokens": 2, "stream": True, "logprobs": True}
    _, *chunks, _ = read_events(live.post(PATH, fields))
    tokens = [[entry["token"] for entry in chunk["choices"][0]["logprobs"]["content"]] for chunk in chunks]
    assert tokens == [["d"], ["e"]]
