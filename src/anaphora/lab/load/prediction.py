"""The same requests through the engine's own loop on a virtual clock: what the server should have answered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from anaphora.cache import KVCacheManager
from anaphora.engine.loop import Engine
from anaphora.engine.replay import Arrival, Served, replay
from anaphora.engine.request import Request, SamplingParams
from anaphora.engine.virtual import VirtualClock, VirtualExecutor, scripted_sampler
from anaphora.tokens import MAX_TOKEN_ID

if TYPE_CHECKING:
    from anaphora.cache.options import IndexKind
    from anaphora.engine.cost_model import HardwareProfile
    from anaphora.lab.live.server import Config
    from anaphora.lab.load.generator import Load
    from anaphora.lab.load.prompts import Prompts
    from anaphora.model.shape import ModelShape

_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_LIMITS = {"anaphora": (64, 512), "vllm": (256, 2048), "sglang": (256, 8192)}
"""Requests and tokens of a step, by default, as these engines have them on a machine of moderate size."""


@dataclass(frozen=True, slots=True)
class ServerCache:
    """The server's cache and limits as the simulator takes them. num_blocks: None where it is not known: no bound.

    is_enabled: whether it keeps prefixes at all. told: which of them the server told.
    """

    block_size: int
    num_blocks: int | None
    index: IndexKind
    max_num_seqs: int
    max_num_batched_tokens: int
    is_enabled: bool = True
    told: Literal["server", "assumed"] = "assumed"

    def sentence(self) -> str:
        """For people."""
        size = "no bound (not told)" if self.num_blocks is None else f"{self.num_blocks:,} blocks"
        source = "told by the server" if self.told == "server" else "assumed, as the server does not tell"
        return (
            f"blocks of {self.block_size} tokens, {size}, {source}; "
            f"{self.max_num_seqs} requests and {self.max_num_batched_tokens:,} tokens a step"
        )


def server_cache(
    config: Config,
    *,
    block_size: int | None = None,
    num_blocks: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
) -> ServerCache:
    """What the server tells of its cache, but for what is given; else blocks of 16 and no bound are assumed."""
    seqs, tokens = _LIMITS.get(config.engine or "", (64, 2048))
    is_told = config.block_size is not None and block_size is None
    return ServerCache(
        block_size or config.block_size or 16,
        num_blocks or config.num_blocks,
        "hash" if config.engine == "vllm" else "radix",
        max_num_seqs or seqs,
        max_num_batched_tokens or tokens,
        config.is_enabled is not False,
        "server" if is_told else "assumed",
    )


@dataclass(slots=True)
class Prediction:
    """What the simulator says of each request, by its number in the load; None for what it, or the server, refused.

    overhead_s: of each request besides its steps, in `ttft_s` already.
    """

    served: list[Served | None]
    cache: ServerCache
    overhead_s: float

    def ttft_s(self, number: int) -> float | None:
        """Time to first token."""
        each = self.served[number]
        return None if each is None else each.ttft_s + self.overhead_s


def predict(
    load: Load,
    prompts: Prompts,
    cache: ServerCache,
    shape: ModelShape,
    profile: HardwareProfile,
    overhead_s: float = 0.0,
) -> Prediction:
    """Run the requests that the server answered, each sent when it was sent, each answer as long as it was.

    Under a bound on concurrency each client sends its next request when it has an answer, as in the run.
    Cost: real engine steps, some 20 us a generated token.
    """
    shape = replace(shape, max_context=1 << 24)  # what the server took fits it
    clock = VirtualClock()
    executor = VirtualExecutor(shape, profile, clock, block_sizes=(*_BLOCK_SIZES, cache.block_size))
    executor.vocab_size = MAX_TOKEN_ID
    sent = load.sent_s
    numbers = [n for n, answer in enumerate(load.answers) if answer.error is None]
    lengths = {n: load.answers[n].output_tokens or load.num_outputs[n] for n in numbers}
    fits = [n for n in numbers if cache.num_blocks is None or _blocks(load, n, lengths[n], cache) <= cache.num_blocks]
    num_blocks = cache.num_blocks or max(1, sum(_blocks(load, n, lengths[n], cache) for n in fits))
    engine = Engine(
        executor,
        KVCacheManager(num_blocks, cache.block_size, index=cache.index, clock=clock),
        clock=clock,
        new_sampler=scripted_sampler({}),
        max_num_seqs=cache.max_num_seqs,
        max_num_batched_tokens=cache.max_num_batched_tokens,
    )
    due = load.due_s if load.concurrency else sent
    arrivals = (
        Arrival(
            due[n],
            Request(
                str(n),
                prompts.cached_as(prompts.indices(load.prompts[n])),
                SamplingParams(max_tokens=lengths[n], temperature=0.0, ignore_eos=True),
                read_cache=cache.is_enabled,
                write_cache=cache.is_enabled,
            ),
        )
        for n in sorted(fits, key=due.__getitem__)
    )
    found: list[Served | None] = [None] * len(load.answers)
    for each in replay(engine, clock, arrivals, concurrency=load.concurrency):
        found[int(each.request_id)] = each
    return Prediction(found, cache, overhead_s)


def _blocks(load: Load, number: int, num_output: int, cache: ServerCache) -> int:
    return -(-(load.prompts[number].num_tokens + num_output) // cache.block_size) + 1
