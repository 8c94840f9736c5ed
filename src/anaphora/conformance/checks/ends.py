"""Checks of how requests end, are preempted and come back; of what new weights change; and of the statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.conformance.adapter import Prompt
from anaphora.conformance.checks.check import ScriptChecks, ids, text
from anaphora.conformance.script import (
    INVALIDATE,
    abort,
    allocate,
    append,
    begin,
    computed,
    finish,
    generate,
    preempt,
    resume,
    run,
)

if TYPE_CHECKING:
    from anaphora.conformance.checks.check import Scenario
    from anaphora.conformance.profile import Profile
    from anaphora.conformance.script import Op

CHECKS = ScriptChecks()


def counts(profile: Profile) -> bool:
    """Whether statistics are promised."""
    return profile.counting is not None


@CHECKS.add("sgl-project/sglang#36926, vllm-project/vllm#46283")
def abort_in_any_state(size: int) -> Scenario:
    """An abort gives every block back, whatever the request was doing; a second one changes nothing."""
    prompt = text(1, 3 * size + 1)
    states: list[list[Op]] = [
        [begin("a", prompt)],
        [begin("a", prompt, size), computed("a")],
        [begin("a", prompt), computed("a")],
        [begin("a", prompt), computed("a"), append("a", [7]), allocate("a")],
        [begin("a", prompt), computed("a"), *generate("a", ids(7, size + 1))],
    ]
    script = [[*state, abort("a"), abort("a"), *run("b", text(5000, 8 * size))] for state in states]
    return 8, script


@CHECKS.add("sgl-project/sglang#36926, vllm-project/vllm#46283")
def abort_while_preempted(size: int) -> Scenario:
    """A request aborted while it is preempted gives back nothing twice."""
    prompt = text(1, 3 * size + 1)
    return 8, [
        begin("a", prompt),
        computed("a"),
        preempt("a"),
        abort("a"),
        abort("a"),
        run("b", prompt),
        run("c", text(5000, 8 * size)),
    ]


@CHECKS.add("vllm-project/vllm#25780")
def preempted_request(size: int) -> Scenario:
    """A preempted request gives all blocks back and finds its own work again."""
    return 8, [
        begin("a", text(1, 2 * size + 1)),
        computed("a"),
        preempt("a"),
        begin("b", text(1000, 5 * size), expected=0),
        computed("b"),
        finish("b"),
        resume("a", expected=2 * size),
        computed("a"),
        generate("a", [7]),
    ]


@CHECKS.add("mstar-project/mstar#280")
def all_blocks_held(size: int) -> Scenario:
    """When all blocks are held and every request needs one more, one gives way and the others go on."""
    stem = ids(1, 2 * size)
    return 4, [
        begin("a", Prompt((*stem, 7))),
        computed("a"),
        begin("b", Prompt((*stem, 8)), expected=2 * size),
        computed("b"),
        append("a", ids(1000, size)),
        append("b", ids(5000, size)),
        allocate("a"),
        allocate("b"),
        preempt("b"),
        allocate("a"),
        computed("a"),
        finish("a"),
        resume("b"),
        computed("b"),
    ]


@CHECKS.add("vllm-project/vllm#25780", counts)
def preempted_counts_once(size: int) -> Scenario:
    """A preempted request's second lookup, which finds its own blocks, is not counted as a hit."""
    return 8, [
        begin("a", text(1, 2 * size + 1), expected=0),
        computed("a"),
        preempt("a"),
        resume("a", expected=2 * size),
        computed("a"),
        finish("a"),
        run("b", text(1, 2 * size + 1), expected=2 * size),
    ]


@CHECKS.add("sgl-project/sglang#2555", counts)
def chunks_count_once(size: int) -> Scenario:
    """A prompt computed in chunks is asked for once; its own chunks are no hits."""
    script: list[Op] = [begin("a", text(1, 4 * size + 1), size, expected=0), computed("a")]
    for _ in range(4):
        script += [allocate("a", size), computed("a")]
    return 8, script


@CHECKS.add("InternLM/lmdeploy#4917, inclusionAI/AReaL#421")
def new_weights(size: int) -> Scenario:
    """Once the weights have changed nothing computed with the old ones is found, even where a request that ran on them
    computes on; what is computed anew is found again."""
    stem, more = ids(1, 2 * size + 1), ids(1000, size)
    return 16, [
        run("a", Prompt(stem)),
        begin("b", Prompt(stem)),
        computed("b"),
        INVALIDATE,
        run("c", Prompt(ids(5000, size + 1)), expected=0),
        generate("b", more),
        finish("b"),
        run("d", Prompt((*stem, *more, 9)), expected=0),
        run("e", Prompt((*stem, *more, 9)), expected=(3 * size + 1) // size * size),
    ]
