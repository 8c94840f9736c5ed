"""Checks of who gets which block: pinning, refusal, eviction, duplicates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.conformance.adapter import Prompt
from anaphora.conformance.checks.check import ScriptChecks, ids, text
from anaphora.conformance.script import RESET, allocate, append, begin, computed, finish, generate, match, run

if TYPE_CHECKING:
    from anaphora.conformance.checks.check import Scenario
    from anaphora.conformance.script import Op

CHECKS = ScriptChecks()


@CHECKS.add("vllm-project/vllm#37076")
def own_hit(size: int) -> Scenario:
    """A request's hits are held before blocks are taken for the rest of it, or it evicts what it has just found."""
    return 6, [
        run("a", text(1, 2 * size)),
        run("b", text(5000, 2 * size)),
        begin("c", Prompt((*ids(1, 2 * size), *ids(1000, 2 * size + 1))), expected=2 * size),
        computed("c"),
    ]


@CHECKS.add("vllm-project/vllm#37076")
def refused_request(size: int) -> Scenario:
    """A request that does not fit is refused, and nothing has changed: no count, no block, nothing forgotten."""
    return 4, [
        run("a", text(1, 2 * size + 1)),
        begin("b", Prompt((*ids(1, 2 * size), *ids(1000, 2 * size + 1))), expected="refused"),
        run("c", text(1, 2 * size + 1), expected=2 * size),
    ]


@CHECKS.add("vllm-project/vllm#37076")
def refused_growth(size: int) -> Scenario:
    """A running request that gets no more blocks keeps those that it has, and its place in the cache."""
    return 4, [
        begin("a", text(1, 2 * size)),
        computed("a"),
        begin("b", text(1000, size + 1)),
        computed("b"),
        append("a", ids(5000, size + 1)),
        allocate("a"),
        finish("b"),
        allocate("a"),
        computed("a"),
        finish("a"),
        match(Prompt((*ids(1, 2 * size), *ids(5000, size), 9)), expected=3 * size),
    ]


@CHECKS.add("ddalcu/mlx-serve#330")
def larger_than_the_pool(size: int) -> Scenario:
    """A request larger than the pool is refused and takes nothing away from the others."""
    return 4, [
        run("a", text(1, 2 * size + 1)),
        begin("b", text(1000, 5 * size), expected="refused"),
        match(text(1, 2 * size + 1), expected=2 * size),
    ]


@CHECKS.add("vllm-project/vllm#37076, sgl-project/sglang#24153")
def pinned_blocks(size: int) -> Scenario:
    """A block that a running request reads is not given to another."""
    prompt = text(1, 2 * size + 1)
    return 5, [
        run("a", prompt),
        begin("b", prompt, expected=2 * size),
        begin("c", text(1000, 3 * size), expected="refused"),
        begin("d", text(5000, 2 * size), expected=0),
        computed("d"),
        computed("b"),
    ]


@CHECKS.add("sgl-project/sglang#24153")
def readers_come_and_go(size: int) -> Scenario:
    """A shared prefix stays held until the last of its readers is gone, however its readers came and went."""
    stem = ids(1, 2 * size)
    first, second, third = (Prompt((*stem, *ids(1000 * n, size + 1))) for n in (1, 2, 3))
    return 8, [
        begin("a", first),
        computed("a"),
        begin("b", second, expected=2 * size),
        computed("b"),
        finish("a"),
        begin("c", third, expected=2 * size),
        computed("c"),
        finish("b"),
        begin("d", text(5000, 5 * size), expected="refused"),
        begin("e", text(5000, 4 * size), expected=0),
        computed("e"),
        generate("c", [7]),
    ]


@CHECKS.add("Avarok-Cybersecurity/atlas#1114")
def idle_blocks(size: int) -> Scenario:
    """Blocks that are cached and idle are given up for new content: they count as free."""
    return 2, [run("a", text(1, 2 * size)), run("b", text(1000, 2 * size), expected=0)]


@CHECKS.add()
def blank_blocks_first(size: int) -> Scenario:
    """Nothing cached is given up while a blank block is left."""
    tail = 1 if size > 1 else 0  # a tail that fills no block leaves a blank one behind
    return 6, [
        run("a", text(1, 2 * size + tail)),
        run("b", text(1000, 2 * size)),
        run("c", text(5000, 2 * size)),
        match(text(1, 2 * size + 1), expected=2 * size),
        match(text(1000, 2 * size + 1), expected=2 * size),
    ]


