"""The figures as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cycles import OURS, SGLANG, target

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .cycles import Cycle
    from .workload import Scenario


def label(scenario: Scenario) -> str:
    """Name a scenario."""
    decode = f", {scenario.num_decode_tokens} decoded" if scenario.num_decode_tokens else ""
    return f"{scenario.num_tokens:,} tokens, {scenario.hit_percent} % hits{decode}"


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
    parts += ["### One request cycle, us", _cycles(cycles)]
    if has_vllm:
        parts += ["### Times cheaper than vLLM (target, aim)", _ratios(cycles)]
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
    parts += ["### Growth of the process while the pool fills, bytes a block (2,048 tokens)", _resident(cycles)]
    return "\n\n".join(parts)


def _by_scenario(cycles: Sequence[Cycle]) -> dict[Scenario, dict[str, Cycle]]:
    rows: dict[Scenario, dict[str, Cycle]] = {}
    for cycle in cycles:
        rows.setdefault(cycle.scenario, {})[cycle.contestant] = cycle
    return rows


def _contestants(cycles: Sequence[Cycle]) -> list[str]:
    present = {cycle.contestant for cycle in cycles}
    return [name for name in (*OURS, "vllm", *SGLANG) if name in present]


def _cycles(cycles: Sequence[Cycle]) -> str:
    names = _contestants(cycles)
    rows = []
    for scenario, by_name in _by_scenario(cycles).items():
        rows.append([label(scenario), *(_number(by_name[n].us) if n in by_name else "" for n in names)])
    return _table(["", *names], rows)


def _ratios(cycles: Sequence[Cycle]) -> str:
    names = [name for name in _contestants(cycles) if name != "vllm"]
    rows = []
    for scenario, by_name in _by_scenario(cycles).items():
        cells = []
        for name in names:
            if name not in by_name:
                cells.append("")
                continue
            aims = target(name, scenario)
            ratio = f"{_number(by_name['vllm'].us / by_name[name].us)}x"
            cells.append(ratio + (f" ({', '.join(str(aim) for aim in dict.fromkeys(aims))})" if aims else ""))
        rows.append([label(scenario), *cells])
    return _table(["", *names], rows)


def _resident(cycles: Sequence[Cycle]) -> str:
    names = _contestants(cycles)
    rows = [
        [label(scenario), *(_number(by_name[n].resident_bytes / scenario.num_blocks) for n in names)]
        for scenario, by_name in _by_scenario(cycles).items()
        if scenario == cycles[0].scenario  # later ones find memory that the process already has
    ]
    return _table(["", *names], rows)


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
