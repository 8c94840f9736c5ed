"""Chat templates render as `transformers` renders them, and fail with their own words."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime

import pytest

from anaphora.model import ChatTemplate, ChatTemplateError

USER = [{"role": "user", "content": "hi"}]


def test_messages_special_tokens_and_the_generation_prompt_are_given_to_the_template() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    template = ChatTemplate(source, "<s>", "</s>")
    assert template.render(USER) == "<s>[user]hi</s>[assistant]"
    assert template.render(USER, add_generation_prompt=False) == "<s>[user]hi</s>"


def test_lines_of_blocks_leave_no_blank_behind() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}\nend"
    assert ChatTemplate(source).render(USER) == "  hi\nend"


def test_tools_are_none_unless_given() -> None:
    template = ChatTemplate("{% if tools is none %}none{% else %}{{ tools | length }}{% endif %}")
    assert template.render(USER) == "none"
    assert template.render(USER, tools=[{"type": "function"}]) == "1"


def test_json_is_written_plainly() -> None:
    template = ChatTemplate("{{ messages[0] | tojson }}")
    message = {"role": "user", "content": "<b> & 'é' \"q\""}
    assert template.render([message]) == '{"role": "user", "content": "<b> & \'é\' \\"q\\""}'


def test_json_can_be_indented() -> None:
    assert ChatTemplate("{{ messages[0] | tojson(indent=1) }}").render([{"role": "a"}]) == '{\n "role": "a"\n}'


def test_text_is_not_escaped() -> None:
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "<&>"}]) == "<&>"


def test_the_date_is_the_clocks() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render(USER) == "26 Jul 2024"


def test_loops_can_be_left_and_generation_blocks_are_their_body() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert ChatTemplate(source).render(USER * 3) == "hi"


def test_further_arguments_reach_the_template() -> None:
    template = ChatTemplate("{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}")
    assert template.render(USER, enable_thinking=False) == "quick"
    assert template.render(USER) == ""


def test_what_the_template_refuses_is_an_error_in_its_words() -> None:
    template = ChatTemplate("{{ raise_exception('Only user and assistant roles are supported!') }}")
    with pytest.raises(ChatTemplateError, match=r"^chat template: Only user and assistant roles are supported!$"):
        template.render(USER)


@pytest.mark.parametrize("content", [None, 3])
def test_what_the_template_fails_on_is_an_error_too(content: object) -> None:
    with pytest.raises(ChatTemplateError, match=r"^chat template: can only concatenate str"):
        ChatTemplate("{{ 'a' + messages[0].content }}").render([{"role": "user", "content": content}])


def test_a_template_that_does_not_compile_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match=r"^chat template: "):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox_or_change_the_messages(source: str) -> None:
    messages = list(USER)
    with suppress(ChatTemplateError):
        assert ChatTemplate(source).render(messages) == ""
    assert messages == USER
