"""The waterfall: each cause is the difference between two runs of the same cache, one with it and one without.

    all prompt tokens
      - nothing shared            (no earlier request had them, whatever one changes)
    = what the prompts allow
      - diverged: ...             (shared but for a time, an identifier, an order, an edit)
      - last token                (a whole repeat still computes one token, or there are no logits)
      - below block size          (shared, but less than a block)
      - split by ...              (cached under another salt, adapter, tenant)
      - routed elsewhere          (cached on another replica)
      - expired                   (not used for longer than the time to live)
      - evicted                   (the memory was full)
    = predicted
      - not explained             (the server reported less; or more: it was warm before the log begins)
    = reported

Runs get stricter from line to line, so that no cause is negative. Requests whose server said nothing are counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Protocol

from anaphora.lab.explain.case import Case, Conditions
from anaphora.lab.explain.neighbours import Neighbours
from anaphora.lab.explain.volatile import VOLATILES, Difference, tell, without

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.lab.record import LoggedRequest, Part


@dataclass(frozen=True, slots=True)
class Reality:
    """What the server is taken to be. None: not known, and then no cause. See `Conditions`."""

    block_size: int = 16
    splits: tuple[str, ...] = ("salt", "adapter")
    replicas: int | None = None
    ttl_s: float | None = None
    capacity_blocks: int | None = None


@dataclass(slots=True)
class Cause:
    """Tokens lost to one cause, in how many requests."""

    name: str
    num_tokens: float = 0.0
    num_requests: int = 0

    def add(self, num_tokens: float) -> None:
        """Count a request's loss."""
        if num_tokens > 0:
            self.num_tokens += num_tokens
            self.num_requests += 1


@dataclass(slots=True)
class Offender:
    """Where prompts diverge: the path in the body and the offset in characters, no content."""

    cause: str
    path: str
    section: str
    offset: int
    num_tokens: float = 0.0
    num_requests: int = 0
    lines: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Waterfall:
    """The result. Token counts are in the log's own lengths where it states them (`scale`), else as encoded.

    reporting_predicted, reported: over the requests whose server reported cached tokens.
    """

    num_requests: int
    num_tokens: float
    causes: list[Cause]
    offenders: list[Offender]
    predicted: float
    reporting_requests: int
    reporting_tokens: float
    reporting_predicted: float
    reported: int | None
    estimate_error: tuple[float, float] | None
    """Of estimated lengths beside the stated ones: in total, and the median of a request."""

    @property
    def ideal(self) -> float:
        """What the prompts allow."""
        return self.num_tokens - self.causes[0].num_tokens

    @property
    def predicted_rate(self) -> float | None:
        """Predicted hits over prompt tokens."""
        return self.predicted / self.num_tokens if self.num_tokens else None

    @property
    def reported_rate(self) -> float | None:
        """Reported hits over the prompt tokens of the requests that report; None where none does."""
        return None if self.reported is None or not self.reporting_tokens else self.reported / self.reporting_tokens


class HasLevels(Protocol):
    """Rules between prompts and their reuse."""

    def levels(self) -> Sequence[tuple[str, Sequence[int]]]:
        """Return what would be read, request by request, with no rule in force, then with one more at a time; each
        under the name of the rule that came last."""
        ...


