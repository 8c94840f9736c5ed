"""Two requests: what the second could take from the first, where that ends and why, under each engine and provider."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anaphora.lab.encoding import encode, encode_parts
from anaphora.lab.explain.volatile import VOLATILES, Difference, tell, without
from anaphora.lab.providers.emulator import Billed, Emulator
from anaphora.lab.providers.segments import call_of
from anaphora.lab.replay import CacheReplay
from anaphora.lab.trace import Prompt
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from anaphora.lab.encoding import Encoder
    from anaphora.lab.providers.catalogue import Catalogue
    from anaphora.lab.providers.segments import Call
    from anaphora.lab.record import LoggedRequest

ENGINES = {
    "SGLang, llama.cpp (1 token)": 1,
    "vLLM, Anaphora (blocks of 16)": 16,
    "blocks of 64": 64,
    "hybrid models (blocks of 784)": 784,
}
"""Block sizes by whose they are."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """shared_tokens: equal tokens from the start, of the second prompt's num_tokens. difference: where that ends; None
    if one prompt begins with the other. fixed_tokens: shared if times, identifiers, orders and white space were equal.

    engines: cached tokens of the second request right after the first, by block size. providers: what the second would
    be billed, one second after the first: as it is marked, or with marks at the end of system and prompt.
    boundaries: what keeps the two apart whatever their text: model, adapter, salt, parameters.
    """

    num_tokens: tuple[int, int]
    shared_tokens: int
    difference: Difference | None
    fixed_tokens: int
    engines: dict[str, int]
    providers: dict[str, Billed]
    boundaries: list[str]
    is_estimate: bool


def compare(one: LoggedRequest, other: LoggedRequest, encoder: Encoder, catalogue: Catalogue) -> Comparison:
    """Compare two requests. Raises ValueError: one of them has no prompt."""
    first, second = encode(one, encoder), encode(other, encoder)
    if first is None or second is None:
        raise ValueError("a request without a prompt")
    has_text = bool(one.parts and other.parts)
    fixed = _equal(first.ids, second.ids)
    if has_text:
        tidy = [encode_parts(without(request.parts, VOLATILES), encoder).ids for request in (one, other)]
        fixed = max(fixed, _equal(*tidy))
    boundaries = _boundaries(one, other)
    is_apart = any(name in {"model", "adapter", "salt"} for name in boundaries)
    engines = {}
    for name, block_size in ENGINES.items():
        num_blocks = (len(first.ids) + len(second.ids)) // TOKEN_BYTES // block_size + 2
        cache = CacheReplay(num_blocks, block_size, 1)
        cache.serve(Prompt(first.ids, None, first.num_tokens, 0.0))
        engines[name] = 0 if is_apart else cache.serve(Prompt(second.ids, None, second.num_tokens, 1.0))
    return Comparison(
        (first.num_tokens, second.num_tokens),
        _equal(first.ids, second.ids),
        tell(other.parts, one.parts) if has_text else None,
        fixed,
        engines,
        _providers(one, other, encoder, catalogue) if has_text else {},
        boundaries,
        encoder.is_estimate and other.token_ids is None,
    )


def _providers(one: LoggedRequest, other: LoggedRequest, encoder: Encoder, catalogue: Catalogue) -> dict[str, Billed]:
    found = {}
    for name in catalogue.rules:
        calls = [
            call
            for number, request in enumerate((one, other))
            if (call := call_of(replace(request, time_s=float(number), first_token_s=None), encoder, 0.0)) is not None
        ]
        rules = catalogue.rules_for(name, other.model)
        if rules.kind == "breakpoints" and not any(s.ttl_s for call in calls for s in call.segments):
            calls = [_marked(call, rules.ttl_s) for call in calls]
        emulator = Emulator(rules)
        found[name] = [emulator.serve(call) for call in calls][-1]
    return found


def _marked(call: Call, ttl_s: int) -> Call:
    """Marks at the end of what stands before the messages, and at the end of the prompt."""
    head = max((n for n, segment in enumerate(call.segments) if segment.section != "messages"), default=-1)
    return call.marked(lambda number, _: ttl_s if number in {head, len(call.segments) - 1} else None)


def _boundaries(one: LoggedRequest, other: LoggedRequest) -> list[str]:
    apart = [name for name in ("model", "adapter", "salt") if getattr(one, name) != getattr(other, name)]
    names = sorted(one.parameters.keys() | other.parameters.keys())
    return apart + [name for name in names if one.parameters.get(name) != other.parameters.get(name)]


def _equal(one: bytes, other: bytes) -> int:
    """Equal leading tokens."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * TOKEN_BYTES : middle * TOKEN_BYTES] == other[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
