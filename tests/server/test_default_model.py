"""End to end: the official client, HTTP, the engine, the default model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest

from anaphora.engine.build import build_engine
from anaphora.engine.service import EngineService
from anaphora.server.app import OpenAIServer
from anaphora.server.demo_text import HANDBOOK
from anaphora.server.served_model import ServedModel
from tests.server.live_server import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

    from anaphora.model import Model

pytestmark = pytest.mark.model

NAME = "SmolLM2-135M-Instruct"
SECTION = HANDBOOK[:600]
FRANCE: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(default_model: Model) -> Iterator[openai.OpenAI]:
    engine = build_engine(default_model, kv_memory_bytes=2**28)
    api = OpenAIServer(EngineService(engine), ServedModel.of(default_model, engine))
    with running(api) as (_, url), openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, messages: list[ChatCompletionMessageParam], salt: str | None = None) -> ChatCompletion:
    return client.chat.completions.create(
        model=NAME, messages=messages, temperature=0, max_tokens=8, extra_body={"cache_salt": salt}
    )


def cached_tokens(answer: ChatCompletion) -> int | None:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens


def test_it_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = ask(client, FRANCE)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_has_the_same_text(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model=NAME, messages=FRANCE, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "The capital of France is Paris."


def test_second_turn_reuses_the_first(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": SECTION},
        {"role": "user", "content": "Who built the observatory?"},
    ]
    first = ask(client, messages)
    assert cached_tokens(first) == 0
    said = first.choices[0].message.content
    second = ask(client, [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "When?"}])
    assert first.usage is not None
    assert cached_tokens(second) is not None
    assert (cached_tokens(second) or 0) >= first.usage.prompt_tokens // 16 * 16


def test_cached_and_computed_answers_are_the_same(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": SECTION},
        {"role": "user", "content": "How many beds are there?"},
    ]
    cold, warm = ask(client, messages, salt="same"), ask(client, messages, salt="same")
    assert cached_tokens(cold) == 0
    assert cached_tokens(warm) != 0
    assert cold.choices[0].message.content == warm.choices[0].message.content


def test_salts_keep_tenants_apart(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": SECTION}]
    assert cached_tokens(ask(client, messages, salt="one")) == 0
    assert cached_tokens(ask(client, messages, salt="two")) == 0
    assert cached_tokens(ask(client, messages, salt="one")) != 0
