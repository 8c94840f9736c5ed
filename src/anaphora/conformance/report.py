"""Running the kit, and saying what came out."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anaphora.conformance.checks import Result, Status, all_checks
from anaphora.conformance.checks.choices import CHOICE_CHECKS
from anaphora.conformance.profile import PROFILES, Profile

if TYPE_CHECKING:
    from anaphora.conformance.adapter import MakeManager

WIDTH = 118


@dataclass(frozen=True)
class Report:
    """What every check found out.

    Failures are rules that no engine may break, and choices that are not the declared ones. Choices that are what the
    profile declares are no failures, whatever other engines chose.
    """

    profile: Profile
    block_size: int
    results: tuple[Result, ...]

    @property
    def failures(self) -> list[Result]:
        """The failed checks."""
        return [result for result in self.results if result.status == "failed"]

    def __str__(self) -> str:
        lines = [f"profile {self.profile.name}, blocks of {self.block_size} tokens", ""]
        width = max(len(result.check) for result in self.results)
        marks: dict[Status, str] = {"passed": "ok", "failed": "FAILED", "choice": "choice", "not applicable": "n/a"}
        for result in self.results:
            lines.append(f"{marks[result.status]:<7} {result.check:<{width}}  {result.detail}".rstrip())
        for result in self.failures:
            lines += ["", f"FAILED {result.check}", *_wrapped(result.about), *_wrapped(result.detail)]
            if result.source:
                lines += _wrapped(f"Reported in {result.source}.")
            lines += [f"    {step}" for step in result.script]
        counts = Counter(result.status for result in self.results)
        lines += ["", ", ".join(f"{counts[status]} {status}" for status in marks)]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the whole report as plain values."""
        return {
            "profile": {"name": self.profile.name, **self.profile.choices()},
            "block_size": self.block_size,
            "passed": not self.failures,
            "results": [
                {
                    "check": result.check,
                    "status": result.status,
                    "about": result.about,
                    "source": result.source,
                    "detail": result.detail,
                    "script": [step.as_json() for step in result.script],
                }
                for result in self.results
            ],
        }


def run(
    make: MakeManager, profile: Profile | None = None, *, block_size: int = 4, num_scripts: int = 40, seed: int = 0
) -> Report:
    """Run every check on managers that `make` makes.

    Args:
        profile: what the manager is said to choose; None finds out first, so that only rules can be broken.
        block_size: tokens in a block; scenarios are written in blocks, so any size will do.
        num_scripts, seed: how many generated scripts, and which.

    Cost: about 4,000 operations of the manager, more where checks fail, to shorten their scripts.
    """
    if profile is None:
        profile = detect_profile(make, block_size=block_size)
    results = [check.examine(make, profile, block_size) for check in all_checks(num_scripts, seed)]
    return Report(profile, block_size, tuple(results))


def detect_profile(make: MakeManager, *, block_size: int = 4) -> Profile:
    """Return the choices of a manager, found by trying it out, under the name of the ready profile that has the same,
    or "detected". What cannot be seen is None.

    Raises what the manager raises.
    """
    seen: dict[str, Any] = {check.name: check.observe(make, block_size)[0] for check in CHOICE_CHECKS}
    if seen["granularity"] is None:  # with blocks of one token there is no difference
        seen["granularity"] = "block"
    for profile in PROFILES.values():
        declared = profile.choices()
        if all(value is None or value == declared[name] for name, value in seen.items()):
            return Profile(name=profile.name, **seen)
    return Profile(name="detected", **seen)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")
