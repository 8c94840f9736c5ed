"""A trace in memory: prompts as runs of units, small enough that hours of traffic fit, exact at the block size wanted.

Where a log names blocks of 512 tokens, a cache of 16-token blocks tells no two tokens of a unit of 16 apart; so a unit
stands for as many tokens as the log and the cache both can tell apart, and the cache counts in units. Where the log has
tokens, a unit is one token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Protocol

from anaphora.identity import DEFAULT_NAMESPACE, Adapter, Namespace
from anaphora.lab.encoding import encode
from anaphora.lab.importers.source import LogError
from anaphora.tokens import MAX_TOKEN_ID, TOKEN_BYTES, pack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from anaphora.lab.encoding import Encoder
    from anaphora.lab.record import Blocks, LoggedRequest


DEFAULT_BLOCK_SIZE = 16
"""For logs that do not name blocks: what most engines use."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a trace.

    units: packed int32, one id for each whole unit of the prompt.
    tail: the id of the last unit where the prompt ends inside it, else None.
    num_tokens: the prompt's length. line: where it stands in the log.
    """

    units: bytes
    tail: int | None
    num_tokens: int
    time_s: float
    namespace: Namespace = DEFAULT_NAMESPACE
    session: str | None = None
    num_output_tokens: int = 0
    line: int = 0

    @property
    def num_units(self) -> int:
        """Whole units."""
        return len(self.units) // TOKEN_BYTES


@dataclass(slots=True)
class Trace:
    """Prompts in order of arrival. `unit` is in tokens.

    num_streamed, num_streamed_tokens: prompts that went through `stream_prompts`, which are not kept.
    num_without_content: requests that tell lengths only, or nothing; they are left out.
    encoder: what made tokens of text, where there was text; `is_estimate` if its counts are estimates.
    listed_block: the block size of a trace of named blocks, None for one of tokens.
    block_size: of the caches that it is for.
    """

    name: str
    unit: int
    prompts: list[Prompt] = field(default_factory=list)
    num_without_content: int = 0
    num_streamed: int = 0
    num_streamed_tokens: int = 0
    encoder: str | None = None
    is_estimate: bool = False
    listed_block: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return self.num_streamed_tokens + sum(prompt.num_tokens for prompt in self.prompts)

    @property
    def num_requests(self) -> int:
        """Prompts, kept or not."""
        return self.num_streamed + len(self.prompts)

    def num_blocks(self, block_size: int) -> int:
        """Blocks of all requests, partial last ones included: enough for a cache that never evicts."""
        return sum(-(-prompt.num_tokens // block_size) for prompt in self.prompts)


def build_trace(
    name: str,
    requests: Iterable[LoggedRequest],
    encoder: Encoder,
    block_size: int | None = None,
    *,
    splits: bool = True,
) -> Trace:
    """Read a log into a trace for caches of this block size; None for the log's own, or 16 where it has none.

    splits: whether model, adapter and salt keep prompts apart, as they do in an engine.

    Raises LogError: a log of named blocks of several sizes, or more distinct blocks than ids.
    """
    trace = Trace(name, 1, block_size=block_size or DEFAULT_BLOCK_SIZE)
    trace.prompts += read_prompts(trace, requests, encoder, block_size, _Names(), splits=splits)
    trace.prompts.sort(key=lambda prompt: prompt.time_s)
    return trace


def stream_prompts(
    trace: Trace, requests: Iterable[LoggedRequest], encoder: Encoder, block_size: int | None = None
) -> Iterator[Prompt]:
    """The same one by one, kept nowhere: memory does not grow with a trace of named blocks. What is learned on the way
    is put into `trace`, whose own prompts stay empty.

    Raises LogError as `build_trace` does, and for requests that are not in order of time, or for blocks whose names are
    no numbers that fit int32: giving them numbers would need a table of all of them.
    """
    before = float("-inf")
    for prompt in read_prompts(trace, requests, encoder, block_size, _Numbers()):
        if prompt.time_s < before:
            raise LogError(
                f"{trace.name}: line {prompt.line}: earlier than the line before; --stream needs order of time"
            )
        before = prompt.time_s
        trace.num_streamed += 1
        trace.num_streamed_tokens += prompt.num_tokens
        yield prompt


def read_prompts(
    trace: Trace,
    requests: Iterable[LoggedRequest],
    encoder: Encoder,
    block_size: int | None,
    names: _Indices,
    *,
    splits: bool = True,
) -> Iterator[Prompt]:
    """The prompts of a log in its own order; what is learned of it on the way is put into `trace`."""
    clock, is_first = 0.0, True
    for request in requests:
        clock = clock if request.time_s is None else request.time_s
        namespace = _namespace(request) if splits else DEFAULT_NAMESPACE
        session = request.session or request.parent
        num_output = request.num_output_tokens or 0
        if request.blocks is not None:
            if block_size is None:
                block_size = trace.block_size = request.blocks.block_size
            unit = gcd(request.blocks.block_size, block_size)
            if not is_first and (trace.unit, trace.listed_block) != (unit, request.blocks.block_size):
                raise LogError(f"{trace.name}: line {request.line}: blocks of another size than before")
            trace.unit, trace.listed_block = unit, request.blocks.block_size
            length = request.num_prompt_tokens or len(request.blocks.ids) * request.blocks.block_size
            units, tail = _units(request.blocks, unit, length, names)
            prompt = Prompt(units, tail, length, clock, namespace, session, num_output, request.line)
        else:
            encoded = encode(request, encoder)
            if encoded is None or not encoded.ids:
                trace.num_without_content += 1
                continue
            if request.token_ids is None:
                trace.encoder, trace.is_estimate = encoder.name, encoder.is_estimate
            prompt = Prompt(encoded.ids, None, encoded.num_tokens, clock, namespace, session, num_output, request.line)
        is_first = False
        yield prompt


def _namespace(request: LoggedRequest) -> Namespace:
    adapter = Adapter(request.adapter) if request.adapter else None
    return Namespace(model=request.model or "", adapter=adapter, salt=request.salt or None)


class _Indices(Protocol):
    """Blocks' names as numbers. num: none is larger."""

    num: int

    def indices(self, blocks: Blocks) -> list[int]:
        """A number for each block; equal names of a scope, equal numbers."""
        ...


