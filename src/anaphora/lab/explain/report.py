"""An explanation as text, JSON and a picture. Never content: paths, offsets, lengths, lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anaphora.lab.charts import Step, draw_waterfall
from anaphora.lab.page import Table, percent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from decimal import Decimal

    from anaphora.lab.explain.fixes import Fix
    from anaphora.lab.explain.sessions import SessionReport
    from anaphora.lab.explain.waterfall import Cause, Waterfall

NOT_REPORTED = (
    "not reported is not 0 %: start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report, and "
    "ask for usage in streams (stream_options.include_usage)"
)


@dataclass(frozen=True, slots=True)
class Worth:
    """What a cached token saves. dollars: for a token; seconds: of prefill for a token. None: not known."""

    dollars: Decimal | None = None
    seconds: float | None = None


def waterfall_table(found: Waterfall, worth: Worth) -> Table:
    """From all prompt tokens down to what was reported."""
    rows = [_row("all prompt tokens", found.num_tokens, found.num_requests, found.num_tokens, Worth())]
    for number, cause in enumerate(found.causes):
        rows.append(_row(f"  - {cause.name}", cause.num_tokens, cause.num_requests, found.num_tokens, worth))
        if number == 0:
            rows.append(_row("what the prompts allow", found.ideal, None, found.num_tokens, Worth()))
    rows.append(_row("predicted", found.predicted, None, found.num_tokens, Worth()))
    silent = found.num_requests - found.reporting_requests
    if found.reported is None:
        rows.append(["reported", "not reported", "unknown", f"{silent:,}", *_worth(0, Worth(), blank=True)])
        return _table(rows, worth)
    if silent:
        rows.append(
            _row(
                "  - predicted for requests that report nothing",
                found.predicted - found.reporting_predicted,
                silent,
                found.num_tokens,
                Worth(),
            )
        )
    difference = found.reporting_predicted - found.reported
    name = (
        "  - not explained"
        if difference >= 0
        else "  + more than predicted: warm before the log, or an estimate too low"
    )
    rows.append(_row(name, abs(difference), None, found.num_tokens, worth if difference >= 0 else Worth()))
    rows.append(_row("reported", found.reported, found.reporting_requests, found.reporting_tokens, Worth()))
    return _table(rows, worth)


def _row(name: str, num: float, num_requests: int | None, whole: float, worth: Worth) -> list[str]:
    requests = "" if num_requests is None else f"{num_requests:,}"
    return [name, f"{num:,.0f}", percent(num / whole if whole else None), requests, *_worth(num, worth)]


def _worth(num: float, worth: Worth, *, blank: bool = False) -> list[str]:
    dollars = "" if blank or worth.dollars is None else f"{float(worth.dollars) * num:,.6f}"
    seconds = "" if blank or worth.seconds is None else f"{worth.seconds * num * 1000:,.0f}"
    return [dollars, seconds]


def _table(rows: list[list[str]], worth: Worth) -> Table:
    """Leaves out the columns of what is not known."""
    header = ["", "tokens", "share", "requests", "dollars", "prefill ms"]
    kept = [0, 1, 2, 3, *([4] if worth.dollars is not None else []), *([5] if worth.seconds is not None else [])]
    return Table([header[n] for n in kept], [[row[n] for n in kept] for row in rows])


def offenders_table(found: Waterfall, top: int) -> Table | None:
    """Where prompts diverge that need not."""
    if not found.offenders:
        return None
    rows = [
        [
            each.cause,
            each.path,
            f"{each.offset:,}",
            f"{each.num_tokens:,.0f}",
            f"{each.num_requests:,}",
            ", ".join(map(str, each.lines[:3])),
        ]
        for each in found.offenders[:top]
    ]
    return Table(["diverged by", "path", "offset", "tokens", "requests", "lines"], rows)


def fixes_table(fixes: Sequence[Fix], found: Waterfall, worth: Worth) -> Table | None:
    """What to change, and what it would bring."""
    if not fixes:
        return None
    rows = [
        [
            fix.action,
            f"{'up to ' if fix.is_bound else ''}{fix.num_tokens:+,.0f}",
            f"{fix.num_tokens / found.num_tokens:+.1%}",
            *([] if worth.dollars is None else [f"{float(worth.dollars) * fix.num_tokens:,.6f}"]),
        ]
        for fix in fixes
    ]
    header = ["fix", "cached tokens", "hit rate", *([] if worth.dollars is None else ["dollars saved"])]
    return Table(header, rows)


def sessions_table(report: SessionReport) -> Table:
    """The same for logs that tell usage alone."""
    whole = report.num_tokens
    rows = [_row("prompt tokens of requests that report", whole, report.num_requests, whole, Worth())[:4]]
    rows += [_row(f"  - {c.name}", c.num_tokens, c.num_requests, whole, Worth())[:4] for c in report.causes]
    rows.append(_row("reported as cached", report.cached, None, whole, Worth())[:4])
    if report.not_reported[0]:
        rows.append(["not reported", f"{report.not_reported[1]:,}", "unknown", f"{report.not_reported[0]:,}"])
    return Table(["", "tokens", "share", "requests"], rows)


def picture(found: Waterfall) -> str:
    """The waterfall as SVG."""
    steps = [Step("all prompt tokens", found.num_tokens, "total")]
    for number, cause in enumerate(found.causes):
        if cause.num_tokens:
            steps.append(Step(cause.name, cause.num_tokens))
        if number == 0:
            steps.append(Step("what the prompts allow", found.ideal, "total"))
    steps.append(Step("predicted", found.predicted, "total"))
    if found.reported is not None:
        silent = found.predicted - found.reporting_predicted
        if silent >= 1:
            steps.append(Step("requests that report nothing", silent))
        difference = found.reporting_predicted - found.reported
        if difference:
            steps.append(Step("not explained", abs(difference), "loss" if difference > 0 else "gain"))
        steps.append(Step("reported", found.reported, "total"))
    return draw_waterfall("From prompt tokens to cached tokens", steps, "tokens")


def as_dict(found: Waterfall, fixes: Sequence[Fix], worth: Worth) -> dict[str, object]:
    """Plain data for JSON. What is not known is null."""
    return {
        "requests": found.num_requests,
        "prompt_tokens": round(found.num_tokens),
        "ideal_tokens": round(found.ideal),
        "causes": [_cause(cause, worth) for cause in found.causes],
        "predicted_tokens": round(found.predicted),
        "predicted_hit_rate": found.predicted_rate,
        "reported": {
            "requests": found.reporting_requests,
            "not_reported_requests": found.num_requests - found.reporting_requests,
            "prompt_tokens": round(found.reporting_tokens),
            "predicted_tokens": round(found.reporting_predicted),
            "cached_tokens": found.reported,
            "hit_rate": found.reported_rate,
        },
        "offenders": [
            {
                "cause": each.cause,
                "path": each.path,
                "offset": each.offset,
                "tokens": round(each.num_tokens),
                "requests": each.num_requests,
                "lines": each.lines,
            }
            for each in found.offenders
        ],
        "fixes": [
            {"action": fix.action, "tokens": round(fix.num_tokens), "is_upper_bound": fix.is_bound} for fix in fixes
        ],
        "estimate_error": found.estimate_error,
    }


def _cause(cause: Cause, worth: Worth) -> dict[str, object]:
    return {
        "name": cause.name,
        "tokens": round(cause.num_tokens),
        "requests": cause.num_requests,
        "dollars": None if worth.dollars is None else round(float(worth.dollars) * cause.num_tokens, 6),
        "prefill_s": None if worth.seconds is None else worth.seconds * cause.num_tokens,
    }
