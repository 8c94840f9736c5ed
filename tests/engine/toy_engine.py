"""An engine over the toy model, and what comes out of it per request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anaphora import KVCacheManager, Namespace
from anaphora.engine.loop import Engine
from anaphora.engine.request import Delta, FinishReason, Request, SamplingParams, TokenLogprob
from anaphora.tokens import pack
from tests.engine.toy_executor import ToyExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


@dataclass
class Outcome:
    """All deltas of one request, joined."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None

    def add(self, delta: Delta) -> None:
        assert self.finish_reason is None, "a delta after the last one"
        # The engine outlives whatever its executor raises, so the toy model's own checks would go unseen.
        assert not (delta.error or "").startswith(("AssertionError", "IndexError")), delta.error
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.num_cached_tokens = delta.num_cached_tokens
        self.finish_reason = delta.finish_reason
        self.logprobs += delta.logprobs
        self.error = delta.error
        assert delta.num_output_tokens == len(self.token_ids)


@dataclass
class ToyEngine:
    """The parts of an engine, within reach of a test; `step` checks the manager's books every time.

    outcomes: by request id; of further samples by request id, "#" and the sample's index.
    """

    engine: Engine
    executor: ToyExecutor
    manager: KVCacheManager
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.engine.submit(request)
            for index in range(request.sampling.n):
                self.outcomes[_name_of(request.request_id, index)] = Outcome()

    def abort(self, request_id: str) -> None:
        for delta in self.engine.abort(request_id):
            self.outcomes[_name(delta)].add(delta)
        self.manager.check()

    def step(self) -> list[Delta]:
        deltas = self.engine.step()
        for delta in deltas:
            self.outcomes[_name(delta)].add(delta)
        self.manager.check()
        return deltas

    def run(self, *requests: Request, max_steps: int = 2000) -> list[Outcome]:
        """Submit requests together; return their outcomes once nothing is live any more."""
        self.submit(*requests)
        for _ in range(max_steps):
            if not self.engine.has_work:
                return [self.outcomes[request.request_id] for request in requests]
            self.step()
        raise AssertionError(f"no end after {max_steps} steps")


def _name(delta: Delta) -> str:
    return _name_of(delta.request_id, delta.index)


def _name_of(request_id: str, index: int) -> str:
    return f"{request_id}#{index}" if index else request_id


def toy_engine(
    *, num_blocks: int = 64, block_size: int = 4, index: Any = "radix", host_blocks: int = 0, **options: Any
) -> ToyEngine:
    executor = ToyExecutor()
    manager = KVCacheManager(num_blocks=num_blocks, block_size=block_size, index=index, host_blocks=host_blocks)
    return ToyEngine(Engine(executor, manager, **options), executor, manager)


def request(
    name: str,
    prompt: Iterable[int],
    *,
    salt: str | None = None,
    read_cache: bool = True,
    write_cache: bool = True,
    priority: int = 0,
    deadline_s: float | None = None,
    **sampling: Any,
) -> Request:
    """A greedy request, unless `sampling` says otherwise."""
    return Request(
        name,
        pack(list(prompt)),
        SamplingParams(**{"temperature": 0.0, **sampling}),
        Namespace(salt=salt),
        read_cache=read_cache,
        write_cache=write_cache,
        priority=priority,
        deadline_s=deadline_s,
    )


@dataclass(frozen=True)
class LetterTokenizer:
    """Every token is one letter, 0 is "a"; the whole of what a detokenizer asks of a tokenizer."""

    letters: Sequence[str] = tuple(chr(ord("a") + i) for i in range(48))

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes:
        return self.letters[token_id].encode()


def ticking_clock(step_s: float = 1.0) -> Callable[[], float]:
    """A clock that moves on by `step_s` whenever it is read."""
    now = [0.0]

    def read() -> float:
        now[0] += step_s
        return now[0]

    return read
