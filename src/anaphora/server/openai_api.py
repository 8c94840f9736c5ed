"""OpenAI's request bodies, and what they ask of the engine.

Every field that OpenAI documents is declared here, so that an unknown one can be refused as OpenAI does. A field is
either honoured, or cannot change the answer and is accepted, or is refused by its name: none is silently dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from anaphora import tokens
from anaphora.engine.request import MAX_PRIORITY, Request, RequestError, SamplingParams
from anaphora.identity import Namespace
from anaphora.model.chat_template import ChatTemplateError
from anaphora.server.errors import ApiError, bad_field, unsupported
from anaphora.server.response_format import GuidedRequest, asked_form

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anaphora.server.served_model import ServedModel

MAX_STOP_STRINGS = 4
MAX_N = 128
MAX_CHOICES = 1024
MAX_COMPLETION_LOGPROBS = 5
_MAX_ID_DIGITS = 20
COMPLETION_DEFAULT_MAX_TOKENS = 16
ROLES = "system, developer, user or assistant"

Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Salt = Annotated[str, Meta(min_length=1, max_length=128)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Deadline = Annotated[float, Meta(gt=0)]
NumSamples = Annotated[int, Meta(ge=1, le=MAX_N)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`: `include_usage` asks for a last chunk with the usage."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class VllmArguments(msgspec.Struct, forbid_unknown_fields=True):
    """`vllm_xargs`: with `kv_cache_report_mode` "full", what a request finds is published as KV events once more."""

    kv_cache_report_mode: Literal["full"] | None = None


class _SampledRequest(GuidedRequest, forbid_unknown_fields=True, kw_only=True):
    """What both generating endpoints take. Those from `top_k` on are not OpenAI's, but vLLM's or Anaphora's own."""

    model: str
    n: NumSamples | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Seed | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    cache_salt: Salt | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    deadline_s: Deadline | None = None
    vllm_xargs: VllmArguments | None = None


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """One part of a message. Only text is served; the other kinds are declared to be refused by name."""

    type: str
    text: str | None = None
    refusal: Any = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    prompt_cache_breakpoint: Any = None  # every block boundary is one already


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message, with all that a client gets back from OpenAI and sends again."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class ChatCompletionRequest(_SampledRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None

    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    prediction: dict[str, Any] | None = None

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(_SampledRequest, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/completions. `prompt` is a string, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """What one API request asks of the engine: `sampling.n` samples of each prompt (packed int32 ids).

    Samples are numbered prompt by prompt: sample j of prompt i is choice i * sampling.n + j.
    prompt_paths: per prompt the field that it came from; field_names: other fields of the engine's by the name that
    the client knows.
    """

    prompts: tuple[bytes, ...]
    sampling: SamplingParams
    namespace: Namespace
    priority: int
    deadline_s: float | None
    reports_hits: bool
    is_stream: bool
    includes_usage: bool
    prompt_paths: tuple[str, ...]
    field_names: dict[str, str]

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer is to have log-probabilities."""
        return self.sampling.logprobs is not None

    def of_tenant(self, tenant: str) -> Call:
        """This call as `tenant` makes it: what it leaves in the cache is found by that tenant alone. A salt of the
        request's own divides the tenant's prefixes further."""
        # The length keeps the two apart, whatever characters they have.
        salt = f"tenant {len(tenant)}:{tenant}{self.namespace.salt or ''}"
        return replace(self, namespace=replace(self.namespace, salt=salt))

    def requests(self, call_id: str, *, uses_cache: bool, allows_priority: bool) -> list[Request]:
        """The engine's requests, one a prompt, in their order; with the client's priority if that is allowed."""
        return [
            Request(
                f"{call_id}-{i}",
                prompt,
                self.sampling,
                self.namespace,
                read_cache=uses_cache,
                write_cache=uses_cache,
                priority=self.priority if allows_priority else 0,
                deadline_s=self.deadline_s,
                reports_hits=self.reports_hits,
            )
            for i, prompt in enumerate(self.prompts)
        ]

    def refusal(self, index: int, error: RequestError, model: ServedModel) -> ApiError:
        """The engine's refusal of one prompt as a 400, in the client's words."""
        names = self.field_names | {"prompt": self.prompt_paths[index], "adapter": "model"}
        is_too_long = _num_tokens(self.prompts[index]) + self.sampling.max_tokens > model.max_context
        code = "context_length_exceeded" if is_too_long and error.param in {"prompt", "max_tokens"} else "invalid_value"
        return _from_request_error(error, names, code)


# Fields that are taken only with a value that changes nothing; None always is. What is allowed stands beside.
_NEUTRAL_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "echo": ((False,), "leave it out or false"),
    "suffix": (("",), "leave it out or empty"),
    "audio": ((), "leave it out"),
    "function_call": (("none", "auto"), 'leave it out or at "none"'),
    "functions": (([],), "leave it out or empty"),
    "modalities": ((["text"],), 'leave it out or at ["text"]'),
    "moderation": ((), "leave it out"),
    "prompt_cache_options": (({}, {"mode": "implicit"}), 'leave it out or at {"mode": "implicit"}'),
    "reasoning_effort": (("none",), 'leave it out or at "none"'),
    "verbosity": ((), "leave it out"),
    "web_search_options": ((), "leave it out"),
}


def chat_call(body: ChatCompletionRequest, model: ServedModel) -> Call:
    """Render the messages with the model's chat template, tokenise them, check every field.

    Special tokens in the text of messages are taken as such, as the template itself depends on it.

    Raises:
        ApiError: with the field at fault.

    Cost: that of the template and the tokeniser, milliseconds for a long prompt: keep it off the event loop.
    """
    model.require(body.model)
    _require_neutral(body)
    _check_tools(body)
    if model.chat_template is None:
        raise ApiError(400, f"The model '{body.model}' has no chat template; use /v1/completions.", param="messages",
                       code="unsupported_value")  # fmt: skip
    messages = [_plain_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)]
    if not messages:
        raise bad_field("messages", "expected at least one message")
    try:
        text = model.chat_template.render(messages, tools=body.tools or None)
    except ChatTemplateError as error:
        raise bad_field("messages", str(error)) from None
    prompt = model.encode(text, "messages")

    max_tokens, field_names = body.max_tokens, {"prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        if max_tokens not in (None, body.max_completion_tokens):
            raise bad_field("max_tokens", "expected the same number as max_completion_tokens, or only one of the two")
        max_tokens = body.max_completion_tokens
        field_names["max_tokens"] = "max_completion_tokens"
    if max_tokens is None:
        max_tokens = _room(prompt, model)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_field("top_logprobs", "allowed only with logprobs = true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _call(body, model, {"messages": prompt}, max_tokens=max_tokens, logprobs=logprobs, field_names=field_names)


def completion_call(body: CompletionRequest, model: ServedModel) -> Call:
    """Tokenise the prompts (text begins as the model expects plain text to begin), check every field.

    Raises:
        ApiError: with the field at fault.
    """
    model.require(body.model)
    _require_neutral(body)
    num_samples = body.n or 1
    if body.best_of not in (None, num_samples):
        raise unsupported("best_of", f"leave it out or equal to n ({num_samples})")
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_COMPLETION_LOGPROBS:
        raise bad_field("logprobs", f"expected 0 to {MAX_COMPLETION_LOGPROBS}, got {body.logprobs}")
    if (
        isinstance(body.prompt, list)
        and len(body.prompt) * num_samples > MAX_CHOICES
        and type(body.prompt[0]) is not int
    ):
        raise bad_field("prompt", f"{len(body.prompt)} prompts times n make over {MAX_CHOICES} choices")
    add_bos = model.tokenizer.adds_bos
    prompts = {
        path: model.encode(prompt, path, add_bos=add_bos) if isinstance(prompt, str) else _pack(prompt, path)
        for path, prompt in _prompts(body.prompt)
    }
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = min(COMPLETION_DEFAULT_MAX_TOKENS, *(_room(prompt, model) for prompt in prompts.values()))
    return _call(body, model, prompts, max_tokens=max_tokens, logprobs=body.logprobs, field_names={})


def _call(
    body: _SampledRequest,
    model: ServedModel,
    prompts: dict[str, bytes],
    *,
    max_tokens: int,
    logprobs: int | None,
    field_names: dict[str, str],
) -> Call:
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "allowed only with stream = true")
    form: dict[str, Any] = {}
    if (asked := asked_form(body)) is not None:
        form = {asked.form.name: asked.form.value}
        field_names = field_names | {asked.form.name: asked.path}
    try:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k or 0,
            min_p=body.min_p or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            logit_bias=_logit_bias(body.logit_bias),
            seed=body.seed,
            stop=_stop_strings(body.stop),
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
            n=body.n or 1,
            **form,
        )
        if asked is not None and model.grammars is not None:
            model.grammars.check(asked.form)  # here, since the engine would do it on the event loop
    except RequestError as error:
        raise _from_request_error(error, field_names) from None
    return Call(
        prompts=tuple(prompts.values()),
        sampling=sampling,
        namespace=Namespace(model=model.revision, adapter=model.require(body.model), salt=body.cache_salt),
        priority=body.priority or 0,
        deadline_s=body.deadline_s,
        reports_hits=bool(body.vllm_xargs and body.vllm_xargs.kv_cache_report_mode),
        is_stream=bool(body.stream),
        includes_usage=bool(body.stream_options and body.stream_options.include_usage),
        prompt_paths=tuple(prompts),
        field_names=field_names,
    )


def _from_request_error(error: RequestError, field_names: dict[str, str], code: str = "invalid_value") -> ApiError:
    # What follows the field's name may lead on to the place in it: "prompt[1]: -1 is no token id".
    place, problem = str(error).removeprefix(error.param).split(":", 1)
    param = field_names.get(error.param, error.param) + place
    return ApiError(400, f"{param}:{problem}", param=param, code=code)


def _require_neutral(body: _SampledRequest) -> None:
    for name, (neutral, allowed) in _NEUTRAL_VALUES.items():
        value = getattr(body, name, None)
        # `in` alone would take True for 1 and False for 0.
        if value is not None and not any(value == v and (type(value) is bool) == (type(v) is bool) for v in neutral):
            raise unsupported(name, allowed)


def _check_tools(body: ChatCompletionRequest) -> None:
    if body.tools and body.tool_choice != "none":
        raise unsupported("tools", 'leave them out, or set tool_choice to "none"')
    if body.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", 'leave it out or at "none"')


def _plain_message(message: Message, path: str) -> dict[str, Any]:
    if message.role in ("tool", "function"):
        raise unsupported(f"{path}.role", f"expected {ROLES}")
    if message.role not in ("system", "developer", "user", "assistant"):
        raise bad_field(f"{path}.role", f"expected {ROLES}, got {message.role[:40]!r}")
    for name in ("tool_calls", "tool_call_id", "function_call", "audio"):
        if getattr(message, name):
            raise unsupported(f"{path}.{name}", "leave it out")
    content = message.content
    if content is None:
        raise bad_field(f"{path}.content", "expected a string or a list of text parts", code="invalid_type")
    if not isinstance(content, str):
        content = "\n".join(_part_text(part, f"{path}.content[{i}]") for i, part in enumerate(content))
    # Templates know the older name of the role.
    plain = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _part_text(part: ContentPart, path: str) -> str:
    if part.type != "text":
        raise unsupported(f"{path}.type", f"expected 'text', got '{part.type[:40]}'")
    if part.text is None:
        raise ApiError(
            400, f"Missing required parameter: '{path}.text'.", param=f"{path}.text", code="missing_required_parameter"
        )
    return part.text


def _prompts(prompt: str | list[str | int | list[int]]) -> Iterator[tuple[str, str | Sequence[int]]]:
    """Each prompt with the path of its field."""
    if isinstance(prompt, str):
        yield "prompt", prompt
        return
    kind = type(prompt[0]) if prompt else int
    for i, item in enumerate(prompt):
        if type(item) is not kind:
            raise bad_field(f"prompt[{i}]", "expected all items to be of one kind, as the first", code="invalid_type")
    if kind is int:
        yield "prompt", prompt  # type: ignore[misc]  # all are integers: looked at above
    else:
        yield from ((f"prompt[{i}]", item) for i, item in enumerate(prompt))  # type: ignore[misc]


def _pack(ids: Sequence[int], path: str) -> bytes:
    try:
        return tokens.pack(ids)
    except ValueError as error:  # "token_ids[1]: ..."
        place, problem = str(error).removeprefix("token_ids").split(": ", 1)
        raise bad_field(path + place, problem) from None


def _num_tokens(packed: bytes) -> int:
    return len(packed) // tokens.TOKEN_BYTES


def _room(prompt: bytes, model: ServedModel) -> int:
    """How many tokens can follow; 1 where none can, for the engine to refuse with the numbers."""
    return max(1, model.max_request_tokens - _num_tokens(prompt))


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    by_id: dict[int, float] = {}
    for token_id, value in (bias or {}).items():
        if not (token_id.isascii() and token_id.isdecimal()):
            raise bad_field("logit_bias", f"expected token ids as keys, got {token_id[:40]!r}")
        by_id[int(token_id[:_MAX_ID_DIGITS])] = value
    return by_id


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS or not all(strings):
        raise bad_field("stop", f"expected at most {MAX_STOP_STRINGS} strings, none of them empty")
    return strings