@CHECKS.add("llm-d/llm-d-inference-sim#704, LMCache/LMCache#443", lambda profile: profile.eviction == "exact")
def tail_before_head(size: int) -> Scenario:
    """A prefix is never evicted before what extends it, or the rest can no longer be found and still fills the pool."""
    return 5, [
        run("a", text(1, 4 * size + (size > 1))),
        run("b", text(1000, 2 * size)),
        match(text(1, 4 * size + 1), expected=3 * size),
    ]


def twins(size: int) -> list[Op | list[Op]]:
    """Two requests compute the same two blocks at once: neither finds the other's."""
    tokens = ids(1, 2 * size + 1)
    start, rest = tokens[: max(1, size - 1)], tokens[max(1, size - 1) :]
    return [
        begin("a", Prompt(start)),
        begin("b", Prompt(start)),
        computed("a"),
        computed("b"),
        append("a", rest),
        append("b", rest),
        allocate("a"),
        allocate("b"),
        computed("a"),
        computed("b"),
    ]


@CHECKS.add("ovg-project/kvcached#401")
def copies(size: int) -> Scenario:
    """Of two live copies of a block one is still found when the other's request is gone and its memory is used
    again."""
    return 8, [
        *twins(size),
        finish("a"),
        begin("c", text(5000, 5 * size)),
        computed("c"),
        match(text(1, 2 * size + 1), expected=2 * size),
        finish("b"),
        finish("c"),
        run("d", text(7000, 8 * size)),
        match(text(1, 2 * size + 1), expected=0),
    ]


@CHECKS.add("huggingface/transformers#42094")
def copies_given_back(size: int) -> Scenario:
    """Copies of a block are given back with the rest: none is lost, and the content is found afterwards."""
    return 8, [
        *twins(size),
        finish("b"),
        finish("a"),
        match(text(1, 2 * size + 1), expected=2 * size),
        run("c", text(5000, 8 * size)),
    ]


@CHECKS.add("ovg-project/kvcached#401")
def content_after_a_copy(size: int) -> Scenario:
    """What a request computes after a block that another computed too is found below it, whichever copy is kept."""
    more = ids(5000, 2 * size)
    return 12, [
        *twins(size),
        generate("b", more),
        finish("a"),
        match(Prompt((*ids(1, 2 * size + 1), *more, 9)), expected=(4 * size + 1) // size * size),
        finish("b"),
        match(Prompt((*ids(1, 2 * size + 1), *more, 9)), expected=(4 * size + 1) // size * size),
    ]


@CHECKS.add("Avarok-Cybersecurity/atlas#1193")
def growth_beside_a_reader(size: int) -> Scenario:
    """A request that grows on a tail that another reads grows beside it: what the other reads stays as it is."""
    prompt = ids(1, size + 1)
    return 12, [
        begin("a", Prompt(prompt)),
        computed("a"),
        generate("a", ids(size + 2, size - 1)) if size > 1 else [],
        begin("b", Prompt((*ids(1, 2 * size), 7000))),
        computed("b"),
        generate("a", ids(2 * size + 1, size)),
        generate("b", ids(7001, size)),
        finish("a"),
        generate("b", ids(8001, size)),
    ]


@CHECKS.add("InternLM/lmdeploy#4917")
def reset(size: int) -> Scenario:
    """A reset forgets all, and gives all blocks back."""
    return 8, [
        run("a", text(1, 2 * size + 1)),
        RESET,
        run("b", text(1, 2 * size + 1), expected=0),
        run("c", text(1, 2 * size + 1), expected=2 * size),
    ]


@CHECKS.add()
def reset_under_a_request(size: int) -> Scenario:
    """A reset while a request runs takes nothing from it: it is refused, or forgets what is cached and no more."""
    return 8, [
        begin("a", text(1, 2 * size + 1)),
        computed("a"),
        RESET,
        begin("b", text(1000, 5 * size)),
        computed("b"),
        generate("a", ids(5000, size)),
    ]