class _Numbers:
    """Names that are numbers already, as they are."""

    def __init__(self) -> None:
        self.num = 0

    def indices(self, blocks: Blocks) -> list[int]:
        """The names."""
        if blocks.scope or (blocks.ids and min(blocks.ids) < 0):
            raise LogError("--stream: needs blocks named by numbers from 0 up, the same in the whole trace")
        self.num = max(self.num, *blocks.ids, 0)
        return list(blocks.ids)


class _Names:
    """Blocks' names as small indices, each scope's apart."""

    def __init__(self) -> None:
        self._scopes: dict[str, dict[int, int]] = {}
        self.num = 0

    def indices(self, blocks: Blocks) -> list[int]:
        """An index for each block; equal names of a scope, equal indices."""
        known = self._scopes.setdefault(blocks.scope, {})
        found = []
        for name in blocks.ids:
            index = known.get(name)
            if index is None:
                index = known[name] = self.num
                self.num += 1
            found.append(index)
        return found


def _units(blocks: Blocks, unit: int, length: int, names: _Indices) -> tuple[bytes, int | None]:
    per_block = blocks.block_size // unit
    whole, rest = divmod(length, unit)
    ids = names.indices(blocks)
    if per_block > 1:
        ids = [index * per_block + k for index in ids for k in range(per_block)]
    if names.num * per_block > MAX_TOKEN_ID:
        raise LogError(f"more than {MAX_TOKEN_ID:,} distinct blocks; choose a larger --block-size")
    tail = ids[whole] if rest and whole < len(ids) else None
    return pack(ids if whole == len(ids) else ids[:whole]), tail
