"""A request to the engine and what comes back: plain data, no behaviour of the engine in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import NoneType
from typing import Literal, NamedTuple

import numpy as np

from anaphora.identity import Namespace
from anaphora.tokens import TOKEN_BYTES

FinishReason = Literal["stop", "length", "abort", "error"]


MAX_STOP_STRINGS, MAX_STOP_LENGTH = 16, 1000
"""Every sequence looks for its stop strings while it runs, at a cost that grows with their length."""


MAX_SAMPLES = 128
"""Outputs of one prompt."""

MAX_PRIORITY = 1000

MAX_LOGIT_BIAS = 100

FORMS = ("json_schema", "regex", "choice", "grammar")
"""Fields that bind the output to a form."""


class RequestError(ValueError):
    """A request that can never be served, with the field at fault (`param`) and what is allowed (the message)."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def _not_allowed(name: str, value: object, allowed: str) -> RequestError:
    text = repr(value)
    shown = text if len(text) <= 100 else f"{text[:100]}..."
    return RequestError(name, f"{name}: {shown} is not allowed; it must be {allowed}")


class _Types(NamedTuple):
    """The fields that are of one kind, by its name in messages. of_entries: what a tuple holds."""

    fields: tuple[str, ...]
    kinds: tuple[type, ...]
    name: str
    of_entries: type = object


def _require_types(record: object, types: tuple[_Types, ...]) -> None:
    """Raise RequestError for the first field of another kind: it would fail later, in a step of everybody's."""
    for fields, kinds, name, of_entries in types:
        for field_name in fields:
            value = getattr(record, field_name)
            is_allowed = isinstance(value, kinds)
            if is_allowed and of_entries is not object:
                is_allowed = all(isinstance(entry, of_entries) for entry in value)
            if not is_allowed:
                raise _not_allowed(field_name, value, name)


