"""Calibration: the speeds of this machine and executor, fitted to steps that were measured, and how well they predict.

StepTimer -> fit_profile -> HardwareProfile -> a VirtualExecutor -> compare with the real one on the same trace
"""

from __future__ import annotations

import random
import statistics
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from anaphora.cache import KVCacheManager
from anaphora.engine.cost_model import HardwareProfile, StepWork, WorkModel
from anaphora.engine.executor import Batch, KeepsHostBlocks, Span
from anaphora.engine.loop import Engine
from anaphora.engine.replay import Arrival, Served, WallClock, replay
from anaphora.engine.request import Request, SamplingParams
from anaphora.engine.virtual import VirtualClock, VirtualExecutor
from anaphora.tokens import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from anaphora.engine.executor import Executor
    from anaphora.engine.replay import Clock
    from anaphora.model.shape import ModelShape

_PREFILL_TOKENS = (8, 32, 128, 512)
_PREFILL_STARTS = (0, 512, 2048)
_DECODE_SPANS = (1, 4, 16, 32)
_DECODE_CONTEXTS = (64, 512, 2048)
_MIXED = ((4, 512, 64), (16, 512, 128))
"""Spans that decode, their context, and tokens of a prefill beside them."""
_NUM_ROUNDS, _NUM_RUNS = 2, 3
"""Rounds of timing before the trace that checks a profile and after each of its runs: a machine that others use too is
not as fast in one minute as in the next."""
_BUSY_SHARE = 0.5
"""How much of the time the trace that checks a profile keeps the engine busy."""
_NUM_FITTED = len(StepWork._fields) - 1
_NUM_TOGETHER, _NUM_DECODED = 8, 24
"""To measure what the engine itself takes: sequences side by side, and tokens of each."""


class MeasuredStep(NamedTuple):
    """What a step had to do, and the median of the seconds that it took."""

    work: StepWork
    seconds: float


