"""Bad input: a 4xx in OpenAI's shape that names the field, and a server that lives on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.live_server import serving_fake

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.live_server import LiveServer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "abc"}]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.fixture(autouse=True)
def _lives_on(live: LiveServer) -> Iterator[None]:
    yield
    assert live.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 1}).json()["choices"][0]["text"] == "d"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": -1}, "max_tokens", "max_tokens: -1 is not allowed; it must be at least 1"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: 0 is not allowed; it must be at least 1"),
        ({"max_completion_tokens": -1}, "max_completion_tokens",
         "max_completion_tokens: -1 is not allowed; it must be at least 1"),
        ({"max_tokens": "7"}, "max_tokens", "max_tokens: expected `int | null`, got `str`"),
        ({"max_tokens": 7.5}, "max_tokens", "max_tokens: expected `int | null`, got `float`"),
        ({"max_tokens": True}, "max_tokens", "max_tokens: expected `int | null`, got `bool`"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens",
         "max_tokens: expected the same number as max_completion_tokens, or only one of the two"),
        ({"temperature": 2.1}, "temperature", "temperature: 2.1 is not allowed; it must be between 0 and 2"),
        ({"top_p": 0}, "top_p", "top_p: 0.0 is not allowed; it must be above 0 and at most 1"),
        ({"top_k": -1}, "top_k", "top_k: -1 is not allowed; it must be 0 (off) or a positive integer"),
        ({"min_p": 2}, "min_p", "min_p: 2.0 is not allowed; it must be between 0 and 1"),
        ({"presence_penalty": 2.5}, "presence_penalty",
         "presence_penalty: 2.5 is not allowed; it must be between -2 and 2"),
        ({"frequency_penalty": "x"}, "frequency_penalty", "frequency_penalty: expected `float | null`, got `str`"),
        ({"repetition_penalty": 0}, "repetition_penalty",
         "repetition_penalty: 0.0 is not allowed; it must be between 0.01 and 100"),
        ({"logit_bias": {"257": 1}}, "logit_bias", "logit_bias: 257 is no token id; allowed are 0 to 256"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias: expected token ids as keys, got 'a'"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]",
         "logit_bias[5]: 101.0 is not allowed; it must be between -100 and 100"),
        ({"n": 0}, "n", "n: expected `int` >= 1"),
        ({"n": 129}, "n", "n: expected `int` <= 128"),
        ({"stop": list("abcde")}, "stop", "stop: expected at most 4 strings, none of them empty"),
        ({"stop": ["a", 1]}, "stop[1]", "stop[1]: expected `str`, got `int`"),
        ({"stop": ""}, "stop", "stop: expected at most 4 strings, none of them empty"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs",
         "top_logprobs: 21 is not allowed; it must be between 0 and 20"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs: allowed only with logprobs = true"),
        ({"stream_options": {"include_usage": True}}, "stream_options",
         "stream_options: allowed only with stream = true"),
        ({"deadline_s": 0}, "deadline_s", "deadline_s: expected `float` > 0.0"),
        ({"priority": 1001}, "priority", "priority: expected `int` <= 1000"),
        ({"cache_salt": ""}, "cache_salt", "cache_salt: expected `str` of length >= 1"),
        ({"cache_salt": "s" * 129}, "cache_salt", "cache_salt: expected `str` of length <= 128"),
        ({"cache_salt": 7}, "cache_salt", "cache_salt: expected `str | null`, got `int`"),
        ({"messages": []}, "messages", "messages: expected at least one message"),
        ({"messages": "abc"}, "messages", "messages: expected `array`, got `str`"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "Missing required parameter: 'messages[0].role'."),
        ({"messages": [*USER, {"role": "assistant", "content": None}]}, "messages[1].content",
         "messages[1].content: expected a string or a list of text parts"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role",
         "messages[0].role: expected system, developer, user or assistant, got 'king'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text",
         "Missing required parameter: 'messages[0].content[0].text'."),
    ],
)  # fmt: skip
def test_bad_value_is_named_with_what_is_allowed(
    live: LiveServer, fields: dict[str, Any], param: str, message: str
) -> None:
    error = error_of(live.post(CHAT, {"messages": USER, **fields}))
    assert error["param"] == param
    assert error["message"] == message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "1"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
        ({"messages": [*USER, {"role": "user", "content": [
            {"type": "text", "text": "what is this?"},
            {"type": "image_url", "image_url": {"url": "data:..."}},
        ]}]}, "messages[1].content[1].type"),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_never_silently_dropped(
    live: LiveServer, fields: dict[str, Any], param: str
) -> None:
    error = error_of(live.post(CHAT, {"messages": USER, **fields}))
    assert (error["param"], error["code"]) == (param, "unsupported_value")
    assert error["message"].startswith(f"{param}: not supported by this server; ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True}, "echo"), ({"suffix": "x"}, "suffix"), ({"best_of": 3}, "best_of")],
)
def test_completions_refuse_what_they_cannot_do(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    error = error_of(live.post(COMPLETIONS, {"prompt": "a", **fields}))
    assert (error["param"], error["code"]) == (param, "unsupported_value")


@pytest.mark.parametrize(
    ("prompt", "param", "message"),
    [
        ("", "prompt", "prompt: no tokens; at least 1 is needed"),
        ([], "prompt", "prompt: no tokens; at least 1 is needed"),
        (["a", ""], "prompt[1]", "prompt[1]: no tokens; at least 1 is needed"),
        (["a", 1], "prompt[1]", "prompt[1]: expected all items to be of one kind, as the first"),
        ([97, -1], "prompt[1]", "prompt[1]: -1 is no token id; allowed are 0 to 256"),
        ([[97], [97, 257]], "prompt[1][1]", "prompt[1][1]: 257 is no token id; allowed are 0 to 256"),
        ([97, 2**40], "prompt[1]", "prompt[1]: 1099511627776 does not fit int32"),
        ({"a": 1}, "prompt", "prompt: expected `str | array`, got `object`"),
        ([1.5], "prompt[0]", "prompt[0]: expected `int | str | array`, got `float`"),
    ],
    ids=str,
)
def test_bad_prompt_is_named_by_its_place(live: LiveServer, prompt: Any, param: str, message: str) -> None:
    error = error_of(live.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1}))
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"n": 0}, "invalid_value"),
        ({"n": -1}, "invalid_value"),
        ({"n": 129}, "invalid_value"),
        ({"n": "2"}, "invalid_type"),
        ({"n": 1.5}, "invalid_type"),
        ({"seed": 2**63}, "invalid_value"),
        ({"seed": -(2**63) - 1}, "invalid_value"),
        ({"cache_salt": ""}, "invalid_value"),
        ({"cache_salt": "s" * 129}, "invalid_value"),
        ({"cache_salt": 7}, "invalid_type"),
        ({"temperature": 2.1}, "invalid_value"),
        ({"temperature": "warm"}, "invalid_type"),
        ({"max_tokens": 0}, "invalid_value"),
        ({"stop": ""}, "invalid_value"),
        ({"messages": []}, "invalid_value"),
        ({"messages": [{"role": "bob", "content": "a"}]}, "invalid_value"),
        ({"messages": [{"role": 7, "content": "a"}]}, "invalid_type"),
        ({"messages": [{"role": "user", "content": 7}]}, "invalid_type"),
    ],
    ids=str,
)
def test_code_tells_a_wrong_type_from_a_value_out_of_range(live: LiveServer, fields: dict[str, Any], code: str) -> None:
    assert error_of(live.post(CHAT, {"messages": USER, **fields}))["code"] == code


def test_too_many_choices_are_refused(live: LiveServer) -> None:
    error = error_of(live.post(COMPLETIONS, {"prompt": ["a"] * 100, "n": 11}))
    assert error["param"] == "prompt"


def test_unknown_field_is_refused_in_openais_words(live: LiveServer) -> None:
    error = error_of(live.post(CHAT, {"messages": USER, "foo": 1}))
    assert error["message"] == "Unrecognized request argument supplied: foo"
    assert (error["param"], error["code"]) == (None, None)


def test_unknown_field_inside_a_message_is_refused_by_its_path(live: LiveServer) -> None:
    error = error_of(live.post(CHAT, {"messages": [{"role": "user", "content": "a", "foo": 1}]}))
    assert (error["param"], error["code"]) == ("messages[0].foo", "unknown_parameter")


def test_missing_field_is_named(live: LiveServer) -> None:
    error = error_of(live.client.post(CHAT, json={"messages": USER}))
    assert (error["param"], error["code"]) == ("model", "missing_required_parameter")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"model": NaN}', b"\xff\xfe", b'{"model": "a", "messages": []} x', b'{"model": "\\ud800"}',
     b'{"tool_choice": ' + b"[" * 100_000],
    ids=["empty", "cut", "nan", "not utf-8", "trailing", "half a surrogate", "nested in a field"],
)  # fmt: skip
def test_invalid_json_is_a_400(live: LiveServer, body: bytes) -> None:
    assert error_of(live.client.post(CHAT, content=body))["code"] == "invalid_json"


def test_invalid_json_is_shown_where_it_is(live: LiveServer) -> None:
    body = b'{"model": "alphabet", "messages": [], "temperature": NaN, "seed": 1}'
    assert error_of(live.client.post(CHAT, content=body))["message"].endswith(
        '(byte 53), in: phabet", "messages": [], "temperature": NaN, "seed'
    )


def test_body_of_another_type_is_a_400(live: LiveServer) -> None:
    assert "expected `object`, got `array`" in error_of(live.client.post(CHAT, content=b"[]"))["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_unknown_model_is_a_404(live: LiveServer, path: str) -> None:
    fields = {"model": "gpt-x", "messages": USER} if path == CHAT else {"model": "gpt-x", "prompt": "a"}
    error = error_of(live.client.post(path, json=fields), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert error["message"] == "The model 'gpt-x' does not exist; this server has 'alphabet'."


def test_unknown_path_is_a_404_in_the_same_shape(live: LiveServer) -> None:
    assert error_of(live.client.get("/v1/nothing"), 404)["code"] == "unknown_url"


@pytest.mark.parametrize("path", [f"{CHAT}/", f"{COMPLETIONS}/", "/health/", "/metrics/"])
def test_path_with_a_slash_at_its_end_is_unknown_and_not_redirected(live: LiveServer, path: str) -> None:
    error = error_of(live.client.request("POST" if path.startswith("/v1") else "GET", path), 404)
    assert error["code"] == "unknown_url"
    assert path in error["message"]


def test_wrong_method_is_a_405_that_says_what_is_allowed(live: LiveServer) -> None:
    response = live.client.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_prompt_over_the_context_is_refused_with_the_numbers(live: LiveServer) -> None:
    error = error_of(live.post(CHAT, {"messages": [{"role": "user", "content": "a" * 3000}]}))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert error["message"] == (
        "messages: 3006 prompt tokens and max_tokens 1 make 3007 tokens; the longest context is 2048 tokens"
    )


def test_a_text_that_no_tokens_could_make_short_enough_is_refused_before_it_is_tokenised(live: LiveServer) -> None:
    error = error_of(live.post(COMPLETIONS, {"prompt": "a" * 20_000}))
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert error["message"] == ("prompt: the text has at least 4000 tokens; the longest request is 2048 tokens")


def test_a_stop_string_that_is_too_long_is_refused(live: LiveServer) -> None:
    error = error_of(live.post(COMPLETIONS, {"prompt": "a", "stop": ["b" * 1001]}))
    assert error["param"] == "stop"
    assert "1000 characters" in error["message"]
    assert len(error["message"]) < 300
    assert live.post(COMPLETIONS, {"prompt": "a", "stop": ["b" * 1000], "max_tokens": 1}).status_code == 200


def test_max_tokens_over_the_context_are_refused_with_the_numbers(live: LiveServer) -> None:
    error = error_of(live.post(CHAT, {"messages": USER, "max_completion_tokens": 2040}))
    assert (error["param"], error["code"]) == ("max_completion_tokens", "context_length_exceeded")
    assert "9 prompt tokens" in error["message"]
    assert "2048 tokens" in error["message"]


def test_one_long_prompt_among_several_is_named_and_none_is_started(live: LiveServer) -> None:
    error = error_of(live.post(COMPLETIONS, {"prompt": ["a", "a" * 3000], "max_tokens": 5}))
    assert (error["param"], error["code"]) == ("prompt[1]", "context_length_exceeded")
    assert live.engine.service.aborted[-1] == live.engine.service.requests[-1].request_id


def test_prompt_that_can_never_fit_the_pool_is_refused_with_the_numbers() -> None:
    with serving_fake(FakeEngine(num_blocks=4)) as live:
        error = error_of(live.post(COMPLETIONS, {"prompt": "a" * 65}))
        assert error["param"] == "prompt"
        assert "need 5 KV blocks of 16 tokens; the pool has 4" in error["message"]
        fits = live.post(COMPLETIONS, {"prompt": "a" * 60, "max_tokens": None}).json()
        assert fits["usage"]["completion_tokens"] == 4


@pytest.fixture(scope="module")
def narrow() -> Iterator[LiveServer]:
    with serving_fake(body_limit_bytes=1000) as live:
        yield live


def body_of(num_bytes: int) -> bytes:
    head, tail = b'{"model":"alphabet","max_tokens":1,"prompt":"', b'"}'
    return head + b"a" * (num_bytes - len(head) - len(tail)) + tail


def test_body_at_the_limit_is_taken(narrow: LiveServer) -> None:
    assert narrow.client.post(COMPLETIONS, content=body_of(1000)).status_code == 200


def test_body_over_the_limit_is_a_413(narrow: LiveServer) -> None:
    error = error_of(narrow.client.post(COMPLETIONS, content=body_of(1001)), 413)
    assert error["code"] == "body_too_large"
    assert "1000 bytes" in error["message"]


def test_body_over_the_limit_of_unannounced_length_is_a_413(narrow: LiveServer) -> None:
    def pieces() -> Iterator[bytes]:
        yield from (body_of(1001)[i : i + 100] for i in range(0, 1001, 100))

    response = narrow.client.post(COMPLETIONS, content=pieces())
    assert response.request.headers["transfer-encoding"] == "chunked"
    error_of(response, 413)


def test_client_that_sends_far_too_much_still_reads_the_answer() -> None:
    with serving_fake(body_limit_bytes=2**20) as live:
        error_of(live.client.post(COMPLETIONS, content=body_of(3 * 2**19)), 413)


def test_engine_fault_is_a_500_that_tells_nothing_of_the_inside(live: LiveServer) -> None:
    live.engine.executor.failures.append(RuntimeError("secret"))
    response = live.post(COMPLETIONS, {"prompt": "abc"})
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "The server had an error while processing the request; its log says more.",
        "type": "server_error",
        "param": None,
        "code": "internal",
    }


def test_server_fault_is_a_500_in_the_same_shape(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise KeyError("secret")

    with monkeypatch.context() as patch:
        patch.setattr(type(live.engine.model.chat_template), "render", fail)
        response = live.post(CHAT, {"messages": USER})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