_SAMPLING_TYPES = (
    _Types(("max_tokens", "top_k", "n"), (Integral,), "an integer"),
    _Types(("seed", "logprobs"), (Integral, NoneType), "an integer, or None"),
    _Types(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        (Real,),
        "a number",
    ),
    _Types(("stop",), (tuple, list), "a tuple of strings", str),
    _Types(("stop_token_ids",), (tuple, list), "a tuple of integers", Integral),
    _Types(("logit_bias",), (Mapping,), "a mapping of token ids to numbers", Integral),
    _Types(("json_schema", "regex", "grammar"), (str, NoneType), "a string, or None"),
    _Types(("choice",), (tuple, NoneType), "a tuple of strings, or None"),
    _Types(("ignore_eos",), (bool,), "True or False"),
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn.

    temperature 0 is greedy. top_k 0, top_p 1.0 and min_p 0.0 switch those filters off; min_p drops tokens less likely
    than min_p times the likeliest. `logit_bias` (token id to bias, -100 to 100) and the penalties, whose neutral values
    are 0, 0 and 1, change the logits before all that, greedy included: `anaphora.engine.penalties` has the rules. With
    a `seed` the same request draws the same tokens whatever runs beside it. `stop` are strings: the output ends before
    the first of them to appear. `logprobs` asks for log-probabilities of the drawn token and of that many alternatives,
    None for none at all. `n` outputs are drawn for the prompt, which is computed once; the j-th (from 0) has the seed
    `seed` + j.

    The output can be bound to a form, one of four: JSON of a `json_schema` (JSON text); what matches a `regex` (Rust's
    syntax) as a whole; one of the strings of `choice`; or a text of a `grammar`, in Lark's syntax with the rule
    `start`, or in GBNF with `root`. It ends where that is whole and nothing can follow, unless something else ends it
    before.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    json_schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        _require_types(self, _SAMPLING_TYPES)
        checks: list[tuple[str, bool, str]] = [
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 2.0, "between 0 and 2"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or a positive integer"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "between 0.01 and 100"),
            (
                "stop",
                len(self.stop) <= MAX_STOP_STRINGS and all(0 < len(text) <= MAX_STOP_LENGTH for text in self.stop),
                f"at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters",
            ),
            ("n", 1 <= self.n <= MAX_SAMPLES, f"between 1 and {MAX_SAMPLES}"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "between 0 and 20"),
        ]
        for name, is_allowed, allowed in checks:
            if not is_allowed:
                raise _not_allowed(name, getattr(self, name), allowed)
        if self.choice is not None and not self.choice:
            raise _not_allowed("choice", self.choice, "at least one string")
        for position, text in enumerate(self.choice or ()):
            if not isinstance(text, str) or not text:
                problem = "is not allowed; it must be a string of at least one character"
                raise RequestError("choice", f"choice[{position}]: {text!r} {problem}")
        asked = [name for name in FORMS if getattr(self, name) is not None]
        if len(asked) > 1:
            raise RequestError(asked[1], f"{asked[1]}: allowed only without {asked[0]}")
        for token_id, bias in self.logit_bias.items():
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise RequestError(
                    "logit_bias",
                    f"logit_bias[{token_id}]: {bias} is not allowed; "
                    f"it must be between -{MAX_LOGIT_BIAS} and {MAX_LOGIT_BIAS}",
                )


_REQUEST_TYPES = (
    _Types(("request_id",), (str,), "a string"),
    _Types(("prompt",), (bytes,), "packed int32 ids, as bytes"),
    _Types(("sampling",), (SamplingParams,), "SamplingParams"),
    _Types(("namespace",), (Namespace,), "a Namespace"),
    _Types(("read_cache", "write_cache"), (bool,), "True or False"),
    _Types(("priority",), (int,), "an integer"),
    _Types(("deadline_s",), (Real, NoneType), "a number of seconds, or None"),
)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt (packed int32 ids) to be continued. `request_id` is unique among the live ones.

    priority: the lower, the sooner it is admitted and the later preempted, as vLLM has it; -1000 to 1000. Requests of a
        higher number wait as long as there are others.
    reports_hits: whether what it finds in the cache is said again as an event (vLLM's `kv_cache_report_mode` full).
    deadline_s: seconds from submission in which it must have ended, or else it is aborted, as nobody wants it any more.
        Once half of them have passed, a waiting request goes before those of its priority that have more time.
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams = field(default_factory=SamplingParams)
    namespace: Namespace = field(default_factory=Namespace)
    read_cache: bool = True
    write_cache: bool = True
    priority: int = 0
    deadline_s: float | None = None
    reports_hits: bool = False

    def __post_init__(self) -> None:
        _require_types(self, _REQUEST_TYPES)
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise RequestError(
                "priority",
                f"priority: {self.priority} is not allowed; it must be between -{MAX_PRIORITY} and {MAX_PRIORITY}",
            )
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise RequestError(
                "deadline_s", f"deadline_s: {self.deadline_s} is not allowed; it must be above 0, or None"
            )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a drawn token, with the most likely alternatives as (id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one request.

    `text` is what became certain in this step: bytes of an unfinished character and a possible beginning of a stop
    string are held back. Counts are totals so far; `num_cached_tokens` is set at the first admission and stays.
    `finish_reason` is set on the last delta of a sample and only there; `error` says what went wrong.
    `index`: which of the request's `n` samples this is of, from 0.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    index: int = 0


def check_token_ids(request: Request, vocab_size: int) -> int:
    """Raise RequestError for an id in any of the request's fields that is no token; return the prompt's length.

    Cost: one pass over the prompt.
    """
    if not request.prompt:
        raise RequestError("prompt", "prompt: no tokens; at least 1 is needed")
    if len(request.prompt) % TOKEN_BYTES:
        raise RequestError("prompt", f"prompt: {len(request.prompt)} bytes are no whole number of int32 ids")
    ids = np.frombuffer(request.prompt, dtype=np.int32)
    is_valid = (ids >= 0) & (ids < vocab_size)
    if not is_valid.all():
        position = int(is_valid.argmin())
        raise RequestError(
            "prompt", f"prompt[{position}]: {ids[position]} is no token id; allowed are 0 to {vocab_size - 1}"
        )
    sampling = request.sampling
    for name, of_field in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
        for token_id in of_field:
            if not 0 <= token_id < vocab_size:
                raise RequestError(name, f"{name}: {token_id} is no token id; allowed are 0 to {vocab_size - 1}")
    return len(ids)
