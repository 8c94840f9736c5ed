"""The figures as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cycles import OURS, SGLANG, VLLM, target

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .cycles import Cycle
    from .workload import Scenario


def label(scenario: Scenario) -> str:
    """Name a scenario."""
    decode = f" + {scenario.num_decode_tokens}" if scenario.num_decode_tokens else ""
    return f"{scenario.num_tokens // 1024}k{decode}, {scenario.hit_percent} %"


def render(
    versions: Sequence[str],
    cycles: Sequence[Cycle],
    growth: Mapping[str, Mapping[int, Mapping[str, float]]],
    details: Mapping[str, Mapping[int, Mapping[str, Any]]],
    has_vllm: object,
    has_sglang: object,
) -> str:
    """Return all tables."""
    parts = [f"{', '.join(versions)}. Thread CPU time, medians of interleaved rounds, a full pool of 100,000 blocks."]
    if not has_vllm:
        parts.append("vLLM is absent (--vllm-python), so there are no ratios to it.")
    if not has_sglang:
        parts.append("SGLang is absent (--sglang-python).")
    rows = _by_contestant(cycles)
    scenarios = list(dict.fromkeys(cycle.scenario for cycle in cycles))
    parts += ["### One request cycle, us", _cycles(rows, scenarios)]
    if has_vllm:
        parts += ["### Times cheaper than vLLM (in brackets: asked, aimed at)", _ratios(rows, scenarios)]
    if has_sglang:
        parts += ["### Times cheaper than the fastest of SGLang's trees", _against_sglang(rows, scenarios)]
    names = {
        "pool": ("### Cost against blocks in the pool, us", "blocks"),
        "tree": ("### Cost against nodes in the tree, us", "nodes"),
        "depth": ("### Cost against depth, us (a cached prompt of 16,000 tokens)", "edges"),
        "full match": ("### A full match, us, and one memcmp of the same bytes", "tokens"),
        "Python-level work": ("### Python-level work of a request at 90 % hits", "tokens"),
        "memory": ("### Memory of a full pool", "blocks a node"),
    }
    for key, (title, first) in names.items():
        parts += [title, _table_of({**growth, **details}[key], first)]
    parts += [
        "### Growth of the process while the pool fills with prompts of 2,048 tokens",
        _resident(rows, scenarios[0]),
    ]
    return "\n\n".join(parts)


Rows = dict[str, "dict[Scenario, Cycle]"]


def _by_contestant(cycles: Sequence[Cycle]) -> Rows:
    rows: Rows = {name: {} for name in (*OURS, VLLM, *SGLANG)}
    for cycle in cycles:
        rows[cycle.contestant][cycle.scenario] = cycle
    return {name: row for name, row in rows.items() if row}


def _cycles(rows: Rows, scenarios: Sequence[Scenario]) -> str:
    return _table(
        ["", *map(label, scenarios)],
        [[name, *(_number(row[s].us) if s in row else "" for s in scenarios)] for name, row in rows.items()],
    )


def _ratios(rows: Rows, scenarios: Sequence[Scenario]) -> str:
    """Every contestant against vLLM, with what is asked of ours; then our tree against SGLang's best."""
    table = []
    for name, row in rows.items():
        if name != VLLM:
            cells = []
            for scenario in scenarios:
                aims = target(name, scenario) or ()
                asked = f" ({', '.join(str(aim) for aim in dict.fromkeys(aims))})" if aims else ""
                cells.append(
                    f"{_number(rows[VLLM][scenario].us / row[scenario].us)}x{asked}" if scenario in row else ""
                )
            table.append([name, *cells])
    return _table(["", *map(label, scenarios)], table)


def _against_sglang(rows: Rows, scenarios: Sequence[Scenario]) -> str:
    both = [s for s in scenarios if s in rows[SGLANG[0]]]
    table = [
        [name, *(f"{_number(min(rows[tree][s].us for tree in SGLANG) / rows[name][s].us)}x" for s in both)]
        for name in rows
        if name.startswith("radix")
    ]
    return _table(["", *map(label, both)], table)


def _resident(rows: Rows, scenario: Scenario) -> str:
    """The first scenario only: later ones find memory that the process already has."""
    table = [[name, _number(row[scenario].resident_bytes / scenario.num_blocks)] for name, row in rows.items()]
    return _table(["", "bytes a block"], table)


def _table_of(points: Mapping[int, Mapping[str, Any]], first: str) -> str:
    columns = list(next(iter(points.values())))
    return _table([first, *columns], [[f"{x:,}", *(_number(row[c]) for c in columns)] for x, row in points.items()])


def _number(value: float) -> str:
    if isinstance(value, int) or value >= 1_000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
