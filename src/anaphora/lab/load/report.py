"""A load in numbers and pictures: what was measured, and what was predicted beside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from anaphora.lab.charts import draw_distribution
from anaphora.lab.load.generator import LATE_S
from anaphora.lab.page import Table, percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from anaphora.lab.load.generator import Load
    from anaphora.lab.load.prediction import Prediction
    from anaphora.lab.load.prompts import Vocabulary

_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Times:
    """Some durations: quantiles and mean, in seconds. None of nothing."""

    values: Sequence[float]

    def at(self, name: str) -> float | None:
        """mean, p50, p90 or p99."""
        if not self.values:
            return None
        if name == "mean":
            return float(np.mean(self.values))
        return float(np.quantile(self.values, _SHARES[name]))

    def as_dict(self) -> dict[str, float | None]:
        """Plain data."""
        return {name: self.at(name) for name in ("mean", *_SHARES)}


@dataclass(slots=True)
class Measured:
    """What a run gave, from the client's side or from the simulator's. Counts of what nobody reported are None."""

    num_answered: int
    duration_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    ttft_s: Times
    gap_s: Times
    per_token_s: Times
    whole_s: Times

    @property
    def hit_rate(self) -> float | None:
        """Cached over prompt tokens."""
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens

    @property
    def output_tokens_per_s(self) -> float | None:
        """Over the whole run."""
        return None if self.output_tokens is None or not self.duration_s else self.output_tokens / self.duration_s

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            "answered": self.num_answered,
            "duration_s": self.duration_s,
            "requests_per_s": self.num_answered / self.duration_s if self.duration_s else None,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "hit_rate": self.hit_rate,
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": self.output_tokens_per_s,
            "ttft_s": self.ttft_s.as_dict(),
            "itl_s": self.gap_s.as_dict(),
            "time_per_output_token_s": self.per_token_s.as_dict(),
            "e2e_s": self.whole_s.as_dict(),
        }


def measured(load: Load) -> Measured:
    """What the client saw of the requests that were answered."""
    good = [answer for answer in load.answers if answer.error is None]
    per_token = [
        (answer.end_s - answer.first_s) / (num - 1)
        for answer in good
        if answer.end_s is not None and answer.first_s is not None and (num := answer.output_tokens or 0) > 1
    ]
    return Measured(
        len(good),
        load.duration_s,
        _sum(answer.prompt_tokens for answer in good),
        _sum(answer.cached_tokens for answer in good),
        _sum(answer.output_tokens for answer in good),
        Times([answer.ttft_s for answer in good if answer.ttft_s is not None]),
        Times([gap for answer in good for gap in answer.gaps_s]),
        Times(per_token),
        Times([answer.end_s - answer.sent_s for answer in good if answer.end_s is not None]),
    )


def predicted(prediction: Prediction) -> Measured:
    """The same of the simulated run."""
    served = [each for each in prediction.served if each is not None]
    add = prediction.overhead_s
    per_token = [
        (each.finished_s - each.first_token_s) / (each.num_output_tokens - 1)
        for each in served
        if each.num_output_tokens > 1
    ]
    return Measured(
        len(served),
        max((each.finished_s for each in served), default=0.0) + add,
        sum(each.num_prompt_tokens for each in served),
        sum(each.num_cached_tokens for each in served),
        sum(each.num_output_tokens for each in served),
        Times([each.ttft_s + add for each in served]),
        Times([]),
        Times(per_token),
        Times([each.finished_s - each.arrived_s + add for each in served]),
    )


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Cached tokens of each request, reported beside predicted, over the requests that have both."""

    num_requests: int
    num_equal: int
    worst: int
    """The largest difference of a request, in tokens, reported less predicted."""

    def sentence(self) -> str:
        """For people."""
        if not self.num_requests:
            return "cached tokens of each request: not reported by the server, so there is nothing to compare"
        if self.num_equal == self.num_requests:
            return f"cached tokens of each request: equal in all {self.num_requests:,}"
        return (
            f"cached tokens of each request: equal in {self.num_equal:,} of {self.num_requests:,}; "
            f"largest difference {self.worst:+,} tokens"
        )


def compare_cached(load: Load, prediction: Prediction) -> CachedTokens:
    """Request by request."""
    differences = [
        answer.cached_tokens - each.num_cached_tokens
        for answer, each in zip(load.answers, prediction.served, strict=True)
        if each is not None and answer.cached_tokens is not None
    ]
    return CachedTokens(len(differences), differences.count(0), max(differences, key=abs, default=0))


def errors(load: Load) -> Counter[str]:
    """Failures by kind."""
    return Counter(answer.error for answer in load.answers if answer.error is not None)


