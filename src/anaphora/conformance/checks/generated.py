"""Checks that nobody thought of: random scripts, held against the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from anaphora.conformance.adapter import Prompt
from anaphora.conformance.checks.check import Check, Result, failing, ids
from anaphora.conformance.checks.identity import PLACEHOLDER
from anaphora.conformance.script import (
    INVALIDATE,
    RESET,
    abort,
    allocate,
    append,
    begin,
    computed,
    evict,
    finish,
    match,
    preempt,
    resume,
)
from anaphora.identity import Adapter, MediaSpan, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    from anaphora.conformance.adapter import MakeManager
    from anaphora.conformance.profile import Profile
    from anaphora.conformance.script import Op

NAMESPACES = (
    *[Namespace()] * 5,
    Namespace(salt="a"),
    Namespace(salt="b"),
    Namespace(adapter=Adapter("aa", name="s", path="/one")),
    Namespace(adapter=Adapter("bb", name="s", path="/two")),
)
"""Mostly the default one, so that prompts meet."""
OPTIONAL = ("preempt", "resume", "abort", "evict", "reset", "invalidate")


@dataclass(frozen=True)
class GeneratedCheck(Check):
    """`num_scripts` random scripts from one seed."""

    num_scripts: int = 40
    seed: int = 0
    name: str = "generated scripts"
    about: str = "Whatever requests come, grow, end and come back in whatever order, no rule is broken."
    source: str = ""

    def examine(self, make: MakeManager, profile: Profile, block_size: int) -> Result:
        """Play all; report the shortest part of the first one that fails."""
        manager = make(1, block_size)
        offered = frozenset(name for name in OPTIONAL if manager.offers(name))
        for number in range(self.num_scripts):
            random = Random(f"{self.seed}/{number}")
            num_blocks = random.choice([4, 5, 6, 8, 12])
            script = Writer(random, block_size, offered, profile.shareable == "at_allocation").script(80)
            failure = failing(make, profile, num_blocks, block_size, script)
            if failure is not None:
                detail = f"script {number} of seed {self.seed}, {num_blocks} blocks: {failure[0]}"
                return self.result("failed", detail, failure[1])
        return self.result("passed", f"{self.num_scripts} scripts")


class Writer:
    """Writes one random script.

    It knows nothing of how the manager will answer: what makes no sense then is skipped.

    computes_at_once: whether what is allocated is always computed before anything else happens, as engines promise
        whose blocks can be found from allocation on.
    """

    def __init__(self, random: Random, block_size: int, offered: frozenset[str], computes_at_once: bool) -> None:
        self._random = random
        self._size = block_size
        self._computes_at_once = computes_at_once
        self._names = [f"r{number}" for number in range(random.choice([2, 3, 5]))]
        self._prompts: list[Prompt] = []
        acts: list[tuple[Callable[[str], list[Op]], int]] = [
            (self._begin, 300),
            (self._compute, 0 if computes_at_once else 200),
            (self._generate, 200),
            (self._finish, 200),
            (self._match, 80),
        ]
        if "abort" in offered:
            acts.append((self._abort, 20))
        if {"preempt", "resume"} <= offered:
            acts += [(self._preempt, 30), (self._resume, 150)]
        if "evict" in offered:
            acts.append((self._evict, 5))
        if "reset" in offered:
            acts.append((self._reset, 5))
        if "invalidate" in offered:
            acts.append((self._invalidate, 5))
        self._acts, self._weights = zip(*acts, strict=True)

    def script(self, num_acts: int) -> list[Op]:
        """Return a script of so many acts, each one or a few operations."""
        acts = self._random.choices(self._acts, self._weights, k=num_acts)
        return [op for act in acts for op in act(self._random.choice(self._names))]

    def _prompt(self) -> Prompt:
        """Mostly one that shares a beginning of any length with an earlier one; else segments in any order, so that
        equal blocks come after unequal ones, under any namespace, now and then with an image."""
        random, size = self._random, self._size
        if self._prompts and random.random() < 0.7:
            earlier = random.choice(self._prompts)
            tokens = earlier.token_ids[: random.choice([len(earlier.token_ids), random.randint(size, 5 * size)])]
            media = tuple(item for item in earlier.media if item.offset + item.length <= len(tokens))
            if random.random() < 0.5:
                tokens += self._segments(1)[: random.randint(1, 2 * size)]
            prompt = Prompt(tokens, earlier.namespace, media)
        else:
            tokens = self._segments(random.randint(1, 4))
            tokens = tokens[: random.randint(1, len(tokens))]
            media = ()
            if random.random() < 0.25 and len(tokens) > size + 1:
                media = (MediaSpan(size - 1, 2, random.choice("XY")),)
                tokens = (*tokens[: size - 1], PLACEHOLDER, PLACEHOLDER, *tokens[size + 1 :])
            prompt = Prompt(tokens, random.choice(NAMESPACES), media)
        self._prompts.append(prompt)
        return prompt if random.random() > 0.05 else replace(prompt, reads_cache=False)

    def _segments(self, number: int) -> tuple[int, ...]:
        firsts = [self._random.choice([1000, 2000, 3000]) for _ in range(number)]
        return tuple(token for first in firsts for token in ids(first, self._size))

    def _compute_if_due(self, name: str) -> list[Op]:
        return [computed(name)] if self._computes_at_once or self._random.random() < 0.6 else []

    def _begin(self, name: str) -> list[Op]:
        chunk = self._random.choice([None, None, 1, self._size, self._random.randint(1, 3 * self._size)])
        return [begin(name, self._prompt(), chunk), *self._compute_if_due(name)]

    def _compute(self, name: str) -> list[Op]:
        return [computed(name, self._random.choice([None, 1, self._size]))]

    def _generate(self, name: str) -> list[Op]:
        random = self._random
        ops: list[Op] = []
        if random.random() < 0.7:
            ops.append(append(name, self._segments(1)[: random.choice([1, 1, self._size])]))
        ops.append(allocate(name, random.choice([None, None, 1, self._size, 2 * self._size])))
        return ops + self._compute_if_due(name)

    def _resume(self, name: str) -> list[Op]:
        return [resume(name), *self._compute_if_due(name)]

    def _finish(self, name: str) -> list[Op]:
        return [finish(name)]

    def _match(self, name: str) -> list[Op]:
        return [match(self._prompt())]

    def _abort(self, name: str) -> list[Op]:
        return [abort(name)]

    def _preempt(self, name: str) -> list[Op]:
        return [preempt(name)]

    def _evict(self, name: str) -> list[Op]:
        return [evict(name, self._random.randint(0, 3))]

    def _reset(self, name: str) -> list[Op]:
        return [RESET]

    def _invalidate(self, name: str) -> list[Op]:
        return [INVALIDATE]
