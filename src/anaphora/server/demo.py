"""The first-run demo: a conversation over a long system prompt, so that one can watch its prefix being reused."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from anaphora.server.demo_text import HANDBOOK, QUESTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from anaphora.server.client import TimedAnswer, TimingClient

_MAX_ANSWER_TOKENS = 32


def _show(text: str) -> None:
    print(text, end="", flush=True)


def run_demo(client: TimingClient, model: str, show: Callable[[str], None] = _show) -> list[TimedAnswer]:
    """Hold the conversation through the API, as any client would; show each answer as it comes and what it took, then
    what was saved.

    show: given pieces of text, with line ends of their own.

    Raises:
        ServerError: the server refused a turn, or went away.
    """
    show(f"A conversation of {len(QUESTIONS)} turns over one long system prompt, the handbook of an observatory.\n")
    show("Turn 1 computes all of it, some seconds on a CPU; the later ones find it in the cache.\n\n")
    messages: list[dict[str, Any]] = [{"role": "system", "content": HANDBOOK}]
    answers: list[TimedAnswer] = []
    for turn, question in enumerate(QUESTIONS, 1):
        messages.append({"role": "user", "content": question})
        show(f"{turn}. {question}\n   ")
        answer = client.stream(
            "/v1/chat/completions",
            {
                "model": model,
                "messages": messages,
                "temperature": 0,
                "max_tokens": _MAX_ANSWER_TOKENS,
                "stop": [". ", "\n"],  # one sentence is enough
            },
            show,
        )
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
        show(
            f"\n   {answer.prompt_tokens:,} prompt tokens, {answer.cached_tokens or 0:,} of them cached; "
            f"first token after {1000 * answer.ttft_s:,.0f} ms\n\n"
        )
    show(_summary(answers) + "\n")
    return answers


def _summary(answers: list[TimedAnswer]) -> str:
    num_prompt = sum(answer.prompt_tokens for answer in answers)
    num_cached = sum(answer.cached_tokens or 0 for answer in answers)
    first_s = answers[0].ttft_s
    later_s = statistics.median(answer.ttft_s for answer in answers[1:])
    return (
        f"Saved: {num_cached:,} of {num_prompt:,} prompt tokens ({100 * num_cached / num_prompt:.0f} %) were not "
        f"computed again. The first token came after {1000 * first_s:,.0f} ms in turn 1, "
        f"after {1000 * later_s:,.0f} ms (median) from then on: {first_s / later_s:.1f} times sooner."
    )