class StepTimer:
    """Times steps of many kinds on pages that are allocated already, overwriting what is in them.

    Round by round, each kind once in a round, so that a busy moment spoils no one kind. Kinds that do not fit context
    or pages are left out. Making one is a round that does not count: in it pages are touched for the first time.
    """

    def __init__(
        self,
        executor: Executor,
        shape: ModelShape,
        *,
        num_blocks: int,
        block_size: int,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._executor = executor
        self._work = WorkModel(shape)
        self._clock = clock or WallClock()
        self._batches = list(_batches(shape, num_blocks, block_size))
        self._times: list[list[float]] = [[] for _ in self._batches]
        for batch in self._batches:
            executor.execute(batch)

    def run(self, num_rounds: int) -> None:
        """Time every kind so many times more."""
        for _ in range(num_rounds):
            for batch, times in zip(self._batches, self._times, strict=True):
                started = self._clock()
                self._executor.execute(batch)
                times.append(self._clock() - started)

    @property
    def steps(self) -> list[MeasuredStep]:
        """The kinds, with the medians of all rounds."""
        return [
            MeasuredStep(self._work.of(batch), statistics.median(times))
            for batch, times in zip(self._batches, self._times, strict=True)
        ]


def _batches(shape: ModelShape, num_blocks: int, block_size: int) -> Iterator[Batch]:
    rng = np.random.default_rng(0)

    def batch(*spans: tuple[int, int]) -> Batch | None:
        """Of (start, tokens), each on pages of its own; None if they do not fit."""
        made: list[Span] = []
        first = 1
        for start, num in spans:
            end = start + num
            after = first - (-end // block_size)
            if end > shape.max_context or after > num_blocks + 1:
                return None
            tokens = rng.integers(0, shape.vocab_size, num, dtype=np.int32)
            made.append(Span(tokens, start, [array("i", range(first, after))]))
            first = after
        return Batch(made)

    wanted = [
        *(((start, num),) for num in _PREFILL_TOKENS for start in _PREFILL_STARTS),
        *(((context, 1),) * num for num in _DECODE_SPANS for context in _DECODE_CONTEXTS),
        *((*((context, 1),) * num, (0, prefill)) for num, context, prefill in _MIXED),
    ]
    yield from filter(None, (batch(*spans) for spans in wanted))


def fit_profile(name: str, steps: Sequence[MeasuredStep]) -> HardwareProfile:
    """Return the speeds that explain the steps best: least squares of the relative errors, none of them negative. The
    engine's own share is not in them, see `with_overhead`.

    ValueError for no steps at all.
    """
    if not steps:
        raise ValueError("steps: none was measured; the context or the pages are too small for all of them")
    # Divided by the measured time: a step of 10 ms must be as right as one of 500 ms. Rows are not drawn from here.
    rows = np.array([np.array(step.work[:_NUM_FITTED]) / step.seconds for step in steps])
    scale = rows.max(axis=0)
    rows /= np.where(scale > 0, scale, 1)
    costs = np.zeros(rows.shape[1])
    used = np.flatnonzero(scale > 0)
    while len(used):
        solution = np.linalg.lstsq(rows[:, used], np.ones(len(rows)), rcond=None)[0]
        if (solution > 0).all():
            costs[used] = solution / scale[used]
            break
        used = np.delete(used, solution.argmin())
    span_s, *seconds_per = (float(cost) for cost in costs)
    speeds = [1 / cost if cost else None for cost in seconds_per]
    return HardwareProfile(name, span_s, *speeds)  # type: ignore[arg-type]


def with_overhead(profile: HardwareProfile, engine: Engine) -> HardwareProfile:
    """Return the profile with what the idle engine itself takes besides its executor: in a step, and in each row of
    logits from which it draws a token. Measured by decoding one sequence, and several together."""
    alone, together = (_overhead_s(engine, num) for num in (1, _NUM_TOGETHER))
    row_s = max(0.0, (together - alone) / (_NUM_TOGETHER - 1))
    return replace(profile, step_s=max(0.0, alone - row_s), row_s=row_s)


def _overhead_s(engine: Engine, num_sequences: int) -> float:
    before = engine.stats()
    sampling = SamplingParams(max_tokens=_NUM_DECODED, temperature=0.0, ignore_eos=True)
    for i in range(num_sequences):
        engine.submit(Request(f"overhead-{num_sequences}-{i}", pack([i] * 8), sampling, write_cache=False))
    while engine.has_work:
        engine.step()
    after = engine.stats()
    own_s = (after.step_s - before.step_s) - (after.execute_s - before.execute_s)
    return own_s / (after.num_steps - before.num_steps)


# -- how well it predicts ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same arrivals on the real executor, once or several times, and on the virtual one. Times are in seconds."""

    runs: list[list[Served]]
    virtual: list[Served]

    @property
    def real(self) -> list[Served]:
        """The real runs as one: of each request the one with the median time to first token (the upper of two)."""
        return [sorted(each, key=lambda record: record.ttft_s)[len(each) // 2] for each in zip(*self.runs, strict=True)]

    @property
    def ttft_error(self) -> float:
        """Median over the requests of |predicted - real| / real time to first token."""
        return statistics.median(
            abs(virtual.ttft_s - real.ttft_s) / real.ttft_s
            for real, virtual in zip(self.real, self.virtual, strict=True)
        )

    @property
    def mean_ttft_error(self) -> float:
        """(predicted - real) / real of the mean time to first token."""
        real, virtual = (statistics.fmean(record.ttft_s for record in run) for run in (self.real, self.virtual))
        return virtual / real - 1

    @property
    def num_equal_runs(self) -> int:
        """In how many of the runs every single request found as many tokens in the cache as on the virtual executor.
        Who comes at the moment in which a prefix is being completed may find it, or not yet."""
        virtual = [record.num_cached_tokens for record in self.virtual]
        return sum([record.num_cached_tokens for record in run] == virtual for run in self.runs)

    def to_table(self) -> str:
        """For people."""
        lines = [f"{'time to first token, ms':<24}  {'real':>8}  {'virtual':>8}  {'error':>6}"]
        runs = [sorted(1000 * record.ttft_s for record in run) for run in (self.real, self.virtual)]
        rows: tuple[tuple[str, Callable[[list[float]], float]], ...] = (
            ("mean", statistics.fmean),
            ("median", statistics.median),
            ("p90", _p90),
        )
        for name, pick in rows:
            real, virtual = (pick(run) for run in runs)
            lines.append(f"{name:<24}  {real:>8.1f}  {virtual:>8.1f}  {virtual / real - 1:>+6.1%}")
        cached = [sum(record.num_cached_tokens for record in run) for run in (self.real, self.virtual)]
        lines.append(f"{'cached tokens':<24}  {cached[0]:>8,}  {cached[1]:>8,}")
        num_equal, num_runs = self.num_equal_runs, len(self.runs)
        equal = "equal" if num_equal == num_runs else f"equal in {num_equal} of {num_runs} runs"
        lines.append(f"{len(self.real)} requests; cached tokens of each: {equal}; "
                     f"error of each one's time: median {self.ttft_error:.1%}")  # fmt: skip
        return "\n".join(lines)


def _p90(values: Sequence[float]) -> float:
    return values[int(0.9 * (len(values) - 1))]


def compare(engine: Engine, shape: ModelShape, profile: HardwareProfile, arrivals: Sequence[Arrival]) -> Comparison:
    """Replay the arrivals on an idle engine's executor, and on a virtual one, each with an empty cache of its own.

    What the engine had cached is overwritten, and so forgotten.
    """
    virtual = predict(engine, shape, profile, arrivals)
    engine.manager.reset()
    return Comparison([_replay_on(engine.executor, engine, WallClock(), arrivals)], virtual)


def predict(engine: Engine, shape: ModelShape, profile: HardwareProfile, arrivals: Sequence[Arrival]) -> list[Served]:
    """Replay the arrivals on a virtual executor, with a cache as large as the engine's."""
    clock = VirtualClock()
    return _replay_on(VirtualExecutor(shape, profile, clock), engine, clock, arrivals)


def _replay_on(executor: Executor, engine: Engine, clock: Clock, arrivals: Sequence[Arrival]) -> list[Served]:
    manager = KVCacheManager(engine.manager.num_blocks, engine.manager.block_size)
    return replay(Engine(executor, manager, clock=clock), clock, arrivals)


def calibrate(
    engine: Engine, shape: ModelShape, *, rate_per_s: float | None = None, progress: Callable[[str], None]
) -> tuple[HardwareProfile, Comparison]:
    """Measure an idle engine's executor; return its profile, and how well that predicts a trace of its own.

    The cache is empty afterwards. rate_per_s: requests a second of that trace; None for as many as keep this machine
    busy half of the time. progress: told a line now and then.
    """
    manager, executor = engine.manager, engine.executor
    manager.reset()
    progress("timing steps")
    timer = StepTimer(executor, shape, num_blocks=manager.num_blocks, block_size=manager.block_size)
    timer.run(_NUM_ROUNDS)
    longest = min(1200, engine.max_request_tokens)
    if rate_per_s is None:
        at_once = example_arrivals(shape.vocab_size, max_tokens=longest, rate_per_s=1e9)
        finished_s = [record.finished_s for record in predict(engine, shape, _fit(engine, timer), at_once)]
        rate_per_s = _BUSY_SHARE * len(at_once) / max(finished_s)
    arrivals = example_arrivals(shape.vocab_size, max_tokens=longest, rate_per_s=rate_per_s)
    runs = []
    for number in range(_NUM_RUNS):
        progress(f"replaying a trace, {number + 1} of {_NUM_RUNS}, and timing steps between")
        runs.append(_replay_on(executor, engine, WallClock(), arrivals))
        timer.run(_NUM_ROUNDS)
    manager.reset()
    profile = with_overhead(_fit(engine, timer), engine)
    manager.reset()
    profile = replace(profile, host_bytes_per_s=measure_host_bytes_per_s(engine, shape))
    return profile, Comparison(runs, predict(engine, shape, profile, arrivals))


def _fit(engine: Engine, timer: StepTimer) -> HardwareProfile:
    return fit_profile(engine.executor.numerics_id, timer.steps)


def measure_host_bytes_per_s(engine: Engine, shape: ModelShape, clock: Clock | None = None) -> float | None:
    """Return how fast an idle engine's executor moves KV to host memory and back, the median of several times; None if
    it does not.

    What the engine had there is overwritten: its cache must be empty.
    """
    executor, manager = engine.executor, engine.manager
    if not isinstance(executor, KeepsHostBlocks):
        return None
    now = clock or WallClock()
    num_blocks = min(64, manager.num_blocks, manager.num_host_blocks or 64)
    if not manager.num_host_blocks:
        executor.allocate_host(num_blocks)
    pairs = [(block, block) for block in range(1, num_blocks + 1)]
    num_bytes = num_blocks * manager.block_size * WorkModel(shape).kv_bytes_per_token
    executor.save_blocks(pairs)  # pages are touched for the first time
    seconds = []
    for _ in range(9):
        started = now()
        executor.save_blocks(pairs)
        executor.load_blocks(pairs)
        seconds.append((now() - started) / 2)
    return num_bytes / max(statistics.median(seconds), 1e-9)


def example_arrivals(
    vocab_size: int,
    *,
    max_tokens: int = 1200,
    num_requests: int = 48,
    rate_per_s: float = 4.0,
    num_prefixes: int = 6,
    seed: int = 0,
) -> list[Arrival]:
    """Return requests of at most `max_tokens` that share one of a few prefixes, at random (Poisson) times."""
    rng = random.Random(seed)

    def fresh(num_tokens: int) -> bytes:
        return pack([rng.randrange(vocab_size) for _ in range(num_tokens)])

    prefixes = [fresh(rng.randint(max_tokens // 3, max_tokens * 4 // 5)) for _ in range(num_prefixes)]
    arrivals, time_s = [], 0.0
    for i in range(num_requests):
        time_s += rng.expovariate(rate_per_s)
        prompt = rng.choice(prefixes) + fresh(rng.randint(1, max(1, max_tokens // 10)))
        sampling = SamplingParams(max_tokens=rng.randint(1, max(1, max_tokens // 40)), temperature=0.0, ignore_eos=True)
        arrivals.append(Arrival(time_s, Request(f"example-{i}", prompt, sampling)))
    return arrivals
