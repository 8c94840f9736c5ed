"""A body's prompt as tokens."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.model.chat_template import ChatTemplate
from anaphora.model.tokenizer import Tokenizer
from anaphora.router.prompt import ModelPrompts, Prompt, PromptBody, TextEstimate, read_body
from tests.tiny_models import CHAT_TEMPLATE, tiny_tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer())
TEMPLATE = ChatTemplate(CHAT_TEMPLATE)
PIECES = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "cat", " the", "\n", "12", " ", "é", "🙂"]


def body(**fields: Any) -> PromptBody:
    read = read_body(msgspec.json.encode(fields))
    assert read is not None
    return read


def chat(*contents: Any) -> PromptBody:
    roles = ("user", "assistant")
    return body(messages=[{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)])


def exact(request: PromptBody, prompts: ModelPrompts | None = None) -> Prompt:
    prompt = (prompts or ModelPrompts(TOKENIZER, TEMPLATE)).prompt(request)
    assert prompt.is_exact
    return prompt


@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_cutting_at_special_tokens_changes_no_id(text: str) -> None:
    assert exact(body(prompt=text)).tokens == TOKENIZER.encode(text)


def test_a_chat_is_rendered_as_the_engine_renders_it() -> None:
    said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    assert exact(chat("Hello", "Hi")).tokens == TOKENIZER.encode(TEMPLATE.render(said))
    in_parts = chat([{"type": "text", "text": "Hello"}], "Hi")
    assert exact(in_parts).tokens == exact(chat("Hello", "Hi")).tokens
    anthropic = body(system="Be brief.", messages=[{"role": "user", "content": "Hello"}])
    openai = body(messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}])
    assert exact(anthropic).tokens == exact(openai).tokens


def test_of_a_growing_conversation_only_the_new_turns_are_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ModelPrompts(TOKENIZER, TEMPLATE)
    exact(chat("a long question", "an answer", "and another"), prompts)
    encoded: list[str] = []
    encode = TOKENIZER.encode
    monkeypatch.setattr(TOKENIZER, "encode", lambda text, **kw: (encoded.append(text), encode(text, **kw))[1])
    exact(chat("a long question", "an answer", "and another", "fine", "thanks"), prompts)
    assert not any("long question" in text or "an answer" in text for text in encoded)
    assert any("thanks" in text for text in encoded)


def test_what_takes_too_long_is_estimated() -> None:
    times = iter(range(100))
    prompts = ModelPrompts(TOKENIZER, TEMPLATE, budget_s=0.5, clock=lambda: next(times))
    assert not prompts.prompt(chat("hello")).is_exact


def test_images_are_estimated_and_tell_prompts_apart() -> None:
    def with_image(url: str) -> Prompt:
        part = {"type": "image_url", "image_url": {"url": url}}
        return ModelPrompts(TOKENIZER, TEMPLATE).prompt(chat([{"type": "text", "text": "What is this?"}, part]))

    assert not with_image("a").is_exact
    assert with_image("a") != with_image("b")


@pytest.mark.parametrize("source", [TextEstimate(), ModelPrompts(TOKENIZER, TEMPLATE)])
def test_token_ids_are_taken_as_they_are(source: Any) -> None:
    ids = array("i", [5, 6, 7]).tobytes()
    assert source.prompt(body(prompt=[5, 6, 7])) == Prompt(ids, is_exact=True)
    assert source.prompt(body(prompt=[[5, 6, 7], [1]])) == Prompt(ids, is_exact=True)


def test_estimates_of_a_longer_conversation_begin_with_the_shorter_ones() -> None:
    short, long = (TextEstimate().prompt(chat(*said)) for said in (["Hello"], ["Hello", "Hi", "Bye"]))
    shared = short.tokens.rstrip(b"\0")
    assert long.tokens.startswith(shared)
    assert not short.is_exact


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(PromptBody.__struct_fields__), json_values))
def test_no_body_makes_it_fail(fields: dict[str, Any]) -> None:
    request = read_body(msgspec.json.encode(fields))
    assert request is not None
    for source in (TextEstimate(), ModelPrompts(TOKENIZER, TEMPLATE)):
        assert len(source.prompt(request).tokens) % 4 == 0


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_left_to_the_replica(data: bytes) -> None:
    assert read_body(data) is None
