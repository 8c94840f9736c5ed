"""Outputs of a given form, a JSON schema's, a regular expression's, a grammar's: which tokens may come next, by the
library llguidance (extra `grammar`)."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from anaphora.engine.request import FORMS, RequestError
from anaphora.tokens import unpack

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

    from anaphora.engine.request import SamplingParams
    from anaphora.model.tokenizer import Tokenizer

MAX_FORM_CHARACTERS = 2**20
_NUM_KEPT = 32
_MAX_ERROR_CHARACTERS = 300
_MAX_PLACES_TRIED = 200
"""Parts of a refused schema that are compiled by themselves to find the one at fault."""
_WHITESPACE = r"[ \n\r\t]{1,40}"
"""Between tokens of JSON. Without a bound a model may write blanks for ever, which every schema allows."""
_NO_TEXT = "\x02"
"""Before a text, so that it is tokenised as in the middle of one."""
_PLAIN_NAME = re.compile(r"\w+")
_Path = tuple[str | int, ...]


class Form(NamedTuple):
    """What an output must be. name: the field of SamplingParams that says so; value: what stands there."""

    name: str
    value: str | tuple[str, ...]


def form_of(sampling: SamplingParams) -> Form | None:
    """Return what a request's output is bound to, None if it is free."""
    for name in FORMS:
        value = getattr(sampling, name)
        if value is not None:
            return Form(name, value)
    return None


class Grammars:
    """Forms, compiled for one tokenizer. May be used from several threads.

    vocab_size: of the logits; ids that the tokenizer does not have are never allowed.

    Cost: the first use builds a table of the tokens (0.5 s for 49,152); a form is compiled once, in some
    milliseconds, and then kept among the latest ones.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Collection[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._vocab_size = vocab_size
        self._table: LLTokenizer | None = None
        self._table_lock = threading.Lock()
        self._compiled: OrderedDict[Form, LLMatcher] = OrderedDict()
        """By form, a matcher at its start, never advanced; guarded by the lock below."""
        self._compiled_lock = threading.Lock()

    def check(self, form: Form) -> None:
        """Compile a form, unless it is known.

        Raises:
            RequestError: at the form's name, with the place in it ("json_schema.properties.age") where that can be
                told: it is no JSON, no schema, no regular expression or no grammar, uses what the library cannot do, or
                allows nothing; or there is no library.
        """
        self._find(form)

    def start(self, form: Form) -> Constraint:
        """Return the constraint of one output. Raises as `check`."""
        return Constraint(self._find(form).deep_copy(), self._vocab_size, form.name)

    def _find(self, form: Form) -> LLMatcher:
        with self._compiled_lock:
            found = self._compiled.get(form)
            if found is not None:
                self._compiled.move_to_end(form)
                return found
        compiled = self._compile(form)  # outside the lock: it may take a second
        with self._compiled_lock:
            self._compiled[form] = compiled
            while len(self._compiled) > _NUM_KEPT:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, form: Form) -> LLMatcher:
        name, value = form
        num_characters = len(value) if isinstance(value, str) else sum(map(len, value))
        if num_characters > MAX_FORM_CHARACTERS:
            raise RequestError(name, f"{name}: {num_characters} characters are over the limit of {MAX_FORM_CHARACTERS}")
        self._require_library(name)
        if name == "json_schema":
            assert isinstance(value, str)
            return self._compile_schema(value)
        matcher = self._matcher(_written(form))
        if isinstance(matcher, str):
            raise RequestError(name, f"{name}: {matcher}")
        return matcher

    def _compile_schema(self, schema: str) -> LLMatcher:
        try:
            parsed = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError("json_schema", f"json_schema: it is no JSON: {error}") from None
        matcher = self._try(parsed)
        if isinstance(matcher, str):
            place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self._fault(parsed, matcher))
            raise RequestError("json_schema", f"json_schema{place}: {matcher}")
        return matcher

    def _matcher(self, grammar: str) -> LLMatcher | str:
        """Compile a grammar in the library's form; return what is wrong with it, if something is."""
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415

        # log_level 0: it prints nothing, as its errors are asked for.
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._token_table(), grammar, log_level=0, limits=limits)
        return _in_one_line(matcher.get_error()) or matcher

    def _try(self, schema: Any) -> LLMatcher | str:
        """Compile a schema; return what is wrong with it, if something is."""
        from llguidance import LLMatcher  # noqa: PLC0415

        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            return "it allows nothing" if schema is False else "expected an object or a boolean"
        return self._matcher(
            LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": _WHITESPACE})
        )

    def _fault(self, schema: Any, error: str) -> _Path:
        """Return the path to the innermost part that is refused for the same reason when it stands alone."""
        path: _Path = ()
        num_tried = 0
        parts = _parts(schema)
        while (step := next(parts, None)) is not None and num_tried < _MAX_PLACES_TRIED:
            num_tried += 1
            if self._try(step[1]) == error:
                path += step[0]
                parts = _parts(step[1])
        return path

    def _require_library(self, name: str) -> None:
        try:
            import llguidance  # noqa: F401, PLC0415
        except ImportError:
            problem = "this needs the package llguidance: pip install 'anaphora[grammar]'"
            raise RequestError(name, f"{name}: {problem}") from None
        if not self._eos_token_ids:
            raise RequestError(name, f"{name}: the model has no end-of-sequence token")

    def _token_table(self) -> LLTokenizer:
        from llguidance import LLTokenizer  # noqa: PLC0415

        with self._table_lock:
            if self._table is None:
                tokens = _TokenBytes(self._tokenizer, self._eos_token_ids[0])
                tokens("{")  # what the tokenizer puts off until its first use takes as long as the table
                self._table = LLTokenizer(tokens, eos_token=self._eos_token_ids, slices=LLTokenizer.json_slices())
            return self._table


