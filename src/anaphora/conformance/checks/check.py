"""A check: a fault that block managers have had, and what shows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from anaphora.conformance.adapter import Prompt
from anaphora.conformance.play import Play
from anaphora.conformance.script import NEEDED, Op, shrink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from anaphora.conformance.adapter import MakeManager
    from anaphora.conformance.play import Step
    from anaphora.conformance.profile import Profile
    from anaphora.conformance.violation import Violation

Status = Literal["passed", "failed", "choice", "not applicable"]

Scenario = tuple[int, "Iterable[Op | Sequence[Op]]"]
"""Blocks in the pool, and what to do to the manager."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a check found out.

    detail: for a failure the rule that was broken and how; for a choice what was chosen and what follows from it.
    script: for a failure the shortest way there that was found.
    """

    check: str
    status: Status
    about: str
    source: str
    detail: str = ""
    script: tuple[Step, ...] = ()


class Check(ABC):
    """A named check. `about` says what must hold; `source` is where a fault of this kind was reported, if it was."""

    name: str
    about: str
    source: str

    @abstractmethod
    def examine(self, make: MakeManager, profile: Profile, block_size: int) -> Result:
        """Try it on fresh managers."""

    def result(self, status: Status, detail: str = "", script: Iterable[Step] = ()) -> Result:
        """Return a result of this check."""
        return Result(self.name, status, self.about, self.source, detail, tuple(script))


@dataclass(frozen=True)
class ScriptCheck(Check):
    """A check that is a script in the smallest pool that shows the fault.

    build: block size -> the scenario. What is right is said by the model, and in the script itself by what is expected.
    applies: whether the profile makes the promise that is tested.
    """

    name: str
    about: str
    source: str
    build: Callable[[int], Scenario]
    applies: Callable[[Profile], bool]

    def examine(self, make: MakeManager, profile: Profile, block_size: int) -> Result:
        """Play the script; if a rule is broken, look for the shortest part that still breaks it."""
        if not self.applies(profile):
            return self.result("not applicable", f"not promised by profile {profile.name}")
        num_blocks, parts = self.build(block_size)
        script = flatten(parts)
        manager = make(num_blocks, block_size)
        missing = {op.kind for op in script if op.kind not in NEEDED and not manager.offers(op.kind)}
        if missing:
            return self.result("not applicable", f"not offered: {', '.join(sorted(missing))}")
        failure = failing(make, profile, num_blocks, block_size, script)
        if failure is None:
            return self.result("passed")
        return self.result("failed", str(failure[0]), failure[1])


class ScriptChecks(list[ScriptCheck]):
    """The script checks of a module, in the order of the report."""

    def add(
        self, source: str = "", applies: Callable[[Profile], bool] = lambda profile: True
    ) -> Callable[[Callable[[int], Scenario]], Callable[[int], Scenario]]:
        """Make a check of a function from the block size to a scenario. Its name is the function's, what must hold is
        said by the docstring."""

        def register(build: Callable[[int], Scenario]) -> Callable[[int], Scenario]:
            about = " ".join((build.__doc__ or "").split())
            self.append(ScriptCheck(build.__name__.replace("_", " "), about, source, build, applies))
            return build

        return register


def failing(
    make: MakeManager, profile: Profile, num_blocks: int, block_size: int, script: Sequence[Op]
) -> tuple[Violation, list[Step]] | None:
    """Play a script; return what it breaks and the shortest part of it that breaks the same rule, or None."""

    def outcome(ops: Sequence[Op]) -> tuple[Violation | None, list[Step]]:
        play = Play(make, num_blocks, block_size, profile)
        return play.play(ops), play.steps

    violation, steps = outcome(script)
    if violation is None:
        return None
    rule = violation.rule
    if rule == "expected":  # what a script's author expects holds for the whole script
        return violation, steps

    def still_fails(ops: Sequence[Op]) -> bool:
        found = outcome(ops)[0]
        return found is not None and found.rule == rule

    violation, steps = outcome(shrink([step.op for step in steps], still_fails))
    assert violation is not None, "a manager that does not do the same twice"
    return violation, steps


def flatten(parts: Iterable[Op | Sequence[Op]]) -> list[Op]:
    """Return operations and lists of operations as one list."""
    return [op for part in parts for op in ([part] if isinstance(part, Op) else part)]


def ids(first: int, num_tokens: int) -> tuple[int, ...]:
    """Return so many successive token ids."""
    return tuple(range(first, first + num_tokens))


def text(first: int, num_tokens: int) -> Prompt:
    """Return a prompt of successive token ids."""
    return Prompt(ids(first, num_tokens))