def explain(case: Case, reality: Reality, provider: HasLevels | None = None) -> Waterfall:
    """Run the levels and name the losses. Cost: about ten runs of the log.

    provider: whose rules stand between the prompts and their reuse, in place of an engine's cache.
    """
    unit, requests, prompts = case.trace.unit, case.requests, case.prompts()
    scales = scales_of(case)
    finest = Conditions(serves_last_token=True)
    shared = case.run(prompts, finest, unit)
    diverged, offenders = _diverged(case, shared) if case.has_text else ([0.0] * len(prompts), [])
    names: list[str] = ["" if not loss else cause for loss, cause in _paired(diverged, offenders)]
    levels: Sequence[tuple[str, Sequence[float]]] = _levels(case, reality, shared) if provider is None else []
    if provider is not None:
        # In the log's own counts; the waterfall brings them there again.
        levels = [
            (name, [num / scale for num, scale in zip(reads, scales, strict=True)]) for name, reads in provider.levels()
        ]
    total = Cause("nothing shared")
    by_cause: dict[str, Cause] = {}
    for number, prompt in enumerate(prompts):
        scale, loss = scales[number], diverged[number]
        total.add((prompt.num_tokens - shared[number] - loss) * scale)
        if loss:
            by_cause.setdefault(names[number], Cause(f"diverged: {names[number]}")).add(loss * scale)
    causes = [total, *sorted(by_cause.values(), key=lambda cause: -cause.num_tokens)]
    before: Sequence[float] = shared
    for name, reached in levels:
        level = [min(one, other) for one, other in zip(reached, before, strict=True)]
        cause = Cause(name)
        for scale, one, other in zip(scales, before, level, strict=True):
            cause.add((one - other) * scale)
        causes.append(cause)
        before = level
    predicted = [num * scale for num, scale in zip(before, scales, strict=True)]
    reporting = [n for n, request in enumerate(requests) if request.usage and request.usage.cached is not None]
    return Waterfall(
        len(requests),
        sum(prompt.num_tokens * scale for prompt, scale in zip(prompts, scales, strict=True)),
        causes,
        _merged(offenders, scales),
        sum(predicted),
        len(reporting),
        sum(prompts[n].num_tokens * scales[n] for n in reporting),
        sum(predicted[n] for n in reporting),
        sum(usage.cached or 0 for n in reporting if (usage := requests[n].usage)) if reporting else None,
        _estimate_error(case),
    )


def _levels(case: Case, reality: Reality, shared: list[int]) -> list[tuple[str, list[int]]]:
    """Each cause that is known of, and the run that has it too."""
    unit, prompts = case.trace.unit, case.prompts()
    levels = []
    if unit == 1:
        last = [min(num, max(0, p.num_tokens - 1)) for num, p in zip(shared, prompts, strict=True)]
        levels.append(("last token", last))
        name = f"below block size ({reality.block_size})"
    else:
        name = f"last block, or below block size ({reality.block_size})"
    conditions = Conditions(reality.block_size)
    levels.append((name, case.run(prompts, conditions, unit)))
    for split in reality.splits:
        if any(getattr(request, split) for request in case.requests):
            conditions = replace(conditions, splits=(*conditions.splits, split))
            levels.append((f"split by {split}", case.run(prompts, conditions, unit)))
    if reality.replicas != 1 and (reality.replicas or len({request.replica for request in case.requests}) > 1):
        conditions = replace(conditions, replicas=reality.replicas)
        levels.append(("routed elsewhere", case.run(prompts, conditions, unit)))
    if reality.ttl_s is not None:
        conditions = replace(conditions, ttl_s=reality.ttl_s)
        levels.append(("expired", case.run(prompts, conditions, unit)))
    if reality.capacity_blocks is not None:
        conditions = replace(conditions, capacity_blocks=reality.capacity_blocks)
        levels.append(("evicted", case.run(prompts, conditions, unit)))
    return levels


def conditions_of(case: Case, reality: Reality) -> Conditions:
    """All that stands between the prompts and the prediction."""
    splits = tuple(s for s in reality.splits if any(getattr(request, s) for request in case.requests))
    return Conditions(reality.block_size, False, splits, reality.replicas, reality.ttl_s, reality.capacity_blocks)


