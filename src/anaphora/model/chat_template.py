"""A model's chat template: messages to the one text that the model was trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template cannot be compiled, or refuses these messages; it says why in its own words where it has some."""


class ChatTemplate:
    """A Jinja template as `transformers` runs it: sandboxed, trimmed blocks, its filters and functions.

    bos_token, eos_token: what those names stand for inside the template.
    now: the clock behind `strftime_now`, by which some templates write today's date.

    Raises:
        ChatTemplateError: `source` is not a valid template.
    """

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda form: now().strftime(form),
            bos_token=bos_token,
            eos_token=eos_token,
        )
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"chat template: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The conversation as text, special tokens spelled out (a BOS too, if the template writes one).

        kwargs: whatever else the template knows (`enable_thinking`, `documents`, ...).

        Raises:
            ChatTemplateError: the template refused the messages, or failed on them.
        """
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except Exception as error:  # a template is a program: it can fail in any way that Python can
            raise ChatTemplateError(f"chat template: {error}") from error


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the model wrote, for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's own escaping of <, > and &, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
