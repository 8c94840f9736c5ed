"""The first-run demo, over the fake engine."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from anaphora.server.client import ServerError, TimedAnswer, TimingClient
from anaphora.server.demo import run_demo
from anaphora.server.demo_text import HANDBOOK, QUESTIONS
from tests.server.fake_engine import BLOCK_SIZE, FakeEngine
from tests.server.live_server import serving_fake

if TYPE_CHECKING:
    from tests.server.live_server import LiveServer


def test_every_turn_but_the_first_finds_what_the_turn_before_it_left() -> None:
    lines: list[str] = []
    with serving_fake(FakeEngine(max_context=16_384, num_blocks=1024)) as live, TimingClient(live.url) as client:
        answers = run_demo(client, "alphabet", lines.append)
        prompts = [request.prompt for request in live.engine.service.requests]
    assert len(answers) == len(QUESTIONS)
    assert answers[0].cached_tokens == 0
    for before, now in itertools.pairwise(answers):
        assert now.cached_tokens is not None
        assert before.prompt_tokens // BLOCK_SIZE * BLOCK_SIZE <= now.cached_tokens < now.prompt_tokens
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(prompts))
    assert all(HANDBOOK.encode() in bytes(prompt[::4]) for prompt in prompts)


def test_each_answer_is_shown_as_it_comes_with_what_it_took_and_a_summary() -> None:
    pieces: list[str] = []
    with serving_fake(FakeEngine(max_context=16_384, num_blocks=1024)) as live, TimingClient(live.url) as client:
        answers = run_demo(client, "alphabet", pieces.append)
    assert sum(len(answer.text) > 1 for answer in answers), "or nothing could come bit by bit"
    assert max(map(len, pieces[3:-1])) < 200
    assert all(letter in pieces for answer in answers for letter in answer.text)
    lines = "".join(pieces).splitlines()
    for turn, (question, answer) in enumerate(zip(QUESTIONS, answers, strict=True), 1):
        first = lines.index(f"{turn}. {question}")
        assert lines[first + 1] == f"   {answer.text}"
        took = f"   {answer.prompt_tokens:,} prompt tokens, {answer.cached_tokens:,} of them cached; first token after "
        assert lines[first + 2].startswith(took)
    num_cached = sum(answer.cached_tokens or 0 for answer in answers)
    num_prompt = sum(answer.prompt_tokens for answer in answers)
    assert lines[-1].strip().startswith(f"Saved: {num_cached:,} of {num_prompt:,} prompt tokens")


def test_what_takes_long_is_announced_before_the_first_turn() -> None:
    lines: list[str] = []

    class NoServer(TimingClient):
        def stream(self, path: str, body: dict[str, Any], on_text: object = None) -> TimedAnswer:
            raise ServerError("gone")

    with NoServer("http://127.0.0.1:9") as client, pytest.raises(ServerError, match="gone"):
        run_demo(client, "alphabet", lines.append)
    assert lines[1] == "Turn 1 computes all of it, some seconds on a CPU; the later ones find it in the cache.\n\n"


def test_a_model_with_too_short_a_context_is_an_explained_failure(live: LiveServer) -> None:
    with (
        TimingClient(live.url) as client,
        pytest.raises(ServerError, match=r"400: messages: .* longest context is 2048"),
    ):
        run_demo(client, "alphabet", lambda _: None)
