"""The official client against a real server over the fake engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import openai
import pydantic
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from anaphora.server.openai_api import ChatCompletionRequest, CompletionRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.live_server import LiveServer

USER = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="alphabet", messages=USER, max_tokens=3, logprobs=True)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "def"
    assert answer.choices[0].logprobs.content[0].token == "d"  # type: ignore[union-attr,index]
    assert answer.usage.prompt_tokens_details.cached_tokens == 0  # type: ignore[union-attr]


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="alphabet",
        messages=USER,  # type: ignore[arg-type]
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "def"
    assert last.usage.completion_tokens == 3


class Place(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=5)
    floors: Literal[1, 2, 3]


class Town(pydantic.BaseModel):
    centre: Place
    is_old: bool
    others: list[Place] = pydantic.Field(max_length=2)


def test_chat_parses_into_the_clients_own_type(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    answer = client.chat.completions.parse(
        model="alphabet",
        messages=USER,  # type: ignore[arg-type]
        response_format=Town,
        seed=3,
        temperature=1,
    )
    assert isinstance(answer.choices[0].message.parsed, Town)


def test_chat_stream_helper_assembles_the_message(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "w"}]
    with client.chat.completions.stream(model="alphabet", messages=messages) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "xyz"
    assert final.choices[0].finish_reason == "stop"


def test_completions(client: openai.OpenAI) -> None:
    assert client.completions.create(model="alphabet", prompt=[97, 98], max_tokens=2).choices[0].text == "cd"
    stream = client.completions.create(model="alphabet", prompt="ab", max_tokens=2, stream=True)
    assert [chunk.choices[0].text for chunk in stream] == ["c", "d"]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["alphabet"]
    assert client.models.retrieve("alphabet").owned_by == "anaphora"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("org/other")


def test_refusals_arrive_as_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="alphabet", messages=USER, max_tokens=-1)  # type: ignore[arg-type]
    assert (refused.value.param, refused.value.code) == ("max_tokens", "invalid_value")
    with pytest.raises(openai.BadRequestError, match="context is 2048 tokens") as refused:
        client.completions.create(model="alphabet", prompt="a" * 3000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-x", messages=USER)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"


def test_faults_in_a_stream_arrive_as_the_clients_own_exceptions(client: openai.OpenAI, live: LiveServer) -> None:
    live.engine.executor.failures.append(RuntimeError("oh"))
    with pytest.raises(openai.APIError, match="The server had an error"):
        list(client.completions.create(model="alphabet", prompt="abc", stream=True))


def test_own_fields_travel_in_the_extra_body(client: openai.OpenAI, live: LiveServer) -> None:
    extra = {"top_k": 3, "cache_salt": "mine", "ignore_eos": True}
    client.chat.completions.create(model="alphabet", messages=USER, max_tokens=1, extra_body=extra)  # type: ignore[arg-type]
    request = live.engine.service.requests[-1]
    assert (request.sampling.top_k, request.namespace.salt, request.sampling.ignore_eos) == (3, "mine", True)


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (chat_create_params.CompletionCreateParamsBase, ChatCompletionRequest),
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
    ],
)
def test_every_field_of_the_client_is_known_by_name(params: type, body: type) -> None:
    unknown = params.__annotations__.keys() - set(body.__struct_fields__)  # type: ignore[attr-defined]
    assert unknown == set()