def length_error(load: Load) -> tuple[float, int] | None:
    """How far the prompts' lengths, as the server counts them, are from the trace's: in total, as a share, and of the
    worst request, in tokens; None where the server does not tell."""
    pairs = [
        (answer.prompt_tokens, prompt.num_tokens)
        for answer, prompt in zip(load.answers, load.prompts, strict=True)
        if answer.prompt_tokens is not None
    ]
    if not pairs:
        return None
    total = sum(told for told, _ in pairs) / sum(wanted for _, wanted in pairs) - 1
    return total, max((told - wanted for told, wanted in pairs), key=abs)


def sentences(load: Load, vocabulary: Vocabulary) -> list[str]:
    """What one must know of a run before its numbers."""
    lateness = load.lateness_s
    late = [each for each in lateness if each > LATE_S]
    said = [f"{len(load.answers):,} requests sent in {max(load.sent_s, default=0.0):,.1f} s."]
    why = " (they waited for one of the clients)" if load.concurrency else ""
    said.append(
        f"Late sends: {len(late):,} by more than {1000 * LATE_S:.0f} ms, at most {1000 * max(late):,.0f} ms{why}."
        if late
        else f"Late sends: none by more than {1000 * LATE_S:.0f} ms."
    )
    error = length_error(load)
    what = {"ids": "token ids", "text": "text of one-token words", "chat": "one user message of one-token words"}
    said.append(
        f"Prompts are {what[vocabulary.form]} with the trace's sharing; "
        + (
            "the server does not report lengths."
            if error is None
            else f"lengths as the server counts them: {error[0]:+.2%} in total, {error[1]:+,} tokens at worst."
        )
    )
    failed = errors(load)
    if failed:
        said.append("Failed: " + ", ".join(f"{count:,} x {kind}" for kind, count in failed.most_common()) + ".")
        kind = failed.most_common(1)[0][0]
        message = next(answer.message for answer in load.answers if answer.error == kind)
        if message:
            said.append(f"{kind} says: {message}")
    return said


def comparison_table(real: Measured, virtual: Measured | None) -> Table:
    """A row for each figure: measured, and beside it predicted and how far that is off."""
    rows = []
    for name, unit, one, other in _figures(real, virtual):
        cells = [name, _spelled(one, unit)]
        if virtual is not None:
            off = "" if one is None or other is None or not one else f"{other / one - 1:+.1%}"
            cells += [_spelled(other, unit) if other is not None else "", off]
        rows.append(cells)
    header = ["", "measured"] if virtual is None else ["", "measured", "predicted", "off by"]
    return Table(header, rows)


def _figures(real: Measured, virtual: Measured | None) -> Iterator[tuple[str, str, float | None, float | None]]:
    def both(name: str, unit: str, attribute: str) -> tuple[str, str, float | None, float | None]:
        return name, unit, getattr(real, attribute), None if virtual is None else getattr(virtual, attribute)

    yield both("requests answered", "count", "num_answered")
    yield both("prompt tokens", "count", "prompt_tokens")
    yield both("cached tokens", "count", "cached_tokens")
    yield both("hit rate", "share", "hit_rate")
    yield both("output tokens", "count", "output_tokens")
    yield both("duration s", "seconds", "duration_s")
    yield both("output tokens/s", "number", "output_tokens_per_s")
    for title, attribute in (
        ("TTFT", "ttft_s"), ("ITL", "gap_s"), ("time per output token", "per_token_s"), ("e2e", "whole_s"),
    ):  # fmt: skip
        for name in ("mean", *_SHARES):
            pair = [getattr(each, attribute).at(name) if each is not None else None for each in (real, virtual)]
            yield f"{title} {name} ms", "ms", pair[0], pair[1]


def _spelled(value: float | None, unit: str) -> str:
    if value is None:
        return "not reported" if unit in {"count", "share"} else "unknown"
    if unit == "share":
        return percent(value)
    if unit == "ms":
        return f"{1000 * value:,.1f}"
    return f"{value:,.0f}" if unit == "count" else f"{value:,.1f}"


def pictures(real: Measured, virtual: Measured | None) -> dict[str, str]:
    """SVGs by name: the distribution of the time to first token, measured and predicted."""
    lines = {"measured": real.ttft_s.values}
    if virtual is not None:
        lines["predicted"] = virtual.ttft_s.values
    picture = draw_distribution("time to first token", lines, "seconds; share of requests served within")
    return {} if picture is None else {"ttft": picture}


def records(load: Load, prediction: Prediction | None) -> Iterator[dict[str, object]]:
    """A line for each request, without content."""
    for number, (prompt, answer) in enumerate(zip(load.prompts, load.answers, strict=True)):
        line: dict[str, object] = {
            "line": prompt.line,
            "due_s": load.due_s[number],
            "sent_s": answer.sent_s - load.started_s,
            "ttft_s": answer.ttft_s,
            "e2e_s": None if answer.end_s is None else answer.end_s - answer.sent_s,
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "output_tokens": answer.output_tokens,
            "error": answer.error,
        }
        if prediction is not None:
            each = prediction.served[number]
            line["predicted_cached_tokens"] = None if each is None else each.num_cached_tokens
            line["predicted_ttft_s"] = prediction.ttft_s(number)
        yield line