class Constraint:
    """What one output may go on with. It starts at the output's beginning and is told every token of it.

    Cost, for 49,152 tokens: 0.1 ms a token.
    """

    __slots__ = ("_matcher", "_name", "_vocab_size")

    def __init__(self, matcher: LLMatcher, vocab_size: int, name: str) -> None:
        """name: of the field that asks for it, for messages."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._name = name

    @property
    def is_complete(self) -> bool:
        """Whether the output is whole and nothing can follow it."""
        return bool(self._matcher.is_stopped())

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Set the logits, float32 [vocab_size], of tokens that may not come next to -inf, in place.

        Raises:
            RuntimeError: the library's limits of what it computes for one token are reached.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise RuntimeError(f"{self._name}: {_in_one_line(self._matcher.get_error())}")
        is_allowed = np.unpackbits(mask, bitorder="little")[: self._vocab_size].view(np.bool_)
        np.copyto(logits[: len(is_allowed)], -np.inf, where=~is_allowed)
        logits[len(is_allowed) :] = -np.inf

    def add(self, token_id: int) -> None:
        """The token was drawn. Raises RuntimeError for one that was not allowed."""
        if not self._matcher.consume_token(token_id):
            error = _in_one_line(self._matcher.get_error())
            raise RuntimeError(f"{self._name}: token {token_id} may not come here: {error}")


class _TokenBytes:
    """A tokenizer as llguidance asks for it. Where only one text may come next, it is written in the tokenizer's own
    tokens, so they must spell just that text: no space before it, as SentencePiece puts there, and nothing normalised.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_token_ids)
        self._ids = {
            spelled: i for i, spelled in enumerate(self.tokens) if spelled and i not in tokenizer.special_token_ids
        }
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        spelled = text.encode()
        for start in ("", _NO_TEXT):
            ids = list(unpack(self._tokenizer.encode(start + text, parse_special=False)))
            num_before = sum(len(self.tokens[i]) for i in ids) - len(spelled)
            while ids and num_before > 0:
                num_before -= len(self.tokens[ids.pop(0)])
            if b"".join(self.tokens[i] for i in ids) == spelled:
                return ids
        return self._longest_first(spelled)

    def _longest_first(self, spelled: bytes) -> list[int]:
        """The longest token at each place; bytes that no token begins with are left out."""
        ids: list[int] = []
        place = 0
        while place < len(spelled):
            for length in range(self._longest, 0, -1):
                token_id = self._ids.get(spelled[place : place + length])
                if token_id is not None:
                    ids.append(token_id)
                    break
            place += length
        return ids


def _written(form: Form) -> str:
    """A regular expression, choice or grammar in the library's form. RequestError for a grammar that is none."""
    from llguidance import LLMatcher  # noqa: PLC0415
    from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415

    name, value = form
    if name == "regex":
        return str(LLMatcher.grammar_from_regex(value))
    if name == "choice":
        lark = f"start: {' | '.join(map(json.dumps, value))}"  # Lark has strings written as JSON has
    else:
        try:
            lark = any_to_lark(value)
        except Exception as error:  # of no class of its own
            raise RequestError(name, f"{name}: {_in_one_line(str(error))}") from None
    return str(LLMatcher.grammar_from_lark(lark))


def _in_one_line(error: str) -> str:
    return " ".join(error.split())[:_MAX_ERROR_CHARACTERS]


def _parts(schema: Any) -> Iterator[tuple[_Path, Any]]:
    """The schemas directly inside one, with their paths. Names that would make a path ambiguous are left out."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in {"properties", "patternProperties", "$defs", "definitions"} and isinstance(value, dict):
            yield from (((keyword, name), part) for name, part in value.items() if _PLAIN_NAME.fullmatch(name))
        elif keyword in {"anyOf", "oneOf", "allOf", "prefixItems"} and isinstance(value, list):
            yield from (((keyword, index), part) for index, part in enumerate(value))
        elif keyword in {"items", "additionalProperties"}:
            yield (keyword,), value
