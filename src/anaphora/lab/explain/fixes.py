"""What each fix would bring: the same log through the same cache, with that one thing changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anaphora.lab.explain.volatile import FIXES, VOLATILES
from anaphora.lab.explain.waterfall import conditions_of, scales_of

if TYPE_CHECKING:
    from anaphora.lab.explain.case import Case, Conditions
    from anaphora.lab.explain.waterfall import Reality, Waterfall

_FINE_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Fix:
    """What to do, and how many tokens more would be cached. is_bound: not a run, but the most that it can bring."""

    action: str
    num_tokens: float
    is_bound: bool = False


def fixes(case: Case, reality: Reality, found: Waterfall) -> list[Fix]:
    """Fixes for the causes that were found, the best first; those that bring nothing are left out."""
    real = conditions_of(case, reality)
    unit = case.trace.unit
    scales = scales_of(case)

    def cached(conditions: Conditions) -> float:
        return sum(n * s for n, s in zip(case.run(case.prompts(), conditions, unit), scales, strict=True))

    now = cached(real)
    result = [Fix(action, cached(other) - now) for action, other in _alternatives(real, found, unit)]
    names = {cause.name.removeprefix("diverged: ").rpartition(" in ")[0] for cause in found.causes}
    if names & set(VOLATILES):
        text = [prompt.num_tokens for prompt in case.text_prompts()]
        factors = [
            scale * prompt.num_tokens / max(1, num)
            for scale, prompt, num in zip(scales, case.prompts(), text, strict=True)
        ]

        def cached_text(kinds: tuple[str, ...]) -> float:
            wanted = tuple(kind for kind in VOLATILES if kind in kinds)
            run = case.run(case.text_prompts(wanted), real)
            return sum(n * f for n, f in zip(run, factors, strict=True))

        plain = cached_text(())
        kinds = [kind for kind in VOLATILES if kind in names]
        result += [Fix(FIXES[kind], cached_text((kind,)) - plain) for kind in kinds]
        if len(kinds) > 1:
            result.append(Fix(f"all of these in the prompts: {', '.join(kinds)}", cached_text(tuple(kinds)) - plain))
    for name in sorted(names & (FIXES.keys() - set(VOLATILES))):
        lost = sum(c.num_tokens for c in found.causes if c.name.startswith(f"diverged: {name} in"))
        result.append(Fix(FIXES[name], lost, is_bound=True))
    return sorted((fix for fix in result if fix.num_tokens >= 1), key=lambda fix: -fix.num_tokens)


def _alternatives(real: Conditions, found: Waterfall, unit: int) -> list[tuple[str, Conditions]]:
    others: list[tuple[str, Conditions]] = []
    if real.block_size > max(_FINE_BLOCK, unit):
        size = max(_FINE_BLOCK, unit)
        blocks = None if real.capacity_blocks is None else real.capacity_blocks * real.block_size // size
        others.append((f"blocks of {size} tokens", replace(real, block_size=size, capacity_blocks=blocks)))
    others += [
        (f"one {split} for all that may share", replace(real, splits=tuple(s for s in real.splits if s != split)))
        for split in real.splits
    ]
    if any(cause.name == "routed elsewhere" for cause in found.causes):
        others.append(("a router that sends a prompt where its prefix is cached", replace(real, replicas=1)))
    if real.ttl_s is not None:
        others += [
            (f"a time to live of {label}", replace(real, ttl_s=ttl_s))
            for label, ttl_s in (("1 hour", 3600.0), ("24 hours", 86_400.0))
            if ttl_s > real.ttl_s
        ]
    if real.capacity_blocks is not None:
        others += [
            (f"{factor} times the memory", replace(real, capacity_blocks=real.capacity_blocks * factor))
            for factor in (2, 4)
        ]
        others.append(("unbounded memory", replace(real, capacity_blocks=None)))
    return others