def _diverged(case: Case, shared: Sequence[int]) -> tuple[list[float], list[tuple[int, Offender]]]:
    """Tokens that each request would share but for a difference that need not be, and where that stands."""
    finest = Conditions(serves_last_token=True)
    actual_prompts = case.text_prompts()
    actual = case.run(actual_prompts, finest)
    clean = case.run(case.text_prompts(VOLATILES), finest)
    messages = case.run(case.text_prompts(sections=("messages", "prompt")), finest)
    plain, cleaned, bodies = Neighbours(), Neighbours(), Neighbours()
    losses: list[float] = []
    offenders: list[tuple[int, Offender]] = []
    for number, request in enumerate(case.requests):
        parts = request.parts
        tidy = without(parts, VOLATILES)
        body = tuple(part for part in parts if part.section in {"messages", "prompt"})
        near = (plain.find(parts), cleaned.find(tidy), bodies.find(body))
        ratio = case.prompts()[number].num_tokens / max(1, actual_prompts[number].num_tokens)
        gains: list[tuple[float, str, int | None]] = [
            (clean[number] - actual[number], "", near[1].number if near[1] else None),
            (messages[number] - actual[number], "section", near[2].number if near[2] else None),
        ]
        if near[0] is not None:
            other = case.requests[near[0].number].parts
            gains.append((_equal_after(parts, other, near[0].num_parts, case), "history", near[0].number))
        gain, kind, neighbour = max(gains, key=lambda each: each[0])
        loss = min(gain * ratio, case.prompts()[number].num_tokens - shared[number])
        if gain <= 0 or loss <= 0 or neighbour is None:
            losses.append(0.0)
        else:
            other = case.requests[neighbour].parts
            offender = _offender(parts, other, kind)
            offender.num_tokens, offender.lines = loss, [request.line]
            losses.append(loss)
            offenders.append((number, offender))
        plain.add(parts, number)
        cleaned.add(tidy, number)
        bodies.add(body, number)
    return losses, offenders


def _offender(parts: Sequence[Part], other: Sequence[Part], kind: str) -> Offender:
    told = tell(parts, other)
    if told is None:
        told = Difference("text", parts[0].path, parts[0].section, 0)
    cause, path, section, offset = told
    if cause != "text":
        return Offender(cause, path, section, offset)
    if kind == "section" or section in {"tools", "system"}:
        ours = [part.text for part in parts if part.section == "system"]
        theirs = [part.text for part in other if part.section == "system"]
        if [p.text for p in parts if p.section == "tools"] != [p.text for p in other if p.section == "tools"]:
            return Offender("tools", path, section, offset)
        earlier = "".join(theirs)
        if earlier and "".join(ours) != earlier and ("".join(ours)).endswith(earlier):
            return Offender("hoisted system", path, section, 0)
        return Offender("system", path, section, offset)
    return Offender("history" if kind == "history" else "text", path, section, offset)


def _equal_after(parts: Sequence[Part], other: Sequence[Part], num_equal: int, case: Case) -> float:
    """Tokens of the parts behind the first that differs which are equal, place by place."""
    if num_equal >= len(parts):
        return 0.0
    after = 0
    for part, its in zip(parts[num_equal + 1 :], other[num_equal + 1 :], strict=False):
        if part.text != its.text or part.role != its.role:
            break
        after += len(case.encoder.text(part.text)) // 4
    return float(after)


def _paired(losses: Sequence[float], offenders: Sequence[tuple[int, Offender]]) -> list[tuple[float, str]]:
    by_number = {number: f"{o.cause} in {o.section}" for number, o in offenders}
    return [(loss, by_number.get(number, "")) for number, loss in enumerate(losses)]


def _merged(offenders: Sequence[tuple[int, Offender]], scales: Sequence[float]) -> list[Offender]:
    """One entry for each place, the costliest first."""
    found: dict[tuple[str, str, str, int], Offender] = {}
    for number, each in offenders:
        key = (each.cause, each.path, each.section, each.offset)
        known = found.setdefault(key, Offender(*key))
        known.num_tokens += each.num_tokens * scales[number]
        known.num_requests += 1
        if len(known.lines) < 5:
            known.lines += each.lines
    return sorted(found.values(), key=lambda each: -each.num_tokens)


def scales_of(case: Case) -> list[float]:
    """For each request the tokens that the log states for one that was encoded; 1 where it states none."""
    return [_scale(request, prompt.num_tokens) for request, prompt in zip(case.requests, case.prompts(), strict=True)]


def _scale(request: LoggedRequest, num_encoded: int) -> float:
    length = request.length
    return length / num_encoded if length and num_encoded else 1.0


def _estimate_error(case: Case) -> tuple[float, float] | None:
    """How far estimated lengths are from stated ones; None where nothing is estimated, or nothing stated."""
    if not case.trace.is_estimate:
        return None
    pairs = [
        (prompt.num_tokens, request.length)
        for request, prompt in zip(case.requests, case.prompts(), strict=True)
        if request.token_ids is None and request.length
    ]
    if not pairs:
        return None
    total = sum(one for one, _ in pairs) / sum(other for _, other in pairs) - 1
    return total, median(abs(one / other - 1) for one, other in pairs)
