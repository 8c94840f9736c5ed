"""`anaphora bench`: what a cached prefix is worth, and what keeping it costs."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from anaphora.server.bench_targets import FirstToken, Overhead, Target

WARM_RUNS_PER_REPEAT = 3
NUM_UNRELATED_PROMPTS = 4
NUM_UNRELATED_TOKENS = 256
NUM_OUTPUT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """For each length of prefix, `repeats` times: a cold run, then a few warm ones with new suffixes."""

    prefix_tokens: tuple[int, ...] = (1000, 4000)
    suffix_tokens: int = 20
    repeats: int = 3
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, values in (
            ("prefix_tokens", self.prefix_tokens),
            ("suffix_tokens", (self.suffix_tokens,)),
            ("repeats", (self.repeats,)),
        ):
            if not values or min(values) < 1:
                raise ValueError(f"{name}: expected at least 1, got {min(values, default=None)}")


@dataclass(frozen=True, slots=True)
class PrefixResult:
    """Medians for one length of prefix, in milliseconds. cached_tokens: of the warm runs, None if not told."""

    prefix_tokens: int
    suffix_tokens: int
    cached_tokens: int | None
    cold_ttft_ms: float
    warm_ttft_ms: float
    ideal_ms: float


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What was measured. overhead: shares of step time at 0 % hits, None if not told."""

    target: str
    repeats: int
    ideal_is: str
    prefixes: tuple[PrefixResult, ...]
    overhead: Overhead | None

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self), indent=2)

    def to_table(self) -> str:
        """For people."""
        lines = [
            f"{self.target}; medians of {self.repeats} cold and {self.repeats * WARM_RUNS_PER_REPEAT} warm runs",
            "",
            f"{'prefix + suffix':>15}  {'cached':>6}  {'cold TTFT ms':>12}  {'warm TTFT ms':>12}  {'ideal ms':>8}  "
            f"{'cold / warm':>11}  {'warm / ideal':>12}",
        ]
        for row in self.prefixes:
            cached = "?" if row.cached_tokens is None else str(row.cached_tokens)
            lines.append(
                f"{f'{row.prefix_tokens} + {row.suffix_tokens}':>15}  {cached:>6}  {row.cold_ttft_ms:>12.1f}  "
                f"{row.warm_ttft_ms:>12.1f}  {row.ideal_ms:>8.1f}  {row.cold_ttft_ms / row.warm_ttft_ms:>10.1f}x  "
                f"{row.warm_ttft_ms / row.ideal_ms:>12.2f}"
            )
        shares = self.overhead
        share = (
            "not told by this server"
            if shares is None
            else f"{100 * shares.total:.3f} % of CPU time (schedule {100 * shares.schedule:.3f} %, "
            f"commit {100 * shares.commit:.3f} %)"
        )
        lines += ["", f"ideal: {self.ideal_is}", f"scheduler and manager, of steps at 0 % hits: {share}"]
        return "\n".join(lines)


def run_bench(target: Target, plan: Plan, progress: Callable[[str], None]) -> BenchResult:
    """Measure. Every cold run has a prefix that nobody has seen; every warm run a suffix that nobody has.

    progress: told a line now and then.
    """
    rng = random.Random(plan.seed)

    def fresh(num_tokens: int) -> list[int]:
        return rng.choices(target.token_ids, k=num_tokens)

    target.check(max(plan.prefix_tokens) + plan.suffix_tokens, 1)
    target.check(NUM_UNRELATED_TOKENS, NUM_OUTPUT_TOKENS)
    progress("warming up")
    target.first_token(fresh(plan.suffix_tokens))
    prefixes = tuple(_measure(target, plan, num_tokens, fresh, progress) for num_tokens in plan.prefix_tokens)
    progress(f"{NUM_UNRELATED_PROMPTS} unrelated prompts of {NUM_UNRELATED_TOKENS} tokens together")
    unrelated = [fresh(NUM_UNRELATED_TOKENS) for _ in range(NUM_UNRELATED_PROMPTS)]
    return BenchResult(
        target=target.name,
        repeats=plan.repeats,
        ideal_is=target.ideal_is,
        prefixes=prefixes,
        overhead=target.overhead(unrelated, NUM_OUTPUT_TOKENS),
    )


def _measure(
    target: Target,
    plan: Plan,
    num_prefix_tokens: int,
    fresh: Callable[[int], list[int]],
    progress: Callable[[str], None],
) -> PrefixResult:
    cold: list[FirstToken] = []
    warm: list[FirstToken] = []
    ideal: list[float] = []
    for repeat in range(1, plan.repeats + 1):
        prefix = fresh(num_prefix_tokens)
        cold.append(target.first_token(prefix + fresh(plan.suffix_tokens)))
        for _ in range(WARM_RUNS_PER_REPEAT):
            warm.append(target.first_token(prefix + fresh(plan.suffix_tokens)))
            ideal.append(target.ideal(prefix + fresh(plan.suffix_tokens), plan.suffix_tokens))
        progress(
            f"prefix {num_prefix_tokens}, {repeat} of {plan.repeats}: cold {1000 * cold[-1].ttft_s:.1f} ms, "
            f"warm {1000 * warm[-1].ttft_s:.1f} ms, ideal {1000 * ideal[-1]:.1f} ms"
        )
    told = [run.cached_tokens for run in warm if run.cached_tokens is not None]
    return PrefixResult(
        prefix_tokens=num_prefix_tokens,
        suffix_tokens=plan.suffix_tokens,
        cached_tokens=statistics.median_low(told) if told else None,
        cold_ttft_ms=1000 * statistics.median(run.ttft_s for run in cold),
        warm_ttft_ms=1000 * statistics.median(run.ttft_s for run in warm),
        ideal_ms=1000 * statistics.median(ideal),
    )
