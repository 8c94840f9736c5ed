"""What ingress and engines tell each other, and how a call's prompt is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anaphora.router.prompt import PromptBody, read_body

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A request over HTTP, whole.

    path: decoded, from /v1 on. headers: names in lower case.
    predicted: written by the router: replica -> tokens of the prompt that its cache was taken to have.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    predicted: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The first thing that an engine yields; the body's chunks, as bytes, come after it."""

    status: int
    headers: Headers


def prompt_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> PromptBody | None:
    """Return what the arguments of a call say of its prompt; None if none of them does.

    Understood are an HttpCall, a body of JSON as bytes, a dict or any object with the fields of OpenAI's API
    (`messages`, `prompt`, `input`), and a prompt as text.
    """
    for value in (*args, *kwargs.values()):
        body = _body(value)
        if body is not None:
            return body
    return None


def _body(value: Any) -> PromptBody | None:
    if isinstance(value, HttpCall):
        return read_body(value.body) or PromptBody()
    if isinstance(value, bytes):
        return read_body(value)
    if isinstance(value, str):
        return PromptBody(prompt=value)
    if isinstance(value, dict):
        fields = {name: value[name] for name in PromptBody.__struct_fields__ if name in value}
    else:
        fields = {name: getattr(value, name) for name in PromptBody.__struct_fields__ if hasattr(value, name)}
    if not fields.keys() & {"messages", "prompt", "input"}:
        return None
    return PromptBody(**{name: _plain(field) for name, field in fields.items()})


def _plain(value: Any) -> Any:
    """Pydantic's objects, as Ray's own LLM deployments pass them, as JSON would have them."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    dump = getattr(value, "model_dump", None)
    return dump(exclude_none=True) if callable(dump) else value
