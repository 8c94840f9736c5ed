"""Checks of what is found. B is the block size; pools are as small as shows the fault."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from anaphora.conformance.adapter import Prompt
from anaphora.conformance.checks.check import ScriptChecks, ids, text
from anaphora.conformance.script import (
    FORGE_DIGESTS,
    allocate,
    append,
    begin,
    computed,
    evict,
    finish,
    generate,
    match,
    run,
)

if TYPE_CHECKING:
    from anaphora.conformance.checks.check import Scenario
    from anaphora.conformance.profile import Profile

CHECKS = ScriptChecks()


def waits_for_kv(profile: Profile) -> bool:
    """Whether nothing can be found before it is computed."""
    return profile.shareable != "at_allocation"


@CHECKS.add("vllm-project/vllm#11186, ml-explore/mlx-lm#183")
def whole_prompt(size: int) -> Scenario:
    """An equal prompt hits every whole block, but never its last token: without it there are no logits to go on
    from."""
    lengths = sorted({1, max(1, size - 1), size, size + 1, 2 * size, 2 * size + 1})
    script = []
    for number, length in enumerate(lengths):
        prompt = text(1 + 1000 * number, length)
        script += [run("a", prompt, expected=0), run("b", prompt, expected=(length - 1) // size * size)]
    return 4 * len(lengths), script


@CHECKS.add("ml-explore/mlx-lm#1495")
def longer_and_shorter(size: int) -> Scenario:
    """A longer prompt hits what a shorter one left, and the other way round."""
    return 8, [
        run("a", text(1, 2 * size + 1), expected=0),
        run("b", text(1, 4 * size + 1), expected=(2 * size + 1) // size * size),
        run("c", text(1, size + 1), expected=size),
    ]


@CHECKS.add("novitalabs/pegaflow#450")
def parting_inside_a_block(size: int) -> Scenario:
    """Prompts that part inside a block share the blocks before it and nothing of it, however fine digests are made."""
    first, half = ids(1, 3 * size + 1), size // 2
    second = (*first[: size + half], *ids(5000, 2 * size + 1 - half))
    third = (*first[:half], *ids(7000, 3 * size + 1 - half))
    return 16, [
        run("a", Prompt(first)),
        run("b", Prompt(second), expected=size),
        run("c", Prompt(third), expected=0),
        run("d", Prompt(first), expected=3 * size),
    ]


@CHECKS.add()
def equal_blocks_elsewhere(size: int) -> Scenario:
    """Equal blocks after unequal ones are other prefixes: the KV of a token depends on all before it."""
    return 16, [
        run("a", Prompt((*ids(1, size), *ids(1000, size + 1)))),
        run("b", Prompt((*ids(5000, size), *ids(7000, size + 1))), expected=0),
        run("c", Prompt((*ids(5000, size), *ids(1000, size + 1))), expected=size),
        run("d", Prompt(ids(1000, size + 1)), expected=0),
        run("e", Prompt((*ids(1, size), *ids(1000, size), *ids(1000, size + 1))), expected=2 * size),
    ]


@CHECKS.add("huggingface/text-generation-inference#2489")
def chunked_prefill(size: int) -> Scenario:
    """A prompt computed in chunks is found as far as it is computed, not further."""
    prompt = text(1, 4 * size + 1)
    return 16, [
        begin("a", prompt, 2 * size, expected=0),
        computed("a"),
        match(prompt, expected=2 * size),
        allocate("a", 2 * size),
        computed("a"),
        match(prompt, expected=4 * size),
    ]


@CHECKS.add("huggingface/text-generation-inference#2489, vllm-project/vllm#29387", waits_for_kv)
def not_yet_computed(size: int) -> Scenario:
    """Blocks that are allocated and not computed are not found."""
    prompt = text(1, 2 * size + 1)
    return 12, [
        begin("a", prompt, expected=0),
        begin("b", prompt, expected=0),
        computed("a", size),
        match(prompt, expected=size),
    ]


@CHECKS.add("vllm-project/vllm#57580, #43569")
def given_up_before_computed(size: int) -> Scenario:
    """What a request was given blocks for and never computed is not found once it is gone: aborted, or preempted by a
    request that comes later in the same step."""
    prompt = text(1, 2 * size + 1)
    return 8, [begin("a", prompt, expected=0), finish("a"), begin("b", prompt, expected=0)]


@CHECKS.add()
def generated_tokens(size: int) -> Scenario:
    """Generated tokens are found by the next turn, the block that they share with the prompt included."""
    prompt, answer = ids(1, size + 1), ids(size + 2, 2 * size)
    return 12, [
        begin("a", Prompt(prompt)),
        computed("a"),
        *[generate("a", [token]) for token in answer],
        finish("a"),
        run("b", Prompt((*prompt, *answer, 9000)), expected=(3 * size + 1) // size * size),
    ]


@CHECKS.add()
def drafts(size: int) -> Scenario:
    """Slots for draft tokens change nothing about what is found: only known, computed tokens are."""
    prompt, guessed, right = ids(1, size + 1), ids(size + 2, 2 * size), ids(7000, size)
    num_full = (size + 1) // size * size
    return 12, [
        begin("a", Prompt(prompt)),
        computed("a"),
        allocate("a", 2 * size),
        match(Prompt(prompt + guessed), expected=num_full),
        append("a", right),
        match(Prompt((*prompt, *right, 9)), expected=num_full),
        allocate("a"),
        computed("a"),
        match(Prompt((*prompt, *right, 9)), expected=num_full + size),
        match(Prompt(prompt + guessed), expected=num_full),
    ]


@CHECKS.add("llm-d/llm-d-inference-sim#705")
def past_a_gap(size: int) -> Scenario:
    """A hit stops at the first block that is missing, though later ones are cached."""
    prompt = text(1, 3 * size + 1)
    return 8, [begin("a", prompt), computed("a"), evict("a", 0), finish("a"), match(prompt, expected=0)]


@CHECKS.add("vllm-project/vllm#42019, #13105")
def reads_not_wanted(size: int) -> Scenario:
    """A request that must not read the cache (prompt log-probabilities) finds nothing, and leaves its KV for others."""
    prompt = text(1, 2 * size + 1)
    return 12, [
        run("a", prompt, expected=0),
        run("b", replace(prompt, reads_cache=False), expected=0),
        run("c", prompt, expected=2 * size),
    ]


@CHECKS.add("Avarok-Cybersecurity/atlas#1193")
def partly_filled_block(size: int) -> Scenario:
    """A partly filled block is never shared as it stands: two that go on from it would write into one place."""
    stem = ids(1, size + max(1, size // 2))
    return 16, [
        run("a", Prompt(stem)),
        begin("b", Prompt((*stem, 7000))),
        begin("c", Prompt((*stem, 8000))),
        computed("b"),
        computed("c"),
        generate("b", ids(7001, size)),
        generate("c", ids(8001, size)),
    ]


@CHECKS.add("CVE-2025-25183", lambda profile: profile.digests == "verified")
def forged_digest(size: int) -> Scenario:
    """A digest is a name, no proof: a forged or colliding one costs a miss and never serves another prompt's KV."""
    return 16, [
        FORGE_DIGESTS,
        run("a", text(1, size + 1), expected=0),
        run("b", text(5000, size + 1), expected=0),
        run("c", text(1, size + 1), expected=size),
    ]
